// Copies a bias whose rows the copy engine cannot address to rows that begin at multiples of 16 bytes, for the kernels of long sequences on sm_90. A
// row becomes units of 8 numbers, with 0 behind its end. A thread makes a unit, and a warp 32 of them along the axis on which the bias lies close
// together:
//
//   ROWS_LIE_CLOSE 0   of one row; a unit inside it is read as aligned words of two numbers, five of them where the unit begins between two words
//   ROWS_LIE_CLOSE 1   of 32 rows, number by number
//
// The least time is that of its bytes: 45 MB read and 45 MB written for 192 matrices of 343 x 343. Compiled with ROWS_LIE_CLOSE and THREADS.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int UNIT = 8, WORDS = UNIT / 2;

// A unit with numbers of its row on both sides, whose columns lie beside each other.
__device__ __forceinline__ void copy_inside(uint4* to, const u16* from) {
    const bool between = u64(from) % 4;
    const u32* aligned = reinterpret_cast<const u32*>(from - between);
    u32 found[WORDS + 1], words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++) found[i] = aligned[i];
    found[WORDS] = between ? aligned[WORDS] : 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = between ? found[i] >> 16 | found[i + 1] << 16 : found[i];
    *to = make_uint4(words[0], words[1], words[2], words[3]);
}

// Four numbers of a row, of which the first `left` are there.
__device__ __forceinline__ u64 half_of(const u16* from, int left, long long column_stride) {
    u64 found = 0;
#pragma unroll ROWS_LIE_CLOSE ? 4 : 1
    for (int i = 0; i < UNIT / 2; i++)
        if (i < left) found |= u64(from[i * column_stride]) << 16 * i;
    return found;
}

// Any unit; left: the numbers of its row from its beginning on.
__device__ __forceinline__ void copy_each(uint4* to, const u16* from, int left, long long column_stride) {
    const u64 low = half_of(from, left, column_stride), high = half_of(from + UNIT / 2 * column_stride, left - UNIT / 2, column_stride);
    *to = make_uint4(u32(low), u32(low >> 32), u32(high), u32(high >> 32));
}

extern "C" __global__ void __launch_bounds__(THREADS, 8) bias_rows(
    const u16* bias, uint4* made, int windows, int heads, int queries, int keys, long long bias_batch, long long bias_head, long long bias_row,
    long long bias_column) {
    const int lane = threadIdx.x % 32, units = (keys + UNIT - 1) / UNIT, across = ROWS_LIE_CLOSE ? 32 : 1;
    const int strips = (queries + across - 1) / across;
    const long long all = (long long)windows * heads * strips;
    for (long long i = blockIdx.x * (long long)(THREADS / 32) + threadIdx.x / 32; i < all; i += gridDim.x * (long long)(THREADS / 32)) {
        const int plane = int(i / strips), row = int(i % strips) * across + (ROWS_LIE_CLOSE ? lane : 0);
        if (row >= queries) continue;
        const u16* from = bias + plane / heads * bias_batch + plane % heads * bias_head + row * bias_row;
        uint4* to = made + ((long long)plane * queries + row) * units;
        for (int unit = ROWS_LIE_CLOSE ? 0 : lane; unit < units; unit += ROWS_LIE_CLOSE ? 1 : 32) {
            const int left = keys - UNIT * unit;
            const u16* begin = from + UNIT * unit * bias_column;
            if (!ROWS_LIE_CLOSE && bias_column == 1 && unit && left > UNIT)
                copy_inside(to + unit, begin);
            else
                copy_each(to + unit, begin, left, bias_column);
        }
    }
}
