extern __device__ int counter;
extern "C" __device__ int twice(int x);
static __device__ int hidden = 5;
extern "C" __global__ void combine(int *out) { out[threadIdx.x] = twice(threadIdx.x) + counter + hidden++; }
