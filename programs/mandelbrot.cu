// Iterations until a point of the plane escapes. Every rounding is written out, so host and device agree.
#include "check.cuh"

#include <cmath>
#include <vector>

constexpr int LIMIT = 128;
constexpr float LEFT = -2.125f, TOP = -1.25f, EXTENT = 2.75f;

// No product feeds a sum but in fmaf, which rounds once everywhere.
__host__ __device__ int iterations(int column, int row, float step) {
    const float re = fmaf(column, step, LEFT), im = fmaf(row, step, TOP);
    float x = re, y = im;
    int count = 0;
    while (count < LIMIT && fmaf(x, x, y * y) <= 4.0f) {
        const float next = fmaf(x, x, fmaf(-y, y, re));
        y = fmaf(2.0f * x, y, im);
        x = next;
        ++count;
    }
    return count;
}

__global__ void mandelbrot(int *counts, int width, int height, float step) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (column < width && row < height) counts[row * width + column] = iterations(column, row, step);
}

int main(int argc, char **argv) {
    const int width = size_argument(argc, argv, 150);
    const int height = (width * 10 + 10) / 11;
    const float step = EXTENT / width;
    std::vector<int> counts(width * height);

    int *device_counts;
    CHECK(cudaMalloc(&device_counts, counts.size() * sizeof(int)));
    const dim3 block(16, 8);
    const dim3 grid((width + block.x - 1) / block.x, (height + block.y - 1) / block.y);
    mandelbrot<<<grid, block>>>(device_counts, width, height, step);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(counts.data(), device_counts, counts.size() * sizeof(int), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_counts));

    long long total = 0;
    int inside = 0;
    for (int row = 0; row < height; ++row) {
        for (int column = 0; column < width; ++column) {
            const int got = counts[row * width + column];
            const int expected = iterations(column, row, step);
            if (got != expected) {
                std::printf("FAIL mandelbrot: index %d,%d: %d, expected %d\n", row, column, got, expected);
                return 1;
            }
            total += got;
            inside += got == LIMIT;
        }
    }
    std::printf("PASS mandelbrot %dx%d iterations %lld inside %d\n", width, height, total, inside);
    return 0;
}
