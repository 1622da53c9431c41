// Kernels that print: directly, in a function that is not inlined, and in one that is called by its address.
#include <cstdio>

__device__ __noinline__ void say(int number) { printf("%d\n", number); }
__device__ __noinline__ void tell(int number) { printf("%d.\n", number); }
__device__ void (*volatile chosen)(int) = tell;

extern "C" __global__ void direct(int number) { printf("%d!\n", number); }
extern "C" __global__ void by_function(int number) { say(number); }
extern "C" __global__ void by_address(int number) { chosen(number); }
extern "C" __global__ void silent(int *place) { *place = 1; }
