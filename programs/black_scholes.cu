// European options by the formula of Black and Scholes, in single precision with the functions of CUDA.
#include "check.cuh"

#include <cmath>
#include <vector>

constexpr float RATE = 0.03125f;

struct Option {
    float price, strike, years, volatility;
};

struct Value {
    float call, put;
};

__global__ void black_scholes(const Option *options, Value *values, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const Option option = options[i];
    const float spread = option.volatility * sqrtf(option.years);
    const float drift = (RATE + 0.5f * option.volatility * option.volatility) * option.years;
    const float d1 = (logf(option.price / option.strike) + drift) / spread;
    const float d2 = d1 - spread;
    const float discounted = option.strike * expf(-RATE * option.years);
#ifdef BROKEN_KERNEL
    // For the test that a wrong result is found out: the price moves by two parts in a million.
    const float price = option.price * 1.000002f;
#else
    const float price = option.price;
#endif
    values[i].call = price * normcdff(d1) - discounted * normcdff(d2);
    values[i].put = discounted * normcdff(-d2) - price * normcdff(-d1);
}

int main(int argc, char **argv) {
    const int count = size_argument(argc, argv, 3000);
    std::vector<Option> options(count);
    std::vector<Value> values(count);
    Random random(11);
    for (Option &option : options) {
        option.price = 20.0f + 20.0f * random.fraction();
        option.strike = 20.0f + 20.0f * random.fraction();
        option.years = 0.25f + 4.0f * random.fraction();
        option.volatility = 0.25f + 0.5f * random.fraction();
    }

    Option *device_options;
    Value *device_values;
    CHECK(cudaMalloc(&device_options, count * sizeof(Option)));
    CHECK(cudaMalloc(&device_values, count * sizeof(Value)));
    CHECK(cudaMemcpy(device_options, options.data(), count * sizeof(Option), cudaMemcpyHostToDevice));
    black_scholes<<<(count + 127) / 128, 128>>>(device_options, device_values, count);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(values.data(), device_values, count * sizeof(Value), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_options));
    CHECK(cudaFree(device_values));

    const double rounding = std::ldexp(1.0, -24);
    const auto distribution = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
    const auto density = [](double x) { return std::exp(-0.5 * x * x) / std::sqrt(2.0 * std::acos(-1.0)); };
    for (int i = 0; i < count; ++i) {
        const Option option = options[i];
        const double price = option.price, years = option.years, volatility = option.volatility;
        const double spread = volatility * std::sqrt(years);
        const double ratio = std::log(price / option.strike);
        const double drift = (RATE + 0.5 * volatility * volatility) * years;
        const double d1 = (ratio + drift) / spread, d2 = d1 - spread;
        const double discounted = option.strike * std::exp(-double(RATE) * years);
        // CUDA C++ programming guide, "Mathematical functions": in ulp, of at most two roundings each, logf
        // and expf err by 1, normcdff by 5. The quotient below the logarithm is rounded once, the drift four
        // times, the spread twice, their sum and quotient once each.
        const double sum_error = 1 + 2 * std::fabs(ratio) + 4 * drift + std::fabs(ratio + drift);
        const double error = rounding * (sum_error / spread + 3 * std::fabs(d1));
        const double error2 = error + rounding * (2 * spread + std::fabs(d2));
        // The error of the distribution due to its argument, and normcdff's own error.
        const auto term = [&](double factor, double d, double error, int roundings) {
            return factor * (density(d) * error + (10 + roundings) * rounding * distribution(d));
        };
        const double call = price * distribution(d1) - discounted * distribution(d2);
        const double put = discounted * distribution(-d2) - price * distribution(-d1);
        const double call_error = term(price, d1, error, 2) + term(discounted, d2, error2, 7);
        const double put_error = term(discounted, -d2, error2, 7) + term(price, -d1, error, 2);
        const Value got = values[i];
        if (!(std::fabs(got.call - call) <= call_error) || !(std::fabs(got.put - put) <= put_error)) {
            std::printf("FAIL black_scholes: index %d: call %.9g put %.9g, expected %.9g %.9g\n", i, got.call,
                        got.put, call, put);
            return 1;
        }
    }
    std::printf("PASS black_scholes %d options\n", count);
    return 0;
}
