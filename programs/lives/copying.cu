// Copies 16 MiB without a zero byte to the device and back, without end, and compares them. Prints "copying" after the first
// turn, so that a test knows when to kill something, and ends with FAIL after a turn whose bytes differ.
#include "../check.cuh"

#include <cstring>

constexpr size_t bytes = 16 << 20;

int main() {
    unsigned char *sent, *received, *device;
    CHECK(cudaMallocHost(&sent, bytes));
    CHECK(cudaMallocHost(&received, bytes));
    CHECK(cudaMalloc(&device, bytes));
    for (unsigned long turn = 0;; ++turn) {
        // Each turn has another value than the turn before.
        std::memset(sent, 1 + turn % 255, bytes);
        CHECK(cudaMemcpyAsync(device, sent, bytes, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpyAsync(received, device, bytes, cudaMemcpyDeviceToHost));
        CHECK(cudaDeviceSynchronize());
        if (std::memcmp(sent, received, bytes) != 0) {
            std::printf("FAIL copying: turn %lu brings other bytes back\n", turn);
            return 1;
        }
        if (turn > 0) continue;
        std::printf("copying\n");
        std::fflush(stdout);
    }
}
