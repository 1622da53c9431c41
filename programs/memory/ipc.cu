// Two processes share memory and events: the child produces, the parent consumes and answers in the same memory.
#include "../check.cuh"

#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

static const int COUNT = 3 << 18;

__global__ void fill(int *data, int count, int value, volatile int *gate) {
    while (gate && !*gate) {}
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] = value + i;
}

__global__ void add(int *data, int count, int value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] += value;
}

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL ipc: %s\n", what);
    std::fflush(stdout);
    std::_Exit(1);
}

struct Pipe {
    int ends[2];
    Pipe() { expect(pipe(ends) == 0, "a pipe"); }
    template <typename T> void send(const T &value) { expect(write(ends[1], &value, sizeof value) == sizeof value, "sent"); }
    template <typename T> void receive(T &value) { expect(read(ends[0], &value, sizeof value) == sizeof value, "received"); }
    // Without the other end in this process, a process that ends early fails its partner's call.
    void only_sends() { close(ends[0]); }
    void only_receives() { close(ends[1]); }
    void signal() { send('x'); }
    void await() {
        char word;
        receive(word);
    }
};

struct Handles {
    cudaIpcMemHandle_t large, small;
    cudaIpcEventHandle_t filled, answered;
};

// The first launch of a kernel loads it, for which the driver may wait for running kernels. So all kernels are loaded
// before one has to run while another waits.
static void load() {
    fill<<<1, 1>>>(nullptr, 0, 0, nullptr);
    add<<<1, 1>>>(nullptr, 0, 0);
    CHECK(cudaDeviceSynchronize());
}

static void produce(Pipe &to_parent, Pipe &to_child) {
    int *large, *before, *small, *gate;
    cudaEvent_t filled, answered, plain;
    Handles handles;
    load();
    CHECK(cudaMalloc(&large, COUNT * sizeof(int)));
    CHECK(cudaMalloc(&before, 100));
    CHECK(cudaMalloc(&small, 100));
    CHECK(cudaHostAlloc(&gate, sizeof(int), cudaHostAllocMapped));
    *gate = 0;
    const unsigned flags = cudaEventInterprocess | cudaEventDisableTiming;
    CHECK(cudaEventCreateWithFlags(&filled, flags));
    CHECK(cudaEventCreateWithFlags(&answered, flags));
    CHECK(cudaEventCreate(&plain));
    expect(cudaEventCreateWithFlags(&plain, cudaEventInterprocess) == cudaErrorInvalidValue, "no time is kept");
    expect(cudaIpcGetEventHandle(&handles.filled, plain) == cudaErrorInvalidResourceHandle, "an event of its own");
    expect(cudaIpcGetMemHandle(&handles.large, gate) == cudaErrorInvalidValue, "memory of the host");
    CHECK(cudaIpcGetMemHandle(&handles.large, large));
    CHECK(cudaIpcGetMemHandle(&handles.small, small));
    CHECK(cudaIpcGetEventHandle(&handles.filled, filled));
    CHECK(cudaIpcGetEventHandle(&handles.answered, answered));
    void *self = nullptr;
    expect(cudaIpcOpenMemHandle(&self, handles.large, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess, "its own memory");
    (void)cudaGetLastError();

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMemset(small, 0x11, 100));
    CHECK(cudaDeviceSynchronize());
    for (int round = 0; round < 5; ++round) {
        *gate = 0;
        fill<<<(COUNT + 255) / 256, 256, 0, stream>>>(large, COUNT, round * 1000, gate);
        CHECK(cudaEventRecord(filled, stream));
        if (round == 0) to_parent.send(handles);
        else to_parent.signal();
        to_child.await(); // The parent has begun to wait.
        *gate = 1;
        to_child.await(); // The parent has recorded its answer, which may not be complete.
        CHECK(cudaStreamWaitEvent(stream, answered, 0));
        add<<<(COUNT + 255) / 256, 256, 0, stream>>>(large, COUNT, 1);
        CHECK(cudaStreamSynchronize(stream));
        int last = 0;
        CHECK(cudaMemcpy(&last, large + COUNT - 1, sizeof last, cudaMemcpyDeviceToHost));
        expect(last == round * 1000 + COUNT - 1 + 7 + 1, "the parent's answer");
    }
    to_parent.signal();
    to_child.await(); // The parent has closed everything.
    CHECK(cudaFree(large));
    CHECK(cudaFree(small));
    CHECK(cudaEventDestroy(filled));
    std::exit(0);
}

int main() {
    Pipe to_parent, to_child;
    const pid_t child = fork();
    if (child == 0) {
        to_parent.only_sends();
        to_child.only_receives();
        produce(to_parent, to_child);
        return 1;
    }
    to_parent.only_receives();
    to_child.only_sends();
    load();
    Handles handles;
    to_parent.receive(handles);
    int *large = nullptr, *again = nullptr, *small = nullptr, *own;
    const unsigned lazy = cudaIpcMemLazyEnablePeerAccess;
    cudaEvent_t filled, answered;
    CHECK(cudaMalloc(&own, COUNT * sizeof(int)));
    expect(cudaIpcOpenMemHandle((void **)&large, handles.large, 0) == cudaErrorInvalidValue, "the flag is needed");
    CHECK(cudaIpcOpenMemHandle((void **)&large, handles.large, lazy));
    CHECK(cudaIpcOpenMemHandle((void **)&again, handles.large, lazy));
    CHECK(cudaIpcOpenMemHandle((void **)&small, handles.small, lazy));
    expect(again == large && small != large, "one address for one handle");
    CHECK(cudaIpcOpenEventHandle(&filled, handles.filled));
    CHECK(cudaIpcOpenEventHandle(&answered, handles.answered));
    cudaIpcMemHandle_t forged;
    void *none = nullptr;
    std::memset(&forged, 0x41, sizeof forged);
    expect(cudaIpcOpenMemHandle(&none, forged, lazy) == cudaErrorInvalidValue, "no handle");
    expect(cudaFree(large) == cudaErrorInvalidValue, "it is not this process's to free");
    (void)cudaGetLastError();
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, large + 5));
    expect(attributes.type == cudaMemoryTypeDevice, "device memory");
    unsigned char bytes[100];
    CHECK(cudaMemcpy(bytes, small, sizeof bytes, cudaMemcpyDeviceToHost));
    for (unsigned char byte : bytes) expect(byte == 0x11, "what the child wrote");

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int round = 0; round < 5; ++round) {
        if (round > 0) to_parent.await();
        expect(cudaEventQuery(filled) == cudaErrorNotReady, "the child is held up");
        CHECK(cudaStreamWaitEvent(stream, filled, 0));
        add<<<(COUNT + 255) / 256, 256, 0, stream>>>(large, COUNT, 7);
        CHECK(cudaEventRecord(answered, stream));
        expect(cudaStreamQuery(stream) == cudaErrorNotReady, "the stream waits for the child");
        to_child.signal();
        CHECK(cudaEventSynchronize(filled));
        to_child.signal();
    }
    to_parent.await();
    CHECK(cudaMemcpy(own, large, COUNT * sizeof(int), cudaMemcpyDeviceToDevice));
    int last = 0;
    CHECK(cudaMemcpy(&last, own + COUNT - 1, sizeof last, cudaMemcpyDeviceToHost));
    expect(last == 4000 + COUNT - 1 + 8, "the last round");
    CHECK(cudaIpcCloseMemHandle(again));
    CHECK(cudaMemcpy(&last, large, sizeof last, cudaMemcpyDeviceToHost));
    CHECK(cudaIpcCloseMemHandle(large));
    expect(cudaIpcCloseMemHandle(large) == cudaErrorInvalidValue, "closed twice");
    expect(cudaMemcpy(&last, large, sizeof last, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue, "closed");
    CHECK(cudaIpcCloseMemHandle(small));
    expect(cudaIpcCloseMemHandle(own) == cudaErrorInvalidValue, "never opened");
    (void)cudaGetLastError();

    CHECK(cudaEventDestroy(filled));
    CHECK(cudaEventDestroy(answered));
    CHECK(cudaFree(own));
    to_child.signal();
    int status = 0;
    expect(waitpid(child, &status, 0) == child && status == 0, "the child ends well");
    std::printf("PASS ipc\n");
    return 0;
}
