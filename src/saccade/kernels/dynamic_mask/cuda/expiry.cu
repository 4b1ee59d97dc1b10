// Expiry of every key, by sorted lists. See expiry_cuda.py.
//
//   expiry_sort    a chunk of CHUNK keys in falling order of (score, position); its first `keep`
//   expiry_merge   the best `keep` of two such lists: one step of an inclusive scan over the chunks of a row
//   expiry_find    the chunk once more, as a tree: who among its keys, and among the best of its past, expires in it, and where
//
// The runs that a merge sort makes of a chunk are ranges of positions in falling order. With each place of a merged run goes the number
// of its entries before there that came from the left half: so "the c-th position among the best m entries" is one walk down the runs.
//
// Macros: CHUNK (a power of two, a multiple of THREADS), LEVELS (its logarithm), THREADS. No instruction but CUDA C++.
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int MINE = CHUNK / THREADS;
extern __shared__ __align__(128) unsigned char shared_memory[];

// A key as a number in the order of (score, position), -0.0 equal to 0.0, at least 2^32: entries are distinct even where scores are NaN,
// which the caller may find out later.
__device__ __forceinline__ u64 entry_of(float score, int position) {
    u32 bits = __float_as_uint(score + 0.0f);
    u32 rank = bits >> 31 ? ~bits : bits | 0x80000000u;
    return u64(rank ? rank : 1u) << 32 | u32(position);
}

__device__ __forceinline__ int position_of(u64 entry) {
    return int(u32(entry));
}

// how many of the `count` entries of a falling list are above `entry`; `first`: the step to begin with, at least `first_step(count)`
__device__ __forceinline__ int count_above(const u64* list, int count, int first, u64 entry) {
    int found = 0;
    for (int step = first; step > 0; step /= 2)
        if (found + step <= count && list[found + step - 1] > entry) found += step;
    return found;
}

// the largest power of two that is not above `count`, or 1
__device__ __forceinline__ int first_step(int count) {
    int step = 1;
    while (2 * step <= count) step *= 2;
    return step;
}

struct Chunk {
    int first, count;  // position of its first key; valid keys

    __device__ __forceinline__ Chunk(int slot, int chunks, const int* lengths, int heads, int kv_len) {
        first = slot % chunks * CHUNK;
        int end = lengths ? lengths[slot / chunks / heads] : kv_len;
        count = min(max(end - first, 0), min(CHUNK, kv_len - first));
    }
};

// The entries of a chunk in falling order, in `entries` or behind it; invalid keys last. lefts[level][i]: see above, nothing if null.
__device__ __forceinline__ u64* sort_chunk(const float* scores, const Chunk& chunk, u64* entries, unsigned short* lefts) {
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) entries[i] = i < chunk.count ? entry_of(scores[i], chunk.first + i) : CHUNK - i;
    __syncthreads();
    u64 *from = entries, *to = entries + CHUNK;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        const int length = 1 << level;
#pragma unroll
        for (int n = 0; n < MINE; n++) {
            int i = threadIdx.x + n * THREADS, within = i & (length - 1);
            u64 entry = from[i];
            int others = count_above(from + ((i ^ length) & -length), length, length, entry);
            int place = (i & -2 * length) + within + others;
            to[place] = entry;
            if (lefts) lefts[level * CHUNK + place] = i & length ? others : within;
        }
        __syncthreads();
        u64* spare = from;
        from = to;
        to = spare;
    }
    return from;
}

// the `wanted`-th position, counted from 1, among the `prefix` best entries of the chunk, `prefix` at least `wanted`
__device__ __forceinline__ int find_position(const unsigned short* lefts, int prefix, int wanted) {
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

// best[slot][keep], counts[slot]; start: each key's position; stop: kv_len for valid keys, their own position for others.
// strange: an int that becomes 1 if a score is not finite, padding included, or null. Block: one chunk of one row.
extern "C" __global__ void __launch_bounds__(THREADS) expiry_sort(
    const float* scores, const int* lengths, u64* best, int* counts, int* start, int* stop, int* strange, int heads, int kv_len,
    int chunks, int keep) {
    const int slot = blockIdx.x;
    const Chunk chunk(slot, chunks, lengths, heads, kv_len);
    const long long row = (long long)(slot / chunks) * kv_len + chunk.first;
    const u64* sorted = sort_chunk(scores + row, chunk, reinterpret_cast<u64*>(shared_memory), nullptr);
    const int kept = min(keep, chunk.count);
    for (int i = threadIdx.x; i < kept; i += THREADS) best[(long long)slot * keep + i] = sorted[i];
    if (threadIdx.x == 0) counts[slot] = kept;
    for (int i = threadIdx.x; i < min(CHUNK, kv_len - chunk.first); i += THREADS) {
        start[row + i] = chunk.first + i;
        stop[row + i] = i < chunk.count ? kv_len : chunk.first + i;
        if (strange && (__float_as_uint(scores[row + i]) & 0x7f800000u) == 0x7f800000u) *strange = 1;
    }
}

// out[slot]: the best `keep` of the lists of `slot` and of the chunk `distance` before, if its row has one. staged: there is shared memory
// for both, where the loads of a search, each of which waits for the one before, take less time: 4.8 us for 7.7 at keep = 1,024.
extern "C" __global__ void __launch_bounds__(THREADS) expiry_merge(
    const u64* best, const int* counts, u64* out, int* out_counts, int chunks, int keep, int distance,
    int staged) {
    const int slot = blockIdx.x;
    const int count = counts[slot], before = slot % chunks >= distance ? counts[slot - distance] : 0;
    const u64* ours = best + (long long)slot * keep;
    const u64* theirs = before ? ours - (long long)distance * keep : ours;
    u64* to = out + (long long)slot * keep;
    if (staged) {
        u64* entries = reinterpret_cast<u64*>(shared_memory);
        for (int i = threadIdx.x; i < count; i += THREADS) entries[i] = ours[i];
        for (int i = threadIdx.x; i < before; i += THREADS) entries[keep + i] = theirs[i];
        __syncthreads();
        ours = entries;
        theirs = entries + keep;
    }
    const int step = first_step(max(count, before));
    for (int i = threadIdx.x; i < count + before; i += THREADS) {
        bool mine = i < count;
        int within = mine ? i : i - count;
        u64 entry = (mine ? ours : theirs)[within];
        int place = within + count_above(mine ? theirs : ours, mine ? before : count, step, entry);
        if (place < keep) to[place] = entry;
    }
    if (threadIdx.x == 0) out_counts[slot] = min(keep, count + before);
}

// stop of the keys that expire in a chunk, of those that were never kept their own position. best, counts: up to each chunk.
extern "C" __global__ void __launch_bounds__(THREADS) expiry_find(
    const float* scores, const int* lengths, const u64* best, const int* counts, int* stop, int heads, int kv_len, int chunks, int keep) {
    const int slot = blockIdx.x;
    const Chunk chunk(slot, chunks, lengths, heads, kv_len);
    const int past = slot % chunks ? counts[slot - 1] : 0;
    if (past + chunk.count <= keep) return;  // nobody has `keep` above
    const u64* survivors = best + (long long)(slot ? slot - 1 : 0) * keep;
    u64* entries = reinterpret_cast<u64*>(shared_memory);
    unsigned short* lefts = reinterpret_cast<unsigned short*>(entries + 2 * CHUNK);
    const long long row = (long long)(slot / chunks) * kv_len;
    const u64* sorted = sort_chunk(scores + row + chunk.first, chunk, entries, lefts);
    const int step = first_step(past);
    for (int i = threadIdx.x; i < chunk.count; i += THREADS) {
        int position = position_of(sorted[i]), wanted = keep - count_above(survivors, past, step, sorted[i]);
        if (wanted <= 0)
            stop[row + position] = position;
        else if (i >= wanted)  // beaten before it came: its own position
            stop[row + position] = max(position, chunk.first + find_position(lefts, i, wanted));
    }
    for (int i = threadIdx.x; i < past; i += THREADS) {
        u64 entry = survivors[i];
        int above = count_above(sorted, chunk.count, CHUNK, entry), wanted = keep - i;
        if (above >= wanted) stop[row + position_of(entry)] = chunk.first + find_position(lefts, above, wanted);
    }
}
