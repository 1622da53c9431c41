// Products of matrices by whole warps, for the integration tests. nvcc 13.0 compiles this file to
// `matrices.ptx`:
// nvcc -ptx -arch=compute_80 -O3 -std=c++17 matrices.cu -o matrices.ptx
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;
using Rows = wmma::row_major;
using Columns = wmma::col_major;

// Computes d = 2 * (a * b + c): a has the layout LA, b has LB, c is row-major, d column-major.
template <int M, int N, int K, class T, class C, class LA, class LB, class Memory>
__device__ void product(const Memory *a, const Memory *b, const C *c, C *d) {
    wmma::fragment<wmma::matrix_a, M, N, K, T, LA> fa;
    wmma::fragment<wmma::matrix_b, M, N, K, T, LB> fb;
    wmma::fragment<wmma::accumulator, M, N, K, C> fc;
    wmma::load_matrix_sync(fa, a, (std::is_same<LA, Rows>::value ? K : M));
    wmma::load_matrix_sync(fb, b, (std::is_same<LB, Rows>::value ? N : K));
    wmma::load_matrix_sync(fc, c, N, wmma::mem_row_major);
    wmma::mma_sync(fc, fa, fb, fc);
    for (int i = 0; i < fc.num_elements; i++) fc.x[i] = fc.x[i] + fc.x[i];
    wmma::store_matrix_sync(d, fc, M, wmma::mem_col_major);
}

#define KERNEL(name, M, N, K, T, C, LA, LB, Memory)                                                   \
    extern "C" __global__ void name(const Memory *a, const Memory *b, const C *c, C *d) {            \
        product<M, N, K, T, C, LA, LB>(a, b, c, d);                                                   \
    }
KERNEL(half_single, 16, 16, 16, half, float, Rows, Columns, half)
KERNEL(half_tall, 32, 8, 16, half, float, Columns, Rows, half)
KERNEL(half_flat, 8, 32, 16, half, half, Rows, Rows, half)
KERNEL(bfloat, 16, 16, 16, __nv_bfloat16, float, Columns, Columns, __nv_bfloat16)
KERNEL(tf32, 16, 16, 8, wmma::precision::tf32, float, Rows, Rows, float)
KERNEL(doubles, 8, 8, 4, double, double, Rows, Columns, double)
KERNEL(signed_bytes, 16, 16, 16, signed char, int, Rows, Columns, signed char)
KERNEL(unsigned_bytes, 32, 8, 16, unsigned char, int, Columns, Rows, unsigned char)


extern "C" __global__ void bits(const void *a, const void *b, const int *c, int *d) {
    wmma::fragment<wmma::matrix_a, 8, 8, 128, wmma::experimental::precision::b1, Rows> fa;
    wmma::fragment<wmma::matrix_b, 8, 8, 128, wmma::experimental::precision::b1, Columns> fb;
    wmma::fragment<wmma::accumulator, 8, 8, 128, int> fc;
    wmma::load_matrix_sync(fa, a, 128);
    wmma::load_matrix_sync(fb, b, 128);
    wmma::load_matrix_sync(fc, c, 8, wmma::mem_row_major);
    wmma::bmma_sync(fc, fa, fb, fc, wmma::experimental::bmmaBitOpXOR, wmma::experimental::bmmaAccumulateOpPOPC);
    wmma::store_matrix_sync(d, fc, 8, wmma::mem_row_major);
}

// Computes a 16 by 8 product of 16 by 16 and 16 by 8 halves with `ldmatrix`; b is row-major.
extern "C" __global__ void tiles(const half *a, const half *b, float *d) {
    __shared__ half sa[16 * 16], sb[16 * 8];
    for (int i = threadIdx.x; i < 256; i += 32) sa[i] = a[i];
    for (int i = threadIdx.x; i < 128; i += 32) sb[i] = b[i];
    __syncwarp();
    unsigned ra[4], rb[2];
    unsigned pa = __cvta_generic_to_shared(sa + threadIdx.x % 16 * 16 + threadIdx.x / 16 * 8);
    unsigned pb = __cvta_generic_to_shared(sb + threadIdx.x % 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(pa));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(rb[0]), "=r"(rb[1]) : "r"(pb));
    float c[4] = {};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    for (int i = 0; i < 4; i++) d[(threadIdx.x / 4 + i / 2 * 8) * 8 + threadIdx.x % 4 * 2 + i % 2] = c[i];
}
