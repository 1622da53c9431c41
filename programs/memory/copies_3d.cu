// Copies of rows and of 3-D regions between pageable, page-locked, device and array memory, and attributes of arrays,
// textures and surfaces; each result and code is compared with the native driver's.
#include "../check.cuh"

#include <cstring>
#include <vector>

#include <cuda.h>
#include <dlfcn.h>

// Looks a function of the driver up, because these programs are not linked with it.
#define NAME_OF(name) #name
#define DRIVER(name) driver<decltype(&name)>(NAME_OF(name))

template <class Function>
static Function driver(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    const auto function = library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
    if (function) return function;
    std::printf("FAIL copies_3d: there is no %s\n", name);
    std::exit(1);
}

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL copies_3d: %s\n", what);
    std::exit(1);
}

#define SAYS(code, call)                                                                          \
    do {                                                                                          \
        const CUresult says = (call);                                                             \
        if (says == (code)) break;                                                                \
        std::printf("FAIL copies_3d: line %d: %s: %d, expected %d\n", __LINE__, #call, says, (code)); \
        std::exit(1);                                                                             \
    } while (0)
#define WORKS(call) SAYS(CUDA_SUCCESS, call)
#define INVALID(call) SAYS(CUDA_ERROR_INVALID_VALUE, call)

// A volume of bytes somewhere: memory with room between its rows and slices, or an array.
struct Volume {
    CUmemorytype kind;
    unsigned char *address;
    CUarray array;
    size_t pitch, rows, bytes;
};

constexpr size_t WIDTH = 1800, HEIGHT = 90, DEPTH = 6;

static Volume memory(CUmemorytype kind, void *address, size_t pitch, size_t rows) {
    return {kind, static_cast<unsigned char *>(address), nullptr, pitch, rows, pitch * rows * DEPTH};
}

static CUDA_MEMCPY3D copy_of(const Volume &to, const Volume &from) {
    CUDA_MEMCPY3D copy;
    std::memset(&copy, 0, sizeof copy);
    copy.srcMemoryType = from.kind;
    copy.srcHost = from.address;
    copy.srcDevice = reinterpret_cast<CUdeviceptr>(from.address);
    copy.srcArray = from.array;
    copy.srcPitch = from.pitch;
    copy.srcHeight = from.rows;
    copy.dstMemoryType = to.kind;
    copy.dstHost = to.address;
    copy.dstDevice = reinterpret_cast<CUdeviceptr>(to.address);
    copy.dstArray = to.array;
    copy.dstPitch = to.pitch;
    copy.dstHeight = to.rows;
    return copy;
}

static void whole(const Volume &to, const Volume &from) {
    CUDA_MEMCPY3D copy = copy_of(to, from);
    copy.WidthInBytes = WIDTH;
    copy.Height = HEIGHT;
    copy.Depth = DEPTH;
    WORKS(DRIVER(cuMemcpy3D)(&copy));
    // From pageable memory the copy may still be under way, and other streams do not wait for it.
    WORKS(DRIVER(cuCtxSynchronize)());
}

// Each pair of volumes, by the synchronous and by the asynchronous form: a region inside lands where it belongs and
// nothing beside it changes.
static void pairs(CUstream stream) {
    std::vector<unsigned char> first(2100 * 95 * DEPTH), second(first), scratch(WIDTH * HEIGHT * DEPTH), found(scratch);
    void *locked, *other;
    CUdeviceptr device, another;
    WORKS(DRIVER(cuMemAllocHost)(&locked, 2000 * 91 * DEPTH));
    WORKS(DRIVER(cuMemAllocHost)(&other, 1900 * 92 * DEPTH));
    WORKS(DRIVER(cuMemAlloc)(&device, 2048 * 93 * DEPTH));
    WORKS(DRIVER(cuMemAlloc)(&another, 1801 * 94 * DEPTH));
    CUarray arrays[2];
    for (CUarray &array : arrays) {
        const CUDA_ARRAY3D_DESCRIPTOR shape = {WIDTH / 4, HEIGHT, DEPTH, CU_AD_FORMAT_UNSIGNED_INT8, 4, 0};
        WORKS(DRIVER(cuArray3DCreate)(&array, &shape));
    }
    const Volume from[] = {memory(CU_MEMORYTYPE_HOST, first.data(), 2100, 95), memory(CU_MEMORYTYPE_HOST, locked, 2000, 91),
                           memory(CU_MEMORYTYPE_DEVICE, reinterpret_cast<void *>(device), 2048, 93),
                           {CU_MEMORYTYPE_ARRAY, nullptr, arrays[0], 0, 0, 0}};
    const Volume to[] = {memory(CU_MEMORYTYPE_UNIFIED, second.data(), 2100, 95), memory(CU_MEMORYTYPE_UNIFIED, other, 1900, 92),
                         memory(CU_MEMORYTYPE_UNIFIED, reinterpret_cast<void *>(another), 1801, 94),
                         {CU_MEMORYTYPE_ARRAY, nullptr, arrays[1], 0, 0, 0}};
    const Volume plain = memory(CU_MEMORYTYPE_HOST, scratch.data(), WIDTH, HEIGHT);
    const Volume result = memory(CU_MEMORYTYPE_HOST, found.data(), WIDTH, HEIGHT);
    unsigned round = 0;
    for (const Volume &source : from) {
        for (const Volume &target : to) {
            for (int asynchronous = 0; asynchronous < 2; ++asynchronous) {
                ++round;
                for (size_t i = 0; i < scratch.size(); ++i) scratch[i] = static_cast<unsigned char>(i * 7 + i / 251 + round);
                whole(source, plain);
                const std::vector<unsigned char> content = scratch;
                std::fill(scratch.begin(), scratch.end(), static_cast<unsigned char>(round ^ 0x55));
                whole(target, plain);
                // A region larger than a staging buffer of the frontend (512 KiB), at an offset in both volumes.
                CUDA_MEMCPY3D copy = copy_of(target, source);
                copy.srcXInBytes = 16, copy.srcY = 3, copy.srcZ = 1;
                copy.dstXInBytes = 4, copy.dstY = 5, copy.dstZ = 2;
                copy.WidthInBytes = 1780, copy.Height = 80, copy.Depth = 4;
                if (asynchronous) {
                    WORKS(DRIVER(cuMemcpy3DAsync)(&copy, stream));
                    WORKS(DRIVER(cuStreamSynchronize)(stream));
                } else {
                    WORKS(DRIVER(cuMemcpy3D)(&copy));
                }
                whole(result, target);
                for (size_t z = 0; z < DEPTH; ++z) {
                    for (size_t y = 0; y < HEIGHT; ++y) {
                        for (size_t x = 0; x < WIDTH; ++x) {
                            const bool inside = x >= 4 && x < 1784 && y >= 5 && y < 85 && z >= 2;
                            const unsigned char expected =
                                inside ? content[((z - 1) * HEIGHT + y - 2) * WIDTH + x + 12] : round ^ 0x55;
                            if (found[(z * HEIGHT + y) * WIDTH + x] == expected) continue;
                            std::printf("FAIL copies_3d: from %d to %d at %zu, %zu, %zu\n", source.kind, target.kind, x, y, z);
                            std::exit(1);
                        }
                    }
                }
            }
        }
    }
    WORKS(DRIVER(cuMemFreeHost)(locked));
    WORKS(DRIVER(cuMemFreeHost)(other));
    WORKS(DRIVER(cuMemFree)(device));
    WORKS(DRIVER(cuMemFree)(another));
    for (CUarray array : arrays) WORKS(DRIVER(cuArrayDestroy)(array));
}

__global__ void slow_add(unsigned *words, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int round = 0; round < 200; ++round) {
        if (i < count) words[i] += 1;
    }
}

// Copies of rows wait for earlier work of their stream, whichever kind of memory they name.
static void order() {
    const int width = 64, height = 32, count = width * height;
    unsigned *device, *locked;
    size_t pitch;
    CHECK(cudaMalloc(&device, count * sizeof *device));
    CHECK(cudaMallocHost(&locked, count * sizeof *locked));
    unsigned char *rows;
    CHECK(cudaMallocPitch(&rows, &pitch, width * sizeof *device, height));
    std::vector<unsigned> pageable(count), back(count);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const size_t row = width * sizeof *device;
    for (unsigned round = 1; round <= 5; ++round) {
        for (int i = 0; i < count; ++i) pageable[i] = locked[i] = i * round;
        const unsigned *source = round % 2 ? pageable.data() : locked;
        CHECK(cudaMemcpy2DAsync(rows, pitch, source, row, row, height, cudaMemcpyHostToDevice, stream));
        CHECK(cudaMemcpy2DAsync(device, row, rows, pitch, row, height, cudaMemcpyDeviceToDevice, stream));
        slow_add<<<(count + 127) / 128, 128, 0, stream>>>(device, count);
        CHECK(cudaMemcpy2DAsync(rows, pitch, device, row, row, height, cudaMemcpyDeviceToDevice, stream));
        CHECK(cudaMemcpy2DAsync(back.data(), row, rows, pitch, row, height, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaMemcpy2DAsync(locked, row, rows, pitch, row, height, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = 0; i < count; ++i) expect(back[i] == i * round + 200 && locked[i] == back[i], "order in a stream");
    }
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    CHECK(cudaFree(rows));
    CHECK(cudaFreeHost(locked));
}

static void refusals() {
    unsigned char host[4096];
    CUdeviceptr device;
    WORKS(DRIVER(cuMemAlloc)(&device, 4096));
    const auto plane = [&](CUmemorytype kind, const void *from, size_t pitch, size_t x, size_t width, size_t height) {
        CUDA_MEMCPY2D copy;
        std::memset(&copy, 0, sizeof copy);
        copy.srcMemoryType = kind;
        copy.srcHost = from;
        copy.srcDevice = reinterpret_cast<CUdeviceptr>(from);
        copy.srcPitch = pitch;
        copy.srcXInBytes = x;
        copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = device;
        copy.WidthInBytes = width;
        copy.Height = height;
        return DRIVER(cuMemcpy2D)(&copy);
    };
    WORKS(plane(CU_MEMORYTYPE_HOST, host, 0, 0, 128, 4));
    WORKS(plane(CU_MEMORYTYPE_HOST, nullptr, 128, 0, 128, 0));
    WORKS(plane(CU_MEMORYTYPE_HOST, reinterpret_cast<void *>(device), 128, 0, 128, 2));
    INVALID(plane(CU_MEMORYTYPE_HOST, nullptr, 128, 0, 128, 1));
    INVALID(plane(CU_MEMORYTYPE_HOST, host, 64, 0, 128, 4));
    INVALID(plane(CU_MEMORYTYPE_HOST, host, 64, 0, 128, 1));
    INVALID(plane(CU_MEMORYTYPE_HOST, host, 128, 64, 128, 1));
    INVALID(plane(CU_MEMORYTYPE_HOST, host, 512, 0, 512, 9));
    INVALID(plane(static_cast<CUmemorytype>(7), host, 128, 0, 128, 1));
    INVALID(plane(CU_MEMORYTYPE_DEVICE, host, 128, 0, 128, 1));
    INVALID(plane(CU_MEMORYTYPE_ARRAY, nullptr, 0, 0, 8, 1));
    INVALID(DRIVER(cuMemcpy2D)(nullptr));
    INVALID(DRIVER(cuMemcpy3D)(nullptr));
    INVALID(DRIVER(cuMemsetD2D8)(device, 64, 1, 128, 4));
    INVALID(DRIVER(cuMemsetD2D16)(device + 1, 64, 1, 16, 2));
    INVALID(DRIVER(cuMemsetD2D32)(device, 62, 1, 4, 2));
    size_t pitch;
    INVALID(DRIVER(cuMemAllocPitch)(&device, &pitch, 100, 4, 2));
    INVALID(DRIVER(cuMemAllocPitch)(&device, &pitch, 0, 4, 4));
    WORKS(DRIVER(cuMemFree)(device));
}

static void lines() {
    std::vector<unsigned char> bytes(256), back(256, 0);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 3);
    CUarray line, plane;
    const CUDA_ARRAY_DESCRIPTOR of_line = {64, 0, CU_AD_FORMAT_FLOAT, 1}, of_plane = {64, 32, CU_AD_FORMAT_UNSIGNED_INT8, 4};
    WORKS(DRIVER(cuArrayCreate)(&line, &of_line));
    WORKS(DRIVER(cuArrayCreate)(&plane, &of_plane));
    CUdeviceptr device;
    WORKS(DRIVER(cuMemAlloc)(&device, 256));
    CUstream stream;
    WORKS(DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
    // Around all of them: memory, line, plane, device, line, memory.
    WORKS(DRIVER(cuMemcpyHtoA)(line, 0, bytes.data(), 256));
    WORKS(DRIVER(cuMemcpyAtoA)(plane, 0, line, 0, 256));
    WORKS(DRIVER(cuMemcpyAtoD)(device, plane, 0, 256));
    WORKS(DRIVER(cuMemsetD8)(device, 0xAB, 2));
    WORKS(DRIVER(cuMemcpyDtoA)(line, 4, device, 200));
    WORKS(DRIVER(cuMemcpyAtoH)(back.data(), line, 0, 256));
    expect(back[0] == 0 && back[3] == 9 && back[4] == 0xAB && back[5] == 0xAB, "the start of a line");
    for (size_t i = 6; i < 204; ++i) expect(back[i] == bytes[i - 4], "what came from the device");
    for (size_t i = 204; i < 256; ++i) expect(back[i] == bytes[i], "the rest of a line");
    WORKS(DRIVER(cuMemcpyHtoAAsync)(line, 8, bytes.data() + 100, 16, stream));
    WORKS(DRIVER(cuMemcpyAtoHAsync)(back.data(), line, 8, 16, stream));
    WORKS(DRIVER(cuStreamSynchronize)(stream));
    expect(std::memcmp(back.data(), bytes.data() + 100, 16) == 0, "asynchronous copies of a line");
    INVALID(DRIVER(cuMemcpyHtoA)(line, 4, bytes.data(), 256));
    INVALID(DRIVER(cuMemcpyHtoA)(plane, 300, bytes.data(), 4));
    INVALID(DRIVER(cuMemcpyAtoD)(device, plane, 256, 16));
    INVALID(DRIVER(cuMemcpyHtoA)(nullptr, 0, bytes.data(), 4));
    WORKS(DRIVER(cuMemcpyHtoA)(line, 0, bytes.data(), 0));
    WORKS(DRIVER(cuStreamDestroy)(stream));
    WORKS(DRIVER(cuMemFree)(device));
    WORKS(DRIVER(cuArrayDestroy)(line));
    WORKS(DRIVER(cuArrayDestroy)(plane));
}

static void descriptions() {
    const auto made = [](size_t width, size_t height, size_t depth, int format, unsigned channels, unsigned flags) {
        const CUDA_ARRAY3D_DESCRIPTOR shape = {width, height, depth, static_cast<CUarray_format>(format), channels, flags};
        CUarray array = nullptr;
        const CUresult code = DRIVER(cuArray3DCreate)(&array, &shape);
        if (code == CUDA_SUCCESS) WORKS(DRIVER(cuArrayDestroy)(array));
        return code;
    };
    WORKS(made(16, 0, 4, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_LAYERED));
    WORKS(made(16, 16, 12, CU_AD_FORMAT_HALF, 2, CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP));
    INVALID(made(0, 0, 0, CU_AD_FORMAT_FLOAT, 1, 0));
    INVALID(made(16, 8, 0, CU_AD_FORMAT_FLOAT, 3, 0));
    INVALID(made(16, 8, 0, 5, 1, 0));
    INVALID(made(16, 0, 4, CU_AD_FORMAT_FLOAT, 1, 0));
    INVALID(made(16, 16, 7, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP));
    INVALID(made(131073, 0, 0, CU_AD_FORMAT_FLOAT, 1, 0));
    INVALID(made(16, 8, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_DEPTH_TEXTURE));

    CUarray array;
    const CUDA_ARRAY3D_DESCRIPTOR shape = {16, 8, 4, CU_AD_FORMAT_FLOAT, 2, CUDA_ARRAY3D_SURFACE_LDST};
    WORKS(DRIVER(cuArray3DCreate)(&array, &shape));
    CUDA_ARRAY3D_DESCRIPTOR deep;
    CUDA_ARRAY_DESCRIPTOR flat;
    WORKS(DRIVER(cuArray3DGetDescriptor)(&deep, array));
    expect(std::memcmp(&deep, &shape, sizeof deep - 4) == 0, "the description of an array");
    WORKS(DRIVER(cuArrayGetDescriptor)(&flat, array));
    expect(flat.Width == 16 && flat.Height == 8 && flat.Format == CU_AD_FORMAT_FLOAT && flat.NumChannels == 2, "its plane");
    SAYS(CUDA_ERROR_INVALID_HANDLE, DRIVER(cuArrayGetDescriptor)(&flat, nullptr));
    INVALID(DRIVER(cuArrayGetDescriptor)(nullptr, array));
    CUarray part;
    INVALID(DRIVER(cuArrayGetPlane)(&part, array, 0));
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs;
    INVALID(DRIVER(cuArrayGetMemoryRequirements)(&needs, array, 0));
    CUDA_ARRAY_SPARSE_PROPERTIES sparse;
    INVALID(DRIVER(cuArrayGetSparseProperties)(&sparse, array));

    CUDA_RESOURCE_DESC resource, said;
    std::memset(&resource, 0, sizeof resource);
    resource.res.array.hArray = array;
    CUDA_TEXTURE_DESC sampling, sampled;
    std::memset(&sampling, 0, sizeof sampling);
    sampling.flags = CU_TRSF_NORMALIZED_COORDINATES;
    CUDA_RESOURCE_VIEW_DESC view, viewed;
    std::memset(&view, 0, sizeof view);
    view.format = CU_RES_VIEW_FORMAT_UINT_2X32;
    view.width = 16, view.height = 8, view.depth = 4;
    CUtexObject texture;
    WORKS(DRIVER(cuTexObjectCreate)(&texture, &resource, &sampling, &view));
    WORKS(DRIVER(cuTexObjectGetResourceDesc)(&said, texture));
    expect(said.resType == CU_RESOURCE_TYPE_ARRAY && said.res.array.hArray == array, "what a texture reads");
    WORKS(DRIVER(cuTexObjectGetTextureDesc)(&sampled, texture));
    expect(sampled.flags == CU_TRSF_NORMALIZED_COORDINATES, "how it reads");
    WORKS(DRIVER(cuTexObjectGetResourceViewDesc)(&viewed, texture));
    expect(viewed.format == CU_RES_VIEW_FORMAT_UINT_2X32, "how it sees it");
    WORKS(DRIVER(cuTexObjectDestroy)(texture));
    INVALID(DRIVER(cuTexObjectGetResourceDesc)(&said, texture));
    WORKS(DRIVER(cuTexObjectDestroy)(texture));
    view.width = 8;
    INVALID(DRIVER(cuTexObjectCreate)(&texture, &resource, &sampling, &view));
    sampling.addressMode[0] = static_cast<CUaddress_mode>(7);
    INVALID(DRIVER(cuTexObjectCreate)(&texture, &resource, &sampling, nullptr));
    sampling.addressMode[0] = CU_TR_ADDRESS_MODE_WRAP;
    resource.res.array.hArray = nullptr;
    INVALID(DRIVER(cuTexObjectCreate)(&texture, &resource, &sampling, nullptr));
    resource.res.array.hArray = array;
    CUsurfObject surface;
    WORKS(DRIVER(cuSurfObjectCreate)(&surface, &resource));
    WORKS(DRIVER(cuSurfObjectGetResourceDesc)(&said, surface));
    expect(said.res.array.hArray == array, "what a surface writes");
    WORKS(DRIVER(cuSurfObjectDestroy)(surface));
    INVALID(DRIVER(cuSurfObjectGetResourceDesc)(&said, surface));
    WORKS(DRIVER(cuArrayDestroy)(array));

    CUdeviceptr device;
    WORKS(DRIVER(cuMemAlloc)(&device, 4096));
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear.devPtr = device + 256;
    resource.res.linear.format = CU_AD_FORMAT_FLOAT;
    resource.res.linear.numChannels = 1;
    resource.res.linear.sizeInBytes = 1024;
    INVALID(DRIVER(cuTexObjectCreate)(&texture, &resource, &sampling, nullptr));
    INVALID(DRIVER(cuSurfObjectCreate)(&surface, &resource));
    WORKS(DRIVER(cuMemFree)(device));
    size_t most;
    WORKS(DRIVER(cuDeviceGetTexture1DLinearMaxWidth)(&most, CU_AD_FORMAT_FLOAT, 1, 0));
    expect(most == size_t{1} << 30, "the longest texture of linear memory");
    WORKS(DRIVER(cuDeviceGetTexture1DLinearMaxWidth)(&most, CU_AD_FORMAT_FLOAT, 4, 0));
    expect(most == size_t{1} << 28, "the longest of four channels");
}

__global__ void sample_level(cudaTextureObject_t texture, float *result) {
    result[threadIdx.x] = tex2DLod<float>(texture, 0.5f, 0.5f, static_cast<float>(threadIdx.x));
}

static void mipmaps() {
    const CUDA_ARRAY3D_DESCRIPTOR shape = {40, 20, 0, CU_AD_FORMAT_FLOAT, 1, 0};
    CUmipmappedArray mipmap;
    WORKS(DRIVER(cuMipmappedArrayCreate)(&mipmap, &shape, 3));
    CUarray level, again;
    for (unsigned number = 0; number < 3; ++number) {
        WORKS(DRIVER(cuMipmappedArrayGetLevel)(&level, mipmap, number));
        CUDA_ARRAY3D_DESCRIPTOR said;
        WORKS(DRIVER(cuArray3DGetDescriptor)(&said, level));
        expect(said.Width == 40u >> number && said.Height == 20u >> number && said.Depth == 0, "the shape of a level");
        std::vector<float> texels(said.Width * said.Height, 10.0f * number + 1.0f);
        CUDA_MEMCPY2D copy;
        std::memset(&copy, 0, sizeof copy);
        copy.srcMemoryType = CU_MEMORYTYPE_HOST;
        copy.srcHost = texels.data();
        copy.srcPitch = said.Width * sizeof(float);
        copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
        copy.dstArray = level;
        copy.WidthInBytes = copy.srcPitch;
        copy.Height = said.Height;
        WORKS(DRIVER(cuMemcpy2DUnaligned)(&copy));
    }
    WORKS(DRIVER(cuMipmappedArrayGetLevel)(&again, mipmap, 2));
    expect(again == level, "a level is the same array each time");
    INVALID(DRIVER(cuMipmappedArrayGetLevel)(&again, mipmap, 3));
    WORKS(DRIVER(cuArrayDestroy)(level));
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs;
    INVALID(DRIVER(cuMipmappedArrayGetMemoryRequirements)(&needs, mipmap, 0));
    CUDA_ARRAY_SPARSE_PROPERTIES sparse;
    INVALID(DRIVER(cuMipmappedArrayGetSparseProperties)(&sparse, mipmap));

    CUDA_RESOURCE_DESC resource;
    std::memset(&resource, 0, sizeof resource);
    resource.resType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
    resource.res.mipmap.hMipmappedArray = mipmap;
    CUDA_TEXTURE_DESC sampling;
    std::memset(&sampling, 0, sizeof sampling);
    sampling.flags = CU_TRSF_NORMALIZED_COORDINATES;
    sampling.maxMipmapLevelClamp = 100.0f;
    CUtexObject texture;
    WORKS(DRIVER(cuTexObjectCreate)(&texture, &resource, &sampling, nullptr));
    float *device, result[4];
    CHECK(cudaMalloc(&device, sizeof result));
    sample_level<<<1, 4>>>(texture, device);
    CHECK(cudaMemcpy(result, device, sizeof result, cudaMemcpyDeviceToHost));
    expect(result[0] == 1.0f && result[1] == 11.0f && result[2] == 21.0f && result[3] == 21.0f, "levels of detail");
    CHECK(cudaFree(device));
    WORKS(DRIVER(cuTexObjectDestroy)(texture));
    WORKS(DRIVER(cuMipmappedArrayDestroy)(mipmap));
}

static void between_contexts() {
    CUcontext context;
    WORKS(DRIVER(cuCtxGetCurrent)(&context));
    unsigned char from[64], to[64] = {};
    for (int i = 0; i < 64; ++i) from[i] = static_cast<unsigned char>(i + 1);
    CUdeviceptr first, second;
    WORKS(DRIVER(cuMemAlloc)(&first, 64));
    WORKS(DRIVER(cuMemAlloc)(&second, 128));
    WORKS(DRIVER(cuMemcpyHtoD)(first, from, 64));
    CUDA_MEMCPY3D_PEER copy;
    std::memset(&copy, 0, sizeof copy);
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = first, copy.srcPitch = 16, copy.srcContext = context;
    copy.dstDevice = second, copy.dstPitch = 32, copy.dstContext = context;
    copy.WidthInBytes = 16, copy.Height = 4, copy.Depth = 1;
    WORKS(DRIVER(cuMemcpy3DPeer)(&copy));
    copy.srcDevice = second, copy.srcPitch = 32, copy.dstMemoryType = CU_MEMORYTYPE_HOST, copy.dstHost = to, copy.dstPitch = 16;
    WORKS(DRIVER(cuMemcpy3DPeerAsync)(&copy, nullptr));
    WORKS(DRIVER(cuStreamSynchronize)(nullptr));
    expect(std::memcmp(from, to, 64) == 0, "copies between contexts");
    WORKS(DRIVER(cuMemFree)(first));
    WORKS(DRIVER(cuMemFree)(second));
}

int main() {
    CHECK(cudaFree(nullptr));
    CUstream stream;
    WORKS(DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
    pairs(stream);
    WORKS(DRIVER(cuStreamDestroy)(stream));
    order();
    lines();
    descriptions();
    mipmaps();
    between_contexts();
    refusals();
    std::printf("PASS copies_3d\n");
    return 0;
}
