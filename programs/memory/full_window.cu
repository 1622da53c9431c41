// Page-locked memory until there is no more, 512 MiB of it at most: pageable memory can still be copied, kernels run,
// and freed memory can be allocated again.
#include "../check.cuh"

#include <vector>

constexpr size_t BLOCK = 2 << 20;
constexpr size_t BLOCKS = 256;

__global__ void add(unsigned *values, size_t count, unsigned more) {
    const size_t index = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index < count) values[index] += more;
}

// A copy there, a kernel and a copy back, of ordinary memory.
static bool arrives(size_t count) {
    std::vector<unsigned> values(count);
    Random random(static_cast<unsigned>(count));
    for (unsigned &value : values) value = random.next();
    const std::vector<unsigned> before = values;
    unsigned *memory = nullptr;
    CHECK(cudaMalloc(&memory, count * sizeof *memory));
    CHECK(cudaMemcpy(memory, values.data(), count * sizeof *memory, cudaMemcpyHostToDevice));
    add<<<static_cast<unsigned>((count + 255) / 256), 256>>>(memory, count, 5);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(values.data(), memory, count * sizeof *memory, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(memory));
    for (size_t i = 0; i < count; ++i)
        if (values[i] != before[i] + 5) return false;
    return true;
}

int main() {
    std::vector<void *> blocks;
    cudaError_t error = cudaSuccess;
    while (blocks.size() < BLOCKS) {
        void *block = nullptr;
        error = cudaMallocHost(&block, BLOCK);
        if (error != cudaSuccess) break;
        // The first and the last bytes identify the block.
        *static_cast<size_t *>(block) = blocks.size();
        *reinterpret_cast<size_t *>(static_cast<char *>(block) + BLOCK - sizeof(size_t)) = blocks.size();
        blocks.push_back(block);
    }
    std::printf("2 MiB of page-locked memory %zu times, and after the last of them: %s\n", blocks.size(),
                cudaGetErrorName(error));
    bool right = !blocks.empty() && (error == cudaSuccess || cudaGetLastError() == error);
    for (const size_t count : {size_t{1}, size_t{1000}, size_t{262144}, size_t{8000003}}) right = right && arrives(count);

    const bool full = error != cudaSuccess;
    const size_t last = blocks.size() - 1;
    CHECK(cudaFreeHost(blocks[last]));
    CHECK(cudaMallocHost(&blocks[last], BLOCK));
    void *more = nullptr;
    if (full) {
        right = right && cudaMallocHost(&more, BLOCK) == cudaErrorMemoryAllocation;
        static_cast<void>(cudaGetLastError());
    }
    right = right && arrives(1000);
    for (size_t i = 0; i < last; ++i) {
        const auto *block = static_cast<char *>(blocks[i]);
        right = right && *reinterpret_cast<const size_t *>(block) == i &&
                *reinterpret_cast<const size_t *>(block + BLOCK - sizeof(size_t)) == i;
    }
    for (void *block : blocks) CHECK(cudaFreeHost(block));
    right = right && arrives(262144);
    std::printf("%s full_window\n", right ? "PASS" : "FAIL");
    return right ? 0 : 1;
}
