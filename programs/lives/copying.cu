// Copies 16 MiB without a zero byte to the device and back, without end. Prints "copying" after the first turn, so that a
// test knows when to kill something.
#include "../check.cuh"

#include <cstring>

constexpr size_t bytes = 16 << 20;

int main() {
    unsigned char *host, *device;
    CHECK(cudaMallocHost(&host, bytes));
    CHECK(cudaMalloc(&device, bytes));
    for (unsigned long turn = 0;; ++turn) {
        std::memset(host, 1 + turn % 255, bytes);
        CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost));
        CHECK(cudaDeviceSynchronize());
        if (turn > 0) continue;
        std::printf("copying\n");
        std::fflush(stdout);
    }
}
