// Streams that wait for words and write them, in host and in device memory, and the attributes of streams.
#include <atomic>
#include <cstring>
#include <cuda.h>

#include "../check.cuh"

static void fail(const char *what) {
    std::printf("FAIL memory_operations: %s\n", what);
    std::exit(1);
}

template <typename F> static F driver(const char *name, F) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) fail(name);
    return reinterpret_cast<F>(found);
}
#define DRIVER(name) driver(#name, &name)

static void expect(const char *what, CUresult found, CUresult expected) {
    if (found == expected) return;
    std::printf("FAIL memory_operations: %s: %d, not %d\n", what, found, expected);
    std::exit(1);
}

int main() {
    CHECK(cudaFree(nullptr));
    auto wait32 = DRIVER(cuStreamWaitValue32);
    auto wait64 = DRIVER(cuStreamWaitValue64);
    auto write32 = DRIVER(cuStreamWriteValue32);
    auto write64 = DRIVER(cuStreamWriteValue64);
    auto batch = DRIVER(cuStreamBatchMemOp);
    auto get = DRIVER(cuStreamGetAttribute);
    auto set = DRIVER(cuStreamSetAttribute);
    auto copy = DRIVER(cuStreamCopyAttributes);

    int wide = 0;
    CHECK(cudaDeviceGetAttribute(&wide, static_cast<cudaDeviceAttr>(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS), 0));
    if (!wide) fail("the device says that it has no 64-bit memory operations");

    cudaStream_t first, second;
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    unsigned long long *host;
    CHECK(cudaHostAlloc(&host, 4096, cudaHostAllocMapped));
    std::memset(host, 0, 4096);
    CUdeviceptr words = reinterpret_cast<CUdeviceptr>(host);
    CUdeviceptr device;
    CHECK(cudaMalloc(reinterpret_cast<void **>(&device), 4096));
    CHECK(cudaMemset(reinterpret_cast<void *>(device), 0, 4096));
    CHECK(cudaDeviceSynchronize());
    std::atomic<unsigned long long> *atomics = reinterpret_cast<std::atomic<unsigned long long> *>(host);
    std::atomic<unsigned long long> &gate = atomics[0], &mark = atomics[8];

    // The host lets a stream go.
    expect("wait", wait64(first, words, 5, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
    expect("write", write64(first, words + 64, 77, 0), CUDA_SUCCESS);
    gate = 4;
    if (cudaStreamQuery(first) != cudaErrorNotReady || mark != 0) fail("a stream did not wait");
    gate = 5;
    CHECK(cudaStreamSynchronize(first));
    if (mark != 77) fail("a stream did not write");

    // One stream lets the other go, through device memory, a hundred times in turn.
    for (unsigned round = 1; round <= 100; round++) {
        expect("wait", wait32(first, device, round, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
        expect("write", write32(first, device + 4, round, 0), CUDA_SUCCESS);
        expect("write", write32(second, device, round, 0), CUDA_SUCCESS);
        expect("wait", wait32(second, device + 4, round, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
    }
    CHECK(cudaStreamSynchronize(first));
    CHECK(cudaStreamSynchronize(second));
    unsigned found[2];
    CHECK(cudaMemcpy(found, reinterpret_cast<void *>(device), 8, cudaMemcpyDeviceToHost));
    if (found[0] != 100 || found[1] != 100) fail("two streams did not take turns");

    // Many operations in one call, with a barrier among them.
    static CUstreamBatchMemOpParams list[256];
    for (unsigned i = 0; i < 254; i++) {
        list[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        list[i].writeValue.address = device + 4 * i;
        list[i].writeValue.value = i;
    }
    list[254].memoryBarrier.operation = CU_STREAM_MEM_OP_BARRIER;
    expect("batch", batch(first, 255, list, 0), CUDA_SUCCESS);
    CHECK(cudaStreamSynchronize(first));
    unsigned many[254];
    CHECK(cudaMemcpy(many, reinterpret_cast<void *>(device), sizeof many, cudaMemcpyDeviceToHost));
    for (unsigned i = 0; i < 254; i++)
        if (many[i] != i) fail("an operation of a batch is missing");

    // Operations that are refused at the call.
    expect("a misaligned word", write32(first, words + 2, 1, 0), CUDA_ERROR_INVALID_VALUE);
    expect("ordinary memory", write32(first, reinterpret_cast<CUdeviceptr>(many), 1, 0), CUDA_ERROR_INVALID_VALUE);
    expect("unknown flags", write32(first, words, 1, 8), CUDA_ERROR_INVALID_VALUE);
    expect("no barrier", write32(first, words, 1, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER), CUDA_ERROR_INVALID_VALUE);
    expect("too many operations", batch(first, 256, list, 0), CUDA_ERROR_INVALID_VALUE);
    list[0].operation = static_cast<CUstreamBatchMemOpType>(99);
    expect("an unknown operation", batch(first, 1, list, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK(cudaStreamSynchronize(first));

    // Attributes are kept, copied, and checked.
    CUstreamAttrValue value;
    expect("get", get(first, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value), CUDA_SUCCESS);
    if (static_cast<unsigned>(value.syncPolicy) != ~0u) fail("a new stream has a policy");
    expect("no policy", set(first, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value), CUDA_ERROR_INVALID_VALUE);
    expect("a copy of none", copy(second, first), CUDA_SUCCESS);
    value.syncPolicy = CU_SYNC_POLICY_YIELD;
    expect("set", set(first, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value), CUDA_SUCCESS);
    expect("copy", copy(second, first), CUDA_SUCCESS);
    std::memset(&value, 0, sizeof value);
    expect("get", get(second, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value), CUDA_SUCCESS);
    if (value.syncPolicy != CU_SYNC_POLICY_YIELD) fail("an attribute was not copied");
    expect("get", get(first, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value), CUDA_ERROR_INVALID_VALUE);

    CHECK(cudaFree(reinterpret_cast<void *>(device)));
    CHECK(cudaFreeHost(host));
    std::printf("PASS memory_operations\n");
    return 0;
}
