// Heat spreads over a plate, all steps in one cooperative launch: the whole grid meets after each.
#include "check.cuh"

#include <algorithm>
#include <vector>

#include <cooperative_groups.h>

namespace groups = cooperative_groups;

constexpr int BLOCK = 128;
constexpr int MOST_BLOCKS = 16;

__global__ void spread(float *plate, float *other, int side, int steps) {
    const groups::grid_group grid = groups::this_grid();
    for (int step = 0; step < steps; ++step) {
        for (int i = grid.thread_rank(); i < side * side; i += grid.size()) {
            const int row = i / side, column = i % side;
            const bool edge = row == 0 || column == 0 || row == side - 1 || column == side - 1;
            other[i] = edge ? plate[i]
                            : 0.25f * ((plate[i - 1] + plate[i + 1]) + (plate[i - side] + plate[i + side]));
        }
        grid.sync();
        float *const last = plate;
        plate = other;
        other = last;
    }
}

int main(int argc, char **argv) {
    const int side = size_argument(argc, argv, 48);
    int steps = 12;
    std::vector<float> plate(side * side), result(side * side);
    Random random(12);
    for (float &cell : plate) cell = random.next() / 3.0f;

    int device, cooperative, processors, resident;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device));
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, spread, BLOCK, 0));
    if (cooperative != 1 || resident < 1) {
        std::printf("FAIL grid_sync: cooperative launches: %d, resident blocks: %d\n", cooperative, resident);
        return 1;
    }

    const size_t bytes = plate.size() * sizeof(float);
    float *device_plate, *device_other;
    CHECK(cudaMalloc(&device_plate, bytes));
    CHECK(cudaMalloc(&device_other, bytes));
    CHECK(cudaMemcpy(device_plate, plate.data(), bytes, cudaMemcpyHostToDevice));
    void *arguments[] = {&device_plate, &device_other, const_cast<int *>(&side), &steps};
    const void *kernel = reinterpret_cast<const void *>(spread);
    const int fitting = processors * resident;
    CHECK(cudaLaunchCooperativeKernel(kernel, std::min(fitting, MOST_BLOCKS), BLOCK, arguments));
    // A grid that cannot be resident as a whole is refused at the call, and nothing else comes of it.
    const cudaError_t refusal = cudaLaunchCooperativeKernel(kernel, fitting + 1, BLOCK, arguments);
    if (refusal != cudaErrorCooperativeLaunchTooLarge || cudaGetLastError() != refusal) {
        std::printf("FAIL grid_sync: one block too many: %s\n", cudaGetErrorName(refusal));
        return 1;
    }
    const float *last = steps % 2 == 0 ? device_plate : device_other;
    CHECK(cudaMemcpy(result.data(), last, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_plate));
    CHECK(cudaFree(device_other));

    std::vector<float> next(plate);
    for (int step = 0; step < steps; ++step) {
        for (int row = 1; row < side - 1; ++row) {
            for (int column = 1; column < side - 1; ++column) {
                const int i = row * side + column;
                next[i] = 0.25f * ((plate[i - 1] + plate[i + 1]) + (plate[i - side] + plate[i + side]));
            }
        }
        std::swap(plate, next);
    }
    for (int i = 0; i < side * side; ++i) {
        if (result[i] != plate[i]) {
            std::printf("FAIL grid_sync: index %d,%d: %.9g, expected %.9g\n", i / side, i % side, result[i],
                        plate[i]);
            return 1;
        }
    }
    std::printf("PASS grid_sync %dx%d %d steps\n", side, side, steps);
    return 0;
}
