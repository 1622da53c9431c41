// Launches in steady state, and the same time spent on private memory. In a VM the program reports to the monitor which
// of the two is running, so that the monitor can attribute exits to it.
//
// Launches come in bursts short enough that no stream holds its caller back, so that a burst never waits for the
// device. The wait for the end of each burst is attributed to neither.
#include "../check.cuh"

#include <chrono>

#include <sys/io.h>

// Activity of the program, as the number of an account of the monitor.
enum Account { other, launching, spinning };

constexpr int burst = 512;
// Launches that get the backend out of its sleep before a burst.
constexpr int waking = 192;

using Clock = std::chrono::steady_clock;

__global__ void count(unsigned long long *counter) {
    *counter += 1;
}

// Returns the I/O port of the monitor's accounts; 0 outside such a VM.
static unsigned short monitor_port() {
    const char *text = std::getenv("WORMHOLE_EXIT_ACCOUNTS");
    const int port = text ? std::atoi(text) : 0;
    if (port != 0 && ioperm(port, 1, 1) != 0) {
        std::printf("FAIL steady: no access to port %#x\n", port);
        std::exit(1);
    }
    return static_cast<unsigned short>(port);
}

static void enter(unsigned short port, Account account) {
    if (port != 0) outb(account, port);
}

static void launch(int launches, unsigned long long *counter, cudaStream_t stream) {
    for (int i = 0; i < launches; ++i) count<<<1, 1, 0, stream>>>(counter);
}

int main(int argc, char **argv) {
    const int launches = size_argument(argc, argv, 20 * burst);
    const int bursts = (launches + burst - 1) / burst;
    const unsigned short port = monitor_port();
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    unsigned long long *counter, counted = 0, wanted = 0;
    CHECK(cudaMalloc(&counter, sizeof *counter));
    CHECK(cudaMemset(counter, 0, sizeof *counter));

    // The ring is touched all around before anything counts, since first touches are page faults.
    const int warm = 40;
    volatile unsigned long long turns = 0;
    Clock::duration total{};
    for (int i = 0; i < warm + bursts; ++i) {
        launch(waking, counter, stream);
        enter(port, i < warm ? other : launching);
        const Clock::time_point start = Clock::now();
        launch(burst, counter, stream);
        const Clock::duration took = Clock::now() - start;
        enter(port, other);
        CHECK(cudaGetLastError());
        CHECK(cudaStreamSynchronize(stream));
        wanted += waking + burst;
        if (i < warm) continue;
        total += took;
        enter(port, spinning);
        for (const Clock::time_point again = Clock::now(); Clock::now() - again < took;) turns = turns + 1;
        enter(port, other);
    }

    CHECK(cudaMemcpy(&counted, counter, sizeof counted, cudaMemcpyDeviceToHost));
    std::printf("%d launches took their caller %.1f ms\n", bursts * burst,
                std::chrono::duration<double, std::milli>(total).count());
    std::printf("%s steady\n", counted == wanted ? "PASS" : "FAIL");
    return counted == wanted ? 0 : 1;
}
