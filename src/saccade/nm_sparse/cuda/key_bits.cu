// A mask of keys as bits, and how far it reaches, for the fused kernels.
//
// bits[row][word]: bit i for key 32 word + i, 0 behind the last key. spans[row]: end of the keys that are seen, and of those before the first
// hidden one. A thread block reads one row of the mask.
//
// Shared memory:   | ends: the end that each warp found | wholes: the first hidden key that each warp found |
//
// The source uses only CUDA C++. Compiled with THREADS.
typedef unsigned int u32;

constexpr int WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS) key_bits(
    const unsigned char* mask, u32* bits, int* spans, int kv_len, int words, long long mask_row, long long mask_key) {
    __shared__ int ends[WARPS], wholes[WARPS];
    const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mask += row * mask_row;
    int end = 0, whole = kv_len;
    for (int word = warp; word < words; word += WARPS) {
        int key = 32 * word + lane;
        u32 seen = __ballot_sync(~0u, key < kv_len && mask[key * mask_key]);
        if (lane == 0) bits[(long long)row * words + word] = seen;
        if (seen) end = 32 * word + 32 - __clz(int(seen));
        if (~seen) whole = min(whole, 32 * word + __ffs(int(~seen)) - 1);
    }
    if (lane == 0) {
        ends[warp] = end;
        wholes[warp] = whole;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < WARPS; w++) {
        end = max(end, ends[w]);
        whole = min(whole, wholes[w]);
    }
    spans[2 * row] = end;
    spans[2 * row + 1] = whole;
}
