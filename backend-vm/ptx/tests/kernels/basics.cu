// Kernels of the integration tests. nvcc 13.0 compiles this file to `basics.ptx`:
// nvcc -ptx -arch=compute_90 -O3 basics.cu -o basics.ptx
#include <cassert>
#include <cstdio>
#include <cstdint>

__device__ int counter = 5;
__device__ int *counter_address = &counter;
__constant__ float weights[4] = {0.5f, 1.5f, 2.5f, 3.5f};

extern "C" __global__ void vector_add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i] * weights[i & 3];
}

extern "C" __global__ void matrix_mul(const float *a, const float *b, float *c, int n) {
    __shared__ float ta[16][16], tb[16][16];
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    float sum = 0;
    for (int t = 0; t < n / 16; t++) {
        ta[threadIdx.y][threadIdx.x] = a[y * n + t * 16 + threadIdx.x];
        tb[threadIdx.y][threadIdx.x] = b[(t * 16 + threadIdx.y) * n + x];
        __syncthreads();
        for (int k = 0; k < 16; k++) sum += ta[threadIdx.y][k] * tb[k][threadIdx.x];
        __syncthreads();
    }
    c[y * n + x] = sum;
}

extern "C" __global__ void reduce_sum(const int *in, unsigned long long *out, int n) {
    extern __shared__ long long partial[];
    long long sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += in[i];
    for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / 32; w++) sum += partial[w];
        atomicAdd(out, (unsigned long long)sum);
    }
}

extern "C" __global__ void spin_lock(int *lock, int *value) {
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            *(volatile int *)value += 1;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}

// Takes a spin lock, which deadlocks unless the threads of a warp make independent progress.
extern "C" __global__ void spin_lock_hard(int *lock, int *value) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    *(volatile int *)value += 1;
    __threadfence();
    atomicExch(lock, 0);
}

extern "C" __global__ void diverge(int *out) {
    int i = threadIdx.x, v = 0;
    for (int k = 0; k <= i; k++) {
        if (k % 3 == 0) v += k;
        else if (k % 3 == 1) v ^= k * 7;
        else { v -= 2; if (v < -100) break; }
    }
    switch (i % 7) {
        case 0: v += 1; break;
        case 1: v *= 3; break;
        case 2: v -= i; break;
        case 3: v = ~v; break;
        case 4: v <<= 2; break;
        case 5: v = v / 3; break;
        default: v %= 11;
    }
    out[i] = v;
}

__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
extern "C" __global__ void recursion(int *out) { out[threadIdx.x] = fibonacci(threadIdx.x % 12); }

struct Shape { __device__ virtual float area() const { return 0; } };
struct Square : Shape { float s; __device__ Square(float s) : s(s) {} __device__ float area() const override { return s * s; } };
struct Disc : Shape { float r; __device__ Disc(float r) : r(r) {} __device__ float area() const override { return 3.0f * r * r; } };
extern "C" __global__ void virtual_calls(float *out) {
    Square q(threadIdx.x); Disc d(threadIdx.x);
    Shape *s = threadIdx.x % 2 ? (Shape *)&q : (Shape *)&d;
    out[threadIdx.x] = s->area();
}

__device__ __noinline__ int twice(int x) { return 2 * x; }
__device__ __noinline__ int thrice(int x) { return 3 * x; }
typedef int (*Function)(int);
__device__ Function table[2] = {twice, thrice};
extern "C" __global__ void function_pointers(int *out) { out[threadIdx.x] = table[threadIdx.x % 2](threadIdx.x); }

extern "C" __global__ void hello(int n) {
    if (threadIdx.x < n) printf("block %d thread %d: %5.2f %s %c %lld %u%%\n", blockIdx.x, threadIdx.x, threadIdx.x * 1.5, "text", 'x', -5000000000ll, 7u);
}

extern "C" __global__ void asserts(int n) { assert(threadIdx.x < n); }
extern "C" __global__ void traps() { if (threadIdx.x == 3) __trap(); }
extern "C" __global__ void wild(int *p) { p[1ll << 40] = 1; }
extern "C" __global__ void misaligned(char *p) { *(int *)(p + 1) = 1; }

extern "C" __global__ void spin(long long cycles, long long *out) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    if (out) out[0] = clock64() - start;
}
extern "C" __global__ void forever(volatile int *stop) { while (!*stop) __nanosleep(1000); }

extern "C" __global__ void heap(int **out) {
    int *p = (int *)malloc(sizeof(int) * 4);
    for (int i = 0; i < 4; i++) p[i] = threadIdx.x + i;
    int sum = p[0] + p[1] + p[2] + p[3];
    free(p);
    out[threadIdx.x] = (int *)(long long)sum;
}

extern "C" __global__ void through_pointer(int *out) { *counter_address += 37; out[0] = counter; }

extern "C" __global__ void warps(unsigned *out) {
    unsigned i = threadIdx.x, full = 0xffffffffu;
    unsigned *o = out + i * 12;
    o[0] = __ballot_sync(full, i % 3 == 0);
    o[1] = __any_sync(full, i == 31);
    o[2] = __all_sync(full, i < 31);
    o[3] = __shfl_up_sync(full, i * 10, 3);
    o[4] = __shfl_xor_sync(full, i * 10, 5);
    o[5] = __shfl_sync(full, i * 10, 9, 8);
    o[6] = __match_any_sync(full, i / 5);
    int all; o[7] = __match_all_sync(full, 42, &all) + all;
    o[8] = __reduce_add_sync(full, i);
    o[9] = __reduce_max_sync(full, i ^ 21);
    o[10] = __activemask();
    if (i < 16) o[11] = __shfl_down_sync(0xffffu, i, 1); else o[11] = __shfl_down_sync(0xffff0000u, i, 1);
}

extern "C" __global__ void split_sync(int *out) {
    int i = threadIdx.x, v;
    if (i & 1) { v = i * 3; __syncwarp(); } else { v = i * 5; __syncwarp(); }
    __shared__ int s[64];
    s[i] = v;
    __syncthreads();
    out[i] = s[63 - i] + __syncthreads_count(i % 4 == 0) + __syncthreads_or(i == 5) + __syncthreads_and(i < 64);
}

extern "C" __global__ void many_blocks(unsigned *count, float *sum, int *max) {
    atomicInc(count, 0xffffffffu);
    atomicAdd(sum, 0.5f);
    atomicMax(max, (int)(blockIdx.x * blockDim.x + threadIdx.x));
}

// Every block waits until all have arrived: they must be resident together.
extern "C" __global__ void rendezvous(volatile int *arrived, int blocks) {
    if (threadIdx.x == 0) { atomicAdd((int *)arrived, 1); while (*arrived < blocks) {} }
    __syncthreads();
}
