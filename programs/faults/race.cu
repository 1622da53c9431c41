// A reversal in shared memory without its barrier, and a sum that begins with uninitialised memory: for the race
// checker of the CPU device. Their results are not checked.
#include "../check.cuh"

__global__ void reverse(int *values) {
    __shared__ int tile[64];
    tile[threadIdx.x] = values[threadIdx.x];
    // __syncthreads() belongs here.
    values[threadIdx.x] = tile[63 - threadIdx.x];
}

__global__ void sum(const int *values, int *out) {
    __shared__ int total;
    atomicAdd(&total, values[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) *out = total;
}

int main() {
    int *values;
    CHECK(cudaMalloc(&values, 65 * sizeof(int)));
    CHECK(cudaMemset(values, 0, 65 * sizeof(int)));
    reverse<<<1, 64>>>(values);
    sum<<<1, 64>>>(values, values + 64);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(values));
    std::printf("PASS race\n");
    return 0;
}
