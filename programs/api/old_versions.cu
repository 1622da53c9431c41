// Functions of CUDA 3.1 as contexts with 64-bit addresses serve them, the linker before CUDA 6.5, and functions
// that answer without a device: all called by their names in the library.
#include "driver.cuh"

#include <cstdint>
#include <cstring>

#include <unistd.h>

static const char PTX[] =
    ".version 8.0\n.target sm_70\n.address_size 64\n"
    ".visible .global .u32 word;\n"
    ".visible .entry one(.param .u64 out)\n{ .reg .b64 %o; ld.param.u64 %o,[out]; st.global.u32 [%o],77; ret; }\n";

static void narrow(CUdevice device) {
    const uint32_t seven = 7;
    uint32_t first = seven, second = seven;
    void *host = &first;
    char bytes[16] = {};
    size_t total = 0;
    WORKS(cuDeviceTotalMem, &total, device);
    HOLDS(call("cuDeviceTotalMem", &first, device) == CUDA_SUCCESS);
    HOLDS(first == (total > UINT32_MAX ? UINT32_MAX : (uint32_t)total));
    HOLDS(call("cuDeviceTotalMem", &first, 99) == CUDA_ERROR_INVALID_DEVICE && first == 0);
    HOLDS(call("cuDeviceTotalMem", nullptr, device) == CUDA_ERROR_INVALID_VALUE);

    const int wide = CUDA_ERROR_INVALID_CONTEXT;
    first = seven;
    HOLDS(call("cuMemAlloc", &first, 100u) == wide && first == 0);
    HOLDS(call("cuMemAllocHost", &host, 100u) == wide && host == nullptr);
    first = second = seven;
    HOLDS(call("cuMemAllocPitch", &first, &second, 10u, 10u, 4u) == wide && first == 0 && second == 0);
    first = second = seven;
    HOLDS(call("cuMemGetInfo", &first, &second) == wide && first == 0 && second == 0);
    first = second = seven;
    HOLDS(call("cuMemGetAddressRange", &first, &second, 4096u) == wide && first == 0 && second == 0);
    HOLDS(call("cuMemGetAddressRange", nullptr, nullptr, 4096u) == CUDA_SUCCESS);
    HOLDS(call("cuMemcpyHtoD", 4096u, (void *)bytes, 16u) == wide);
    HOLDS(call("cuMemsetD2D32", 4096u, 16u, 1u, 4u, 4u) == wide);
    HOLDS(call("cuMemcpy2D", (void *)nullptr) == wide);
    first = second = seven;
    HOLDS(call("cuMemHostGetDevicePointer", &first, (void *)bytes, 0u) == wide && first == 0);
    first = second = seven;
    CUmodule module;
    WORKS(cuModuleLoadData, &module, PTX);
    HOLDS(call("cuModuleGetGlobal", &first, &second, module, "word") == wide && first == 0 && second == 0);
    WORKS(cuModuleUnload, module);
    for (const char *name : {"cuArrayGetDescriptor", "cuArray3DGetDescriptor"}) {
        HOLDS(call(name, bytes, nullptr) == CUDA_ERROR_INVALID_HANDLE);
    }
    // The other functions write no result.
    for (const char *name :
         {"cuArray3DCreate", "cuArrayCreate", "cuMemFree", "cuMemcpy2DAsync", "cuMemcpy2DUnaligned", "cuMemcpy3D",
          "cuMemcpy3DAsync", "cuMemcpyAtoA", "cuMemcpyAtoD", "cuMemcpyAtoH", "cuMemcpyAtoHAsync", "cuMemcpyDtoA",
          "cuMemcpyHtoA", "cuMemcpyHtoAAsync", "cuMemsetD2D16", "cuMemsetD2D8"}) {
        GIVES(wide, name, nullptr, nullptr, nullptr, nullptr, nullptr);
    }
    CUstream stream;
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    GIVES(wide, "cuMemcpyDtoD", 4096u, 8192u, 16u);
    GIVES(wide, "cuMemcpyDtoDAsync", 4096u, 8192u, 16u, stream);
    GIVES(wide, "cuMemcpyDtoH", (void *)bytes, 4096u, 16u);
    GIVES(wide, "cuMemcpyDtoHAsync", (void *)bytes, 4096u, 16u, stream);
    GIVES(wide, "cuMemcpyHtoDAsync", 4096u, (void *)bytes, 16u, stream);
    for (const char *name : {"cuMemsetD8", "cuMemsetD16", "cuMemsetD32"}) GIVES(wide, name, 4096u, 1u, 16u);
    WORKS(cuStreamDestroy, stream);
    // The reference is destroyed with its context.
    void *reference = nullptr;
    GIVES(CUDA_SUCCESS, "cuTexRefCreate", &reference);
    first = seven;
    HOLDS(call("cuTexRefSetAddress", &first, reference, 4096u, 16u) == wide && first == 0);
    first = seven;
    HOLDS(call("cuTexRefGetAddress", &first, reference) == wide && first == 0);
    const unsigned narrow_descriptor[] = {4, 4, CU_AD_FORMAT_FLOAT, 1};
    HOLDS(call("cuTexRefSetAddress2D", reference, narrow_descriptor, 4096u, 512u) == wide);
    first = seven;
    HOLDS(call("cuTexRefSetAddress", &first, nullptr, 4096u, 16u) == CUDA_ERROR_INVALID_HANDLE && first == 0);
    first = seven;
    HOLDS(call("cuTexRefGetAddress", &first, nullptr) == CUDA_ERROR_INVALID_HANDLE && first == 0);
    HOLDS(call("cuTexRefSetAddress2D", nullptr, narrow_descriptor, 4096u, 512u) == CUDA_ERROR_INVALID_HANDLE);
    // The same names, asked for by version, are these functions until CUDA 3.2.
    void *found = nullptr;
    WORKS(cuGetProcAddress, "cuMemAlloc", &found, 2000, 0, nullptr);
    HOLDS(found == driver_function("cuMemAlloc"));
    WORKS(cuGetProcAddress, "cuMemAlloc", &found, 3020, 0, nullptr);
    HOLDS(found == driver_function("cuMemAlloc_v2"));
}

static void linker() {
    CUlinkState state;
    void *image;
    size_t bytes;
    HOLDS(call("cuLinkCreate", 0u, nullptr, nullptr, &state) == CUDA_SUCCESS);
    HOLDS(call("cuLinkAddData", state, CU_JIT_INPUT_PTX, PTX, sizeof PTX, "one", 0u, nullptr, nullptr) == CUDA_SUCCESS);
    HOLDS(call("cuLinkAddFile", state, CU_JIT_INPUT_PTX, "/nonexistent", 0u, nullptr, nullptr) == CUDA_ERROR_FILE_NOT_FOUND);
    WORKS(cuLinkComplete, state, &image, &bytes);
    CUmodule module;
    CUfunction function;
    CUdeviceptr out;
    unsigned value = 0;
    WORKS(cuModuleLoadData, &module, image);
    WORKS(cuLinkDestroy, state);
    WORKS(cuModuleGetFunction, &function, module, "one");
    WORKS(cuMemAlloc, &out, 4);
    void *arguments[] = {&out};
    WORKS(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr);
    WORKS(cuMemcpyDtoH, &value, out, 4);
    HOLDS(value == 77);
    WORKS(cuMemFree, out);
    WORKS(cuModuleUnload, module);
}

static unsigned number(bool global, CUcoredumpSettings setting, size_t bytes) {
    unsigned value = 0;
    if (global) {
        WORKS(cuCoredumpGetAttributeGlobal, setting, &value, &bytes);
    } else {
        WORKS(cuCoredumpGetAttribute, setting, &value, &bytes);
    }
    return value;
}

static void core_dumps() {
    HOLDS(number(false, CU_COREDUMP_ENABLE_ON_EXCEPTION, 1) == 0 && number(true, CU_COREDUMP_TRIGGER_HOST, 1) == 1);
    size_t bytes = 0;
    WORKS(cuCoredumpGetAttribute, CU_COREDUMP_FILE, nullptr, &bytes);
    HOLDS(bytes == 1024);
    char name[32] = "abcdefgh";
    bytes = 3;
    WORKS(cuCoredumpSetAttribute, CU_COREDUMP_FILE, name, &bytes);
    bytes = sizeof name;
    WORKS(cuCoredumpGetAttribute, CU_COREDUMP_FILE, name, &bytes);
    HOLDS(std::strcmp(name, "abc") == 0);
    bytes = sizeof name;
    WORKS(cuCoredumpGetAttributeGlobal, CU_COREDUMP_FILE, name, &bytes);
    HOLDS(name[0] == 0);
    bool on = true;
    bytes = 1;
    WORKS(cuCoredumpSetAttribute, CU_COREDUMP_LIGHTWEIGHT, &on, &bytes);
    HOLDS(number(false, CU_COREDUMP_GENERATION_FLAGS, 4) == CU_COREDUMP_LIGHTWEIGHT_FLAGS);
    HOLDS(number(true, CU_COREDUMP_GENERATION_FLAGS, 4) == 0);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCoredumpGetAttribute, CU_COREDUMP_PIPE, name, &bytes);
    bytes = 2;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCoredumpSetAttribute, CU_COREDUMP_LIGHTWEIGHT, &on, &bytes);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCoredumpGetAttribute, CU_COREDUMP_LIGHTWEIGHT, &on, nullptr);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCoredumpGetAttribute, CU_COREDUMP_MAX, &on, &bytes);
    // New contexts begin with the values that the process sets.
    unsigned flags = CU_COREDUMP_SKIP_ABORT;
    bytes = 4;
    WORKS(cuCoredumpSetAttributeGlobal, CU_COREDUMP_GENERATION_FLAGS, &flags, &bytes);
    HOLDS(number(false, CU_COREDUMP_TRIGGER_HOST, 1) == 1);
    CUcontext context;
    WORKS(cuCtxCreate, &context, nullptr, 0, 0);
    HOLDS(number(false, CU_COREDUMP_TRIGGER_HOST, 1) == 0);
    WORKS(cuCtxDestroy, context);
}

static void notified(CUasyncNotificationInfo *, void *, CUasyncCallbackHandle) {}

static void others(CUdevice device) {
    CUasyncCallbackHandle first, second;
    WORKS(cuDeviceRegisterAsyncNotification, device, notified, nullptr, &first);
    WORKS(cuDeviceRegisterAsyncNotification, device, notified, nullptr, &second);
    HOLDS(first != second);
    const CUasyncCallbackHandle last = second;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuDeviceRegisterAsyncNotification, device, nullptr, nullptr, &second);
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuDeviceRegisterAsyncNotification, 99, notified, nullptr, &second);
    WORKS(cuDeviceUnregisterAsyncNotification, device, first);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuDeviceUnregisterAsyncNotification, device, nullptr);
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuDeviceUnregisterAsyncNotification, 99, last);
    // The last one ends with its context.

    static char list[4096];
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuDeviceGetNvSciSyncAttributes, nullptr, device, 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuDeviceGetNvSciSyncAttributes, list, device, 4);
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetNvSciSyncAttributes, list, 99, 1);
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuDeviceGetNvSciSyncAttributes, list, device, 3);
    for (const char *name : {"cuDestroyExternalMemory", "cuDestroyExternalSemaphore"}) {
        GIVES(CUDA_ERROR_INVALID_VALUE, name, nullptr);
    }
    CUstream stream;
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    for (const char *name : {"cuSignalExternalSemaphoresAsync", "cuSignalExternalSemaphoresAsync_ptsz",
                             "cuWaitExternalSemaphoresAsync", "cuWaitExternalSemaphoresAsync_ptsz"}) {
        GIVES(CUDA_ERROR_INVALID_VALUE, name, nullptr, nullptr, 0u, stream);
    }
    WORKS(cuStreamDestroy, stream);
    for (const char *name : {"cuMemMapArrayAsync", "cuMemMapArrayAsync_ptsz"}) {
        GIVES(CUDA_ERROR_INVALID_VALUE, name, nullptr, 0u, nullptr);
    }
    CUprocessState state;
    WORKS(cuCheckpointProcessGetState, getpid(), &state);
    HOLDS(state == CU_PROCESS_STATE_RUNNING);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessGetState, getpid(), nullptr);
    RETURNS(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointProcessGetState, -1, &state);
    RETURNS(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock, getpid(), nullptr);
    RETURNS(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessRestore, getpid(), nullptr);
    RETURNS(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessCheckpoint, getpid(), nullptr);
    const auto target = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
    WORKS(cuFlushGPUDirectRDMAWrites, target, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
    WORKS(cuFlushGPUDirectRDMAWrites, target, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuFlushGPUDirectRDMAWrites, target, (CUflushGPUDirectRDMAWritesScope)150);
    GIVES(CUDA_ERROR_NOT_SUPPORTED, "cuProfilerInitialize", nullptr, nullptr, 0);
    CUdeviceptr memory;
    WORKS(cuMemAlloc, &memory, 4096);
    for (const char *name : {"cuMemGetAttribute", "cuMemGetAttribute_v2"}) {
        GIVES(CUDA_ERROR_NOT_SUPPORTED, name, (void *)list, 0, memory);
    }
    WORKS(cuMemFree, memory);
    for (const char *name : {"cuMemBatchDecompressAsync", "cuMemBatchDecompressAsync_ptsz"}) {
        GIVES(CUDA_ERROR_NOT_SUPPORTED, name, nullptr, size_t{0}, 0u, nullptr, nullptr);
    }
}

int main() {
    unsigned untouched = 7;
    HOLDS(call("cuMemAlloc", &untouched, 100u) == CUDA_ERROR_NOT_INITIALIZED);
    CUdevice device;
    CUcontext context;
    WORKS(cuInit, 0);
    WORKS(cuDeviceGet, &device, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, device);
    WORKS(cuCtxSetCurrent, context);
    narrow(device);
    linker();
    core_dumps();
    others(device);
    WORKS(cuDevicePrimaryCtxRelease, device);
    std::printf("PASS old_versions\n");
    return 0;
}
