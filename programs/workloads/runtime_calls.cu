// Calls of the runtime API, as a program waits for them: the same rows for each way in which they can be forwarded.
//
// The argument is the number of samples of a cheap call.
#include "lines.cuh"

#include <algorithm>
#include <cstring>

constexpr int burst = 100;

__global__ void nothing() {}

static void calls(int samples) {
    print_samples("cudaGetDevice", "", measured(samples / 10 + 1, burst, [] {
                      int device;
                      CHECK(cudaGetDevice(&device));
                  }));
    Samples times;
    for (int i = 0; i < samples / 20 + 1; ++i) {
        times.push_back(timed([] {
                            for (int launch = 0; launch < burst; ++launch) nothing<<<1, 1>>>();
                        }) / burst);
        CHECK(cudaDeviceSynchronize());
    }
    print_samples("empty kernel", "to the caller, bursts of 100", times);
    print_samples("empty kernel, cudaDeviceSynchronize", "", measured(samples, 1, [] {
                      nothing<<<1, 1>>>();
                      CHECK(cudaDeviceSynchronize());
                  }));
}

static void copies(int samples, char *device, char *host, const char *kind) {
    constexpr int mebibyte = 1 << 20;
    for (int mebibytes : {1, 256}) {
        const size_t bytes = static_cast<size_t>(mebibytes) * mebibyte;
        const int copies = std::min(samples, mebibytes == 1 ? 200 : 5);
        char with[64];
        std::snprintf(with, sizeof with, "%d MiB, %s", mebibytes, kind);
        for (size_t i = 0; i < bytes; ++i) host[i] = static_cast<char>(i * 7 + i / 4096);
        print_samples("cudaMemcpy to the device", with, measured(copies, 1, [&] {
                          CHECK(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
                      }));
        std::memset(host, 0, bytes);
        print_samples("cudaMemcpy to the host", with, measured(copies, 1, [&] {
                          CHECK(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
                      }));
        print_check(with, host, bytes);
    }
}

int main(int argc, char **argv) {
    const int samples = size_argument(argc, argv, 2000);
    const size_t bytes = 256 << 20;
    print_device();
    calls(samples);
    char *device, *pinned;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMallocHost(&pinned, bytes));
    std::vector<char> pageable(bytes);
    copies(samples, device, pageable.data(), "pageable");
    copies(samples, device, pinned, "pinned");
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(pinned));
    return 0;
}
