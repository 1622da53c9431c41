// Eight threads wait while one kernel faults: all of them return, with the fault's error.
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
    *static_cast<volatile int *>(go) = 1;
    for (std::thread &thread : threads) thread.join();

    Clock::time_point first = ends[0], last = ends[0];
    bool right = true;
    for (int i = 0; i < WAITERS; ++i) {
        std::printf("waiter %d: %s\n", i, cudaGetErrorName(errors[i]));
        right = right && errors[i] == cudaErrorIllegalAddress;
        first = ends[i] < first ? ends[i] : first;
        last = ends[i] > last ? ends[i] : last;
    }
    const auto spread = std::chrono::duration_cast<std::chrono::microseconds>(last - first);
    std::printf("%s eight_waiters spread_us %lld\n", right ? "PASS" : "FAIL",
                static_cast<long long>(spread.count()));
    return right ? 0 : 1;
}
