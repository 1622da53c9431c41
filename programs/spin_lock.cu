// One lock for all threads of all blocks. Lanes of one warp contend for it too, which needs that each of them
// makes progress on its own.
#include "check.cuh"

#include <vector>

constexpr int BLOCK = 64;

struct Account {
    unsigned holder;
    unsigned entries;
    // Depends on the order of all entries.
    unsigned digest;
};

__host__ __device__ unsigned mix(unsigned digest, unsigned thread) {
    return (digest ^ thread) * 2654435761u + 1u;
}

__global__ void enter(unsigned *lock, volatile Account *account, unsigned *order, int turns) {
    const unsigned thread = blockIdx.x * BLOCK + threadIdx.x;
    for (int turn = 0; turn < turns; ++turn) {
        while (atomicCAS(lock, 0u, thread + 1u) != 0u) {}
        __threadfence();
        account->holder = thread;
        const unsigned entry = account->entries;
        order[entry] = thread;
        account->entries = entry + 1u;
        account->digest = mix(account->digest, account->holder);
        __threadfence();
        atomicExch(lock, 0u);
    }
}

int main(int argc, char **argv) {
    const int blocks = size_argument(argc, argv, 4);
    const int turns = 2;
    const unsigned threads = blocks * BLOCK, entries = threads * turns;
    std::vector<unsigned> order(entries), entered(threads);

    unsigned *device_lock, *device_order;
    Account *device_account;
    CHECK(cudaMalloc(&device_lock, sizeof(unsigned)));
    CHECK(cudaMalloc(&device_order, entries * sizeof(unsigned)));
    CHECK(cudaMalloc(&device_account, sizeof(Account)));
    CHECK(cudaMemset(device_lock, 0, sizeof(unsigned)));
    CHECK(cudaMemset(device_order, 0xff, entries * sizeof(unsigned)));
    CHECK(cudaMemset(device_account, 0, sizeof(Account)));
    enter<<<blocks, BLOCK>>>(device_lock, device_account, device_order, turns);
    CHECK(cudaGetLastError());
    unsigned lock;
    Account account;
    CHECK(cudaMemcpy(&lock, device_lock, sizeof(unsigned), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&account, device_account, sizeof(Account), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(order.data(), device_order, entries * sizeof(unsigned), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device_lock));
    CHECK(cudaFree(device_order));
    CHECK(cudaFree(device_account));

    unsigned digest = 0;
    for (unsigned i = 0; i < entries; ++i) {
        if (order[i] >= threads || ++entered[order[i]] > static_cast<unsigned>(turns)) {
            std::printf("FAIL spin_lock: index %u: thread %u has no such turn\n", i, order[i]);
            return 1;
        }
        digest = mix(digest, order[i]);
    }
    if (lock != 0 || account.entries != entries || account.digest != digest) {
        std::printf("FAIL spin_lock: index %u: lock %u, %u entries, digest %08x, expected 0 %u %08x\n", entries,
                    lock, account.entries, account.digest, entries, digest);
        return 1;
    }
    std::printf("PASS spin_lock %u entries of %u threads\n", entries, threads);
    return 0;
}
