// The driver API's graphs, function by function: setting, reading and executing nodes, in graphs and in executable
// graphs; dependencies; memory and user objects of graphs.
#include <atomic>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "driver.cuh"


static const char *const PTX = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 address, .param .u32 value)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [address];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}
.visible .entry fall()
{
    trap;
    ret;
}
)";

static CUcontext context;
static CUfunction store;
static CUdeviceptr memory;
static CUstream stream;

static unsigned word(CUdeviceptr address) {
    unsigned value;
    WORKS(cuMemcpyDtoH, &value, address, sizeof value);
    return value;
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

static void run_once(CUgraph graph) {
    CUgraphExec made = executable(graph);
    run(made);
    WORKS(cuGraphExecDestroy, made);
}

struct Parameters {
    CUdeviceptr address;
    unsigned value;
    void *pointers[2];
    CUDA_KERNEL_NODE_PARAMS node;

    Parameters(CUdeviceptr address, unsigned value) : address(address), value(value) {
        std::memset(&node, 0, sizeof node);
        node.func = store;
        node.gridDimX = node.gridDimY = node.gridDimZ = 1;
        node.blockDimX = node.blockDimY = node.blockDimZ = 1;
        pointers[0] = &this->address;
        pointers[1] = &this->value;
        node.kernelParams = pointers;
    }
    Parameters(const Parameters &) = delete;
};

static void kernels() {
    CUgraph graph;
    CUgraphNode node;
    WORKS(cuGraphCreate, &graph, 0);
    RETURNS(1, cuGraphCreate, &graph, 1);
    Parameters first(memory, 3), second(memory + 4, 4);
    WORKS(cuGraphAddKernelNode, &node, graph, nullptr, 0, &first.node);
    CUgraphExec made = executable(graph);
    run(made);
    HOLDS(word(memory) == 3);
    // Sets parameters of the graph's node, and then of the executable graph's.
    WORKS(cuGraphKernelNodeSetParams, node, &second.node);
    CUDA_KERNEL_NODE_PARAMS reported;
    WORKS(cuGraphKernelNodeGetParams, node, &reported);
    HOLDS(reported.func == store && !reported.extra && reported.ctx == context && reported.kernelParams != second.pointers);
    HOLDS(*static_cast<unsigned *>(reported.kernelParams[1]) == 4);
    run(made);
    HOLDS(word(memory) == 3 && word(memory + 4) == 0);
    WORKS(cuGraphExecKernelNodeSetParams, made, node, &second.node);
    run(made);
    HOLDS(word(memory + 4) == 4);
    second.node.gridDimX = 0;
    RETURNS(1, cuGraphExecKernelNodeSetParams, made, node, &second.node);
    RETURNS(1, cuGraphKernelNodeSetParams, node, &second.node);
    // Parameters that the program has packed itself.
    struct {
        CUdeviceptr address;
        unsigned value;
    } packed = {memory + 8, 5};
    size_t bytes = 12;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
    Parameters third(0, 0);
    third.node.kernelParams = nullptr;
    third.node.extra = extra;
    WORKS(cuGraphExecKernelNodeSetParams, made, node, &third.node);
    run(made);
    HOLDS(word(memory + 8) == 5);

    CUlaunchAttributeValue value, copied;
    std::memset(&value, 0, sizeof value);
    WORKS(cuGraphKernelNodeGetAttribute, node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &copied);
    HOLDS(copied.priority == 0);
    value.priority = -1;
    WORKS(cuGraphKernelNodeSetAttribute, node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value);
    CUgraphNode other;
    WORKS(cuGraphAddKernelNode, &other, graph, &node, 1, &first.node);
    WORKS(cuGraphKernelNodeCopyAttributes, other, node);
    WORKS(cuGraphKernelNodeGetAttribute, other, CU_LAUNCH_ATTRIBUTE_PRIORITY, &copied);
    HOLDS(copied.priority == -1);
    RETURNS(1, cuGraphKernelNodeGetAttribute, node, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &copied);
    // Nodes of other kinds.
    CUgraphNode empty;
    WORKS(cuGraphAddEmptyNode, &empty, graph, nullptr, 0);
    RETURNS(1, cuGraphKernelNodeGetParams, empty, &reported);
    RETURNS(1, cuGraphKernelNodeSetParams, empty, &first.node);
    RETURNS(1, cuGraphExecKernelNodeSetParams, made, empty, &first.node);
    WORKS(cuGraphExecDestroy, made);
    WORKS(cuGraphDestroy, graph);
}

static std::atomic<int> called{0};
static void CUDA_CB by_one(void *) { called += 1; }
static void CUDA_CB by_ten(void *) { called += 10; }

static void copies_fills_functions() {
    unsigned source[16], target[16] = {};
    for (unsigned i = 0; i < 16; i++) source[i] = i;
    CUgraph graph;
    CUgraphNode fill, row, up, down, line, call;
    WORKS(cuGraphCreate, &graph, 0);
    CUDA_MEMSET_NODE_PARAMS set = {memory, 64, 7, 4, 4, 4}, got;
    WORKS(cuGraphAddMemsetNode, &fill, graph, nullptr, 0, &set, context);
    CUDA_MEMSET_NODE_PARAMS wrong = set, one = {memory + 512, 0, 9, 4, 4, 1};
    wrong.elementSize = 3;
    RETURNS(1, cuGraphAddMemsetNode, &call, graph, nullptr, 0, &wrong, context);
    RETURNS(1, cuGraphMemsetNodeSetParams, fill, &wrong);
    WORKS(cuGraphAddMemsetNode, &row, graph, nullptr, 0, &one, context);
    // Two rows of eight words into memory whose rows are 64 bytes apart, and back.
    CUDA_MEMCPY3D copy;
    std::memset(&copy, 0, sizeof copy);
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = source;
    copy.srcPitch = 32;
    copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.dstDevice = memory + 256;
    copy.dstPitch = 64;
    copy.WidthInBytes = 32;
    copy.Height = 2;
    copy.Depth = 1;
    WORKS(cuGraphAddMemcpyNode, &up, graph, &fill, 1, &copy, context);
    CUDA_MEMCPY3D back = copy, bytes;
    back.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    back.srcDevice = memory + 256;
    back.srcPitch = 64;
    back.dstMemoryType = CU_MEMORYTYPE_HOST;
    back.dstHost = target;
    back.dstPitch = 32;
    WORKS(cuGraphAddMemcpyNode, &down, graph, &up, 1, &back, context);
    // One row of device memory to another place.
    std::memset(&bytes, 0, sizeof bytes);
    bytes.srcMemoryType = bytes.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    bytes.srcDevice = memory + 256;
    bytes.dstDevice = memory + 1024;
    bytes.WidthInBytes = 8;
    bytes.Height = bytes.Depth = 1;
    WORKS(cuGraphAddMemcpyNode, &line, graph, &up, 1, &bytes, context);
    CUDA_HOST_NODE_PARAMS function = {by_one, nullptr}, known;
    WORKS(cuGraphAddHostNode, &call, graph, &down, 1, &function);
    CUgraphExec made = executable(graph);
    run(made);
    HOLDS(word(memory) == 7 && word(memory + 3 * 64 + 12) == 7 && word(memory + 16) == 0);
    HOLDS(word(memory + 256) == 0 && word(memory + 256 + 64) == 8 && called == 1);
    HOLDS(word(memory + 512) == 9 && word(memory + 1028) == 1);
    HOLDS(std::memcmp(source, target, sizeof source) == 0);

    WORKS(cuGraphMemsetNodeGetParams, fill, &got);
    HOLDS(got.dst == memory && got.value == 7 && got.pitch == 64);
    CUDA_MEMCPY3D reported;
    WORKS(cuGraphMemcpyNodeGetParams, up, &reported);
    HOLDS(reported.srcHost == source && reported.dstDevice == memory + 256 && reported.Height == 2);
    WORKS(cuGraphHostNodeGetParams, call, &known);
    HOLDS(known.fn == by_one);

    // Sets another value, another address and another function in the executable graph; the graph stays unchanged.
    set.value = 8;
    WORKS(cuGraphExecMemsetNodeSetParams, made, fill, &set, context);
    one.dst = memory + 640;
    WORKS(cuGraphExecMemsetNodeSetParams, made, row, &one, context);
    bytes.dstDevice = memory + 2048;
    WORKS(cuGraphExecMemcpyNodeSetParams, made, line, &bytes, context);
    function.fn = by_ten;
    WORKS(cuGraphExecHostNodeSetParams, made, call, &function);
    for (unsigned &value : source) value += 100;
    run(made);
    HOLDS(word(memory) == 8 && called == 11 && target[0] == 100 && target[8] == 108);
    HOLDS(word(memory + 640) == 9 && word(memory + 2052) == 101 && word(memory + 1028) == 1);
    run_once(graph);
    HOLDS(word(memory) == 7 && called == 12 && word(memory + 1028) == 101);
    // Refused changes: other shapes, other copies of several rows, other kinds of memory.
    CUDA_MEMSET_NODE_PARAMS wider = set;
    wider.width = 5;
    RETURNS(1, cuGraphExecMemsetNodeSetParams, made, fill, &wider, context);
    RETURNS(1, cuGraphExecMemsetNodeSetParams, made, row, &set, context);
    WORKS(cuGraphExecMemcpyNodeSetParams, made, up, &copy, context);
    CUDA_MEMCPY3D other = copy;
    other.dstDevice += 128;
    RETURNS(1, cuGraphExecMemcpyNodeSetParams, made, up, &other, context);
    other = copy;
    other.Height = 1;
    RETURNS(1, cuGraphExecMemcpyNodeSetParams, made, up, &other, context);
    other = bytes;
    other.srcMemoryType = CU_MEMORYTYPE_HOST;
    other.srcHost = source;
    RETURNS(1, cuGraphExecMemcpyNodeSetParams, made, line, &other, context);
    RETURNS(1, cuGraphExecMemcpyNodeSetParams, made, fill, &bytes, context);
    // And then the graph too.
    copy.Height = 1;
    WORKS(cuGraphMemsetNodeSetParams, fill, &set);
    WORKS(cuGraphMemcpyNodeSetParams, up, &copy);
    WORKS(cuGraphHostNodeSetParams, call, &function);
    for (unsigned &value : source) value += 100;
    run_once(graph);
    HOLDS(word(memory) == 8 && called == 22 && target[0] == 200 && target[8] == 108);

    // Disabled nodes, also a copy to pageable memory.
    std::memset(target, 0, sizeof target);
    WORKS(cuGraphNodeSetEnabled, made, down, 0);
    run(made);
    HOLDS(target[0] == 0 && called == 32);
    RETURNS(1, cuGraphNodeSetEnabled, made, call, 0);
    WORKS(cuGraphExecDestroy, made);
    WORKS(cuGraphDestroy, graph);
}

static void events_and_words() {
    CUgraph graph;
    CUgraphNode record, wait, words;
    CUevent one, other, event;
    WORKS(cuEventCreate, &one, 0);
    WORKS(cuEventCreate, &other, 0);
    WORKS(cuGraphCreate, &graph, 0);
    WORKS(cuGraphAddEventWaitNode, &wait, graph, nullptr, 0, one);
    CUstreamBatchMemOpParams operations[2];
    std::memset(operations, 0, sizeof operations);
    for (int i = 0; i < 2; i++) {
        operations[i].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        operations[i].writeValue.address = memory + 4 * i;
        operations[i].writeValue.value = 21 + i;
    }
    CUDA_BATCH_MEM_OP_NODE_PARAMS batch = {context, 2, operations, 0}, known;
    WORKS(cuGraphAddBatchMemOpNode, &words, graph, &wait, 1, &batch);
    WORKS(cuGraphAddEventRecordNode, &record, graph, &words, 1, other);
    WORKS(cuGraphEventWaitNodeGetEvent, wait, &event);
    HOLDS(event == one);
    WORKS(cuGraphEventRecordNodeGetEvent, record, &event);
    HOLDS(event == other);
    CUgraphExec made = executable(graph);
    WORKS(cuEventRecord, one, nullptr);
    run(made);
    HOLDS(word(memory) == 21 && word(memory + 4) == 22);
    WORKS(cuEventQuery, other);
    float milliseconds;
    WORKS(cuEventElapsedTime, &milliseconds, one, other);
    WORKS(cuGraphBatchMemOpNodeGetParams, words, &known);
    HOLDS(known.count == 2 && known.paramArray[1].writeValue.value == 22);
    operations[0].writeValue.value = 31;
    WORKS(cuGraphExecBatchMemOpNodeSetParams, made, words, &batch);
    run(made);
    HOLDS(word(memory) == 31);
    WORKS(cuGraphBatchMemOpNodeSetParams, words, &batch);
    // The other way round: records the event that was waited for.
    CUevent third;
    WORKS(cuEventCreate, &third, 0);
    WORKS(cuGraphExecEventRecordNodeSetEvent, made, record, third);
    WORKS(cuGraphExecEventWaitNodeSetEvent, made, wait, other);
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime, &milliseconds, one, third);
    run(made);
    WORKS(cuEventElapsedTime, &milliseconds, one, third);
    WORKS(cuGraphEventRecordNodeSetEvent, record, third);
    WORKS(cuGraphEventWaitNodeSetEvent, wait, other);
    WORKS(cuGraphEventRecordNodeGetEvent, record, &event);
    HOLDS(event == third);
    WORKS(cuGraphEventWaitNodeGetEvent, wait, &event);
    HOLDS(event == other);
    WORKS(cuGraphExecDestroy, made);
    WORKS(cuGraphDestroy, graph);
    for (CUevent gone : {one, other, third}) WORKS(cuEventDestroy, gone);
}

static void dependencies() {
    CUgraph graph, clone, foreign;
    CUgraphNode nodes[4], found;
    WORKS(cuGraphCreate, &graph, 0);
    for (CUgraphNode &node : nodes) WORKS(cuGraphAddEmptyNode, &node, graph, nullptr, 0);
    const CUgraphNode from[] = {nodes[0], nodes[0], nodes[1]}, to[] = {nodes[1], nodes[2], nodes[3]};
    WORKS(cuGraphAddDependencies, graph, from, to, nullptr, 3);
    RETURNS(1, cuGraphAddDependencies, graph, from, to, nullptr, 1);
    RETURNS(1, cuGraphAddDependencies, graph, from, from, nullptr, 1);
    CUgraphNode twice[] = {nodes[0], nodes[0]};
    RETURNS(1, cuGraphAddEmptyNode, &found, graph, twice, 2);
    size_t count = 0;
    WORKS(cuGraphGetEdges, graph, nullptr, nullptr, nullptr, &count);
    HOLDS(count == 3);
    CUgraphNode first[5], second[5];
    CUgraphEdgeData data[5];
    count = 5;
    WORKS(cuGraphGetEdges, graph, first, second, data, &count);
    HOLDS(count == 3 && first[0] == nodes[0] && second[2] == nodes[3] && first[3] == nullptr);
    count = 1;
    WORKS(cuGraphGetRootNodes, graph, first, &count);
    WORKS(cuGraphGetRootNodes, graph, nullptr, &count);
    HOLDS(count == 1 && first[0] == nodes[0]);
    WORKS(cuGraphNodeGetDependentNodes, nodes[0], nullptr, nullptr, &count);
    HOLDS(count == 2);
    WORKS(cuGraphNodeGetDependentNodes, nodes[0], first, data, &count);
    HOLDS(first[0] == nodes[1] && first[1] == nodes[2]);
    WORKS(cuGraphNodeGetDependencies, nodes[3], first, data, &(count = 1));
    HOLDS(count == 1 && first[0] == nodes[1]);
    WORKS(cuGraphClone, &clone, graph);
    WORKS(cuGraphNodeFindInClone, &found, nodes[3], clone);
    HOLDS(found != nodes[3]);
    RETURNS(1, cuGraphNodeFindInClone, &found, found, graph);
    RETURNS(1, cuGraphAddDependencies, graph, nodes, &found, nullptr, 1);
    WORKS(cuGraphRemoveDependencies, graph, from, to, nullptr, 1);
    RETURNS(1, cuGraphRemoveDependencies, graph, from, to, nullptr, 1);
    WORKS(cuGraphGetEdges, graph, nullptr, nullptr, nullptr, &count);
    HOLDS(count == 2);
    WORKS(cuGraphDestroyNode, nodes[1]);
    WORKS(cuGraphGetEdges, graph, nullptr, nullptr, nullptr, &count);
    HOLDS(count == 1);
    count = 4;
    WORKS(cuGraphGetNodes, graph, first, &count);
    HOLDS(count == 3 && first[1] == nodes[2]);
    WORKS(cuGraphGetNodes, clone, nullptr, &count);
    HOLDS(count == 4);

    // A child graph is a copy, which is destroyed with its node.
    CUgraphNode child, kernel;
    CUgraph inner;
    Parameters parameters(memory, 40), others(memory, 41);
    WORKS(cuGraphCreate, &foreign, 0);
    WORKS(cuGraphAddKernelNode, &kernel, foreign, nullptr, 0, &parameters.node);
    WORKS(cuGraphAddChildGraphNode, &child, graph, nodes, 1, foreign);
    WORKS(cuGraphChildGraphNodeGetGraph, child, &inner);
    HOLDS(inner != foreign);
    RETURNS(1, cuGraphDestroy, inner);
    CUgraphExec made = executable(graph);
    run(made);
    HOLDS(word(memory) == 40);
    WORKS(cuGraphKernelNodeSetParams, kernel, &others.node);
    WORKS(cuGraphExecChildGraphNodeSetParams, made, child, foreign);
    run(made);
    HOLDS(word(memory) == 41);
    run_once(graph);
    HOLDS(word(memory) == 40);
    CUgraphNode inside;
    WORKS(cuGraphGetNodes, inner, &inside, &(count = 1));
    WORKS(cuGraphExecKernelNodeSetParams, made, inside, &parameters.node);
    run(made);
    HOLDS(word(memory) == 40);
    WORKS(cuGraphDestroyNode, child);

    // The reported cause of a failed instantiation.
    const CUgraphNode cycle[] = {nodes[0], nodes[2]}, cycled[] = {nodes[3], nodes[0]};
    WORKS(cuGraphAddDependencies, graph, cycle + 1, cycled + 1, nullptr, 1);
    CUDA_GRAPH_INSTANTIATE_PARAMS how = {};
    CUgraphExec never;
    RETURNS(1, cuGraphInstantiateWithParams, &never, graph, &how);
    HOLDS(how.result_out == CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE && how.hErrNode_out != nullptr);
    RETURNS(1, cuGraphInstantiate, &never, clone, 0x10);
    how.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD | CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    how.hUploadStream = stream;
    WORKS(cuGraphInstantiateWithParams, &never, clone, &how);
    HOLDS(how.result_out == CUDA_GRAPH_INSTANTIATE_SUCCESS);
    cuuint64_t flags = 77;
    WORKS(cuGraphExecGetFlags, never, &flags);
    HOLDS(flags == CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    WORKS(cuGraphUpload, never, stream);
    CUgraphExecUpdateResultInfo info;
    WORKS(cuGraphExecUpdate, never, clone, &info);
    HOLDS(info.result == CU_GRAPH_EXEC_UPDATE_SUCCESS);
    RETURNS(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, cuGraphExecUpdate, never, foreign, &info);
    HOLDS(info.result != CU_GRAPH_EXEC_UPDATE_SUCCESS);
    WORKS(cuGraphExecDestroy, never);
    WORKS(cuGraphExecDestroy, made);
    for (CUgraph gone : {graph, clone, foreign}) WORKS(cuGraphDestroy, gone);
}

static cuuint64_t used(CUgraphMem_attribute attribute) {
    cuuint64_t bytes = ~0ull;
    WORKS(cuDeviceGetGraphMemAttribute, 0, attribute, &bytes);
    return bytes;
}

// Makes a graph whose first node allocates memory, with its address in `wanted`, and whose second node fills it.
static CUgraph allocating(CUDA_MEM_ALLOC_NODE_PARAMS &wanted, CUgraphNode &allocation, CUgraphNode &fill) {
    CUgraph graph;
    WORKS(cuGraphCreate, &graph, 0);
    std::memset(&wanted, 0, sizeof wanted);
    wanted.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.bytesize = 4096;
    WORKS(cuGraphAddMemAllocNode, &allocation, graph, nullptr, 0, &wanted);
    HOLDS(wanted.dptr != 0);
    CUDA_MEMSET_NODE_PARAMS set = {wanted.dptr, 0, 0x1234, 4, 1024, 1};
    WORKS(cuGraphAddMemsetNode, &fill, graph, &allocation, 1, &set, context);
    return graph;
}

static void memory_of_graphs() {
    CUgraphNode allocation, fill, release;
    CUDA_MEM_ALLOC_NODE_PARAMS wanted, reported;
    CUgraph graph = allocating(wanted, allocation, fill);
    CUgraphExec never;
    WORKS(cuGraphMemAllocNodeGetParams, allocation, &reported);
    HOLDS(reported.dptr == wanted.dptr && reported.bytesize == 4096);
    CUgraphExec made = executable(graph);
    run(made);
    // The memory stays allocated until the program frees it; before that the graph cannot run again.
    HOLDS(word(wanted.dptr + 4092) == 0x1234 && used(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) >= 4096);
    RETURNS(1, cuGraphLaunch, made, stream);
    WORKS(cuMemFreeAsync, wanted.dptr, stream);
    run(made);
    WORKS(cuMemFree, wanted.dptr);
    RETURNS(1, cuMemFree, wanted.dptr);
    CUgraph clone;
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphClone, &clone, graph);
    WORKS(cuGraphExecDestroy, made);
    // Memory of a graph that was made executable is freed by other graphs, or by none.
    RETURNS(1, cuGraphAddMemFreeNode, &release, graph, &fill, 1, wanted.dptr);
    made = executable(graph);
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphInstantiate, &never, graph, 0);
    CUgraph other;
    WORKS(cuGraphCreate, &other, 0);
    WORKS(cuGraphAddMemFreeNode, &release, other, nullptr, 0, wanted.dptr);
    RETURNS(1, cuGraphAddMemFreeNode, &release, other, nullptr, 0, wanted.dptr);
    WORKS(cuGraphExecDestroy, made);
    WORKS(cuGraphDestroy, other);
    WORKS(cuGraphDestroy, graph);

    // Memory that the graph itself frees cannot be freed after it has run.
    graph = allocating(wanted, allocation, fill);
    WORKS(cuGraphAddMemFreeNode, &release, graph, &fill, 1, wanted.dptr);
    RETURNS(1, cuGraphAddMemFreeNode, &release, graph, &fill, 1, memory);
    CUdeviceptr address;
    WORKS(cuGraphMemFreeNodeGetParams, release, &address);
    HOLDS(address == wanted.dptr);
    RETURNS(1, cuGraphAddMemFreeNode, &release, graph, &fill, 1, wanted.dptr);
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphDestroyNode, fill);
    made = executable(graph);
    CUgraphExec second;
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphInstantiate, &second, graph, 0);
    RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuGraphDestroyNode, release);
    run(made);
    run(made);
    WORKS(cuGraphExecDestroy, made);
    WORKS(cuGraphDestroy, graph);
    RETURNS(1, cuMemcpyDtoH, &reported, wanted.dptr, 4);
    WORKS(cuDeviceGraphMemTrim, 0);
    HOLDS(used(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) == 0);
    cuuint64_t zero = 0;
    WORKS(cuDeviceSetGraphMemAttribute, 0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &zero);
    HOLDS(used(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) == 0);
    RETURNS(1, cuDeviceSetGraphMemAttribute, 0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &zero);
}

static int destroyed = 0;
static void CUDA_CB destroy_object(void *data) { destroyed += *static_cast<int *>(data); }

static void objects_and_text() {
    int amount = 1;
    CUuserObject object;
    CUgraph graph, clone;
    WORKS(cuGraphCreate, &graph, 0);
    RETURNS(1, cuUserObjectCreate, &object, &amount, destroy_object, 1, 0);
    WORKS(cuUserObjectCreate, &object, &amount, destroy_object, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
    WORKS(cuUserObjectRetain, object, 2);
    WORKS(cuUserObjectRelease, object, 2);
    WORKS(cuGraphRetainUserObject, graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
    WORKS(cuGraphRetainUserObject, graph, object, 2, 0);
    WORKS(cuGraphReleaseUserObject, graph, object, 2);
    CUgraphNode node;
    Parameters parameters(memory, 1);
    WORKS(cuGraphAddKernelNode, &node, graph, nullptr, 0, &parameters.node);
    WORKS(cuGraphClone, &clone, graph);
    const char *path = "/tmp/wormhole-graph.dot";
    WORKS(cuGraphDebugDotPrint, graph, path, 0);
    std::ifstream file(path);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    HOLDS(text.find("digraph") == 0 && text.find("store") != std::string::npos);
    std::remove(path);
    WORKS(cuGraphDestroy, graph);
    HOLDS(destroyed == 0);
    WORKS(cuGraphDestroy, clone);
    HOLDS(destroyed == 1);
}

// Nodes of any kind by one function.
static void general() {
    CUgraph graph;
    CUgraphNode fill, kernel;
    WORKS(cuGraphCreate, &graph, 0);
    CUgraphNodeParams wanted;
    std::memset(&wanted, 0, sizeof wanted);
    wanted.type = CU_GRAPH_NODE_TYPE_MEMSET;
    wanted.memset.dst = memory;
    wanted.memset.value = 50;
    wanted.memset.elementSize = 4;
    wanted.memset.width = 2;
    wanted.memset.height = 1;
    wanted.memset.ctx = context;
    WORKS(cuGraphAddNode, &fill, graph, nullptr, nullptr, 0, &wanted);
    Parameters parameters(memory, 51);
    CUgraphNodeParams launch;
    std::memset(&launch, 0, sizeof launch);
    launch.type = CU_GRAPH_NODE_TYPE_KERNEL;
    std::memcpy(&launch.kernel, &parameters.node, sizeof parameters.node);
    WORKS(cuGraphAddNode, &kernel, graph, &fill, nullptr, 1, &launch);
    CUgraphExec made = executable(graph);
    run(made);
    HOLDS(word(memory) == 51 && word(memory + 4) == 50);
    wanted.memset.value = 60;
    WORKS(cuGraphExecNodeSetParams, made, fill, &wanted);
    run(made);
    HOLDS(word(memory) == 51 && word(memory + 4) == 60);
    run_once(graph);
    HOLDS(word(memory + 4) == 50);
    WORKS(cuGraphNodeSetParams, fill, &wanted);
    run_once(graph);
    HOLDS(word(memory + 4) == 60);
    RETURNS(1, cuGraphNodeSetParams, kernel, &wanted);
    CUgraphNodeType type;
    WORKS(cuGraphNodeGetType, kernel, &type);
    HOLDS(type == CU_GRAPH_NODE_TYPE_KERNEL);
    launch.reserved2 = 1;
    RETURNS(1, cuGraphAddNode, &kernel, graph, nullptr, nullptr, 0, &launch);
    // A programmatic dependency is a dependency too, and is reported with its type.
    launch.reserved2 = 0;
    CUgraphEdgeData early = {};
    early.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    early.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    CUgraphNode last;
    RETURNS(1, cuGraphAddNode, &last, graph, &fill, &early, 1, &launch);
    WORKS(cuGraphAddNode, &last, graph, &kernel, &early, 1, &launch);
    size_t count = 1;
    CUgraphNode before;
    CUgraphEdgeData reported;
    WORKS(cuGraphNodeGetDependencies, last, &before, &reported, &count);
    HOLDS(before == kernel && reported.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC);
    RETURNS(CUDA_ERROR_LOSSY_QUERY, cuGraphNodeGetDependencies, last, &before, nullptr, &count);
    // A graph that is moved into a node is destroyed with it, and cannot be moved into a second node.
    CUgraph outer, moved;
    CUgraphNode child;
    CUgraphNodeParams move;
    WORKS(cuGraphCreate, &outer, 0);
    std::memset(&move, 0, sizeof move);
    move.type = CU_GRAPH_NODE_TYPE_GRAPH;
    move.graph.graph = graph;
    move.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    WORKS(cuGraphAddNode, &child, outer, nullptr, nullptr, 0, &move);
    WORKS(cuGraphChildGraphNodeGetGraph, child, &moved);
    HOLDS(moved == graph);
    RETURNS(1, cuGraphAddNode, &child, outer, nullptr, nullptr, 0, &move);
    RETURNS(1, cuGraphDestroy, graph);
    WORKS(cuMemsetD8, memory, 0, 16);
    WORKS(cuCtxSynchronize);
    run_once(outer);
    HOLDS(word(memory) == 51 && word(memory + 4) == 60);
    WORKS(cuGraphExecDestroy, made);
    WORKS(cuGraphDestroy, outer);
}

// A fault ends the graph and the context, and no function behind it is called.
static void fault(CUfunction fall) {
    CUgraph graph;
    CUgraphNode node, call;
    CUDA_KERNEL_NODE_PARAMS launch;
    std::memset(&launch, 0, sizeof launch);
    launch.func = fall;
    launch.gridDimX = launch.gridDimY = launch.gridDimZ = 1;
    launch.blockDimX = launch.blockDimY = launch.blockDimZ = 1;
    CUDA_HOST_NODE_PARAMS function = {by_one, nullptr};
    called = 0;
    WORKS(cuGraphCreate, &graph, 0);
    WORKS(cuGraphAddKernelNode, &node, graph, nullptr, 0, &launch);
    WORKS(cuGraphAddHostNode, &call, graph, &node, 1, &function);
    CUgraphExec made = executable(graph);
    WORKS(cuGraphLaunch, made, stream);
    const int error = DRIVER(cuStreamSynchronize)(stream);
    HOLDS(error != CUDA_SUCCESS && called == 0);
    RETURNS(error, cuGraphLaunch, made, stream);
}

int main() {
    CUdevice device;
    CUmodule module;
    WORKS(cuInit, 0);
    WORKS(cuDeviceGet, &device, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, device);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuModuleLoadData, &module, PTX);
    WORKS(cuModuleGetFunction, &store, module, "store");
    WORKS(cuMemAlloc, &memory, 4096);
    WORKS(cuMemsetD8, memory, 0, 4096);
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    WORKS(cuCtxSynchronize);
    kernels();
    WORKS(cuMemsetD8, memory, 0, 4096);
    WORKS(cuCtxSynchronize);
    copies_fills_functions();
    events_and_words();
    dependencies();
    memory_of_graphs();
    objects_and_text();
    general();
    CUfunction fall;
    WORKS(cuModuleGetFunction, &fall, module, "fall");
    fault(fall);
    std::printf("PASS graph_nodes\n");
    return 0;
}
