// Host functions: they run in stream order, see the stream's earlier work, and hold back its later work until they
// return. Also the calls that they may not make, and the effect of a fault.
#include <atomic>
#include <cuda.h>
#include <thread>

#include "../check.cuh"

__global__ void add(int *values, int n, int amount) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] += amount;
}

constexpr int N = 1 << 12;
constexpr int ROUNDS = 200;

static void fail(const char *what) {
    std::printf("FAIL host_functions: %s\n", what);
    std::exit(1);
}

// One step of a chain: the host adds to what the device wrote, and the device goes on from there.
struct Step {
    int *values;
    int expected;
    std::atomic<int> *wrong;
    std::thread::id thread;
};

static std::thread::id caller;

static void CUDART_CB step(void *data) {
    Step *step = static_cast<Step *>(data);
    step->thread = std::this_thread::get_id();
    for (int i = 0; i < N; i++) {
        if (step->values[i] != step->expected) step->wrong->fetch_add(1);
        step->values[i] *= 2;
    }
}

static void chain(cudaStream_t stream, std::atomic<int> *wrong) {
    int *values;
    CHECK(cudaHostAlloc(&values, N * sizeof(int), cudaHostAllocMapped));
    for (int i = 0; i < N; i++) values[i] = 0;
    Step steps[16];
    int value = 0;
    for (Step &next : steps) {
        add<<<(N + 255) / 256, 256, 0, stream>>>(values, N, 1);
        value += 1;
        next = {values, value, wrong, caller};
        value *= 2;
        CHECK(cudaLaunchHostFunc(stream, step, &next));
    }
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < N; i++)
        if (values[i] != value) wrong->fetch_add(1);
    for (Step &next : steps)
        if (next.thread == caller) fail("a host function ran on the calling thread");
    CHECK(cudaFreeHost(values));
}

static std::atomic<int> released{0};

static void CUDART_CB wait_for_release(void *) {
    while (!released.load()) std::this_thread::yield();
}

// The stream is not done while its function has not returned; other streams are.
static void held() {
    cudaStream_t stream, other;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    int *values;
    CHECK(cudaMalloc(&values, 2 * N * sizeof(int)));
    CHECK(cudaMemset(values, 0, 2 * N * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaLaunchHostFunc(stream, wait_for_release, nullptr));
    add<<<(N + 255) / 256, 256, 0, stream>>>(values, N, 1);
    add<<<(N + 255) / 256, 256, 0, other>>>(values + N, N, 1);
    CHECK(cudaStreamSynchronize(other));
    if (cudaStreamQuery(stream) != cudaErrorNotReady) fail("work went past a host function");
    released = 1;
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamQuery(stream));
    int last;
    CHECK(cudaMemcpy(&last, values + N - 1, sizeof(int), cudaMemcpyDeviceToHost));
    if (last != 1) fail("the work behind a host function did not run");
    CHECK(cudaFree(values));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(other));
}

struct Order {
    int next;
    bool broken;
};

static void CUDART_CB in_order(cudaStream_t, cudaError_t status, void *data) {
    static Order *order = nullptr;
    if (!order) order = static_cast<Order *>(data);
    if (status != cudaSuccess) order->broken = true;
    order->next++;
}

static cudaError_t inside[3];

static void CUDART_CB forbidden(void *stream) {
    void *memory;
    inside[0] = cudaMalloc(&memory, 16);
    inside[1] = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    inside[2] = cudaMemsetAsync(nullptr, 0, 0, static_cast<cudaStream_t>(stream));
}

__global__ void trap(volatile int *go) {
    while (!*go) {}
    asm volatile("trap;");
}

static std::atomic<int> after_fault{-1};
static std::atomic<int> plain_after_fault{0};

static void CUDART_CB note_fault(cudaStream_t, cudaError_t status, void *) { after_fault = status; }
static void CUDART_CB not_called(void *) { plain_after_fault = 1; }

int main() {
    caller = std::this_thread::get_id();
    CHECK(cudaFree(nullptr));
    std::atomic<int> wrong{0};
    cudaStream_t streams[3];
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreate(&stream));
    std::thread threads[3];
    for (int i = 0; i < 3; i++) threads[i] = std::thread(chain, streams[i], &wrong);
    for (std::thread &thread : threads) thread.join();
    chain(nullptr, &wrong);
    if (wrong.load()) fail("a host function or the work behind it saw too little");

    held();

    Order order = {0, false};
    for (int i = 0; i < ROUNDS; i++) CHECK(cudaStreamAddCallback(streams[0], in_order, &order, 0));
    CHECK(cudaStreamSynchronize(streams[0]));
    if (order.next != ROUNDS || order.broken) fail("callbacks were lost");

    CHECK(cudaLaunchHostFunc(streams[1], forbidden, streams[1]));
    CHECK(cudaStreamSynchronize(streams[1]));
    if (inside[0] != cudaErrorNotPermitted || inside[1] != cudaErrorNotPermitted)
        fail("a host function was permitted to call CUDA");

    // The faults come last: nothing works afterwards.
    int *go;
    CHECK(cudaHostAlloc(&go, sizeof *go, cudaHostAllocMapped));
    *go = 0;
    trap<<<1, 1, 0, streams[2]>>>(go);
    CHECK(cudaLaunchHostFunc(streams[2], not_called, nullptr));
    CHECK(cudaStreamAddCallback(streams[2], note_fault, nullptr, 0));
    *static_cast<volatile int *>(go) = 1;
    const cudaError_t fault = cudaStreamSynchronize(streams[2]);
    if (fault == cudaSuccess) fail("a trap went unnoticed");
    while (after_fault.load() == -1) std::this_thread::yield();
    if (after_fault.load() == cudaSuccess) fail("a callback did not get the fault");
    if (plain_after_fault.load()) fail("a host function was called after a fault");
    std::printf("PASS host_functions\n");
    return 0;
}
