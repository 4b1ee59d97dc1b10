// Softmax of a warp's 16 rows, tile by tile: selection, weights as the sparse operand, the reference they are relative to, the result.
//
// Lane 4g + t owns rows g and g + 8, written [h] for h = 0, 1, and of each SPAN = 4 RUN keys the RUN from RUN t on: 16 and four of 16-bit
// numbers, two neighbours in each of two column groups of 8 of the accumulator, and SCORE_GROUP(q, j) names the column group of keys
// 16 q + 4 t + 2 j + {0, 1}; 8 and two of TF32, whose two are as the accumulator has them.
//
// Weights are exp(s - r) for a reference r that is not the running maximum: the largest score of the first tile, raised (and O and the
// sum rescaled) only when the weights of a lane in one tile add up to more than LIMIT. So no maximum is taken in the loop: r only has to keep weights
// inside the format, and the sum, which is needed anyhow, shows whether it does. NaN fails the comparison too and comes out of `raise`.
//
// With a bias, scores become scale * Q K^T + bias in place, before the selection; then exponents are (s - r) * log2(e), the difference first, and the
// reference is not in base 2: next to finfo.min, which models use for hidden keys, s * log2(e) would overflow. A score of -inf is hidden.
//
// Compiled with HEAD_DIM, BLOCK_KV, PAIRS, CAUSAL, DROPOUT, KEYS (a mask of keys, all queries alike), QUERY_BITS (a mask that differs between queries
// or heads, with the causal edge in it), BIAS (bytes of a number of the bias: 2, of the type of Q, or 4; 0 without one), STORES (the selection),
// SELECTION, TF32, OVERLAP (products read the operand while the next is made).
#pragma once
#include "accumulator.cuh"
#include "metadata.cuh"
#include "numbers.cuh"
#include "philox.cuh"
#include "selection.cuh"

constexpr int RUN = TF32 ? 2 : 4;  // 8 bytes of adjacent keys: the group that one code of metadata describes
constexpr int SPAN = 4 * RUN;
constexpr int SPANS = BLOCK_KV / SPAN;
constexpr int STEPS = SPANS / 2;  // sparse products over keys
static_assert(!(KEYS && (CAUSAL || QUERY_BITS)), "a mask of keys excludes is_causal, which makes it one of queries");
static_assert(!QUERY_BITS || (BLOCKS && BLOCK_KV == 64), "a tile is two words of bits, and hidden tiles are a block mask");
static_assert(BLOCK_KV % 32 == 0 && BLOCK_KV >= 64, "tiles hold whole words of the selection, and no three hold edges of 64 rows");

constexpr float LIMIT = 16384.0f;  // a weight times this still fits half precision
// offset of a row that has seen no key: finite, so that -inf plus it is no NaN; without a bias scores are only products, and none is as large
constexpr float UNSEEN = BIAS ? LARGEST : 1e30f;

struct Sizes {
    int heads, group;        // query heads; query heads of a key head
    int q_len, kv_len;       // kv_len: keys that some query can see
    int words, counters;     // of the stored selection and of dropout, a query
    int head_dim, problems;  // D; B * H
    int present;             // bits 0, 1: queries differ along batch, heads; 2, 3: keys; 4, 5: values
    int opaque_one;          // always 1, which the compiler cannot know: see `Rows::retry` and `Rows::accept`
    long long out_batch, out_head, out_row;
    long long mask_batch, mask_head, mask_row;  // of the block mask; its columns are adjacent
    float scale, spared;     // of exponents, base 2; 1 / (1 - dropout_p)
    u32 threshold;           // a weight survives if its draw of 24 bits is no less
    // KEYS (key_bits.cu): words of 32 keys, bit 1 for one that is seen; spans: end of the seen keys, and of those before the first hidden one
    const u32* key_bits;
    const int* key_spans;
    int key_words, keys_batch;  // words of a row; 1 if each batch row has one, 0 if all share one
    int keys_head, keys_query;  // QUERY_BITS: key_bits has rows of key_words for queries, so many from head to head and query to query
    // BIAS: columns are adjacent, rows begin at multiples of 16 bytes, and as many columns, a multiple of 16 bytes too, may be read
    const unsigned char* bias;
    long long bias_batch, bias_head, bias_row;  // in numbers
    int bias_columns;
    float score_scale;  // of products, to which the bias is added; `scale` is not read
    int whole, parts;   // SPLIT: blocks of queries done whole; parts of each of the others

    __device__ __forceinline__ int key_row(int problem) const { return KEYS ? problem / heads * keys_batch : 0; }
};

constexpr int BIAS_WORDS = RUN * (BIAS ? BIAS : 4) / 4;  // a lane's run
struct alignas(4 * BIAS_WORDS) BiasRun {
    u32 words[BIAS_WORDS];

    __device__ __forceinline__ float number(int c) const {
        if constexpr (BIAS == 4) return __uint_as_float(words[c]);
        float2 pair = floats_of(words[c / 2]);
        return c % 2 ? pair.y : pair.x;
    }
};

__device__ __forceinline__ BiasRun load_run(const unsigned char* at) {
    BiasRun run;
    if constexpr (BIAS_WORDS == 4) {
        uint4 four = __ldg(reinterpret_cast<const uint4*>(at));
        run.words[0] = four.x, run.words[1] = four.y, run.words[BIAS_WORDS - 2] = four.z, run.words[BIAS_WORDS - 1] = four.w;
    } else {
        uint2 two = __ldg(reinterpret_cast<const uint2*>(at));
        run.words[0] = two.x, run.words[1] = two.y;
    }
    return run;
}

// the weight of an exponent: in base 2, except with a bias
__device__ __forceinline__ float weight_of(float exponent) {
    return exp2_fast(BIAS ? exponent * LOG2E : exponent);
}

struct Rows {
    const Sizes& sizes;
    int t, problem, first_query;  // first_query: of the 64 queries of four warps; TALL: of the warp's 16
    int key_row = 0;              // of the mask of keys

    float scores[BLOCK_KV / 2];  // [column group][h][2 keys]
    float out[HEAD_DIM / 2];     // [8 columns][h][2 columns]
    u32 packed[2 * SPANS];       // weights as the sparse operand, [span][h]
    u32 metadata[STEPS];
    u32 words[SPANS];  // codes of the tile in hand, this lane's; both rows in one
    u32 selected[2 * SPANS];  // OVERLAP: weights of the tile in hand, while products read `packed`
    float offset[2], sum[2], added[2];  // offset: -reference, in the exponent; added: what the tile in hand adds to the sum
    u64 seed;           // DROPOUT
    const uint2* bits;  // QUERY_BITS: of row g; those of row g + 8 lie `below` further
    int below;
    uint2 visible[2];           // of the tile in hand
    const unsigned char* bias;  // BIAS: of row g, this lane's first key; row g + 8 lies `bias_below` bytes further
    long long bias_below;
    BiasRun biases[2 * SPANS];  // of the tile in hand, [span][h]
    float least;  // BIAS and STORES: exponent of a kept score of the tile in hand: -inf where a hidden key is kept

    __device__ __forceinline__ Rows(const Sizes& sizes) : sizes(sizes), t(threadIdx.x % 4) {}

    __device__ __forceinline__ void begin(int for_problem, int from_query) {
        problem = for_problem;
        first_query = from_query;
        key_row = sizes.key_row(problem);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            offset[h] = UNSEEN;
            sum[h] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i] = 0.0f;
        if constexpr (QUERY_BITS) find_bits();
        if constexpr (BIAS) find_bias();
    }

    // the factor of scores in exponents
    __device__ __forceinline__ float exponent_scale() const { return BIAS ? 1.0f : sizes.scale; }

    // Rows behind the last query are not stored; they read a bias that exists.
    __device__ __forceinline__ void find_bias() {
        long long index = problem / sizes.heads * sizes.bias_batch + problem % sizes.heads * sizes.bias_head;
        index += min(row(0), sizes.q_len - 1) * sizes.bias_row;
        bias = sizes.bias + index * BIAS;
        bias_below = row(1) < sizes.q_len ? 8 * BIAS * sizes.bias_row : 0;
    }

    // BIAS: requests the bias of a tile before its products, which hide the latency. Behind the last key there may be none to read.
    __device__ __forceinline__ void ask_bias(int tile) {
        if constexpr (!BIAS) return;
#pragma unroll
        for (int q = 0; q < SPANS; q++) {
            int column = min(tile * BLOCK_KV + SPAN * q + RUN * t, sizes.bias_columns - RUN);
#pragma unroll
            for (int h = 0; h < 2; h++) biases[2 * q + h] = load_run(bias + h * bias_below + BIAS * column);
        }
    }

    // BIAS: products -> scores
    __device__ __forceinline__ void add_bias() {
        if constexpr (!BIAS) return;
#pragma unroll
        for (int q = 0; q < SPANS; q++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int c = 0; c < RUN; c++) {
                    float& s = scores[place_of(q, h, c)];
                    s = fmaf(s, sizes.score_scale, biases[2 * q + h].number(c));
                }
    }

    // Rows behind the last query are not stored; they read bits that exist.
    __device__ __forceinline__ void find_bits() {
        long long index = (long long)(problem / sizes.heads) * sizes.keys_batch + (long long)(problem % sizes.heads) * sizes.keys_head;
        index += (long long)min(row(0), sizes.q_len - 1) * sizes.keys_query;
        bits = reinterpret_cast<const uint2*>(sizes.key_bits + index * sizes.key_words);
        below = row(1) < sizes.q_len ? 4 * sizes.keys_query * sizes.key_words : 0;
    }

    __device__ __forceinline__ int row(int h) const {
        int x = thread_of();
        return first_query + (TALL ? 0 : x % 128 / 32 * 16) + x % 32 / 4 + 8 * h;
    }
    // the last key that a row sees
    __device__ __forceinline__ int last_key(int h) const {
        return CAUSAL ? min(row(h), sizes.kv_len - 1) : sizes.kv_len - 1;
    }

    // the last key of a tile that a row sees, counted from this lane's first key; opaque_one: see `retry`
    template <bool MASKED>
    __device__ __forceinline__ int edge(int tile, int h, float opaque_one = 1.0f) const {
        if (!MASKED || KEYS || QUERY_BITS) return 0;
        int last = last_key(h) - tile * BLOCK_KV - RUN * t;
        // The value passes through a shuffle, so that ptxas cannot know that it is the same for the other rows: it would compare for all rows
        // together, and keep 64 results.
        if (TALL > 1 && !CAUSAL) last = __shfl_xor_sync(~0u, last, 0);
        if (TALL) last *= int(opaque_one);  // not on sm_90a: the product would change the schedule of the kernel there
        return last;
    }

    // QUERY_BITS: requests the bits of a tile before its products, which take longer than the load
    __device__ __forceinline__ void ask_bits(int tile) {
        if constexpr (!QUERY_BITS) return;
#pragma unroll
        for (int h = 0; h < 2; h++) visible[h] = __ldg(bits + h * below + tile);
    }

    // KEYS, QUERY_BITS: which of the keys SPAN q + RUN t on of a tile row h sees, from bit 0 on
    template <bool MASKED>
    __device__ __forceinline__ u32 seen(int tile, int q, int h) const {
        if constexpr (QUERY_BITS) return (SPAN * q < 32 ? visible[h].x : visible[h].y) >> (SPAN * q % 32 + RUN * t);
        if (!KEYS || !MASKED) return 0;
        int key = tile * BLOCK_KV + SPAN * q;
        return __ldg(sizes.key_bits + key_row * sizes.key_words + key / 32) >> (SPAN * q % 32 + RUN * t);
    }

    // where the score of key SPAN q + RUN t + c of the tile lies
    static constexpr __device__ __forceinline__ int place_of(int q, int h, int c) {
        return (TF32 ? q : SCORE_GROUP(q, c / 2)) * 4 + 2 * h + c % 2;
    }

    // score of key SPAN q + RUN t + c of the tile, -inf where the row does not see it
    template <bool MASKED>
    __device__ __forceinline__ float score(int q, int h, int c, int edge, u32 seen, float opaque_one) const {
        float s = opaque_one * scores[place_of(q, h, c)];
        return MASKED && (KEYS || QUERY_BITS ? !(seen >> c & 1) : SPAN * q + c > edge) ? MINUS_INFINITY : s;
    }

    // Word i of the next operand: `packed` itself, where no product reads that meanwhile. A function that returned a reference to the word gave
    // the kernel of sm_90a another schedule.
    __device__ __forceinline__ void set_weights(int i, u32 word) {
        if constexpr (OVERLAP)
            selected[i] = word;
        else
            packed[i] = word;
    }

    // the weights of a tile as the next operand, and what they add to the sum
    template <bool MASKED>
    __device__ __forceinline__ void select(int tile, float opaque_one = 1.0f) {
        select_spans<MASKED>(tile, 0, SPANS, opaque_one);
    }

    // the same of the spans begin .. end - 1 of a tile
    template <bool MASKED>
    __device__ __forceinline__ void select_spans(int tile, int begin, int end, float opaque_one) {
        int edges[2] = {edge<MASKED>(tile, 0, opaque_one), edge<MASKED>(tile, 1, opaque_one)};
        added[0] = added[1] = 0.0f;
        if constexpr (BIAS && STORES) least = 0.0f;
#pragma unroll
        for (int q = begin; q < end; q++) {
            float codes = CODES_BEGIN;
            u32 mine = seen<MASKED>(tile, q, 0);
            select_row<MASKED, 0>(tile, q, codes, edges[0], mine, opaque_one);
            if (QUERY_BITS) mine = seen<MASKED>(tile, q, 1);
            select_row<MASKED, 1>(tile, q, codes, edges[1], mine, opaque_one);
            words[q] = placed(codes, t);
        }
    }

    __device__ __forceinline__ void note_least(float exponent) {
        if constexpr (BIAS && STORES) least = fminf(least, exponent);
    }

#if TF32
    template <bool MASKED, int H, int UNIT = H ? 65536 : 1>
    __device__ __forceinline__ void select_row(int tile, int q, float& codes, int edge, u32 seen, float opaque_one) {
        float x;
        select_pair<UNIT>(
            score<MASKED>(q, H, 0, edge, seen, opaque_one), score<MASKED>(q, H, 1, edge, seen, opaque_one), exponent_scale(), offset[H], x, codes);
        note_least(x);
        x = weight_of(x);
        added[H] += x;
        if constexpr (DROPOUT) drop(tile, q, H, __float_as_uint(codes) >> (16 * H), x);
        set_weights(2 * q + H, to_tf32(x));
    }

    // two lanes draw the same four words: their two pairs are four keys
    __device__ __forceinline__ void drop(int tile, int q, int h, u32 code, float& x) const {
        u32 four = u32((tile * BLOCK_KV + SPAN * q) / 4 + t / 2);
        Words drawn = philox(seed, u32(row(h)) * u32(sizes.counters) + four, problem);
        u32 first = t & 1 ? drawn.word[2] : drawn.word[0], second = t & 1 ? drawn.word[3] : drawn.word[1];
        if ((code & 2 ? second : first) >> 8 < sizes.threshold) x = 0.0f;
    }
#else
    template <bool MASKED, int H, int UNIT = H ? 65536 : 1>
    __device__ __forceinline__ void select_row(int tile, int q, float& codes, int edge, u32 seen, float opaque_one) {
        float s[4], x, y;
#pragma unroll
        for (int c = 0; c < 4; c++) s[c] = score<MASKED>(q, H, c, edge, seen, opaque_one);
        select_four<UNIT>(s[0], s[1], s[2], s[3], exponent_scale(), offset[H], x, y, codes);
        note_least(x);
        note_least(y);
        x = weight_of(x);
        y = weight_of(y);
        if constexpr (SELECTION == SELECT_EARLY) {
            added[H] += x;
            added[H] += y;
        } else {
            added[H] += x + y;
        }
        if constexpr (DROPOUT) drop(tile, q, H, __float_as_uint(codes) >> (16 * H), x, y);
        set_weights(2 * q + H, pack(x, y));
    }

    // word j % 4 of counter (row * ceil(Tk / 4) + j / 4, problem) decides on key j: one draw serves the four keys of a lane
    __device__ __forceinline__ void drop(int tile, int q, int h, u32 code, float& x, float& y) const {
        u32 four = u32((tile * BLOCK_KV + 16 * q) / 4 + t);
        Words drawn = philox(seed, u32(row(h)) * u32(sizes.counters) + four, problem);
        u32 low = code & 2 ? drawn.word[2] : code & 1 ? drawn.word[1] : drawn.word[0];
        u32 high = code & 8 ? (code & 4 ? drawn.word[3] : drawn.word[2]) : drawn.word[1];
        if (low >> 8 < sizes.threshold) x = 0.0f;
        if (high >> 8 < sizes.threshold) y = 0.0f;
    }
#endif

    // Raises the reference so that no score of the tile is above it, and rescales O and the sum to it.
    template <bool MASKED>
    __device__ __forceinline__ void raise(int tile, int begin, int end, float opaque_one) {
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int last = edge<MASKED>(tile, h, opaque_one);
            float most = MINUS_INFINITY;
#pragma unroll
            for (int q = begin; q < end; q++) {
                u32 mine = seen<MASKED>(tile, q, h);
#pragma unroll
                for (int c = 0; c < RUN; c++) most = max_nan(most, score<MASKED>(q, h, c, last, mine, opaque_one));
            }
            float lower = min_nan(offset[h], quad_max(most) * -exponent_scale());
            factor[h] = weight_of(lower - offset[h]);
            offset[h] = lower;
            sum[h] *= factor[h];
        }
        scale_rows(out, factor);
    }

    // whether a weight of these rows is too large for its format, or NaN
    __device__ __forceinline__ bool overflows() const { return __any_sync(~0u, too_much()); }
    __device__ __forceinline__ bool too_much() const { return !(added[0] <= LIMIT && added[1] <= LIMIT); }

    // Recomputes weights that were too large, with a reference that fits.
    template <bool MASKED>
    __device__ __forceinline__ void retry(int tile, int begin = 0, int end = SPANS) {
        // Scores are multiplied by a 1 that the compiler cannot know. Otherwise ptxas keeps the results of the first selection's comparisons for
        // this one, packed into registers: "2:4" on sm_90a at D = 128 then has 169 LOP3 instructions in place of 80, and spills 24 bytes.
        float opaque_one = float(sizes.opaque_one);
        if constexpr (QUERY_BITS) {
            // For the same reason: with results of bits kept from the first selection on, builds with dropout spilled 40 to 70 bytes.
#pragma unroll
            for (uint2& bits : visible) bits = make_uint2(bits.x * u32(sizes.opaque_one), bits.y * u32(sizes.opaque_one));
        }
        raise<MASKED>(tile, begin, end, opaque_one);
        select_spans<MASKED>(tile, begin, end, opaque_one);
    }

    // The weights of the tile in hand become the operand, which no product may be reading at that time.
    __device__ __forceinline__ void accept(int begin = 0, int end = STEPS) {
        sum[0] += added[0];
        sum[1] += added[1];
        if constexpr (OVERLAP) {
            // Multiplied by the 1 that the compiler cannot know: it would remove a plain copy. `select` would then write registers that the running
            // products read, and ptxas would wait after each product.
#pragma unroll
            for (int i = 0; i < 2 * SPANS; i++) packed[i] = selected[i] * u32(sizes.opaque_one);
        }
        // This is not done in `select`: the shuffles would make ptxas keep results of comparisons in registers until after them.
#pragma unroll
        for (int step = begin; step < end; step++) metadata[step] = share_metadata(words[2 * step], words[2 * step + 1], t);
    }

    // which keys of the i-th 32 of the tile the bias does not hide from row g + 8 h; all lanes of a quad get it
    __device__ __forceinline__ u32 unhidden(int i, int h) const {
        u32 bits = 0;
#pragma unroll
        for (int q = 32 * i / SPAN; q < 32 * (i + 1) / SPAN; q++)
#pragma unroll
            for (int c = 0; c < RUN; c++)
                if (scores[place_of(q, h, c)] != MINUS_INFINITY) bits |= 1u << (SPAN * q % 32 + RUN * t + c);
        bits |= __shfl_xor_sync(~0u, bits, 1);
        return bits | __shfl_xor_sync(~0u, bits, 2);
    }

    // lane t = 0 stores the words of row g, lane t = 1 those of row g + 8
    __device__ __forceinline__ void store_selection(int tile, unsigned* kept) const {
        // A group with fewer visible keys than it keeps has taken hidden ones, with weights of 0. Other bits record the causal edge and masks.
        const bool hidden = BIAS && __any_sync(~0u, least == MINUS_INFINITY);
        int query = row(t & 1), word = tile * (BLOCK_KV / 32), last = last_key(t & 1) - 32 * word;
        bool stores = t < 2 && query < sizes.q_len;
        unsigned* to = kept + ((long long)problem * sizes.q_len + query) * sizes.words + word;
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 32; i++) {
            u32 bits;
            if constexpr (TF32)
                bits = selection_of_pairs(metadata[2 * i], t) | selection_of_pairs(metadata[2 * i + 1], t) << 16;
            else
                bits = selection_bits(metadata[i], t);
            if constexpr (QUERY_BITS) {
                const uint2 own = t & 1 ? visible[1] : visible[0];
                bits &= i ? own.y : own.x;
            } else {
                bits &= KEYS ? __ldg(sizes.key_bits + key_row * sizes.key_words + word + i) : bits_up_to(last - 32 * i);
            }
            if (hidden) {
                u32 first = unhidden(i, 0), second = unhidden(i, 1);
                bits &= t & 1 ? second : first;
            }
            if (stores && word + i < sizes.words) to[i] = bits;
        }
    }

    __device__ __forceinline__ float log_of(float total, int h) const {
        return BIAS ? log2_fast(total) * LN2 - offset[h] : (log2_fast(total) - offset[h]) * LN2;
    }

    __device__ __forceinline__ void store(Number* to, float* lse) {
        int batch = problem / sizes.heads, head = problem % sizes.heads;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int query = row(h);
            float total = quad_sum(sum[h]);
            // compared with 0, not tested by > 0: a NaN sum must stay NaN
            float inverse = total == 0.0f ? 0.0f : sizes.spared / total;
            Number* at = to + batch * sizes.out_batch + head * sizes.out_head + query * sizes.out_row;
            bool there = query < sizes.q_len;
            if constexpr (TF32 || HEAD_DIM % 32) {
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 8; i++) {
                    int column = 8 * i + 2 * t;
                    if (there && column < sizes.head_dim) store_pair(at + column, out[4 * i + 2 * h] * inverse, out[4 * i + 2 * h + 1] * inverse);
                }
            } else {
                store_row<HEAD_DIM>(out, h, inverse, at, sizes.head_dim, there);
            }
            if (there && t == 0)
                lse[(long long)problem * sizes.q_len + query] = total == 0.0f ? MINUS_INFINITY : log_of(total, h);
        }
    }
};
