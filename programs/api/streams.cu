// Streams by each version of the functions: those of older versions, and those for which stream 0 is the per-thread
// stream. Queries of streams, captures, operations on words in memory, and streams that end while other threads wait.
#include <atomic>
#include <thread>
#include <vector>

#include "driver.cuh"

static const std::string versions[] = {"", "_ptsz"};

static CUcontext context;
static CUdeviceptr memory;
static volatile unsigned long long *host;

static unsigned word(CUdeviceptr address) {
    unsigned value = 0;
    WORKS(cuMemcpyDtoH, &value, address, sizeof value);
    return value;
}

static void questions(const std::string &version) {
    CUstream first = nullptr, second = nullptr;
    WORKS(cuStreamCreateWithPriority, &first, CU_STREAM_NON_BLOCKING, -1);
    WORKS(cuStreamCreate, &second, CU_STREAM_DEFAULT);
    unsigned flags = 77;
    int priority = 77;
    CUdevice device = 77;
    unsigned long long id = 77, other = 77;
    GIVES(CUDA_SUCCESS, "cuStreamGetFlags" + version, first, &flags);
    HOLDS(flags == CU_STREAM_NON_BLOCKING);
    GIVES(CUDA_SUCCESS, "cuStreamGetFlags" + version, second, &flags);
    HOLDS(flags == CU_STREAM_DEFAULT);
    GIVES(CUDA_SUCCESS, "cuStreamGetPriority" + version, first, &priority);
    HOLDS(priority == -1);
    GIVES(CUDA_SUCCESS, "cuStreamGetPriority" + version, second, &priority);
    HOLDS(priority == 0);
    GIVES(CUDA_SUCCESS, "cuStreamGetDevice" + version, first, &device);
    HOLDS(device == 0);
    GIVES(CUDA_SUCCESS, "cuStreamGetId" + version, first, &id);
    GIVES(CUDA_SUCCESS, "cuStreamGetId" + version, second, &other);
    HOLDS(id != 77 && other != 77 && id != other);
    unsigned long long again = 77;
    GIVES(CUDA_SUCCESS, "cuStreamGetId" + version, first, &again);
    HOLDS(again == id);
    CUcontext its = nullptr;
    CUgreenCtx green = reinterpret_cast<CUgreenCtx>(7);
    GIVES(CUDA_SUCCESS, "cuStreamGetCtx" + version, first, &its);
    HOLDS(its == context);
    its = nullptr;
    GIVES(CUDA_SUCCESS, "cuStreamGetCtx_v2" + version, second, &its, &green);
    HOLDS(its == context && green == nullptr);
    for (const char *name : {"cuStreamGetFlags", "cuStreamGetPriority", "cuStreamGetDevice", "cuStreamGetId", "cuStreamGetCtx"}) {
        GIVES(CUDA_ERROR_INVALID_VALUE, name + version, first, nullptr);
    }
    WORKS(cuStreamDestroy, first);
    WORKS(cuStreamDestroy, second);
}

// Result of a version of `cuStreamGetCaptureInfo`.
struct Told {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    cuuint64_t id = 0;
    CUgraph graph = nullptr;
    const CUgraphNode *dependencies = nullptr;
    const CUgraphEdgeData *edges = nullptr;
    size_t count = 77;
};

static void captures(const std::string &version) {
    CUstream stream = nullptr;
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    const std::string info = "cuStreamGetCaptureInfo";
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    GIVES(CUDA_SUCCESS, "cuStreamIsCapturing" + version, stream, &status);
    HOLDS(status == CU_STREAM_CAPTURE_STATUS_NONE);

    // The first version has no modes, and forbids nothing.
    GIVES(CUDA_SUCCESS, "cuStreamBeginCapture" + version, stream);
    CUdeviceptr allowed = 0;
    GIVES(CUDA_SUCCESS, "cuStreamIsCapturing" + version, stream, &status);
    HOLDS(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
    WORKS(cuMemAlloc, &allowed, 64);
    CUgraph graph = nullptr;
    GIVES(CUDA_SUCCESS, "cuStreamEndCapture" + version, stream, &graph);
    HOLDS(graph != nullptr);
    WORKS(cuGraphDestroy, graph);
    WORKS(cuMemFree, allowed);

    GIVES(CUDA_SUCCESS, "cuStreamBeginCapture_v2" + version, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    WORKS(cuMemsetD32Async, memory, 1, 1, stream);
    Told one, two, three;
    GIVES(CUDA_SUCCESS, info + version, stream, &one.status, &one.id);
    GIVES(CUDA_SUCCESS, info + "_v2" + version, stream, &two.status, &two.id, &two.graph, &two.dependencies, &two.count);
    HOLDS(one.status == CU_STREAM_CAPTURE_STATUS_ACTIVE && one.id != 0);
    HOLDS(two.status == one.status && two.id == one.id && two.graph && two.count == 1);
    CUgraphNode first = two.dependencies[0];
    GIVES(CUDA_SUCCESS, info + "_v3" + version, stream, &three.status, &three.id, &three.graph, &three.dependencies,
          &three.edges, &three.count);
    HOLDS(three.status == one.status && three.id == one.id && three.graph == two.graph && three.count == 1);
    HOLDS(three.dependencies[0] == first);

    // The next node has no dependency, then both.
    const std::string update = "cuStreamUpdateCaptureDependencies";
    GIVES(CUDA_SUCCESS, update + version, stream, nullptr, size_t{0}, unsigned{CU_STREAM_SET_CAPTURE_DEPENDENCIES});
    WORKS(cuMemsetD32Async, memory + 4, 2, 1, stream);
    GIVES(CUDA_SUCCESS, update + "_v2" + version, stream, &first, nullptr, size_t{1},
          unsigned{CU_STREAM_ADD_CAPTURE_DEPENDENCIES});
    GIVES(CUDA_ERROR_INVALID_VALUE, update + version, stream, nullptr, size_t{0}, 7u);
    WORKS(cuMemsetD32Async, memory + 8, 3, 1, stream);
    size_t roots = 0, nodes = 0, edges = 0;
    WORKS(cuGraphGetRootNodes, two.graph, nullptr, &roots);
    GIVES(CUDA_SUCCESS, "cuGraphGetEdges", two.graph, nullptr, nullptr, &edges);
    HOLDS(roots == 2 && edges == 2);
    GIVES(CUDA_SUCCESS, "cuStreamEndCapture" + version, stream, &graph);
    HOLDS(graph == two.graph);

    // More of it is captured into the same graph.
    GIVES(CUDA_SUCCESS, "cuStreamBeginCaptureToGraph" + version, stream, graph, &first, nullptr, size_t{1},
          CU_STREAM_CAPTURE_MODE_RELAXED);
    WORKS(cuMemsetD32Async, memory + 12, 4, 1, stream);
    CUgraph same = nullptr;
    GIVES(CUDA_SUCCESS, "cuStreamEndCapture" + version, stream, &same);
    WORKS(cuGraphGetNodes, graph, nullptr, &nodes);
    WORKS(cuGraphGetRootNodes, graph, nullptr, &roots);
    HOLDS(same == graph && nodes == 4 && roots == 2);

    CUgraphExec executable = nullptr;
    WORKS(cuMemsetD32, memory, 0, 4);
    WORKS(cuGraphInstantiate, &executable, graph, 0);
    GIVES(CUDA_SUCCESS, "cuGraphUpload" + version, executable, stream);
    WORKS(cuStreamSynchronize, stream);
    HOLDS(word(memory) == 0);
    WORKS(cuGraphLaunch, executable, stream);
    WORKS(cuStreamSynchronize, stream);
    for (unsigned index = 0; index < 4; index++) HOLDS(word(memory + 4 * index) == index + 1);
    WORKS(cuGraphExecDestroy, executable);
    GIVES(CUDA_ERROR_INVALID_VALUE, "cuGraphUpload" + version, nullptr, stream);
    WORKS(cuGraphDestroy, graph);
    WORKS(cuStreamDestroy, stream);
}

// Returns whether the device supports the functions of this version: the first version only if a module option enabled
// it when the driver was loaded.
static bool has(const std::string &version, CUdevice_attribute attribute) {
    int permitted = 1;
    if (version.find("_v2") == std::string::npos) WORKS(cuDeviceGetAttribute, &permitted, attribute, 0);
    return permitted != 0;
}

// A stream waits for a word that the host writes, and then writes one; the same in a batch.
static void words(const std::string &version) {
    CUstream stream = nullptr;
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CUdeviceptr gate = 0;
    WORKS(cuMemHostGetDevicePointer, &gate, const_cast<unsigned long long *>(host), 0);
    const CUdeviceptr mark = gate + 64;
    // Opens the gate if the stream waits for it. Functions that the device does not support do nothing.
    const auto opens = [&](bool waits) {
        RETURNS(waits ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS, cuStreamQuery, stream);
        HOLDS(host[8] == 0);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        host[0] = 5;
        WORKS(cuStreamSynchronize, stream);
        HOLDS(host[8] == (waits ? 9 : 0));
        host[0] = host[8] = 0;
    };
    const bool narrow = has(version, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1);
    const bool wide = has(version, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1);
    const CUresult done = narrow ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
    const CUresult done_wide = wide ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
    const unsigned equal = CU_STREAM_WAIT_VALUE_EQ;
    GIVES(done, "cuStreamWaitValue32" + version, stream, gate, cuuint32_t{5}, equal);
    GIVES(done, "cuStreamWriteValue32" + version, stream, mark, cuuint32_t{9}, 0u);
    opens(narrow);
    GIVES(done_wide, "cuStreamWaitValue64" + version, stream, gate, cuuint64_t{5}, equal);
    GIVES(done_wide, "cuStreamWriteValue64" + version, stream, mark, cuuint64_t{9}, 0u);
    opens(wide);
    CUstreamBatchMemOpParams both[2] = {};
    both[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    both[0].waitValue.address = gate;
    both[0].waitValue.value = 5;
    both[0].waitValue.flags = equal;
    both[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    both[1].writeValue.address = mark;
    both[1].writeValue.value = 9;
    GIVES(done, "cuStreamBatchMemOp" + version, stream, 2u, both, 0u);
    opens(narrow);
    if (wide) {
        both[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
        both[0].waitValue.value64 = 5;
        both[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        both[1].writeValue.value64 = 9;
        GIVES(CUDA_SUCCESS, "cuStreamBatchMemOp" + version, stream, 2u, both, 0u);
        opens(true);
    }
    GIVES(CUDA_ERROR_INVALID_VALUE, "cuStreamBatchMemOp" + version, stream, 300u, both, 0u);
    if (!narrow) {
        // No other argument is checked. The call is refused in a capture.
        GIVES(CUDA_ERROR_NOT_SUPPORTED, "cuStreamBatchMemOp" + version, stream, 1u, nullptr, 9u);
        GIVES(CUDA_ERROR_NOT_SUPPORTED, "cuStreamWriteValue32" + version, stream, CUdeviceptr{2}, cuuint32_t{5}, 99u);
        for (const bool several : {false, true}) {
            CUgraph graph = nullptr;
            WORKS(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
            for (int times = 0; times < 2; ++times) {
                if (several) {
                    GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "cuStreamBatchMemOp" + version, stream, 1u, both, 0u);
                } else {
                    GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "cuStreamWriteValue32" + version, stream, mark,
                          cuuint32_t{5}, 0u);
                }
            }
            RETURNS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture, stream, &graph);
        }
    }
    for (const char *name : {"cuStreamWaitValue32", "cuStreamWriteValue32"}) {
        if (narrow) GIVES(CUDA_ERROR_INVALID_VALUE, name + version, stream, gate + 2, cuuint32_t{5}, 0u);
    }
    for (const char *name : {"cuStreamWaitValue64", "cuStreamWriteValue64"}) {
        if (wide) GIVES(CUDA_ERROR_INVALID_VALUE, name + version, stream, gate + 4, cuuint64_t{5}, 0u);
    }
    WORKS(cuStreamDestroy, stream);
}

static void events(const std::string &version) {
    CUstream stream = nullptr;
    CUevent start = nullptr, end = nullptr;
    CUdeviceptr gate = 0;
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    WORKS(cuEventCreate, &start, 0);
    WORKS(cuEventCreate, &end, 0);
    WORKS(cuMemHostGetDevicePointer, &gate, const_cast<unsigned long long *>(host), 0);
    GIVES(CUDA_SUCCESS, "cuEventRecordWithFlags" + version, start, stream, 0u);
    WORKS(cuStreamWaitValue32, stream, gate, 5, CU_STREAM_WAIT_VALUE_EQ);
    GIVES(CUDA_SUCCESS, "cuEventRecordWithFlags" + version, end, stream, 0u);
    RETURNS(CUDA_ERROR_NOT_READY, cuEventQuery, end);
    float milliseconds = -1;
    GIVES(CUDA_ERROR_NOT_READY, "cuEventElapsedTime", &milliseconds, start, end);
    host[0] = 5;
    WORKS(cuEventSynchronize, end);
    host[0] = 0;
    GIVES(CUDA_SUCCESS, "cuEventElapsedTime", &milliseconds, start, end);
    HOLDS(milliseconds >= 0);
    GIVES(CUDA_ERROR_INVALID_VALUE, "cuEventRecordWithFlags" + version, end, stream, 8u);
    GIVES(CUDA_SUCCESS, "cuEventDestroy", end);
    GIVES(CUDA_SUCCESS, "cuEventDestroy", start);
    GIVES(CUDA_SUCCESS, "cuStreamDestroy", stream);
    GIVES(CUDA_ERROR_INVALID_HANDLE, "cuEventDestroy", nullptr);
    GIVES(CUDA_ERROR_INVALID_HANDLE, "cuStreamDestroy", nullptr);
}

// Threads create, use and destroy streams of their own while others wait for all work of the context. Each thread waits
// for all work too, and then finds its own done, that of its destroyed streams included.
static void ends_amid_waits() {
    const unsigned workers = 3, rounds = 300, words_of_one = 1024;
    void *mapped = nullptr;
    WORKS(cuMemHostAlloc, &mapped, workers * words_of_one * sizeof(unsigned), CU_MEMHOSTALLOC_DEVICEMAP);
    std::atomic<unsigned> busy{workers};
    std::vector<std::thread> threads;
    for (unsigned index = 0; index < workers; index++) {
        threads.emplace_back([&, index] {
            WORKS(cuCtxSetCurrent, context);
            auto *const own = static_cast<volatile unsigned *>(mapped) + index * words_of_one;
            CUdeviceptr place = 0;
            WORKS(cuMemHostGetDevicePointer, &place, const_cast<unsigned *>(own), 0);
            for (unsigned round = 1; round <= rounds; round++) {
                CUdeviceptr small = 0;
                CUstream stream = nullptr;
                WORKS(cuMemAlloc, &small, 4096);
                WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
                WORKS(cuMemsetD32Async, small, round, words_of_one, stream);
                WORKS(cuMemcpyAsync, place, small, words_of_one * sizeof(unsigned), stream);
                if (round % 3 == 0) WORKS(cuStreamSynchronize, stream);
                WORKS(cuStreamDestroy, stream);
                if (round % 3 == 1) WORKS(cuCtxSynchronize);
                WORKS(cuMemFree, small);
                HOLDS(own[0] == round && own[words_of_one - 1] == round);
            }
            busy--;
        });
    }
    CUevent event = nullptr;
    WORKS(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    while (busy > 0) {
        WORKS(cuCtxRecordEvent, context, event);
        WORKS(cuCtxSynchronize);
        RETURNS(CUDA_SUCCESS, cuEventQuery, event);
        WORKS(cuCtxWaitEvent, context, event);
    }
    for (std::thread &thread : threads) thread.join();
    WORKS(cuEventDestroy, event);
    WORKS(cuMemFreeHost, mapped);
}

int main() {
    WORKS(cuInit, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuMemAlloc, &memory, 4096);
    void *mapped = nullptr;
    WORKS(cuMemHostAlloc, &mapped, 4096, CU_MEMHOSTALLOC_DEVICEMAP);
    host = static_cast<volatile unsigned long long *>(mapped);
    for (int index = 0; index < 16; index++) host[index] = 0;
    for (const std::string &version : versions) {
        questions(version);
        captures(version);
        words(version);
        words("_v2" + version);
        events(version);
    }
    ends_amid_waits();
    std::printf("PASS streams\n");
    return 0;
}
