// Large allocations that are freed and made again: each is the program's own and no other's, what was freed is no memory,
// and it is free as soon as the program asks or the device has no other left.
#include "../api/driver.cuh"

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

static const size_t MIB = 1 << 20;

static size_t free_bytes() {
    size_t free = 0, total = 0;
    WORKS(cuMemGetInfo, &free, &total);
    return free;
}

static CUdeviceptr allocate(size_t bytes) {
    CUdeviceptr made = 0, base = 0;
    size_t size = 0;
    WORKS(cuMemAlloc, &made, bytes);
    WORKS(cuMemGetAddressRange, &base, &size, made + bytes - 1);
    HOLDS(base == made && size == bytes);
    return made;
}

// Sizes follow each other in a loop, and each allocation holds what was written to it.
static void again() {
    std::vector<unsigned> host(6 * MIB / sizeof(unsigned));
    unsigned long long last = 0;
    for (unsigned round = 0; round < 60; ++round) {
        const size_t bytes = (2 + 2 * (round % 3)) * MIB - round % 2 * 1000;
        const CUdeviceptr first = allocate(bytes), second = allocate(bytes);
        HOLDS(first + bytes <= second || second + bytes <= first);
        unsigned long long id = 0;
        WORKS(cuPointerGetAttribute, &id, CU_POINTER_ATTRIBUTE_BUFFER_ID, first);
        HOLDS(id > last);
        last = id;
        WORKS(cuMemsetD32, first, round, bytes / sizeof(unsigned));
        WORKS(cuMemsetD32, second, ~round, bytes / sizeof(unsigned));
        for (const CUdeviceptr memory : {first, second}) {
            WORKS(cuMemcpyDtoH, host.data(), memory, bytes);
            const unsigned expected = memory == first ? round : ~round;
            for (size_t i = 0; i < bytes / sizeof(unsigned); ++i) HOLDS(host[i] == expected);
            WORKS(cuMemFree, memory);
            RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemFree, memory);
            RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH, host.data(), memory, 1);
            RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8, memory, 0, 1);
        }
    }
}

static CUmemGenericAllocationHandle create(size_t bytes) {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemGenericAllocationHandle memory = 0;
    WORKS(cuMemCreate, &memory, bytes, &properties, 0);
    return memory;
}

// Mappable memory that is released and created again has one handle at a time.
static void mapped_again() {
    const size_t bytes = 4 * MIB;
    std::vector<unsigned> host(bytes / sizeof(unsigned));
    CUdeviceptr address = 0;
    WORKS(cuMemAddressReserve, &address, 2 * bytes, 0, 0, 0);
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (unsigned round = 0; round < 40; ++round) {
        const CUmemGenericAllocationHandle both[] = {create(bytes), create(bytes)};
        HOLDS(both[0] != both[1]);
        for (int i : {0, 1}) WORKS(cuMemMap, address + i * bytes, bytes, 0, both[i], 0);
        WORKS(cuMemSetAccess, address, 2 * bytes, &access, 1);
        for (unsigned i : {0u, 1u}) WORKS(cuMemsetD32, address + i * bytes, 2 * round + i, bytes / sizeof(unsigned));
        // Memory whose handle is released stays as long as it is mapped.
        WORKS(cuMemRelease, both[0]);
        for (unsigned i : {0u, 1u}) {
            WORKS(cuMemcpyDtoH, host.data(), address + i * bytes, bytes);
            for (const unsigned word : host) HOLDS(word == 2 * round + i);
        }
        WORKS(cuMemUnmap, address, 2 * bytes);
        WORKS(cuMemRelease, both[1]);
        for (const CUmemGenericAllocationHandle gone : both) {
            RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemRelease, gone);
            RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemMap, address, bytes, 0, gone, 0);
        }
    }
    WORKS(cuMemAddressFree, address, 2 * bytes);
}

static bool counted(CUcontext context) {
    const size_t before = free_bytes();
    std::vector<CUdeviceptr> held;
    for (int i = 0; i < 4; ++i) held.push_back(allocate(20 * MIB));
    WORKS(cuMemRelease, create(20 * MIB));
    const bool fell = free_bytes() + 80 * MIB <= before;
    for (const CUdeviceptr memory : held) WORKS(cuMemFree, memory);
    const bool came_back = free_bytes() + 2 * MIB >= before;
    // The end of a context frees what it has and what it had freed.
    CUcontext other;
    WORKS(cuCtxCreate, &other, nullptr, 0, 0);
    allocate(20 * MIB);
    WORKS(cuMemFree, allocate(20 * MIB));
    WORKS(cuCtxDestroy, other);
    WORKS(cuCtxSetCurrent, context);
    return fell && came_back && free_bytes() + 2 * MIB >= before;
}

// Other processes on the device move the figure too, so one of several rounds has to hold.
static void counts(CUcontext context) {
    for (int round = 0; round < 20; ++round) {
        if (counted(context)) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    HOLDS(!"free memory falls by allocations and comes back");
}

// Allocates all memory of the device and frees it; returns how much that was.
static size_t everything() {
    std::vector<CUdeviceptr> held;
    size_t all = 0;
    for (size_t bytes = (size_t)1 << 34; bytes >= 2 * MIB;) {
        CUdeviceptr memory = 0;
        const CUresult result = DRIVER(cuMemAlloc)(&memory, bytes);
        HOLDS(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
        if (result == CUDA_SUCCESS) {
            held.push_back(memory);
            all += bytes;
        } else {
            bytes /= 2;
        }
    }
    for (const CUdeviceptr memory : held) WORKS(cuMemFree, memory);
    return all;
}

// Freed memory is there for allocations of other sizes and kinds. Other programs run beside this one on a GPU.
static void all_of_it() {
    char name[100];
    WORKS(cuDeviceGetName, name, sizeof name, 0);
    if (!std::strstr(name, "CPU device")) return;
    const size_t all = everything();
    HOLDS(all > 100 * MIB);
    for (int round = 0; round < 2; ++round) {
        CUstream stream;
        WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
        CUdeviceptr pooled = 0;
        WORKS(cuMemAllocAsync, &pooled, 30 * MIB, stream);
        WORKS(cuMemFreeAsync, pooled, stream);
        WORKS(cuStreamSynchronize, stream);
        WORKS(cuMemFree, allocate(30 * MIB));
        WORKS(cuMemRelease, create(30 * MIB));
        HOLDS(everything() >= all);
        WORKS(cuStreamDestroy, stream);
    }
}

int main() {
    WORKS(cuInit, 0);
    CUcontext context;
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    again();
    mapped_again();
    counts(context);
    all_of_it();
    std::printf("PASS kept_allocations\n");
    return 0;
}
