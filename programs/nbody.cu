// Gravitation between all pairs of bodies, tile by tile through shared memory, for a few steps.
#include "check.cuh"

#include <cmath>
#include <utility>
#include <vector>

constexpr int BLOCK = 64;
constexpr int STEPS = 3;
constexpr float SOFTENING = 1.0f / 64, TIME = 1.0f / 128;

// Positions carry the mass as their fourth component.
__global__ void advance(const float4 *from, const float4 *velocities, float4 *to, float4 *velocities_to,
                        int count) {
    __shared__ float4 tile[BLOCK];
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    const float4 self = i < count ? from[i] : float4{};
    float ax = 0.0f, ay = 0.0f, az = 0.0f;
    for (int start = 0; start < count; start += BLOCK) {
        const int j = start + threadIdx.x;
        // Padding behind the last body has no mass.
        tile[threadIdx.x] = j < count ? from[j] : float4{};
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < BLOCK; ++k) {
            const float dx = tile[k].x - self.x, dy = tile[k].y - self.y, dz = tile[k].z - self.z;
            const float inverse = rsqrtf(dx * dx + dy * dy + dz * dz + SOFTENING);
            const float weight = tile[k].w * inverse * inverse * inverse;
            ax += dx * weight;
            ay += dy * weight;
            az += dz * weight;
        }
        __syncthreads();
    }
    if (i >= count) return;
    float4 velocity = velocities[i];
    velocity.x += ax * TIME;
    velocity.y += ay * TIME;
    velocity.z += az * TIME;
    velocities_to[i] = velocity;
    to[i] = float4{self.x + velocity.x * TIME, self.y + velocity.y * TIME, self.z + velocity.z * TIME, self.w};
}

struct Bodies {
    std::vector<float4> positions, velocities;
};

static const float &component(const float4 &vector, int axis) {
    return axis == 0 ? vector.x : axis == 1 ? vector.y : vector.z;
}

// Verifies one step against double precision: the first body that is wrong, or -1.
static int first_wrong(const Bodies &before, const Bodies &after) {
    const int count = static_cast<int>(before.positions.size());
    const double rounding = std::ldexp(1.0, -24);
    for (int i = 0; i < count; ++i) {
        const float4 self = before.positions[i];
        double sum[3] = {}, magnitude[3] = {}, partial_sums[3] = {};
        for (int j = 0; j < count; ++j) {
            const float4 other = before.positions[j];
            const double d[3] = {double(other.x) - self.x, double(other.y) - self.y, double(other.z) - self.z};
            const double square = d[0] * d[0] + d[1] * d[1] + d[2] * d[2] + SOFTENING;
            const double weight = other.w / (square * std::sqrt(square));
            for (int axis = 0; axis < 3; ++axis) {
                sum[axis] += d[axis] * weight;
                magnitude[axis] += std::fabs(d[axis] * weight);
                partial_sums[axis] += std::fabs(sum[axis]);
            }
        }
        for (int axis = 0; axis < 3; ++axis) {
            // rsqrtf errs by at most 2 ulp and enters three times: 12 roundings. Its argument has 6, which
            // count 3/2 times, the differences 1 each, the products 4. Each partial sum is rounded once.
            const double error = rounding * (32 * magnitude[axis] + partial_sums[axis]) * TIME;
            const double velocity = component(before.velocities[i], axis) + sum[axis] * TIME;
            const double got = component(after.velocities[i], axis);
            const double tolerance = error + 2 * rounding * std::fabs(velocity);
            if (!(std::fabs(got - velocity) <= tolerance)) return i;
            const double position = component(self, axis) + got * TIME;
            const double moved = component(after.positions[i], axis);
            if (!(std::fabs(moved - position) <= 2 * rounding * std::fabs(position))) return i;
        }
        if (after.positions[i].w != self.w) return i;
    }
    return -1;
}

int main(int argc, char **argv) {
    const int count = size_argument(argc, argv, 300);
    const size_t bytes = count * sizeof(float4);
    Bodies before{std::vector<float4>(count), std::vector<float4>(count)};
    Bodies after = before;
    Random random(5);
    for (float4 &position : before.positions) {
        position.x = 2.0f * random.fraction() - 1.0f;
        position.y = 2.0f * random.fraction() - 1.0f;
        position.z = 2.0f * random.fraction() - 1.0f;
        position.w = 0.25f + random.fraction();
    }

    float4 *positions[2], *velocities[2];
    for (int i = 0; i < 2; ++i) {
        CHECK(cudaMalloc(&positions[i], bytes));
        CHECK(cudaMalloc(&velocities[i], bytes));
    }
    CHECK(cudaMemcpy(positions[0], before.positions.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(velocities[0], 0, bytes));
    for (int step = 0; step < STEPS; ++step) {
        const int from = step % 2, to = 1 - from;
        advance<<<(count + BLOCK - 1) / BLOCK, BLOCK>>>(positions[from], velocities[from], positions[to],
                                                        velocities[to], count);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(after.positions.data(), positions[to], bytes, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(after.velocities.data(), velocities[to], bytes, cudaMemcpyDeviceToHost));
        const int wrong = first_wrong(before, after);
        if (wrong >= 0) {
            const float4 got = after.positions[wrong];
            std::printf("FAIL nbody: index %d in step %d: at %g %g %g\n", wrong, step, got.x, got.y, got.z);
            return 1;
        }
        std::swap(before, after);
    }
    for (int i = 0; i < 2; ++i) {
        CHECK(cudaFree(positions[i]));
        CHECK(cudaFree(velocities[i]));
    }
    std::printf("PASS nbody %d bodies %d steps\n", count, STEPS);
    return 0;
}
