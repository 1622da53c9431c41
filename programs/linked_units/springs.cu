// The other unit, which defines the function and the variable that main.cu uses.
#include "springs.cuh"

__device__ int pulls = 1000;

// main.cu has one of the same name.
static __device__ float scale = 4.0f;

__device__ float pull(float length) {
    atomicAdd(&pulls, 1);
    return scale * length;
}
