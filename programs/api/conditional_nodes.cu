// Conditional nodes of graphs, built by hand and captured: which body runs, how often, and what is refused.
#include <cstring>
#include <fstream>
#include <string>

#include <unistd.h>

#include "../check.cuh"
#include "driver.cuh"

__global__ void add(unsigned *word, unsigned amount) { *word += amount; }

// Decrements a word, and sets the condition to it.
__global__ void lower(cudaGraphConditionalHandle condition, unsigned *word) {
    *word -= 1;
    cudaGraphSetConditional(condition, *word);
}

__global__ void decide(cudaGraphConditionalHandle condition, const unsigned *word, unsigned mask) {
    if (threadIdx.x == 0) cudaGraphSetConditional(condition, *word & mask);
}

static CUcontext context;
static cudaStream_t stream;
static unsigned *words;

static void set(int place, unsigned value) {
    CHECK(cudaMemcpy(words + place, &value, sizeof value, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
}

static void clear() {
    CHECK(cudaMemset(words, 0, 64));
    CHECK(cudaDeviceSynchronize());
}

static unsigned word(int place) {
    unsigned value;
    CHECK(cudaMemcpy(&value, words + place, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

static CUgraph graph() {
    CUgraph made;
    WORKS(cuGraphCreate, &made, 0);
    return made;
}

static CUgraphConditionalHandle condition(CUgraph graph, unsigned value, unsigned flags) {
    CUgraphConditionalHandle made = 0;
    WORKS(cuGraphConditionalHandleCreate, &made, graph, context, value, flags);
    return made;
}

template <typename... A> static CUgraphNode kernel(CUgraph graph, CUgraphNode *before, void (*function)(A...), A... values) {
    CUgraphNodeParams wanted;
    std::memset(&wanted, 0, sizeof wanted);
    void *arguments[] = {&values...};
    wanted.type = CU_GRAPH_NODE_TYPE_KERNEL;
    cudaFunction_t found;
    CHECK(cudaGetFuncBySymbol(&found, reinterpret_cast<const void *>(function)));
    wanted.kernel.func = found;
    wanted.kernel.gridDimX = wanted.kernel.gridDimY = wanted.kernel.gridDimZ = 1;
    wanted.kernel.blockDimX = wanted.kernel.blockDimY = wanted.kernel.blockDimZ = 1;
    wanted.kernel.kernelParams = arguments;
    CUgraphNode made;
    WORKS(cuGraphAddNode, &made, graph, before, nullptr, before ? 1 : 0, &wanted);
    return made;
}

static CUgraphNodeParams choice(CUgraphConditionalHandle condition, CUgraphConditionalNodeType type, unsigned size) {
    CUgraphNodeParams wanted;
    std::memset(&wanted, 0, sizeof wanted);
    wanted.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
    wanted.conditional.handle = condition;
    wanted.conditional.type = type;
    wanted.conditional.size = size;
    wanted.conditional.ctx = context;
    return wanted;
}

struct Choice {
    CUgraphNode node;
    CUgraph *bodies;
};

static Choice conditional(CUgraph graph, CUgraphNode *before, CUgraphConditionalHandle condition,
                          CUgraphConditionalNodeType type, unsigned size) {
    CUgraphNodeParams wanted = choice(condition, type, size);
    CUgraphNode made;
    WORKS(cuGraphAddNode, &made, graph, before, nullptr, before ? 1 : 0, &wanted);
    HOLDS(wanted.conditional.phGraph_out && wanted.conditional.phGraph_out[size - 1]);
    return {made, wanted.conditional.phGraph_out};
}

static void refuses(CUgraph graph, CUgraphConditionalHandle condition, unsigned type, unsigned size) {
    CUgraphNodeParams wanted = choice(condition, static_cast<CUgraphConditionalNodeType>(type), size);
    CUgraphNode made;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphAddNode, &made, graph, nullptr, nullptr, 0, &wanted);
    HOLDS(!wanted.conditional.phGraph_out);
}

static CUgraphExec executable(CUgraph graph) {
    CUgraphExec made;
    WORKS(cuGraphInstantiate, &made, graph, 0);
    return made;
}

static void run(CUgraphExec graph) {
    WORKS(cuGraphLaunch, graph, stream);
    WORKS(cuStreamSynchronize, stream);
}

static void loops() {
    CUgraph whole = graph();
    CUgraphConditionalHandle again = condition(whole, 1, CU_GRAPH_COND_ASSIGN_DEFAULT);
    HOLDS(again == 1);
    auto [loop, body] = conditional(whole, nullptr, again, CU_GRAPH_COND_TYPE_WHILE, 1);
    CUgraphNodeType type;
    WORKS(cuGraphNodeGetType, loop, &type);
    HOLDS(type == CU_GRAPH_NODE_TYPE_CONDITIONAL);
    CUgraphNode first = kernel(body[0], nullptr, lower, cudaGraphConditionalHandle(again), words);
    kernel(body[0], &first, add, words + 1, 1u);
    kernel(body[0], &first, add, words + 2, 10u);
    kernel(whole, &loop, add, words + 3, 100u);
    size_t count = 0;
    WORKS(cuGraphGetNodes, body[0], nullptr, &count);
    HOLDS(count == 3);
    WORKS(cuGraphGetNodes, whole, nullptr, &count);
    HOLDS(count == 2);
    CUgraphExec made = executable(whole);
    for (unsigned round = 1; round <= 3; round++) {
        set(0, 5);
        run(made);
        HOLDS(word(0) == 0 && word(1) == 5 * round && word(2) == 50 * round && word(3) == 100 * round);
    }
    // Nodes of the body are set like others.
    WORKS(cuGraphExecDestroy, made);
    made = executable(whole);
    CUgraphExecUpdateResultInfo info;
    WORKS(cuGraphExecUpdate, made, whole, &info);
    HOLDS(info.result == CU_GRAPH_EXEC_UPDATE_SUCCESS);
    set(0, 2);
    run(made);
    HOLDS(word(0) == 0 && word(1) == 17);
    // The executable graph stays valid.
    WORKS(cuGraphDestroy, whole);
    set(0, 1);
    run(made);
    HOLDS(word(0) == 0 && word(1) == 18);
    WORKS(cuGraphExecDestroy, made);
    clear();
}

static void branches() {
    CUgraph whole = graph();
    // Without a default: a kernel before the node decides.
    CUgraphConditionalHandle which = condition(whole, 7, 0);
    CUgraphNode first = kernel(whole, nullptr, decide, cudaGraphConditionalHandle(which), (const unsigned *)words, 3u);
    auto [branch, bodies] = conditional(whole, &first, which, CU_GRAPH_COND_TYPE_IF, 2);
    HOLDS(bodies[0] != bodies[1]);
    kernel(bodies[0], nullptr, add, words + 1, 1u);
    kernel(bodies[1], nullptr, add, words + 1, 100u);
    CUgraphExec made = executable(whole);
    set(0, 3);
    run(made);
    HOLDS(word(1) == 1);
    set(0, 4);
    run(made);
    HOLDS(word(1) == 101);
    WORKS(cuGraphExecDestroy, made);
    WORKS(cuGraphDestroy, whole);

    whole = graph();
    which = condition(whole, 0, 0);
    first = kernel(whole, nullptr, decide, cudaGraphConditionalHandle(which), (const unsigned *)words, ~0u);
    auto [chosen, cases] = conditional(whole, &first, which, CU_GRAPH_COND_TYPE_SWITCH, 3);
    for (unsigned place = 0, amount = 1; place < 3; place++, amount *= 10)
        kernel(cases[place], nullptr, add, words + 2, amount);
    kernel(whole, &chosen, add, words + 3, 1u);
    made = executable(whole);
    const unsigned values[] = {2, 0, 1, 1, 3, ~0u}, expected[] = {100, 101, 111, 121, 121, 121};
    for (unsigned round = 0; round < 6; round++) {
        set(0, values[round]);
        run(made);
        HOLDS(word(2) == expected[round] && word(3) == round + 1);
    }
    WORKS(cuGraphExecDestroy, made);
    WORKS(cuGraphDestroy, whole);
    clear();
}

static void nested() {
    CUgraph whole = graph();
    CUgraphConditionalHandle again = condition(whole, 1, CU_GRAPH_COND_ASSIGN_DEFAULT);
    auto [loop, body] = conditional(whole, nullptr, again, CU_GRAPH_COND_TYPE_WHILE, 1);
    // A condition belongs to the whole graph, even if it is created for a body.
    CUgraphConditionalHandle odd = condition(body[0], 0, 0), last = condition(whole, 1, CU_GRAPH_COND_ASSIGN_DEFAULT);
    HOLDS(odd == 2 && last == 3);
    CUgraphNode first = kernel(body[0], nullptr, lower, cudaGraphConditionalHandle(again), words);
    CUgraphNode second = kernel(body[0], &first, decide, cudaGraphConditionalHandle(odd), (const unsigned *)words, 1u);
    auto [branch, inner] = conditional(body[0], &second, odd, CU_GRAPH_COND_TYPE_IF, 1);
    kernel(inner[0], nullptr, add, words + 1, 1u);
    auto [always, innermost] = conditional(inner[0], nullptr, last, CU_GRAPH_COND_TYPE_IF, 1);
    kernel(innermost[0], nullptr, add, words + 2, 1u);
    kernel(body[0], &branch, add, words + 3, 1u);
    CUgraphExec made = executable(whole);
    set(0, 7);
    run(made);
    HOLDS(word(0) == 0 && word(1) == 3 && word(2) == 3 && word(3) == 7);
    WORKS(cuGraphExecDestroy, made);

    // The text names every graph.
    const std::string path = "/tmp/conditional_nodes." + std::to_string(getpid());
    WORKS(cuGraphDebugDotPrint, whole, path.c_str(), 0);
    std::ifstream file(path);
    std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::remove(path.c_str());
    size_t clusters = 0;
    for (size_t at = 0; (at = text.find("cluster", at)) != std::string::npos; at++) clusters++;
    HOLDS(clusters >= 1);
    WORKS(cuGraphDestroy, whole);
    clear();
}

static void captured() {
    // A conditional node in the middle of a stream's work.
    WORKS(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    add<<<1, 1, 0, stream>>>(words, 4);
    CUstreamCaptureStatus status;
    CUgraph whole;
    const CUgraphNode *before;
    size_t count;
    WORKS(cuStreamGetCaptureInfo, stream, &status, nullptr, &whole, &before, nullptr, &count);
    HOLDS(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && count == 1);
    CUgraphConditionalHandle again = condition(whole, 1, CU_GRAPH_COND_ASSIGN_DEFAULT);
    CUgraphNodeParams wanted = choice(again, CU_GRAPH_COND_TYPE_WHILE, 1);
    CUgraphNode loop;
    WORKS(cuGraphAddNode, &loop, whole, before, nullptr, count, &wanted);
    WORKS(cuStreamUpdateCaptureDependencies, stream, &loop, nullptr, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    add<<<1, 1, 0, stream>>>(words + 2, 1);
    CUgraph ended;
    WORKS(cuStreamEndCapture, stream, &ended);
    HOLDS(ended == whole);
    // Its body is captured too.
    CUgraph body = wanted.conditional.phGraph_out[0];
    WORKS(cuStreamBeginCaptureToGraph, stream, body, nullptr, nullptr, 0, CU_STREAM_CAPTURE_MODE_RELAXED);
    lower<<<1, 1, 0, stream>>>(again, words);
    CHECK(cudaMemsetAsync(words + 3, 0xff, 4, stream));
    add<<<1, 1, 0, stream>>>(words + 3, 3);
    CHECK(cudaMemcpyAsync(words + 4, words + 3, 4, cudaMemcpyDeviceToDevice, stream));
    add<<<1, 1, 0, stream>>>(words + 1, 1);
    WORKS(cuStreamEndCapture, stream, &ended);
    HOLDS(ended == body);
    CUgraphExec made = executable(whole);
    run(made);
    HOLDS(word(0) == 0 && word(1) == 4 && word(2) == 1 && word(4) == 2);
    run(made);
    HOLDS(word(0) == 0 && word(1) == 8 && word(2) == 2);
    WORKS(cuGraphExecDestroy, made);
    WORKS(cuGraphDestroy, whole);
    clear();
}

static void updates() {
    CUgraph graphs[2];
    CUgraphNode inside[2];
    for (unsigned place = 0; place < 2; place++) {
        graphs[place] = graph();
        CUgraphConditionalHandle which = condition(graphs[place], place, CU_GRAPH_COND_ASSIGN_DEFAULT);
        Choice branch = conditional(graphs[place], nullptr, which, CU_GRAPH_COND_TYPE_IF, 2);
        kernel(branch.bodies[0], nullptr, add, words + 1, 1 + 4 * place);
        inside[place] = kernel(branch.bodies[1], nullptr, add, words + 1, 100u);
    }
    CUgraphExec made = executable(graphs[0]);
    run(made);
    HOLDS(word(1) == 100);
    // Nodes of bodies can be disabled.
    WORKS(cuGraphNodeSetEnabled, made, inside[0], 0);
    run(made);
    HOLDS(word(1) == 100);
    WORKS(cuGraphNodeSetEnabled, made, inside[0], 1);
    // An update replaces defaults and the work of nodes in bodies.
    CUgraphExecUpdateResultInfo info;
    WORKS(cuGraphExecUpdate, made, graphs[1], &info);
    run(made);
    HOLDS(word(1) == 105);
    // It does not replace the kind of the conditional node.
    CUgraph other = graph();
    CUgraphConditionalHandle which = condition(other, 1, CU_GRAPH_COND_ASSIGN_DEFAULT);
    Choice branch = conditional(other, nullptr, which, CU_GRAPH_COND_TYPE_SWITCH, 2);
    kernel(branch.bodies[0], nullptr, add, words + 1, 1u);
    kernel(branch.bodies[1], nullptr, add, words + 1, 1u);
    RETURNS(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, cuGraphExecUpdate, made, other, &info);
    HOLDS(info.result == CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphExecUpdate, made, branch.bodies[0], &info);
    run(made);
    HOLDS(word(1) == 110);
    WORKS(cuGraphExecDestroy, made);
    for (CUgraph gone : {graphs[0], graphs[1], other}) WORKS(cuGraphDestroy, gone);
    clear();
}

static void nothing(void *) {}

static void refusals() {
    CUgraph whole = graph();
    CUgraphConditionalHandle made = 77;
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuGraphConditionalHandleCreate, &made, whole, nullptr, 1, 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphConditionalHandleCreate, nullptr, whole, context, 1, 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphConditionalHandleCreate, &made, nullptr, context, 1, 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphConditionalHandleCreate, &made, whole, context, 1, 2);
    HOLDS(made == 77);
    made = condition(whole, 1, 0);
    // A condition that no node has.
    CUgraphExec exec;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphInstantiate, &exec, whole, 0);
    CUDA_GRAPH_INSTANTIATE_PARAMS how;
    std::memset(&how, 0, sizeof how);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphInstantiateWithParams, &exec, whole, &how);
    HOLDS(how.result_out == CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED);
    refuses(whole, made, CU_GRAPH_COND_TYPE_WHILE, 2);
    refuses(whole, made, CU_GRAPH_COND_TYPE_WHILE, 0);
    refuses(whole, made, CU_GRAPH_COND_TYPE_IF, 0);
    refuses(whole, made, CU_GRAPH_COND_TYPE_IF, 3);
    refuses(whole, made, CU_GRAPH_COND_TYPE_SWITCH, 0);
    refuses(whole, made, 3, 1);
    refuses(whole, 0, CU_GRAPH_COND_TYPE_IF, 1);
    refuses(whole, 2, CU_GRAPH_COND_TYPE_IF, 1);
    refuses(whole, 0x123456, CU_GRAPH_COND_TYPE_IF, 1);
    Choice branch = conditional(whole, nullptr, made, CU_GRAPH_COND_TYPE_IF, 2);
    refuses(whole, made, CU_GRAPH_COND_TYPE_IF, 1);
    size_t count = 0;
    WORKS(cuGraphGetNodes, whole, nullptr, &count);
    HOLDS(count == 1);
    // A graph with conditional nodes can be neither cloned nor a child.
    CUgraph copy, outer = graph();
    CUgraphNode node;
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphClone, &copy, whole);
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphAddChildGraphNode, &node, outer, nullptr, 0, whole);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphDestroy, branch.bodies[0]);
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphInstantiate, &exec, branch.bodies[0], 0);
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphClone, &copy, branch.bodies[0]);
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphAddChildGraphNode, &node, outer, nullptr, 0, branch.bodies[0]);
    // An empty body is valid; a second executable graph is refused.
    exec = executable(whole);
    CUgraphExec second;
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphInstantiate, &second, whole, 0);
    run(exec);
    WORKS(cuGraphExecDestroy, exec);
    // Host nodes are refused in a body.
    CUDA_HOST_NODE_PARAMS call = {nothing, nullptr};
    CUgraphNode called;
    WORKS(cuGraphAddHostNode, &called, branch.bodies[1], nullptr, 0, &call);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphInstantiateWithParams, &exec, whole, &how);
    HOLDS(how.result_out == CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED && how.hErrNode_out);
    WORKS(cuGraphDestroyNode, called);
    exec = executable(whole);
    WORKS(cuGraphExecDestroy, exec);
    WORKS(cuGraphDestroyNode, branch.node);
    WORKS(cuGraphDestroy, whole);
    WORKS(cuGraphDestroy, outer);

    // A kernel outside a graph that sets a condition faults, and the context is lost.
    CUgraph late = graph();
    decide<<<1, 1, 0, stream>>>(1, words, 1);
    RETURNS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize, stream);
    RETURNS(CUDA_ERROR_ILLEGAL_ADDRESS, cuGraphConditionalHandleCreate, &made, late, context, 1, 1);
}

int main() {
    CHECK(cudaFree(nullptr));
    WORKS(cuCtxGetCurrent, &context);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&words, 64));
    clear();
    loops();
    branches();
    nested();
    captured();
    updates();
    refusals();
    std::printf("PASS conditional_nodes\n");
}
