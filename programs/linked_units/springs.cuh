// Device code that the units share.
#pragma once

// Number of calls of `pull`.
extern __device__ int pulls;

// The force of a spring of this length.
__device__ float pull(float length);
