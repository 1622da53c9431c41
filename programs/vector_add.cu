// c = a + b, with an odd size so that the last block is not full.
#include "check.cuh"

#include <vector>

__global__ void vector_add(const float *a, const float *b, float *c, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef BROKEN_KERNEL
    // For the test that a wrong result is found out.
    if (i < count) c[i] = a[i] - b[i];
#else
    if (i < count) c[i] = a[i] + b[i];
#endif
}

int main(int argc, char **argv) {
    const int count = size_argument(argc, argv, 50000);
    const size_t bytes = count * sizeof(float);
    std::vector<float> a(count), b(count), c(count);
    Random random(1);
    for (int i = 0; i < count; ++i) {
        a[i] = random.fraction();
        b[i] = random.fraction();
    }

    float *device_a, *device_b, *device_c;
    CHECK(cudaMalloc(&device_a, bytes));
    CHECK(cudaMalloc(&device_b, bytes));
    CHECK(cudaMalloc(&device_c, bytes));
    CHECK(cudaMemcpy(device_a, a.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_b, b.data(), bytes, cudaMemcpyHostToDevice));
    vector_add<<<(count + 255) / 256, 256>>>(device_a, device_b, device_c, count);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(c.data(), device_c, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_a));
    CHECK(cudaFree(device_b));
    CHECK(cudaFree(device_c));

    for (int i = 0; i < count; ++i) {
        if (c[i] != a[i] + b[i]) {
            std::printf("FAIL vector_add: index %d: %g, expected %g\n", i, c[i], a[i] + b[i]);
            return 1;
        }
    }
    std::printf("PASS vector_add %d elements\n", count);
    return 0;
}
