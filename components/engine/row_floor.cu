// Finds the floor of rows of bfloat16 logits: the smallest that min_p, top_k and top_p let pass; a block for each row.
//
// A bfloat16 has few values, so a block counts in shared memory how often each of them occurs in its row, and walks the
// counts from the best value downwards. Integers counted atomically do not depend on the order, and each thread adds
// its weights in one order, so floors repeat. BINS, THREADS and COLUMNS are given by `row_floor.py`.

enum {
    NOTHING = 0x007F,  // the order of -inf; those below belong to no number
    ZERO = 0x8000      // the order of 0.0; that of -0.0 is one less
};

typedef unsigned short bits16;

struct Shared {
    double masses[THREADS];  // weight of each thread's tokens and those before
    int numbers[THREADS];    // how many have any
    double total;            // weight of all that top_k lets pass
    int floor;               // steps below the best
    int counts[BINS];        // tokens by steps below the best; the last bin also has those further down
};
static_assert(sizeof(Shared) <= 12 * THREADS + 16 + 4 * BINS, "what row_floor.py reckons with");

struct Row {
    int best;      // order of the largest logit
    float factor;  // one over the temperature
    float lowest;  // logarithm of min_p
    const int *counts;
};

struct Tally {
    double mass;
    int number;  // of tokens with any weight
};

// Integers from 0 to 65,535 that compare as the values do.
static __device__ __forceinline__ int order_of(bits16 bits) { return bits & 0x8000 ? bits ^ 0xFFFF : bits ^ 0x8000; }

static __device__ __forceinline__ float value_of(int order) {
    return __uint_as_float((unsigned)(order & 0x8000 ? order ^ 0x8000 : order ^ 0xFFFF) << 16);
}

static __device__ __forceinline__ float float_of(long long bits) { return (float)__longlong_as_double(bits); }

static __device__ __forceinline__ void count(int *counts, int best, bits16 bits) {
    int order = order_of(bits);
    if (order > NOTHING && order <= best) atomicAdd(&counts[min(best - order, BINS - 1)], 1);
}

// Counts a row, 8 logits at a time where it begins at a multiple of 16 bytes.
static __device__ void count_row(int *counts, int best, const bits16 *row, int vocab_size) {
    int done = 0;
    if (((unsigned long long)row & 15) == 0) {
        const uint4 *groups = (const uint4 *)row;
        done = vocab_size / 8 * 8;
#pragma unroll 4
        for (int at = threadIdx.x; at < vocab_size / 8; at += blockDim.x) {
            uint4 group = groups[at];
            unsigned pairs[4] = {group.x, group.y, group.z, group.w};
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                count(counts, best, pairs[pair] & 0xFFFF);
                count(counts, best, pairs[pair] >> 16);
            }
        }
    }
    for (int at = done + threadIdx.x; at < vocab_size; at += blockDim.x) count(counts, best, row[at]);
}

// The weight of one token so many steps below the best. It falls with each step.
static __device__ __forceinline__ float weight_at(const Row &row, int step) {
    float scaled = (value_of(row.best - step) - value_of(row.best)) * row.factor;
    return scaled >= row.lowest ? expf(scaled) : 0.0f;
}

// Adds the tokens from step `first` on to the tally, as long as it `is_short`; returns the last step that had any.
template <typename Condition>
static __device__ __forceinline__ int walk(const Row &row, int first, int stop, Tally &tally, Condition is_short) {
    int last = first;
    for (int step = first; step < stop && is_short(tally); step++) {
        int count = row.counts[step];
        if (count == 0) continue;
        float weight = weight_at(row, step);
        tally.mass += (double)weight * count;
        if (weight > 0.0f) tally.number += count;
        last = step;
    }
    return last;
}

// Adds to each thread's tally those of the threads before it.
static __device__ __forceinline__ void accumulate(Shared &shared) {
    int thread = threadIdx.x;
    for (int distance = 1; distance < blockDim.x; distance *= 2) {
        Tally added = {0.0, 0};
        if (thread >= distance) added = {shared.masses[thread - distance], shared.numbers[thread - distance]};
        __syncthreads();
        shared.masses[thread] += added.mass;
        shared.numbers[thread] += added.number;
        __syncthreads();
    }
}

// logits (rows, stride); settings (drawn, COLUMNS) as `draw_settings.py` makes them; tokens (rows,): the largest
// logits'; floors (drawn,): orders, 0 where everything passes. As many blocks as floors, up to THREADS threads in each.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
find_floors(const bits16 *logits, long long stride, const long long *settings, const long long *tokens,
            long long *floors, int vocab_size) {
    extern __shared__ Shared block[];
    Shared &shared = block[0];
    int thread = threadIdx.x, num_threads = blockDim.x;
    const long long *mine = settings + (long long)blockIdx.x * COLUMNS;
    int top_k = (int)mine[2];
    float top_p = float_of(mine[4]);
    if (top_p >= 1.0f && top_k >= vocab_size) {
        if (thread == 0) floors[blockIdx.x] = 0;
        return;
    }
    const bits16 *logits_row = logits + mine[6] * stride;
    int best = order_of(logits_row[tokens[mine[6]]]);
    if (best == ZERO - 1) best = ZERO;  // where -0.0 is the best, 0.0 is so too
    Row row = {best, 1.0f / float_of(mine[3]), float_of(mine[5]), shared.counts};
    int steps = min(best + 1, BINS);
    for (int step = thread; step < steps; step += num_threads) shared.counts[step] = 0;
    if (thread == 0) shared.floor = steps;
    __syncthreads();
    count_row(shared.counts, best, logits_row, vocab_size);
    __syncthreads();

    int each = ((steps + num_threads - 1) / num_threads) | 1;  // odd, so that threads meet in no bank
    int first = min(thread * each, steps), stop = min(first + each, steps);
    Tally own = {0.0, 0};
    walk(row, first, stop, own, [](const Tally &) { return true; });
    shared.masses[thread] = own.mass;
    shared.numbers[thread] = own.number;
    __syncthreads();
    accumulate(shared);
    Tally before = {0.0, 0}, upto = {shared.masses[thread], shared.numbers[thread]};
    if (thread > 0) before = {shared.masses[thread - 1], shared.numbers[thread - 1]};
    bool is_limited = top_k < shared.numbers[num_threads - 1];
    if (thread == num_threads - 1) shared.total = upto.mass;
    __syncthreads();

    if (is_limited && before.number < top_k && top_k <= upto.number) {  // in one thread
        Tally passed = before;
        int kth = walk(row, first, stop, passed, [&](const Tally &tally) { return tally.number < top_k; });
        shared.floor = kth;
        shared.total = passed.mass - (double)weight_at(row, kth) * (passed.number - top_k);
    }
    __syncthreads();
    double wanted = (double)top_p * shared.total;
    if (top_p < 1.0f && (thread == 0 || before.mass < wanted) && wanted <= upto.mass) {  // in one, but for rounding
        Tally passed = before;
        int nucleus = walk(row, first, stop, passed, [&](const Tally &tally) { return tally.mass < wanted; });
        atomicMin(&shared.floor, nucleus);
    }
    __syncthreads();
    if (thread == 0) floors[blockIdx.x] = shared.floor < steps ? best - shared.floor : 0;
}
