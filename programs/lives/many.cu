// Many CUDA processes at the same time: counts the processes that get a context and copy, and the errors of the others.
#include "../check.cuh"

#include <cstring>
#include <vector>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

// Descriptors of a process: it writes its result to the first, and ends at the end of file of the second.
constexpr int results = 100;
constexpr int until = 101;

// A copy of ordinary memory to the device and back, which has to arrive.
static cudaError_t copies() {
    constexpr size_t bytes = 1 << 20;
    std::vector<unsigned char> sent(bytes), back(bytes);
    for (size_t i = 0; i < bytes; ++i) sent[i] = static_cast<unsigned char>(i * 7 + getpid());
    void *memory = nullptr;
    cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaSuccess) error = cudaMemcpy(memory, sent.data(), bytes, cudaMemcpyHostToDevice);
    if (error == cudaSuccess) error = cudaMemcpy(back.data(), memory, bytes, cudaMemcpyDeviceToHost);
    return error == cudaSuccess && sent != back ? cudaErrorUnknown : error;
}

// One of the many.
static int one() {
    cudaError_t error = cudaFree(nullptr);
    if (error == cudaSuccess) error = copies();
    char none;
    if (write(results, &error, sizeof error) != sizeof error) return 1;
    while (read(until, &none, 1) > 0) {
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && std::strcmp(argv[1], "one") == 0) return one();
    const int count = size_argument(argc, argv, 2);
    int answers[2], held[2];
    if (pipe(answers) != 0 || pipe(held) != 0) return 1;
    for (int i = 0; i < count; ++i) {
        const pid_t child = fork();
        if (child < 0) return 1;
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            dup2(answers[1], results);
            dup2(held[0], until);
            for (int fd : {answers[0], answers[1], held[0], held[1]}) close(fd);
            execl("/proc/self/exe", "many", "one", static_cast<char *>(nullptr));
            _exit(127);
        }
    }
    close(answers[1]);
    close(held[0]);
    int right = 0, answered = 0;
    cudaError_t error, other = cudaSuccess;
    for (; answered < count && read(answers[0], &error, sizeof error) == sizeof error; ++answered) {
        if (error == cudaSuccess) {
            ++right;
        } else {
            other = error;
        }
    }
    close(held[1]);
    while (wait(nullptr) > 0) {
    }
    std::printf("%d of %d have a context and copy, %d were refused with %s\n", right, answered, answered - right,
                cudaGetErrorName(other));
    return answered == count ? 0 : 1;
}
