// A device-side assertion: its text goes to stderr, its error to the synchronization.
#include "../check.cuh"

#include <cassert>

__global__ void assert_small(int limit) { assert(static_cast<int>(threadIdx.x) < limit); }

int main() {
    assert_small<<<1, 4>>>(4);
    REPORT(cudaDeviceSynchronize());
    assert_small<<<1, 4>>>(3);
    REPORT(cudaGetLastError());
    const cudaError_t first = REPORT(cudaDeviceSynchronize());
    REPORT(cudaGetLastError());
    REPORT(cudaDeviceSynchronize());
    const bool right = first == cudaErrorAssert;
    std::printf("%s assert %s\n", right ? "PASS" : "FAIL", cudaGetErrorName(first));
    return right ? 0 : 1;
}
