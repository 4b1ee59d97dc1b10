// The values that the fused kernels may multiply by weights of 0, with a bias.
//
// shown[batch][key head][key]: 1 where all numbers of the value are finite, or where a query of the heads that share the key sees it: by the bias, the
// block mask and causality together. So the bias is read only for keys whose values hold an infinity or NaN.
//
//   a warp    a key of a key head: its value, then the bias of 32 queries at a time, until one sees the key
//
// The source uses only CUDA C++. Compiled with THREADS, CAUSAL, BLOCK (rows and columns of a tile of the block mask, 0 without one),
// VALUE_BYTES and BIAS (bytes of a number, 2 or 4), EXPONENT (the bits of a value that are all ones in an infinity or NaN), HIDDEN (the bits of a bias
// of -inf).
typedef unsigned int u32;

template <int BYTES> struct Word { typedef u32 Type; };
template <> struct Word<2> { typedef unsigned short Type; };
typedef Word<VALUE_BYTES>::Type Value;
typedef Word<BIAS>::Type Bias;

constexpr int WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS) shown_values(
    const Value* value, const Bias* bias, unsigned char* shown,
#if BLOCK
    const unsigned char* block_mask, long long block_batch, long long block_head, long long block_row, long long block_column,
#endif
    int kv_heads, int kv_len, int head_dim, int heads, int rows, long long value_batch, long long value_head, long long value_row, long long bias_batch,
    long long bias_head, long long bias_row) {
    // heads, rows: over how many heads of a key head, and queries, what is seen differs
    const int lane = threadIdx.x % 32, key = blockIdx.y * WARPS + threadIdx.x / 32;
    if (key >= kv_len) return;
    const int batch = blockIdx.x / kv_heads, head = blockIdx.x % kv_heads;
    value += batch * value_batch + head * value_head + key * value_row;
    bool odd = false;
    for (int i = lane; i < head_dim; i += 32) odd |= (value[i] & EXPONENT) == EXPONENT;
    bool seen = !__any_sync(~0u, odd);
    bias += batch * bias_batch + (long long)head * heads * bias_head + key;
#if BLOCK
    block_mask += batch * block_batch + (long long)head * heads * block_head + key / BLOCK * block_column;
#endif
    for (int first = 0; !seen && first < heads * rows; first += 32) {
        const int n = first + lane, row = n % rows;
        bool sees = n < heads * rows && (!CAUSAL || row >= key);
#if BLOCK
        sees = sees && block_mask[n / rows * block_head + row / BLOCK * block_row];
#endif
        seen = __any_sync(~0u, sees && bias[n / rows * bias_head + row * bias_row] != HIDDEN);
    }
    if (lane == 0) shown[(long long)blockIdx.x * kv_len + key] = seen;
}
