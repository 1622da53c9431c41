// Two threads hand CUDA objects to each other under a mutex. Work that one thread has put on a stream must run before
// work that the other puts there next. A kernel with a ticket checks the order on the device.
//
// handoff [HAND-OFFS] [stream|legacy|event|allocation|created|all]
#include "../check.cuh"

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

// Device state: the next ticket that is due, and how often another one came.
struct Turnstile {
    int due;
    int inversions;
    int first_wrong;
};

__global__ void pass(Turnstile *turnstile, int ticket) {
    if (turnstile->due != ticket) {
        if (turnstile->inversions == 0) turnstile->first_wrong = ticket;
        turnstile->inversions += 1;
    }
    turnstile->due = ticket + 1;
}

__global__ void write_ticket(int *cell, int ticket) { *cell = ticket; }

__global__ void expect_ticket(const int *cell, Turnstile *turnstile, int ticket) {
    if (*cell != ticket) {
        if (turnstile->inversions == 0) turnstile->first_wrong = ticket;
        turnstile->inversions += 1;
    }
    turnstile->due = ticket + 1;
}

// The two threads alternate: each turn runs with the lock held and then goes to the other one.
// Between the turns each spins for a random while, so that the hand-over finds the other side early or late.
template <typename Turn> void alternate(int hand_offs, Turn turn) {
    std::mutex mutex;
    std::condition_variable changed;
    int next = 0;
    auto run = [&](int parity) {
        Random random(17 + parity);
        for (int ticket = parity; ticket < hand_offs; ticket += 2) {
            {
                std::unique_lock<std::mutex> lock(mutex);
                changed.wait(lock, [&] { return next == ticket; });
                turn(ticket);
                next = ticket + 1;
            }
            changed.notify_all();
            for (volatile unsigned spin = random.next() % 512; spin > 0; spin = spin - 1) {
            }
        }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
}

// Waits for all work and counts tickets that came out of order.
int settle(const char *what, int hand_offs, Turnstile *turnstile) {
    CHECK(cudaDeviceSynchronize());
    Turnstile seen;
    CHECK(cudaMemcpy(&seen, turnstile, sizeof(seen), cudaMemcpyDeviceToHost));
    CHECK(cudaMemset(turnstile, 0, sizeof(seen)));
    CHECK(cudaDeviceSynchronize());
    if (seen.due != hand_offs) {
        std::printf("FAIL handoff: index %d: %s: the last ticket was %d\n", hand_offs - 1, what, seen.due - 1);
        std::exit(1);
    }
    if (seen.inversions != 0) {
        std::printf("%s: %d inversions, the first at ticket %d\n", what, seen.inversions, seen.first_wrong);
    }
    return seen.inversions;
}

int main(int argc, char **argv) {
    const int hand_offs = size_argument(argc, argv, 400);
    const char *kind = argc > 2 ? argv[2] : "all";
    const auto wanted = [&](const char *name) { return !std::strcmp(kind, name) || !std::strcmp(kind, "all"); };
    int rounds = 0, inversions = 0;

    Turnstile *turnstile;
    CHECK(cudaMalloc(&turnstile, sizeof(Turnstile)));
    CHECK(cudaMemset(turnstile, 0, sizeof(Turnstile)));
    cudaStream_t streams[2];
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaDeviceSynchronize());

    if (wanted("stream")) {
        alternate(hand_offs, [&](int ticket) {
            pass<<<1, 1, 0, streams[0]>>>(turnstile, ticket);
            CHECK(cudaGetLastError());
        });
        inversions += settle("one stream", hand_offs, turnstile);
        ++rounds;
    }
    if (wanted("legacy")) {
        alternate(hand_offs, [&](int ticket) {
            pass<<<1, 1>>>(turnstile, ticket);
            CHECK(cudaGetLastError());
        });
        inversions += settle("the legacy stream", hand_offs, turnstile);
        ++rounds;
    }
    if (wanted("event")) {
        // One event, recorded by one thread and waited for by the other, each on its own stream.
        alternate(hand_offs, [&](int ticket) {
            cudaStream_t stream = streams[ticket % 2];
            if (ticket > 0) CHECK(cudaStreamWaitEvent(stream, event, 0));
            pass<<<1, 1, 0, stream>>>(turnstile, ticket);
            CHECK(cudaGetLastError());
            CHECK(cudaEventRecord(event, stream));
        });
        inversions += settle("an event", hand_offs, turnstile);
        ++rounds;
    }
    if (wanted("allocation")) {
        // Memory is allocated and written by one thread, checked and freed by the other.
        int *cell = nullptr;
        alternate(hand_offs, [&](int ticket) {
            if (cell != nullptr) {
                expect_ticket<<<1, 1, 0, streams[0]>>>(cell, turnstile, ticket - 1);
                CHECK(cudaGetLastError());
                CHECK(cudaFree(cell));
            }
            CHECK(cudaMalloc(&cell, sizeof(int)));
            write_ticket<<<1, 1, 0, streams[0]>>>(cell, ticket);
            CHECK(cudaGetLastError());
        });
        inversions += settle("an allocation", hand_offs - 1, turnstile);
        CHECK(cudaFree(cell));
        ++rounds;
    }
    if (wanted("created")) {
        // A stream and an event that one thread creates are first used, and destroyed, by the other.
        cudaStream_t stream = nullptr;
        cudaEvent_t fresh = nullptr;
        alternate(hand_offs, [&](int ticket) {
            if (stream != nullptr) {
                CHECK(cudaStreamWaitEvent(stream, fresh, 0));
                pass<<<1, 1, 0, stream>>>(turnstile, ticket - 1);
                CHECK(cudaGetLastError());
                CHECK(cudaStreamSynchronize(stream));
                CHECK(cudaEventDestroy(fresh));
                CHECK(cudaStreamDestroy(stream));
            }
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            CHECK(cudaEventCreateWithFlags(&fresh, cudaEventDisableTiming));
            CHECK(cudaEventRecord(fresh, stream));
        });
        inversions += settle("a created stream and event", hand_offs - 1, turnstile);
        CHECK(cudaEventDestroy(fresh));
        CHECK(cudaStreamDestroy(stream));
        ++rounds;
    }
    if (rounds == 0 || hand_offs < 2) {
        std::printf("FAIL handoff: at least 2 hand-offs of stream, legacy, event, allocation, created or all\n");
        return 1;
    }

    CHECK(cudaEventDestroy(event));
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(turnstile));
    if (inversions != 0) {
        std::printf("FAIL handoff: %d inversions in %d hand-offs\n", inversions, rounds * hand_offs);
        return 1;
    }
    std::printf("PASS handoff %d hand-offs inversions 0\n", rounds * hand_offs);
    return 0;
}
