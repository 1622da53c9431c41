"""Numba's first example: a sum of two vectors."""

import numpy as np
from numba import cuda


@cuda.jit(cache=True)
def add(left, right, sums):
    position = cuda.grid(1)
    if position < sums.size:
        sums[position] = left[position] + right[position]


count = 100_000
left = cuda.to_device(np.arange(count, dtype=np.float32))
right = cuda.to_device(2 * np.arange(count, dtype=np.float32))
sums = cuda.device_array_like(left)
add[(count + 255) // 256, 256](left, right, sums)
assert (sums.copy_to_host() == 3 * np.arange(count, dtype=np.float32)).all()
print("PASS vector_add", count, "elements")
