// Stream capture: the calls that a capture forbids, the calls that end it, and their codes.
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "driver.cuh"

static CUcontext context;
static CUdeviceptr memory;
static void *pinned;
static char pageable[64];
static CUstream other, blocking;
static CUevent recorded, fresh, inside;

// Makes `call` while a stream is captured, and checks that it returns `code` and leaves the capture in `status`.
template <typename Call>
static void during(unsigned flags, CUstreamCaptureMode mode, int code, CUstreamCaptureStatus status, int nodes,
                   int line, Call call) {
    CUstream stream;
    WORKS(cuStreamCreate, &stream, flags);
    WORKS(cuEventCreate, &inside, 0);
    WORKS(cuStreamBeginCapture, stream, mode);
    WORKS(cuEventRecord, inside, stream);
    const int result = static_cast<int>(call(stream));
    CUstreamCaptureStatus found;
    WORKS(cuStreamIsCapturing, stream, &found);
    CUgraph graph = reinterpret_cast<CUgraph>(1);
    const int ended = DRIVER(cuStreamEndCapture)(stream, &graph);
    const bool valid = status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    size_t count = 0;
    if (valid && graph) WORKS(cuGraphGetNodes, graph, nullptr, &count);
    const int wanted = valid ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (result != code || found != status || ended != wanted || valid != (graph != nullptr) ||
        (valid && count != static_cast<size_t>(nodes))) {
        std::printf("FAIL captures: line %d: returned %d, status %d, end %d, graph %p, %zu nodes\n", line, result,
                    found, ended, static_cast<void *>(graph), count);
        std::exit(1);
    }
    if (graph) WORKS(cuGraphDestroy, graph);
    WORKS(cuStreamIsCapturing, stream, &found);
    HOLDS(found == CU_STREAM_CAPTURE_STATUS_NONE);
    WORKS(cuEventDestroy, inside);
    WORKS(cuStreamDestroy, stream);
}

#define CALL(expression) [&](CUstream stream) -> int { (void)stream; return expression; }
// With a stream that does not block, in the global mode: allowed with this many nodes, or refused for good.
#define ALLOWED(nodes, expression)                                                                       \
    during(1, CU_STREAM_CAPTURE_MODE_GLOBAL, 0, CU_STREAM_CAPTURE_STATUS_ACTIVE, nodes, __LINE__, CALL(expression))
#define ENDS(code, expression)                                                                           \
    during(1, CU_STREAM_CAPTURE_MODE_GLOBAL, code, CU_STREAM_CAPTURE_STATUS_INVALIDATED, 0, __LINE__,    \
           CALL(expression))
#define REFUSED(code, expression)                                                                        \
    during(1, CU_STREAM_CAPTURE_MODE_GLOBAL, code, CU_STREAM_CAPTURE_STATUS_ACTIVE, 0, __LINE__, CALL(expression))

static int in_thread(int (*call)()) {
    int result = -1;
    std::thread thread([&] {
        DRIVER(cuCtxSetCurrent)(context);
        result = call();
    });
    thread.join();
    return result;
}

static void CUDA_CB no_callback(CUstream, CUresult, void *) {}
static void CUDA_CB no_function(void *) {}

static int allocate() {
    CUdeviceptr place;
    const int result = DRIVER(cuMemAlloc)(&place, 64);
    if (result == 0) WORKS(cuMemFree, place);
    return result;
}

// Codes that an H200's driver gave.
static void legality() {
    ENDS(900, allocate());
    ENDS(900, DRIVER(cuMemFree)(memory));
    ENDS(900, DRIVER(cuMemFreeHost)(pinned));
    ENDS(900, DRIVER(cuMemHostRegister)(pageable, 64, 0));
    ALLOWED(0, DRIVER(cuMemcpyHtoD)(memory, pinned, 64));
    ALLOWED(0, DRIVER(cuMemsetD8)(memory, 0, 64));
    ENDS(900, DRIVER(cuEventQuery)(recorded));
    ENDS(900, DRIVER(cuEventSynchronize)(recorded));
    ENDS(900, DRIVER(cuStreamQuery)(other));
    ENDS(900, DRIVER(cuStreamSynchronize)(other));
    ENDS(900, DRIVER(cuStreamQuery)(stream));
    ENDS(900, DRIVER(cuStreamSynchronize)(stream));
    ENDS(900, DRIVER(cuCtxSynchronize)());
    ENDS(900, DRIVER(cuCtxRecordEvent)(context, fresh));
    ENDS(900, DRIVER(cuCtxWaitEvent)(context, fresh));
    ENDS(900, DRIVER(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 2048));
    ALLOWED(0, DRIVER(cuMemsetD8Async)(memory, 0, 64, nullptr));
    ALLOWED(0, DRIVER(cuMemsetD8Async)(memory, 0, 64, blocking));
    ENDS(907, DRIVER(cuEventQuery)(inside));
    ENDS(907, DRIVER(cuEventSynchronize)(inside));
    float milliseconds;
    REFUSED(907, DRIVER(cuEventElapsedTime)(&milliseconds, inside, inside));
    ENDS(905, DRIVER(cuStreamWaitEvent)(stream, recorded, 0));
    ALLOWED(0, DRIVER(cuStreamWaitEvent)(stream, fresh, 0));
    ENDS(906, DRIVER(cuStreamWaitEvent)(nullptr, inside, 0));
    ALLOWED(1, DRIVER(cuStreamWaitEvent)(stream, recorded, CU_EVENT_WAIT_EXTERNAL));
    ALLOWED(1, DRIVER(cuEventRecordWithFlags)(recorded, stream, CU_EVENT_RECORD_EXTERNAL));
    REFUSED(401, DRIVER(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    REFUSED(900, DRIVER(cuStreamBeginCapture)(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CUgraph graph;
    REFUSED(401, DRIVER(cuStreamEndCapture)(other, &graph));
    ENDS(900, DRIVER(cuStreamAddCallback)(stream, no_callback, nullptr, 0));
    ALLOWED(1, DRIVER(cuLaunchHostFunc)(stream, no_function, nullptr));
    ALLOWED(1, DRIVER(cuMemcpyHtoDAsync)(memory, pageable, 64, stream));
    ALLOWED(1, DRIVER(cuMemcpyDtoHAsync)(pageable, memory, 64, stream));
    ALLOWED(1, DRIVER(cuStreamWriteValue32)(stream, memory, 1, 0));
    ALLOWED(1, DRIVER(cuStreamWaitValue32)(stream, memory, 1, 0));
    ALLOWED(0, DRIVER(cuEventRecord)(inside, other));
    WORKS(cuCtxSynchronize);

    CUgraph empty;
    CUgraphExec executable;
    WORKS(cuGraphCreate, &empty, 0);
    WORKS(cuGraphInstantiate, &executable, empty, 0);
    CUgraphExec another;
    ENDS(900, DRIVER(cuGraphInstantiate)(&another, empty, 0));
    ENDS(900, DRIVER(cuGraphLaunch)(executable, stream));
    WORKS(cuGraphExecDestroy, executable);
    WORKS(cuGraphDestroy, empty);

    // While a blocking stream is captured the legacy stream is out of bounds.
    during(0, CU_STREAM_CAPTURE_MODE_RELAXED, 906, CU_STREAM_CAPTURE_STATUS_INVALIDATED, 0, __LINE__,
           CALL(DRIVER(cuMemsetD8Async)(memory, 0, 64, nullptr)));
    during(0, CU_STREAM_CAPTURE_MODE_RELAXED, 906, CU_STREAM_CAPTURE_STATUS_INVALIDATED, 0, __LINE__,
           CALL(DRIVER(cuMemcpyHtoD)(memory, pinned, 64)));
    CUstreamCaptureStatus status;
    during(0, CU_STREAM_CAPTURE_MODE_RELAXED, 906, CU_STREAM_CAPTURE_STATUS_ACTIVE, 0, __LINE__,
           CALL(DRIVER(cuStreamIsCapturing)(nullptr, &status)));
}

// Captures that forbid a potentially unsafe call, by their modes and the threads.
static void modes() {
    const auto active = CU_STREAM_CAPTURE_STATUS_ACTIVE, ended = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    during(1, CU_STREAM_CAPTURE_MODE_GLOBAL, 900, ended, 0, __LINE__, CALL(in_thread(allocate)));
    during(1, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 0, active, 0, __LINE__, CALL(in_thread(allocate)));
    during(1, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 900, ended, 0, __LINE__, CALL(allocate()));
    during(1, CU_STREAM_CAPTURE_MODE_RELAXED, 0, active, 0, __LINE__, CALL(allocate()));
    const auto relaxed = [](CUstream) -> int {
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        WORKS(cuThreadExchangeStreamCaptureMode, &mode);
        HOLDS(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
        const int result = allocate();
        WORKS(cuThreadExchangeStreamCaptureMode, &mode);
        HOLDS(mode == CU_STREAM_CAPTURE_MODE_RELAXED);
        return result;
    };
    during(1, CU_STREAM_CAPTURE_MODE_GLOBAL, 0, active, 0, __LINE__, relaxed);
    // The mode of a thread can be set to any number.
    CUstreamCaptureMode mode = static_cast<CUstreamCaptureMode>(3);
    WORKS(cuThreadExchangeStreamCaptureMode, &mode);
    HOLDS(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    WORKS(cuThreadExchangeStreamCaptureMode, &mode);
    HOLDS(mode == static_cast<CUstreamCaptureMode>(3));
}

// The address of a captured fill is checked when its graph is instantiated, that of a copy at once. (cuDNN determines
// the grids of its kernels by capturing them with unallocated addresses.)
static void addresses_of_nothing() {
    const CUdeviceptr nowhere[] = {0, 0x1000, reinterpret_cast<CUdeviceptr>(malloc(64)), ~CUdeviceptr{0} << 47};
    for (CUdeviceptr address : nowhere) {
        CUgraph graph;
        CUgraphExec executable;
        size_t nodes = 0;
        WORKS(cuStreamBeginCapture, other, CU_STREAM_CAPTURE_MODE_RELAXED);
        WORKS(cuMemsetD8Async, address, 0, 64, other);
        WORKS(cuMemsetD2D8Async, address, 128, 0, 64, 2, other);
        RETURNS(1, cuMemcpyDtoDAsync, address, memory, 64, other);
        RETURNS(1, cuMemcpyDtoDAsync, memory, address, 64, other);
        WORKS(cuStreamEndCapture, other, &graph);
        WORKS(cuGraphGetNodes, graph, nullptr, &nodes);
        HOLDS(nodes == 2);
        RETURNS(1, cuGraphInstantiate, &executable, graph, 0);
        WORKS(cuGraphDestroy, graph);
        RETURNS(1, cuMemsetD8Async, address, 0, 64, other);
    }
    free(reinterpret_cast<void *>(nowhere[2]));
}

// The end of captures, and the state of their streams and events afterwards.
static void ends() {
    CUstream stream, side;
    CUgraph graph;
    CUevent event;
    CUstreamCaptureStatus status;
    WORKS(cuEventCreate, &event, 0);
    WORKS(cuStreamCreate, &stream, 1);
    WORKS(cuStreamCreate, &side, 1);
    RETURNS(401, cuStreamEndCapture, stream, &graph);
    RETURNS(401, cuStreamEndCapture, nullptr, &graph);

    const auto fork = [&] {
        WORKS(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
        WORKS(cuEventRecord, event, stream);
        WORKS(cuStreamWaitEvent, side, event, 0);
    };
    // A fork that did nothing need not be joined; one that did must be.
    fork();
    WORKS(cuStreamEndCapture, stream, &graph);
    WORKS(cuGraphDestroy, graph);
    fork();
    WORKS(cuMemsetD8Async, memory, 0, 64, side);
    RETURNS(904, cuStreamEndCapture, stream, &graph);
    HOLDS(graph == nullptr);
    WORKS(cuStreamIsCapturing, side, &status);
    HOLDS(status == CU_STREAM_CAPTURE_STATUS_NONE);
    // A stream that another stream waits for may be destroyed, as NCCL does with a stream that it forks briefly.
    fork();
    WORKS(cuMemsetD8Async, memory, 0, 64, stream);
    CUstream moment;
    CUevent after;
    size_t count = 0;
    const CUgraphNode *nodes = nullptr;
    WORKS(cuStreamCreate, &moment, 1);
    WORKS(cuEventCreate, &after, CU_EVENT_DISABLE_TIMING);
    WORKS(cuEventRecord, after, stream);
    WORKS(cuStreamWaitEvent, moment, after, 0);
    WORKS(cuStreamGetCaptureInfo, moment, &status, nullptr, nullptr, &nodes, nullptr, &count);
    HOLDS(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && count == 1);
    WORKS(cuStreamUpdateCaptureDependencies, side, const_cast<CUgraphNode *>(nodes), nullptr, count,
          CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    WORKS(cuStreamDestroy, moment);
    WORKS(cuMemsetD8Async, memory, 0, 64, side);
    WORKS(cuEventRecord, after, side);
    WORKS(cuStreamWaitEvent, stream, after, 0);
    WORKS(cuStreamEndCapture, stream, &graph);
    WORKS(cuGraphGetNodes, graph, nullptr, &count);
    HOLDS(count == 2);
    WORKS(cuGraphDestroy, graph);
    WORKS(cuEventDestroy, after);
    // A stream with unjoined work may be destroyed too, and then the end of the capture fails.
    CUstream gone;
    WORKS(cuStreamCreate, &gone, 1);
    fork();
    WORKS(cuStreamWaitEvent, gone, event, 0);
    WORKS(cuMemsetD8Async, memory, 0, 64, gone);
    WORKS(cuStreamDestroy, gone);
    RETURNS(904, cuStreamEndCapture, stream, &graph);
    // Nodes that the program itself sets as a stream's dependencies need not be joined, nor work that no stream depends
    // on any more.
    fork();
    CUgraphNode alone;
    WORKS(cuMemsetD8Async, memory, 0, 64, side);
    WORKS(cuStreamUpdateCaptureDependencies, side, nullptr, nullptr, 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    WORKS(cuStreamGetCaptureInfo, side, &status, nullptr, &graph, nullptr, nullptr, nullptr);
    WORKS(cuGraphAddEmptyNode, &alone, graph, nullptr, 0);
    WORKS(cuStreamUpdateCaptureDependencies, side, &alone, nullptr, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    WORKS(cuStreamEndCapture, stream, &graph);
    WORKS(cuGraphGetNodes, graph, nullptr, &count);
    HOLDS(count == 2);
    WORKS(cuGraphDestroy, graph);
    // Only the origin stream can end a capture.
    fork();
    RETURNS(903, cuStreamEndCapture, side, &graph);
    WORKS(cuStreamIsCapturing, stream, &status);
    HOLDS(status == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    RETURNS(901, cuMemsetD8Async, memory, 0, 64, stream);
    RETURNS(901, cuStreamEndCapture, stream, &graph);
    // Another thread's end ends it, without a graph, unless it is relaxed.
    for (const auto mode : {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
        WORKS(cuStreamBeginCapture, stream, mode);
        int result = -1;
        std::thread([&] {
            WORKS(cuCtxSetCurrent, context);
            result = DRIVER(cuStreamEndCapture)(stream, &graph);
        }).join();
        const bool allowed = mode == CU_STREAM_CAPTURE_MODE_RELAXED;
        HOLDS(result == (allowed ? 0 : 908) && allowed == (graph != nullptr));
        if (graph) WORKS(cuGraphDestroy, graph);
        RETURNS(401, cuStreamEndCapture, stream, &graph);
    }
    // Two captures cannot become one.
    fork();
    CUstream third;
    WORKS(cuStreamCreate, &third, 1);
    WORKS(cuStreamBeginCapture, third, CU_STREAM_CAPTURE_MODE_GLOBAL);
    RETURNS(902, cuStreamWaitEvent, third, event, 0);
    RETURNS(901, cuStreamEndCapture, third, &graph);
    RETURNS(901, cuStreamEndCapture, stream, &graph);
    // A captured event is invalid after the end of its capture, until it is recorded again.
    fork();
    WORKS(cuStreamEndCapture, stream, &graph);
    WORKS(cuGraphDestroy, graph);
    RETURNS(1, cuStreamWaitEvent, side, event, 0);
    RETURNS(1, cuEventQuery, event);
    RETURNS(1, cuEventSynchronize, event);
    WORKS(cuEventRecord, event, side);
    WORKS(cuEventSynchronize, event);
    WORKS(cuStreamDestroy, third);
    WORKS(cuStreamDestroy, side);
    WORKS(cuStreamDestroy, stream);
    WORKS(cuEventDestroy, event);
}

// Captures whose dependencies the program reads and sets.
static void steered() {
    CUstream stream;
    WORKS(cuStreamCreate, &stream, 1);
    CUgraph graph, reported, ended;
    CUgraphNode first, second;
    WORKS(cuGraphCreate, &graph, 0);
    WORKS(cuGraphAddEmptyNode, &first, graph, nullptr, 0);
    WORKS(cuGraphAddEmptyNode, &second, graph, nullptr, 0);
    WORKS(cuStreamBeginCaptureToGraph, stream, graph, &first, nullptr, 1, CU_STREAM_CAPTURE_MODE_GLOBAL);
    WORKS(cuMemsetD8Async, memory, 1, 64, stream);
    CUstreamCaptureStatus status;
    cuuint64_t id = 0;
    const CUgraphNode *before;
    const CUgraphEdgeData *data;
    size_t count;
    WORKS(cuStreamGetCaptureInfo, stream, &status, &id, &reported, &before, &data, &count);
    HOLDS(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && id != 0 && reported == graph && count == 1);
    const CUgraphNode fill = before[0];
    CUgraphNodeType type;
    WORKS(cuGraphNodeGetType, fill, &type);
    HOLDS(type == CU_GRAPH_NODE_TYPE_MEMSET && data[0].type == 0);
    CUgraphNode found;
    size_t one = 1;
    WORKS(cuGraphNodeGetDependencies, fill, &found, nullptr, &one);
    HOLDS(one == 1 && found == first);
    WORKS(cuStreamUpdateCaptureDependencies, stream, &second, nullptr, 1, CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
    WORKS(cuMemsetD8Async, memory, 2, 64, stream);
    WORKS(cuStreamGetCaptureInfo, stream, &status, &id, nullptr, &before, nullptr, &count);
    CUgraphNode both[2];
    size_t two = 2;
    WORKS(cuGraphNodeGetDependencies, before[0], both, nullptr, &two);
    HOLDS(two == 2 && both[0] == fill && both[1] == second);
    WORKS(cuStreamUpdateCaptureDependencies, stream, &second, nullptr, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    WORKS(cuStreamGetCaptureInfo, stream, &status, &id, nullptr, &before, nullptr, &count);
    HOLDS(count == 1 && before[0] == second);
    WORKS(cuStreamEndCapture, stream, &ended);
    HOLDS(ended == graph);
    RETURNS(401, cuStreamUpdateCaptureDependencies, stream, &second, nullptr, 1, 0);
    WORKS(cuGraphDestroy, graph);
    WORKS(cuStreamDestroy, stream);
}

int main() {
    CUdevice device;
    WORKS(cuInit, 0);
    WORKS(cuDeviceGet, &device, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, device);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuMemAlloc, &memory, 4096);
    WORKS(cuMemHostAlloc, &pinned, 4096, 0);
    WORKS(cuStreamCreate, &other, 1);
    WORKS(cuStreamCreate, &blocking, 0);
    WORKS(cuEventCreate, &recorded, 0);
    WORKS(cuEventCreate, &fresh, 0);
    WORKS(cuEventRecord, recorded, other);
    WORKS(cuStreamSynchronize, other);
    legality();
    modes();
    addresses_of_nothing();
    ends();
    steered();
    // After all this, work goes on.
    WORKS(cuMemsetD8Async, memory, 9, 64, other);
    WORKS(cuMemcpyDtoHAsync, pageable, memory, 64, other);
    WORKS(cuStreamSynchronize, other);
    for (const char byte : pageable) HOLDS(byte == 9);
    std::printf("PASS captures\n");
    return 0;
}
