__device__ int counter = 100;
static __device__ int hidden = 7;
extern "C" __device__ int twice(int x) { return 2 * x + hidden++; }
