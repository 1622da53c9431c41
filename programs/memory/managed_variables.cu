// Variables that host and device share by name.
#include "../check.cuh"

#include <cuda.h>

struct Pair {
    double first;
    int second[3];
};

__managed__ int counter = 5;
__managed__ int table[1000];
__managed__ Pair pair = {1.5, {1, 2, 3}};
__device__ int own = 7;

__global__ void use(int rounds) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 1000) table[i] += i * rounds;
    if (i == 0) {
        pair.first *= 2;
        pair.second[2] += own;
        own += 1;
    }
    atomicAdd(&counter, 1);
}

// Answers the host's writes while it runs.
__managed__ volatile int question, reply;
__global__ void answer(int rounds) {
    for (int round = 1; round <= rounds; ++round) {
        while (question != round) {}
        __threadfence_system();
        reply = round * 3;
    }
}

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL managed_variables: %s\n", what);
    std::exit(1);
}

int main() {
    // The host comes first: the image is loaded when the variable is.
    expect(counter == 5 && pair.first == 1.5 && pair.second[2] == 3 && table[999] == 0, "first values");
    counter = 100;
    table[3] = 1;
    use<<<8, 128>>>(2);
    CHECK(cudaDeviceSynchronize());
    expect(counter == 100 + 1024, "what both count");
    expect(table[3] == 7 && table[999] == 1998, "what both write");
    expect(pair.first == 3 && pair.second[2] == 10, "a structure");
    use<<<8, 128>>>(1);
    CHECK(cudaDeviceSynchronize());
    expect(counter == 100 + 2048 && pair.second[2] == 18, "once more");

    int count;
    CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
    expect(count == 2148, "copied by its symbol");
    CHECK(cudaMemset(table, 0, sizeof table));
    CHECK(cudaDeviceSynchronize());
    expect(table[999] == 0, "filled by its address");
    void *address;
    CHECK(cudaGetSymbolAddress(&address, table));
    expect(address == table, "one address");
    size_t bytes;
    CHECK(cudaGetSymbolSize(&bytes, table));
    expect(bytes == sizeof table, "its size");
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, &pair));
    expect(attributes.type == cudaMemoryTypeManaged && attributes.hostPointer == &pair, "its pointer says so");
    expect(cudaFree(&counter) == cudaErrorInvalidValue && cudaFree(table) == cudaErrorInvalidValue, "it stays");
    cudaGetLastError();

    // All devices share it.
    int devices;
    CHECK(cudaGetDeviceCount(&devices));
    for (int device = 1; device < devices; ++device) {
        CHECK(cudaSetDevice(device));
        counter = 3;
        use<<<8, 128>>>(2);
        CHECK(cudaDeviceSynchronize());
        expect(counter == 3 + 1024, "what another device counts");
        CHECK(cudaSetDevice(0));
        use<<<8, 128>>>(2);
        CHECK(cudaDeviceSynchronize());
        expect(counter == 3 + 2048, "and the first again");
    }

    const int rounds = 100;
    answer<<<1, 1>>>(rounds);
    for (int round = 1; round <= rounds; ++round) {
        question = round;
        while (reply != round * 3) {}
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaDeviceReset());
    std::printf("PASS managed_variables\n");
    return 0;
}
