// Graphs by the functions of CUDA 10 to 12, whose names have other versions now: nodes, dependencies without data,
// instantiation with a log, updates that tell a node.
#include <cstring>
#include <vector>

#include "driver.cuh"

static const char image[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 address, .param .u32 value)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [address];
    ld.param.u32 %r1, [value];
    st.global.u32 [%rd1], %r1;
    ret;
}
)";

static CUcontext context;
static CUfunction store;
static CUdeviceptr memory;
static CUstream stream;

static unsigned word(int index) {
    unsigned value = 0;
    WORKS(cuMemcpyDtoH, &value, memory + 4 * index, sizeof value);
    return value;
}

static void run(CUgraphExec executable) {
    WORKS(cuMemsetD32, memory, 0, 16);
    WORKS(cuCtxSynchronize);
    WORKS(cuGraphLaunch, executable, stream);
    WORKS(cuStreamSynchronize, stream);
}

// A kernel that stores a value in a word, described by the first version of the structure.
struct Kernel {
    CUdeviceptr address;
    unsigned value;
    void *pointers[2];
    CUDA_KERNEL_NODE_PARAMS_v1 node;

    Kernel(int index, unsigned value) : address(memory + 4 * index), value(value), pointers{&address, &this->value} {
        std::memset(&node, 0, sizeof node);
        node.func = store;
        node.gridDimX = node.gridDimY = node.gridDimZ = 1;
        node.blockDimX = node.blockDimY = node.blockDimZ = 1;
        node.kernelParams = pointers;
    }
    Kernel(const Kernel &) = delete;
};

static void nodes_and_dependencies() {
    const CUgraphNode *none = nullptr;
    CUgraph graph = nullptr;
    CUgraphNode first = nullptr, second = nullptr, third = nullptr;
    WORKS(cuGraphCreate, &graph, 0);
    Kernel one(0, 11), two(1, 12);
    GIVES(CUDA_SUCCESS, "cuGraphAddKernelNode", &first, graph, none, size_t{0}, &one.node);
    CUgraphNodeParams set = {};
    set.type = CU_GRAPH_NODE_TYPE_MEMSET;
    set.memset.dst = memory + 8;
    set.memset.value = 13;
    set.memset.elementSize = 4;
    set.memset.width = set.memset.height = 1;
    set.memset.ctx = context;
    GIVES(CUDA_SUCCESS, "cuGraphAddNode", &second, graph, static_cast<const CUgraphNode *>(&first), size_t{1}, &set);
    WORKS(cuGraphAddEmptyNode, &third, graph, nullptr, 0);

    size_t count = 0;
    CUgraphNode from[4] = {}, to[4] = {};
    GIVES(CUDA_SUCCESS, "cuGraphAddDependencies", graph, &first, &third, size_t{1});
    GIVES(CUDA_SUCCESS, "cuGraphGetEdges", graph, nullptr, nullptr, &count);
    HOLDS(count == 2);
    GIVES(CUDA_SUCCESS, "cuGraphGetEdges", graph, from, to, &count);
    HOLDS(count == 2 && from[0] == first && from[1] == first && to[0] != to[1]);
    count = 4;
    GIVES(CUDA_SUCCESS, "cuGraphNodeGetDependencies", third, from + 1, &count);
    HOLDS(count == 1 && from[1] == first);
    count = 0;
    GIVES(CUDA_SUCCESS, "cuGraphNodeGetDependentNodes", first, nullptr, &count);
    HOLDS(count == 2);
    GIVES(CUDA_SUCCESS, "cuGraphNodeGetDependentNodes", first, to, &count);
    HOLDS((to[0] == second && to[1] == third) || (to[0] == third && to[1] == second));
    GIVES(CUDA_SUCCESS, "cuGraphRemoveDependencies", graph, &first, &third, size_t{1});
    GIVES(CUDA_SUCCESS, "cuGraphNodeGetDependencies", third, nullptr, &count);
    HOLDS(count == 0);

    CUDA_KERNEL_NODE_PARAMS_v1 reported;
    std::memset(&reported, 0, sizeof reported);
    GIVES(CUDA_SUCCESS, "cuGraphKernelNodeGetParams", first, &reported);
    HOLDS(reported.func == store && reported.gridDimX == 1 && *static_cast<unsigned *>(reported.kernelParams[1]) == 11);
    GIVES(CUDA_SUCCESS, "cuGraphKernelNodeSetParams", first, &two.node);
    GIVES(CUDA_SUCCESS, "cuGraphKernelNodeGetParams", first, &reported);
    HOLDS(*static_cast<unsigned *>(reported.kernelParams[1]) == 12);

    for (const char *name : {"cuGraphInstantiate", "cuGraphInstantiate_v2"}) {
        CUgraphExec executable = nullptr;
        CUgraphNode wrong = nullptr;
        char log[64] = "before";
        GIVES(CUDA_SUCCESS, name, &executable, graph, &wrong, static_cast<char *>(log), sizeof log);
        HOLDS(executable != nullptr);
        run(executable);
        HOLDS(word(0) == 0 && word(1) == 12 && word(2) == 13);

        // Another graph of the same shape, and one of another.
        CUgraph other = nullptr;
        CUgraphExecUpdateResult result = CU_GRAPH_EXEC_UPDATE_ERROR;
        WORKS(cuGraphClone, &other, graph);
        CUgraphNode its = nullptr;
        WORKS(cuGraphNodeFindInClone, &its, first, other);
        GIVES(CUDA_SUCCESS, "cuGraphKernelNodeSetParams", its, &one.node);
        GIVES(CUDA_SUCCESS, "cuGraphExecUpdate", executable, other, &wrong, &result);
        HOLDS(result == CU_GRAPH_EXEC_UPDATE_SUCCESS);
        run(executable);
        HOLDS(word(0) == 11 && word(1) == 0 && word(2) == 13);
        WORKS(cuGraphAddEmptyNode, &its, other, nullptr, 0);
        GIVES(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "cuGraphExecUpdate", executable, other, &wrong, &result);
        HOLDS(result != CU_GRAPH_EXEC_UPDATE_SUCCESS);
        WORKS(cuGraphDestroy, other);
        WORKS(cuGraphExecDestroy, executable);
    }
    WORKS(cuGraphDestroy, graph);
}

static void operations_and_events() {
    CUgraph graph = nullptr;
    CUgraphNode write = nullptr, wait = nullptr;
    CUevent done = nullptr, held = nullptr;
    CUstream behind = nullptr;
    WORKS(cuGraphCreate, &graph, 0);
    WORKS(cuEventCreate, &done, CU_EVENT_DISABLE_TIMING);
    WORKS(cuEventCreate, &held, CU_EVENT_DISABLE_TIMING);
    WORKS(cuStreamCreate, &behind, CU_STREAM_NON_BLOCKING);
    CUstreamBatchMemOpParams store_one = {};
    store_one.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    store_one.writeValue.address = memory;
    store_one.writeValue.value = 21;
    CUDA_BATCH_MEM_OP_NODE_PARAMS operations = {context, 1, &store_one, 0};
    WORKS(cuGraphAddBatchMemOpNode, &write, graph, nullptr, 0, &operations);
    WORKS(cuGraphAddEventWaitNode, &wait, graph, nullptr, 0, held);
    store_one.writeValue.value = 22;
    WORKS(cuGraphBatchMemOpNodeSetParams, write, &operations);

    // The first event would wait for work that is held back; the node then gets another event.
    WORKS(cuMemsetD32, memory + 32, 0, 1);
    WORKS(cuCtxSynchronize);
    WORKS(cuStreamWaitValue32, behind, memory + 32, 1, CU_STREAM_WAIT_VALUE_EQ);
    WORKS(cuEventRecord, held, behind);
    WORKS(cuEventRecord, done, stream);
    CUgraphExec executable = nullptr;
    WORKS(cuGraphInstantiate, &executable, graph, 0);
    WORKS(cuGraphExecEventWaitNodeSetEvent, executable, wait, done);
    WORKS(cuGraphLaunch, executable, stream);
    WORKS(cuStreamSynchronize, stream);
    WORKS(cuStreamWriteValue32, stream, memory + 32, 1, 0);
    WORKS(cuStreamSynchronize, behind);
    HOLDS(word(0) == 22);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGraphExecEventWaitNodeSetEvent, executable, write, done);
    WORKS(cuGraphExecDestroy, executable);
    WORKS(cuGraphDestroy, graph);
}

int main() {
    WORKS(cuInit, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    WORKS(cuMemAlloc, &memory, 4096);
    CUmodule module = nullptr;
    WORKS(cuModuleLoadData, &module, image);
    WORKS(cuModuleGetFunction, &store, module, "store");
    nodes_and_dependencies();
    operations_and_events();
    std::printf("PASS graph_versions\n");
    return 0;
}
