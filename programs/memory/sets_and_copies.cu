// Sets and copies by each version of the functions: those of older versions, and those for which stream 0 is the
// per-thread stream; locations of managed memory by the same versions.
#include "../api/driver.cuh"

#include <cstdint>
#include <cstring>
#include <vector>

static const size_t bytes = 1 << 12, columns = 5, rows = 3, pitch = 64;

static CUcontext context;
static CUdeviceptr memory;
static CUstream stream;

// Returns the memory's contents, and clears it.
static std::vector<unsigned char> taken() {
    std::vector<unsigned char> found(bytes);
    WORKS(cuCtxSynchronize);
    WORKS(cuMemcpyDtoH, found.data(), memory, bytes);
    WORKS(cuMemsetD8, memory, 0, bytes);
    WORKS(cuCtxSynchronize);
    return found;
}

// Elements of this size, some in each of some rows, are this value; all else is zero.
static void holds(const std::string &name, size_t size, size_t width, size_t height, uint32_t value) {
    std::vector<unsigned char> expected(bytes);
    for (size_t row = 0; row < height; row++)
        for (size_t column = 0; column < width; column++)
            std::memcpy(&expected[row * pitch + column * size], &value, size);
    if (taken() != expected) {
        std::printf("FAIL sets_and_copies: %s set something else\n", name.c_str());
        std::exit(1);
    }
}

// Sets a row, and sets rows: by the calls of one element's size.
template <typename Element>
static void sets(const std::string &size, Element value, const std::string &version, const std::string &synchronous) {
    const std::string row = "cuMemsetD" + size, box = "cuMemsetD2D" + size;
    GIVES(CUDA_SUCCESS, row + "_v2" + synchronous, memory, value, columns);
    holds(row + synchronous, sizeof value, columns, 1, value);
    GIVES(CUDA_SUCCESS, row + "Async" + version, memory, value, columns, stream);
    holds(row + "Async" + version, sizeof value, columns, 1, value);
    GIVES(CUDA_SUCCESS, box + "_v2" + synchronous, memory, pitch, value, columns, rows);
    holds(box + synchronous, sizeof value, columns, rows, value);
    GIVES(CUDA_SUCCESS, box + "Async" + version, memory, pitch, value, columns, rows, stream);
    holds(box + "Async" + version, sizeof value, columns, rows, value);
    if (sizeof value > 1) {
        GIVES(CUDA_ERROR_INVALID_VALUE, row + "Async" + version, memory + 1, value, columns, stream);
    }
}

static const uint32_t source = 0x01020304;

// Half of memory that holds one value goes to the other half.
static void copied(const std::string &name) {
    const std::vector<unsigned char> found = taken();
    const unsigned char low = source & 0xff;
    if (found[0] != low || found[bytes / 2] != low || found[bytes - 4] != low) {
        std::printf("FAIL sets_and_copies: %s copied something else\n", name.c_str());
        std::exit(1);
    }
}

static void filled() {
    WORKS(cuMemsetD32, memory, source, bytes / 8);
    WORKS(cuCtxSynchronize);
}

static void copies(const std::string &version, const std::string &synchronous) {
    const CUdeviceptr other = memory + bytes / 2;
    const size_t half = bytes / 2;
    filled();
    GIVES(CUDA_SUCCESS, "cuMemcpyAsync" + version, other, memory, half, stream);
    copied("cuMemcpyAsync" + version);
    const std::vector<uint32_t> values(bytes / 4, source);
    GIVES(CUDA_SUCCESS, "cuMemcpyHtoDAsync_v2" + version, memory, static_cast<const void *>(values.data()), bytes, stream);
    copied("cuMemcpyHtoDAsync" + version);
    filled();
    GIVES(CUDA_SUCCESS, "cuMemcpyPeer" + synchronous, other, context, memory, context, half);
    copied("cuMemcpyPeer" + synchronous);
    filled();
    GIVES(CUDA_SUCCESS, "cuMemcpyPeerAsync" + version, other, context, memory, context, half, stream);
    copied("cuMemcpyPeerAsync" + version);

    CUmemcpyAttributes attributes = {};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    CUdeviceptr to[2] = {other, other + 1024}, from[2] = {memory, memory + 1024};
    size_t sizes[2] = {1024, 1024}, first = 0, failed = 7;
    filled();
    GIVES(CUDA_SUCCESS, "cuMemcpyBatchAsync" + version, to, from, sizes, size_t{2}, &attributes, &first, size_t{1}, &failed,
          stream);
    copied("cuMemcpyBatchAsync" + version);
    filled();
    GIVES(CUDA_SUCCESS, "cuMemcpyBatchAsync_v2" + version, to, from, sizes, size_t{2}, &attributes, &first, size_t{1},
          stream);
    copied("cuMemcpyBatchAsync_v2" + version);

    CUDA_MEMCPY3D_BATCH_OP box = {};
    box.src.type = box.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
    box.src.op.ptr.ptr = memory;
    box.dst.op.ptr.ptr = other;
    box.extent = {256, half / 256, 1};
    box.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    filled();
    GIVES(CUDA_SUCCESS, "cuMemcpy3DBatchAsync" + version, size_t{1}, &box, &failed, 0ull, stream);
    copied("cuMemcpy3DBatchAsync" + version);
    filled();
    GIVES(CUDA_SUCCESS, "cuMemcpy3DBatchAsync_v2" + version, size_t{1}, &box, 0ull, stream);
    copied("cuMemcpy3DBatchAsync_v2" + version);
}

static CUdeviceptr managed;
static const size_t page = 1 << 16;

// Returns the location of the last prefetch: a device, or the host.
static int place(CUdeviceptr address) {
    int found = 77;
    WORKS(cuMemRangeGetAttribute, &found, sizeof found, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, address, page);
    return found;
}

static void places(const std::string &version) {
    const int host = static_cast<int>(CU_DEVICE_CPU);
    GIVES(CUDA_SUCCESS, "cuMemPrefetchAsync" + version, managed, 2 * page, CU_DEVICE_CPU, stream);
    HOLDS(place(managed) == host && place(managed + page) == host);
    GIVES(CUDA_SUCCESS, "cuMemPrefetchAsync" + version, managed, page, CUdevice{0}, stream);
    HOLDS(place(managed) == 0 && place(managed + page) == host);

    CUdeviceptr both[2] = {managed, managed + page};
    size_t sizes[2] = {page, page}, indices[2] = {0, 1};
    CUmemLocation locations[2] = {};
    locations[0].type = CU_MEM_LOCATION_TYPE_HOST;
    locations[1].type = CU_MEM_LOCATION_TYPE_DEVICE;
    GIVES(CUDA_SUCCESS, "cuMemPrefetchBatchAsync" + version, both, sizes, size_t{2}, locations, indices, size_t{2}, 0ull,
          stream);
    HOLDS(place(managed) == host && place(managed + page) == 0);
    GIVES(CUDA_SUCCESS, "cuMemDiscardBatchAsync" + version, both, sizes, size_t{2}, 0ull, stream);
    GIVES(CUDA_ERROR_INVALID_VALUE, "cuMemDiscardBatchAsync" + version, both, sizes, size_t{0}, 0ull, stream);
    std::swap(both[0], both[1]);
    GIVES(CUDA_SUCCESS, "cuMemDiscardAndPrefetchBatchAsync" + version, both, sizes, size_t{2}, locations, indices,
          size_t{2}, 0ull, stream);
    HOLDS(place(managed) == 0 && place(managed + page) == host);
    WORKS(cuStreamSynchronize, stream);

    GIVES(CUDA_SUCCESS, "cuStreamAttachMemAsync" + version, stream, managed, size_t{0}, unsigned{CU_MEM_ATTACH_SINGLE});
    GIVES(CUDA_ERROR_INVALID_VALUE, "cuStreamAttachMemAsync" + version, stream, managed, size_t{0}, 8u);
    GIVES(CUDA_SUCCESS, "cuStreamAttachMemAsync" + version, stream, managed, size_t{0}, unsigned{CU_MEM_ATTACH_GLOBAL});
    WORKS(cuStreamSynchronize, stream);
}

int main() {
    WORKS(cuInit, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    WORKS(cuMemAlloc, &memory, bytes);
    WORKS(cuMemAllocManaged, &managed, 2 * page, CU_MEM_ATTACH_GLOBAL);
    taken();
    for (const bool per_thread : {false, true}) {
        const std::string version = per_thread ? "_ptsz" : "", synchronous = per_thread ? "_ptds" : "";
        sets<unsigned char>("8", 0xa5, version, synchronous);
        sets<unsigned short>("16", 0xa5c3, version, synchronous);
        sets<unsigned>("32", 0xa5c3871e, version, synchronous);
        copies(version, synchronous);
        places(version);
    }
    std::printf("PASS sets_and_copies\n");
    return 0;
}
