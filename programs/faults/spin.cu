// A kernel that spins for the given milliseconds of the device's clock, or for ever without any.
// Prints "spinning" once it is launched, so that a test knows when to kill something.
#include "../check.cuh"

__global__ void spin(unsigned long long nanoseconds, unsigned long long *turns) {
    unsigned long long start, now, count = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        ++count;
    } while (nanoseconds == 0 || now - start < nanoseconds);
    *turns = count;
}

int main(int argc, char **argv) {
    const unsigned long long milliseconds = argc < 2 ? 0 : size_argument(argc, argv, 0);
    unsigned long long *turns;
    CHECK(cudaMalloc(&turns, sizeof(*turns)));
    spin<<<1, 1>>>(milliseconds * 1000000ull, turns);
    CHECK(cudaGetLastError());
    std::printf("spinning\n");
    std::fflush(stdout);
    const cudaError_t first = REPORT(cudaDeviceSynchronize());
    unsigned long long count = 0;
    const cudaError_t second = REPORT(cudaMemcpy(&count, turns, sizeof(count), cudaMemcpyDeviceToHost));
    REPORT(cudaGetLastError());
    const bool right = first == cudaSuccess && second == cudaSuccess && count > 0;
    std::printf("%s spin\n", right ? "PASS" : "FAIL");
    return right ? 0 : 1;
}
