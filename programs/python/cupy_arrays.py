"""Compares CuPy's element-wise kernels, reductions, indexing and own kernels with NumPy's results."""

import cupy
import numpy as np

SHAPE = (300, 200)

axpy = cupy.RawKernel(
    r"""
extern "C" __global__ void axpy(double factor, const double* x, double* y, int count)
{
    int position = blockIdx.x * blockDim.x + threadIdx.x;
    if (position < count)
        y[position] += factor * x[position];
}
""",
    "axpy",
)
distance = cupy.ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "squared_distance")
norm = cupy.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "euclidean_norm")

numbers = np.random.default_rng(7)
left, right = (numbers.random(SHAPE) for _ in range(2))
x, y = cupy.asarray(left), cupy.asarray(right)

assert (cupy.asnumpy(x * 2 + y) == left * 2 + right).all()
assert np.allclose(cupy.asnumpy(cupy.sin(x)), np.sin(left))
assert np.allclose(cupy.asnumpy(x.sum(axis=0)), left.sum(axis=0))
assert x.argmax() == left.argmax()
assert (cupy.asnumpy(x[::-1, 1::3].T) == left[::-1, 1::3].T).all()
assert (cupy.asnumpy(x[x > 0.5]) == left[left > 0.5]).all()
assert np.allclose(cupy.asnumpy(distance(x, y)), (left - right) ** 2)
assert np.isclose(float(norm(x)), np.linalg.norm(left))
axpy(((x.size + 255) // 256,), (256,), (3.0, x, y, np.int32(x.size)))
assert np.allclose(cupy.asnumpy(y), right + 3 * left)
print("PASS cupy_arrays", cupy.__version__)
