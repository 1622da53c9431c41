// Memory pools: allocation and freeing in the order of streams, reuse, statistics, limits, lifetimes.
#include "../check.cuh"

#include <cstdint>
#include <vector>

#include <unistd.h>

__global__ void fill(unsigned *data, int count, unsigned value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] = value + i;
}

__global__ void wait_for(volatile unsigned *word) {
    while (*word == 0) {}
}

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL pools: %s\n", what);
    std::exit(1);
}

static void refused(cudaError_t error, cudaError_t expected, const char *what) {
    if (error != expected) {
        std::printf("FAIL pools: %s: %s\n", what, cudaGetErrorName(error));
        std::exit(1);
    }
    cudaGetLastError();
}

static uint64_t count_of(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
    uint64_t value = 77;
    CHECK(cudaMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

static void set(cudaMemPool_t pool, cudaMemPoolAttr attribute, uint64_t value) {
    CHECK(cudaMemPoolSetAttribute(pool, attribute, &value));
}

static const int COUNT = 1 << 18;
static const size_t BYTES = COUNT * sizeof(unsigned);

// A stream allocates, fills, copies and frees memory without a wait between.
static void in_order(cudaStream_t stream, unsigned *host, unsigned rounds) {
    for (unsigned round = 0; round < rounds; ++round) {
        unsigned *data;
        CHECK(cudaMallocAsync(&data, BYTES, stream));
        fill<<<COUNT / 256, 256, 0, stream>>>(data, COUNT, round * 1000);
        CHECK(cudaMemcpyAsync(host + round * 16, data + COUNT - 16, 64, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaFreeAsync(data, stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    for (unsigned round = 0; round < rounds; ++round)
        for (unsigned i = 0; i < 16; ++i)
            expect(host[round * 16 + i] == round * 1000 + COUNT - 16 + i, "memory holds what its kernel wrote");
}

// A stream allocates, waits and frees in a loop, with sizes that follow each other. Memory that it has freed is free.
static void waits_between(cudaStream_t stream, unsigned *host) {
    size_t before, after, total;
    // Other processes may allocate or free memory meanwhile; then it is measured again.
    for (int tries = 0;; ++tries) {
        CHECK(cudaMemGetInfo(&before, &total));
        for (unsigned round = 0; round < 30; ++round) {
            const size_t bytes = BYTES << round % 3 * 2;
            unsigned *data, *more;
            CHECK(cudaMallocAsync(&data, bytes, stream));
            CHECK(cudaMallocAsync(&more, bytes, stream));
            expect(data + bytes / 4 <= more || more + bytes / 4 <= data, "allocations are apart");
            fill<<<COUNT / 256, 256, 0, stream>>>(data, COUNT, round);
            fill<<<COUNT / 256, 256, 0, stream>>>(more, COUNT, ~round);
            CHECK(cudaMemcpyAsync(host, data, 64, cudaMemcpyDeviceToHost, stream));
            CHECK(cudaFreeAsync(data, stream));
            CHECK(cudaFreeAsync(more, stream));
            CHECK(cudaStreamSynchronize(stream));
            for (unsigned i = 0; i < 16; ++i) expect(host[i] == round + i, "it holds what was written last");
        }
        CHECK(cudaMemGetInfo(&after, &total));
        if (after >= before) break;
        expect(tries < 40, "what was freed before a wait is free");
        usleep(500000);
    }
}

// An allocation of one stream is used and freed on another, behind an event.
static void across_streams(cudaStream_t first, cudaStream_t second, unsigned *host) {
    cudaEvent_t ready;
    CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    for (unsigned round = 0; round < 32; ++round) {
        unsigned *data;
        CHECK(cudaMallocAsync(&data, BYTES, first));
        fill<<<COUNT / 256, 256, 0, first>>>(data, COUNT, round);
        CHECK(cudaEventRecord(ready, first));
        CHECK(cudaStreamWaitEvent(second, ready, 0));
        CHECK(cudaMemcpyAsync(host, data, 64, cudaMemcpyDeviceToHost, second));
        CHECK(cudaFreeAsync(data, second));
        CHECK(cudaStreamSynchronize(second));
        for (unsigned i = 0; i < 16; ++i) expect(host[i] == round + i, "the event orders the streams");
    }
    CHECK(cudaEventDestroy(ready));
}

// Memory that a busy stream has freed is not yet allocated to another stream.
static void reuse_waits(cudaStream_t busy, cudaStream_t quick, unsigned *host) {
    volatile unsigned *gate;
    CHECK(cudaHostAlloc((void **)&gate, sizeof *gate, cudaHostAllocMapped));
    *gate = 0;
    unsigned *late, *other;
    CHECK(cudaMallocAsync(&other, BYTES, quick));
    fill<<<COUNT / 256, 256, 0, quick>>>(other, COUNT, 0);
    CHECK(cudaStreamSynchronize(quick));
    wait_for<<<1, 1, 0, busy>>>(gate);
    CHECK(cudaMallocAsync(&late, BYTES, busy));
    fill<<<COUNT / 256, 256, 0, busy>>>(late, COUNT, 5);
    CHECK(cudaMemcpyAsync(host, late, 64, cudaMemcpyDeviceToHost, busy));
    CHECK(cudaFreeAsync(late, busy));
    for (int round = 0; round < 4; ++round) {
        unsigned *taken;
        CHECK(cudaMallocAsync(&taken, BYTES, quick));
        fill<<<COUNT / 256, 256, 0, quick>>>(taken, COUNT, 100);
    }
    CHECK(cudaFreeAsync(other, quick));
    *gate = 1;
    CHECK(cudaDeviceSynchronize());
    for (unsigned i = 0; i < 16; ++i) expect(host[i] == 5 + i, "nobody wrote there before the free");
    CHECK(cudaFreeHost((void *)gate));
}

// Memory that a stream has freed is its own again at once, belongs to no other allocation, and keeps no other stream
// waiting for work that came after the free.
static void freed_and_allocated(cudaStream_t busy, cudaStream_t quick, unsigned *host) {
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t pool;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    set(pool, cudaMemPoolAttrReleaseThreshold, UINT64_MAX);
    unsigned *held[4] = {};
    for (unsigned round = 0; round < 20; ++round) {
        const size_t bytes = round % 3 ? BYTES : BYTES / 2;
        for (unsigned i = 0; i < 4; ++i) {
            CHECK(cudaMallocFromPoolAsync(&held[i], bytes, pool, i % 2 ? busy : quick));
            fill<<<COUNT / 512, 256, 0, i % 2 ? busy : quick>>>(held[i], COUNT / 2, round * 100000 + i * 1000);
        }
        for (unsigned i = 0; i < 4; ++i)
            CHECK(cudaMemcpyAsync(host + i * 16, held[i], 64, cudaMemcpyDeviceToHost, i % 2 ? busy : quick));
        for (unsigned i = 0; i < 4; ++i) CHECK(cudaFreeAsync(held[i], i % 2 ? busy : quick));
        cudaPointerAttributes attributes;
        CHECK(cudaPointerGetAttributes(&attributes, held[round % 4]));
        expect(attributes.type == cudaMemoryTypeUnregistered, "freed memory is no memory");
        if (round % 2) CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaDeviceSynchronize());
    for (unsigned i = 0; i < 64; ++i)
        expect(host[i] == 19 * 100000 + i / 16 * 1000 + i % 16, "each allocation has its own memory");
    expect(count_of(pool, cudaMemPoolAttrUsedMemCurrent) == 0, "all of it is freed");

    volatile unsigned *gate;
    CHECK(cudaHostAlloc((void **)&gate, sizeof *gate, cudaHostAllocMapped));
    *gate = 0;
    CHECK(cudaMallocFromPoolAsync(&held[0], BYTES, pool, busy));
    CHECK(cudaFreeAsync(held[0], busy));
    wait_for<<<1, 1, 0, busy>>>(gate);
    for (unsigned i = 1; i < 4; ++i) {
        CHECK(cudaMallocFromPoolAsync(&held[i], i * BYTES, pool, quick));
        fill<<<COUNT / 256, 256, 0, quick>>>(held[i], COUNT, i);
    }
    CHECK(cudaMemcpyAsync(host, held[1], 64, cudaMemcpyDeviceToHost, quick));
    CHECK(cudaStreamSynchronize(quick));
    for (unsigned i = 0; i < 16; ++i) expect(host[i] == 1 + i, "later work of another stream is not waited for");
    *gate = 1;
    for (unsigned i = 1; i < 4; ++i) CHECK(cudaFreeAsync(held[i], quick));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFreeHost((void *)gate));

    cudaStream_t gone;
    CHECK(cudaStreamCreate(&gone));
    CHECK(cudaMallocFromPoolAsync(&held[0], BYTES, pool, gone));
    CHECK(cudaFreeAsync(held[0], gone));
    CHECK(cudaStreamDestroy(gone));
    CHECK(cudaDeviceSynchronize());
    expect(count_of(pool, cudaMemPoolAttrUsedMemCurrent) == 0, "a destroyed stream's memory is freed");
    CHECK(cudaMemPoolTrimTo(pool, 0));
    expect(count_of(pool, cudaMemPoolAttrReservedMemCurrent) == 0, "and trimmed");
    CHECK(cudaMemPoolDestroy(pool));
}

static void statistics(cudaStream_t stream) {
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = 0;
    cudaMemPool_t pool;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    expect(count_of(pool, cudaMemPoolAttrReservedMemCurrent) == 0, "a new pool holds nothing");
    int reuse = 7;
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolReuseAllowOpportunistic, &reuse));
    expect(reuse == 1, "reuse is allowed");
    set(pool, cudaMemPoolAttrReleaseThreshold, UINT64_MAX);
    void *data;
    CHECK(cudaMallocFromPoolAsync(&data, 8 << 20, pool, stream));
    expect(count_of(pool, cudaMemPoolAttrUsedMemCurrent) == 8 << 20, "it counts what is used");
    const uint64_t held = count_of(pool, cudaMemPoolAttrReservedMemCurrent);
    expect(held >= 8 << 20, "it counts what it holds");
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, (char *)data + 5));
    expect(attributes.type == cudaMemoryTypeDevice && attributes.device == 0, "it is device memory");
    CHECK(cudaFreeAsync(data, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect(count_of(pool, cudaMemPoolAttrUsedMemCurrent) == 0, "nothing is used");
    expect(count_of(pool, cudaMemPoolAttrUsedMemHigh) == 8 << 20, "it counts the most that was used");
    expect(count_of(pool, cudaMemPoolAttrReservedMemCurrent) == held, "below the threshold it is kept");
    set(pool, cudaMemPoolAttrUsedMemHigh, 0);
    expect(count_of(pool, cudaMemPoolAttrUsedMemHigh) == 0, "the count starts again");
    CHECK(cudaMemPoolTrimTo(pool, 0));
    expect(count_of(pool, cudaMemPoolAttrReservedMemCurrent) == 0, "trimming gives it back");

    set(pool, cudaMemPoolAttrReleaseThreshold, 0);
    size_t before, between, after, total;
    // Other processes may allocate or free memory meanwhile; then it is measured again.
    for (int tries = 0;; ++tries) {
        CHECK(cudaMemGetInfo(&before, &total));
        CHECK(cudaMallocFromPoolAsync(&data, 8 << 20, pool, stream));
        CHECK(cudaMemGetInfo(&between, &total));
        CHECK(cudaFreeAsync(data, stream));
        CHECK(cudaStreamSynchronize(stream));
        expect(count_of(pool, cudaMemPoolAttrReservedMemCurrent) == 0, "a synchronization gives it back");
        CHECK(cudaMemGetInfo(&after, &total));
        if (between + (8 << 20) <= before && after >= before) break;
        expect(tries < 40, "free memory is what pools leave, and is back when they give it");
        usleep(500000);
    }
    CHECK(cudaMemPoolDestroy(pool));
}

static void lifetimes(cudaStream_t stream, unsigned *host) {
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.maxSize = 32 << 20;
    cudaMemPool_t pool, current, first;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    CHECK(cudaDeviceGetDefaultMemPool(&first, 0));
    CHECK(cudaDeviceGetMemPool(&current, 0));
    expect(current == first, "the default pool is the current one");
    CHECK(cudaDeviceSetMemPool(0, pool));
    CHECK(cudaDeviceGetMemPool(&current, 0));
    expect(current == pool, "another pool is the current one");
    unsigned *data, *more;
    CHECK(cudaMallocAsync(&data, 24 << 20, stream));
    expect(count_of(pool, cudaMemPoolAttrUsedMemCurrent) == 24 << 20, "the current pool is used");
    refused(cudaMallocAsync(&more, 24 << 20, stream), cudaErrorMemoryAllocation, "more than the pool may hold");
    CHECK(cudaMemPoolDestroy(pool));
    CHECK(cudaDeviceGetMemPool(&current, 0));
    expect(current == first, "the default pool is the current one again");
    fill<<<COUNT / 256, 256, 0, stream>>>(data, COUNT, 9);
    CHECK(cudaMemcpyAsync(host, data, 64, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaFreeAsync(data, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (unsigned i = 0; i < 16; ++i) expect(host[i] == 9 + i, "memory outlives its pool's handle");
}

static void refusals(cudaStream_t stream) {
    cudaMemPool_t pool;
    CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    void *data = &pool;
    CHECK(cudaMallocAsync(&data, 0, stream));
    expect(data == nullptr, "nothing is allocated for nothing");
    refused(cudaMallocAsync(&data, (size_t)1 << 50, stream), cudaErrorMemoryAllocation, "too much");
    CHECK(cudaMallocAsync(&data, 4096, stream));
    refused(cudaFreeAsync((char *)data + 256, stream), cudaErrorInvalidValue, "freeing the middle");
    CHECK(cudaFreeAsync(data, stream));
    refused(cudaFreeAsync(data, stream), cudaErrorInvalidValue, "freeing twice");
    CHECK(cudaMallocAsync(&data, 4096, stream));
    CHECK(cudaStreamSynchronize(stream));
    refused(cudaMemset(data, 0, 4097), cudaErrorInvalidValue, "past the end");
    CHECK(cudaFree(data));
    refused(cudaFree(data), cudaErrorInvalidValue, "freeing twice");
    CHECK(cudaMalloc(&data, 4096));
    CHECK(cudaFreeAsync(data, stream));
    CHECK(cudaStreamSynchronize(stream));
    cudaMemPoolProps properties = {};
    refused(cudaMemPoolCreate(&pool, &properties), cudaErrorInvalidValue, "a pool of nothing");
}

int main() {
    int supported = 0;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0));
    expect(supported == 1, "the device has pools");
    cudaStream_t first, second;
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    unsigned *host;
    CHECK(cudaMallocHost(&host, 64 << 10));
    in_order(first, host, 64);
    in_order(0, host, 8);
    waits_between(first, host);
    waits_between(0, host);
    across_streams(first, second, host);
    reuse_waits(first, second, host);
    freed_and_allocated(first, second, host);
    statistics(first);
    lifetimes(second, host);
    refusals(first);
    std::printf("PASS pools\n");
    return 0;
}
