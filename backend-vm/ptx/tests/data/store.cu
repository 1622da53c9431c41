extern "C" __global__ void store(int *p, int v) { p[threadIdx.x] = v; }
