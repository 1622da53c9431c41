// A kernel fails while a call waits for it, or before the next call that waits: once with device printf in the
// kernel's module and once without, each way to wait in a process of its own. No wait returns success. With a number, one
// way in so many is tried.
#include "../api/driver.cuh"
#include "../check.cuh"

#include <cuda_runtime.h>

#include <sys/wait.h>
#include <unistd.h>

// Waits for the word, then 20 ms more, so that the host is in the call by then, and writes where nothing is
// allocated. The first is in a module without printf, the second prints.
#define FAULT_PTX(before, print)                                                                     \
    ".version 7.0\n.target sm_70\n.address_size 64\n" before                                         \
    ".visible .entry fault(.param .u64 go)\n{\n"                                                     \
    "    .reg .b64 %rd<8>;\n    .reg .b32 %r<4>;\n    .reg .pred %p<3>;\n"                           \
    "    ld.param.u64 %rd1, [go];\n"                                                                 \
    "held:\n    ld.volatile.global.u32 %r1, [%rd1];\n    setp.eq.u32 %p1, %r1, 0;\n    @%p1 bra held;\n" \
    print                                                                                            \
    "    mov.u64 %rd2, %globaltimer;\n    add.u64 %rd2, %rd2, 20000000;\n"                           \
    "delay:\n    mov.u64 %rd3, %globaltimer;\n    setp.lt.u64 %p2, %rd3, %rd2;\n    @%p2 bra delay;\n" \
    "    mov.u64 %rd4, 16;\n    mov.u32 %r2, 42;\n    st.volatile.global.u32 [%rd4], %r2;\n    ret;\n}\n"

const char SILENT[] = FAULT_PTX("", "");
const char PRINTS[] = FAULT_PTX(
    ".extern .func (.param .b32 printed) vprintf(.param .b64 format, .param .b64 values);\n"
    ".global .align 1 .b8 text[5] = {111, 110, 99, 101, 0};\n",
    // Nothing is printed if the word is 1.
    "    setp.eq.u32 %p1, %r1, 1;\n    @%p1 bra printed;\n"
    "    {\n    .param .b64 format;\n    .param .b64 values;\n    .param .b32 result;\n"
    "    cvta.global.u64 %rd5, text;\n    mov.u64 %rd6, 0;\n"
    "    st.param.b64 [format], %rd5;\n    st.param.b64 [values], %rd6;\n"
    "    call.uni (result), vprintf, (format, values);\n    }\n"
    "printed:\n");

__device__ int variable;

__global__ void touch(int *place) { *place = 1; }

constexpr size_t BYTES = 4096;

// Objects of a process while its kernel is under way in `stream`.
struct Work {
    CUmodule module;
    CUfunction fault;
    // Blocking and not.
    CUstream stream, other;
    // Recorded before the kernel and behind it, and one that was never recorded.
    CUevent before, behind, fresh;
    CUdeviceptr memory;
    // Freed only by the ways of pools.
    CUdeviceptr pooled;
    CUdeviceptr managed;
    void *pinned;
    char pageable[BYTES];
    CUarray array;
    CUgraphExec graph;
};

// Repeats a query until it returns another code than NOT_READY.
template <typename Ask>
int poll(Ask ask) {
    int code = CUDA_ERROR_NOT_READY;
    while (code == CUDA_ERROR_NOT_READY) code = static_cast<int>(ask());
    return code;
}

struct Way {
    const char *name;
    // Whether it waits for the kernel, so that it cannot succeed itself.
    bool waits;
    // Returns the last call's code.
    int (*go)(Work &);
};

#define WAITS(name, ...) {name, true, [](Work &w) -> int { (void)w; __VA_ARGS__; }}
#define GOES_ON(name, ...) {name, false, [](Work &w) -> int { (void)w; __VA_ARGS__; }}
#define DO(name, ...) static_cast<void>(DRIVER(name)(__VA_ARGS__))
#define END(name, ...) return static_cast<int>(DRIVER(name)(__VA_ARGS__))

void CUDA_CB nothing(void *) {}
void CUDA_CB nothing_said(CUstream, CUresult, void *) {}

const Way WAYS[] = {
    WAITS("cuCtxSynchronize", END(cuCtxSynchronize)),
    WAITS("cuStreamSynchronize", END(cuStreamSynchronize, w.stream)),
    WAITS("cuStreamSynchronize, legacy", END(cuStreamSynchronize, nullptr)),
    WAITS("cuStreamQuery", return poll([&] { return DRIVER(cuStreamQuery)(w.stream); })),
    WAITS("cuStreamQuery, legacy", return poll([] { return DRIVER(cuStreamQuery)(nullptr); })),
    WAITS("cuEventSynchronize", END(cuEventSynchronize, w.behind)),
    WAITS("cuEventQuery", return poll([&] { return DRIVER(cuEventQuery)(w.behind); })),
    WAITS("cuEventElapsedTime", return poll([&] {
              float milliseconds;
              return DRIVER(cuEventElapsedTime)(&milliseconds, w.before, w.behind);
          })),
    WAITS("cuEventRecord, cuEventSynchronize", DO(cuEventRecord, w.fresh, w.stream); END(cuEventSynchronize, w.fresh)),
    WAITS("cuStreamWaitEvent, cuStreamSynchronize",
          DO(cuStreamWaitEvent, w.other, w.behind, 0); END(cuStreamSynchronize, w.other)),
    WAITS("cuStreamWaitEvent, cuEventRecord, cuEventSynchronize", DO(cuStreamWaitEvent, w.other, w.behind, 0);
          DO(cuEventRecord, w.fresh, w.other); END(cuEventSynchronize, w.fresh)),
    WAITS("cuStreamWriteValue32, cuStreamWaitValue32, cuStreamSynchronize",
          DO(cuStreamWriteValue32, w.stream, w.memory, 7, 0);
          DO(cuStreamWaitValue32, w.other, w.memory, 7, CU_STREAM_WAIT_VALUE_EQ); END(cuStreamSynchronize, w.other)),
    WAITS("cuStreamWriteValue64, cuStreamSynchronize",
          DO(cuStreamWriteValue64, w.stream, w.memory, 7, 0); END(cuStreamSynchronize, w.stream)),
    WAITS("cuMemcpyDtoH", END(cuMemcpyDtoH, w.pageable, w.memory, BYTES)),
    WAITS("cuMemcpyDtoH, pinned", END(cuMemcpyDtoH, w.pinned, w.memory, BYTES)),
    WAITS("cuMemcpy", END(cuMemcpy, reinterpret_cast<CUdeviceptr>(w.pinned), w.memory, BYTES)),
    WAITS("cuMemcpyAtoH", END(cuMemcpyAtoH, w.pageable, w.array, 0, 64)),
    WAITS("cuMemcpyDtoHAsync, cuStreamSynchronize",
          DO(cuMemcpyDtoHAsync, w.pageable, w.memory, BYTES, w.stream); END(cuStreamSynchronize, w.stream)),
    WAITS("cuMemcpyDtoHAsync, pinned, cuStreamSynchronize",
          DO(cuMemcpyDtoHAsync, w.pinned, w.memory, BYTES, w.stream); END(cuStreamSynchronize, w.stream)),
    WAITS("cuMemcpyHtoDAsync, cuStreamSynchronize",
          DO(cuMemcpyHtoDAsync, w.memory, w.pageable, BYTES, w.stream); END(cuStreamSynchronize, w.stream)),
    WAITS("cuMemcpyDtoDAsync, cuCtxSynchronize",
          DO(cuMemcpyDtoDAsync, w.memory, w.memory + BYTES, BYTES, w.stream); END(cuCtxSynchronize)),
    WAITS("cuMemsetD8Async, cuStreamSynchronize",
          DO(cuMemsetD8Async, w.memory, 1, BYTES, w.stream); END(cuStreamSynchronize, w.stream)),
    WAITS("cuMemAllocAsync, cuStreamSynchronize", CUdeviceptr made;
          DO(cuMemAllocAsync, &made, BYTES, w.stream); END(cuStreamSynchronize, w.stream)),
    WAITS("cuMemFreeAsync, cuStreamSynchronize",
          DO(cuMemFreeAsync, w.pooled, w.stream); END(cuStreamSynchronize, w.stream)),
    WAITS("cuGraphLaunch, cuStreamSynchronize",
          DO(cuGraphLaunch, w.graph, w.stream); END(cuStreamSynchronize, w.stream)),
    WAITS("cuLaunchHostFunc, cuStreamSynchronize",
          DO(cuLaunchHostFunc, w.stream, nothing, nullptr); END(cuStreamSynchronize, w.stream)),
    WAITS("cuStreamAddCallback, cuStreamSynchronize",
          DO(cuStreamAddCallback, w.stream, nothing_said, nullptr, 0); END(cuStreamSynchronize, w.stream)),
    WAITS("cuMemPrefetchAsync, cuStreamSynchronize",
          CUmemLocation host{CU_MEM_LOCATION_TYPE_HOST, 0};
          call("cuMemPrefetchAsync_v2", w.managed, BYTES, host, 0u, w.stream); END(cuStreamSynchronize, w.stream)),
    WAITS("cuStreamDestroy, cuCtxSynchronize", DO(cuStreamDestroy, w.stream); END(cuCtxSynchronize)),
    WAITS("cuEventDestroy, cuCtxSynchronize", DO(cuEventDestroy, w.behind); END(cuCtxSynchronize)),
    WAITS("cuModuleUnload, cuCtxSynchronize", DO(cuModuleUnload, w.module); END(cuCtxSynchronize)),
    WAITS("cuMemFree, cuCtxSynchronize", DO(cuMemFree, w.memory); END(cuCtxSynchronize)),
    WAITS("cuMemFreeHost, cuCtxSynchronize", DO(cuMemFreeHost, w.pinned); END(cuCtxSynchronize)),
    // These may end before the kernel; the waits that follow report the fault.
    GOES_ON("cuMemcpyHtoD", END(cuMemcpyHtoD, w.memory, w.pageable, BYTES)),
    GOES_ON("cuMemcpyDtoD", END(cuMemcpyDtoD, w.memory, w.memory + BYTES, BYTES)),
    GOES_ON("cuMemsetD8", END(cuMemsetD8, w.memory, 1, BYTES)),
    GOES_ON("cuMemAlloc", CUdeviceptr made; END(cuMemAlloc, &made, BYTES)),
    GOES_ON("cuMemAllocManaged", CUdeviceptr made; END(cuMemAllocManaged, &made, BYTES, CU_MEM_ATTACH_GLOBAL)),
    GOES_ON("cuMemHostAlloc", void *made; END(cuMemHostAlloc, &made, BYTES, 0)),
    GOES_ON("cuMemGetInfo", size_t free; size_t total; END(cuMemGetInfo, &free, &total)),
    GOES_ON("cuModuleLoadData", CUmodule made; END(cuModuleLoadData, &made, SILENT)),
    GOES_ON("cuStreamCreate", CUstream made; END(cuStreamCreate, &made, 0)),
    GOES_ON("cuMemFree", END(cuMemFree, w.memory)),
    GOES_ON("cuMemFreeHost", END(cuMemFreeHost, w.pinned)),
    GOES_ON("cuModuleUnload", END(cuModuleUnload, w.module)),
    GOES_ON("cuStreamDestroy", END(cuStreamDestroy, w.stream)),
    GOES_ON("cuStreamWaitEvent", END(cuStreamWaitEvent, w.other, w.behind, 0)),

    WAITS("cudaDeviceSynchronize", return cudaDeviceSynchronize()),
    WAITS("cudaStreamSynchronize", return cudaStreamSynchronize(w.stream)),
    WAITS("cudaStreamSynchronize, legacy", return cudaStreamSynchronize(cudaStreamLegacy)),
    WAITS("cudaStreamQuery", return poll([&] { return cudaStreamQuery(w.stream); })),
    WAITS("cudaEventSynchronize", return cudaEventSynchronize(w.behind)),
    WAITS("cudaEventQuery", return poll([&] { return cudaEventQuery(w.behind); })),
    WAITS("cudaEventElapsedTime", return poll([&] {
              float milliseconds;
              return cudaEventElapsedTime(&milliseconds, w.before, w.behind);
          })),
    WAITS("cudaMemcpy, to the host",
          return cudaMemcpy(w.pageable, reinterpret_cast<void *>(w.memory), BYTES, cudaMemcpyDeviceToHost)),
    WAITS("cudaMemcpyAsync, cudaStreamSynchronize",
          static_cast<void>(cudaMemcpyAsync(w.pageable, reinterpret_cast<void *>(w.memory), BYTES,
                                            cudaMemcpyDeviceToHost, w.stream));
          return cudaStreamSynchronize(w.stream)),
    WAITS("cudaMemcpyFromSymbol", int value; return cudaMemcpyFromSymbol(&value, variable, sizeof value)),
    WAITS("cudaMemset, cudaDeviceSynchronize",
          static_cast<void>(cudaMemset(reinterpret_cast<void *>(w.memory), 1, BYTES)); return cudaDeviceSynchronize()),
    WAITS("a kernel, cudaStreamSynchronize",
          touch<<<1, 1, 0, w.stream>>>(reinterpret_cast<int *>(w.memory)); return cudaStreamSynchronize(w.stream)),
    WAITS("a kernel, cudaDeviceSynchronize",
          touch<<<1, 1>>>(reinterpret_cast<int *>(w.memory)); return cudaDeviceSynchronize()),
    WAITS("cudaDeviceSynchronize, cudaGetLastError",
          static_cast<void>(cudaDeviceSynchronize()); return cudaGetLastError()),
    WAITS("cudaStreamDestroy, cudaDeviceSynchronize",
          static_cast<void>(cudaStreamDestroy(w.stream)); return cudaDeviceSynchronize()),
    WAITS("cudaFree, cudaDeviceSynchronize",
          static_cast<void>(cudaFree(reinterpret_cast<void *>(w.memory))); return cudaDeviceSynchronize()),
    WAITS("cudaFreeHost, cudaDeviceSynchronize",
          static_cast<void>(cudaFreeHost(w.pinned)); return cudaDeviceSynchronize()),
    GOES_ON("cudaMemcpy, to the device",
            return cudaMemcpy(reinterpret_cast<void *>(w.memory), w.pageable, BYTES, cudaMemcpyHostToDevice)),
    GOES_ON("cudaMalloc", void *made; return cudaMalloc(&made, BYTES)),
    GOES_ON("cudaFree", return cudaFree(reinterpret_cast<void *>(w.memory))),
};

// Makes all objects that the ways use, and launches the kernel.
void begin(Work &w, bool prints) {
    WORKS(cuInit, 0);
    // Makes the primary context current and loads the runtime's own module, before the kernel holds the device.
    void *memory = nullptr;
    HOLDS(cudaMalloc(&memory, 2 * BYTES) == cudaSuccess);
    touch<<<1, 1>>>(static_cast<int *>(memory));
    HOLDS(cudaDeviceSynchronize() == cudaSuccess);
    w.memory = reinterpret_cast<CUdeviceptr>(memory);
    WORKS(cuModuleLoadData, &w.module, prints ? PRINTS : SILENT);
    WORKS(cuModuleGetFunction, &w.fault, w.module, "fault");
    WORKS(cuStreamCreate, &w.stream, CU_STREAM_DEFAULT);
    WORKS(cuStreamCreate, &w.other, CU_STREAM_NON_BLOCKING);
    for (CUevent *event : {&w.before, &w.behind, &w.fresh}) WORKS(cuEventCreate, event, CU_EVENT_DEFAULT);
    WORKS(cuMemsetD8, w.memory, 0, 2 * BYTES);
    WORKS(cuMemAllocAsync, &w.pooled, BYTES, w.stream);
    WORKS(cuMemAllocManaged, &w.managed, BYTES, CU_MEM_ATTACH_GLOBAL);
    WORKS(cuMemHostAlloc, &w.pinned, BYTES, 0);
    CUDA_ARRAY_DESCRIPTOR shape{64, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1};
    WORKS(cuArrayCreate, &w.array, &shape);
    CUgraph graph = nullptr;
    WORKS(cuGraphCreate, &graph, 0);
    WORKS(cuGraphInstantiateWithFlags, &w.graph, graph, 0);
    void *word = nullptr;
    CUdeviceptr go = 0;
    WORKS(cuMemHostAlloc, &word, sizeof(int), CU_MEMHOSTALLOC_DEVICEMAP);
    WORKS(cuMemHostGetDevicePointer, &go, word, 0);
    *static_cast<volatile int *>(word) = 0;
    WORKS(cuEventRecord, w.before, w.stream);
    WORKS(cuCtxSynchronize);
    void *parameters[] = {&go};
    WORKS(cuLaunchKernel, w.fault, 1, 1, 1, 1, 1, 1, 0, w.stream, parameters, nullptr);
    WORKS(cuEventRecord, w.behind, w.stream);
    *static_cast<volatile int *>(word) = 1;
}

// Prints the way's code and those of two waits behind it, and returns whether no wait succeeded.
bool no_wait_succeeds(const Way &way, bool prints) {
    static Work w;
    begin(w, prints);
    const int own = way.go(w);
    const int context = static_cast<int>(DRIVER(cuCtxSynchronize)());
    const int stream = static_cast<int>(DRIVER(cuStreamSynchronize)(w.other));
    std::printf("%s: %s: %d, then %d and %d\n", prints ? "printf" : "silent", way.name, own, context, stream);
    std::fflush(stdout);
    const int fault = CUDA_ERROR_ILLEGAL_ADDRESS;
    return (own == fault || (!way.waits && own == CUDA_SUCCESS)) && context == fault && stream == fault;
}

int main(int argc, char **argv) {
    const int step = size_argument(argc, argv, 1);
    int wrong = 0;
    int ways = 0;
    int seen = 0;
    for (const bool prints : {false, true}) {
        for (const Way &way : WAYS) {
            if (seen++ % step != 0) continue;
            ++ways;
            const pid_t child = fork();
            HOLDS(child >= 0);
            if (child == 0) {
                // A wait that never ends is found as well.
                alarm(120);
                _exit(no_wait_succeeds(way, prints) ? 0 : 1);
            }
            int status = 0;
            HOLDS(waitpid(child, &status, 0) == child);
            if (status == 0) continue;
            ++wrong;
            std::printf("FAIL sticky: %s, %s: status %d\n", prints ? "printf" : "silent", way.name, status);
            std::fflush(stdout);
        }
    }
    std::printf("%s sticky: %d of %d ways\n", wrong == 0 ? "PASS" : "FAIL", ways - wrong, ways);
    return wrong == 0 ? 0 : 1;
}
