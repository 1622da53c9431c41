"""Training step of ResNet-50 whose tensors are all in managed memory.

PyTorch's cache of memory takes blocks by `cudaMallocManaged`, from an allocator that is compiled here: PyTorch has none.
"""

import ctypes
import os
import subprocess
import sys
import tempfile

import torch
from measure import DEVICE, begin, check, line, measure, samples, training_step
from resnet import resnet

ALLOCATOR = """
#include <stddef.h>
int cudaMallocManaged(void **, size_t, unsigned);
int cudaFree(void *);
static size_t taken;
void *take(ptrdiff_t size, int device, void *stream) {
    void *memory = NULL;
    if (cudaMallocManaged(&memory, (size_t)size, 1) != 0) return NULL;
    taken += (size_t)size;
    return memory;
}
void give(void *memory, ptrdiff_t size, int device, void *stream) { cudaFree(memory); }
size_t taken_bytes(void) { return taken; }
"""

if DEVICE != "cuda":
    line(skipped="managed memory needs a GPU")
    sys.exit()
folder = tempfile.TemporaryDirectory()
library = os.path.join(folder.name, "managed.so")
# The runtime's functions are found in PyTorch's own library.
compiler = ["cc", "-shared", "-fPIC", "-O2", "-x", "c", "-", "-o", library]
subprocess.run(compiler, input=ALLOCATOR, text=True, check=True)
begin()
allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "take", "give")
pool = torch.cuda.MemPool(allocator.allocator())
with torch.cuda.use_mem_pool(pool):
    model = resnet([3, 4, 6, 3]).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(16, 3, 224, 224, device=DEVICE)
    labels = torch.randint(0, 1000, (16,), device=DEVICE)
    step = training_step(model, optimizer, images, labels)
    measure("training step of ResNet-50 in managed memory", "PyTorch, SGD, batch of 16", step, samples(20))
    check("weights", model.parameters())
taken_bytes = ctypes.CDLL(library).taken_bytes
taken_bytes.restype = ctypes.c_size_t
assert taken_bytes() > 200 << 20, "the tensors are not in managed memory"
