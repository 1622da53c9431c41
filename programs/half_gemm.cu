// D = alpha A B + beta C in half precision, by the tensor cores: a warp computes one tile of 16 by 16.
#include "check.cuh"

#include <cmath>
#include <cstring>
#include <vector>

#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

constexpr int TILE = 16;
constexpr int WARPS = 4;
constexpr float ALPHA = 0.75f, BETA = -1.5f;

// A has its rows one after another, B its columns; all sizes are multiples of the tile's.
__global__ void half_gemm(const half *a, const half *b, const half *c, half *d, int m, int n, int k) {
    __shared__ float sums[WARPS][TILE * TILE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.y * TILE;
    const int column = (blockIdx.x * WARPS + warp) * TILE;
    if (column >= n) return;
    wmma::fragment<wmma::matrix_a, TILE, TILE, TILE, half, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, TILE, TILE, TILE, half, wmma::col_major> right;
    wmma::fragment<wmma::accumulator, TILE, TILE, TILE, float> sum;
    wmma::fill_fragment(sum, 0.0f);
    for (int i = 0; i < k; i += TILE) {
        wmma::load_matrix_sync(left, a + row * k + i, k);
        wmma::load_matrix_sync(right, b + column * k + i, k);
        wmma::mma_sync(sum, left, right, sum);
    }
    for (int i = 0; i < sum.num_elements; ++i) sum.x[i] *= ALPHA;
    wmma::store_matrix_sync(sums[warp], sum, TILE, wmma::mem_row_major);
    __syncwarp();
    for (int i = lane; i < TILE * TILE; i += 32) {
        const int at = (row + i / TILE) * n + column + i % TILE;
        d[at] = __float2half_rn(fmaf(BETA, __half2float(c[at]), sums[warp][i]));
    }
}

int main(int argc, char **argv) {
    const int tiles = size_argument(argc, argv, 3);
    const int m = tiles * TILE, n = (tiles + 3) * TILE, k = (tiles + 1) * TILE;
    std::vector<half> a(m * k), b(k * n), c(m * n), d(m * n);
    Random random(13);
    // Multiples of 1/64 below 1: their products and sums of these are exact in single precision, whatever order and
    // width the tensor cores add them in. Only D is rounded, once.
    const auto fill = [&](std::vector<half> &matrix) {
        for (half &element : matrix) {
            element = __float2half((static_cast<int>(random.next() & 127u) - 64) / 64.0f);
        }
    };
    fill(a);
    fill(b);
    fill(c);

    half *device_a, *device_b, *device_c, *device_d;
    CHECK(cudaMalloc(&device_a, a.size() * sizeof(half)));
    CHECK(cudaMalloc(&device_b, b.size() * sizeof(half)));
    CHECK(cudaMalloc(&device_c, c.size() * sizeof(half)));
    CHECK(cudaMalloc(&device_d, d.size() * sizeof(half)));
    CHECK(cudaMemcpy(device_a, a.data(), a.size() * sizeof(half), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_b, b.data(), b.size() * sizeof(half), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_c, c.data(), c.size() * sizeof(half), cudaMemcpyHostToDevice));
    const dim3 grid((n / TILE + WARPS - 1) / WARPS, m / TILE);
    half_gemm<<<grid, 32 * WARPS>>>(device_a, device_b, device_c, device_d, m, n, k);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(d.data(), device_d, d.size() * sizeof(half), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_a));
    CHECK(cudaFree(device_b));
    CHECK(cudaFree(device_c));
    CHECK(cudaFree(device_d));

    for (int row = 0; row < m; ++row) {
        for (int column = 0; column < n; ++column) {
            float sum = 0.0f;
            for (int i = 0; i < k; ++i) sum += __half2float(a[row * k + i]) * __half2float(b[column * k + i]);
            const half expected = __float2half(std::fmaf(BETA, __half2float(c[row * n + column]), ALPHA * sum));
            const half got = d[row * n + column];
            if (std::memcmp(&got, &expected, sizeof(half)) != 0) {
                std::printf("FAIL half_gemm: index %d,%d: %g, expected %g\n", row, column, __half2float(got),
                            __half2float(expected));
                return 1;
            }
        }
    }
    std::printf("PASS half_gemm %dx%dx%d\n", m, n, k);
    return 0;
}
