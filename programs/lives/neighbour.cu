// Two CUDA processes of one guest: when one is killed, its device memory and its pinned memory come
// back soon, and the other's results stay right. With the argument `pidns` both run as process 1 of a
// PID namespace of their own, so that their process ids are equal.
#include "../check.cuh"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <vector>

#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

constexpr size_t held_bytes = 64 << 20;
constexpr size_t pinned_bytes = 96 << 20;
// The time is printed. On a busy machine it is no fault.
constexpr int patience_ms = 60000;
// Descriptors for the watcher's requests to its parent, and for the answers.
constexpr int requests = 101;
constexpr int answers = 100;

__global__ void mix(unsigned *values, int count, unsigned round) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = values[i] * 1664525u + round;
}

static double milliseconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// Holds memory until it is killed.
static int hold() {
    void *device, *pinned;
    CHECK(cudaMalloc(&device, held_bytes));
    CHECK(cudaMemset(device, 1, held_bytes));
    CHECK(cudaMallocHost(&pinned, pinned_bytes));
    CHECK(cudaDeviceSynchronize());
    std::memset(pinned, 1, pinned_bytes);
    std::printf("holding\n");
    std::fflush(stdout);
    for (;;) pause();
}

// Starts this program again in another role, in this PID namespace or as process 1 of a new one.
static pid_t start(const char *role, bool namespaced, int output) {
    const long flags = namespaced ? CLONE_NEWPID | SIGCHLD : SIGCHLD;
    const pid_t child = static_cast<pid_t>(syscall(SYS_clone, flags, nullptr, nullptr, nullptr, nullptr));
    if (child == 0) {
        // The child is killed if its parent ends.
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (output >= 0) dup2(output, 1);
        execl("/proc/self/exe", "neighbour", role, static_cast<char *>(nullptr));
        _exit(127);
    }
    if (child < 0) {
        std::printf("FAIL neighbour: cannot start a process: %s\n", std::strerror(errno));
        std::exit(1);
    }
    return child;
}

// Reads a line that must be `expected`.
static void expect_line(int from, const char *expected) {
    char said[256] = {};
    size_t length = 0;
    while (length < sizeof said - 1 && !std::strchr(said, '\n')) {
        const ssize_t got = read(from, said + length, sizeof said - 1 - length);
        if (got <= 0) break;
        length += got;
    }
    if (std::strncmp(said, expected, std::strlen(expected)) != 0) {
        std::printf("FAIL neighbour: expected '%s', the other process said: %s\n", expected, said);
        std::exit(1);
    }
}

// One round of work whose result is known.
static bool round_is_right(unsigned *device, std::vector<unsigned> &host, unsigned round) {
    const int count = static_cast<int>(host.size());
    mix<<<(count + 127) / 128, 128>>>(device, count, round);
    for (unsigned &value : host) value = value * 1664525u + round;
    std::vector<unsigned> got(count);
    CHECK(cudaMemcpy(got.data(), device, count * sizeof(unsigned), cudaMemcpyDeviceToHost));
    return got == host;
}

static bool ask(const char *what) {
    char done;
    return write(requests, what, std::strlen(what)) == static_cast<ssize_t>(std::strlen(what)) &&
           read(answers, &done, 1) == 1;
}

static size_t free_memory() {
    size_t free_bytes, total;
    CHECK(cudaMemGetInfo(&free_bytes, &total));
    return free_bytes;
}

// Works and measures before and while the other process holds memory, has it killed, and waits for the
// memory to come back.
static int watch() {
    std::vector<unsigned> host(1000);
    for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<unsigned>(i);
    unsigned *device;
    CHECK(cudaMalloc(&device, host.size() * sizeof(unsigned)));
    CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(unsigned), cudaMemcpyHostToDevice));
    unsigned round = 0;
    for (; round < 5; ++round) {
        if (!round_is_right(device, host, round)) {
            std::printf("FAIL neighbour: wrong before the kill, round %u\n", round);
            return 1;
        }
    }
    const size_t free_alone = free_memory();
    if (!ask("hold\n")) return 1;
    const size_t free_beside = free_memory();
    // A device whose memory is common to all processes shows the other process's allocation. The CPU device's memory is
    // its worker's own, and comes back with the worker, as the pinned memory does.
    const bool common = free_beside + held_bytes <= free_alone;
    void *pinned = nullptr;
    if (cudaMallocHost(&pinned, pinned_bytes) == cudaSuccess) {
        std::printf("FAIL neighbour: the pinned memory does not fill the window, so its return cannot be seen\n");
        return 1;
    }
    (void)cudaGetLastError();

    const auto start = std::chrono::steady_clock::now();
    if (!ask("kill\n")) return 1;
    double device_ms = common ? -1 : 0, pinned_ms = -1;
    while ((device_ms < 0 || pinned_ms < 0) && milliseconds_since(start) < patience_ms) {
        if (device_ms < 0 && free_memory() >= free_beside + held_bytes) device_ms = milliseconds_since(start);
        if (pinned_ms < 0 && cudaMallocHost(&pinned, pinned_bytes) == cudaSuccess) {
            pinned_ms = milliseconds_since(start);
        }
        (void)cudaGetLastError();
        if (!round_is_right(device, host, round++)) {
            std::printf("FAIL neighbour: wrong after the kill, round %u\n", round - 1);
            return 1;
        }
    }
    if (common) std::printf("device memory free after %.1f ms\n", device_ms);
    std::printf("pinned memory free after %.1f ms\n", pinned_ms);
    if (device_ms < 0 || pinned_ms < 0) {
        std::printf("FAIL neighbour: not free within %d ms\n", patience_ms);
        return 1;
    }
    std::printf("PASS neighbour %u rounds\n", round);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && std::strcmp(argv[1], "hold") == 0) return hold();
    if (argc > 1 && std::strcmp(argv[1], "watch") == 0) return watch();
    const bool namespaced = argc > 1 && std::strcmp(argv[1], "pidns") == 0;

    int said[2], asked[2], answered[2];
    if (pipe(said) != 0 || pipe(asked) != 0 || pipe(answered) != 0) return 1;
    dup2(asked[1], requests);
    dup2(answered[0], answers);
    close(asked[1]);
    const pid_t watcher = start("watch", namespaced, -1);
    close(requests);
    close(answers);
    expect_line(asked[0], "hold");
    const pid_t victim = start("hold", namespaced, said[1]);
    close(said[1]);
    expect_line(said[0], "holding");
    if (write(answered[1], "d", 1) != 1) return 1;
    expect_line(asked[0], "kill");
    kill(victim, SIGKILL);
    if (write(answered[1], "d", 1) != 1) return 1;
    waitpid(victim, nullptr, 0);
    int status = 0;
    waitpid(watcher, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
