// Sums of all elements before each: tiles of dynamic shared memory larger than a launch gets unasked, then
// the tiles' sums, then both together.
#include "check.cuh"

#include <vector>

constexpr int BLOCK = 256;
// Odd, so that the threads of a warp have no bank conflicts.
constexpr int ITEMS = 53;
constexpr int TILE = BLOCK * ITEMS;

// Scans a block's tile, or as much of it as there is. The tile's whole sum goes to `sums`.
__global__ void scan_tiles(const unsigned *values, unsigned *before, unsigned *sums, int count) {
    extern __shared__ unsigned shared[];
    unsigned *tile = shared;
    unsigned *totals = shared + TILE;
    const int start = blockIdx.x * TILE;
    for (int i = threadIdx.x; i < TILE; i += BLOCK) tile[i] = start + i < count ? values[start + i] : 0;
    __syncthreads();
    unsigned *own = tile + threadIdx.x * ITEMS;
    unsigned sum = 0;
    for (int i = 0; i < ITEMS; ++i) {
        const unsigned value = own[i];
#ifdef BROKEN_KERNEL
        // For the test that a wrong result is found out: each element counts for itself.
        sum += value;
        own[i] = sum;
#else
        own[i] = sum;
        sum += value;
#endif
    }
    totals[threadIdx.x] = sum;
    __syncthreads();
    for (int distance = 1; distance < BLOCK; distance *= 2) {
        const unsigned left = threadIdx.x >= distance ? totals[threadIdx.x - distance] : 0;
        __syncthreads();
        totals[threadIdx.x] += left;
        __syncthreads();
    }
    for (int i = 0; i < ITEMS; ++i) own[i] += totals[threadIdx.x] - sum;
    if (threadIdx.x == BLOCK - 1) sums[blockIdx.x] = totals[threadIdx.x];
    __syncthreads();
    for (int i = threadIdx.x; i < TILE; i += BLOCK) {
        if (start + i < count) before[start + i] = tile[i];
    }
}

__global__ void add_tiles(unsigned *before, const unsigned *tiles_before, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) before[i] += tiles_before[i / TILE];
}

int main(int argc, char **argv) {
    const int count = size_argument(argc, argv, 60000);
    const int tiles = (count + TILE - 1) / TILE;
    if (tiles > TILE) {
        std::printf("FAIL %s: at most %d elements\n", argv[0], TILE * TILE);
        return 1;
    }
    const int shared_bytes = (TILE + BLOCK) * sizeof(unsigned);
    std::vector<unsigned> values(count), before(count);
    Random random(7);
    // Sums exceed 32 bits and wrap around, on the host as on the device.
    for (unsigned &value : values) value = random.next();

    unsigned *device_values, *device_before, *device_sums, *device_total;
    CHECK(cudaMalloc(&device_values, count * sizeof(unsigned)));
    CHECK(cudaMalloc(&device_before, count * sizeof(unsigned)));
    CHECK(cudaMalloc(&device_sums, tiles * sizeof(unsigned)));
    CHECK(cudaMalloc(&device_total, sizeof(unsigned)));
    CHECK(cudaMemcpy(device_values, values.data(), count * sizeof(unsigned), cudaMemcpyHostToDevice));
    CHECK(cudaFuncSetAttribute(scan_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    scan_tiles<<<tiles, BLOCK, shared_bytes>>>(device_values, device_before, device_sums, count);
    CHECK(cudaGetLastError());
    scan_tiles<<<1, BLOCK, shared_bytes>>>(device_sums, device_sums, device_total, tiles);
    CHECK(cudaGetLastError());
    add_tiles<<<(count + BLOCK - 1) / BLOCK, BLOCK>>>(device_before, device_sums, count);
    CHECK(cudaGetLastError());
    unsigned total;
    CHECK(cudaMemcpy(before.data(), device_before, count * sizeof(unsigned), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&total, device_total, sizeof(unsigned), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_values));
    CHECK(cudaFree(device_before));
    CHECK(cudaFree(device_sums));
    CHECK(cudaFree(device_total));

    unsigned sum = 0;
    for (int i = 0; i < count; ++i) {
        if (before[i] != sum) {
            std::printf("FAIL prefix_scan: index %d: %u, expected %u\n", i, before[i], sum);
            return 1;
        }
        sum += values[i];
    }
    if (total != sum) {
        std::printf("FAIL prefix_scan: index %d: %u, expected %u\n", count, total, sum);
        return 1;
    }
    std::printf("PASS prefix_scan %d elements by %d bytes of shared memory, sum %u\n", count, shared_bytes,
                sum);
    return 0;
}
