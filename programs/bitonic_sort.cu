// Sorts keys with their values: distances inside a block's part through shared memory, larger ones in global.
#include "check.cuh"

#include <algorithm>
#include <vector>

constexpr int BLOCK = 256;
constexpr int PART = 2 * BLOCK;

struct Pair {
    unsigned key, value;
};

__device__ void order(Pair &low, Pair &high, bool ascending) {
    if ((low.key > high.key) == ascending) {
        const Pair pair = low;
        low = high;
        high = pair;
    }
}

// The lower element of the thread's pair at that distance.
__device__ int lower(int thread, int distance) {
    return 2 * thread - (thread & (distance - 1));
}

__global__ void exchange(Pair *pairs, int run, int distance) {
    const int i = lower(blockIdx.x * BLOCK + threadIdx.x, distance);
    order(pairs[i], pairs[i + distance], (i & run) == 0);
}

// Merges runs up to `last` from runs of `first`, as far as both fit into a block's part.
__global__ void merge(Pair *pairs, int first, int last) {
    __shared__ Pair part[PART];
    const int start = blockIdx.x * PART;
    part[threadIdx.x] = pairs[start + threadIdx.x];
    part[threadIdx.x + BLOCK] = pairs[start + threadIdx.x + BLOCK];
    for (int run = first; run <= last; run *= 2) {
        for (int distance = min(run, PART) / 2; distance > 0; distance /= 2) {
            __syncthreads();
            const int i = lower(threadIdx.x, distance);
            order(part[i], part[i + distance], ((start + i) & run) == 0);
        }
    }
    __syncthreads();
    pairs[start + threadIdx.x] = part[threadIdx.x];
    pairs[start + threadIdx.x + BLOCK] = part[threadIdx.x + BLOCK];
}

int main(int argc, char **argv) {
    const int count = size_argument(argc, argv, 3900);
    int padded = PART;
    while (padded < count) padded *= 2;
    // The padding of the last run sorts behind every key.
    std::vector<Pair> pairs(padded, Pair{~0u, ~0u});
    Random random(8);
    for (int i = 0; i < count; ++i) {
        // Keys are unique, so that there is one order only; the high bit is set in half of them.
        pairs[i] = Pair{(random.next() << 20) + static_cast<unsigned>(i), static_cast<unsigned>(i)};
    }
    std::vector<Pair> expected(pairs);

    Pair *device;
    const size_t bytes = padded * sizeof(Pair);
    const int blocks = padded / PART;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMemcpy(device, pairs.data(), bytes, cudaMemcpyHostToDevice));
    merge<<<blocks, BLOCK>>>(device, 2, PART);
    CHECK(cudaGetLastError());
    for (int run = 2 * PART; run <= padded; run *= 2) {
        for (int distance = run / 2; distance >= PART; distance /= 2) {
            exchange<<<blocks, BLOCK>>>(device, run, distance);
            CHECK(cudaGetLastError());
        }
        merge<<<blocks, BLOCK>>>(device, run, run);
        CHECK(cudaGetLastError());
    }
    CHECK(cudaMemcpy(pairs.data(), device, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device));

    std::sort(expected.begin(), expected.end(), [](Pair a, Pair b) { return a.key < b.key; });
    for (int i = 0; i < padded; ++i) {
        if (pairs[i].key != expected[i].key || pairs[i].value != expected[i].value) {
            std::printf("FAIL bitonic_sort: index %d: key %u value %u, expected %u %u\n", i, pairs[i].key,
                        pairs[i].value, expected[i].key, expected[i].value);
            return 1;
        }
    }
    std::printf("PASS bitonic_sort %d elements, median %u\n", count, pairs[count / 2].key);
    return 0;
}
