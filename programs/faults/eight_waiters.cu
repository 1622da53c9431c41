// Eight threads wait while one kernel faults: all of them return, with the fault's error. The fault comes once
// a line, or the end, was read from standard input.
#include "../check.cuh"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

constexpr int WAITERS = 8;

// Runs until the host says so, then writes where nothing is allocated.
__global__ void fault_on_signal(const volatile int *go, int *nowhere) {
    while (*go == 0) {
    }
    *nowhere = 1;
}

int main() {
    using Clock = std::chrono::steady_clock;
    int *go;
    CHECK(cudaHostAlloc(&go, sizeof(int), cudaHostAllocMapped));
    *static_cast<volatile int *>(go) = 0;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    fault_on_signal<<<1, 1, 0, stream>>>(go, reinterpret_cast<int *>(0x10));
    CHECK(cudaGetLastError());

    std::atomic<int> waiting{0};
    std::vector<cudaError_t> errors(WAITERS);
    std::vector<Clock::time_point> ends(WAITERS);
    std::vector<std::thread> threads;
    for (int i = 0; i < WAITERS; ++i) {
        threads.emplace_back([&, i] {
            ++waiting;
            errors[i] = i % 2 == 0 ? cudaStreamSynchronize(stream) : cudaDeviceSynchronize();
            ends[i] = Clock::now();
        });
    }
    while (waiting < WAITERS) std::this_thread::yield();
    std::printf("waiting\n");
    std::fflush(stdout);
    for (int byte = std::getchar(); byte != '\n' && byte != EOF;) byte = std::getchar();
    *static_cast<volatile int *>(go) = 1;
    for (std::thread &thread : threads) thread.join();

    bool right = true;
    for (int i = 0; i < WAITERS; ++i) {
        const std::chrono::nanoseconds end = ends[i].time_since_epoch();
        std::printf("waiter %d: %s at %lld ns\n", i, cudaGetErrorName(errors[i]),
                    static_cast<long long>(end.count()));
        right = right && errors[i] == cudaErrorIllegalAddress;
    }
    std::printf("%s eight_waiters\n", right ? "PASS" : "FAIL");
    return right ? 0 : 1;
}
