// Code from files, from memory with options, from fat binaries and through the linker; attributes of functions, the
// launch configurations that fit them, and tensor maps.
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include <elf.h>
#include <unistd.h>

#include "driver.cuh"

static const char image[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 plain = 5;
.visible .global .attribute(.managed) .align 8 .u64 shared = 6;
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

// A kernel in the fat binary of this program.
extern "C" __global__ void from_the_program(unsigned *to) { *to = 31; }

static CUdeviceptr memory;

static unsigned word() {
    unsigned value = 0;
    WORKS(cuMemcpyDtoH, &value, memory, sizeof value);
    WORKS(cuMemsetD32, memory, 0, 1);
    // Completes before later work of non-blocking streams.
    WORKS(cuCtxSynchronize);
    return value;
}

static CUfunction function(CUmodule module, const char *name = "store") {
    CUfunction found = nullptr;
    WORKS(cuModuleGetFunction, &found, module, name);
    return found;
}

static void launch(CUfunction store, unsigned value) {
    void *values[] = {&memory, &value};
    WORKS(cuLaunchKernel, store, 1, 1, 1, 1, 1, 1, 0, nullptr, values, nullptr);
    HOLDS(word() == value);
}

// The fat binaries that this program was linked with, one behind the other.
static std::vector<std::vector<char>> fat_binaries() {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    Elf64_Ehdr header;
    std::memcpy(&header, bytes.data(), sizeof header);
    const auto section = [&](int index) {
        Elf64_Shdr found;
        std::memcpy(&found, bytes.data() + header.e_shoff + index * sizeof found, sizeof found);
        return found;
    };
    const char *names = bytes.data() + section(header.e_shstrndx).sh_offset;
    std::vector<std::vector<char>> found;
    for (int index = 0; index < header.e_shnum; index++) {
        const Elf64_Shdr at = section(index);
        if (std::strcmp(names + at.sh_name, ".nv_fatbin") != 0) continue;
        const char *next = bytes.data() + at.sh_offset, *const end = next + at.sh_size;
        while (end - next >= 16) {
            uint32_t magic;
            uint16_t before;
            uint64_t length;
            std::memcpy(&magic, next, sizeof magic);
            std::memcpy(&before, next + 6, sizeof before);
            std::memcpy(&length, next + 8, sizeof length);
            if (magic != 0xba55ed50) {
                next += 8;
                continue;
            }
            found.emplace_back(next, next + before + length);
            next += before + length;
        }
    }
    return found;
}

static void modules(const char *path) {
    CUmodule module = nullptr;
    WORKS(cuModuleLoad, &module, path);
    launch(function(module), 11);
    WORKS(cuModuleUnload, module);
    RETURNS(CUDA_ERROR_FILE_NOT_FOUND, cuModuleLoad, &module, "/nowhere/at/all");
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuModuleUnload, nullptr);

    CUjit_option options[] = {CU_JIT_MAX_REGISTERS, CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    char log[4096] = {};
    void *values[] = {reinterpret_cast<void *>(32), log, reinterpret_cast<void *>(sizeof log)};
    module = nullptr;
    WORKS(cuModuleLoadDataEx, &module, image, 3, options, values);
    launch(function(module), 12);
    WORKS(cuModuleUnload, module);
    RETURNS(CUDA_ERROR_INVALID_PTX, cuModuleLoadDataEx, &module, ".version 7.0\n.target sm_70\nnone", 0, nullptr, nullptr);

    bool found = false;
    for (const std::vector<char> &fat : fat_binaries()) {
        CUfunction kernel = nullptr;
        module = nullptr;
        if (DRIVER(cuModuleLoadFatBinary)(&module, fat.data()) != CUDA_SUCCESS) continue;
        if (DRIVER(cuModuleGetFunction)(&kernel, module, "from_the_program") == CUDA_SUCCESS) {
            void *values[] = {&memory};
            WORKS(cuLaunchKernel, kernel, 1, 1, 1, 1, 1, 1, 0, nullptr, values, nullptr);
            HOLDS(word() == 31);
            found = true;
        }
        WORKS(cuModuleUnload, module);
    }
    HOLDS(found);

    CUmoduleLoadingMode mode = static_cast<CUmoduleLoadingMode>(77);
    const char *wanted = std::getenv("CUDA_MODULE_LOADING");
    const bool eager = wanted && std::strcmp(wanted, "EAGER") == 0;
    WORKS(cuModuleGetLoadingMode, &mode);
    HOLDS(mode == (eager ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING));
}

static void libraries(const char *path) {
    CUlibrary library = nullptr;
    CUkernel kernel = nullptr;
    CUmodule module = nullptr;
    CUdeviceptr place = 0;
    size_t bytes = 0, offset = 77, size = 77;
    WORKS(cuLibraryLoadFromFile, &library, path, nullptr, nullptr, 0, nullptr, nullptr, 0);
    WORKS(cuLibraryGetKernel, &kernel, library, "store");
    launch(reinterpret_cast<CUfunction>(kernel), 13);
    WORKS(cuLibraryGetModule, &module, library);
    launch(function(module), 14);
    WORKS(cuLibraryGetManaged, &place, &bytes, library, "shared");
    HOLDS(bytes == 8 && *reinterpret_cast<volatile uint64_t *>(place) == 6);
    RETURNS(CUDA_ERROR_NOT_FOUND, cuLibraryGetManaged, &place, &bytes, library, "plain");
    WORKS(cuKernelGetParamInfo, kernel, 1, &offset, &size);
    HOLDS(offset == 8 && size == 4);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuKernelGetParamInfo, kernel, 2, &offset, &size);
    WORKS(cuKernelSetCacheConfig, kernel, CU_FUNC_CACHE_PREFER_SHARED, 0);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuKernelSetCacheConfig, kernel, static_cast<CUfunc_cache>(99), 0);
    WORKS(cuLibraryUnload, library);
    RETURNS(CUDA_ERROR_FILE_NOT_FOUND, cuLibraryLoadFromFile, &library, "/nowhere/at/all", nullptr, nullptr, 0, nullptr,
            nullptr, 0);
}

static void linker(const char *path) {
    CUlinkState state = nullptr;
    CUmodule module = nullptr;
    void *linked = nullptr;
    size_t bytes = 0;
    WORKS(cuLinkCreate, 0, nullptr, nullptr, &state);
    WORKS(cuLinkAddFile, state, CU_JIT_INPUT_PTX, path, 0, nullptr, nullptr);
    RETURNS(CUDA_ERROR_FILE_NOT_FOUND, cuLinkAddFile, state, CU_JIT_INPUT_PTX, "/nowhere/at/all", 0, nullptr, nullptr);
    WORKS(cuLinkComplete, state, &linked, &bytes);
    WORKS(cuModuleLoadData, &module, linked);
    WORKS(cuLinkDestroy, state);
    launch(function(module), 15);
    WORKS(cuModuleUnload, module);
}

static void functions(CUmodule module) {
    CUfunction store = function(module);
    CUmodule its = nullptr;
    size_t offset = 77, size = 77;
    CUfunctionLoadingState state = CU_FUNCTION_LOADING_STATE_MAX;
    WORKS(cuFuncGetModule, &its, store);
    HOLDS(its == module);
    WORKS(cuFuncGetParamInfo, store, 1, &offset, &size);
    HOLDS(offset == 8 && size == 4);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuFuncGetParamInfo, store, 2, &offset, &size);
    WORKS(cuFuncLoad, store);
    WORKS(cuFuncIsLoaded, &state, store);
    HOLDS(state == CU_FUNCTION_LOADING_STATE_LOADED);
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuFuncLoad, nullptr);
    WORKS(cuFuncSetSharedMemConfig, store, CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuFuncSetSharedMemConfig, store, static_cast<CUsharedconfig>(99));

    int grid = 0, block = 0, processors = 0, most = 0, resident = 0;
    WORKS(cuDeviceGetAttribute, &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0);
    WORKS(cuFuncGetAttribute, &most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, store);
    WORKS(cuOccupancyMaxPotentialBlockSize, &grid, &block, store, nullptr, 0, 0);
    WORKS(cuOccupancyMaxActiveBlocksPerMultiprocessor, &resident, store, block, 0);
    HOLDS(block > 0 && block <= most && grid == resident * processors);
    grid = block = 0;
    WORKS(cuOccupancyMaxPotentialBlockSizeWithFlags, &grid, &block, store, nullptr, 0, 64, CU_OCCUPANCY_DEFAULT);
    HOLDS(block == 64 && grid >= processors);

    // Launches a kernel by the functions from before CUDA 4.
    WORKS(cuFuncSetBlockShape, store, 1, 1, 1);
    WORKS(cuParamSetv, store, 0, &memory, sizeof memory);
    WORKS(cuParamSeti, store, 8, 16);
    WORKS(cuParamSetSize, store, 12);
    WORKS(cuLaunch, store);
    HOLDS(word() == 16);
    GIVES(CUDA_ERROR_INVALID_HANDLE, "cuParamSetSize", nullptr, 12u);

    CUstream stream = nullptr;
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    for (const char *name : {"cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz"}) {
        unsigned value = 17;
        void *values[] = {&memory, &value};
        GIVES(CUDA_SUCCESS, name, store, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, static_cast<void **>(values));
        WORKS(cuStreamSynchronize, stream);
        HOLDS(word() == 17);
    }
    WORKS(cuStreamDestroy, stream);
}

// Images, rows, columns and channels. Parts of them are loaded as columns. An H200 describes maps of the second kind,
// which devices of compute capability 10 use.
static void tensor_maps() {
    int unit = 0;
    WORKS(cuDeviceGetAttribute, &unit, CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED, 0);
    alignas(64) CUtensorMap map, moved;
    std::memset(&map, 0, sizeof map);
    const cuuint64_t dimensions[] = {64, 8, 8, 2}, strides[] = {128, 1024, 8192};
    const cuuint32_t steps[] = {1, 1, 1, 1};
    const int lower[] = {-1, -1}, upper[] = {1, 1};
    char *address = reinterpret_cast<char *>(memory);
    const auto encode = [&](CUtensorMap *to, void *from) {
        return DRIVER(cuTensorMapEncodeIm2col)(
            to, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, from, dimensions, strides, lower, upper, 16, 32, steps,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    const int wide = DRIVER(cuTensorMapEncodeIm2colWide)(
        &moved, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, address, dimensions, strides, -1, 1, 16, 32, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_IM2COL_WIDE_MODE_W, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    HOLDS(wide == (unit ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED));
    if (!unit) {
        HOLDS(encode(&map, address) == CUDA_ERROR_NOT_SUPPORTED);
        RETURNS(CUDA_ERROR_NOT_SUPPORTED, cuTensorMapReplaceAddress, &map, address);
        return;
    }
    HOLDS(encode(&map, address) == CUDA_SUCCESS);
    HOLDS(encode(&moved, address + 1024) == CUDA_SUCCESS);
    HOLDS(std::memcmp(&map, &moved, sizeof map) != 0);
    WORKS(cuTensorMapReplaceAddress, &moved, address);
    HOLDS(std::memcmp(&map, &moved, sizeof map) == 0);
}

int main() {
    WORKS(cuInit, 0);
    CUcontext context = nullptr;
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuMemAlloc, &memory, 1 << 16);
    WORKS(cuMemsetD32, memory, 0, 1);
    char path[] = "/tmp/wormhole-image-XXXXXX";
    const int file = mkstemp(path);
    HOLDS(file >= 0 && write(file, image, sizeof image) == static_cast<ssize_t>(sizeof image) && close(file) == 0);
    modules(path);
    libraries(path);
    linker(path);
    std::remove(path);
    CUmodule module = nullptr;
    WORKS(cuModuleLoadData, &module, image);
    functions(module);
    tensor_maps();
    std::printf("PASS images\n");
    return 0;
}
