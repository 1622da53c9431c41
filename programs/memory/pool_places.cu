// Pools by the location of their memory, as since CUDA 13; access to a pool; registered memory, shared addresses and
// mipmaps by the first versions of the functions.
#include "../api/driver.cuh"

#include <cstdint>
#include <cstdlib>
#include <cstring>

static CUstream stream;

static uint64_t used(CUmemoryPool pool) {
    cuuint64_t bytes = 77;
    WORKS(cuMemPoolGetAttribute, pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &bytes);
    return bytes;
}

static void places() {
    CUmemLocation here = {}, nowhere = {};
    here.type = nowhere.type = CU_MEM_LOCATION_TYPE_DEVICE;
    nowhere.id = 99;
    const auto pinned = CU_MEM_ALLOCATION_TYPE_PINNED;
    CUmemoryPool first = nullptr, now = nullptr, known = nullptr, own = nullptr;
    WORKS(cuDeviceGetDefaultMemPool, &known, 0);
    WORKS(cuMemGetDefaultMemPool, &first, &here, pinned);
    WORKS(cuMemGetMemPool, &now, &here, pinned);
    HOLDS(first && first == known && now == first);
    CUmemPoolProps wanted = {};
    wanted.allocType = pinned;
    wanted.location = here;
    WORKS(cuMemPoolCreate, &own, &wanted);
    WORKS(cuMemSetMemPool, &here, pinned, own);
    WORKS(cuMemGetMemPool, &now, &here, pinned);
    HOLDS(now == own);
    CUdeviceptr memory = 0;
    WORKS(cuMemAllocAsync, &memory, 4096, stream);
    HOLDS(used(own) >= 4096 && used(first) == 0);
    WORKS(cuMemFreeAsync, memory, stream);
    WORKS(cuStreamSynchronize, stream);
    HOLDS(used(own) == 0);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemGetMemPool, &now, &nowhere, pinned);

    CUmemAccess_flags access = static_cast<CUmemAccess_flags>(77);
    WORKS(cuMemPoolGetAccess, &access, own, &here);
    HOLDS(access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUmemAccessDesc description = {};
    description.location = here;
    description.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    WORKS(cuMemPoolSetAccess, own, &description, 1);
    // The device that a pool lies on keeps its access.
    description.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuMemPoolSetAccess, own, &description, 1);
    WORKS(cuMemPoolGetAccess, &access, own, &here);
    HOLDS(access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    WORKS(cuMemSetMemPool, &here, pinned, first);
    WORKS(cuMemPoolDestroy, own);
}

static void registered() {
    void *place = std::aligned_alloc(4096, 8192);
    std::memset(place, 0, 8192);
    unsigned flags = 77;
    GIVES(CUDA_SUCCESS, "cuMemHostRegister", place, size_t{8192}, unsigned{CU_MEMHOSTREGISTER_PORTABLE});
    WORKS(cuMemHostGetFlags, &flags, place);
    HOLDS(flags & CU_MEMHOSTALLOC_PORTABLE);
    GIVES(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "cuMemHostRegister", place, size_t{8192}, 0u);
    WORKS(cuMemHostUnregister, place);
    std::free(place);
}

// A process cannot open memory that it shares itself.
static void shared() {
    CUdeviceptr memory = 0, opened = 0;
    CUipcMemHandle handle;
    WORKS(cuMemAlloc, &memory, 2 << 20);
    WORKS(cuIpcGetMemHandle, &handle, memory);
    GIVES(CUDA_ERROR_INVALID_CONTEXT, "cuIpcOpenMemHandle", &opened, handle, unsigned{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS});
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle, memory);
    WORKS(cuMemFree, memory);
    CUevent event = nullptr, found = nullptr;
    CUipcEventHandle name;
    WORKS(cuEventCreate, &event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    WORKS(cuIpcGetEventHandle, &name, event);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenEventHandle, &found, name);
    WORKS(cuEventDestroy, event);
}

static void mipmaps() {
    CUDA_ARRAY3D_DESCRIPTOR shape = {};
    shape.Width = shape.Height = 8;
    shape.Format = CU_AD_FORMAT_FLOAT;
    shape.NumChannels = 1;
    CUmipmappedArray mipmap = nullptr;
    WORKS(cuMipmappedArrayCreate, &mipmap, &shape, 3);
    WORKS(cuMipmappedArrayDestroy, mipmap);
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuMipmappedArrayDestroy, nullptr);
}

int main() {
    WORKS(cuInit, 0);
    CUcontext context = nullptr;
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    places();
    registered();
    shared();
    mipmaps();
    std::printf("PASS pool_places\n");
    return 0;
}
