// Managed memory that changes sides: every byte is right whatever host and device do in turn, or at the same time.
#include "../check.cuh"

#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <thread>
#include <unistd.h>
#include <vector>

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL residence: %s\n", what);
    std::exit(1);
}

// More than one part of 2 MiB, and not a whole number of them.
static const int COUNT = (2 << 20) / 4 + 12345;
static const size_t BYTES = COUNT * sizeof(unsigned);

__global__ void step(unsigned *data, int count, unsigned factor, unsigned term) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        data[i] = data[i] * factor + term;
}

static void launch(unsigned *data, unsigned factor, unsigned term, cudaStream_t stream = 0) {
    step<<<32, 128, 0, stream>>>(data, COUNT, factor, term);
    CHECK(cudaGetLastError());
}

static unsigned noise(unsigned &state) {
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
}

static void same(const unsigned *data, const std::vector<unsigned> &wanted, const char *what) {
    expect(std::memcmp(data, wanted.data(), BYTES) == 0, what);
}

// Whether all memory is advised to be read mostly, which changes nothing of what either side finds.
static bool is_mostly_read = false;

static unsigned *managed(size_t bytes = BYTES) {
    unsigned *data;
    CHECK(cudaMallocManaged(&data, bytes));
    if (is_mostly_read) CHECK(cudaMemAdvise(data, bytes, cudaMemAdviseSetReadMostly, {cudaMemLocationTypeDevice, 0}));
    return data;
}

// The host writes and reads all, the device changes all.
static void streaming() {
    unsigned *data = managed();
    std::vector<unsigned> wanted(COUNT);
    for (unsigned round = 1; round <= 4; ++round) {
        for (int i = 0; i < COUNT; ++i) data[i] = wanted[i] = i * round;
        launch(data, 3, round);
        CHECK(cudaDeviceSynchronize());
        for (unsigned &value : wanted) value = value * 3 + round;
        same(data, wanted, "streaming");
    }
    CHECK(cudaFree(data));
}

// The host changes words and reads others between kernels: one page in a hundred.
static void sparse(bool prefetch) {
    unsigned *data = managed();
    std::vector<unsigned> wanted(COUNT, 1);
    std::memcpy(data, wanted.data(), BYTES);
    unsigned state = 12345;
    for (unsigned round = 1; round <= 4; ++round) {
        if (prefetch) CHECK(cudaMemPrefetchAsync(data, BYTES, {cudaMemLocationTypeDevice, 0}, 0, 0));
        launch(data, 5, round);
        launch(data, 7, round);
        CHECK(cudaDeviceSynchronize());
        for (unsigned &value : wanted) value = (value * 5 + round) * 7 + round;
        for (int touch = 0; touch < 13; ++touch) {
            const unsigned at = noise(state) % COUNT, other = noise(state) % COUNT;
            expect(data[other] == wanted[other], "a word that the device wrote");
            data[at] = wanted[at] = noise(state);
        }
    }
    same(data, wanted, prefetch ? "sparse, prefetched" : "sparse");
    CHECK(cudaFree(data));
}

// One buffer is made by the host, one by the device, and they change roles; copies and fills take part.
static void producer_consumer() {
    unsigned *one = managed(), *two = managed(), *device;
    CHECK(cudaMalloc(&device, BYTES));
    std::vector<unsigned> wanted(COUNT), out(COUNT);
    for (unsigned round = 1; round <= 3; ++round) {
        for (int i = 0; i < COUNT; i += 7) one[i] = i + round;
        for (int i = 0; i < COUNT; ++i) wanted[i] = i % 7 ? (round == 1 ? 0 : one[i]) : i + round;
        if (round == 1) {
            CHECK(cudaMemset(one, 0, BYTES));
            for (int i = 0; i < COUNT; i += 7) one[i] = i + round;
        }
        launch(one, 1, round);
        for (unsigned &value : wanted) value += round;
        CHECK(cudaMemcpy(two, one, BYTES, cudaMemcpyDefault));
        same(two, wanted, "a copy between managed memory");
        CHECK(cudaMemcpy(device, two, BYTES, cudaMemcpyDefault));
        launch(device, 2, 0);
        CHECK(cudaMemcpy(out.data(), device, BYTES, cudaMemcpyDeviceToHost));
        for (unsigned &value : wanted) value *= 2;
        same(out.data(), wanted, "a copy to the device");
        CHECK(cudaMemcpy(two, out.data(), BYTES, cudaMemcpyHostToDevice));
        launch(two, 1, 1);
        CHECK(cudaMemcpy(out.data(), two, BYTES, cudaMemcpyDeviceToHost));
        for (unsigned &value : wanted) value += 1;
        same(out.data(), wanted, "a copy to the host");
        std::swap(one, two);
    }
    CHECK(cudaFree(one));
    CHECK(cudaFree(two));
    CHECK(cudaFree(device));
}

// Answers the host's questions while it runs: the payload first, then the number.
__global__ void answer(volatile unsigned *data, int question, int reply, int payload, unsigned rounds) {
    for (unsigned round = 1; round <= rounds; ++round) {
        while (data[question] != round) {}
        __threadfence_system();
        data[payload + 1] = data[payload] * 3;
        __threadfence_system();
        data[reply] = round;
    }
}

// A kernel and the host wait for each other. `before` kernels have run on the memory first. Only memory that no kernel
// has used keeps the order of the host's writes.
static void conversation(int before) {
    unsigned *data = managed();
    std::memset(data, 0, BYTES);
    for (int i = 0; i < before; ++i) {
        launch(data, 2, 0);
        CHECK(cudaDeviceSynchronize());
    }
    const int question = 5, reply = COUNT / 2, payload = COUNT - 10;
    const unsigned rounds = before ? 3 : 20;
    volatile unsigned *words = data;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    answer<<<1, 1, 0, stream>>>(data, question, reply, payload, rounds);
    CHECK(cudaGetLastError());
    for (unsigned round = 1; round <= rounds; ++round) {
        words[payload] = round * 11;
        std::atomic_thread_fence(std::memory_order_seq_cst);
        words[question] = round;
        while (words[reply] != round) {}
        if (!before) expect(words[payload + 1] == round * 33, "the kernel saw the payload");
    }
    CHECK(cudaStreamSynchronize(stream));
    expect(words[reply] == rounds, "the last reply stays");
    launch(data, 1, 1);
    CHECK(cudaDeviceSynchronize());
    expect(words[reply] == rounds + 1 && words[question] == rounds + 1, "and goes on");
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(data));
}

// System calls read and write memory that is on the device.
static void system_calls() {
    unsigned *data = managed();
    std::vector<unsigned> wanted(COUNT, 9);
    std::memcpy(data, wanted.data(), BYTES);
    char name[] = "/tmp/residence.XXXXXX";
    const int file = mkstemp(name);
    expect(file >= 0 && unlink(name) == 0, "a file");
    for (unsigned round = 1; round <= 3; ++round) {
        launch(data, 2, round);
        CHECK(cudaDeviceSynchronize());
        for (unsigned &value : wanted) value = value * 2 + round;
        expect(pwrite(file, data, BYTES, 0) == (ssize_t)BYTES, "write() from managed memory");
        std::vector<unsigned> read(COUNT);
        expect(pread(file, read.data(), BYTES, 0) == (ssize_t)BYTES, "read()");
        same(read.data(), wanted, "what write() took");
        launch(data, 0, 0);
        CHECK(cudaDeviceSynchronize());
        expect(pread(file, data, BYTES, 0) == (ssize_t)BYTES, "read() to managed memory");
    }
    same(data, wanted, "what read() put there");
    close(file);
    CHECK(cudaFree(data));
}

// Two threads use words of their own in the same pages, while a third has the device change others.
static void threads() {
    unsigned *data = managed();
    std::memset(data, 0, BYTES);
    std::atomic<bool> stop{false};
    std::atomic<int> at_work{0};
    auto count = [&](int offset) {
        unsigned rounds = 0;
        while (!stop) {
            for (int i = offset; i < COUNT; i += 64 << 10) {
                volatile unsigned *word = data + i;
                expect(*word == rounds, "a thread finds its own words");
                *word = rounds + 1;
            }
            if (++rounds == 2) ++at_work;
        }
        return rounds;
    };
    unsigned rounds[2];
    std::thread one([&] { rounds[0] = count(0); }), two([&] { rounds[1] = count(1); });
    // The device changes the words from 2 on, two to a thread's one: never the threads' own.
    unsigned launches = 0;
    while (at_work < 2 || launches < 10) {
        cudaMemcpy2D(data + 2, (64 << 10) * 4, data + 3, (64 << 10) * 4, 4, COUNT / (64 << 10), cudaMemcpyDefault);
        CHECK(cudaMemset2D(data + 3, (64 << 10) * 4, ++launches & 255, 4, COUNT / (64 << 10)));
        CHECK(cudaDeviceSynchronize());
    }
    stop = true;
    one.join();
    two.join();
    const unsigned byte = launches & 255;
    for (int i = 0; i + 4 < COUNT; i += 64 << 10) {
        expect(data[i] == rounds[0] && data[i + 1] == rounds[1], "no write of a thread is lost");
        if (i / (64 << 10) < COUNT / (64 << 10))
            expect(data[i + 3] == byte * 0x01010101u, "nor one of the device");
    }
    CHECK(cudaFree(data));
}

static void CUDART_CB add_ten(void *data) { static_cast<unsigned *>(data)[7] += 10; }

// A host function uses the memory between two kernels.
static void host_function() {
    unsigned *data = managed();
    std::vector<unsigned> wanted(COUNT, 1);
    std::memcpy(data, wanted.data(), BYTES);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    for (int round = 0; round < 2; ++round) {
        launch(data, 3, 0, stream);
        CHECK(cudaLaunchHostFunc(stream, add_ten, data));
        launch(data, 2, 0, stream);
        CHECK(cudaStreamSynchronize(stream));
        launch(data, 1, 0, stream);
        CHECK(cudaStreamSynchronize(stream));
        for (unsigned &value : wanted) value *= 3;
        wanted[7] += 10;
        for (unsigned &value : wanted) value *= 2;
    }
    same(data, wanted, "a host function between kernels");
    // The same on memory that is on the device.
    unsigned *other = managed();
    CHECK(cudaMemset(other, 0, BYTES));
    launch(other, 1, 5, stream);
    CHECK(cudaDeviceSynchronize());
    launch(other, 3, 0, stream);
    CHECK(cudaLaunchHostFunc(stream, add_ten, other));
    launch(other, 2, 0, stream);
    CHECK(cudaStreamSynchronize(stream));
    expect(other[7] == 50 && other[8] == 30, "a host function on memory of the device");
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(data));
    CHECK(cudaFree(other));
}

// A captured graph, and allocations that come and go.
static void graphs() {
    for (int round = 0; round < 3; ++round) {
        unsigned *data = managed(), *other = managed();
        std::vector<unsigned> wanted(COUNT, 3);
        std::memcpy(data, wanted.data(), BYTES);
        cudaStream_t stream;
        CHECK(cudaStreamCreate(&stream));
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        launch(data, 2, 1, stream);
        CHECK(cudaMemcpyAsync(other, data, BYTES, cudaMemcpyDefault, stream));
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&executable, graph, 0));
        for (int time = 0; time < 3; ++time) {
            data[time * 1000] = wanted[time * 1000] = 77;
            CHECK(cudaGraphLaunch(executable, stream));
            CHECK(cudaStreamSynchronize(stream));
            for (unsigned &value : wanted) value = value * 2 + 1;
            same(other, wanted, "a graph's copy");
        }
        same(data, wanted, "a graph's kernel");
        CHECK(cudaGraphExecDestroy(executable));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaStreamDestroy(stream));
        CHECK(cudaFree(data));
        CHECK(cudaFree(other));
    }
}

// Sums all words, each with a factor of its place.
__global__ void weigh(const unsigned *data, int count, unsigned *sum) {
    unsigned own = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        own += data[i] * (2 * i + 1);
    atomicAdd(sum, own);
}

__global__ void put(unsigned *data, int at, unsigned value) { data[at] = value; }

// Device and host read all of some parts in turn. Now and then one of them writes a few words.
static void mostly_read(bool prefetch) {
    const int count = 5 * (2 << 20) / 4 + 321;
    unsigned *data = managed(count * sizeof *data), *sum, found;
    CHECK(cudaMalloc(&sum, sizeof *sum));
    std::vector<unsigned> wanted(count);
    unsigned state = 4711;
    for (int i = 0; i < count; ++i) data[i] = wanted[i] = noise(state);
    for (unsigned round = 0; round < 40; ++round) {
        const unsigned kind = noise(state);
        // The device writes in one round of four, the host in another, both in a third.
        for (unsigned word = 0; kind & 1 && word <= round % 3; ++word) {
            const unsigned at = noise(state) % count;
            put<<<1, 1>>>(data, at, wanted[at] = noise(state));
            CHECK(cudaGetLastError());
        }
        CHECK(cudaMemset(sum, 0, sizeof *sum));
        weigh<<<16, 64>>>(data, count, sum);
        CHECK(cudaMemcpy(&found, sum, sizeof found, cudaMemcpyDeviceToHost));
        unsigned right = 0;
        for (int i = 0; i < count; ++i) right += wanted[i] * (2 * i + 1);
        expect(found == right, "the device finds all that the host wrote");
        for (unsigned word = 0; kind & 2 && word <= round % 3; ++word) {
            const unsigned at = noise(state) % count;
            if (kind & 4) expect(data[at] == wanted[at], "a word before the host writes it");
            data[at] = wanted[at] = noise(state);
        }
        if (kind & 24) {
            expect(!std::memcmp(data, wanted.data(), count * sizeof *data), "the host finds all that the device wrote");
        } else if (prefetch) {
            CHECK(cudaMemPrefetchAsync(data, count * sizeof *data, {cudaMemLocationTypeDevice, 0}, 0, 0));
        }
        // Advice may come and go at any time.
        if (is_mostly_read && round % 16 == 11) {
            const cudaMemoryAdvise advice = round & 16 ? cudaMemAdviseSetReadMostly : cudaMemAdviseUnsetReadMostly;
            CHECK(cudaMemAdvise(data, count * sizeof *data, advice, {cudaMemLocationTypeDevice, 0}));
        }
    }
    expect(!std::memcmp(data, wanted.data(), count * sizeof *data), "all that was written, in the end");
    CHECK(cudaFree(sum));
    CHECK(cudaFree(data));
}

int main() {
    for (int turn = 0; turn < 2; ++turn, is_mostly_read = true) {
        streaming();
        sparse(false);
        sparse(true);
        producer_consumer();
        conversation(0);
        conversation(3);
        system_calls();
        threads();
        host_function();
        graphs();
        mostly_read(false);
        mostly_read(true);
    }
    unsigned *left = managed();
    launch(left, 1, 1);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaDeviceReset());
    left = managed();
    left[0] = 5;
    launch(left, 2, 1);
    CHECK(cudaDeviceSynchronize());
    expect(left[0] == 11, "after a reset");
    std::printf("PASS residence\n");
    return 0;
}
