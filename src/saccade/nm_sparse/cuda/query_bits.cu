// A mask of queries and keys as bits for the fused kernels, and which tiles and keys of it are seen at all.
//
// bits[problem][row][tile]: two words for 64 keys, bit i of the first for key 64 tile + i; 0 behind the last key. tiles[problem][64 rows][64 keys]: 1
// where one of these rows sees one of these keys. keys[problem][key]: 1 where a row sees the key; the launch fills it with zeros, and all who write it
// write the same.
//
//   a warp    a tile of 64 rows and 64 keys: lane i reads keys i and 32 + i of each row, and stores the words of rows i and 32 + i
//
// There is no instruction but those of CUDA C++. Compiled with THREADS, CAUSAL (a row sees no key with a larger index).
typedef unsigned int u32;

constexpr int WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS) query_bits(
    const unsigned char* mask, uint2* bits, unsigned char* tiles, unsigned char* keys, int heads, int rows, int kv_len, long long mask_batch,
    long long mask_head, long long mask_row, long long mask_column) {
    const int lane = threadIdx.x % 32, tile = blockIdx.y * WARPS + threadIdx.x / 32;
    const int row_tiles = (rows + 63) / 64, key_tiles = (kv_len + 63) / 64;
    if (tile >= key_tiles) return;
    const int problem = blockIdx.x / row_tiles, first = blockIdx.x % row_tiles * 64, key = 64 * tile + lane;
    mask += problem / heads * mask_batch + problem % heads * mask_head + key * mask_column;
    uint2 own[2] = {make_uint2(0, 0), make_uint2(0, 0)};
    bool any[2] = {false, false};
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll 8
        for (int i = 0; i < 32; i++) {
            const int row = first + 32 * half + i, end = row >= rows ? 0 : CAUSAL ? min(kv_len, row + 1) : kv_len;
            const unsigned char* at = mask + row * mask_row;
            const bool low = key < end && at[0], high = key + 32 < end && at[32 * mask_column];
            const u32 lows = __ballot_sync(~0u, low), highs = __ballot_sync(~0u, high);
            if (lane == i) own[half] = make_uint2(lows, highs);
            any[0] |= low;
            any[1] |= high;
        }
        const int row = first + 32 * half + lane;
        if (row < rows) bits[((long long)problem * rows + row) * key_tiles + tile] = own[half];
    }
    const bool seen = __any_sync(~0u, any[0] || any[1]);
    if (lane == 0) tiles[(long long)blockIdx.x * key_tiles + tile] = seen;
    if (any[0]) keys[(long long)problem * kv_len + key] = 1;
    if (any[1]) keys[(long long)problem * kv_len + key + 32] = 1;
}
