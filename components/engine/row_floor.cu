// Finds the floor of rows of bfloat16 logits: the smallest that min_p, top_k and top_p let pass; a block for each row.
//
// A bfloat16 has few values, so a block counts how often each of them occurs in its row, in shared memory, and walks
// the counts from the best value downwards. Integers counted atomically do not depend on the order. With one thread a
// block it is plain C++, which the tests make use of.

#ifndef BINS
#define BINS 53248  // values from the best one downwards; all there are while the best is below 2^33
#endif
#ifndef MAX_THREADS
#define MAX_THREADS 1024
#endif
#define NOTHING 0x007F  // the order of -inf; those below belong to no number
#define COLUMNS 7  // see `draw_settings.py`

typedef unsigned short bits16;

// Integers from 0 to 65,535 that compare as the values do.
static __device__ __forceinline__ int order_of(bits16 bits) { return bits & 0x8000 ? bits ^ 0xFFFF : bits ^ 0x8000; }

static __device__ __forceinline__ float value_of(int order) {
    return __uint_as_float((unsigned)(order & 0x8000 ? order ^ 0x8000 : order ^ 0xFFFF) << 16);
}

struct Row {
    int best;            // order of the largest logit
    float factor;        // one over the temperature
    float lowest;        // logarithm of min_p
    const int *counts;   // by steps below the best
};

// The weight of one token so many steps below the best.
static __device__ __forceinline__ float weight_at(const Row &row, int step) {
    float scaled = (value_of(row.best - step) - value_of(row.best)) * row.factor;
    return scaled >= row.lowest ? expf(scaled) : 0.0f;
}

static __device__ __forceinline__ void count(int *counts, int best, bits16 bits) {
    int order = order_of(bits);
    if (order > NOTHING && order <= best) atomicAdd(&counts[min(best - order, BINS - 1)], 1);
}

// Counts a row, 8 logits at a time where it lies on 16 bytes.
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

// Adds to each thread's value those of the threads before it.
template <typename T>
static __device__ void accumulate(T *values) {
    for (int distance = 1; distance < blockDim.x; distance *= 2) {
        T added = threadIdx.x >= distance ? values[threadIdx.x - distance] : 0;
        __syncthreads();
        values[threadIdx.x] += added;
        __syncthreads();
    }
}

// logits (rows, stride); settings (drawn, COLUMNS); tokens (rows,): the largest logits'; floors (drawn,): orders.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
find_floors(const bits16 *logits, long long stride, const long long *settings, const long long *tokens,
            long long *floors, int vocab_size) {
    extern __shared__ int counts[];
    __shared__ double masses[MAX_THREADS];
    __shared__ int numbers[MAX_THREADS];
    __shared__ double total;
    __shared__ int kth, nucleus;  // steps below the best
    const long long *mine = settings + (long long)blockIdx.x * COLUMNS;
    long long top_k = mine[2];
    float top_p = (float)__longlong_as_double(mine[4]);
    if (top_p >= 1.0f && top_k >= vocab_size) {
        if (threadIdx.x == 0) floors[blockIdx.x] = 0;
        return;
    }
    const bits16 *logits_row = logits + mine[6] * stride;
    Row row = {order_of(logits_row[tokens[mine[6]]]), 1.0f / (float)__longlong_as_double(mine[3]),
               (float)__longlong_as_double(mine[5]), counts};
    int steps = min(row.best + 1, BINS);
    for (int step = threadIdx.x; step < steps; step += blockDim.x) counts[step] = 0;
    if (threadIdx.x == 0) kth = nucleus = steps;
    __syncthreads();
    count_row(counts, row.best, logits_row, vocab_size);
    __syncthreads();

    int each = (steps + blockDim.x - 1) / blockDim.x | 1;  // odd, so that threads meet in no bank
    int first = min((int)threadIdx.x * each, steps), stop = min(first + each, steps);
    double mass = 0.0;
    int number = 0;
    for (int step = first; step < stop; step++)
        if (counts[step]) {
            float weight = weight_at(row, step);
            mass += (double)weight * counts[step];
            number += weight > 0.0f ? counts[step] : 0;
        }
    masses[threadIdx.x] = mass;
    numbers[threadIdx.x] = number;
    __syncthreads();
    accumulate(masses);
    accumulate(numbers);
    double mass_before = threadIdx.x ? masses[threadIdx.x - 1] : 0.0;
    int number_before = threadIdx.x ? numbers[threadIdx.x - 1] : 0;
    if (threadIdx.x == blockDim.x - 1) total = masses[threadIdx.x];
    __syncthreads();

    if (number_before < top_k && top_k <= numbers[threadIdx.x] && top_k < numbers[blockDim.x - 1]) {
        int left = (int)top_k - number_before, step = first;
        double above = mass_before;
        for (; step < stop - 1 && counts[step] < left; step++)  // weights fall: those without any come last
            if (counts[step]) {
                above += (double)weight_at(row, step) * counts[step];
                left -= counts[step];
            }
        kth = step;
        total = above + (double)weight_at(row, step) * left;
    }
    __syncthreads();
    double wanted = (double)top_p * total;
    if (top_p < 1.0f && mass_before < wanted && wanted <= masses[threadIdx.x]) {
        double above = mass_before;
        int step = first, last = first;
        for (; step < stop && above < wanted; step++)
            if (counts[step]) {
                above += (double)weight_at(row, step) * counts[step];
                last = step;
            }
        nucleus = last;
    }
    __syncthreads();
    int found = min(kth, nucleus);
    if (threadIdx.x == 0) floors[blockIdx.x] = found < steps ? row.best - found : 0;
}
