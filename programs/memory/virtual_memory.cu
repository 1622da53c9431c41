// Virtual memory management, as PyTorch's expandable segments and NCCL's buffers use it, and growing vectors.
#include "../check.cuh"

#include <cstdint>
#include <cuda.h>
#include <vector>

__global__ void fill(unsigned *data, size_t count, unsigned value) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] = value + (unsigned)i;
}

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL virtual_memory: %s\n", what);
    std::exit(1);
}

static void is(CUresult result, CUresult expected, const char *what) {
    if (result == expected) return;
    std::printf("FAIL virtual_memory: %s: %d\n", what, (int)result);
    std::exit(1);
}

#define DRIVER(name)                                                                              \
    static decltype(&::name) name##_function() {                                                  \
        void *entry = nullptr;                                                                    \
        cudaDriverEntryPointQueryResult found;                                                    \
        CHECK(cudaGetDriverEntryPointByVersion(#name, &entry, 12000, cudaEnableDefault, &found)); \
        expect(found == cudaDriverEntryPointSuccess, #name);                                      \
        return (decltype(&::name))entry;                                                          \
    }                                                                                             \
    static const auto do_##name = name##_function();

DRIVER(cuMemAddressReserve)
DRIVER(cuMemAddressFree)
DRIVER(cuMemCreate)
DRIVER(cuMemRelease)
DRIVER(cuMemMap)
DRIVER(cuMemUnmap)
DRIVER(cuMemSetAccess)
DRIVER(cuMemGetAccess)
DRIVER(cuMemGetAllocationGranularity)
DRIVER(cuMemGetAllocationPropertiesFromHandle)
DRIVER(cuMemRetainAllocationHandle)
DRIVER(cuMemGetAddressRange)

#define WORKED(call) is((call), CUDA_SUCCESS, #call)

static CUmemAllocationProp properties() {
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return wanted;
}

static CUmemAccessDesc access_of(CUmemAccess_flags flags) {
    CUmemAccessDesc wanted = {};
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.flags = flags;
    return wanted;
}

// Tests a segment that grows by handles at the end of one reservation, and is used across them. Returns the bytes that
// were not freed.
static size_t expandable_segment(size_t unit) {
    const size_t units = 16;
    size_t before, after, total;
    CHECK(cudaMemGetInfo(&before, &total));
    const size_t reserved = (total + total / 8) / unit * unit;
    CUdeviceptr base = 0;
    WORKED(do_cuMemAddressReserve(&base, reserved, 0, 0, 0));
    const CUmemAllocationProp wanted = properties();
    const CUmemAccessDesc access = access_of(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    std::vector<CUmemGenericAllocationHandle> handles(units);
    for (size_t i = 0; i < units; ++i) {
        WORKED(do_cuMemCreate(&handles[i], unit, &wanted, 0));
        WORKED(do_cuMemMap(base + i * unit, unit, 0, handles[i], 0));
    }
    WORKED(do_cuMemSetAccess(base, units * unit, &access, 1));
    CHECK(cudaMemGetInfo(&after, &total));
    expect(after + units * unit <= before, "it takes memory");

    const size_t count = units * unit / sizeof(unsigned);
    unsigned *data = (unsigned *)base;
    fill<<<(unsigned)(count / 256), 256>>>(data, count, 7);
    CHECK(cudaGetLastError());
    std::vector<unsigned> host(count);
    CHECK(cudaMemcpy(host.data(), data, count * sizeof(unsigned), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; ++i) expect(host[i] == 7 + (unsigned)i, "one copy spans the handles");
    CHECK(cudaMemset((char *)base + unit - 64, 0, 128));
    CHECK(cudaMemcpy(host.data(), (char *)base + unit - 128, 256, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 64; ++i) expect((host[i] == 0) == (i >= 16 && i < 48), "one fill spans two handles");
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, (char *)base + 5));
    expect(attributes.type == cudaMemoryTypeDevice && attributes.device == 0, "it is device memory");

    // Some memory is unmapped and mapped elsewhere.
    CHECK(cudaDeviceSynchronize());
    WORKED(do_cuMemUnmap(base + 4 * unit, 8 * unit));
    is((CUresult)cudaMemset((char *)base + 4 * unit, 0, 16), CUDA_ERROR_INVALID_VALUE, "what is not mapped");
    cudaGetLastError();
    WORKED(do_cuMemMap(base + 20 * unit, unit, 0, handles[4], 0));
    WORKED(do_cuMemSetAccess(base + 20 * unit, unit, &access, 1));
    unsigned value = 0;
    CHECK(cudaMemcpy(&value, (char *)base + 20 * unit, sizeof value, cudaMemcpyDeviceToHost));
    expect(value == 7 + (unsigned)(4 * unit / sizeof(unsigned)), "memory keeps its contents");
    for (const auto handle : handles) WORKED(do_cuMemRelease(handle));
    is(do_cuMemAddressFree(base, reserved), CUDA_ERROR_INVALID_VALUE, "freeing addresses in use");
    WORKED(do_cuMemUnmap(base, 4 * unit));
    WORKED(do_cuMemUnmap(base + 12 * unit, 4 * unit));
    WORKED(do_cuMemUnmap(base + 20 * unit, unit));
    WORKED(do_cuMemAddressFree(base, reserved));
    CHECK(cudaMemGetInfo(&after, &total));
    return after < before ? before - after : 0;
}

// As NCCL allocates and frees a buffer.
static void buffer(size_t unit) {
    const CUmemAllocationProp wanted = properties();
    const CUmemAccessDesc access = access_of(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    for (int round = 0; round < 20; ++round) {
        CUdeviceptr address = 0, start = 0;
        CUmemGenericAllocationHandle made, retained;
        size_t size = 0;
        WORKED(do_cuMemCreate(&made, unit, &wanted, 0));
        WORKED(do_cuMemAddressReserve(&address, unit, unit, 0, 0));
        WORKED(do_cuMemMap(address, unit, 0, made, 0));
        WORKED(do_cuMemSetAccess(address, unit, &access, 1));
        CHECK(cudaMemset((void *)address, round, unit));
        WORKED(do_cuMemRetainAllocationHandle(&retained, (void *)(address + 100)));
        expect(retained == made, "the handle is the one that was mapped");
        WORKED(do_cuMemRelease(retained));
        WORKED(do_cuMemGetAddressRange(&start, &size, address + 4096));
        expect(start == address && size == unit, "the range is the mapping");
        // A set may still be under way when its call returns.
        CHECK(cudaDeviceSynchronize());
        WORKED(do_cuMemUnmap(address, size));
        WORKED(do_cuMemRelease(made));
        WORKED(do_cuMemAddressFree(address, size));
    }
}

// One memory at two addresses, one of which may only be read.
static void two_views(size_t unit) {
    const CUmemAllocationProp wanted = properties();
    CUdeviceptr base = 0;
    CUmemGenericAllocationHandle made;
    WORKED(do_cuMemAddressReserve(&base, 2 * unit, 0, 0, 0));
    WORKED(do_cuMemCreate(&made, unit, &wanted, 0));
    WORKED(do_cuMemMap(base, unit, 0, made, 0));
    WORKED(do_cuMemMap(base + unit, unit, 0, made, 0));
    const CUmemAccessDesc both = access_of(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    const CUmemAccessDesc read = access_of(CU_MEM_ACCESS_FLAGS_PROT_READ);
    const CUmemLocation here = both.location;
    unsigned long long flags = 77;
    WORKED(do_cuMemGetAccess(&flags, &here, base));
    expect(flags == CU_MEM_ACCESS_FLAGS_PROT_NONE, "no access at first");
    WORKED(do_cuMemSetAccess(base, unit, &both, 1));
    WORKED(do_cuMemSetAccess(base + unit, unit, &read, 1));
    WORKED(do_cuMemGetAccess(&flags, &here, base + 100));
    expect(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "access");
    fill<<<1, 256>>>((unsigned *)base, 256, 3);
    unsigned host[256];
    CHECK(cudaMemcpy(host, (void *)(base + unit), sizeof host, cudaMemcpyDeviceToHost));
    for (unsigned i = 0; i < 256; ++i) expect(host[i] == 3 + i, "the other view shows it");
    CUmemAllocationProp found;
    WORKED(do_cuMemGetAllocationPropertiesFromHandle(&found, made));
    expect(found.type == wanted.type && found.requestedHandleTypes == wanted.requestedHandleTypes &&
               found.location.type == wanted.location.type && found.location.id == 0,
           "the properties are those asked for");
    WORKED(do_cuMemRelease(made));
    WORKED(do_cuMemUnmap(base, 2 * unit));
    WORKED(do_cuMemAddressFree(base, 2 * unit));
}

static void refusals(size_t unit) {
    CUmemAllocationProp wanted = properties();
    const CUmemAccessDesc access = access_of(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUdeviceptr base = 0;
    CUmemGenericAllocationHandle made, other;
    const CUresult invalid = CUDA_ERROR_INVALID_VALUE;
    is(do_cuMemAddressReserve(&base, unit, 3, 0, 0), invalid, "an odd alignment");
    is(do_cuMemAddressReserve(&base, 0, 0, 0, 0), invalid, "no addresses");
    is(do_cuMemCreate(&made, unit + 1, &wanted, 0), invalid, "an odd size");
    is(do_cuMemCreate(&made, (size_t)1 << 46, &wanted, 0), CUDA_ERROR_OUT_OF_MEMORY, "too much");
    wanted.location.id = 9;
    is(do_cuMemCreate(&made, unit, &wanted, 0), CUDA_ERROR_INVALID_DEVICE, "no such device");
    wanted.location.id = 0;
    WORKED(do_cuMemAddressReserve(&base, 4 * unit, 0, 0, 0));
    WORKED(do_cuMemCreate(&made, unit, &wanted, 0));
    WORKED(do_cuMemCreate(&other, 2 * unit, &wanted, 0));
    is(do_cuMemMap(base, 2 * unit, unit, other, 0), CUDA_ERROR_NOT_SUPPORTED, "an offset");
    is(do_cuMemMap(base + 4096, unit, 0, made, 0), invalid, "an odd address");
    WORKED(do_cuMemMap(base, unit, 0, made, 0));
    is(do_cuMemMap(base, unit, 0, made, 0), invalid, "mapped already");
    is(do_cuMemSetAccess(base, 2 * unit, &access, 1), invalid, "access to what is not mapped");
    WORKED(do_cuMemUnmap(base, unit));
    is(do_cuMemAddressFree(base + unit, unit), invalid, "freeing a part");
    WORKED(do_cuMemAddressFree(base, 4 * unit));
    is(do_cuMemAddressFree(base, 4 * unit), invalid, "freeing twice");
    WORKED(do_cuMemRelease(made));
    WORKED(do_cuMemRelease(other));
}

int main() {
    CHECK(cudaFree(nullptr));
    int supported = 0;
    CHECK(cudaDeviceGetAttribute(&supported, (cudaDeviceAttr)CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    expect(supported == 1, "the device has virtual memory management");
    const CUmemAllocationProp wanted = properties();
    size_t unit = 0;
    WORKED(do_cuMemGetAllocationGranularity(&unit, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    expect(unit != 0 && (unit & (unit - 1)) == 0, "the granularity is a power of two");
    // First launches and copies allocate memory, and so may other processes meanwhile.
    int rounds = 0;
    while (expandable_segment(unit) != 0) expect(++rounds < 20, "all memory is back");
    buffer(unit);
    two_views(unit);
    refusals(unit);
    std::printf("PASS virtual_memory\n");
    return 0;
}
