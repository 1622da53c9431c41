"""Adds vectors by CUDA's driver API, with Python's standard library alone."""

import array
import ctypes
import sys

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry add(.param .u64 sums, .param .u64 left, .param .u64 right, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %r<5>;
    .reg .f32 %f<4>;
    .reg .b64 %d<8>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    ld.param.u32 %r4, [count];
    setp.ge.u32 %p, %r1, %r4;
    @%p ret;
    mul.wide.u32 %d1, %r1, 4;
    ld.param.u64 %d2, [sums];
    ld.param.u64 %d3, [left];
    ld.param.u64 %d4, [right];
    add.u64 %d5, %d2, %d1;
    add.u64 %d6, %d3, %d1;
    add.u64 %d7, %d4, %d1;
    ld.global.f32 %f1, [%d6];
    ld.global.f32 %f2, [%d7];
    add.f32 %f3, %f1, %f2;
    st.global.f32 [%d5], %f3;
    ret;
}
"""
COUNT = 10_000
# The least that wheels of NumPy take of a processor, by the names of /proc/cpuinfo.
X86_64_V2 = {"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"}


def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    if result != 0:
        sys.exit(f"FAIL {name} returns {result}")


def allocate(size):
    pointer = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    return pointer


with open("/proc/cpuinfo") as text:
    flags = next(line for line in text if line.startswith("flags")).split()
if missing := X86_64_V2.difference(flags):
    sys.exit(f"FAIL the processor lacks {sorted(missing)}")

cuda = ctypes.CDLL("libcuda.so.1")
call("cuInit", 0)
device, context = ctypes.c_int(), ctypes.c_void_p()
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
call("cuModuleLoadData", ctypes.byref(module), PTX)
call("cuModuleGetFunction", ctypes.byref(kernel), module, b"add")

left = array.array("f", range(COUNT))
right = array.array("f", (2 * number for number in range(COUNT)))
size = COUNT * left.itemsize
pointers = [allocate(size) for _ in range(3)]
for pointer, values in zip(pointers[1:], [left, right]):
    call("cuMemcpyHtoD_v2", pointer, values.tobytes(), ctypes.c_size_t(size))
parameters = [*pointers, ctypes.c_uint32(COUNT)]
addresses = (ctypes.c_void_p * 4)(*map(ctypes.addressof, parameters))
blocks = (COUNT + 127) // 128
call("cuLaunchKernel", kernel, blocks, 1, 1, 128, 1, 1, 0, None, addresses, None)
found = ctypes.create_string_buffer(size)
call("cuMemcpyDtoH_v2", found, pointers[0], ctypes.c_size_t(size))

sums = array.array("f", found.raw)
if sums.tolist() != [3.0 * number for number in range(COUNT)]:
    sys.exit("FAIL the sums are wrong")
print("PASS driver", COUNT, "elements")
