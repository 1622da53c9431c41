// A file of shared memory that two processes register: kernels of both, and the programs themselves, have the same
// bytes, while a thread of each goes on writing.
#include "../check.cuh"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

static const int COUNT = 100003, WRITTEN = 512;
// Its size is not a multiple of the page size.
struct Memory {
    int data[COUNT];
    std::uint64_t counted[WRITTEN];
    volatile int flags[2];
};

static const char *who = "";

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL shared_files: %s: %s\n", who, what);
    std::fflush(stdout);
    std::_Exit(1);
}

__global__ void add(int *data, int count, int value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] += value;
}

// Signals the other process's kernel, and waits for its signal.
__global__ void meet(volatile int *mine, volatile int *theirs, int round) {
    *mine = round;
    __threadfence_system();
    while (*theirs < round) {}
}

static Memory *map(int file) {
    void *memory = mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    expect(memory != MAP_FAILED, "the file is mapped");
    return static_cast<Memory *>(memory);
}

static Memory *device_address(Memory *memory) {
    void *device = nullptr;
    CHECK(cudaHostGetDevicePointer(&device, memory, 0));
    return static_cast<Memory *>(device);
}

static void turn(int socket) {
    char word = 'x';
    expect(write(socket, &word, 1) == 1 && read(socket, &word, 1) == 1, "the other process is there");
}

// Both processes do this, each with its own number.
static void run(int number, Memory *memory, int socket) {
    const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    const unsigned blocks = (COUNT + 255) / 256;
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> rounds{0};
    std::thread writer([&] {
        volatile std::uint64_t *words = memory->counted;
        while (!stop) {
            for (int i = number; i < WRITTEN; i += 2) words[i] = words[i] + 1;
            ++rounds;
        }
    });
    while (rounds == 0) std::this_thread::yield();
    CHECK(cudaHostRegister(memory, sizeof *memory, flags));
    Memory *device = device_address(memory);
    expect(cudaHostRegister(memory->data + 5, 4, 0) == cudaErrorHostMemoryAlreadyRegistered, "registered once");
    // Loaded before it has to run beside the other.
    add<<<1, 1>>>(device->data, 0, 0);
    CHECK(cudaDeviceSynchronize());
    turn(socket);
    for (int round = 0; round < 6; ++round) {
        if (round % 2 == number) {
            add<<<blocks, 256>>>(device->data, COUNT, 1 << round);
            CHECK(cudaDeviceSynchronize());
        }
        turn(socket);
        for (int i = 0; i < COUNT; ++i) {
            if (memory->data[i] != i + (2 << round) - 1) expect(false, "what either device wrote");
        }
        turn(socket);
    }
    // Kernels that run at the same time see each other's words.
    for (int round = 1; round <= 3; ++round) {
        meet<<<1, 1>>>(device->flags + number, device->flags + 1 - number, round);
        CHECK(cudaDeviceSynchronize());
    }
    turn(socket);
    // Copies to and from it, with checks of their data.
    int *own;
    CHECK(cudaMalloc(&own, COUNT * sizeof(int)));
    if (number == 0) {
        CHECK(cudaMemset(own, 0x22, COUNT * sizeof(int)));
        CHECK(cudaMemcpyAsync(memory->data, own, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
        CHECK(cudaDeviceSynchronize());
    }
    turn(socket);
    if (number == 1) {
        CHECK(cudaMemcpyAsync(own, memory->data, COUNT * sizeof(int), cudaMemcpyHostToDevice));
        int last = 0;
        CHECK(cudaMemcpy(&last, own + COUNT - 1, sizeof last, cudaMemcpyDeviceToHost));
        expect(last == 0x22222222, "what the other copied");
    }
    turn(socket);
    CHECK(cudaFree(own));
    // Registering and unregistering by either process loses no write of the writing threads.
    for (int round = 0; round < 20; ++round) {
        CHECK(cudaHostUnregister(memory));
        CHECK(cudaHostRegister(memory, sizeof *memory, flags));
    }
    CHECK(cudaHostUnregister(memory));
    void *none = nullptr;
    expect(cudaHostGetDevicePointer(&none, memory, 0) == cudaErrorInvalidValue, "it is the device's no more");
    stop = true;
    writer.join();
    for (int i = number; i < WRITTEN; i += 2) expect(memory->counted[i] == rounds, "no write is lost");
}

// Registers a part, not aligned to a page, of a file that has neither a name nor an open descriptor.
static void unnamed(int file) {
    const std::size_t bytes = 3 * 4096, start = 4096 + 64;
    // Memory that is allocated and not written yet, as NCCL's.
    expect(posix_fallocate(file, 0, bytes) == 0, "room");
    void *mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    expect(mapping != MAP_FAILED, "mapped");
    int *data = reinterpret_cast<int *>(static_cast<char *>(mapping) + start);
    CHECK(cudaHostRegister(data, 5000, cudaHostRegisterMapped));
    void *device = nullptr;
    CHECK(cudaHostGetDevicePointer(&device, data, 0));
    add<<<1, 32>>>(static_cast<int *>(device), 10, 3);
    CHECK(cudaDeviceSynchronize());
    int value = 0;
    expect(pread(file, &value, sizeof value, start) == sizeof value && value == 3, "the file has it");
    // The registration and the device's access outlive the mapping.
    munmap(mapping, bytes);
    add<<<1, 32>>>(static_cast<int *>(device), 10, 4);
    CHECK(cudaDeviceSynchronize());
    expect(pread(file, &value, sizeof value, start) == sizeof value && value == 7, "the file still has it");
    CHECK(cudaHostUnregister(data));
}

// Registers a file that the device does not reach.
static void for_copies(int file) {
    const std::size_t bytes = 4096;
    expect(ftruncate(file, bytes) == 0, "room");
    void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    expect(data != MAP_FAILED, "mapped");
    expect(cudaHostRegister(data, bytes, cudaHostRegisterMapped) == cudaErrorNotSupported, "the device does not reach it");
    CHECK(cudaHostRegister(data, bytes, cudaHostRegisterDefault));
    void *device = nullptr;
    expect(cudaHostGetDevicePointer(&device, data, 0) != cudaSuccess, "the device has no address for it");
    int *own;
    CHECK(cudaMalloc(&own, bytes));
    CHECK(cudaMemset(own, 0x33, bytes));
    CHECK(cudaMemcpy(data, own, bytes, cudaMemcpyDeviceToHost));
    int value = 0;
    expect(pread(file, &value, sizeof value, 1024) == sizeof value && value == 0x33333333, "the copy is there");
    CHECK(cudaFree(own));
    CHECK(cudaHostUnregister(data));
    munmap(data, bytes);
}

int main() {
    const char *name = "/dev/shm/wormhole-shared-files";
    char path[64];
    std::snprintf(path, sizeof path, "%s-%d", name, static_cast<int>(getpid()));
    const int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    expect(file >= 0, "a file");
    expect(ftruncate(file, sizeof(Memory)) == 0, "its size");
    int sockets[2];
    expect(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "sockets");
    const pid_t child = fork();
    who = child == 0 ? "child" : "parent";
    const int socket = sockets[child == 0];
    close(sockets[child != 0]);
    Memory *memory = map(file);
    if (child == 0) {
        // As NCCL does: the last process unlinks the name, and keeps a descriptor.
        turn(socket);
        unlink(path);
        run(1, memory, socket);
        std::exit(0);
    }
    for (int i = 0; i < COUNT; ++i) memory->data[i] = i;
    turn(socket);
    run(0, memory, socket);
    int status = 0;
    expect(waitpid(child, &status, 0) == child && status == 0, "the child ends well");
    unnamed(open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    // The device of a guest VM reaches files of the VM's own file system for shared memory.
    struct statfs system;
    expect(statfs("/dev/shm", &system) == 0, "/dev/shm is there");
    const int without = static_cast<int>(memfd_create("unnamed", MFD_CLOEXEC));
    const bool is_reached = system.f_type == 0x01021994;
    is_reached ? unnamed(without) : for_copies(without);
    std::printf("PASS shared_files\n");
    return 0;
}
