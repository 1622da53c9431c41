// C = A * B in tiles of shared memory, with a barrier on each side of a tile's use.
#include "check.cuh"

#include <cmath>
#include <vector>

constexpr int TILE = 16;

__global__ void matrix_mul(const float *a, const float *b, float *c, int n) {
    __shared__ float tile_a[TILE][TILE];
    __shared__ float tile_b[TILE][TILE];
    const int row = blockIdx.y * TILE + threadIdx.y;
    const int column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < n; start += TILE) {
        const int k_a = start + threadIdx.x;
        const int k_b = start + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < n && k_a < n ? a[row * n + k_a] : 0.0f;
        tile_b[threadIdx.y][threadIdx.x] = k_b < n && column < n ? b[k_b * n + column] : 0.0f;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += tile_a[threadIdx.y][k] * tile_b[k][threadIdx.x];
        __syncthreads();
    }
    if (row < n && column < n) c[row * n + column] = sum;
}

int main(int argc, char **argv) {
    const int n = size_argument(argc, argv, 72);
    const size_t bytes = static_cast<size_t>(n) * n * sizeof(float);
    std::vector<float> a(n * n), b(n * n), c(n * n);
    Random random(2);
    for (int i = 0; i < n * n; ++i) {
        a[i] = random.fraction() - 0.5f;
        b[i] = random.fraction() - 0.5f;
    }

    float *device_a, *device_b, *device_c;
    CHECK(cudaMalloc(&device_a, bytes));
    CHECK(cudaMalloc(&device_b, bytes));
    CHECK(cudaMalloc(&device_c, bytes));
    CHECK(cudaMemcpy(device_a, a.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_b, b.data(), bytes, cudaMemcpyHostToDevice));
    const dim3 block(TILE, TILE);
    const dim3 grid((n + TILE - 1) / TILE, (n + TILE - 1) / TILE);
    matrix_mul<<<grid, block>>>(device_a, device_b, device_c, n);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(c.data(), device_c, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_a));
    CHECK(cudaFree(device_b));
    CHECK(cudaFree(device_c));

    for (int row = 0; row < n; ++row) {
        for (int column = 0; column < n; ++column) {
            double sum = 0.0;
            for (int k = 0; k < n; ++k) sum += double(a[row * n + k]) * b[k * n + column];
            const float got = c[row * n + column];
            // Each addend is below 1/4 and each single-precision addition rounds once.
            if (!(std::fabs(got - sum) <= 1e-6 * n)) {
                std::printf("FAIL matrix_mul: index %d,%d: %g, expected %g\n", row, column, got, sum);
                return 1;
            }
        }
    }
    std::printf("PASS matrix_mul %dx%d\n", n, n);
    return 0;
}
