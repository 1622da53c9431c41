// Kernels with asynchronous copies and barriers in shared memory, for the integration tests.
// nvcc 13.0 compiles this file to `asynchronous.ptx`:
// nvcc -ptx -arch=compute_90 -O3 -std=c++17 asynchronous.cu -o asynchronous.ptx
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cuda/barrier>
#include <cuda/pipeline>

namespace cg = cooperative_groups;
#pragma nv_diag_suppress static_var_with_dynamic_init
using Barrier = cuda::barrier<cuda::thread_scope_block>;

// Reverses the 256 elements of each block, copied one, four or all at a time.
template <class Copy> __device__ void reverse(int *data, Copy copy) {
    __shared__ alignas(16) int tile[256];
    __shared__ Barrier barrier;
    if (threadIdx.x == 0) init(&barrier, blockDim.x);
    __syncthreads();
    copy(tile, data + blockIdx.x * 256, barrier);
    barrier.arrive_and_wait();
    data[blockIdx.x * 256 + threadIdx.x] = tile[255 - threadIdx.x];
}
extern "C" __global__ void by_element(int *data) {
    reverse(data, [](int *to, int *from, Barrier &b) { cuda::memcpy_async(to + threadIdx.x, from + threadIdx.x, 4, b); });
}
extern "C" __global__ void by_block(int *data) {
    reverse(data, [](int *to, int *from, Barrier &b) {
        cuda::memcpy_async(cg::this_thread_block(), to, from, cuda::aligned_size_t<16>(1024), b);
    });
}
extern "C" __global__ void by_group(int *data) {
    __shared__ alignas(16) int tile[256];
    cg::thread_block block = cg::this_thread_block();
    cg::memcpy_async(block, tile, data + blockIdx.x * 256, 1024);
    cg::wait(block);
    data[blockIdx.x * 256 + threadIdx.x] = tile[255 - threadIdx.x];
}

// Sums four tiles in a pipeline of two stages.
extern "C" __global__ void staged(const int *in, int *out) {
    __shared__ int tile[2][128];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    auto block = cg::this_thread_block();
    auto pipe = cuda::make_pipeline(block, &state);
    int sum = 0;
    for (int ahead = 0, i = 0; i < 4; i++) {
        for (; ahead < 4 && ahead < i + 2; ahead++) {
            pipe.producer_acquire();
            cuda::memcpy_async(block, tile[ahead & 1], in + ahead * 128, 512, pipe);
            pipe.producer_commit();
        }
        pipe.consumer_wait();
        sum += tile[i & 1][threadIdx.x ^ 1];
        pipe.consumer_release();
    }
    out[threadIdx.x] = sum;
}

// Passes values from the lanes of one warp to those of another, and between lanes of one warp.
extern "C" __global__ void handed_over(int *out) {
    __shared__ Barrier full, empty;
    __shared__ int box;
    if (threadIdx.x == 0) {
        init(&full, 1 + 1);
        init(&empty, 1 + 1);
    }
    __syncthreads();
    int producer = blockIdx.x == 0 ? 0 : 32, consumer = 31;
    if (threadIdx.x == producer) {
        for (int i = 0; i < 20; i++) {
            box = i * i;
            (void)full.arrive();
            empty.arrive_and_wait();
        }
        full.arrive_and_drop();
    } else if (threadIdx.x == consumer) {
        int sum = 0;
        for (int i = 0; i < 20; i++) {
            full.arrive_and_wait();
            sum += box;
            (void)empty.arrive();
        }
        out[blockIdx.x] = sum;
    }
}

// Makes the lanes of one warp take turns, by a flag in memory.
extern "C" __global__ void turns(volatile int *flag, int *out) {
    for (int round = 0; round < 3; round++) {
        int mine = round * blockDim.x + (blockDim.x - 1 - threadIdx.x);
        while (*flag != mine) {}
        out[mine] = threadIdx.x;
        __threadfence();
        *flag = mine + 1;
    }
}

extern "C" __global__ void clusters(int *out) {
    __shared__ int value;
    auto cluster = cg::this_cluster();
    if (threadIdx.x == 7) value = 40 + cluster.block_rank();
    cluster.sync();
    int *there = cluster.map_shared_rank(&value, cluster.num_blocks() - 1);
    auto token = cluster.barrier_arrive();
    int read = *there;
    cluster.barrier_wait(std::move(token));
    out[threadIdx.x] = read + cluster.query_shared_rank(&value) + cluster.dim_blocks().x;
}

extern "C" __global__ void wide_atomics(ulonglong2 *cell, float4 *sums) {
    ulonglong2 old = *cell;
    for (;;) {
        ulonglong2 wanted = make_ulonglong2(old.x + 1, old.y + old.x);
        ulonglong2 found = atomicCAS(cell, old, wanted);
        if (found.x == old.x && found.y == old.y) break;
        old = found;
    }
    atomicAdd(sums, make_float4(1, 2, 3, threadIdx.x));
    atomicAdd((float2 *)(sums + 1), make_float2(0.5f, 0.25f));
}
