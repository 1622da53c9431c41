// Two translation units linked as device code: a function and a variable of the other unit, and names that
// both units have for themselves.
#include "../check.cuh"
#include "springs.cuh"

#include <vector>

static __device__ float scale = 0.5f;

__global__ void forces(const float *lengths, float *out, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = scale * pull(lengths[i]);
}

int main(int argc, char **argv) {
    const int count = size_argument(argc, argv, 10001);
    std::vector<float> lengths(count), found(count);
    Random random(11);
    for (float &length : lengths) length = random.fraction();

    const size_t bytes = count * sizeof(float);
    float *device_lengths, *device_found;
    CHECK(cudaMalloc(&device_lengths, bytes));
    CHECK(cudaMalloc(&device_found, bytes));
    CHECK(cudaMemcpy(device_lengths, lengths.data(), bytes, cudaMemcpyHostToDevice));
    forces<<<(count + 255) / 256, 256>>>(device_lengths, device_found, count);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(found.data(), device_found, bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < count; i++) {
        if (found[i] != 2.0f * lengths[i]) {
            std::printf("FAIL linked_units: force %d is %g, not %g\n", i, found[i], 2.0f * lengths[i]);
            return 1;
        }
    }
    // The variable has the value of its definition, in whatever unit it is named.
    int called = 0;
    CHECK(cudaMemcpyFromSymbol(&called, pulls, sizeof called));
    if (called != 1000 + count) {
        std::printf("FAIL linked_units: %d calls were counted, not %d\n", called - 1000, count);
        return 1;
    }
    CHECK(cudaFree(device_lengths));
    CHECK(cudaFree(device_found));
    std::printf("PASS linked_units\n");
    return 0;
}
