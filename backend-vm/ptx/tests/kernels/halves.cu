// Functions of 16-bit floats, for the integration tests. nvcc 13.0 compiles this file to
// `halves.ptx`:
// nvcc -ptx -arch=compute_80 -O3 -std=c++17 halves.cu -o halves.ptx
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T> __device__ void all(const T *in, T *out) {
    T x = in[2 * threadIdx.x], y = in[2 * threadIdx.x + 1], *o = out + threadIdx.x * 16;
    o[0] = __hdiv(x, y); o[1] = hsqrt(__habs(x)); o[2] = hrsqrt(__habs(y)); o[3] = hrcp(y);
    o[4] = hexp(x); o[5] = hexp2(x); o[6] = hexp10(x); o[7] = hlog(__habs(y)); o[8] = hlog2(__habs(y));
    o[9] = hlog10(__habs(y)); o[10] = hsin(x); o[11] = hcos(x); o[12] = hfloor(x); o[13] = hrint(x);
    o[14] = htrunc(x); o[15] = hceil(x);
}
extern "C" __global__ void half_functions(const __half *in, __half *out) { all(in, out); }
extern "C" __global__ void bfloat_functions(const __nv_bfloat16 *in, __nv_bfloat16 *out) { all(in, out); }

extern "C" __global__ void dot(const __half2 *a, const __half2 *b, float *out, unsigned *counts) {
    __half2 sum = __float2half2_rn(0);
    unsigned below = 0;
    for (int i = threadIdx.x; i < 256; i += 32) {
        sum = __hfma2(a[i], b[i], sum);
        below += __popc(__hlt2_mask(a[i], b[i])) / 16;
        if (__hbgt2(a[i], b[i])) below += 1000;
    }
    for (int step = 16; step; step /= 2) sum = __hadd2(sum, __shfl_xor_sync(~0u, sum, step));
    out[threadIdx.x] = __low2float(sum) + __high2float(sum);
    counts[threadIdx.x] = below;
}
