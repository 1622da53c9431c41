// Managed memory: one address for host and device, reached by both at the same time.
#include "../check.cuh"

#include <cstring>

__global__ void add(int *data, int count, int value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] += value;
}

// Answers the host's writes while it runs.
__global__ void answer(volatile int *question, volatile int *reply, int rounds) {
    for (int round = 1; round <= rounds; ++round) {
        while (*question != round) {}
        __threadfence_system();
        *reply = round * 3;
    }
}

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL managed: %s\n", what);
    std::exit(1);
}

static int range_attribute(cudaMemRangeAttribute attribute, const void *data, size_t bytes) {
    int value = 77;
    CHECK(cudaMemRangeGetAttribute(&value, sizeof value, attribute, data, bytes));
    return value;
}

int main() {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    expect(properties.managedMemory && properties.concurrentManagedAccess, "the device has it");
    const int count = 1 << 20;
    const size_t bytes = count * sizeof(int);
    int *data;
    CHECK(cudaMallocManaged(&data, bytes));
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, data + 5));
    expect(attributes.type == cudaMemoryTypeManaged, "its pointers say so");
    expect(attributes.hostPointer == data + 5 && attributes.devicePointer == data + 5, "one address");

    // The host writes, the device adds, the host reads.
    for (int i = 0; i < count; ++i) data[i] = i;
    add<<<count / 256, 256>>>(data, count, 1000);
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < count; ++i) expect(data[i] == i + 1000, "host and device see each other's writes");

    // Copies and fills take it for either end.
    int *device, *other;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMallocManaged(&other, bytes));
    CHECK(cudaMemcpy(device, data, bytes, cudaMemcpyDefault));
    CHECK(cudaMemset(data, 0, bytes));
    CHECK(cudaMemcpy(other, device, bytes, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpyAsync(data, other, bytes, cudaMemcpyDeviceToDevice));
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < count; ++i) expect(data[i] == i + 1000, "copies");
    CHECK(cudaMemsetAsync(data, 7, bytes));
    CHECK(cudaDeviceSynchronize());
    expect(data[count - 1] == 0x07070707, "fills");

    // At the same time.
    int *words;
    CHECK(cudaMallocManaged(&words, 2 * sizeof(int), cudaMemAttachHost));
    volatile int *question = words, *reply = words + 1;
    words[0] = words[1] = 0;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamAttachMemAsync(stream, words, 0, cudaMemAttachSingle));
    answer<<<1, 1, 0, stream>>>(question, reply, 20);
    for (int round = 1; round <= 20; ++round) {
        *question = round;
        while (*reply != round * 3) {}
    }
    CHECK(cudaStreamSynchronize(stream));

    // Advice and prefetches can be queried.
    const cudaMemLocation on_device = {cudaMemLocationTypeDevice, 0};
    const cudaMemLocation on_host = {cudaMemLocationTypeHost, 0};
    expect(range_attribute(cudaMemRangeAttributeLastPrefetchLocation, data, bytes) == cudaInvalidDeviceId, "no prefetch yet");
    CHECK(cudaMemPrefetchAsync(data, bytes / 2, on_device, 0, stream));
    expect(range_attribute(cudaMemRangeAttributeLastPrefetchLocation, data, bytes / 2) == 0, "one half");
    expect(range_attribute(cudaMemRangeAttributeLastPrefetchLocation, data, bytes) == cudaInvalidDeviceId, "not both");
    CHECK(cudaMemPrefetchAsync(data, bytes, on_host, 0, stream));
    expect(range_attribute(cudaMemRangeAttributeLastPrefetchLocation, data, bytes) == cudaCpuDeviceId, "the host");
    CHECK(cudaMemAdvise(data, bytes, cudaMemAdviseSetReadMostly, on_device));
    CHECK(cudaMemAdvise(data, bytes, cudaMemAdviseSetAccessedBy, on_device));
    expect(range_attribute(cudaMemRangeAttributeReadMostly, data, bytes) == 1, "read mostly");
    CHECK(cudaMemAdvise(data, 4096, cudaMemAdviseUnsetReadMostly, on_device));
    expect(range_attribute(cudaMemRangeAttributeReadMostly, data, bytes) == 0, "not everywhere");
    expect(range_attribute(cudaMemRangeAttributeReadMostly, data + 1024, bytes - 4096) == 1, "elsewhere still");
    int accessors[2];
    CHECK(cudaMemRangeGetAttribute(accessors, sizeof accessors, cudaMemRangeAttributeAccessedBy, data, bytes));
    expect(accessors[0] == 0 && accessors[1] == cudaInvalidDeviceId, "accessed by the device");
    CHECK(cudaStreamSynchronize(stream));
    expect(data[count - 1] == 0x07070707, "advice leaves the contents alone");

    expect(cudaMemPrefetchAsync(device, 4096, on_device, 0, stream) == cudaErrorInvalidValue, "device memory is not managed");
    expect(cudaMemPrefetchAsync(data, bytes + 1, on_device, 0, stream) == cudaErrorInvalidValue, "past the end");
    expect(cudaFreeHost(data) == cudaErrorInvalidValue, "it is not page-locked memory");
    CHECK(cudaFree(data));
    expect(cudaMemPrefetchAsync(data, 4096, on_device, 0, stream) == cudaErrorInvalidValue, "freed");
    CHECK(cudaFree(other));
    CHECK(cudaFree(words));
    CHECK(cudaFree(device));
    std::printf("PASS managed\n");
    return 0;
}
