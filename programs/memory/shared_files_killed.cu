// Files of shared memory whose processes are killed while their kernels write: the process that is left goes on, and memory
// that the killed one had becomes another file's only when its kernel has ended. The parent has no device.
#include "../check.cuh"

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

// Its size is not a multiple of the page size.
static const int COUNT = 700001;
static const std::size_t BYTES = COUNT * sizeof(unsigned);
static const long OF_TMPFS = 0x01021994;

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL shared_files_killed: %s\n", what);
    std::fflush(stdout);
    std::_Exit(1);
}

__host__ __device__ static unsigned value(int round, int i) { return round * 0x9e3779b9u + i * 7919u; }

__global__ void fill(unsigned *data, int round, int first, int step) {
    for (int i = first + step * (blockIdx.x * blockDim.x + threadIdx.x); i < COUNT; i += step * gridDim.x * blockDim.x) {
        data[i] = value(round, i);
    }
}

__global__ void count_wrong(const unsigned *data, int round, unsigned *wrong) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < COUNT; i += gridDim.x * blockDim.x) {
        if (data[i] != value(round, i)) atomicAdd(wrong, 1);
    }
}

// Ends with its process.
__global__ void scribble(volatile unsigned *data, int first) {
    for (unsigned turn = 1;; ++turn) {
        for (int i = first; i < COUNT; i += 997) data[i] = turn;
    }
}

static unsigned *map(int file) {
    void *memory = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    expect(memory != MAP_FAILED, "the file is mapped");
    return static_cast<unsigned *>(memory);
}

// A file without a name, which only processes that inherit the descriptor have.
static int unnamed() {
    const int file = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    expect(file >= 0 && ftruncate(file, BYTES) == 0, "a file");
    return file;
}

static struct statfs shared_memory() {
    struct statfs system;
    expect(statfs("/dev/shm", &system) == 0, "/dev/shm is there");
    return system;
}

static void say(int socket) {
    const char word = 'x';
    expect(write(socket, &word, 1) == 1, "the other process is there");
}

static void hear(int socket) {
    char word;
    expect(read(socket, &word, 1) == 1, "the other process goes on");
}

static unsigned *device_address(unsigned *memory) {
    CHECK(cudaHostRegister(memory, BYTES, cudaHostRegisterMapped));
    void *device = nullptr;
    CHECK(cudaHostGetDevicePointer(&device, memory, 0));
    return static_cast<unsigned *>(device);
}

static void check(const unsigned *memory, const unsigned *device, unsigned *wrong, int round) {
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    count_wrong<<<8, 64>>>(device, round, wrong);
    unsigned found = 1;
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    expect(found == 0, "the device reads what both devices wrote");
    for (int i = 0; i < COUNT; ++i) {
        if (memory[i] != value(round, i)) expect(false, "the processor reads what both devices wrote");
    }
}

// Fills its half of the file in turns with the other process, and checks all of it. Then one process is killed.
static void share(int number, int file, int peer, int parent) {
    unsigned *memory = map(file), *wrong;
    close(file);
    unsigned *device = device_address(memory);
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    for (int round = 1; round <= 3; ++round) {
        fill<<<8, 64>>>(device, round, number, 2);
        CHECK(cudaDeviceSynchronize());
        say(peer);
        hear(peer);
        check(memory, device, wrong, round);
        say(peer);
        hear(peer);
    }
    if (number == 0) {
        scribble<<<1, 1>>>(device, 0);
        while (*static_cast<volatile unsigned *>(memory) == value(3, 0)) std::this_thread::yield();
        say(parent);
        for (;;) pause();
    }
    say(parent);
    hear(parent);
    // The killed kernel may not have ended yet: the last fill that holds is one after its end.
    for (int left = 1000; left > 0; --left) {
        fill<<<8, 64>>>(device, 4, 0, 1);
        CHECK(cudaDeviceSynchronize());
        usleep(20000);
        int i = 0;
        while (i < COUNT && memory[i] == value(4, i)) ++i;
        if (i == COUNT) break;
        expect(left > 1, "a killed process's kernel ends");
    }
    check(memory, device, wrong, 4);
    CHECK(cudaHostUnregister(memory));
    device = device_address(memory);
    fill<<<8, 64>>>(device, 5, 0, 1);
    CHECK(cudaDeviceSynchronize());
    check(memory, device, wrong, 5);
    std::exit(0);
}

static pid_t start(int number, int file, int peer, int parent) {
    const pid_t child = fork();
    expect(child >= 0, "a process");
    if (child == 0) share(number, file, peer, parent);
    return child;
}

static int end_of(pid_t child) {
    int status = 0;
    expect(waitpid(child, &status, 0) == child, "a child ends");
    return status;
}

static void one_is_killed() {
    const int file = unnamed();
    int peers[2], parents[2][2];
    expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, peers) == 0, "sockets");
    pid_t children[2];
    for (int number : {0, 1}) {
        expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, parents[number]) == 0, "sockets");
        children[number] = start(number, file, peers[number], parents[number][1]);
    }
    close(file);
    for (int number : {0, 1}) {
        close(peers[number]);
        close(parents[number][1]);
    }
    for (int number : {0, 1}) hear(parents[number][0]);
    expect(kill(children[0], SIGKILL) == 0 && WIFSIGNALED(end_of(children[0])), "one is killed");
    say(parents[1][0]);
    expect(end_of(children[1]) == 0, "the other goes on, and ends well");
    for (int number : {0, 1}) close(parents[number][0]);
}

// Takes all memory that is left, so that a new file has none but what another one gives back.
static int fill_up() {
    const int filler = unnamed();
    off_t end = 0;
    for (off_t bytes = 1 << 24; bytes >= 4096; bytes /= 4) {
        while (fallocate(filler, 0, end, bytes) == 0) end += bytes;
    }
    return filler;
}

// Writes as soon as there is memory.
static void put(int file, const unsigned *data, std::size_t bytes, off_t at) {
    for (int left = 100000; pwrite(file, data, bytes, at) != static_cast<ssize_t>(bytes); --left) {
        expect(errno == ENOSPC && left > 0, "memory is given back");
        usleep(200);
    }
}

// A file whose only process is killed. Afterwards its memory is another file's, which nothing but the parent writes.
static void the_only_one_is_killed(bool is_own) {
    const int file = unnamed();
    int sockets[2];
    expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0, "sockets");
    const pid_t child = fork();
    expect(child >= 0, "a process");
    if (child == 0) {
        unsigned *memory = map(file);
        close(file);
        scribble<<<1, 1>>>(device_address(memory), 0);
        while (*static_cast<volatile unsigned *>(memory) == 0) std::this_thread::yield();
        say(sockets[1]);
        for (;;) pause();
    }
    close(file);
    close(sockets[1]);
    static unsigned expected[COUNT / 2], found[COUNT / 2];
    for (int i = 0; i < COUNT / 2; ++i) expected[i] = value(9, i);
    hear(sockets[0]);
    const int filler = is_own ? fill_up() : -1, next = unnamed();
    expect(kill(child, SIGKILL) == 0 && WIFSIGNALED(end_of(child)), "it is killed");
    close(sockets[0]);
    put(next, expected, 16384, 0);
    put(next, expected, sizeof expected, 0);
    for (int turn = 0; turn < 30; ++turn) {
        usleep(10000);
        expect(pread(next, found, sizeof found, 0) == static_cast<ssize_t>(sizeof found), "read");
        expect(std::memcmp(found, expected, sizeof found) == 0, "nobody else writes to a new file");
    }
    close(next);
    if (is_own) close(filler);
}

int main() {
    const struct statfs before = shared_memory();
    // Elsewhere other processes use the file system too.
    const bool is_own = before.f_type != OF_TMPFS;
    for (int turn = 0; turn < 2; ++turn) {
        one_is_killed();
        the_only_one_is_killed(is_own);
    }
    for (int left = 1000; is_own && shared_memory().f_bfree < before.f_bfree; --left) {
        expect(left > 0, "all memory of the files is free again");
        usleep(20000);
    }
    std::printf("PASS shared_files_killed\n");
    return 0;
}
