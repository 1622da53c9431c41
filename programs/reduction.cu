// Sum and maximum: shuffles inside a warp, shared memory between warps, atomics between blocks.
#include "check.cuh"

#include <vector>

constexpr int BLOCK = 256;
constexpr unsigned ALL_LANES = 0xffffffffu;

struct Result {
    unsigned long long sum;
    int maximum;
    unsigned even;
};

__global__ void reduce(const int *values, int count, Result *result) {
    __shared__ long long warp_sums[BLOCK / 32];
    long long sum = 0;
    int maximum = -1;
    unsigned even = 0;
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < count; i += gridDim.x * BLOCK) {
        sum += values[i];
        maximum = max(maximum, values[i]);
        even += values[i] % 2 == 0;
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(ALL_LANES, sum, distance);
        maximum = max(maximum, __shfl_xor_sync(ALL_LANES, maximum, distance));
    }
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    if (lane == 0) {
        warp_sums[warp] = sum;
        atomicMax(&result->maximum, maximum);
    }
    atomicAdd(&result->even, even);
    __syncthreads();
    if (warp == 0) {
        sum = lane < BLOCK / 32 ? warp_sums[lane] : 0;
        for (int distance = BLOCK / 64; distance > 0; distance /= 2) {
            sum += __shfl_down_sync(ALL_LANES, sum, distance);
        }
        if (lane == 0) atomicAdd(&result->sum, static_cast<unsigned long long>(sum));
    }
}

int main(int argc, char **argv) {
    const int count = size_argument(argc, argv, 60001);
    std::vector<int> values(count);
    Random random(3);
    Result expected{0, -1, 0};
    for (int &value : values) {
        value = static_cast<int>(random.next() % 1000000u);
        expected.sum += value;
        expected.maximum = value > expected.maximum ? value : expected.maximum;
        expected.even += value % 2 == 0;
    }

    int *device_values;
    Result *device_result;
    CHECK(cudaMalloc(&device_values, count * sizeof(int)));
    CHECK(cudaMalloc(&device_result, sizeof(Result)));
    CHECK(cudaMemset(device_result, 0, sizeof(Result)));
    CHECK(cudaMemcpy(device_values, values.data(), count * sizeof(int), cudaMemcpyHostToDevice));
    reduce<<<8, BLOCK>>>(device_values, count, device_result);
    CHECK(cudaGetLastError());
    Result result;
    CHECK(cudaMemcpy(&result, device_result, sizeof(Result), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_values));
    CHECK(cudaFree(device_result));

    if (result.sum != expected.sum || result.maximum != expected.maximum || result.even != expected.even) {
        std::printf("FAIL reduction: sum %llu maximum %d even %u, expected %llu %d %u\n", result.sum,
                    result.maximum, result.even, expected.sum, expected.maximum, expected.even);
        return 1;
    }
    std::printf("PASS reduction %d elements sum %llu\n", count, result.sum);
    return 0;
}
