"""Times steps of a workload, and prints the lines of JSON that `cargo xtask bench workloads` reads.

The first argument is the number of samples. WORKLOADS_DEVICE names another device than the first GPU.
"""

import hashlib
import json
import os
import sys
import time

import torch

DEVICE = os.environ.get("WORKLOADS_DEVICE", "cuda")


def samples(otherwise):
    return int(sys.argv[1]) if len(sys.argv) > 1 else otherwise


def line(**value):
    print(json.dumps(value), flush=True)


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def begin():
    """Makes results depend on nothing but the program, and names the device."""
    torch.manual_seed(0)
    # `torch.use_deterministic_algorithms` demands CUBLAS_WORKSPACE_CONFIG, which PyTorch then reads anew for each product.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if DEVICE == "cuda":
        line(device=f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")


def measure(name, detail, step, count, parts=1, work=1):
    """Measures samples of `parts` steps each, of which each has `work` units, after a fifth more that do not count."""
    times = []
    for _ in range(max(3, count // 5)):
        step()
    wait()
    print('"begin"', flush=True)
    for _ in range(count):
        start = time.perf_counter_ns()
        for _ in range(parts):
            step()
        wait()
        times.append((time.perf_counter_ns() - start) / parts / work)
    line(samples={"name": name, "with": detail, "values": times, "steps": count * parts * work})


def check(name, tensors):
    """Prints a hash of the tensors' bytes, which must be the same in each run."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    line(check={"name": name, "value": digest.hexdigest()[:16]})


def training_step(model, optimizer, inputs, labels):
    def step():
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step
