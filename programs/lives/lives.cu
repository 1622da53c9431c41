// Lives of processes that use CUDA: they fork, execute another program, load and unload the libraries, and end, in
// every order. Without an argument every case is run, each in a process of its own; with one, that case.
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../api/driver.cuh"
#include "../check.cuh"

extern char **environ;

__global__ void add(unsigned *values, unsigned count, unsigned more) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) values[index] += more;
}

__global__ void spin(volatile unsigned *gate) {
    while (*gate == 0) {
    }
}

static const unsigned count = 1000;

// Some work whose result is known; false if it is not right, or if CUDA refuses.
static bool computes() {
    unsigned *values = nullptr, first = 0, last = 0;
    cudaStream_t stream = nullptr;
    if (cudaMalloc(&values, count * sizeof *values) != cudaSuccess) return false;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return false;
    cudaMemsetAsync(values, 0, count * sizeof *values, stream);
    for (unsigned round = 1; round <= 10; round++) add<<<(count + 127) / 128, 128, 0, stream>>>(values, count, round);
    cudaMemcpyAsync(&first, values, sizeof first, cudaMemcpyDeviceToHost, stream);
    cudaMemcpyAsync(&last, values + count - 1, sizeof last, cudaMemcpyDeviceToHost, stream);
    const bool done = cudaStreamSynchronize(stream) == cudaSuccess;
    return cudaStreamDestroy(stream) == cudaSuccess && cudaFree(values) == cudaSuccess && done && first == 55 && last == 55;
}

// Keeps a stream busy for as long as the process lives.
static cudaStream_t busy() {
    unsigned *gate = nullptr;
    cudaStream_t stream = nullptr;
    CHECK(cudaHostAlloc(&gate, sizeof *gate, cudaHostAllocMapped));
    *gate = 0;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    spin<<<1, 1, 0, stream>>>(gate);
    CHECK(cudaGetLastError());
    return stream;
}

// The exit status of a child.
static int ended(pid_t child) {
    int status = 0;
    HOLDS(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static char *const again[] = {const_cast<char *>("lives"), const_cast<char *>("computes"), nullptr};

[[noreturn]] static void become_another() {
    execv("/proc/self/exe", again);
    _exit(127);
}

template <typename Work>
static pid_t forked(Work work) {
    const pid_t child = fork();
    HOLDS(child >= 0);
    if (child == 0) {
        alarm(60);
        work();
        _exit(126);
    }
    return child;
}

static void works() { HOLDS(computes()); }

// The children of a process that has not called CUDA begin as any process does.
static void fork_before() {
    const pid_t first = forked([] { _exit(computes() ? 0 : 1); });
    pid_t second = 0;
    std::thread([&] { second = forked([] { std::exit(computes() ? 0 : 1); }); }).join();
    works();
    HOLDS(ended(first) == 0 && ended(second) == 0);
    works();
}

// In the child of a process that has called CUDA every call fails, and the child can end in any way.
static bool is_refused() {
    int number = 0;
    CUcontext context = nullptr;
    CUdeviceptr memory = 0;
    void *place = nullptr;
    const int codes[] = {DRIVER(cuInit)(0), DRIVER(cuDeviceGetCount)(&number), DRIVER(cuCtxGetCurrent)(&context),
                         DRIVER(cuMemAlloc)(&memory, 64), DRIVER(cuCtxSynchronize)(), cudaMalloc(&place, 64)};
    for (const int code : codes) {
        if (code != CUDA_ERROR_NOT_INITIALIZED) return false;
    }
    return true;
}

static void fork_after() {
    works();
    HOLDS(ended(forked([] { _exit(is_refused() ? 0 : 1); })) == 0);
    HOLDS(ended(forked([] { std::exit(is_refused() ? 0 : 1); })) == 0);
    HOLDS(ended(forked([] { _exit(ended(forked([] { _exit(is_refused() ? 0 : 1); }))); })) == 0);
    works();
}

// Forks while other threads are at work, which do not exist in the children.
static void fork_amid_work() {
    works();
    std::atomic<bool> over{false}, wrong{false};
    std::vector<std::thread> threads;
    for (int index = 0; index < 3; index++) {
        threads.emplace_back([&] {
            while (!over) wrong = wrong || !computes();
        });
    }
    for (int round = 0; round < 4; round++) {
        HOLDS(ended(forked([] { _exit(DRIVER(cuCtxSynchronize)() == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1); })) == 0);
        HOLDS(ended(forked([] { become_another(); })) == 0);
    }
    over = true;
    for (std::thread &thread : threads) thread.join();
    HOLDS(!wrong);
}

static void fork_and_exec() {
    works();
    const pid_t child = forked([] { become_another(); });
    works();
    HOLDS(ended(child) == 0);
    works();
}

static void vfork_and_spawn() {
    works();
    const pid_t child = vfork();
    if (child == 0) {
        execv("/proc/self/exe", again);
        _exit(127);
    }
    pid_t spawned = 0;
    HOLDS(posix_spawn(&spawned, "/proc/self/exe", nullptr, nullptr, again, environ) == 0);
    works();
    HOLDS(ended(child) == 0 && ended(spawned) == 0);
    works();
}

static void exec() {
    works();
    busy();
    become_another();
}

// Stream of each thread, destroyed when the thread ends.
struct Own {
    cudaStream_t stream = nullptr;
    ~Own() {
        if (stream) CHECK(cudaStreamDestroy(stream));
    }
};
static thread_local Own own;

static void threads() {
    for (int round = 0; round < 2; round++) {
        std::vector<std::thread> all;
        std::atomic<int> right{0};
        for (int index = 0; index < 24; index++) {
            all.emplace_back([&] {
                CHECK(cudaStreamCreate(&own.stream));
                right += computes();
                CHECK(cudaStreamSynchronize(cudaStreamPerThread));
            });
        }
        for (std::thread &thread : all) thread.join();
        HOLDS(right == 24);
    }
}

static void main_thread_ends() {
    static const pthread_t first = pthread_self();
    std::thread([] {
        pthread_join(first, nullptr);
        std::exit(computes() ? 21 : 1);
    }).detach();
    works();
    pthread_exit(nullptr);
}

static void exit_in_a_thread() {
    works();
    cudaStream_t stream = busy();
    std::thread([] { std::exit(22); }).detach();
    cudaStreamSynchronize(stream);
    // The thread does not end before the process does.
    for (;;) pause();
}

static void exit_at_once() {
    busy();
    _exit(23);
}

static void quick_exit() {
    busy();
    std::quick_exit(24);
}

// Exit handlers that were registered before the driver's run after its end; those that were registered later run
// before.
static void exit_handlers() {
    std::atexit([] {
        CUdeviceptr memory = 0;
        void *place = nullptr;
        const int code = cudaMalloc(&place, 64);
        const bool ended = code == cudaErrorCudartUnloading || code == cudaErrorInitializationError;
        _exit(DRIVER(cuMemAlloc)(&memory, 64) == CUDA_ERROR_DEINITIALIZED && ended ? 25 : 1);
    });
    works();
    std::atexit([] { works(); });
    std::exit(0);
}

// A static object whose destructor frees device memory after the driver has ended.
struct Kept {
    unsigned *values = nullptr;
    ~Kept() {
        if (!values) return;
        const int code = cudaFree(values), other = cudaDeviceSynchronize();
        std::fflush(stdout);
        _exit(code == cudaErrorCudartUnloading && other == code ? 26 : 1);
    }
};
static Kept kept;

static void static_destructor() {
    works();
    CHECK(cudaMalloc(&kept.values, 64));
}

static std::string runtime() {
    char path[4096] = {};
    HOLDS(readlink("/proc/self/exe", path, sizeof path - 1) > 0);
    const std::string programs = std::string(path).substr(0, std::string(path).rfind("/static/"));
    return programs + "/shared/libcudart.so.13";
}

// Two runtimes in one process have one context, and each goes and comes by itself.
static void two_runtimes() {
    for (int round = 0; round < 3; round++) {
        void *library = dlopen(runtime().c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            std::printf("FAIL lives: %s\n", dlerror());
            std::exit(1);
        }
        const auto allocate = reinterpret_cast<cudaError_t (*)(void **, size_t)>(dlsym(library, "cudaMalloc"));
        const auto fill = reinterpret_cast<decltype(&cudaMemset)>(dlsym(library, "cudaMemset"));
        const auto copy = reinterpret_cast<decltype(&cudaMemcpy)>(dlsym(library, "cudaMemcpy"));
        const auto release = reinterpret_cast<decltype(&cudaFree)>(dlsym(library, "cudaFree"));
        HOLDS(allocate && fill && copy && release);
        HOLDS(reinterpret_cast<void *>(release) != reinterpret_cast<void *>(&cudaFree));
        unsigned *theirs = nullptr, *ours = nullptr, value = 0;
        HOLDS(allocate(reinterpret_cast<void **>(&theirs), 64) == cudaSuccess);
        HOLDS(fill(theirs, 0, 64) == cudaSuccess);
        add<<<1, 16>>>(theirs, 16, 7);
        HOLDS(copy(&value, theirs + 15, sizeof value, cudaMemcpyDeviceToHost) == cudaSuccess && value == 7);
        CHECK(cudaMalloc(&ours, 64));
        HOLDS(fill(ours, 1, 64) == cudaSuccess && release(theirs) == cudaSuccess);
        CHECK(cudaMemcpy(&value, ours, sizeof value, cudaMemcpyDeviceToHost));
        HOLDS(value == 0x01010101);
        CHECK(cudaFree(ours));
        HOLDS(dlclose(library) == 0);
        works();
    }
}

// The driver's library is closed and opened again.
static void driver_again() {
    CUdeviceptr memory = 0;
    unsigned value = 0;
    for (int round = 0; round < 3; round++) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        HOLDS(library);
        const auto initialise = reinterpret_cast<decltype(&cuInit)>(dlsym(library, "cuInit"));
        const auto retain = reinterpret_cast<decltype(&cuDevicePrimaryCtxRetain)>(dlsym(library, "cuDevicePrimaryCtxRetain"));
        const auto choose = reinterpret_cast<decltype(&cuCtxSetCurrent)>(dlsym(library, "cuCtxSetCurrent"));
        const auto allocate = reinterpret_cast<decltype(&cuMemAlloc)>(dlsym(library, "cuMemAlloc_v2"));
        const auto fill = reinterpret_cast<decltype(&cuMemsetD32)>(dlsym(library, "cuMemsetD32_v2"));
        const auto copy = reinterpret_cast<decltype(&cuMemcpyDtoH)>(dlsym(library, "cuMemcpyDtoH_v2"));
        CUcontext context = nullptr;
        HOLDS(initialise(0) == 0 && retain(&context, 0) == 0 && choose(context) == 0);
        // Memory keeps its contents.
        if (round > 0) HOLDS(copy(&value, memory, sizeof value) == 0 && value == 40u + round);
        if (round == 0) HOLDS(allocate(&memory, 64) == 0);
        HOLDS(fill(memory, 41 + round, 1) == 0);
        HOLDS(dlclose(library) == 0);
    }
    works();
}

struct Case {
    const char *name;
    void (*run)();
    int status;
};

static const Case cases[] = {
    {"computes", works, 0},
    {"fork_before", fork_before, 0},
    {"fork_after", fork_after, 0},
    {"fork_amid_work", fork_amid_work, 0},
    {"fork_and_exec", fork_and_exec, 0},
    {"vfork_and_spawn", vfork_and_spawn, 0},
    {"exec", exec, 0},
    {"threads", threads, 0},
    {"main_thread_ends", main_thread_ends, 21},
    {"exit_in_a_thread", exit_in_a_thread, 22},
    {"exit_at_once", exit_at_once, 23},
    {"quick_exit", quick_exit, 24},
    {"exit_handlers", exit_handlers, 25},
    {"static_destructor", static_destructor, 26},
    {"two_runtimes", two_runtimes, 0},
    {"driver_again", driver_again, 0},
};

int main(int argc, char **argv) {
    for (const Case &one : cases) {
        if (argc > 1 && std::strcmp(argv[1], one.name) == 0) {
            one.run();
            return 0;
        }
    }
    for (const Case &one : cases) {
        const pid_t child = fork();
        HOLDS(child >= 0);
        if (child == 0) {
            alarm(60);
            execl("/proc/self/exe", "lives", one.name, static_cast<char *>(nullptr));
            _exit(127);
        }
        const int status = ended(child);
        if (status != one.status) {
            std::printf("FAIL lives: %s ended with %d, not %d\n", one.name, status, one.status);
            return 1;
        }
    }
    std::printf("PASS lives\n");
    return 0;
}
