// Contexts that a program creates: their users, their settings, and events of all of their work.
#include "driver.cuh"

namespace {

// Adds 1 to *counter when *gate is not 0.
const char image[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry pass(.param .u64 gate, .param .u64 counter)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [gate];
    ld.param.u64 %rd2, [counter];
AGAIN:
    ld.volatile.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    red.add.u32 [%rd2], 1;
    ret;
}
)";

void users() {
    CUcontext first = nullptr, attached = nullptr, current = nullptr;
    WORKS(cuCtxCreate, &first, nullptr, 0, 0);
    WORKS(cuCtxAttach, &attached, 0);
    HOLDS(attached == first);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCtxAttach, &attached, 1);
    WORKS(cuCtxDetach, first);
    WORKS(cuCtxGetCurrent, &current);
    HOLDS(current == first);
    unsigned flags = 9;
    WORKS(cuCtxGetFlags, &flags);
    WORKS(cuCtxDetach, first);
    WORKS(cuCtxGetCurrent, &current);
    HOLDS(current == nullptr);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuCtxDetach, first);
}

// Parameters that request nothing, as programs pass them since CUDA 13.
void parameters() {
    CUcontext made = nullptr, current = nullptr;
    CUctxCreateParams nothing = {};
    WORKS(cuCtxCreate, &made, &nothing, CU_CTX_SCHED_YIELD, 0);
    unsigned flags = 0;
    WORKS(cuCtxGetFlags, &flags);
    HOLDS((flags & CU_CTX_SCHED_MASK) == CU_CTX_SCHED_YIELD);
    WORKS(cuCtxDestroy, made);
    WORKS(cuCtxGetCurrent, &current);
    HOLDS(current == nullptr);
    // Execution affinity needs the multi-process service.
    int supported = 9;
    WORKS(cuDeviceGetExecAffinitySupport, &supported, CU_EXEC_AFFINITY_TYPE_SM_COUNT, 0);
    HOLDS(supported == 0);
    CUexecAffinityParam one = {};
    one.type = CU_EXEC_AFFINITY_TYPE_SM_COUNT;
    one.param.smCount.val = 1;
    CUctxCreateParams part = {};
    part.execAffinityParams = &one;
    part.numExecAffinityParams = 1;
    RETURNS(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, cuCtxCreate, &made, &part, 0, 0);
}

void settings() {
    unsigned flags = 0;
    WORKS(cuCtxSetFlags, CU_CTX_SCHED_BLOCKING_SYNC);
    WORKS(cuCtxGetFlags, &flags);
    HOLDS((flags & CU_CTX_SCHED_MASK) == CU_CTX_SCHED_BLOCKING_SYNC);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCtxSetFlags, CU_CTX_SCHED_SPIN | CU_CTX_SCHED_BLOCKING_SYNC);
    WORKS(cuCtxSetFlags, CU_CTX_MAP_HOST | CU_CTX_LMEM_RESIZE_TO_MAX);
    WORKS(cuCtxGetFlags, &flags);
    HOLDS(flags == CU_CTX_LMEM_RESIZE_TO_MAX);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCtxSetFlags, 0x100);
    CUsharedconfig config = CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE;
    WORKS(cuCtxGetSharedMemConfig, &config);
    HOLDS(config == CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE);
    CUexecAffinityParam affinity = {};
    int processors = 0;
    WORKS(cuDeviceGetAttribute, &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0);
    WORKS(cuCtxGetExecAffinity, &affinity, CU_EXEC_AFFINITY_TYPE_SM_COUNT);
    HOLDS(affinity.param.smCount.val == static_cast<unsigned>(processors));
}

// Peer and host attributes of one device.
void peers(CUcontext context) {
    int value = 7;
    WORKS(cuDeviceCanAccessPeer, &value, 0, 0);
    HOLDS(value == 0);
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetP2PAttribute, &value,
            CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, 0, 0);
    RETURNS(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, cuCtxEnablePeerAccess, context, 0);
    RETURNS(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, cuCtxDisablePeerAccess, context);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuCtxEnablePeerAccess, nullptr, 0);
    const CUatomicOperation operations[] = {CU_ATOMIC_OPERATION_INTEGER_ADD, CU_ATOMIC_OPERATION_CAS};
    unsigned capabilities[] = {99, 99};
    int native = 0;
    WORKS(cuDeviceGetAttribute, &native, CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED, 0);
    WORKS(cuDeviceGetHostAtomicCapabilities, capabilities, operations, 2, 0);
    HOLDS(((capabilities[0] & CU_ATOMIC_CAPABILITY_REDUCTION) != 0) == (native != 0));
    HOLDS(((capabilities[1] & CU_ATOMIC_CAPABILITY_SCALAR_64) != 0) == (native != 0));
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuDeviceGetHostAtomicCapabilities, capabilities, operations, 0, 0);
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetP2PAtomicCapabilities, capabilities, operations, 2, 0, 0);
}

// An event of a context completes after the work of all its streams; all its streams, also new ones, can wait for an
// event.
void events_of_a_context(CUcontext context) {
    CUmodule module = nullptr;
    CUfunction pass = nullptr;
    WORKS(cuModuleLoadData, &module, image);
    WORKS(cuModuleGetFunction, &pass, module, "pass");
    unsigned *host = nullptr;
    WORKS(cuMemHostAlloc, reinterpret_cast<void **>(&host), 4096, CU_MEMHOSTALLOC_DEVICEMAP);
    volatile unsigned *gates = host, *counters = host + 16;
    for (int index = 0; index < 32; index++) host[index] = 0;
    const auto start = [&](CUstream stream, int gate, int counter) {
        unsigned *on = host + gate, *count = host + 16 + counter;
        void *values[] = {&on, &count};
        WORKS(cuLaunchKernel, pass, 1, 1, 1, 1, 1, 1, 0, stream, values, nullptr);
    };
    CUstream first = nullptr, second = nullptr, third = nullptr;
    CUevent all = nullptr;
    WORKS(cuStreamCreate, &first, CU_STREAM_NON_BLOCKING);
    WORKS(cuStreamCreate, &second, CU_STREAM_NON_BLOCKING);
    WORKS(cuEventCreate, &all, CU_EVENT_DISABLE_TIMING);
    start(first, 0, 0);
    start(second, 1, 1);
    WORKS(cuCtxRecordEvent, context, all);
    RETURNS(CUDA_ERROR_NOT_READY, cuEventQuery, all);
    gates[0] = 1;
    WORKS(cuStreamSynchronize, first);
    RETURNS(CUDA_ERROR_NOT_READY, cuEventQuery, all);

    // The gates of the work that follows are open: it waits for the event alone.
    gates[2] = 1;
    WORKS(cuCtxWaitEvent, context, all);
    start(first, 2, 2);
    WORKS(cuStreamCreate, &third, CU_STREAM_NON_BLOCKING);
    start(third, 2, 3);
    RETURNS(CUDA_ERROR_NOT_READY, cuStreamQuery, first);
    RETURNS(CUDA_ERROR_NOT_READY, cuStreamQuery, third);
    HOLDS(counters[2] == 0 && counters[3] == 0);
    gates[1] = 1;
    WORKS(cuEventSynchronize, all);
    HOLDS(counters[0] == 1 && counters[1] == 1);
    WORKS(cuCtxSynchronize);
    HOLDS(counters[2] == 1 && counters[3] == 1);
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuCtxRecordEvent, context, nullptr);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuCtxRecordEvent, nullptr, all);
    WORKS(cuMemFreeHost, host);
}

}  // namespace

int main() {
    WORKS(cuInit, 0);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuProfilerStart);
    users();
    parameters();
    CUcontext context = nullptr;
    WORKS(cuCtxCreate, &context, nullptr, 0, 0);
    settings();
    peers(context);
    WORKS(cuProfilerStart);
    WORKS(cuProfilerStop);
    events_of_a_context(context);
    WORKS(cuCtxDestroy, context);
    std::printf("PASS contexts\n");
    return 0;
}
