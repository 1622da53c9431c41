// Waits of threads, by the flags of contexts and events: a thread that sleeps takes no processor.
#include "driver.cuh"

#include <ctime>

namespace {

// Adds 1 to *counter after 5 ms.
const char image[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry take_time(.param .u64 counter)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [counter];
    mov.u64 %rd2, %globaltimer;
    add.u64 %rd2, %rd2, 5000000;
AGAIN:
    mov.u64 %rd3, %globaltimer;
    setp.lt.u64 %p1, %rd3, %rd2;
    @%p1 bra AGAIN;
    red.add.u32 [%rd1], 1;
    ret;
}
)";

constexpr unsigned ROUNDS = 40;

// Nanoseconds for which this thread has had a processor.
long long processor_time() {
    timespec time = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

CUfunction take_time = nullptr;
CUstream stream = nullptr;
CUevent event = nullptr;
unsigned *counter = nullptr;
unsigned launched = 0;

// Waits for the kernel in several rounds, and returns the processor time of the waits.
template <typename Wait> long long waits(Wait wait) {
    long long taken = 0;
    for (unsigned round = 0; round < ROUNDS; ++round) {
        CUdeviceptr address = 0;
        WORKS(cuMemHostGetDevicePointer, &address, counter, 0);
        void *parameters[] = {&address};
        WORKS(cuLaunchKernel, take_time, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
        WORKS(cuEventRecord, event, stream);
        const long long before = processor_time();
        wait();
        taken += processor_time() - before;
        HOLDS(*static_cast<volatile unsigned *>(counter) == ++launched);
    }
    return taken;
}

void synchronize_stream() { WORKS(cuStreamSynchronize, stream); }
void synchronize_context() { WORKS(cuCtxSynchronize); }
void synchronize_event() { WORKS(cuEventSynchronize, event); }

}  // namespace

int main() {
    CUcontext context = nullptr;
    CUmodule module = nullptr;
    CUevent spinning = nullptr, blocking = nullptr;
    WORKS(cuInit, 0);
    WORKS(cuCtxCreate, &context, nullptr, CU_CTX_SCHED_SPIN, 0);
    WORKS(cuModuleLoadData, &module, image);
    WORKS(cuModuleGetFunction, &take_time, module, "take_time");
    WORKS(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    WORKS(cuEventCreate, &spinning, CU_EVENT_DISABLE_TIMING);
    WORKS(cuEventCreate, &blocking, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    WORKS(cuMemHostAlloc, reinterpret_cast<void **>(&counter), sizeof *counter, CU_MEMHOSTALLOC_DEVICEMAP);
    *counter = 0;

    event = spinning;
    const long long spun = waits(synchronize_stream);
    event = blocking;
    // The first wait for an event is a request.
    WORKS(cuEventSynchronize, event);
    const long long event_slept = waits(synchronize_event);
    // A sleep and its end take some microseconds, whatever its length.
    const long long little = ROUNDS * 5000000LL / 25;
    HOLDS(event_slept < little && event_slept * 2 < spun);
    event = spinning;
    WORKS(cuCtxSetFlags, CU_CTX_SCHED_YIELD);
    waits(synchronize_event);
    WORKS(cuCtxSetFlags, CU_CTX_SCHED_BLOCKING_SYNC);
    const long long stream_slept = waits(synchronize_stream);
    HOLDS(stream_slept < little && stream_slept * 2 < spun);
    const long long context_slept = waits(synchronize_context);
    HOLDS(context_slept < little && context_slept * 2 < spun);
    std::printf("PASS waits: of %.0f ms: spinning %.1f ms, asleep %.1f, %.1f and %.1f ms of a processor\n", ROUNDS * 5.0, spun / 1e6,
                event_slept / 1e6, stream_slept / 1e6, context_slept / 1e6);
    WORKS(cuCtxDestroy, context);
    return 0;
}
