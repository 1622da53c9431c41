// Histogram of bytes: counted by atomics in shared memory, then added up in global memory.
#include "check.cuh"

#include <vector>

constexpr int BINS = 256;
constexpr int BLOCK = 128;
constexpr int BLOCKS = 6;

__global__ void histogram(const unsigned char *bytes, int count, unsigned *bins) {
    __shared__ unsigned block_bins[BINS];
    for (int bin = threadIdx.x; bin < BINS; bin += BLOCK) block_bins[bin] = 0;
    __syncthreads();
    const int stride = gridDim.x * BLOCK;
    const int first = blockIdx.x * BLOCK + threadIdx.x;
    // Four bytes at a time, and the remainder one by one.
    const uchar4 *quads = reinterpret_cast<const uchar4 *>(bytes);
    for (int i = first; i < count / 4; i += stride) {
        const uchar4 quad = quads[i];
        atomicAdd(&block_bins[quad.x], 1u);
        atomicAdd(&block_bins[quad.y], 1u);
        atomicAdd(&block_bins[quad.z], 1u);
        atomicAdd(&block_bins[quad.w], 1u);
    }
    for (int i = count / 4 * 4 + first; i < count; i += stride) atomicAdd(&block_bins[bytes[i]], 1u);
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += BLOCK) {
        if (block_bins[bin] != 0) atomicAdd(&bins[bin], block_bins[bin]);
    }
}

int main(int argc, char **argv) {
    const int count = size_argument(argc, argv, 100003);
    std::vector<unsigned char> bytes(count);
    std::vector<unsigned> bins(BINS), expected(BINS);
    Random random(6);
    for (unsigned char &byte : bytes) {
        // The product makes small values frequent, so that threads meet in their bins.
        byte = static_cast<unsigned char>((random.next() & 255u) * (random.next() & 255u) >> 8);
        ++expected[byte];
    }

    unsigned char *device_bytes;
    unsigned *device_bins;
    CHECK(cudaMalloc(&device_bytes, count));
    CHECK(cudaMalloc(&device_bins, BINS * sizeof(unsigned)));
    CHECK(cudaMemcpy(device_bytes, bytes.data(), count, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(device_bins, 0, BINS * sizeof(unsigned)));
    histogram<<<BLOCKS, BLOCK>>>(device_bytes, count, device_bins);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(bins.data(), device_bins, BINS * sizeof(unsigned), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_bytes));
    CHECK(cudaFree(device_bins));

    for (int bin = 0; bin < BINS; ++bin) {
        if (bins[bin] != expected[bin]) {
            std::printf("FAIL histogram: index %d: %u, expected %u\n", bin, bins[bin], expected[bin]);
            return 1;
        }
    }
    std::printf("PASS histogram %d bytes, %u of them 0\n", count, bins[0]);
    return 0;
}
