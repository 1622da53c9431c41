// Shared by all programs: error checks that name the call, and the closing line.
#pragma once

#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

// Ends the program with one line that names the call and its error.
#define CHECK(call)                                                                     \
    do {                                                                                \
        const cudaError_t check_error = (call);                                         \
        if (check_error != cudaSuccess) {                                               \
            std::printf("FAIL %s:%d: %s: %s (%s)\n", __FILE__, __LINE__, #call,         \
                        cudaGetErrorName(check_error), cudaGetErrorString(check_error)); \
            std::exit(1);                                                               \
        }                                                                               \
    } while (0)

// Prints and returns the error of a call.
#define REPORT(call) report_call(#call, (call))

inline cudaError_t report_call(const char *call, cudaError_t error) {
    std::printf("%s: %s\n", call, cudaGetErrorName(error));
    std::fflush(stdout);
    return error;
}

// Returns the first argument as a positive number, or `otherwise` without one.
inline int size_argument(int argc, char **argv, int otherwise) {
    if (argc < 2) return otherwise;
    const int size = std::atoi(argv[1]);
    if (size <= 0) {
        std::printf("FAIL %s: the size must be a positive number, not '%s'\n", argv[0], argv[1]);
        std::exit(1);
    }
    return size;
}

// A small reproducible generator, the same on every machine.
struct Random {
    unsigned state;
    explicit Random(unsigned seed) : state(seed) {}
    unsigned next() {
        state = state * 1664525u + 1013904223u;
        return state >> 8;
    }
    // In [0, 1), a multiple of 2^-10: sums and products of a few are exact in single precision.
    float fraction() { return static_cast<float>(next() & 1023u) / 1024.0f; }
};
