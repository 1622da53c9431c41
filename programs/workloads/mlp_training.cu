// Training of a perceptron of two layers with kernels of its own, since the CPU device runs none of cuBLAS.
//
// Each step is eight launches, and the device is waited for after ten of them, as a program does that prints its loss now
// and then. The argument is the number of samples, of ten steps each.
#include "lines.cuh"

constexpr int batch = 32, inputs = 256, hidden = 64, outputs = 10;
constexpr float rate = 0.01f;
constexpr int steps = 10;
constexpr int threads = 128;

// Each thread computes one output of one sample.
__global__ void forward(const float *x, const float *weights, const float *bias, float *y, int in, int out, bool rectify) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= batch * out) return;
    const int sample = index / out, unit = index % out;
    float sum = bias[unit];
    for (int i = 0; i < in; ++i) sum += x[sample * in + i] * weights[i * out + unit];
    y[index] = rectify && sum < 0 ? 0 : sum;
}

// Gradient of the mean cross entropy by the outputs. Each thread has one sample.
__global__ void output_gradient(const float *y, const int *labels, float *gradient) {
    const int sample = blockIdx.x * blockDim.x + threadIdx.x;
    if (sample >= batch) return;
    const float *own = y + sample * outputs;
    float most = own[0], sum = 0;
    for (int i = 1; i < outputs; ++i) most = fmaxf(most, own[i]);
    for (int i = 0; i < outputs; ++i) sum += expf(own[i] - most);
    for (int i = 0; i < outputs; ++i) {
        const float wanted = i == labels[sample] ? 1 : 0;
        gradient[sample * outputs + i] = (expf(own[i] - most) / sum - wanted) / batch;
    }
}

// Gradient by a rectified layer's results. Each thread has one of them.
__global__ void hidden_gradient(const float *gradient, const float *weights, const float *y, float *result) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= batch * hidden) return;
    const int sample = index / hidden, unit = index % hidden;
    float sum = 0;
    for (int i = 0; i < outputs; ++i) sum += gradient[sample * outputs + i] * weights[unit * outputs + i];
    result[index] = y[index] > 0 ? sum : 0;
}

// Each thread updates one weight.
__global__ void update_weights(float *weights, const float *x, const float *gradient, int in, int out) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= in * out) return;
    const int input = index / out, unit = index % out;
    float sum = 0;
    for (int sample = 0; sample < batch; ++sample) sum += x[sample * in + input] * gradient[sample * out + unit];
    weights[index] -= rate * sum;
}

// Each thread updates one bias.
__global__ void update_bias(float *bias, const float *gradient, int out) {
    const int unit = blockIdx.x * blockDim.x + threadIdx.x;
    if (unit >= out) return;
    float sum = 0;
    for (int sample = 0; sample < batch; ++sample) sum += gradient[sample * out + unit];
    bias[unit] -= rate * sum;
}

static int blocks(int elements) {
    return (elements + threads - 1) / threads;
}

static float *on_device(const std::vector<float> &values) {
    float *memory;
    CHECK(cudaMalloc(&memory, values.size() * sizeof(float)));
    CHECK(cudaMemcpy(memory, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice));
    return memory;
}

int main(int argc, char **argv) {
    const int samples = size_argument(argc, argv, 200);
    Random random(1);
    const auto values = [&](int count, float scale) {
        std::vector<float> made(count);
        for (float &value : made) value = (random.fraction() - 0.5f) * scale;
        return on_device(made);
    };
    float *x = values(batch * inputs, 2), *y = values(batch * outputs, 0), *h = values(batch * hidden, 0);
    float *w1 = values(inputs * hidden, 0.25f), *b1 = values(hidden, 0);
    float *w2 = values(hidden * outputs, 0.25f), *b2 = values(outputs, 0);
    float *dy = values(batch * outputs, 0), *dh = values(batch * hidden, 0);
    std::vector<int> classes(batch);
    for (int &label : classes) label = random.next() % outputs;
    int *labels;
    CHECK(cudaMalloc(&labels, batch * sizeof(int)));
    CHECK(cudaMemcpy(labels, classes.data(), batch * sizeof(int), cudaMemcpyHostToDevice));

    const auto step = [&] {
        forward<<<blocks(batch * hidden), threads>>>(x, w1, b1, h, inputs, hidden, true);
        forward<<<blocks(batch * outputs), threads>>>(h, w2, b2, y, hidden, outputs, false);
        output_gradient<<<blocks(batch), threads>>>(y, labels, dy);
        hidden_gradient<<<blocks(batch * hidden), threads>>>(dy, w2, h, dh);
        update_weights<<<blocks(hidden * outputs), threads>>>(w2, h, dy, hidden, outputs);
        update_bias<<<blocks(outputs), threads>>>(b2, dy, outputs);
        update_weights<<<blocks(inputs * hidden), threads>>>(w1, x, dh, inputs, hidden);
        update_bias<<<blocks(hidden), threads>>>(b1, dh, hidden);
    };
    print_device();
    print_begin();
    Samples times = measured(samples, 1, [&] {
        for (int i = 0; i < steps; ++i) step();
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
    });
    for (double &time : times) time /= steps;
    print_samples("training step of a perceptron", "C++, own kernels, batch of 32", times, (samples + 1) * steps);

    std::vector<float> weights(inputs * hidden);
    CHECK(cudaMemcpy(weights.data(), w1, weights.size() * sizeof(float), cudaMemcpyDeviceToHost));
    print_check("weights", weights.data(), weights.size() * sizeof(float));
    return 0;
}
