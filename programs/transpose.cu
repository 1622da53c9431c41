// Transposes a matrix by tiles of shared memory; both matrices have padded rows and travel by 2D copies.
#include "check.cuh"

#include <vector>

constexpr int TILE = 32;
constexpr int ROWS = 8;

struct Matrix {
    double *elements;
    size_t pitch;
    __device__ double &at(int row, int column) const {
        return reinterpret_cast<double *>(reinterpret_cast<char *>(elements) + row * pitch)[column];
    }
};

__global__ void transpose(Matrix from, Matrix to, int width, int height) {
    // One more column, so that the threads of a warp have no bank conflicts.
    __shared__ double tile[TILE][TILE + 1];
    int column = blockIdx.x * TILE + threadIdx.x;
    int row = blockIdx.y * TILE + threadIdx.y;
    for (int i = 0; i < TILE; i += ROWS) {
        if (column < width && row + i < height) tile[threadIdx.y + i][threadIdx.x] = from.at(row + i, column);
    }
    __syncthreads();
    column = blockIdx.y * TILE + threadIdx.x;
    row = blockIdx.x * TILE + threadIdx.y;
    for (int i = 0; i < TILE; i += ROWS) {
        if (column < height && row + i < width) to.at(row + i, column) = tile[threadIdx.x][threadIdx.y + i];
    }
}

int main(int argc, char **argv) {
    const int width = size_argument(argc, argv, 250);
    const int height = (width * 2 + 2) / 3;
    const size_t row_bytes = width * sizeof(double), column_bytes = height * sizeof(double);
    std::vector<double> from(width * height), to(width * height);
    Random random(9);
    for (double &element : from) element = random.next() / 3.0;

    Matrix device_from, device_to;
    CHECK(cudaMallocPitch(&device_from.elements, &device_from.pitch, row_bytes, height));
    CHECK(cudaMallocPitch(&device_to.elements, &device_to.pitch, column_bytes, width));
    CHECK(cudaMemcpy2D(device_from.elements, device_from.pitch, from.data(), row_bytes, row_bytes, height,
                       cudaMemcpyHostToDevice));
    const dim3 grid((width + TILE - 1) / TILE, (height + TILE - 1) / TILE);
    transpose<<<grid, dim3(TILE, ROWS)>>>(device_from, device_to, width, height);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy2D(to.data(), column_bytes, device_to.elements, device_to.pitch, column_bytes, width,
                       cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_from.elements));
    CHECK(cudaFree(device_to.elements));

    for (int row = 0; row < width; ++row) {
        for (int column = 0; column < height; ++column) {
            const double got = to[row * height + column], expected = from[column * width + row];
            if (got != expected) {
                std::printf("FAIL transpose: index %d,%d: %g, expected %g\n", row, column, got, expected);
                return 1;
            }
        }
    }
    std::printf("PASS transpose %dx%d\n", width, height);
    return 0;
}
