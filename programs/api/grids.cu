// Grids: one that exceeds a dimension's limit is refused at the call, the largest one is launched.
#include "driver.cuh"

#include <unistd.h>

const char PTX[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry begin(.param .u64 word)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [word];
    mov.u32 %r1, 1;
    st.volatile.global.u32 [%rd1], %r1;
    ret;
}
)";

int main() {
    WORKS(cuInit, 0);
    CUcontext context = nullptr;
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);
    CUmodule module = nullptr;
    WORKS(cuModuleLoadData, &module, PTX);
    CUfunction begin = nullptr;
    WORKS(cuModuleGetFunction, &begin, module, "begin");
    void *host = nullptr;
    CUdeviceptr word = 0;
    WORKS(cuMemHostAlloc, &host, 4, CU_MEMHOSTALLOC_DEVICEMAP);
    WORKS(cuMemHostGetDevicePointer, &word, host, 0);
    auto *begun = static_cast<volatile unsigned *>(host);
    *begun = 0;

    void *parameters[] = {&word};
    const auto launch = [&](unsigned x, unsigned y, unsigned z) {
        return DRIVER(cuLaunchKernel)(begin, x, y, z, 1, 1, 1, 0, nullptr, parameters, nullptr);
    };
    const unsigned refused[][3] = {
        {0, 1, 1}, {1, 0, 1}, {1, 1, 0}, {2147483648u, 1, 1}, {4294967295u, 1, 1}, {1, 65536, 1}, {1, 1, 65536},
    };
    for (const auto &grid : refused) HOLDS(launch(grid[0], grid[1], grid[2]) == CUDA_ERROR_INVALID_VALUE);
    WORKS(cuCtxSynchronize);
    HOLDS(*begun == 0);

    // 2^63 blocks, nearly: it would run for longer than anybody waits.
    const CUresult launched = launch(2147483647, 65535, 65535);
    CUresult state = CUDA_ERROR_NOT_READY;
    while (launched == CUDA_SUCCESS && *begun == 0 && state == CUDA_ERROR_NOT_READY)
        state = DRIVER(cuStreamQuery)(nullptr);
    const unsigned blocks_begun = *begun;
    if (blocks_begun) state = DRIVER(cuStreamQuery)(nullptr);
    std::printf("the largest grid: launch %d, begun %u, query %d\n", launched, blocks_begun, state);
    HOLDS(launched == CUDA_SUCCESS && blocks_begun == 1 && state == CUDA_ERROR_NOT_READY);
    std::printf("PASS grids\n");
    std::fflush(stdout);
    // The grid ends with the process.
    _exit(0);
}
