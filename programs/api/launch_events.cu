// Events that launches record: complete when all blocks have begun, or have let dependents be launched.
#include <atomic>
#include <cstring>

#include "driver.cuh"

namespace {

// `wait` lets dependents be launched when the first word is set, and writes the third and ends when the second is.
const char image[] = R"(
.version 7.8
.target sm_90
.address_size 64
.visible .entry wait(.param .u64 words)
{
    .reg .pred %p;
    .reg .b32 %r;
    .reg .b64 %a;
    ld.param.u64 %a, [words];
TRIGGER:
    ld.volatile.u32 %r, [%a];
    setp.eq.u32 %p, %r, 0;
    @%p bra TRIGGER;
    griddepcontrol.launch_dependents;
END:
    ld.volatile.u32 %r, [%a+4];
    setp.eq.u32 %p, %r, 0;
    @%p bra END;
    mov.u32 %r, 1;
    st.volatile.u32 [%a+8], %r;
    ret;
}
// words[index] = words[from] + 1, behind all that the grids before it have done
.visible .entry next(.param .u64 words, .param .u32 from, .param .u32 index)
{
    .reg .b32 %r<3>;
    .reg .b64 %a<4>;
    ld.param.u64 %a1, [words];
    ld.param.u32 %r1, [from];
    ld.param.u32 %r2, [index];
    griddepcontrol.wait;
    mad.wide.u32 %a2, %r1, 4, %a1;
    mad.wide.u32 %a3, %r2, 4, %a1;
    ld.volatile.u32 %r1, [%a2];
    add.u32 %r1, %r1, 1;
    st.volatile.u32 [%a3], %r1;
    ret;
}
)";

CUcontext context;
CUfunction waiting, following;
volatile unsigned *words;
CUstream first, second;
// On a processor events are seen as soon as they are reached; a GPU may show them later.
bool at_once;

void clear() {
    WORKS(cuCtxSynchronize);
    for (int index = 0; index < 16; index++) words[index] = 0;
}

void set(int index) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    words[index] = 1;
}

CUevent event(unsigned flags = CU_EVENT_DISABLE_TIMING) {
    CUevent made = nullptr;
    WORKS(cuEventCreate, &made, flags);
    return made;
}

CUlaunchAttribute begun(CUevent event, int flags = 0) {
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
    attribute.value.launchCompletionEvent.event = event;
    attribute.value.launchCompletionEvent.flags = flags;
    return attribute;
}

CUlaunchAttribute triggered(CUevent event, int at_start = 0, int flags = 0) {
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT;
    attribute.value.programmaticEvent.event = event;
    attribute.value.programmaticEvent.flags = flags;
    attribute.value.programmaticEvent.triggerAtBlockStart = at_start;
    return attribute;
}

template <int count>
int launch(CUlaunchAttribute (&&attributes)[count], CUstream stream, unsigned blocks = 2) {
    CUlaunchConfig config = {};
    config.gridDimX = blocks, config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream;
    config.attrs = attributes, config.numAttrs = count;
    void *values[] = {&words};
    return DRIVER(cuLaunchKernelEx)(&config, waiting, values, nullptr);
}

void follow(CUstream stream, int from, int index) {
    void *values[] = {&words, &from, &index};
    WORKS(cuLaunchKernel, following, 1, 1, 1, 1, 1, 1, 0, stream, values, nullptr);
}

void queries_and_waits_of_the_host() {
    const CUevent start = event(), trigger = event();
    // In the first round the events are new; in later ones they have been queried, and recorded with another attribute.
    for (int round = 0; round < 3; round++) {
        clear();
        const int at_start = round == 1;
        HOLDS(launch({begun(start), triggered(trigger, at_start)}, first) == CUDA_SUCCESS);
        // `start` completes without the words; `trigger` does so only if the start of blocks triggers it.
        if (at_once) WORKS(cuEventSynchronize, start);
        if (at_once && at_start) WORKS(cuEventSynchronize, trigger);
        if (!at_start) RETURNS(CUDA_ERROR_NOT_READY, cuEventQuery, trigger);
        RETURNS(CUDA_ERROR_NOT_READY, cuStreamQuery, first);
        set(0);
        if (at_once) {
            WORKS(cuEventSynchronize, trigger);
            WORKS(cuEventQuery, trigger);
            RETURNS(CUDA_ERROR_NOT_READY, cuStreamQuery, first);
            HOLDS(words[2] == 0);
        }
        set(1);
        WORKS(cuEventSynchronize, start);
        WORKS(cuEventSynchronize, trigger);
        WORKS(cuStreamSynchronize, first);
        HOLDS(words[2] == 1);
        WORKS(cuEventQuery, start);
        WORKS(cuEventQuery, trigger);
        for (const CUevent both : {start, trigger}) {
            WORKS(cuEventRecord, both, second);
            WORKS(cuEventSynchronize, both);
            WORKS(cuEventQuery, both);
        }
    }
    // A launch behind other work has not begun; an event that is recorded again has no earlier state.
    clear();
    HOLDS(launch({triggered(trigger, 1)}, first) == CUDA_SUCCESS);
    HOLDS(launch({begun(start)}, first) == CUDA_SUCCESS);
    RETURNS(CUDA_ERROR_NOT_READY, cuEventQuery, start);
    WORKS(cuEventRecord, start, second);
    WORKS(cuEventSynchronize, start);
    float milliseconds;
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime, &milliseconds, start, trigger);
    // The launch goes on after its event is destroyed.
    WORKS(cuEventDestroy, start);
    WORKS(cuEventDestroy, trigger);
    set(0);
    set(1);
    WORKS(cuCtxSynchronize);
    HOLDS(words[2] == 1);
}

void waits_of_other_streams() {
    const CUevent start = event(), trigger = event();
    CUstream third = nullptr;
    WORKS(cuStreamCreate, &third, CU_STREAM_NON_BLOCKING);
    clear();
    HOLDS(launch({begun(start), triggered(trigger)}, first) == CUDA_SUCCESS);
    WORKS(cuStreamWaitEvent, second, trigger, 0);
    follow(second, 2, 3);
    WORKS(cuStreamWaitEvent, third, start, 0);
    follow(third, 4, 5);
    if (at_once) {
        WORKS(cuStreamSynchronize, third);
        HOLDS(words[5] == 1);
    }
    RETURNS(CUDA_ERROR_NOT_READY, cuStreamQuery, second);
    set(0);
    HOLDS(words[3] == 0);
    set(1);
    WORKS(cuCtxSynchronize);
    // A kernel that waits for the grids before it sees their writes.
    HOLDS(words[3] == 2 && words[5] == 1);
    WORKS(cuStreamDestroy, third);
    WORKS(cuEventDestroy, start);
    WORKS(cuEventDestroy, trigger);
}

void refusals() {
    clear();
    const CUevent good = event(), timed = event(0);
    const CUevent shared = event(CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS);
    for (const CUevent bad : {timed, shared}) {
        HOLDS(launch({begun(bad)}, first) == CUDA_ERROR_NOT_SUPPORTED);
        HOLDS(launch({triggered(bad)}, first) == CUDA_ERROR_NOT_SUPPORTED);
    }
    HOLDS(launch({begun(good, CU_EVENT_RECORD_EXTERNAL)}, first) == CUDA_ERROR_ILLEGAL_STATE);
    HOLDS(launch({triggered(good, 0, CU_EVENT_RECORD_EXTERNAL)}, first) == CUDA_ERROR_ILLEGAL_STATE);
    WORKS(cuEventQuery, good);
    WORKS(cuStreamQuery, first);
    HOLDS(words[2] == 0);
    for (const CUevent one : {good, timed, shared}) WORKS(cuEventDestroy, one);
}

// A dependency between kernels of a capture for each way to record an event.
void captures() {
    struct {
        CUlaunchAttribute (*recording)(CUevent);
        unsigned char port, type;
    } cases[] = {
        {[](CUevent event) { return triggered(event); }, CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC,
         CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC},
        {[](CUevent event) { return triggered(event, 1); }, CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER,
         CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC},
        {[](CUevent event) { return begun(event); }, CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER,
         CU_GRAPH_DEPENDENCY_TYPE_DEFAULT},
    };
    for (const auto &one : cases) {
        clear();
        const CUevent launched = event(), joined = event();
        CUgraph graph = nullptr;
        CUgraphNode from[4], to[4];
        CUgraphEdgeData data[4];
        size_t count = 4;
        WORKS(cuStreamBeginCapture, first, CU_STREAM_CAPTURE_MODE_GLOBAL);
        HOLDS(launch({one.recording(launched)}, first) == CUDA_SUCCESS);
        WORKS(cuStreamWaitEvent, second, launched, 0);
        follow(second, 2, 3);
        WORKS(cuEventRecord, joined, second);
        WORKS(cuStreamWaitEvent, first, joined, 0);
        follow(first, 3, 4);
        WORKS(cuStreamEndCapture, first, &graph);
        WORKS(cuGraphGetEdges, graph, from, to, data, &count);
        HOLDS(count == 3);
        int early = 0;
        for (size_t edge = 0; edge < count; edge++) {
            if (data[edge].from_port == 0 && data[edge].type == 0) continue;
            HOLDS(data[edge].from_port == one.port && data[edge].type == one.type && data[edge].to_port == 0);
            CUgraphNodeType type;
            WORKS(cuGraphNodeGetType, from[edge], &type);
            HOLDS(type == CU_GRAPH_NODE_TYPE_KERNEL);
            CUlaunchAttributeValue value = {};
            value.programmaticEvent.event = launched;
            RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphKernelNodeSetAttribute, from[edge],
                    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT, &value);
            early++;
        }
        HOLDS(early == 1);
        CUgraphExec executable = nullptr;
        WORKS(cuGraphInstantiate, &executable, graph, 0);
        WORKS(cuGraphLaunch, executable, first);
        RETURNS(CUDA_ERROR_NOT_READY, cuStreamQuery, first);
        set(0);
        set(1);
        WORKS(cuStreamSynchronize, first);
        HOLDS(words[2] == 1);
        // Only a dependency by a launch completion event lets the next kernel miss the launch's writes.
        if (one.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC) HOLDS(words[3] == 2);
        HOLDS(words[4] == words[3] + 1);
        WORKS(cuGraphExecDestroy, executable);
        WORKS(cuGraphDestroy, graph);
        WORKS(cuEventDestroy, launched);
        WORKS(cuEventDestroy, joined);
    }
}

// Other work than a kernel comes behind the launch too, and so does a kernel that waits for its event and its end. CUDA
// does not document how such dependencies are reported.
void captures_of_other_dependencies() {
    const CUevent launched = event(), behind = event(), joined = event();
    CUdeviceptr memory = 0;
    WORKS(cuMemAlloc, &memory, 4);
    for (const bool kernel : {false, true}) {
        clear();
        CUgraph graph = nullptr;
        WORKS(cuStreamBeginCapture, first, CU_STREAM_CAPTURE_MODE_GLOBAL);
        HOLDS(launch({triggered(launched)}, first) == CUDA_SUCCESS);
        WORKS(cuStreamWaitEvent, second, launched, 0);
        if (kernel) {
            WORKS(cuEventRecord, behind, first);
            WORKS(cuStreamWaitEvent, second, behind, 0);
            follow(second, 2, 3);
        } else {
            WORKS(cuMemsetD32Async, memory, 1, 1, second);
        }
        WORKS(cuEventRecord, joined, second);
        WORKS(cuStreamWaitEvent, first, joined, 0);
        WORKS(cuStreamEndCapture, first, &graph);
        CUgraphNode from[4], to[4];
        CUgraphEdgeData data[4];
        size_t count = 4;
        WORKS(cuGraphGetEdges, graph, from, to, data, &count);
        HOLDS(count == 1 || (kernel && count == 2));
        for (size_t edge = 0; edge < count; edge++) {
            CUgraphNodeType before, after;
            WORKS(cuGraphNodeGetType, from[edge], &before);
            WORKS(cuGraphNodeGetType, to[edge], &after);
            HOLDS(before == CU_GRAPH_NODE_TYPE_KERNEL);
            HOLDS(after == (kernel ? CU_GRAPH_NODE_TYPE_KERNEL : CU_GRAPH_NODE_TYPE_MEMSET));
        }
        CUgraphExec executable = nullptr;
        WORKS(cuGraphInstantiate, &executable, graph, 0);
        unsigned filled = 0;
        WORKS(cuMemcpyHtoD, memory, &filled, sizeof filled);
        // The copy may return before it is there, and these streams do not wait for it.
        WORKS(cuCtxSynchronize);
        WORKS(cuGraphLaunch, executable, first);
        // Neither the copy nor the kernel runs before the launch permits it.
        WORKS(cuMemcpyDtoHAsync, &filled, memory, sizeof filled, second);
        WORKS(cuStreamSynchronize, second);
        HOLDS(words[3] == 0 && filled == 0);
        set(0);
        set(1);
        WORKS(cuStreamSynchronize, first);
        WORKS(cuMemcpyDtoH, &filled, memory, sizeof filled);
        if (kernel) HOLDS(words[3] == 2);
        else HOLDS(filled == 1);
        WORKS(cuGraphExecDestroy, executable);
        WORKS(cuGraphDestroy, graph);
    }
    // A captured event cannot be queried; an event that is recorded outside the capture can.
    CUgraph graph = nullptr;
    WORKS(cuStreamBeginCapture, first, CU_STREAM_CAPTURE_MODE_RELAXED);
    HOLDS(launch({begun(launched)}, first) == CUDA_SUCCESS);
    RETURNS(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery, launched);
    RETURNS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture, first, &graph);
    set(0);
    set(1);
    HOLDS(launch({begun(launched)}, first) == CUDA_SUCCESS);
    WORKS(cuEventSynchronize, launched);
    WORKS(cuEventQuery, launched);
    WORKS(cuMemFree, memory);
    for (const CUevent one : {launched, behind, joined}) WORKS(cuEventDestroy, one);
}

}  // namespace

int main() {
    WORKS(cuInit, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    int tensors = 0;
    WORKS(cuDeviceGetAttribute, &tensors, CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED, 0);
    at_once = !tensors;
    CUmodule module = nullptr;
    WORKS(cuModuleLoadData, &module, image);
    WORKS(cuModuleGetFunction, &waiting, module, "wait");
    WORKS(cuModuleGetFunction, &following, module, "next");
    void *pinned = nullptr;
    WORKS(cuMemHostAlloc, &pinned, 64, CU_MEMHOSTALLOC_DEVICEMAP);
    words = static_cast<volatile unsigned *>(pinned);
    WORKS(cuStreamCreate, &first, CU_STREAM_NON_BLOCKING);
    WORKS(cuStreamCreate, &second, CU_STREAM_NON_BLOCKING);
    // A kernel's first launch may wait for the device.
    set(0);
    set(1);
    HOLDS(launch({begun(event())}, first) == CUDA_SUCCESS);
    follow(first, 2, 3);
    WORKS(cuCtxSynchronize);
    HOLDS(words[2] == 1 && words[3] == 2);
    queries_and_waits_of_the_host();
    waits_of_other_streams();
    refusals();
    captures();
    captures_of_other_dependencies();
    std::printf("PASS launch_events\n");
    return 0;
}
