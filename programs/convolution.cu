// Each pixel with its surroundings weighted by a filter in constant memory; blocks read a tile with its halo.
#include "check.cuh"

#include <algorithm>
#include <cmath>
#include <vector>

constexpr int RADIUS = 2;
constexpr int SIDE = 2 * RADIUS + 1;
constexpr int TILE_X = 32, TILE_Y = 8;
constexpr int HALO_X = TILE_X + 2 * RADIUS, HALO_Y = TILE_Y + 2 * RADIUS;

__constant__ float filter[SIDE * SIDE];
// Initialised in the program's image, unlike the filter.
__constant__ float bias = 0.375f;

__global__ void convolve(const float *image, float *result, int width, int height) {
    __shared__ float tile[HALO_Y][HALO_X];
    const int left = blockIdx.x * TILE_X, top = blockIdx.y * TILE_Y;
    for (int i = threadIdx.y * TILE_X + threadIdx.x; i < HALO_X * HALO_Y; i += TILE_X * TILE_Y) {
        // Pixels beyond the edge have the values of the nearest pixels inside.
        const int x = min(max(left + i % HALO_X - RADIUS, 0), width - 1);
        const int y = min(max(top + i / HALO_X - RADIUS, 0), height - 1);
        tile[i / HALO_X][i % HALO_X] = image[y * width + x];
    }
    __syncthreads();
    const int x = left + threadIdx.x, y = top + threadIdx.y;
    if (x >= width || y >= height) return;
    float sum = bias;
    for (int row = 0; row < SIDE; ++row) {
        for (int column = 0; column < SIDE; ++column) {
            sum = fmaf(filter[row * SIDE + column], tile[threadIdx.y + row][threadIdx.x + column], sum);
        }
    }
    result[y * width + x] = sum;
}

int main(int argc, char **argv) {
    const int width = size_argument(argc, argv, 150);
    const int height = (width + 1) / 2;
    std::vector<float> image(width * height), result(width * height), weights(SIDE * SIDE);
    Random random(10);
    for (float &pixel : image) pixel = random.next() / 3.0e7f;
    for (float &weight : weights) weight = (random.fraction() - 0.5f) / 3.0f;

    const size_t bytes = image.size() * sizeof(float);
    float *device_image, *device_result;
    CHECK(cudaMalloc(&device_image, bytes));
    CHECK(cudaMalloc(&device_result, bytes));
    CHECK(cudaMemcpy(device_image, image.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpyToSymbol(filter, weights.data(), weights.size() * sizeof(float)));
    const dim3 grid((width + TILE_X - 1) / TILE_X, (height + TILE_Y - 1) / TILE_Y);
    convolve<<<grid, dim3(TILE_X, TILE_Y)>>>(device_image, device_result, width, height);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(result.data(), device_result, bytes, cudaMemcpyDeviceToHost));
    float device_bias = 0.0f;
    CHECK(cudaMemcpyFromSymbol(&device_bias, bias, sizeof(float)));
    CHECK(cudaFree(device_image));
    CHECK(cudaFree(device_result));

    for (int y = 0; y < height; ++y) {
        for (int x = 0; x < width; ++x) {
            // The same products in the same order, each rounded once with its sum.
            float expected = device_bias;
            for (int i = 0; i < SIDE * SIDE; ++i) {
                const int from_x = std::clamp(x + i % SIDE - RADIUS, 0, width - 1);
                const int from_y = std::clamp(y + i / SIDE - RADIUS, 0, height - 1);
                expected = std::fmaf(weights[i], image[from_y * width + from_x], expected);
            }
            const float got = result[y * width + x];
            if (got != expected) {
                std::printf("FAIL convolution: index %d,%d: %.9g, expected %.9g\n", y, x, got, expected);
                return 1;
            }
        }
    }
    std::printf("PASS convolution %dx%d filter %dx%d\n", width, height, SIDE, SIDE);
    return 0;
}
