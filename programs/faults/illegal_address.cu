// A kernel writes to an unallocated address; prints the error of each later call.
#include "../check.cuh"

__global__ void write_to(int *address) { *address = 42; }

int main() {
    int *memory;
    REPORT(cudaMalloc(&memory, sizeof(int)));
    write_to<<<1, 1>>>(reinterpret_cast<int *>(0x10));
    REPORT(cudaGetLastError());
    const cudaError_t first = REPORT(cudaDeviceSynchronize());
    REPORT(cudaGetLastError());
    // The error is sticky: it is not cleared by reading it.
    REPORT(cudaDeviceSynchronize());
    REPORT(cudaMalloc(&memory, sizeof(int)));
    write_to<<<1, 1>>>(memory);
    REPORT(cudaGetLastError());
    int value = 0;
    REPORT(cudaMemcpy(&value, memory, sizeof(int), cudaMemcpyDeviceToHost));
    REPORT(cudaFree(memory));
    const bool right = first == cudaErrorIllegalAddress;
    std::printf("%s illegal_address %s\n", right ? "PASS" : "FAIL", cudaGetErrorName(first));
    return right ? 0 : 1;
}
