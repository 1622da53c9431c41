// Lines of JSON that `cargo xtask bench workloads` reads: samples in nanoseconds, and results that must be the same
// however the program reaches its device.
#pragma once

#include "../check.cuh"

#include <chrono>
#include <cstdint>
#include <vector>

using Clock = std::chrono::steady_clock;
using Samples = std::vector<double>;

// Returns the nanoseconds of an operation.
template <typename Operation> double timed(Operation operation) {
    const Clock::time_point start = Clock::now();
    operation();
    return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

// Measures an operation, `parts` times a sample, after one that is not counted.
template <typename Operation> Samples measured(int samples, int parts, Operation operation) {
    operation();
    Samples times;
    for (int i = 0; i < samples; ++i) {
        const double took = timed([&] {
            for (int part = 0; part < parts; ++part) operation();
        });
        times.push_back(took / parts);
    }
    return times;
}

inline void print_device() {
    cudaDeviceProp properties;
    int version;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    CHECK(cudaDriverGetVersion(&version));
    std::printf("{\"device\": \"%s, CUDA %d.%d\"}\n", properties.name, version / 1000, version % 1000 / 10);
}

// Begins the steps whose processor time counts.
inline void print_begin() {
    std::puts("\"begin\"");
    std::fflush(stdout);
}

// Prints samples, and the number of steps since the beginning if their processor time counts.
inline void print_samples(const char *name, const char *with, const Samples &samples, size_t steps = 0) {
    std::printf("{\"samples\": {\"name\": \"%s\", \"with\": \"%s\", \"values\": [", name, with);
    for (size_t i = 0; i < samples.size(); ++i) std::printf("%s%.1f", i ? ", " : "", samples[i]);
    std::printf("]");
    if (steps) std::printf(", \"steps\": %zu", steps);
    std::printf("}}\n");
    std::fflush(stdout);
}

// Prints a hash of the bytes (FNV-1a).
inline void print_check(const char *name, const void *bytes, size_t count) {
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < count; ++i) {
        hash = (hash ^ static_cast<const unsigned char *>(bytes)[i]) * 0x100000001b3;
    }
    std::printf("{\"check\": {\"name\": \"%s\", \"value\": \"%016llx\"}}\n", name, static_cast<unsigned long long>(hash));
}
