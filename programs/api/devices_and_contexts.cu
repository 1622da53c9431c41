// Queries of devices, contexts with their stacks and settings, by each version of the functions; names of errors, the
// driver's log, and entry points as CUDA 11 requested them.
#include <cstdint>
#include <cstring>

#include <unistd.h>

#include "driver.cuh"

static int attribute(CUdevice_attribute which) {
    int value = -1;
    WORKS(cuDeviceGetAttribute, &value, which, 0);
    return value;
}

static void devices() {
    int major = -1, minor = -1, affinity = -1;
    WORKS(cuDeviceComputeCapability, &major, &minor, 0);
    HOLDS(major == attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
    HOLDS(minor == attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuDeviceComputeCapability, &major, &minor, 99);
    CUdevprop properties;
    std::memset(&properties, 0xee, sizeof properties);
    WORKS(cuDeviceGetProperties, &properties, 0);
    HOLDS(properties.maxThreadsPerBlock == attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK));
    HOLDS(properties.maxThreadsDim[2] == attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z));
    HOLDS(properties.maxGridSize[1] == attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y));
    HOLDS(properties.SIMDWidth == attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE));
    HOLDS(properties.regsPerBlock == attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK));
    HOLDS(properties.clockRate == attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE));
    HOLDS(properties.textureAlign == attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT));

    char bus[32];
    CUdevice found = 77;
    WORKS(cuDeviceGetPCIBusId, bus, sizeof bus, 0);
    WORKS(cuDeviceGetByPCIBusId, &found, bus);
    HOLDS(found == 0);
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetByPCIBusId, &found, "ffff:ff:1f.0");
    CUuuid first, second;
    std::memset(&first, 0, sizeof first);
    std::memset(&second, 1, sizeof second);
    WORKS(cuDeviceGetUuid, &first, 0);
    GIVES(CUDA_SUCCESS, "cuDeviceGetUuid_v2", &second, 0);
    HOLDS(std::memcmp(&first, &second, sizeof first) == 0);
    // Queries that only Windows supports, and affinity, which needs a multi-process server.
    char luid[8];
    unsigned mask;
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuDeviceGetLuid, luid, &mask, 0);
    WORKS(cuDeviceGetExecAffinitySupport, &affinity, CU_EXEC_AFFINITY_TYPE_SM_COUNT, 0);
    HOLDS(affinity == 0);
    WORKS(cuDeviceGraphMemTrim, 0);
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGraphMemTrim, 99);
}

static CUcontext current() {
    CUcontext context = reinterpret_cast<CUcontext>(7);
    WORKS(cuCtxGetCurrent, &context);
    return context;
}

static void primary_contexts() {
    unsigned flags = 77;
    int active = 77;
    CUcontext context = nullptr;
    const unsigned spin = CU_CTX_SCHED_SPIN, yields = CU_CTX_SCHED_YIELD;
    GIVES(CUDA_SUCCESS, "cuDevicePrimaryCtxSetFlags_v2", 0, spin);
    WORKS(cuDevicePrimaryCtxGetState, 0, &flags, &active);
    HOLDS(flags == spin && active == 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuDevicePrimaryCtxGetState, 0, &flags, &active);
    HOLDS(flags == spin && active == 1);
    GIVES(CUDA_SUCCESS, "cuDevicePrimaryCtxRelease_v2", 0);
    GIVES(CUDA_SUCCESS, "cuDevicePrimaryCtxSetFlags", 0, yields);
    WORKS(cuDevicePrimaryCtxGetState, 0, &flags, &active);
    HOLDS(flags == yields && active == 0);
    GIVES(CUDA_ERROR_INVALID_CONTEXT, "cuDevicePrimaryCtxRelease_v2", 0);
    GIVES(CUDA_ERROR_INVALID_DEVICE, "cuDevicePrimaryCtxSetFlags_v2", 99, spin);
    GIVES(CUDA_SUCCESS, "cuDevicePrimaryCtxSetFlags", 0, 0u);
}

static void stacks() {
    HOLDS(current() == nullptr);
    CUcontext made[4] = {}, popped = nullptr;
    GIVES(CUDA_SUCCESS, "cuCtxCreate_v2", &made[0], 0u, 0);
    HOLDS(made[0] && current() == made[0]);
    GIVES(CUDA_SUCCESS, "cuCtxCreate_v2", &made[1], 0u, 0);
    HOLDS(made[1] && made[1] != made[0] && current() == made[1]);
    GIVES(CUDA_SUCCESS, "cuCtxCreate_v3", &made[2], nullptr, 0, 0u, 0);
    HOLDS(made[2] && current() == made[2]);
    GIVES(CUDA_ERROR_INVALID_DEVICE, "cuCtxCreate_v3", &made[3], nullptr, 0, 0u, 99);

    unsigned long long ids[2] = {};
    WORKS(cuCtxGetId, made[0], &ids[0]);
    WORKS(cuCtxGetId, made[1], &ids[1]);
    HOLDS(ids[0] && ids[1] && ids[0] != ids[1]);

    WORKS(cuCtxPopCurrent, &popped);
    HOLDS(popped == made[2] && current() == made[1]);
    WORKS(cuCtxPushCurrent, made[0]);
    HOLDS(current() == made[0]);
    WORKS(cuCtxPopCurrent, &popped);
    HOLDS(popped == made[0] && current() == made[1]);
    WORKS(cuCtxDestroy, made[2]);
    // A context that is destroyed while it is current is removed from the stack.
    WORKS(cuCtxDestroy, made[1]);
    HOLDS(current() == made[0]);
    WORKS(cuCtxDestroy, made[0]);
    HOLDS(current() == nullptr);
}

// Contexts of CUDA 3.1, by the functions of that version. Natively they cannot coexist with contexts of later versions,
// whose functions do not work in them.
static void oldest() {
    CUcontext made[2] = {}, none = nullptr, popped = nullptr;
    GIVES(CUDA_ERROR_INVALID_CONTEXT, "cuCtxPopCurrent", &popped);
    GIVES(CUDA_ERROR_INVALID_VALUE, "cuCtxPushCurrent", nullptr);
    for (const char *name : {"cuCtxDestroy", "cuCtxDestroy_v2"}) GIVES(CUDA_ERROR_INVALID_VALUE, name, nullptr);
    GIVES(CUDA_ERROR_INVALID_DEVICE, "cuCtxCreate", &none, 0u, 99);
    for (CUcontext &context : made) GIVES(CUDA_SUCCESS, "cuCtxCreate", &context, 0u, 0);
    HOLDS(made[0] && made[1] && made[0] != made[1]);
    GIVES(CUDA_SUCCESS, "cuCtxPopCurrent", &popped);
    HOLDS(popped == made[1]);
    GIVES(CUDA_SUCCESS, "cuCtxPopCurrent", &popped);
    HOLDS(popped == made[0]);
    GIVES(CUDA_ERROR_INVALID_CONTEXT, "cuCtxPopCurrent", &popped);
    for (CUcontext context : made) {
        GIVES(CUDA_SUCCESS, "cuCtxPushCurrent", context);
        GIVES(CUDA_SUCCESS, "cuCtxDestroy", context);
        GIVES(CUDA_ERROR_INVALID_CONTEXT, "cuCtxPopCurrent", &popped);
    }
}

static void settings() {
    CUfunc_cache cache = static_cast<CUfunc_cache>(77);
    WORKS(cuCtxSetCacheConfig, CU_FUNC_CACHE_PREFER_L1);
    WORKS(cuCtxGetCacheConfig, &cache);
    HOLDS(cache == CU_FUNC_CACHE_PREFER_L1);
    WORKS(cuCtxSetCacheConfig, CU_FUNC_CACHE_PREFER_NONE);
    WORKS(cuCtxGetCacheConfig, &cache);
    HOLDS(cache == CU_FUNC_CACHE_PREFER_NONE);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCtxSetCacheConfig, static_cast<CUfunc_cache>(99));
    WORKS(cuCtxSetSharedMemConfig, CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCtxSetSharedMemConfig, static_cast<CUsharedconfig>(99));
    WORKS(cuCtxResetPersistingL2Cache);
    WORKS(cuProfilerStart);
    WORKS(cuProfilerStop);
}

static void without_a_context() {
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuProfilerStop);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuCtxResetPersistingL2Cache);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuCtxSetCacheConfig, CU_FUNC_CACHE_PREFER_L1);
}

static void names() {
    const char *name = nullptr;
    WORKS(cuGetErrorName, CUDA_ERROR_NOT_READY, &name);
    HOLDS(std::strcmp(name, "CUDA_ERROR_NOT_READY") == 0);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGetErrorName, static_cast<CUresult>(12345), &name);
    HOLDS(name == nullptr);

    void *found = nullptr;
    GIVES(CUDA_SUCCESS, "cuGetProcAddress", "cuMemAlloc", &found, 3020, cuuint64_t{0});
    HOLDS(found == driver_function("cuMemAlloc_v2"));
    GIVES(CUDA_ERROR_NOT_FOUND, "cuGetProcAddress", "cuNone", &found, 13000, cuuint64_t{0});
    GIVES(CUDA_SUCCESS, "cuGetProcAddress", "cuStreamQuery", &found, 13000,
          cuuint64_t{CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM});
    HOLDS(found == driver_function("cuStreamQuery_ptsz"));
}

static void heard(void *, CUlogLevel, char *, size_t) {}

// From now on nothing is logged.
static void logs() {
    CUlogIterator place = 0xeeeeeeee;
    char text[256];
    std::memset(text, 'x', sizeof text);
    size_t size = sizeof text;
    char path[] = "/tmp/wormhole-logs-XXXXXX";
    const int file = mkstemp(path);
    HOLDS(file >= 0 && write(file, "x", 1) == 1 && close(file) == 0);
    WORKS(cuLogsCurrent, &place, 0);
    HOLDS(place != 0xeeeeeeee);
    WORKS(cuLogsDumpToFile, &place, path, 0);
    std::FILE *written = std::fopen(path, "r");
    HOLDS(written && std::fgetc(written) == EOF);
    std::fclose(written);
    std::remove(path);
    WORKS(cuLogsDumpToMemory, &place, text, &size, 0);
    HOLDS(size == 0);
    WORKS(cuLogsCurrent, &place, 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuLogsDumpToMemory, &place, nullptr, &size, 0);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuLogsDumpToFile, &place, "/nowhere/at/all", 0);

    CUlogsCallbackHandle first = nullptr, second = nullptr;
    WORKS(cuLogsRegisterCallback, heard, nullptr, &first);
    WORKS(cuLogsRegisterCallback, heard, nullptr, &second);
    HOLDS(first != second);
    WORKS(cuLogsUnregisterCallback, first);
    WORKS(cuLogsUnregisterCallback, second);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuLogsRegisterCallback, nullptr, nullptr, &first);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuLogsUnregisterCallback, nullptr);
}

int main() {
    WORKS(cuInit, 0);
    oldest();
    devices();
    primary_contexts();
    stacks();
    without_a_context();
    names();
    logs();
    CUcontext context = nullptr;
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    settings();
    WORKS(cuCtxSetCurrent, nullptr);
    WORKS(cuDevicePrimaryCtxRelease, 0);
    std::printf("PASS devices_and_contexts\n");
    return 0;
}
