// Graphs: captured from streams that fork and join, and built node by node; launched repeatedly with changed data,
// updated, cloned, and with nodes set, disabled and nested.
#include <cstring>
#include <thread>
#include <vector>

#include "check.cuh"

#if CUDART_VERSION < 12000
#define cudaGraphGetEdges(graph, from, to, data, count) cudaGraphGetEdges(graph, from, to, count)
#define cudaGraphAddDependencies(graph, from, to, data, count) cudaGraphAddDependencies(graph, from, to, count)
#define cudaGraphInstantiate cudaGraphInstantiateWithFlags
// Result of an update, in the structure that CUDA 11 lacks.
struct cudaGraphExecUpdateResultInfo {
    cudaGraphExecUpdateResult result;
    cudaGraphNode_t node;
};
static cudaError_t update(cudaGraphExec_t executable, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *info) {
    return cudaGraphExecUpdate(executable, graph, &info->node, &info->result);
}
#define cudaGraphExecUpdate update
#elif CUDART_VERSION < 13000
#define cudaGraphGetEdges cudaGraphGetEdges_v2
#define cudaGraphAddDependencies cudaGraphAddDependencies_v2
#endif

__global__ void add(int *values, int n, int amount) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] += amount;
}

__global__ void multiply(int *values, int n, int factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] *= factor;
}

__global__ void combine(int *out, const int *a, const int *b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] * 1000 + b[i];
}

constexpr int BLOCK = 128;

static int n;
static int blocks() { return (n + BLOCK - 1) / BLOCK; }

static void fail(const char *what) {
    std::printf("FAIL graphs: %s\n", what);
    std::exit(1);
}

static void expect(const int *device, int value, const char *what) {
    std::vector<int> values(n);
    CHECK(cudaMemcpy(values.data(), device, n * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++)
        if (values[i] != value) {
            std::printf("FAIL graphs: %s: element %d is %d and not %d\n", what, i, values[i], value);
            std::exit(1);
        }
}

static size_t count(cudaGraph_t graph) {
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    return nodes;
}

// Work of two streams, joined by events, of every kind that a capture takes.
static void captured() {
    int *a, *b, *out, *pinned;
    std::vector<int> pageable(n, 7), back(n, -1);
    CHECK(cudaMalloc(&a, n * sizeof(int)));
    CHECK(cudaMalloc(&b, n * sizeof(int)));
    CHECK(cudaMalloc(&out, n * sizeof(int)));
    CHECK(cudaHostAlloc(&pinned, n * sizeof(int), 0));
    for (int i = 0; i < n; i++) pinned[i] = 3;
    cudaStream_t stream, side;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    cudaEvent_t fork, join;
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));

    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(side, fork, 0));
    CHECK(cudaMemcpyAsync(a, pinned, n * sizeof(int), cudaMemcpyHostToDevice, stream));
    add<<<blocks(), BLOCK, 0, stream>>>(a, n, 1);
    CHECK(cudaMemcpyAsync(b, pageable.data(), n * sizeof(int), cudaMemcpyHostToDevice, side));
    multiply<<<blocks(), BLOCK, 0, side>>>(b, n, 5);
    CHECK(cudaEventRecord(join, side));
    CHECK(cudaStreamWaitEvent(stream, join, 0));
    CHECK(cudaMemsetAsync(out, 0xFF, n * sizeof(int), stream));
    combine<<<blocks(), BLOCK, 0, stream>>>(out, a, b, n);
    CHECK(cudaMemcpyAsync(back.data(), out, n * sizeof(int), cudaMemcpyDeviceToHost, stream));
    cudaStreamCaptureStatus status;
    unsigned long long id = 0;
    CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
    if (status != cudaStreamCaptureStatusActive || id == 0) fail("a capture is not seen");
    CHECK(cudaStreamIsCapturing(side, &status));
    if (status != cudaStreamCaptureStatusActive) fail("the forked stream is not captured");
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaStreamIsCapturing(side, &status));
    if (status != cudaStreamCaptureStatusNone) fail("the capture of the forked stream did not end");
    if (count(graph) != 7) fail("the capture has another number of nodes");
    size_t edges = 0, roots = 0;
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
    CHECK(cudaGraphGetRootNodes(graph, nullptr, &roots));
    if (edges != 6 || roots != 2) fail("the capture has other dependencies");

    // Nothing has run yet.
    for (int value : back)
        if (value != -1) fail("captured work has run");
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < n; i++) pinned[i] = round;
        for (int &value : pageable) value = 10 + round;
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
        expect(out, (round + 1) * 1000 + (10 + round) * 5, "a captured graph");
        for (int value : back)
            if (value != (round + 1) * 1000 + (10 + round) * 5) fail("a copy to pageable memory");
    }
    // Launches follow each other in the order of their streams, and of the graph.
    for (int round = 0; round < 50; round++) {
        CHECK(cudaGraphLaunch(executable, round % 2 ? side : stream));
    }
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaDeviceSynchronize());
    expect(out, 5 * 1000 + 14 * 5, "many launches of a graph");
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(side));
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    CHECK(cudaFree(out));
    CHECK(cudaFreeHost(pinned));
}

struct Note {
    const int *values;
    int seen;
    int calls;
};

static void CUDART_CB look(void *data) {
    Note *note = static_cast<Note *>(data);
    note->seen = note->values[n - 1];
    note->calls++;
}

// A graph built by hand: set, add, a host function that sees what the add wrote, multiply.
static void built() {
    int *values;
    CHECK(cudaHostAlloc(&values, n * sizeof(int), cudaHostAllocMapped));
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemsetParams set = {};
    set.dst = values;
    set.elementSize = 4;
    set.value = 100;
    set.width = n;
    set.height = 1;
    cudaGraphNode_t fill, kernel, host, last;
    CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &set));
    int amount = 1, factor = 2;
    void *arguments[] = {&values, &n, &amount};
    cudaKernelNodeParams launch = {};
    launch.func = reinterpret_cast<void *>(add);
    launch.gridDim = dim3(blocks());
    launch.blockDim = dim3(BLOCK);
    launch.kernelParams = arguments;
    CHECK(cudaGraphAddKernelNode(&kernel, graph, &fill, 1, &launch));
    Note note = {values, 0, 0};
    cudaHostNodeParams call = {look, &note};
    CHECK(cudaGraphAddHostNode(&host, graph, &kernel, 1, &call));
    void *others[] = {&values, &n, &factor};
    cudaKernelNodeParams second = launch;
    second.func = reinterpret_cast<void *>(multiply);
    second.kernelParams = others;
    CHECK(cudaGraphAddKernelNode(&last, graph, &host, 1, &second));

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    if (note.calls != 2 || note.seen != 101) fail("a host node saw something else");
    expect(values, 202, "a graph that was built");

    // Sets a node of the executable graph.
    amount = 5;
    CHECK(cudaGraphExecKernelNodeSetParams(executable, kernel, &launch));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect(values, 210, "a kernel node that was set");
    // The graph still has the old amount.
    cudaKernelNodeParams reported = {};
    CHECK(cudaGraphKernelNodeGetParams(kernel, &reported));
    if (reported.func != launch.func || reported.gridDim.x != launch.gridDim.x) fail("a kernel node tells of another");
    if (*static_cast<int *>(reported.kernelParams[2]) != 1) fail("a kernel node tells of other parameters");

    // Replaces the whole graph by an update.
    cudaGraph_t clone;
    cudaGraphNode_t cloned;
    CHECK(cudaGraphClone(&clone, graph));
    CHECK(cudaGraphNodeFindInClone(&cloned, last, clone));
    factor = 7;
    CHECK(cudaGraphKernelNodeSetParams(cloned, &second));
    cudaGraphExecUpdateResultInfo info = {};
    CHECK(cudaGraphExecUpdate(executable, clone, &info));
    if (info.result != cudaGraphExecUpdateSuccess) fail("an update has another result");
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect(values, 707, "a graph that was updated");
    cudaGraphNode_t extra;
    CHECK(cudaGraphAddEmptyNode(&extra, clone, nullptr, 0));
    if (cudaGraphExecUpdate(executable, clone, &info) != cudaErrorGraphExecUpdateFailure ||
        info.result != cudaGraphExecUpdateErrorTopologyChanged)
        fail("an update to another shape was made");
    cudaGetLastError();

    // A disabled node does nothing, and the other nodes are unaffected.
    CHECK(cudaGraphNodeSetEnabled(executable, kernel, 0));
    unsigned enabled = 1;
    CHECK(cudaGraphNodeGetEnabled(executable, kernel, &enabled));
    if (enabled) fail("a disabled node is enabled");
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect(values, 700, "a graph with a node disabled");
    CHECK(cudaGraphNodeSetEnabled(executable, kernel, 1));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect(values, 707, "a graph with a node enabled again");

    // A graph as a node of another: its work comes before and after that of the others.
    cudaGraph_t outer;
    CHECK(cudaGraphCreate(&outer, 0));
    cudaGraphNode_t child, after;
    CHECK(cudaGraphAddChildGraphNode(&child, outer, nullptr, 0, graph));
    amount = 11;
    CHECK(cudaGraphAddKernelNode(&after, outer, &child, 1, &launch));
    cudaGraphExec_t nested;
    CHECK(cudaGraphInstantiate(&nested, outer, 0));
    CHECK(cudaGraphLaunch(nested, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect(values, 101 * 2 + 11, "a graph in a graph");

    // Dependencies decide, not the order of adding.
    cudaGraph_t reversed;
    CHECK(cudaGraphCreate(&reversed, 0));
    cudaGraphNode_t first, behind;
    factor = 3;
    CHECK(cudaGraphAddKernelNode(&behind, reversed, nullptr, 0, &second));
    CHECK(cudaGraphAddMemsetNode(&first, reversed, nullptr, 0, &set));
    CHECK(cudaGraphAddDependencies(reversed, &first, &behind, nullptr, 1));
    cudaGraphExec_t ordered;
    CHECK(cudaGraphInstantiate(&ordered, reversed, 0));
    CHECK(cudaGraphLaunch(ordered, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect(values, 300, "a graph whose last node was added first");
    CHECK(cudaGraphAddDependencies(reversed, &behind, &first, nullptr, 1));
    cudaGraphExec_t never;
    if (cudaGraphInstantiate(&never, reversed, 0) == cudaSuccess) fail("a cycle is executable");
    cudaGetLastError();

    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphExecDestroy(nested));
    CHECK(cudaGraphExecDestroy(ordered));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphDestroy(clone));
    CHECK(cudaGraphDestroy(outer));
    CHECK(cudaGraphDestroy(reversed));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(values));
}

// Events and memory of graphs.
static void events_and_memory() {
    int *values;
    CHECK(cudaMalloc(&values, n * sizeof(int)));
    CHECK(cudaMemset(values, 0, n * sizeof(int)));
    cudaStream_t stream, other;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaEventRecordWithFlags(begin, stream, cudaEventRecordExternal));
    int *scratch;
    CHECK(cudaMallocAsync(&scratch, n * sizeof(int), stream));
    CHECK(cudaMemsetAsync(scratch, 0, n * sizeof(int), stream));
    add<<<blocks(), BLOCK, 0, stream>>>(scratch, n, 4);
    combine<<<blocks(), BLOCK, 0, stream>>>(values, scratch, scratch, n);
    CHECK(cudaFreeAsync(scratch, stream));
    CHECK(cudaEventRecordWithFlags(end, stream, cudaEventRecordExternal));
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    if (count(graph) != 7) fail("a capture with events and memory has another number of nodes");
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 3; round++) {
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamWaitEvent(other, end, 0));
        add<<<blocks(), BLOCK, 0, other>>>(values, n, 1);
        CHECK(cudaStreamSynchronize(other));
        expect(values, 4005, "work behind an event that a graph records");
    }
    CHECK(cudaEventSynchronize(end));
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    if (milliseconds < 0) fail("a graph took less than no time");
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(other));
    CHECK(cudaFree(values));
}

// One thread's captures, each with a function of the program's, while others do the same.
static void capturing(int thread) {
    int *values;
    cudaStream_t stream;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    CHECK(cudaHostAlloc(&values, n * sizeof(int), cudaHostAllocMapped));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaGraphExec_t executable = nullptr;
    Note note = {values, 0, 0};
    int expected = 0;
    for (int i = 0; i < n; i++) values[i] = 0;
    for (int round = 1; round <= 5; round++) {
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        add<<<blocks(), BLOCK, 0, stream>>>(values, n, thread + round);
        CHECK(cudaLaunchHostFunc(stream, look, &note));
        add<<<blocks(), BLOCK, 0, stream>>>(values, n, 1);
        CHECK(cudaStreamEndCapture(stream, &graph));
        cudaGraphExecUpdateResultInfo info;
        if (!executable)
            CHECK(cudaGraphInstantiate(&executable, graph, 0));
        else
            CHECK(cudaGraphExecUpdate(executable, graph, &info));
        CHECK(cudaGraphDestroy(graph));
        for (int launch = 0; launch < 10; launch++) {
            CHECK(cudaGraphLaunch(executable, stream));
            expected += thread + round + 1;
        }
    }
    CHECK(cudaStreamSynchronize(stream));
    if (note.calls != 50 || note.seen != expected - 1) fail("functions of graphs of several threads");
    for (int i = 0; i < n; i++)
        if (values[i] != expected) fail("graphs of several threads");
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(values));
}

// A graph in the default stream is in order with the work of blocking streams.
static void in_the_default_stream() {
    int *values;
    cudaStream_t blocking;
    CHECK(cudaMalloc(&values, n * sizeof(int)));
    CHECK(cudaMemset(values, 0, n * sizeof(int)));
    CHECK(cudaStreamCreate(&blocking));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal));
    multiply<<<blocks(), BLOCK, 0, blocking>>>(values, n, 2);
    CHECK(cudaStreamEndCapture(blocking, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 10; round++) {
        add<<<blocks(), BLOCK, 0, blocking>>>(values, n, 1);
        CHECK(cudaGraphLaunch(executable, nullptr));
    }
    expect(values, 2046, "a graph in the default stream");
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(blocking));
    CHECK(cudaFree(values));
}

int main(int argc, char **argv) {
    n = size_argument(argc, argv, 1 << 14);
    CHECK(cudaFree(nullptr));
    captured();
    built();
    events_and_memory();
    in_the_default_stream();
    std::thread threads[4];
    for (int i = 0; i < 4; i++) threads[i] = std::thread(capturing, i);
    for (std::thread &thread : threads) thread.join();
    std::printf("PASS graphs\n");
    return 0;
}
