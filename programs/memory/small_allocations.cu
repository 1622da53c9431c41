// Small allocations of mixed sizes by several threads: every byte is checked, none lies in two of them, and what was
// freed is free. On the CPU device a kernel that leaves one, or uses it after it was freed, faults.
#include "../api/driver.cuh"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

static const size_t MIB = 1 << 20;
static CUcontext context;
static std::mutex lock;
// All allocations of all threads: end by start.
static std::map<CUdeviceptr, CUdeviceptr> ranges;

struct Memory {
    CUdeviceptr address;
    size_t bytes;
    unsigned char value;
};

static Memory allocate(size_t bytes, unsigned char value) {
    Memory made = {0, bytes, value};
    WORKS(cuMemAlloc, &made.address, bytes);
    HOLDS(made.address % 256 == 0);
    CUdeviceptr base = 0;
    size_t size = 0;
    WORKS(cuMemGetAddressRange, &base, &size, made.address + bytes - 1);
    HOLDS(base == made.address && size == bytes);
    std::lock_guard<std::mutex> held(lock);
    auto after = ranges.lower_bound(base);
    HOLDS(after == ranges.end() || base + bytes <= after->first);
    HOLDS(after == ranges.begin() || std::prev(after)->second <= base);
    ranges[base] = base + bytes;
    WORKS(cuMemsetD8, base, value, bytes);
    return made;
}

static void check_and_free(const Memory &memory) {
    std::vector<unsigned char> bytes(memory.bytes);
    WORKS(cuMemcpyDtoH, bytes.data(), memory.address, memory.bytes);
    for (unsigned char byte : bytes) HOLDS(byte == memory.value);
    {
        std::lock_guard<std::mutex> held(lock);
        ranges.erase(memory.address);
    }
    WORKS(cuMemFree, memory.address);
}

static void mix(unsigned seed) {
    WORKS(cuCtxSetCurrent, context);
    std::mt19937 random(seed);
    std::vector<Memory> held;
    const size_t most[] = {100, 5000, 70000, MIB, 3 * MIB};
    for (int step = 0; step < 600; ++step) {
        if (held.size() < 40 && random() % 5 < 3) {
            const size_t bytes = 1 + random() % most[random() % 100 < 90 ? random() % 3 : random() % 5];
            held.push_back(allocate(bytes, static_cast<unsigned char>(random())));
        } else if (!held.empty()) {
            const size_t which = random() % held.size();
            check_and_free(held[which]);
            held.erase(held.begin() + which);
        }
    }
    for (const Memory &memory : held) check_and_free(memory);
}

static void refusals() {
    const Memory first = allocate(100, 1), second = allocate(1000, 2);
    unsigned char byte = 0;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemFree, first.address + 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemFree, first.address + 256);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8, first.address, 7, 101);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH, &byte, first.address + 100, 1);
    unsigned long long ids[2] = {};
    WORKS(cuPointerGetAttribute, &ids[0], CU_POINTER_ATTRIBUTE_BUFFER_ID, first.address);
    WORKS(cuPointerGetAttribute, &ids[1], CU_POINTER_ATTRIBUTE_BUFFER_ID, second.address);
    HOLDS(ids[0] != ids[1]);
    check_and_free(first);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemFree, first.address);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH, &byte, first.address, 1);
    check_and_free(second);
    CUdeviceptr none = 0;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemAlloc, &none, 0);
}

static size_t free_bytes() {
    size_t free = 0, total = 0;
    WORKS(cuMemGetInfo, &free, &total);
    return free;
}

// Returns whether the device's free memory falls by allocations and comes back.
static bool counted() {
    const size_t before = free_bytes();
    std::vector<Memory> held;
    for (int i = 0; i < 64; ++i) held.push_back(allocate(MIB / 2, static_cast<unsigned char>(i)));
    const bool fell = free_bytes() + 30 * MIB <= before;
    for (const Memory &memory : held) check_and_free(memory);
    return fell && free_bytes() + 2 * MIB >= before;
}

// Other processes on the device move the figure too, so one of several rounds has to hold.
static void counts() {
    for (int round = 0; round < 20; ++round) {
        if (counted()) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    HOLDS(!"free memory falls by allocations and comes back");
}

// The end of a context frees its memory.
static void of_a_context() {
    const size_t before = free_bytes();
    CUcontext other;
    WORKS(cuCtxCreate, &other, nullptr, 0, 0);
    CUdeviceptr last = 0, bytes = 0;
    for (int i = 0; i < 100; ++i) WORKS(cuMemAlloc, &last, 100000);
    HOLDS(free_bytes() + 9 * MIB <= before);
    WORKS(cuCtxDestroy, other);
    WORKS(cuCtxSetCurrent, context);
    HOLDS(free_bytes() + 2 * MIB >= before);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemFree, last);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH, &bytes, last, 1);
    WORKS(cuMemAlloc, &last, 100000);
    WORKS(cuMemFree, last);
}

__global__ void late(volatile int *done, int *memory, long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    *memory = 5;
    *done = 1;
}

// cuMemFree waits for the work that may use the memory.
static void waits() {
    int *done = nullptr, *device = nullptr;
    WORKS(cuMemHostAlloc, reinterpret_cast<void **>(&done), sizeof *done, CU_MEMHOSTALLOC_DEVICEMAP);
    WORKS(cuMemHostGetDevicePointer, reinterpret_cast<CUdeviceptr *>(&device), done, 0);
    CUstream stream;
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    for (int round = 0; round < 5; ++round) {
        *static_cast<volatile int *>(done) = 0;
        CUdeviceptr memory = 0;
        WORKS(cuMemAlloc, &memory, sizeof(int));
        late<<<1, 1, 0, stream>>>(device, reinterpret_cast<int *>(memory), 20000000);
        HOLDS(cudaGetLastError() == cudaSuccess);
        WORKS(cuMemFree, memory);
        HOLDS(*static_cast<volatile int *>(done) == 1);
    }
    WORKS(cuStreamDestroy, stream);
    WORKS(cuMemFreeHost, done);
}

__global__ void read(const unsigned char *memory, unsigned char *to) { *to = *memory; }

// Ends with 0 if a kernel that reads there faults. A GPU does not watch such accesses.
static int faults(bool after_free) {
    WORKS(cuInit, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    char name[100];
    WORKS(cuDeviceGetName, name, sizeof name, 0);
    if (!std::strstr(name, "CPU device")) return 0;
    CUdeviceptr near = 0, memory = 0, to = 0;
    WORKS(cuMemAlloc, &to, 1);
    WORKS(cuMemAlloc, &memory, 512);
    WORKS(cuMemAlloc, &near, 512);
    auto at = [&](CUdeviceptr from) {
        read<<<1, 1>>>(reinterpret_cast<unsigned char *>(from), reinterpret_cast<unsigned char *>(to));
        return cudaDeviceSynchronize();
    };
    HOLDS(at(memory + 511) == cudaSuccess);
    WORKS(cuMemFree, after_free ? memory : near);
    return at(after_free ? memory : near) == cudaErrorIllegalAddress ? 0 : 1;
}

static void child(bool after_free) {
    const pid_t process = fork();
    if (process == 0) std::_Exit(faults(after_free));
    int status = 0;
    HOLDS(waitpid(process, &status, 0) == process && status == 0);
}

int main() {
    child(true);
    child(false);
    WORKS(cuInit, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    refusals();
    std::vector<std::thread> threads;
    for (unsigned seed = 1; seed <= 4; ++seed) threads.emplace_back(mix, seed);
    for (std::thread &thread : threads) thread.join();
    HOLDS(ranges.empty());
    counts();
    of_a_context();
    waits();
    std::printf("PASS small_allocations\n");
    return 0;
}
