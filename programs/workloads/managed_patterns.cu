// Steps of programs that use managed memory, in six patterns, and checks of every byte.
//
// The argument is the number of samples, of one step each. The memory is 2 MiB for each multiprocessor of the device.
#include "lines.cuh"

#include <functional>

using Word = uint32_t;

constexpr int threads = 256;
constexpr size_t page = 4096, words_of_page = page / sizeof(Word);
constexpr size_t mebibyte = 1 << 20;

// The word that an element has before the first step.
__host__ __device__ inline Word first(size_t index) {
    return static_cast<Word>(index) * 2654435761u + 12345u;
}

// The element that an element reads in a step: any of the memory.
__host__ __device__ inline size_t source(size_t index, Word step, size_t count) {
    uint64_t mixed = (index + 1) * 0x9e3779b97f4a7c15 + step * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 29)) * 0x94d049bb133111eb;
    return (mixed >> 20) % count;
}

__device__ inline size_t thread() {
    return blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
}

__global__ void add_words(const Word *from, Word *to, size_t count) {
    const size_t index = thread();
    if (index < count) to[index] += from[index];
}

__global__ void gather(const Word *from, Word *to, size_t count, Word step) {
    const size_t index = thread();
    if (index < count) to[index] = from[source(index, step, count)];
}

__global__ void increase(Word *words, size_t count, Word by) {
    const size_t index = thread();
    if (index < count) words[index] += by;
}

static unsigned blocks(size_t count) {
    return static_cast<unsigned>((count + threads - 1) / threads);
}

static Word *managed(size_t count) {
    Word *words;
    CHECK(cudaMallocManaged(&words, count * sizeof(Word)));
    for (size_t i = 0; i < count; ++i) words[i] = first(i);
    return words;
}

static void done() {
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
}

// Ends the program unless each word is the expected one.
template <typename Expected> void verify(const char *pattern, const Word *words, size_t from, size_t to, Expected expected) {
    for (size_t i = from; i < to; ++i) {
        if (words[i] != expected(i)) {
            std::printf("FAIL %s: word %zu is %u, not %u\n", pattern, i, words[i], expected(i));
            std::exit(1);
        }
    }
}

static cudaMemLocation location(cudaMemLocationType kind) {
    cudaMemLocation place = {};
    place.type = kind;
    return place;
}

int main(int argc, char **argv) {
    const int samples = size_argument(argc, argv, 20);
    // One step is not counted.
    const Word steps = samples + 1;
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    const size_t bytes = 2 * mebibyte * properties.multiProcessorCount, count = bytes / sizeof(Word);
    print_device();

    const auto print = [&](const char *pattern, const std::function<void()> &step) {
        char with[64];
        std::snprintf(with, sizeof with, "managed memory, %zu MiB", bytes / mebibyte);
        print_begin();
        print_samples(pattern, with, measured(samples, 1, step), steps);
    };

    Word *x = managed(count), *y = managed(count);
    print("streaming kernel", [&] {
        add_words<<<blocks(count), threads>>>(x, y, count);
        done();
    });
    verify("streaming", y, 0, count, [&](size_t i) { return first(i) * (steps + 1); });

    Word step = 0;
    print("kernel with random reads", [&] {
        gather<<<blocks(count), threads>>>(x, y, count, ++step);
        done();
    });
    verify("random", y, 0, count, [&](size_t i) { return first(source(i, steps, count)); });

    // The processor writes a part, the device changes it, and the processor reads it.
    const size_t part = count / 16;
    step = 0;
    print("part of 1/16 from processor to device and back", [&] {
        const size_t from = ++step % 16 * part;
        for (size_t i = from; i < from + part; ++i) x[i] = first(i) + step;
        increase<<<blocks(part), threads>>>(x + from, part, 7);
        done();
        verify("producer", x, from, from + part, [&](size_t i) { return first(i) + step + 7; });
    });
    verify("producer", x, 0, count, [&](size_t i) {
        // The last step that wrote this part, or none.
        const Word behind = (steps + 16 - static_cast<Word>(i / part)) % 16;
        return behind >= steps ? first(i) : first(i) + steps - behind + 7;
    });
    CHECK(cudaFree(x));
    CHECK(cudaFree(y));

    x = managed(count);
    const cudaMemLocation host = location(cudaMemLocationTypeHost), device = location(cudaMemLocationTypeDevice);
    print("prefetch to device, kernel, prefetch to host", [&] {
        CHECK(cudaMemPrefetchAsync(x, bytes, device, 0, nullptr));
        increase<<<blocks(count), threads>>>(x, count, 3);
        CHECK(cudaMemPrefetchAsync(x, bytes, host, 0, nullptr));
        done();
    });
    verify("prefetch", x, 0, count, [&](size_t i) { return first(i) + 3 * steps; });
    CHECK(cudaFree(x));

    // In each step the processor reads and writes every hundredth page, beginning with another one.
    x = managed(count);
    step = 0;
    const auto written = [](size_t index, Word until) {
        return (until + 99 - static_cast<Word>(index / words_of_page % 100)) / 100;
    };
    print("kernel, and 1 % of the pages read and written by the processor", [&] {
        for (size_t at = step % 100 * words_of_page; at < count; at += 100 * words_of_page) {
            const size_t end = at + words_of_page;
            verify("pages", x, at, end, [&](size_t i) { return first(i) + step + 1000 * written(i, step); });
            for (size_t i = at; i < end; ++i) x[i] += 1000;
        }
        increase<<<blocks(count), threads>>>(x, count, 1);
        done();
        ++step;
    });
    verify("pages", x, 0, count, [&](size_t i) { return first(i) + steps + 1000 * written(i, steps); });
    CHECK(cudaFree(x));

    // Both sides read what is mostly read.
    x = managed(count), y = managed(count);
    CHECK(cudaMemAdvise(x, bytes, cudaMemAdviseSetReadMostly, device));
    print("kernel and processor read what is mostly read", [&] {
        add_words<<<blocks(count), threads>>>(x, y, count);
        done();
        for (size_t i = 0; i < count; i += words_of_page) verify("mostly read", x, i, i + 1, first);
    });
    verify("mostly read", y, 0, count, [&](size_t i) { return first(i) * (steps + 1); });
    CHECK(cudaFree(x));
    CHECK(cudaFree(y));
    return 0;
}
