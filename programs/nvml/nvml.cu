// NVML's figures of a program's own device, memory and processes, and of those of a second process.

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "../check.cuh"

struct Memory { unsigned long long total, free, used; };
struct MemoryV2 { unsigned version; unsigned long long total, reserved, free, used; };
struct Process { unsigned pid; unsigned long long bytes; unsigned instance, part; };

static void *library;

template <typename... A> static unsigned nvml(const char *name, A... arguments)
{
    auto function = reinterpret_cast<unsigned (*)(A...)>(dlsym(library, name));
    return function ? function(arguments...) : 13;
}

static void expect(bool holds, const char *what)
{
    if (!holds) {
        printf("FAIL nvml: %s\n", what);
        exit(1);
    }
}

static unsigned long long used(void *device)
{
    MemoryV2 memory = {};
    memory.version = sizeof memory | 2u << 24;
    expect(nvml("nvmlDeviceGetMemoryInfo_v2", device, &memory) == 0, "the device's memory is known");
    expect(memory.reserved + memory.free + memory.used == memory.total, "its parts are the whole");
    return memory.used;
}

// Returns the memory of the process with this number; -1 if it is not in the list.
static long long held(void *device, pid_t pid)
{
    Process processes[64] = {};
    unsigned count = 64;
    expect(nvml("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, processes) == 0, "the processes are known");
    for (unsigned at = 0; at < count; at++)
        if (processes[at].pid == unsigned(pid))
            return (long long)processes[at].bytes;
    return -1;
}

// Waits until the process with this number holds that much, or is not in the list any more (-1). The list is updated
// asynchronously to the process's own messages.
static void await(void *device, pid_t pid, long long bytes, const char *what)
{
    for (int tries = 0; bytes < 0 ? held(device, pid) >= 0 : held(device, pid) < bytes; tries++) {
        expect(tries < 12000, what);
        usleep(5000);
    }
}

// Waits until so much is used. The figures may be some milliseconds old.
static void await_use(void *device, unsigned long long bytes, const char *what)
{
    for (int tries = 0; used(device) < bytes; tries++) {
        expect(tries < 4000, what);
        usleep(5000);
    }
}

// Frees memory, and checks that the used memory decreases: a process may keep 32 MiB. Tries again if other processes
// allocate as much meanwhile, as they may natively.
static void frees(void *device, void *memory, unsigned long long bytes)
{
    for (int tries = 0;; tries++) {
        unsigned long long with = used(device);
        CHECK(cudaFree(memory));
        for (int waits = 0; waits < 400; waits++) {
            if (used(device) + bytes <= with)
                return;
            usleep(5000);
        }
        expect(tries < 10, "what was freed is not used");
        CHECK(cudaMalloc(&memory, bytes));
    }
}

// Links that are active lead somewhere, by each version of the function; the others nowhere.
static void links(void *device)
{
    struct Field { unsigned id, scope; long long time, latency; unsigned type, result; unsigned long long value; };
    for (unsigned link = 0; link < 18; link++) {
        unsigned active = 7, kind = 7;
        unsigned known = nvml("nvmlDeviceGetNvLinkState", device, link, &active);
        Field state = {165, link};
        expect(nvml("nvmlDeviceGetFieldValues", device, 1, &state) == 0, "the fields are known");
        if (known != 0) {
            expect(state.result != 0, "a link without a state has none among the fields either");
            continue;
        }
        expect(state.result == 0 && unsigned(state.value) == active, "a link has one state");
        char first[68] = {}, second[68] = {};
        unsigned given = nvml("nvmlDeviceGetNvLinkRemotePciInfo", device, link, first);
        expect(nvml("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link, second) == given, "both versions answer alike");
        if (!active)
            continue;
        expect(given == 0, "an active link leads somewhere");
        expect(!strncmp(first, second, 16) && !memcmp(first + 16, second + 16, 12), "both versions give one place");
        expect(nvml("nvmlDeviceGetNvLinkRemoteDeviceType", device, link, &kind) == 0, "it leads to some kind of device");
        void *other = nullptr;
        if (kind == 0)
            expect(nvml("nvmlDeviceGetHandleByPciBusId_v2", second + 36, &other) == 0, "a device that it leads to is there");
    }
    unsigned beyond;
    expect(nvml("nvmlDeviceGetNvLinkState", device, 18u, &beyond) != 0, "there are no more links");
}

// Another process of the tenant: says its number once it holds memory, and ends when its input does.
static int second(int argc, char **argv)
{
    void *memory;
    CHECK(cudaMalloc(&memory, 8 << 20));
    char byte = 1;
    expect(write(1, &byte, 1) == 1 && read(0, &byte, 1) == 0, "the first process listens");
    return 0;
}

// Memory that is allocated on one of several devices counts only there.
static void each_device(int devices)
{
    const unsigned long long bytes = 64 << 20;
    for (int number = 1; number < devices; number++) {
        void *first, *device, *memory;
        expect(nvml("nvmlDeviceGetHandleByIndex_v2", 0u, &first) == 0, "there is a device");
        expect(nvml("nvmlDeviceGetHandleByIndex_v2", unsigned(number), &device) == 0, "there is another device");
        CHECK(cudaSetDevice(number));
        CHECK(cudaFree(nullptr));
        size_t before, after, total;
        CHECK(cudaMemGetInfo(&before, &total));
        unsigned long long of_first = used(first), own = used(device);
        CHECK(cudaMalloc(&memory, bytes));
        await_use(device, own + bytes, "what is allocated on a further device is used there");
        expect(used(first) < of_first + bytes, "it is not used on the first one");
        await(device, getpid(), (long long)bytes, "the process holds it there");
        CHECK(cudaMemGetInfo(&after, &total));
        expect(after + bytes <= before, "it is not free there");
        frees(device, memory, bytes);
    }
    CHECK(cudaSetDevice(0));
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return second(argc, argv);
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    expect(library, "libnvidia-ml.so.1 is found");
    expect(nvml("nvmlInit_v2") == 0, "it can be initialized before CUDA is");
    void *device;
    expect(nvml("nvmlDeviceGetHandleByIndex_v2", 0u, &device) == 0, "there is a device");
    unsigned long long before = used(device);
    expect(held(device, getpid()) < 0, "a process without CUDA is not in the list");

    void *memory;
    CHECK(cudaMalloc(&memory, 64 << 20));
    unsigned long long with = used(device);
    expect(with >= before + (64 << 20), "what the process allocates is used");
    await(device, getpid(), 64 << 20, "the process is in the list with what it holds");

    // The device is the one that CUDA shows.
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    char name[96], uuid[96], digits[96] = "GPU-";
    expect(nvml("nvmlDeviceGetName", device, name, 96u) == 0 && !strcmp(name, properties.name), "its name is CUDA's");
    expect(nvml("nvmlDeviceGetUUID", device, uuid, 96u) == 0, "it has a UUID");
    for (int at = 0; at < 16; at++)
        sprintf(digits + strlen(digits), at == 4 || at == 6 || at == 8 || at == 10 ? "-%02x" : "%02x",
                (unsigned char)properties.uuid.bytes[at]);
    expect(!strcmp(uuid, digits), "its UUID is CUDA's");
    char place[32];
    void *found = nullptr;
    CHECK(cudaDeviceGetPCIBusId(place, sizeof place, 0));
    expect(nvml("nvmlDeviceGetHandleByPciBusId_v2", place, &found) == 0 && found == device, "its place is CUDA's");
    int major = 0, minor = 0;
    expect(nvml("nvmlDeviceGetCudaComputeCapability", device, &major, &minor) == 0, "it has a capability");
    expect(major == properties.major && minor == properties.minor, "its capability is CUDA's");

    int input[2], output[2];
    expect(pipe(input) == 0 && pipe(output) == 0, "pipes");
    pid_t child = fork();
    if (child == 0) {
        dup2(input[0], 0);
        dup2(output[1], 1);
        close(input[1]);
        execl("/proc/self/exe", argv[0], "second", nullptr);
        _exit(9);
    }
    close(output[1]);
    char byte;
    expect(read(output[0], &byte, 1) == 1, "the second process has memory");
    await(device, child, 8 << 20, "the second process is in the list with what it holds");
    await_use(device, with + (8 << 20), "what both hold is used");
    close(input[1]);
    int status;
    expect(waitpid(child, &status, 0) == child && status == 0, "the second process ends well");
    await(device, child, -1, "the second process leaves the list");
    frees(device, memory, 64 << 20);
    links(device);
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    each_device(devices);
    expect(nvml("nvmlShutdown") == 0, "it can be shut down");
    printf("PASS nvml\n");
    return 0;
}
