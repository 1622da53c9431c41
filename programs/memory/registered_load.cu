// Registered memory under load: threads and system calls write to heap and stack memory, kernels to the same pages, while
// it is registered and unregistered again and again. Every byte is checked. With the argument `loop` a process goes on
// until it is killed; with `room` it says how much can be registered at a time.
#include "../check.cuh"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

__global__ void add(unsigned char *data, int count, int step, int value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i * step] = static_cast<unsigned char>(data[i * step] + value);
}

__global__ void store(int *word, int value) { *word = value; }

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL registered_load: %s\n", what);
    std::exit(1);
}

template <typename T>
static T *device_address(T *pointer) {
    void *device = nullptr;
    CHECK(cudaHostGetDevicePointer(&device, pointer, 0));
    return static_cast<T *>(device);
}

// Bytes between those that one writer writes. Byte 0 of each is the kernel's, 1 to 3 are the threads', 4 the system
// calls', and the others keep what they are.
constexpr int STEP = 64;
constexpr int THREADS = 3;

// The byte that belongs to no writer.
static unsigned char still(std::size_t i) { return static_cast<unsigned char>(i * 7 + i / 4096); }

static void write_by_threads(unsigned char *data, std::size_t bytes, int rounds) {
    for (std::size_t i = 0; i < bytes; ++i) data[i] = i % STEP <= THREADS + 1 ? 0 : still(i);
    std::atomic<bool> stop{false};
    std::atomic<int> working{0};
    std::vector<unsigned> turns(THREADS);
    std::vector<std::thread> writers;
    for (int own = 1; own <= THREADS; ++own) {
        writers.emplace_back([&, own] {
            volatile unsigned char *place = data + own;
            unsigned turn = 0;
            while (!stop) {
                // Not atomic additions: a lost write shows.
                for (std::size_t i = 0; i + own < bytes; i += STEP) place[i] = place[i] + 1;
                if (++turn == 1) ++working;
            }
            turns[own - 1] = turn;
        });
    }
    unsigned calls = 0;
    writers.emplace_back([&] {
        int ends[2];
        expect(pipe(ends) == 0, "a pipe");
        while (!stop) {
            ++calls;
            for (std::size_t i = 4; i < bytes; i += STEP * 64) {
                const unsigned char byte = static_cast<unsigned char>(calls);
                expect(write(ends[1], &byte, 1) == 1, "write to a pipe");
                expect(read(ends[0], data + i, 1) == 1, "a read into registered memory");
            }
            if (calls == 1) ++working;
        }
        close(ends[0]);
        close(ends[1]);
    });
    while (working < THREADS + 1) std::this_thread::yield();
    const int cells = static_cast<int>(bytes / STEP);
    for (int round = 0; round < rounds; ++round) {
        CHECK(cudaHostRegister(data, bytes, cudaHostRegisterMapped));
        add<<<(cells + 255) / 256, 256>>>(device_address(data), cells, STEP, 3);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaHostUnregister(data));
    }
    stop = true;
    for (std::thread &writer : writers) writer.join();
    for (std::size_t i = 0; i < bytes; ++i) {
        unsigned due = still(i);
        const std::size_t own = i % STEP;
        if (own == 0) due = i / STEP < static_cast<std::size_t>(cells) ? 3 * rounds : 0;
        else if (own <= THREADS) due = turns[own - 1];
        else if (own == THREADS + 1) due = i % (STEP * 64) == own ? calls : 0;
        if (data[i] == static_cast<unsigned char>(due)) continue;
        std::printf("FAIL registered_load: byte %zu is %u, not %u\n", i, data[i], due & 255);
        std::exit(1);
    }
}

// Words of four bytes on another thread's stack and in the heap, at every offset in a page's last bytes.
static void words() {
    std::atomic<int *> word{nullptr};
    std::atomic<bool> done{false};
    int read_back = 0;
    std::thread other([&] {
        int on_stack[5000];
        for (int &value : on_stack) value = 9;
        word = on_stack + 2500;
        while (!done) std::this_thread::yield();
        for (int i = 0; i < 5000; ++i) expect(i == 2500 || on_stack[i] == 9, "the words beside it");
        read_back = on_stack[2500];
    });
    while (word == nullptr) std::this_thread::yield();
    for (int round = 1; round <= 5; ++round) {
        CHECK(cudaHostRegister(word, sizeof(int), cudaHostRegisterMapped));
        store<<<1, 1>>>(device_address(word.load()), round * 1000);
        CHECK(cudaDeviceSynchronize());
        expect(*word == round * 1000, "a word on a stack");
        CHECK(cudaHostUnregister(word));
        expect(*word == round * 1000, "a word on a stack stays");
    }
    done = true;
    other.join();
    expect(read_back == 5000, "the thread sees its word");

    std::vector<unsigned char> heap(3 * 4096, 0x5a);
    const std::uintptr_t page = (reinterpret_cast<std::uintptr_t>(heap.data()) + 4096) & ~std::uintptr_t{4095};
    for (int offset = 4088; offset <= 4096; ++offset) {
        int *place = reinterpret_cast<int *>(page + offset - 4);
        unsigned char *bytes = reinterpret_cast<unsigned char *>(place);
        CHECK(cudaHostRegister(place, 4, cudaHostRegisterMapped));
        add<<<1, 32>>>(device_address(bytes), 4, 1, 1);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaHostUnregister(place));
        for (int i = 0; i < 4; ++i) expect(bytes[i] == 0x5b, "four bytes of the heap");
        std::memset(place, 0x5a, 4);
    }
    for (const unsigned char byte : heap) expect(byte == 0x5a, "the bytes beside them");
}

// Registers and unregisters while other threads write, until the process is killed.
[[noreturn]] static void loop() {
    std::vector<unsigned char> data((2 << 20) + 12345);
    std::printf("looping\n");
    std::fflush(stdout);
    for (;;) write_by_threads(data.data() + 77, data.size() - 77, 20);
}

// Prints how many pieces of a MiB the device reaches at a time.
static void room() {
    constexpr std::size_t PIECE = 1 << 20;
    constexpr int MOST = 1 << 14;
    void *memory = mmap(nullptr, PIECE * MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    expect(memory != MAP_FAILED, "addresses");
    unsigned char *bytes = static_cast<unsigned char *>(memory);
    int pieces = 0;
    while (pieces < MOST && cudaHostRegister(bytes + PIECE * pieces, PIECE, cudaHostRegisterMapped) == cudaSuccess) ++pieces;
    cudaGetLastError();
    for (int piece = 0; piece < pieces; ++piece) CHECK(cudaHostUnregister(bytes + PIECE * piece));
    std::printf("room for %d MiB\n", pieces);
}

int main(int argc, char **argv) {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    expect(properties.hostRegisterSupported, "pages can be moved here");
    if (argc > 1 && std::strcmp(argv[1], "loop") == 0) loop();
    if (argc > 1 && std::strcmp(argv[1], "room") == 0) {
        room();
        return 0;
    }
    words();
    std::vector<unsigned char> heap(200000);
    write_by_threads(heap.data() + 1, heap.size() - 1, 12);
    const std::size_t pages = 1 << 20;
    void *mapped = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    expect(mapped != MAP_FAILED, "pages");
    write_by_threads(static_cast<unsigned char *>(mapped), pages, 12);
    std::printf("PASS registered_load\n");
    return 0;
}
