// Contents of an image, occupancy of its kernels, launches of every kind, tensor maps.
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "driver.cuh"

namespace {

const char image[] = R"(
.version 8.1
.target sm_70
.address_size 64
.extern .shared .align 8 .b8 dynamic[];
.visible .entry store(.param .u64 address, .param .u32 value)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [address];
    ld.param.u32 %r1, [value];
    red.global.add.u32 [%rd1], %r1;
    ret;
}
.visible .entry scale(.param .u64 address, .param .f32 factor)
{
    .reg .b64 %rd<2>;
    .reg .f32 %f<3>;
    ld.param.u64 %rd1, [address];
    ld.param.f32 %f1, [factor];
    mul.f32 %f2, %f1, 0f40000000;
    st.global.f32 [%rd1], %f2;
    ret;
}
// *address = the block's threads, its dynamic shared memory, the grid's blocks
.visible .entry shape(.param .u64 address)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<6>;
    ld.param.u64 %rd1, [address];
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %ntid.y;
    mov.u32 %r3, %dynamic_smem_size;
    mov.u32 %r4, %nctaid.x;
    mov.u32 %r5, %nctaid.y;
    st.global.u32 [%rd1], %r1;
    st.global.u32 [%rd1+4], %r2;
    st.global.u32 [%rd1+8], %r3;
    st.global.u32 [%rd1+12], %r4;
    st.global.u32 [%rd1+16], %r5;
    ret;
}
// *address = the first word of a block
.visible .entry first(.param .u64 address, .param .align 8 .b8 block[4088])
{ .reg .b64 %a, %w; ld.param.u64 %a,[address]; ld.param.u64 %w,[block]; st.global.u64 [%a],%w; ret; }
// *address = the last word of a large block
.visible .entry last(.param .u64 address, .param .align 8 .b8 block[32752])
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [address];
    ld.param.u64 %rd2, [block+32744];
    st.global.u64 [%rd1], %rd2;
    ret;
}
)";

const std::set<std::string> names = {"store", "scale", "shape", "first", "last"};

CUdeviceptr memory;

unsigned word(int index) {
    unsigned value = 0;
    WORKS(cuMemcpyDtoH, &value, memory + 4 * index, sizeof value);
    return value;
}

// Clears the memory before later work of any stream.
void clear() {
    WORKS(cuMemsetD32, memory, 0, 64);
    WORKS(cuCtxSynchronize);
}

// Checks an undocumented table, with which cuFFT finds the functions of a module.
void visited(CUmodule module, const std::vector<CUfunction> &expected) {
    const CUuuid id = {{0x6e, 0x16, 0x3f, static_cast<char>(0xbe), static_cast<char>(0xb9), 0x58, 0x44, 0x4d,
                        static_cast<char>(0x83), 0x5c, static_cast<char>(0xe1), static_cast<char>(0x82),
                        static_cast<char>(0xaf), static_cast<char>(0xf1), static_cast<char>(0x99), 0x1e}};
    const void *table = nullptr;
    WORKS(cuGetExportTable, &table, &id);
    CUcontext context = nullptr;
    WORKS(cuCtxGetCurrent, &context);
    using Visit = int(CUcontext, CUmodule, void (*)(void *, CUfunction), void *);
    Visit *visit = nullptr;
    std::memcpy(&visit, static_cast<const char *>(table) + 7 * sizeof visit, sizeof visit);
    std::vector<CUfunction> found;
    const auto add = [](void *to, CUfunction function) {
        static_cast<std::vector<CUfunction> *>(to)->push_back(function);
    };
    HOLDS(visit(context, module, add, &found) == static_cast<int>(expected.size()));
    HOLDS(std::set<CUfunction>(found.begin(), found.end()) == std::set<CUfunction>(expected.begin(), expected.end()));
    HOLDS(found.size() == expected.size());
}

void contents_of_images(CUmodule module, CUlibrary library) {
    unsigned count = 0;
    WORKS(cuModuleGetFunctionCount, &count, module);
    HOLDS(count == names.size());
    std::vector<CUfunction> functions(count + 1);
    WORKS(cuModuleEnumerateFunctions, functions.data(), count, module);
    HOLDS(functions[count] == nullptr);
    visited(module, std::vector<CUfunction>(functions.begin(), functions.end() - 1));
    std::set<std::string> found;
    for (unsigned index = 0; index < count; index++) {
        const char *name = nullptr;
        WORKS(cuFuncGetName, &name, functions[index]);
        found.insert(name);
        CUfunction same = nullptr;
        WORKS(cuModuleGetFunction, &same, module, name);
        HOLDS(same == functions[index]);
    }
    HOLDS(found == names);

    count = 0;
    WORKS(cuLibraryGetKernelCount, &count, library);
    HOLDS(count == names.size());
    std::vector<CUkernel> kernels(count);
    WORKS(cuLibraryEnumerateKernels, kernels.data(), 2, library);
    HOLDS(kernels[1] != nullptr && kernels[2] == nullptr);
    WORKS(cuLibraryEnumerateKernels, kernels.data(), count, library);
    found.clear();
    for (CUkernel kernel : kernels) {
        const char *name = nullptr;
        WORKS(cuKernelGetName, &name, kernel);
        found.insert(name);
        CUlibrary owner = nullptr;
        WORKS(cuKernelGetLibrary, &owner, kernel);
        HOLDS(owner == library);
    }
    HOLDS(found == names);

    void *pointer = nullptr;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuLibraryGetUnifiedFunction, &pointer, library, "store");
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuModuleGetFunctionCount, &count, nullptr);
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuLibraryGetKernelCount, &count, nullptr);
}

void fit(CUfunction function) {
    size_t available = 0;
    WORKS(cuOccupancyAvailableDynamicSMemPerBlock, &available, function, 8, 128);
    HOLDS(available > 0);
    int blocks = 0;
    WORKS(cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, function, 128, available);
    // An H200 reports that eight blocks fit with this much shared memory, and then seven.
    HOLDS(blocks >= 7);
    WORKS(cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, function, 128, available + 4096);
    HOLDS(blocks < 8);

    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = {1, 1, 1};
    CUlaunchConfig config = {};
    config.gridDimX = 64, config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = 128, config.blockDimY = config.blockDimZ = 1;
    config.attrs = &attribute, config.numAttrs = 1;
    int clusters = 0, processors = 0, greatest = 0;
    WORKS(cuDeviceGetAttribute, &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0);
    WORKS(cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, function, 128, 0);
    WORKS(cuOccupancyMaxActiveClusters, &clusters, function, &config);
    HOLDS(clusters >= processors && clusters <= blocks * processors);
    config.numAttrs = 0;
    WORKS(cuOccupancyMaxPotentialClusterSize, &greatest, function, &config);
    HOLDS(greatest >= 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuOccupancyMaxActiveClusters, &clusters, function, nullptr);
}

// Launches by the functions from before CUDA 4.
void old_launches(CUfunction store, CUfunction scale, CUfunction shape) {
    clear();
    WORKS(cuFuncSetBlockShape, store, 2, 1, 1);
    WORKS(cuParamSetv, store, 0, &memory, sizeof memory);
    WORKS(cuParamSeti, store, 8, 21);
    WORKS(cuParamSetSize, store, 12);
    WORKS(cuLaunch, store);
    HOLDS(word(0) == 42);
    WORKS(cuLaunchGrid, store, 3, 2);
    HOLDS(word(0) == 42 + 6 * 42);

    clear();
    WORKS(cuParamSetv, scale, 0, &memory, sizeof memory);
    WORKS(cuParamSetf, scale, 8, 1.5f);
    WORKS(cuParamSetSize, scale, 12);
    WORKS(cuLaunch, scale);
    const float three = 3.0f;
    unsigned bits = 0;
    std::memcpy(&bits, &three, sizeof bits);
    HOLDS(word(0) == bits);

    clear();
    CUstream stream = nullptr;
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    WORKS(cuFuncSetBlockShape, shape, 8, 4, 1);
    WORKS(cuFuncSetSharedSize, shape, 96);
    WORKS(cuParamSetv, shape, 0, &memory, sizeof memory);
    WORKS(cuParamSetSize, shape, 8);
    WORKS(cuLaunchGridAsync, shape, 5, 3, stream);
    WORKS(cuStreamSynchronize, stream);
    HOLDS(word(0) == 8 && word(1) == 4 && word(2) == 96 && word(3) == 5 && word(4) == 3);
    WORKS(cuStreamDestroy, stream);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuFuncSetBlockShape, shape, 0, 1, 1);
}

// Nearly as many parameters as there may be, by both ways of passing them.
void large_parameters(CUfunction last) {
    std::vector<unsigned long long> block(32752 / 8);
    block.back() = 0x0000000500000007ull;
    void *values[] = {&memory, block.data()};
    for (int round = 0; round < 3; round++) {
        clear();
        block.back() += 1;
        WORKS(cuLaunchKernel, last, 1, 1, 1, 1, 1, 1, 0, nullptr, values, nullptr);
        HOLDS(word(0) == 8u + round && word(1) == 5);
    }
    std::vector<unsigned long long> packed(1 + block.size());
    packed[0] = memory;
    packed.back() = 0x0000000900000001ull;
    size_t bytes = packed.size() * sizeof packed[0];
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, packed.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                     CU_LAUNCH_PARAM_END};
    WORKS(cuLaunchKernel, last, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, extra);
    HOLDS(word(0) == 1 && word(1) == 9);
}

// Parameters that the kernel does not read may be left out of a buffer.
void short_buffer(CUfunction first) {
    clear();
    unsigned long long packed[] = {memory, 0x0000000300000002ull};
    size_t bytes = sizeof packed;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
    for (int round = 0; round < 3; round++) WORKS(cuLaunchKernel, first, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, extra);
    HOLDS(word(0) == 2 && word(1) == 3);
}

void launches_with_attributes(CUfunction store) {
    clear();
    CUlaunchAttribute attributes[4] = {};
    attributes[0].id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
    attributes[0].value.priority = -1;
    attributes[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[1].value.programmaticStreamSerializationAllowed = 1;
    attributes[2].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[2].value.clusterDim = {1, 1, 1};
    attributes[3].id = CU_LAUNCH_ATTRIBUTE_IGNORE;
    CUlaunchConfig config = {};
    config.gridDimX = 4, config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = 2, config.blockDimY = config.blockDimZ = 1;
    config.attrs = attributes, config.numAttrs = 4;
    int value = 5;
    void *values[] = {&memory, &value};
    for (int round = 0; round < 3; round++) WORKS(cuLaunchKernelEx, &config, store, values, nullptr);
    attributes[2].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[2].value.cooperative = 1;
    config.gridDimX = 1;
    for (int round = 0; round < 2; round++) WORKS(cuLaunchKernelEx, &config, store, values, nullptr);
    HOLDS(word(0) == 3 * 8 * 5 + 2 * 2 * 5);

    // One cooperative launch for each device.
    CUstream stream = nullptr;
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CUDA_LAUNCH_PARAMS one = {store, 1, 1, 1, 4, 1, 1, 0, stream, values};
    clear();
    WORKS(cuCtxSynchronize);
    WORKS(cuLaunchCooperativeKernelMultiDevice, &one, 1, 0);
    WORKS(cuStreamSynchronize, stream);
    HOLDS(word(0) == 4 * 5);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuLaunchCooperativeKernelMultiDevice, nullptr, 0, 0);
    one.function = nullptr;
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuLaunchCooperativeKernelMultiDevice, &one, 1, 0);
    WORKS(cuStreamDestroy, stream);
}

// Blocks that are counted, in clusters that the kernel or the launch demands.
void launches_in_clusters() {
    const char clusters[] = R"(
.version 8.0
.target sm_90
.address_size 64
.visible .entry single(.param .u64 address)
{ .reg .b64 %a; ld.param.u64 %a,[address]; red.global.add.u32 [%a],1; ret; }
.visible .entry pairs(.param .u64 address) .explicitcluster .reqnctapercluster 2, 1, 1
{ .reg .b64 %a; ld.param.u64 %a,[address]; red.global.add.u32 [%a],1; ret; }
)";
    CUmodule module = nullptr;
    CUfunction single = nullptr, pairs = nullptr;
    WORKS(cuModuleLoadData, &module, clusters);
    WORKS(cuModuleGetFunction, &single, module, "single");
    WORKS(cuModuleGetFunction, &pairs, module, "pairs");
    const auto extent = [](CUfunction function, int axis) {
        int found = -1;
        const int attribute = CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH + axis;
        WORKS(cuFuncGetAttribute, &found, static_cast<CUfunction_attribute>(attribute), function);
        return found;
    };
    HOLDS(extent(single, 0) == 0);
    HOLDS(extent(pairs, 0) == 2 && extent(pairs, 1) == 1 && extent(pairs, 2) == 1);

    clear();
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = {4, 1, 1};
    CUlaunchConfig config = {};
    config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
    config.attrs = &attribute;
    void *values[] = {&memory};
    unsigned blocks = 0;
    for (const unsigned grid : {4, 3, 8, 6, 4}) {
        config.gridDimX = grid;
        const bool by_two = grid % 2 == 0, by_four = grid % 4 == 0;
        config.numAttrs = 0;
        RETURNS(by_two ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CLUSTER_SIZE, cuLaunchKernelEx, &config, pairs, values, nullptr);
        config.numAttrs = 1;
        RETURNS(by_four ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CLUSTER_SIZE, cuLaunchKernelEx, &config, single, values, nullptr);
        blocks += (by_two + by_four) * grid;
    }
    HOLDS(word(0) == blocks);
    int active = 0;
    config.gridDimX = 8;
    WORKS(cuOccupancyMaxActiveClusters, &active, single, &config);
    HOLDS(active >= 1);
    WORKS(cuModuleUnload, module);
}

void tensor_maps() {
    int unit = 0;
    WORKS(cuDeviceGetAttribute, &unit, CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED, 0);
    CUtensorMap map, moved;
    std::memset(&map, 0, sizeof map);
    cuuint64_t dimensions[] = {64, 64}, strides[] = {256};
    cuuint32_t tile[] = {16, 16}, steps[] = {1, 1};
    void *address = reinterpret_cast<void *>(memory);
    const auto encode = [&](CUtensorMap *to, void *from, int rank) {
        return DRIVER(cuTensorMapEncodeTiled)(
            to, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, rank, from, dimensions, strides, tile, steps,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    if (!unit) {
        HOLDS(encode(&map, address, 2) == CUDA_ERROR_NOT_SUPPORTED);
        return;
    }
    HOLDS(encode(&map, address, 2) == CUDA_SUCCESS);
    HOLDS(encode(&moved, static_cast<char *>(address) + 1024, 2) == CUDA_SUCCESS);
    HOLDS(std::memcmp(&map, &moved, sizeof map) != 0);
    WORKS(cuTensorMapReplaceAddress, &moved, address);
    HOLDS(std::memcmp(&map, &moved, sizeof map) == 0);
    HOLDS(encode(&map, address, 6) == CUDA_ERROR_INVALID_VALUE);
    HOLDS(encode(nullptr, address, 2) == CUDA_ERROR_INVALID_VALUE);
}

}  // namespace

int main() {
    WORKS(cuInit, 0);
    CUcontext context = nullptr;
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuMemAlloc, &memory, 1 << 16);
    CUmodule module = nullptr;
    CUlibrary library = nullptr;
    WORKS(cuModuleLoadData, &module, image);
    WORKS(cuLibraryLoadData, &library, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
    const auto function = [&](const char *name) {
        CUfunction found = nullptr;
        WORKS(cuModuleGetFunction, &found, module, name);
        return found;
    };
    contents_of_images(module, library);
    fit(function("shape"));
    old_launches(function("store"), function("scale"), function("shape"));
    large_parameters(function("last"));
    short_buffer(function("first"));
    launches_with_attributes(function("store"));
    launches_in_clusters();
    tensor_maps();
    WORKS(cuCtxResetPersistingL2Cache);
    std::printf("PASS kernels\n");
    return 0;
}
