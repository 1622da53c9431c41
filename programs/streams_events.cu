// Two streams overlap copies of pinned memory with kernels; events order and time them.
#include "check.cuh"

constexpr int STREAMS = 2;
constexpr int CHUNKS = 8;

__global__ void scale(int *values, int count, int factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = values[i] * factor + i;
}

__global__ void combine(const int *left, const int *right, int *sum, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) sum[i] = left[i] - right[i];
}

int main(int argc, char **argv) {
    const int chunk = size_argument(argc, argv, 4096);
    const int count = chunk * CHUNKS;
    const size_t chunk_bytes = chunk * sizeof(int);
    const int blocks = (chunk + 127) / 128;

    int *input, *output;
    CHECK(cudaHostAlloc(&input, count * sizeof(int), cudaHostAllocDefault));
    CHECK(cudaHostAlloc(&output, (count + chunk) * sizeof(int), cudaHostAllocDefault));
    Random random(4);
    for (int i = 0; i < count; ++i) input[i] = static_cast<int>(random.next() & 0xffff);

    int *device, *device_sum;
    CHECK(cudaMalloc(&device, count * sizeof(int)));
    CHECK(cudaMalloc(&device_sum, chunk_bytes));
    cudaStream_t streams[STREAMS];
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t start, stop, second_done;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    CHECK(cudaEventCreateWithFlags(&second_done, cudaEventDisableTiming));

    CHECK(cudaEventRecord(start, streams[0]));
    CHECK(cudaStreamWaitEvent(streams[1], start, 0));
    for (int i = 0; i < CHUNKS; ++i) {
        cudaStream_t stream = streams[i % STREAMS];
        int *part = device + i * chunk;
        CHECK(cudaMemcpyAsync(part, input + i * chunk, chunk_bytes, cudaMemcpyHostToDevice, stream));
        scale<<<blocks, 128, 0, stream>>>(part, chunk, i + 2);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpyAsync(output + i * chunk, part, chunk_bytes, cudaMemcpyDeviceToHost, stream));
    }
    // The last chunk belongs to the second stream, the first to the first: the sum needs both.
    CHECK(cudaEventRecord(second_done, streams[1]));
    CHECK(cudaStreamWaitEvent(streams[0], second_done, 0));
    combine<<<blocks, 128, 0, streams[0]>>>(device, device + (CHUNKS - 1) * chunk, device_sum, chunk);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpyAsync(output + count, device_sum, chunk_bytes, cudaMemcpyDeviceToHost, streams[0]));
    CHECK(cudaEventRecord(stop, streams[0]));
    CHECK(cudaEventSynchronize(stop));

    float milliseconds = -1.0f;
    CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
    CHECK(cudaStreamQuery(streams[0]));
    CHECK(cudaStreamSynchronize(streams[1]));
    CHECK(cudaEventQuery(second_done));

    for (int i = 0; i < count; ++i) {
        const int expected = input[i] * (i / chunk + 2) + i % chunk;
        if (output[i] != expected) {
            std::printf("FAIL streams_events: index %d: %d, expected %d\n", i, output[i], expected);
            return 1;
        }
    }
    for (int i = 0; i < chunk; ++i) {
        const int expected = output[i] - output[(CHUNKS - 1) * chunk + i];
        if (output[count + i] != expected) {
            std::printf("FAIL streams_events: index %d of the sum: %d, expected %d\n", i, output[count + i],
                        expected);
            return 1;
        }
    }
    if (!(milliseconds > 0.0f && milliseconds < 600000.0f)) {
        std::printf("FAIL streams_events: index 0: %g ms between the events\n", milliseconds);
        return 1;
    }

    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    CHECK(cudaEventDestroy(second_done));
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    CHECK(cudaFree(device_sum));
    CHECK(cudaFreeHost(input));
    CHECK(cudaFreeHost(output));
    std::printf("PASS streams_events %d elements\n", count);
    return 0;
}
