// Registered memory: the program's own pages, reached by the device in place, while a thread goes on writing them.
#include "../check.cuh"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <cuda.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

__global__ void add(int *data, int count, int value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] += value;
}

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL registered: %s\n", what);
    std::exit(1);
}

static int *device_address(void *pointer) {
    void *device = nullptr;
    CHECK(cudaHostGetDevicePointer(&device, pointer, 0));
    return static_cast<int *>(device);
}

// Device and host add to the same memory.
static void reached_by_both(int *data, int count) {
    for (int i = 0; i < count; ++i) data[i] = i;
    CHECK(cudaHostRegister(data, count * sizeof(int), cudaHostRegisterMapped));
    int *device = device_address(data);
    add<<<(count + 255) / 256, 256>>>(device, count, 5);
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < count; ++i) {
        expect(data[i] == i + 5, "the host sees what the device wrote");
        data[i] += 7;
    }
    add<<<(count + 255) / 256, 256>>>(device, count, 11);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemset(data, 1, sizeof(int)));
    CHECK(cudaMemcpy(device + 1, data, sizeof(int), cudaMemcpyDefault));
    expect(data[0] == 0x01010101 && data[1] == 0x01010101, "copies and fills take either address");
    void *found = nullptr;
    cudaDriverEntryPointQueryResult query;
    CHECK(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &found, 12000, cudaEnableDefault, &query));
    const auto write = reinterpret_cast<decltype(&cuStreamWriteValue32)>(found);
    expect(write(nullptr, reinterpret_cast<CUdeviceptr>(data + 3), 77, 0) == CUDA_SUCCESS, "a stream writes a word");
    CHECK(cudaDeviceSynchronize());
    expect(data[3] == 77, "the host sees what the stream wrote");
    data[3] = 3 + 23;
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, data + 2));
    expect(attributes.type == cudaMemoryTypeHost && attributes.devicePointer == device + 2, "the host's pointer");
    CHECK(cudaPointerGetAttributes(&attributes, device + 2));
    expect(attributes.type == cudaMemoryTypeHost && attributes.hostPointer == data + 2, "the device's pointer");
    expect(cudaHostRegister(data + 1, 4, 0) == cudaErrorHostMemoryAlreadyRegistered, "registered twice");
    expect(cudaHostUnregister(data + 1) == cudaErrorInvalidValue, "not its start");
    expect(cudaFreeHost(data) == cudaErrorInvalidValue, "it was not allocated");
    CHECK(cudaHostUnregister(data));
    expect(cudaHostUnregister(data) == cudaErrorHostMemoryNotRegistered, "unregistered twice");
    for (int i = 2; i < count; ++i) expect(data[i] == i + 23, "the contents stay when it is unregistered");
}

// A thread that adds to every word goes on while the memory is registered and unregistered again and again.
static void written_meanwhile(std::vector<std::uint64_t> &words) {
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> rounds{0};
    std::thread writer([&] {
        volatile std::uint64_t *place = words.data();
        while (!stop) {
            for (std::size_t i = 0; i < words.size(); i += 64) place[i] = place[i] + 1;
            ++rounds;
        }
    });
    while (rounds == 0) std::this_thread::yield();
    const std::size_t bytes = words.size() * sizeof words[0];
    int *counter;
    CHECK(cudaMalloc(&counter, sizeof(int)));
    for (int round = 0; round < 60; ++round) {
        CHECK(cudaHostRegister(words.data(), bytes, cudaHostRegisterMapped));
        CHECK(cudaMemcpyAsync(counter, words.data(), sizeof(int), cudaMemcpyHostToDevice));
        CHECK(cudaHostUnregister(words.data()));
    }
    stop = true;
    writer.join();
    CHECK(cudaFree(counter));
    for (std::size_t i = 0; i < words.size(); i += 64) expect(words[i] == rounds, "no write is lost");
}

// A forked child has a copy of the memory, and neither process sees the other's writes.
static void forked(int *data, int count) {
    for (int i = 0; i < count; ++i) data[i] = i;
    CHECK(cudaHostRegister(data, count * sizeof(int), cudaHostRegisterMapped));
    int there[2], back[2];
    expect(pipe(there) == 0 && pipe(back) == 0, "pipes");
    const pid_t child = fork();
    if (child == 0) {
        char go;
        bool right = true;
        for (int i = 0; i < count; ++i) {
            right = right && data[i] == i;
            data[i] = -1;
        }
        right = write(back[1], "x", 1) == 1 && read(there[0], &go, 1) == 1 && right;
        for (int i = 0; i < count; ++i) right = right && data[i] == -1;
        _exit(right ? 0 : 1);
    }
    char go;
    expect(read(back[0], &go, 1) == 1, "the child wrote");
    add<<<(count + 255) / 256, 256>>>(device_address(data), count, 100);
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < count; ++i) expect(data[i] == i + 100, "the child's writes stay with it");
    expect(write(there[1], "x", 1) == 1, "a word");
    int status = 0;
    expect(waitpid(child, &status, 0) == child && status == 0, "the child's memory is its own");
    CHECK(cudaHostUnregister(data));
}

// Memory that other processes share stays where it is: copies work, the device does not reach it.
static void shared(int count) {
    const std::size_t bytes = count * sizeof(int);
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    expect(memory != MAP_FAILED, "shared memory");
    int *data = static_cast<int *>(memory);
    for (int i = 0; i < count; ++i) data[i] = i;
    // The native driver maps it in place; the guest library returns NOT_SUPPORTED.
    const cudaError_t mapped = cudaHostRegister(data, bytes, cudaHostRegisterMapped);
    expect(mapped == cudaSuccess || mapped == cudaErrorNotSupported, "it is mapped, or cannot be");
    if (mapped != cudaSuccess) {
        CHECK(cudaHostRegister(data, bytes, cudaHostRegisterPortable));
        void *none = nullptr;
        expect(cudaHostGetDevicePointer(&none, data, 0) == cudaErrorInvalidValue, "the device has no address for it");
    }
    int *device;
    CHECK(cudaMalloc(&device, bytes));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    const pid_t child = fork();
    if (child == 0) {
        data[count - 1] = -7;
        _exit(0);
    }
    int status = 0;
    expect(waitpid(child, &status, 0) == child && status == 0, "the child");
    CHECK(cudaMemcpyAsync(device, data, bytes, cudaMemcpyHostToDevice, stream));
    add<<<(count + 255) / 256, 256, 0, stream>>>(device, count, 1);
    CHECK(cudaMemcpyAsync(data, device, bytes, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < count - 1; ++i) expect(data[i] == i + 1, "staged copies");
    expect(data[count - 1] == -6, "what a sharer wrote");
    CHECK(cudaHostUnregister(data));
    CHECK(cudaFree(device));
    munmap(memory, bytes);
}

int main() {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    expect(properties.hostRegisterSupported, "pages can be moved here");
    std::vector<int> small(300), large(3 << 20);
    reached_by_both(small.data() + 3, 200);
    reached_by_both(large.data() + 1001, (3 << 20) - 2000);
    std::vector<std::uint64_t> words(1 << 17);
    written_meanwhile(words);
    forked(large.data() + 77, 5000);
    forked(small.data(), 300);
    shared(20000);

    int on_stack[64] = {1};
    CHECK(cudaHostRegister(on_stack, sizeof on_stack, 0));
    CHECK(cudaHostUnregister(on_stack));
    void *hole = mmap(nullptr, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(static_cast<char *>(hole) + 4096, 4096);
    expect(cudaHostRegister(hole, 3 * 4096, 0) == cudaErrorInvalidValue, "a hole");
    expect(cudaHostRegister(nullptr, 4096, 0) == cudaErrorInvalidValue, "no memory");

    // Two registrations in one page, and memory that is unmapped while it is registered.
    void *page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int *first = static_cast<int *>(page), *second = first + 512;
    CHECK(cudaHostRegister(first, 400, cudaHostRegisterMapped));
    CHECK(cudaHostRegister(second, 400, cudaHostRegisterMapped));
    CHECK(cudaHostUnregister(first));
    second[0] = 5;
    add<<<1, 1>>>(device_address(second), 1, 6);
    CHECK(cudaDeviceSynchronize());
    expect(second[0] == 11, "the second is still registered");
    munmap(page, 4096);
    void *other = mmap(page, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    std::memset(other, 0x33, 4096);
    CHECK(cudaHostUnregister(second));
    expect(first[0] == 0x33333333 && second[0] == 0x33333333, "what came after it is left alone");
    std::printf("PASS registered\n");
    return 0;
}
