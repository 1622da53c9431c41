// Kernels over CUDA's device libraries, for the integration tests. nvcc 13.0 compiles
// this file to `library.ptx`:
// nvcc -ptx -arch=compute_90 -O3 -std=c++17 library.cu -o library.ptx
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>
#include <cuda_fp16.h>

namespace cg = cooperative_groups;

extern "C" __global__ void sort_and_scan(const int *in, int *sorted, int *sums) {
    using Sort = cub::BlockRadixSort<int, 128, 4>;
    using Scan = cub::BlockScan<int, 128>;
    __shared__ union { typename Sort::TempStorage sort; typename Scan::TempStorage scan; } memory;
    int keys[4];
    for (int i = 0; i < 4; i++) keys[i] = in[threadIdx.x * 4 + i];
    Sort(memory.sort).Sort(keys);
    __syncthreads();
    for (int i = 0; i < 4; i++) sorted[threadIdx.x * 4 + i] = keys[i];
    int sum;
    Scan(memory.scan).InclusiveSum(in[threadIdx.x], sum);
    sums[threadIdx.x] = sum;
}

extern "C" __global__ void rounds(int *data, int n) {
    cg::grid_group grid = cg::this_grid();
    for (int round = 0; round < 4; round++) {
        for (int i = grid.thread_rank(); i < n; i += grid.size()) data[(i * 7 + round) % n] += i;
        grid.sync();
    }
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int sum = cg::reduce(tile, (int)tile.thread_rank(), cg::plus<int>());
    if (grid.thread_rank() == 0) data[n] = sum;
    if (threadIdx.x % 3 == 0) {
        auto active = cg::coalesced_threads();
        if (grid.thread_rank() == 0) data[n + 1] = active.size();
    }
}

extern "C" __global__ void functions(const double *in, double *out) {
    double x = in[threadIdx.x], *o = out + threadIdx.x * 12, a = fabs(x);
    o[0] = sin(x); o[1] = cos(x); o[2] = exp(x); o[3] = log(a + 1); o[4] = pow(a, 1.7); o[5] = tanh(x);
    o[6] = cbrt(x); o[7] = atan2(x, 2.0); o[8] = hypot(x, 3.0); o[9] = fmod(x, 0.7); o[10] = rint(x); o[11] = x / 3;
}

extern "C" __global__ void single_functions(const float *in, float *out) {
    float x = in[threadIdx.x], *o = out + threadIdx.x * 8, a = fabsf(x);
    o[0] = sinf(x); o[1] = __sinf(x); o[2] = expf(x); o[3] = logf(a + 1); o[4] = powf(a, 1.7f); o[5] = tanhf(x);
    o[6] = rsqrtf(a + 1); o[7] = __half2float(__hfma(__float2half(x), __float2half(2.f), __float2half(1.f)));
}

struct Big { int v[20]; };
__device__ __noinline__ Big make(int i, Big in) {
    Big b;
    for (int k = 0; k < 20; k++) b.v[k] = i * k + in.v[19 - k];
    return b;
}
extern "C" __global__ void aggregates(int *out, const __grid_constant__ Big p) {
    const int *q = p.v;
    Big b = make(threadIdx.x, p);
    int sum = 0;
    for (int k = 0; k < 20; k++) sum += b.v[k] * q[(k + threadIdx.x) % 20];
    out[threadIdx.x] = sum;
}

extern "C" __global__ void stack(int *out, int n) {
    int count = n + threadIdx.x % 5, *p = (int *)__builtin_alloca(count * 4), sum = 0;
    for (int i = 0; i < count; i++) p[i] = i * threadIdx.x;
    for (int i = 0; i < count; i++) sum += p[count - 1 - i] * i;
    out[threadIdx.x] = sum;
}
