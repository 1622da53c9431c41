// Kernels that fetch from textures and access surfaces, for the integration tests. nvcc 13.0 compiles
// this file to `textures.ptx`:
// nvcc -ptx -arch=compute_75 -O3 -std=c++17 textures.cu -o textures.ptx
using Texture = cudaTextureObject_t;
using Surface = cudaSurfaceObject_t;

// Three coordinates for each thread.
#define AT(i) at[3 * threadIdx.x + i]

extern "C" __global__ void lines(Texture t, const float *at, float4 *out) {
    out[threadIdx.x] = tex1D<float4>(t, AT(0));
}
extern "C" __global__ void planes(Texture t, const float *at, float4 *out) {
    out[threadIdx.x] = tex2D<float4>(t, AT(0), AT(1));
}
extern "C" __global__ void volumes(Texture t, const float *at, float4 *out) {
    out[threadIdx.x] = tex3D<float4>(t, AT(0), AT(1), AT(2));
}
extern "C" __global__ void layers(Texture t, const float *at, float4 *out) {
    out[threadIdx.x] = tex2DLayered<float4>(t, AT(0), AT(1), (int)AT(2));
}
extern "C" __global__ void cubes(Texture t, const float *at, float4 *out) {
    out[threadIdx.x] = texCubemap<float4>(t, AT(0), AT(1), AT(2));
}
extern "C" __global__ void details(Texture t, const float *at, float4 *out) {
    out[threadIdx.x] = tex2DLod<float4>(t, AT(0), AT(1), AT(2));
}
extern "C" __global__ void gradients(Texture t, const float *at, float4 *out) {
    out[threadIdx.x] = tex2DGrad<float4>(t, AT(0), AT(1), make_float2(AT(2), 0), make_float2(0, AT(2)));
}
extern "C" __global__ void gathers(Texture t, const float *at, float4 *out) {
    out[threadIdx.x] = tex2Dgather<float4>(t, AT(0), AT(1), 1);
}
extern "C" __global__ void fetches(Texture t, const int *at, int2 *out) {
    out[threadIdx.x] = tex1Dfetch<int2>(t, at[threadIdx.x]);
}
extern "C" __global__ void bytes(Texture t, const float *at, uchar4 *out) {
    out[threadIdx.x] = tex2D<uchar4>(t, AT(0), AT(1));
}
extern "C" __global__ void queries(Texture t, int *out) {
    asm("txq.width.b32 %0, [%1];" : "=r"(out[0]) : "l"(t));
    asm("txq.height.b32 %0, [%1];" : "=r"(out[1]) : "l"(t));
    asm("txq.level.width.b32 %0, [%1], 1;" : "=r"(out[2]) : "l"(t));
    asm("txq.num_mipmap_levels.b32 %0, [%1];" : "=r"(out[3]) : "l"(t));
    bool resident;
    tex2D<float4>(t, 0.5f, 0.5f, &resident);
    out[4] = resident;
}

extern "C" __global__ void transposed(Surface from, Surface to) {
    ushort2 v = surf2Dread<ushort2>(from, threadIdx.x * 4, threadIdx.y);
    surf2Dwrite(make_ushort2(v.y, v.x), to, threadIdx.y * 4, threadIdx.x);
}
extern "C" __global__ void bounded(Surface s, int x, int y, int *out) {
    out[0] = surf2Dread<int>(s, x * 4, y, cudaBoundaryModeClamp);
    out[1] = surf2Dread<int>(s, x * 4, y, cudaBoundaryModeZero);
    surf2Dwrite(-1, s, x * 4, y, cudaBoundaryModeZero);
    if (out[2]) out[3] = surf2Dread<int>(s, x * 4, y, cudaBoundaryModeTrap);
}
extern "C" __global__ void deep(Surface s, Surface layered) {
    surf3Dwrite((float)(threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z), s, threadIdx.x * 4, threadIdx.y, threadIdx.z);
    surf2DLayeredwrite((unsigned char)(threadIdx.x + 16 * threadIdx.z), layered, threadIdx.x, threadIdx.y, threadIdx.z);
}
