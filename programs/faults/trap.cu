// A kernel that traps after part of its work.
#include "../check.cuh"

__global__ void trap_in_one(int *memory) {
    memory[threadIdx.x] = threadIdx.x;
    if (threadIdx.x == 7) __trap();
}

int main() {
    int *memory;
    REPORT(cudaMalloc(&memory, 32 * sizeof(int)));
    trap_in_one<<<1, 32>>>(memory);
    REPORT(cudaGetLastError());
    cudaStream_t legacy = nullptr;
    const cudaError_t first = REPORT(cudaStreamSynchronize(legacy));
    REPORT(cudaGetLastError());
    REPORT(cudaFree(memory));
    const bool right = first == cudaErrorLaunchFailure;
    std::printf("%s trap %s\n", right ? "PASS" : "FAIL", cudaGetErrorName(first));
    return right ? 0 : 1;
}
