// NCCL's operations between processes, one rank each, every element checked. Arguments: the device of each rank.
#include "../check.cuh"

#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

// Environment variables with a rank's number and folder.
constexpr const char *RANK = "COLLECTIVES_RANK", *FOLDER = "COLLECTIVES_FOLDER";
// Variable that makes NCCL treat each rank as one on a host of its own.
constexpr const char *HOST_EACH = "COLLECTIVES_HOST_EACH";
// Seconds after which the program counts as hung.
constexpr unsigned PATIENCE = 900;

static int rank_count, this_rank;

#define EXPECT(what)                                                                             \
    do {                                                                                         \
        if (!(what)) {                                                                           \
            std::printf("FAIL %s:%d: rank %d: %s\n", __FILE__, __LINE__, this_rank, #what);      \
            std::exit(1);                                                                        \
        }                                                                                        \
    } while (0)

#define NCCL(call)                                                                               \
    do {                                                                                         \
        const ncclResult_t result = (call);                                                      \
        if (result != ncclSuccess) {                                                             \
            std::printf("FAIL %s:%d: rank %d: %s: %s (%s)\n", __FILE__, __LINE__, this_rank,     \
                        #call, ncclGetErrorString(result), ncclGetLastError(nullptr));           \
            std::exit(1);                                                                        \
        }                                                                                        \
    } while (0)

template <typename T> ncclDataType_t type_of();
template <> ncclDataType_t type_of<float>() { return ncclFloat32; }
template <> ncclDataType_t type_of<double>() { return ncclFloat64; }
template <> ncclDataType_t type_of<int>() { return ncclInt32; }

// Contribution of a rank: small integers, so that sums of all ranks are exact in every type.
static int value(int rank, size_t i) { return static_cast<int>((i * 7 + rank * 13) % 101) - 50; }

// Memory of the device.
template <typename T> struct Buffer {
    T *at;
    size_t count;
    explicit Buffer(size_t count) : count(count) { CHECK(cudaMalloc(&at, count * sizeof(T))); }
    ~Buffer() { CHECK(cudaFree(at)); }
    // Fills the buffer with a value that no operation produces.
    void spoil() {
        CHECK(cudaMemset(at, 0x55, count * sizeof(T)));
        CHECK(cudaDeviceSynchronize());
    }
    // The values of `rank` from `first` on.
    void fill(int rank, size_t first = 0) {
        std::vector<T> host(count);
        for (size_t i = 0; i < count; ++i) host[i] = static_cast<T>(value(rank, first + i));
        CHECK(cudaMemcpy(at, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
        // The copy may still be under way, for which the stream of the operations does not wait.
        CHECK(cudaDeviceSynchronize());
    }
    template <typename F> void expect(F wanted) {
        std::vector<T> host(count);
        CHECK(cudaMemcpy(host.data(), at, count * sizeof(T), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < count; ++i) {
            if (host[i] != static_cast<T>(wanted(i))) {
                std::printf("FAIL rank %d: element %zu of %zu is %g, not %g\n", this_rank, i, count,
                            static_cast<double>(host[i]), static_cast<double>(wanted(i)));
                std::exit(1);
            }
        }
    }
};

static int sum(size_t i) {
    int total = 0;
    for (int rank = 0; rank < rank_count; ++rank) total += value(rank, i);
    return total;
}

static int greatest(size_t i) {
    int found = value(0, i);
    for (int rank = 1; rank < rank_count; ++rank) found = std::max(found, value(rank, i));
    return found;
}

template <typename T> void check(ncclComm_t comm, cudaStream_t stream, size_t count) {
    const ncclDataType_t type = type_of<T>();
    const int last = rank_count - 1, next = (this_rank + 1) % rank_count;
    const int previous = (this_rank + last) % rank_count;
    Buffer<T> from(count), to(count), all(count * rank_count);

    from.fill(this_rank);
    to.spoil();
    NCCL(ncclAllReduce(from.at, to.at, count, type, ncclSum, comm, stream));
    CHECK(cudaStreamSynchronize(stream));
    to.expect(sum);
    NCCL(ncclAllReduce(from.at, from.at, count, type, ncclMax, comm, stream));
    CHECK(cudaStreamSynchronize(stream));
    from.expect(greatest);

    from.fill(this_rank);
    to.spoil();
    NCCL(ncclBroadcast(from.at, to.at, count, type, last, comm, stream));
    CHECK(cudaStreamSynchronize(stream));
    to.expect([&](size_t i) { return value(last, i); });
    to.fill(this_rank, 5);
    NCCL(ncclReduce(from.at, to.at, count, type, ncclSum, 0, comm, stream));
    CHECK(cudaStreamSynchronize(stream));
    to.expect([&](size_t i) { return this_rank == 0 ? sum(i) : value(this_rank, i + 5); });

    all.spoil();
    NCCL(ncclAllGather(from.at, all.at, count, type, comm, stream));
    CHECK(cudaStreamSynchronize(stream));
    all.expect([&](size_t i) { return value(static_cast<int>(i / count), i % count); });
    all.fill(this_rank);
    to.spoil();
    NCCL(ncclReduceScatter(all.at, to.at, count, type, ncclSum, comm, stream));
    CHECK(cudaStreamSynchronize(stream));
    to.expect([&](size_t i) { return sum(this_rank * count + i); });

    to.spoil();
    NCCL(ncclGroupStart());
    NCCL(ncclSend(from.at, count, type, next, comm, stream));
    NCCL(ncclRecv(to.at, count, type, previous, comm, stream));
    NCCL(ncclGroupEnd());
    CHECK(cudaStreamSynchronize(stream));
    to.expect([&](size_t i) { return value(previous, i); });
}

// An all-reduce that a graph repeats: each launch multiplies the values by the number of ranks.
static void check_graph(ncclComm_t comm, cudaStream_t stream) {
    constexpr int launches = 3;
    Buffer<double> values(5000);
    values.fill(0);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    NCCL(ncclAllReduce(values.at, values.at, values.count, ncclFloat64, ncclSum, comm, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < launches; ++i) CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    int factor = 1;
    for (int i = 0; i < launches; ++i) factor *= rank_count;
    values.expect([&](size_t i) { return value(0, i) * factor; });
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
}

static void run_rank(const std::string &folder, int device) {
    ncclUniqueId id;
    const std::string name = folder + "/id", part = folder + "/part";
    if (this_rank == 0) {
        NCCL(ncclGetUniqueId(&id));
        FILE *file = std::fopen(part.c_str(), "w");
        EXPECT(file && std::fwrite(&id, sizeof(id), 1, file) == 1 && std::fclose(file) == 0);
        EXPECT(std::rename(part.c_str(), name.c_str()) == 0);
    } else {
        FILE *file;
        while ((file = std::fopen(name.c_str(), "r")) == nullptr) usleep(10'000);
        EXPECT(std::fread(&id, sizeof(id), 1, file) == 1 && std::fclose(file) == 0);
    }
    CHECK(cudaSetDevice(device));
    ncclComm_t comm;
    NCCL(ncclCommInitRank(&comm, rank_count, id, this_rank));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    // From counts that fit beside a message's flags to those that are sent in portions.
    for (const size_t count : {1, 1000, 40'000, 300'001}) {
        check<float>(comm, stream, count);
        check<int>(comm, stream, count);
    }
    check<double>(comm, stream, 20'000);
    check_graph(comm, stream);
    CHECK(cudaStreamDestroy(stream));
    NCCL(ncclCommDestroy(comm));
}

// Becomes a rank, which ends with the process that started it.
static void become(int rank, char **argv) {
    const std::string number = std::to_string(rank);
    setenv(RANK, number.c_str(), 1);
    if (getenv(HOST_EACH)) setenv("NCCL_HOSTID", ("host" + number).c_str(), 1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execv("/proc/self/exe", argv);
    _exit(127);
}

static int start_ranks(char **argv) {
    char folder[] = "/tmp/collectives-XXXXXX";
    EXPECT(mkdtemp(folder) != nullptr);
    setenv(FOLDER, folder, 1);
    std::set<pid_t> ranks;
    bool passed = true;
    for (int rank = 0; passed && rank < rank_count; ++rank) {
        const pid_t child = fork();
        if (child == 0) become(rank, argv);
        passed = child > 0;
        if (passed) ranks.insert(child);
    }
    while (!ranks.empty()) {
        // The others would wait for one that failed.
        if (!passed)
            for (const pid_t rank : ranks) kill(rank, SIGTERM);
        int status = 0;
        const pid_t ended = wait(&status);
        if (ended < 0) break;
        ranks.erase(ended);
        passed = passed && status == 0;
    }
    std::filesystem::remove_all(folder);
    std::puts(passed ? "PASS" : "FAIL");
    return passed ? 0 : 1;
}

int main(int argc, char **argv) {
    rank_count = argc - 1;
    if (rank_count < 2) {
        std::puts("FAIL the arguments are the devices of at least two ranks");
        return 1;
    }
    alarm(PATIENCE);
    const char *rank = getenv(RANK), *folder = getenv(FOLDER);
    if (!rank || !folder) return start_ranks(argv);
    this_rank = std::atoi(rank);
    EXPECT(this_rank >= 0 && this_rank < rank_count);
    run_rank(folder, std::atoi(argv[1 + this_rank]));
    std::printf("rank %d: as computed\n", this_rank);
}
