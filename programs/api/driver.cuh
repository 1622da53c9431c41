// Helpers of programs that call the driver API: look its functions up by name at run time, as a program without a link
// to it does, and check their codes.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include <cuda.h>
#include <dlfcn.h>

// Declared in cudaProfiler.h, which not every installation has.
extern "C" CUresult CUDAAPI cuProfilerStart();
extern "C" CUresult CUDAAPI cuProfilerStop();

// Some of the functions under test are deprecated.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

inline void *driver_function(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        std::printf("FAIL: there is no %s: %s\n", name, dlerror());
        std::exit(1);
    }
    return found;
}

// cuda.h maps functions to their versions by macros, which must be expanded first.
#define DRIVER_NAME(name) #name
#define DRIVER(name) (reinterpret_cast<decltype(&name)>(driver_function(DRIVER_NAME(name))))

// Calls a function by its name in the library, where headers have another version under that name, or none.
template <typename... Arguments>
int call(const std::string &name, Arguments... arguments) {
    return reinterpret_cast<int (*)(Arguments...)>(driver_function(name.c_str()))(arguments...);
}

// Ends the program unless a function called by its name returns this code.
#define GIVES(code, name, ...)                                                                       \
    do {                                                                                             \
        const std::string called_name = name;                                                        \
        const int driver_code = call(called_name, ##__VA_ARGS__);                                    \
        if (driver_code != static_cast<int>(code)) {                                                 \
            std::printf("FAIL %s:%d: %s returned %d and not %d\n", __FILE__, __LINE__,               \
                        called_name.c_str(), driver_code, static_cast<int>(code));                   \
            std::exit(1);                                                                            \
        }                                                                                            \
    } while (0)

// Ends the program unless a call returns this code.
#define RETURNS(code, name, ...)                                                                     \
    do {                                                                                             \
        const int driver_code = static_cast<int>(DRIVER(name)(__VA_ARGS__));                         \
        if (driver_code != static_cast<int>(code)) {                                                 \
            std::printf("FAIL %s:%d: %s returned %d and not %d\n", __FILE__, __LINE__, #name,        \
                        driver_code, static_cast<int>(code));                                        \
            std::exit(1);                                                                            \
        }                                                                                            \
    } while (0)

#define WORKS(name, ...) RETURNS(CUDA_SUCCESS, name, ##__VA_ARGS__)

// Ends the program unless it holds.
#define HOLDS(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            std::printf("FAIL %s:%d: %s\n", __FILE__, __LINE__, #condition);   \
            std::exit(1);                                                      \
        }                                                                      \
    } while (0)
