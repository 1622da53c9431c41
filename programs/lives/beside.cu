// Prints facts that a program gets of its device while other tenants use it. For each line `look` of its input it prints
// one line of figures and of results of calls that concern the whole device; for each line `take` it allocates memory. Any
// other line ends it.
#include "../check.cuh"

#include <dlfcn.h>

#include <iostream>
#include <string>

constexpr size_t own_bytes = 64 << 20;
constexpr size_t taken_bytes = 256 << 20;
constexpr size_t persisting_bytes = 1 << 20;

struct Memory { unsigned long long total, free, used; };
struct Process { unsigned pid; unsigned long long bytes; unsigned instance, part; };

static void *library;
static void *device;

// Returns the result of a function of NVML.
template <typename... A> static unsigned nvml(const char *name, A... arguments) {
    const auto function = reinterpret_cast<unsigned (*)(A...)>(dlsym(library, name));
    if (!function) {
        std::printf("FAIL beside: no function %s\n", name);
        std::exit(1);
    }
    return function(arguments...);
}

static void look() {
    size_t free_bytes, total;
    CHECK(cudaMemGetInfo(&free_bytes, &total));
    std::printf("not_free=%zu total=%zu", total - free_bytes, total);

    Memory memory = {};
    Process processes[64] = {};
    unsigned count = 64, watts = 0, utilization[2];
    unsigned long long energy;
    const unsigned known = nvml("nvmlDeviceGetMemoryInfo", device, &memory);
    std::printf(" memory=%u used=%llu", known, memory.used);
    const unsigned listed = nvml("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, processes);
    std::printf(" list=%u processes=%u", listed, count);
    std::printf(" power=%u", nvml("nvmlDeviceGetPowerUsage", device, &watts));
    std::printf(" energy=%u", nvml("nvmlDeviceGetTotalEnergyConsumption", device, &energy));
    std::printf(" utilization=%u", nvml("nvmlDeviceGetUtilizationRates", device, &utilization));

    // A part of the cache is set aside for no longer than the call that asks for its size.
    size_t persisting = 0;
    const cudaError_t set = cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, persisting_bytes);
    const cudaError_t got = cudaDeviceGetLimit(&persisting, cudaLimitPersistingL2CacheSize);
    const cudaError_t reset = cudaCtxResetPersistingL2Cache();
    if (set == cudaSuccess) CHECK(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 0));
    (void)cudaGetLastError();
    std::printf(" set=%s get=%s persisting=%zu reset=%s\n", cudaGetErrorName(set), cudaGetErrorName(got), persisting,
                cudaGetErrorName(reset));
}

int main() {
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library || nvml("nvmlInit_v2") != 0 || nvml("nvmlDeviceGetHandleByIndex_v2", 0u, &device) != 0) {
        std::printf("FAIL beside: NVML shows no device\n");
        return 1;
    }
    void *memory;
    CHECK(cudaMalloc(&memory, own_bytes));
    CHECK(cudaMemset(memory, 1, own_bytes));
    CHECK(cudaDeviceSynchronize());
    for (std::string line; std::getline(std::cin, line);) {
        if (line == "look") {
            look();
        } else if (line == "take") {
            CHECK(cudaMalloc(&memory, taken_bytes));
            std::printf("taken\n");
        } else {
            break;
        }
        std::fflush(stdout);
    }
    std::printf("PASS beside\n");
    return 0;
}
