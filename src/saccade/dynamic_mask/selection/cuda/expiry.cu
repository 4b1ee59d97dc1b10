// Expiry of every key, by searching sorted chunks. See expiry_cuda.py.
//
//   expiry_sort    a chunk of CHUNK keys in falling order of (score, position), with the tree of its merge sort
//   expiry_find    each key of a chunk: how many rank above it, chunk by chunk, until the count reaches `keep`; then the position within that chunk
//
// Shared memory of expiry_sort:   | entries: CHUNK | the other half of the merges: CHUNK | lefts: LEVELS x CHUNK |
// Shared memory of expiry_find:   | ranks of BATCH chunks, of even turns | ranks of BATCH chunks, of odd turns |
//
// The runs that a merge sort makes of a chunk are ranges of positions in falling order. Each place of a merged run holds the number of earlier
// entries that came from the left half: so "the c-th position among the best m entries" is one walk down the runs.
//
// Macros: CHUNK (a power of two), LEVELS (its logarithm), SEARCHERS (threads that search, a divisor of CHUNK), BATCH (chunks that are searched
// side by side). The source uses only CUDA C++ and the instructions of dependent.cuh.
#include "dependent.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

extern __shared__ __align__(128) u8 shared_memory[];

// the stored parts of a sorted chunk
struct Tree {
    u32* ranks;   // [CHUNK] in falling order; 0 for keys that are not there
    u16* order;   // [CHUNK] their places in the chunk
    u16* lefts;   // [LEVELS][CHUNK] see above

    __device__ __forceinline__ Tree(u8* trees, long long slot) {
        u8* at = trees + slot * (CHUNK * (6 + 2 * LEVELS));
        ranks = reinterpret_cast<u32*>(at);
        order = reinterpret_cast<u16*>(at + 4 * CHUNK);
        lefts = reinterpret_cast<u16*>(at + 6 * CHUNK);
    }
};

struct Chunk {
    int first, count, end;  // position of its first key; its valid keys; valid keys of the row

    __device__ __forceinline__ Chunk(int slot, int chunks, const int* lengths, int heads, int kv_len) {
        first = slot % chunks * CHUNK;
        end = lengths ? min(lengths[slot / chunks / heads], kv_len) : kv_len;
        count = min(max(end - first, 0), CHUNK);
    }
};

// A score as an integer of the same order, with -0.0 equal to 0.0, at least 1. NaN, which the caller may detect later, has a place too.
__device__ __forceinline__ u32 rank_of(float score) {
    u32 bits = __float_as_uint(score + 0.0f), rank = bits >> 31 ? ~bits : bits | 0x80000000u;
    return rank ? rank : 1u;
}

// how many of the `length` entries of a falling list, a power of two, are above `entry`
__device__ __forceinline__ int count_above(const u64* list, int length, u64 entry) {
    int found = 0;
    for (int step = length; step > 0; step /= 2)
        if (found + step <= length && list[found + step - 1] > entry) found += step;
    return found;
}

// A chunk's entries (rank, place) in falling order, in `entries` or behind it, and its tree.
__device__ __forceinline__ const u64* sort_chunk(u64* entries, u64 mine, u16* lefts) {
    const int i = threadIdx.x;
    u64 *from = entries, *to = entries + CHUNK;
    from[i] = mine;
    __syncthreads();
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        const int length = 1 << level, within = i & (length - 1);
        u64 entry = from[i];
        int others = count_above(from + ((i ^ length) & -length), length, entry);
        int place = (i & -2 * length) + within + others;
        to[place] = entry;
        lefts[level * CHUNK + place] = u16(i & length ? others : within);
        __syncthreads();
        u64* spare = from;
        from = to;
        to = spare;
    }
    return from;
}

// trees[slot]; start: each key's position; stop: kv_len for valid keys, their own position for others. strange: an int that becomes 1 if
// a score is not finite, padding included, or null. Block: one chunk of one row.
extern "C" __global__ void __launch_bounds__(CHUNK) expiry_sort(
    const float* scores, const int* lengths, u8* trees, int* start, int* stop, int* strange, int heads, int kv_len, int chunks) {
    let_next_kernel_start();
    const int slot = blockIdx.x, i = threadIdx.x;
    const Chunk chunk(slot, chunks, lengths, heads, kv_len);
    const long long at = (long long)(slot / chunks) * kv_len + chunk.first + i;
    const bool there = chunk.first + i < kv_len, valid = i < chunk.count;
    const float score = there ? scores[at] : 0.0f;
    if (there) {
        start[at] = chunk.first + i;
        stop[at] = valid ? kv_len : chunk.first + i;
        if (strange && (__float_as_uint(score) & 0x7f800000u) == 0x7f800000u) *strange = 1;
    }
    if (chunk.count == 0) return;
    u64* entries = reinterpret_cast<u64*>(shared_memory);
    u16* lefts = reinterpret_cast<u16*>(entries + 2 * CHUNK);
    const u64* sorted = sort_chunk(entries, u64(valid ? rank_of(score) : 0u) << 32 | u32(i), lefts);
    const Tree tree(trees, slot);
    tree.ranks[i] = u32(sorted[i] >> 32);
    tree.order[i] = u16(sorted[i]);
    // `lefts` was written in any order, so it is copied from shared memory in order
    for (int n = i; n < LEVELS * CHUNK / 8; n += CHUNK) reinterpret_cast<uint4*>(tree.lefts)[n] = reinterpret_cast<uint4*>(lefts)[n];
}

// How many of the CHUNK ranks of each falling list are above its threshold. Each step of a search waits for the one before, so BATCH lists are
// searched in an interleaved loop. The loads are volatile: otherwise the compiler would search one list after another, which takes 2.5 times as long.
__device__ __forceinline__ void search(const volatile u32 (*lists)[CHUNK], const u32 (&thresholds)[BATCH], int (&found)[BATCH]) {
#pragma unroll
    for (int n = 0; n < BATCH; n++) found[n] = 0;
#pragma unroll
    for (int step = CHUNK / 2; step > 0; step /= 2) {
#pragma unroll
        for (int n = 0; n < BATCH; n++)
            if (lists[n][found[n] + step - 1] > thresholds[n]) found[n] += step;
    }
#pragma unroll
    for (int n = 0; n < BATCH; n++) found[n] += lists[n][found[n]] > thresholds[n];
}

// the place of the `wanted`-th key, counted from 1, in order of place, among the `prefix` best of a chunk, `prefix` at least `wanted`
__device__ __forceinline__ int find_place(const u16* lefts, int prefix, int wanted) {
    int begin = 0;
#pragma unroll
    for (int level = LEVELS - 1; level >= 0; level--) {
        const int length = 1 << level;
        int left = prefix < 2 * length ? lefts[level * CHUNK + begin + prefix] : length;
        if (wanted <= left) {
            prefix = left;
        } else {
            wanted -= left;
            prefix -= left;
            begin += length;
        }
    }
    return begin;
}

// a thread's part of the ranks of BATCH chunks, on its way to shared memory
struct Ranks {
    static constexpr int MINE = CHUNK / SEARCHERS;
    u32 ranks[BATCH][MINE];

    // 0, above nothing, for chunks from `used` on
    __device__ __forceinline__ void load(u8* trees, long long first_slot, int first, int used) {
#pragma unroll
        for (int n = 0; n < BATCH; n++)
#pragma unroll
            for (int m = 0; m < MINE; m++)
                ranks[n][m] = first + n < used ? Tree(trees, first_slot + first + n).ranks[m * SEARCHERS + threadIdx.x] : 0u;
    }
    __device__ __forceinline__ void store(u32 (*lists)[CHUNK]) const {
#pragma unroll
        for (int n = 0; n < BATCH; n++)
#pragma unroll
            for (int m = 0; m < MINE; m++) lists[n][m * SEARCHERS + threadIdx.x] = ranks[n][m];
    }
};

// The first of the chunks before `own` that has a key above `rank`, else `own`: where scores rise, those before it need not even be loaded.
// All lanes of a warp.
__device__ __forceinline__ int first_above(u8* trees, long long first_slot, int own, u32 rank) {
    for (int first = 0; first < own; first += 32) {
        const int mine = first + threadIdx.x % 32;
        const u32 above = __ballot_sync(~0u, mine < own && Tree(trees, first_slot + mine).ranks[0] > rank);
        if (above) return first + __ffs(above) - 1;
    }
    return own;
}

// stop of the keys that expire; of those that were never kept, their own position. A block has SEARCHERS keys of a chunk that follow each
// other in rank, so that its threads do similar searches and end at about the same time; those of the best keys come first.
extern "C" __global__ void __launch_bounds__(SEARCHERS) expiry_find(
    const int* lengths, u8* trees, int* stop, int heads, int kv_len, int chunks, int slots, int keep) {
    let_next_kernel_start();
    wait_for_kernel_ahead();
    const int slot = blockIdx.x % slots, own = slot % chunks, i = blockIdx.x / slots * SEARCHERS + threadIdx.x;
    const Chunk chunk(slot, chunks, lengths, heads, kv_len);
    if (chunk.end <= keep || chunk.count == 0) return;  // no key has `keep` others above it
    u32(*lists)[BATCH][CHUNK] = reinterpret_cast<u32(*)[BATCH][CHUNK]>(shared_memory);
    const long long first_slot = slot - own;
    const int used = (chunk.end + CHUNK - 1) / CHUNK;
    const Tree tree(trees, slot);
    const u32 rank = tree.ranks[i];
    Ranks next;
    next.load(trees, first_slot, 0, used);
    int begin = 0;
    if (own >= 2 * BATCH) {
        begin = first_above(trees, first_slot, own, tree.ranks[min(i | (SEARCHERS - 1), chunk.count - 1)]);  // the smallest of this block's
        if (begin > 0) next.load(trees, first_slot, begin, used);
    }
    bool open = i < chunk.count;
    int above = 0, where = -1, prefix = 0;  // above: in the chunks before; where: the chunk in which `keep` is reached
    for (int first = begin, turn = 0; first < used; first += BATCH, turn ^= 1) {
        const u32(*const list)[CHUNK] = lists[turn];
        next.store(lists[turn]);
        next.load(trees, first_slot, first + BATCH, used);
        if (!__syncthreads_or(open)) break;
        u32 thresholds[BATCH];
        int found[BATCH];
        bool some = first <= own && own < first + BATCH;
        // of equal scores the newer key ranks above
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            thresholds[n] = first + n < own ? rank : rank - 1;
            some |= list[n][0] > thresholds[n];
        }
        if (!__ballot_sync(~0u, open && some)) continue;  // where scores rise, the chunks before
        search(list, thresholds, found);
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            int here = first + n == own ? i : found[n];
            if (open && above + here >= keep) {
                open = false;
                where = first + n;
                prefix = here;
            }
            above += open ? here : 0;
        }
    }
    if (where < 0) return;
    int position = chunk.first + tree.order[i], expires = position;
    // A key that `keep` better ones of earlier chunks precede was never kept, and expires at its own position; with those of its own chunk it
    // depends on where the last of them stands.
    if (where >= own) expires = max(position, where * CHUNK + find_place(Tree(trees, first_slot + where).lefts, prefix, keep - above));
    stop[(long long)(slot / chunks) * kv_len + position] = expires;
}
