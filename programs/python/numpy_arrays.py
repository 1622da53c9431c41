"""Multiplies NumPy's arrays on the device by CUDA's driver API, and compares with NumPy."""

import ctypes
import sys

import numpy as np

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry multiply(.param .u64 numbers, .param .u64 factors, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %r<5>;
    .reg .f64 %f<3>;
    .reg .b64 %d<6>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    ld.param.u32 %r4, [count];
    setp.ge.u32 %p, %r1, %r4;
    @%p ret;
    mul.wide.u32 %d1, %r1, 8;
    ld.param.u64 %d2, [numbers];
    ld.param.u64 %d3, [factors];
    add.u64 %d4, %d2, %d1;
    add.u64 %d5, %d3, %d1;
    ld.global.f64 %f1, [%d4];
    ld.global.f64 %f2, [%d5];
    mul.f64 %f1, %f1, %f2;
    st.global.f64 [%d4], %f1;
    ret;
}
"""
SHAPE = (120, 80)


def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    if result != 0:
        sys.exit(f"FAIL {name} returns {result}")


def to_device(values):
    pointer = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(values.nbytes))
    call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(values.nbytes))
    return pointer


cuda = ctypes.CDLL("libcuda.so.1")
call("cuInit", 0)
device, context = ctypes.c_int(), ctypes.c_void_p()
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
call("cuModuleLoadData", ctypes.byref(module), PTX)
call("cuModuleGetFunction", ctypes.byref(kernel), module, b"multiply")

numbers = np.random.default_rng(7)
left, right = (numbers.random(SHAPE) for _ in range(2))
pointers = [to_device(values) for values in (left, right)]
parameters = [*pointers, ctypes.c_uint32(left.size)]
addresses = (ctypes.c_void_p * 3)(*map(ctypes.addressof, parameters))
blocks = (left.size + 127) // 128
call("cuLaunchKernel", kernel, blocks, 1, 1, 128, 1, 1, 0, None, addresses, None)
products = np.empty(SHAPE)
call("cuMemcpyDtoH_v2", ctypes.c_void_p(products.ctypes.data), pointers[0], ctypes.c_size_t(products.nbytes))
if not (products == left * right).all():
    sys.exit("FAIL the products are wrong")
print("PASS numpy_arrays", np.__version__)
