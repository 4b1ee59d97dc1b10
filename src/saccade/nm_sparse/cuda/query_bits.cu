// A mask of queries and keys as bits for the fused kernels, and which tiles and keys of it are seen at all.
//
// bits[problem][row][tile]: eight bytes for 64 keys, bit i of byte b for key 64 tile + 8 b + i; 0 behind the last key. tiles[problem][64 rows][64 keys]:
// 1 where one of these rows sees one of these keys. keys[problem][key]: 1 where a row sees the key; the launch fills it with zeros, and all writers
// write the same value.
//
//   a warp    a tile of 64 rows and 64 keys, four rows at a time: lane 8 r + b has byte b of row r
//
// The source uses only CUDA C++. Compiled with THREADS, CAUSAL (a row sees no key with a larger index), WIDE (eight keys are one load:
// they are adjacent, at a multiple of eight bytes in every row, and kv_len is a multiple of eight).
typedef unsigned long long u64;

constexpr int WARPS = THREADS / 32;
constexpr int BATCH = WIDE ? 8 : 2;  // loads of a lane, or groups of eight loads, before the first is used
constexpr u64 ONES = 0x0101010101010101, LOW_SEVEN = 0x7F7F7F7F7F7F7F7F, GATHER = 0x0102040810204080;

// the bytes of eight keys of a row; bytes behind the last key may hold anything
__device__ __forceinline__ u64 eight_keys(const unsigned char* row, int key, int kv_len, long long column) {
    if constexpr (WIDE) return *reinterpret_cast<const u64*>(row + min(key, kv_len - 8));
    u64 found = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) found |= u64(row[min(key + i, kv_len - 1) * column]) << (8 * i);
    return found;
}

extern "C" __global__ void __launch_bounds__(THREADS) query_bits(
    const unsigned char* mask, unsigned char* bits, unsigned char* tiles, unsigned char* keys, int heads, int rows, int kv_len, long long mask_batch,
    long long mask_head, long long mask_row, long long mask_column) {
    const int lane = threadIdx.x % 32, byte = lane % 8, tile = blockIdx.y * WARPS + threadIdx.x / 32;
    const int row_tiles = (rows + 63) / 64, key_tiles = (kv_len + 63) / 64;
    if (tile >= key_tiles) return;
    const int problem = blockIdx.x / row_tiles, first = blockIdx.x % row_tiles * 64 + lane / 8, key = 64 * tile + 8 * byte;
    mask += problem / heads * mask_batch + problem % heads * mask_head;
    bits += (long long)problem * rows * key_tiles * 8;
    u64 any = 0;  // a byte a key, 1 where a row sees it
    for (int begin = 0; begin < 64; begin += 4 * BATCH) {
        u64 seen[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) seen[i] = eight_keys(mask + min(first + begin + 4 * i, rows - 1) * mask_row, key, kv_len, mask_column);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int row = first + begin + 4 * i, left = (CAUSAL ? min(kv_len, row + 1) : kv_len) - key;  // keys that the row may see
            // bytes that are not 0 become 1
            u64 ones = (((seen[i] & LOW_SEVEN) + LOW_SEVEN) | seen[i]) >> 7 & ONES;
            if (left < 8) ones = left <= 0 ? 0 : ones & ((u64(1) << (8 * left)) - 1);
            if (row >= rows) continue;
            any |= ones;
            bits[((long long)row * key_tiles + tile) * 8 + byte] = ones * GATHER >> 56;  // no two products of ones share a bit
        }
    }
    const bool some = __any_sync(~0u, any != 0);
    if (lane == 0) tiles[(long long)blockIdx.x * key_tiles + tile] = some;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (any >> (8 * i) & 1) keys[(long long)problem * kv_len + key + i] = 1;
}
