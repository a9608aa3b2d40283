// Runs row_floor.cu on the CPU: CUDA's words as those of C++20, a block's threads as threads that meet at a barrier.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Index {
    unsigned x;
};
static thread_local Index threadIdx, blockIdx;
static Index blockDim;
static std::barrier<> *meeting;

using std::min;
static void __syncthreads() { meeting->arrive_and_wait(); }
static void atomicAdd(int *place, int added) { std::atomic_ref<int>(*place).fetch_add(added); }
static void atomicMin(int *place, int value) {
    std::atomic_ref<int> kept(*place);
    for (int seen = kept; value < seen && !kept.compare_exchange_weak(seen, value);) {
    }
}
static float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
static double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }

#include "row_floor.cu"

extern "C" {
Shared block[1];

void run(int num_threads, int num_blocks, const bits16 *logits, long long stride, const long long *settings,
         const long long *tokens, long long *floors, int vocab_size) {
    std::barrier<> barrier(num_threads);
    meeting = &barrier;
    blockDim.x = num_threads;
    auto thread = [&](int number) {
        threadIdx.x = number;
        for (int index = 0; index < num_blocks; index++) {
            blockIdx.x = index;
            if (number == 0) std::memset(block, 0x55, sizeof block);  // a block finds what others left
            __syncthreads();
            find_floors(logits, stride, settings, tokens, floors, vocab_size);
            __syncthreads();
        }
    };
    std::vector<std::jthread> threads;
    for (int number = 0; number < num_threads; number++) threads.emplace_back(thread, number);
}
}
