// Device-side printf: the text is on stdout before the host's output after the synchronization.
#include "../check.cuh"

__global__ void say(const char *const *words) {
    if (threadIdx.x == 0) {
        printf("device: %d %u %lld %x %5.2f %c %%\n", -7, 3000000000u, -5000000000ll, 0xbeef, 3.14159, 'w');
        printf("device: [%8s] [%-8s] [%s]\n", "right", "left", words ? "words" : "none");
    }
}

__global__ void count(int from) { printf("thread %d of block %d\n", from + threadIdx.x, blockIdx.x); }

int main() {
    std::printf("host: before\n");
    std::fflush(stdout);
    say<<<1, 32>>>(nullptr);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    std::printf("host: between\n");
    std::fflush(stdout);
    count<<<1, 1>>>(41);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    std::printf("PASS printf\n");
    return 0;
}
