// Functions of the runtime that programs built with CUDA 13 need, and that GVirtuS does not have. They are linked into
// its libcudart.so.13.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>

// A kernel's handle is the address of its stub, so that GVirtuS finds the kernel by it.
extern "C" cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(stub));
    return cudaSuccess;
}

extern "C" cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                          cudaStream_t stream) {
    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, block, arguments, shared, stream);
}

extern "C" cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

static CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

// Returns the function of GVirtuS's libcuda.so.1, or one that answers CUDA_ERROR_NOT_SUPPORTED: PyTorch does not start if
// it misses a function that it may never call.
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult *status) {
    static void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    void *found = nullptr;
    if (driver != nullptr) {
        found = dlsym(driver, (std::string(symbol) + "_v2").c_str());
        found = found != nullptr ? found : dlsym(driver, symbol);
    }
    *function = found != nullptr ? found : reinterpret_cast<void *>(not_supported);
    if (status != nullptr) {
        *status = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}

// PyTorch's libraries do not load without these two, and its usual work does not call them.
extern "C" cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *, size_t *) {
    return cudaErrorNotSupported;
}

extern "C" cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) {
    return cudaErrorNotSupported;
}
