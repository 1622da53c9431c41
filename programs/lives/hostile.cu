// A hostile process of a guest, as root: `session` overwrites its own session's memory in the window while it launches
// kernels, `streams` sends garbage on control streams, `window` overwrites the whole window.
#include "../check.cuh"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

constexpr const char *WINDOW = "/dev/dax0.0";
constexpr size_t SEGMENT = 2 << 20;
// Where the host waits for control streams.
constexpr unsigned CONTROL = 9000;

__global__ void count(unsigned *value) { atomicAdd(value, 1); }

struct Range {
    size_t offset, bytes;
};

// The parts of the window that this process has mapped.
static std::vector<Range> own() {
    std::vector<Range> ranges;
    std::FILE *maps = std::fopen("/proc/self/maps", "r");
    char line[512];
    while (maps && std::fgets(line, sizeof line, maps)) {
        unsigned long start, end, offset;
        char access[8];
        if (!std::strstr(line, WINDOW)) continue;
        if (std::sscanf(line, "%lx-%lx %7s %lx", &start, &end, access, &offset) != 4 || access[1] != 'w') continue;
        // The bootstrap, in the first segment, is shared by all sessions.
        const size_t before = offset < SEGMENT ? SEGMENT - offset : 0;
        if (end - start > before) ranges.push_back({offset + before, end - start - before});
    }
    if (maps) std::fclose(maps);
    return ranges;
}

// A mapping of this program's own.
static volatile uint64_t *mapped(Range range) {
    const int file = open(WINDOW, O_RDWR);
    void *at = mmap(nullptr, range.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(range.offset));
    close(file);
    return at == MAP_FAILED ? nullptr : static_cast<volatile uint64_t *>(at);
}

// Overwrites a mapping: words here and there, then all of them, some times.
static void overwrite(volatile uint64_t *words, size_t bytes, Random &random) {
    const size_t count = bytes / sizeof *words;
    const auto word = [&] {
        return static_cast<uint64_t>(random.next()) << 40 ^ static_cast<uint64_t>(random.next()) << 20 ^ random.next();
    };
    for (int round = 0; round < 20000; ++round) {
        // Cursors, slots and fences are at the start of a session's segment.
        const size_t within = round % 2 ? count : 8192;
        words[word() % within] = round % 3 ? word() : word() % 4096;
    }
    for (int round = 0; round < 4; ++round)
        for (size_t at = 0; at < count; ++at) words[at] = round == 0 ? ~uint64_t{0} : word();
}

static int session(Random &random) {
    unsigned *value;
    CHECK(cudaMalloc(&value, sizeof *value));
    CHECK(cudaMemset(value, 0, sizeof *value));
    CHECK(cudaDeviceSynchronize());
    const std::vector<Range> ranges = own();
    std::printf("hostile session: %zu ranges\n", ranges.size());
    std::fflush(stdout);
    if (ranges.empty()) return 1;
    std::thread([=] {
        // Errors of this session are expected, and ignored.
        for (;;) {
            count<<<1, 32>>>(value);
            unsigned seen;
            static_cast<void>(cudaMemcpy(&seen, value, sizeof seen, cudaMemcpyDeviceToHost));
        }
    }).detach();
    for (const Range range : ranges)
        if (auto *words = mapped(range)) overwrite(words, range.bytes, random);
    std::printf("hostile session: done\n");
    std::fflush(stdout);
    _exit(0);
}

static int window(Random &random) {
    const int sizes = open("/sys/bus/dax/devices/dax0.0/size", O_RDONLY);
    char text[32] = {};
    if (read(sizes, text, sizeof text - 1) <= 0) return 1;
    const size_t bytes = std::strtoull(text, nullptr, 10);
    auto *words = mapped({0, bytes});
    if (!words) return 1;
    overwrite(words, bytes, random);
    std::printf("hostile window: done with %zu bytes\n", bytes);
    return 0;
}

// A new stream to the host, or -1.
static int connected() {
    const int stream = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_vm host{};
    host.svm_family = AF_VSOCK;
    host.svm_cid = VMADDR_CID_HOST;
    host.svm_port = CONTROL;
    if (connect(stream, reinterpret_cast<sockaddr *>(&host), sizeof host) == 0) return stream;
    close(stream);
    return -1;
}

static void garbage(int stream, size_t bytes, Random &random) {
    std::vector<unsigned char> noise(bytes);
    for (unsigned char &byte : noise) byte = static_cast<unsigned char>(random.next());
    static_cast<void>(send(stream, noise.data(), bytes, MSG_NOSIGNAL | MSG_DONTWAIT));
}

static int streams(Random &random) {
    CHECK(cudaFree(nullptr));
    int kept = 0, refused = 0, sent = 0;
    for (int round = 0; round < 150; ++round) {
        const int stream = connected();
        if (stream < 0) {
            ++refused;
            continue;
        }
        // Nothing, a part of a message, much.
        garbage(stream, round % 3 == 0 ? 0 : round % 3 == 1 ? 5 : 64 << 10, random);
        if (round % 2) {
            close(stream);
        } else {
            ++kept;
        }
    }
    // Its own control stream, whichever descriptor that is.
    for (int descriptor = 3; descriptor < 64; ++descriptor) {
        int domain = 0;
        socklen_t length = sizeof domain;
        if (getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0 || domain != AF_VSOCK) continue;
        garbage(descriptor, 4096, random);
        ++sent;
    }
    std::printf("hostile streams: %d kept, %d refused, garbage on %d\n", kept, refused, sent);
    return 0;
}

int main(int argc, char **argv) {
    const std::string way = argc > 1 ? argv[1] : "";
    Random random(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1);
    if (way == "session") return session(random);
    if (way == "streams") return streams(random);
    if (way == "window") return window(random);
    std::printf("FAIL hostile: say session, streams or window\n");
    return 1;
}
