"""Multiplies NumPy's matrices on the device, by Numba, and compares with NumPy."""

import math

import numpy as np
from numba import cuda

SIZE = 48


@cuda.jit(cache=True)
def multiply(left, right, product):
    row, column = cuda.grid(2)
    if row < product.shape[0] and column < product.shape[1]:
        total = 0.0
        for inner in range(left.shape[1]):
            total += left[row, inner] * right[inner, column]
        product[row, column] = total


@cuda.reduce
def total(left, right):
    return left + right


numbers = np.random.default_rng(7)
left, right = (numbers.random((SIZE, SIZE)) for _ in range(2))
product = cuda.device_array((SIZE, SIZE))
blocks = math.ceil(SIZE / 16)
multiply[(blocks, blocks), (16, 16)](cuda.to_device(left), cuda.to_device(right), product)
product = product.copy_to_host()
assert np.allclose(product, left @ right)
assert math.isclose(total(product.ravel()), product.sum(), rel_tol=1e-9)
print("PASS arrays", np.__version__)
