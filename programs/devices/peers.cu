// Several devices in one process: copies between their memories, kernels that reach a peer's, streams and events of
// each, threads with devices of their own. Needs two devices.
#include "../api/driver.cuh"
#include "../check.cuh"

#include <cstring>
#include <thread>
#include <vector>

#include <unistd.h>

__managed__ int managed_total = 5;
__device__ int counter;
__constant__ int offset;

__global__ void fill(int *values, int count, int factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = i * factor + offset;
}

__global__ void add(const int *from, int *to, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] += from[i];
}

__global__ void add_to_total(int value) { managed_total += value; }

__global__ void count_up() { atomicAdd(&counter, 1); }

__global__ void late_fill(volatile int *gate, int *values, int count) {
    if (threadIdx.x == 0) {
        while (*gate == 0) {
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = i + 7;
}

#define EXPECT(what)                                                        \
    do {                                                                    \
        if (!(what)) {                                                      \
            std::printf("FAIL %s:%d: %s\n", __FILE__, __LINE__, #what);     \
            std::exit(1);                                                   \
        }                                                                   \
    } while (0)

// The call is an error, which is also the last one.
#define REFUSED(call, code)                     \
    do {                                        \
        EXPECT((call) == (code));               \
        EXPECT(cudaGetLastError() == (code));   \
    } while (0)

constexpr int COUNT = 1 << 16;
constexpr size_t BYTES = COUNT * sizeof(int);
constexpr int BLOCKS = COUNT / 256;

static void expect_all(const int *device_values, int factor, int plus) {
    std::vector<int> host(COUNT);
    CHECK(cudaMemcpy(host.data(), device_values, BYTES, cudaMemcpyDeviceToHost));
    for (int i = 0; i < COUNT; ++i) {
        if (host[i] != i * factor + plus) {
            std::printf("FAIL element %d is %d, not %d\n", i, host[i], i * factor + plus);
            std::exit(1);
        }
    }
}

static void descriptions(int count) {
    std::vector<cudaDeviceProp> all(count);
    for (int i = 0; i < count; ++i) {
        CHECK(cudaGetDeviceProperties(&all[i], i));
        char bus[32];
        CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, i));
        int found = -1;
        CHECK(cudaDeviceGetByPCIBusId(&found, bus));
        EXPECT(found == i);
        for (int j = 0; j < i; ++j) {
            EXPECT(std::memcmp(&all[i].uuid, &all[j].uuid, sizeof all[i].uuid) != 0);
            EXPECT(all[i].pciBusID != all[j].pciBusID || all[i].pciDeviceID != all[j].pciDeviceID ||
                   all[i].pciDomainID != all[j].pciDomainID);
        }
    }
    int device;
    REFUSED(cudaSetDevice(count), cudaErrorInvalidDevice);
    CHECK(cudaGetDevice(&device));
    EXPECT(device == 0);
}

// NVML counts the same devices in the same order, and reports the same peer access.
static void nvml(int count) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    EXPECT(library);
    const auto find = [library](const char *name) {
        void *found = dlsym(library, name);
        EXPECT(found);
        return found;
    };
    using Handle = void *;
    const auto initialise = reinterpret_cast<int (*)()>(find("nvmlInit_v2"));
    const auto devices = reinterpret_cast<int (*)(unsigned *)>(find("nvmlDeviceGetCount_v2"));
    const auto by_index = reinterpret_cast<int (*)(unsigned, Handle *)>(find("nvmlDeviceGetHandleByIndex_v2"));
    const auto by_bus = reinterpret_cast<int (*)(const char *, Handle *)>(find("nvmlDeviceGetHandleByPciBusId_v2"));
    const auto uuid = reinterpret_cast<int (*)(Handle, char *, unsigned)>(find("nvmlDeviceGetUUID"));
    const auto status = reinterpret_cast<int (*)(Handle, Handle, int, int *)>(find("nvmlDeviceGetP2PStatus"));
    EXPECT(initialise() == 0);
    unsigned counted;
    EXPECT(devices(&counted) == 0 && counted >= static_cast<unsigned>(count));
    // NVML ignores the list of visible devices, in which each number has one digit here.
    const char *visible = std::getenv("CUDA_VISIBLE_DEVICES");
    EXPECT(visible || counted == static_cast<unsigned>(count));
    std::vector<Handle> handles(count);
    for (int i = 0; i < count; ++i) {
        EXPECT(by_index(visible ? visible[2 * i] - '0' : i, &handles[i]) == 0);
        cudaDeviceProp properties;
        CHECK(cudaGetDeviceProperties(&properties, i));
        char bus[32], name[96], expected[96];
        CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, i));
        Handle found;
        EXPECT(by_bus(bus, &found) == 0 && found == handles[i]);
        EXPECT(uuid(handles[i], name, sizeof name) == 0);
        char *end = expected + std::snprintf(expected, sizeof expected, "GPU-");
        for (int byte = 0; byte < 16; ++byte) {
            const bool dash = byte == 4 || byte == 6 || byte == 8 || byte == 10;
            end += std::snprintf(end, 4, "%s%02x", dash ? "-" : "",
                                 static_cast<unsigned char>(properties.uuid.bytes[byte]));
        }
        EXPECT(std::strcmp(name, expected) == 0);
    }
    int reached = -1;
    EXPECT(status(handles[0], handles[1], 0, &reached) == 0 && reached == 0);
}

static void copies(int *const values[2]) {
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        const int plus = device + 1;
        CHECK(cudaMemcpyToSymbol(offset, &plus, sizeof plus));
        fill<<<BLOCKS, 256>>>(values[device], COUNT, device + 2);
        CHECK(cudaGetLastError());
    }
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        expect_all(values[device], device + 2, device + 1);
        cudaPointerAttributes attributes;
        CHECK(cudaPointerGetAttributes(&attributes, values[1 - device]));
        EXPECT(attributes.type == cudaMemoryTypeDevice && attributes.device == 1 - device);
    }
    // A constant is each device's own.
    int offsets[2];
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaMemcpyFromSymbol(&offsets[device], offset, sizeof offset));
    }
    EXPECT(offsets[0] == 1 && offsets[1] == 2);

    // Copies need no peer access, and run after the earlier work of both devices.
    CHECK(cudaSetDevice(1));
    fill<<<BLOCKS, 256>>>(values[1], COUNT, 9);
    CHECK(cudaGetLastError());
    CHECK(cudaSetDevice(0));
    CHECK(cudaMemcpyPeer(values[0], 0, values[1], 1, BYTES));
    expect_all(values[0], 9, 2);
    fill<<<BLOCKS, 256>>>(values[0], COUNT, 11);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(values[1], values[0], BYTES, cudaMemcpyDefault));
    CHECK(cudaSetDevice(1));
    expect_all(values[1], 11, 1);

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMemsetAsync(values[1], 0, BYTES, stream));
    CHECK(cudaMemcpyPeerAsync(values[0], 0, values[1], 1, BYTES, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_all(values[0], 0, 0);
    CHECK(cudaStreamDestroy(stream));
    REFUSED(cudaMemcpyPeer(values[0], 0, values[1], 64, BYTES), cudaErrorInvalidDevice);

    cudaMemcpy3DPeerParms box = {};
    box.dstDevice = 1;
    box.dstPtr = make_cudaPitchedPtr(values[1], 256 * sizeof(int), 256, COUNT / 256);
    box.srcDevice = 0;
    box.srcPtr = make_cudaPitchedPtr(values[0], 256 * sizeof(int), 256, COUNT / 256);
    box.extent = make_cudaExtent(256 * sizeof(int), COUNT / 256, 1);
    CHECK(cudaSetDevice(0));
    fill<<<BLOCKS, 256>>>(values[0], COUNT, 5);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy3DPeer(&box));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(1));
    expect_all(values[1], 5, 1);
}

static void peers(int *const values[2]) {
    for (int device = 0; device < 2; ++device) {
        int can = -1;
        CHECK(cudaDeviceCanAccessPeer(&can, device, 1 - device));
        EXPECT(can == 1);
        CHECK(cudaDeviceCanAccessPeer(&can, device, device));
        EXPECT(can == 0);
        int supported = -1;
        CHECK(cudaDeviceGetP2PAttribute(&supported, cudaDevP2PAttrAccessSupported, device, 1 - device));
        EXPECT(supported == 1);
        REFUSED(cudaDeviceGetP2PAttribute(&supported, cudaDevP2PAttrAccessSupported, device, device),
                cudaErrorInvalidDevice);
    }
    CHECK(cudaSetDevice(0));
    REFUSED(cudaDeviceDisablePeerAccess(1), cudaErrorPeerAccessNotEnabled);
    // A fill needs a device with access to the memory; a copy does not.
    REFUSED(cudaMemsetAsync(values[1], 1, BYTES, nullptr), cudaErrorInvalidValue);
    CHECK(cudaDeviceEnablePeerAccess(1, 0));
    REFUSED(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
    REFUSED(cudaDeviceEnablePeerAccess(1, 1), cudaErrorInvalidValue);
    CHECK(cudaMemsetAsync(values[1], 1, BYTES, nullptr));
    CHECK(cudaDeviceSynchronize());

    // The first device's kernels read and write the second's memory.
    CHECK(cudaSetDevice(1));
    fill<<<BLOCKS, 256>>>(values[1], COUNT, 3);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(0));
    fill<<<BLOCKS, 256>>>(values[0], COUNT, 4);
    add<<<BLOCKS, 256>>>(values[1], values[0], COUNT);
    CHECK(cudaGetLastError());
    expect_all(values[0], 7, 3);
    add<<<BLOCKS, 256>>>(values[0], values[1], COUNT);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(1));
    expect_all(values[1], 10, 5);

    // Access includes memory that is allocated later.
    int *later;
    CHECK(cudaMalloc(&later, BYTES));
    CHECK(cudaSetDevice(0));
    fill<<<BLOCKS, 256>>>(later, COUNT, 6);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    expect_all(later, 6, 1);
    CHECK(cudaFree(later));
    CHECK(cudaDeviceDisablePeerAccess(1));
    REFUSED(cudaDeviceDisablePeerAccess(1), cudaErrorPeerAccessNotEnabled);
}

static void events(int *const values[2]) {
    int *gate;
    CHECK(cudaHostAlloc(&gate, sizeof *gate, cudaHostAllocPortable | cudaHostAllocMapped));
    *gate = 0;
    cudaStream_t streams[2];
    cudaEvent_t events[2];
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamCreateWithFlags(&streams[device], cudaStreamNonBlocking));
        CHECK(cudaEventCreate(&events[device]));
        int found = -1;
        CHECK(cudaStreamGetDevice(streams[device], &found));
        EXPECT(found == device);
    }
    late_fill<<<1, 256, 0, streams[1]>>>(gate, values[1], COUNT);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(events[1], streams[1]));
    // The first device's stream waits for the second's event, whose device need not be the current one.
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamWaitEvent(streams[0], events[1], 0));
    CHECK(cudaMemcpyPeerAsync(values[0], 0, values[1], 1, BYTES, streams[0]));
    EXPECT(cudaStreamQuery(streams[0]) == cudaErrorNotReady);
    EXPECT(cudaEventQuery(events[1]) == cudaErrorNotReady);
    REFUSED(cudaEventRecord(events[1], streams[0]), cudaErrorInvalidResourceHandle);
    REFUSED(cudaEventRecord(events[0], streams[1]), cudaErrorInvalidResourceHandle);
    *static_cast<volatile int *>(gate) = 1;
    CHECK(cudaStreamSynchronize(streams[0]));
    expect_all(values[0], 1, 7);
    CHECK(cudaEventSynchronize(events[1]));
    CHECK(cudaEventRecord(events[0], streams[0]));
    CHECK(cudaEventSynchronize(events[0]));
    float milliseconds;
    REFUSED(cudaEventElapsedTime(&milliseconds, events[1], events[0]), cudaErrorInvalidResourceHandle);
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaEventDestroy(events[device]));
        CHECK(cudaStreamDestroy(streams[device]));
    }
    CHECK(cudaFreeHost(gate));
}

// Every thread has a device, a default stream and a symbol of its own.
static void threads() {
    std::vector<std::thread> all;
    for (int number = 0; number < 4; ++number) {
        all.emplace_back([number] {
            int device = -1;
            CHECK(cudaGetDevice(&device));
            EXPECT(device == 0);
            CHECK(cudaSetDevice(number % 2));
            for (int round = 0; round < 50; ++round) {
                count_up<<<1, 32, 0, cudaStreamPerThread>>>();
                CHECK(cudaGetLastError());
            }
            CHECK(cudaStreamSynchronize(cudaStreamPerThread));
            CHECK(cudaSetDevice(1 - number % 2));
            count_up<<<1, 1, 0, cudaStreamPerThread>>>();
            CHECK(cudaGetLastError());
            CHECK(cudaStreamSynchronize(cudaStreamPerThread));
        });
    }
    for (std::thread &thread : all) thread.join();
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        int value = -1;
        CHECK(cudaMemcpyFromSymbol(&value, counter, sizeof value));
        EXPECT(value == 2 * 50 * 32 + 2);
    }
}

static void pools() {
    cudaMemPool_t of[2];
    for (int device = 0; device < 2; ++device) CHECK(cudaDeviceGetDefaultMemPool(&of[device], device));
    EXPECT(of[0] != of[1]);
    cudaMemLocation first = {};
    first.type = cudaMemLocationTypeDevice;
    first.id = 0;
    cudaMemAccessFlags flags;
    CHECK(cudaMemPoolGetAccess(&flags, of[1], &first));
    EXPECT(flags == cudaMemAccessFlagsProtNone);
    cudaMemAccessDesc description = {};
    description.location = first;
    description.flags = cudaMemAccessFlagsProtReadWrite;
    description.flags = cudaMemAccessFlagsProtRead;
    REFUSED(cudaMemPoolSetAccess(of[1], &description, 1), cudaErrorNotSupported);
    description.flags = cudaMemAccessFlagsProtReadWrite;
    CHECK(cudaMemPoolSetAccess(of[1], &description, 1));
    CHECK(cudaMemPoolGetAccess(&flags, of[1], &first));
    EXPECT(flags == cudaMemAccessFlagsProtReadWrite);

    CHECK(cudaSetDevice(1));
    int *values;
    CHECK(cudaMallocAsync(&values, BYTES, nullptr));
    CHECK(cudaStreamSynchronize(nullptr));
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, values));
    EXPECT(attributes.device == 1);
    CHECK(cudaSetDevice(0));
    fill<<<BLOCKS, 256>>>(values, COUNT, 8);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    expect_all(values, 8, 1);
    CHECK(cudaFreeAsync(values, nullptr));
    CHECK(cudaDeviceSynchronize());
}

// Memory of one device, mapped for both.
static void mappings() {
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = 1;
    size_t unit;
    WORKS(cuMemGetAllocationGranularity, &unit, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    CUmemGenericAllocationHandle memory;
    WORKS(cuMemCreate, &memory, unit, &wanted, 0);
    CUdeviceptr address;
    WORKS(cuMemAddressReserve, &address, unit, 0, 0, 0);
    WORKS(cuMemMap, address, unit, 0, memory, 0);
    CUmemAccessDesc both[2] = {};
    for (int device = 0; device < 2; ++device) {
        both[device].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        both[device].location.id = device;
        both[device].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    WORKS(cuMemSetAccess, address, unit, both, 1);
    unsigned long long access;
    WORKS(cuMemGetAccess, &access, &both[1].location, address);
    EXPECT(access == 0);
    WORKS(cuMemSetAccess, address, unit, both, 2);
    WORKS(cuMemGetAccess, &access, &both[1].location, address);
    EXPECT(access == 3);
    int ordinal = -1;
    WORKS(cuPointerGetAttribute, &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    EXPECT(ordinal == 1);
    int *const values = reinterpret_cast<int *>(address);
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        fill<<<BLOCKS, 256>>>(values, COUNT, 12 + device);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        expect_all(values, 12 + device, device + 1);
    }
    WORKS(cuMemUnmap, address, unit);
    WORKS(cuMemRelease, memory);
    WORKS(cuMemAddressFree, address, unit);
}

__global__ void sample(cudaTextureObject_t texture, int *values, int width) {
    values[threadIdx.x] = tex1Dfetch<int>(texture, threadIdx.x) * width;
}

__global__ void sample_array(cudaTextureObject_t texture, float *values, int width) {
    values[threadIdx.x] = tex2D<float>(texture, threadIdx.x % width, threadIdx.x / width);
}

// Objects and settings of a context belong to the device that was current: graphs, arrays, textures, limits, amounts of
// memory.
static void of_the_second(int *const values[2]) {
    CHECK(cudaSetDevice(1));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    fill<<<BLOCKS, 256, 0, stream>>>(values[1], COUNT, 21);
    add<<<BLOCKS, 256, 0, stream>>>(values[1], values[1], COUNT);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable;
    // An executable graph belongs to the device of its kernels, whichever device is current at its instantiation.
    CHECK(cudaSetDevice(0));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaSetDevice(1));
    for (int round = 0; round < 3; ++round) CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_all(values[1], 42, 4);
    // A launch in a stream of the other device.
    cudaStream_t other;
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaGraphLaunch(executable, other));
    CHECK(cudaMemcpyAsync(values[0], values[1], BYTES, cudaMemcpyDefault, other));
    CHECK(cudaStreamSynchronize(other));
    CHECK(cudaStreamDestroy(other));
    expect_all(values[0], 42, 4);
    CHECK(cudaSetDevice(1));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));

    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeLinear;
    resource.res.linear.devPtr = values[1];
    resource.res.linear.desc = cudaCreateChannelDesc<int>();
    resource.res.linear.sizeInBytes = BYTES;
    cudaTextureDesc reading = {};
    cudaTextureObject_t linear;
    CHECK(cudaCreateTextureObject(&linear, &resource, &reading, nullptr));
    int *sampled;
    CHECK(cudaMalloc(&sampled, 32 * sizeof(int)));
    sample<<<1, 32, 0, stream>>>(linear, sampled, 2);
    CHECK(cudaGetLastError());
    int found[32];
    CHECK(cudaMemcpyAsync(found, sampled, sizeof found, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 32; ++i) EXPECT(found[i] == 2 * (42 * i + 4));
    CHECK(cudaDestroyTextureObject(linear));

    cudaArray_t array;
    const cudaChannelFormatDesc channel = cudaCreateChannelDesc<float>();
    CHECK(cudaMallocArray(&array, &channel, 8, 4));
    float texels[32];
    for (int i = 0; i < 32; ++i) texels[i] = i * 0.5f;
    CHECK(cudaMemcpy2DToArray(array, 0, 0, texels, 32, 32, 4, cudaMemcpyHostToDevice));
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    CHECK(cudaCreateTextureObject(&linear, &resource, &reading, nullptr));
    sample_array<<<1, 32, 0, stream>>>(linear, reinterpret_cast<float *>(sampled), 8);
    CHECK(cudaGetLastError());
    float floats[32];
    CHECK(cudaMemcpyAsync(floats, sampled, sizeof floats, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 32; ++i) EXPECT(floats[i] == texels[i]);
    CHECK(cudaDestroyTextureObject(linear));
    // From an array of one device to one of the other.
    cudaArray_t theirs;
    CHECK(cudaSetDevice(0));
    CHECK(cudaMallocArray(&theirs, &channel, 8, 4));
    cudaMemcpy3DPeerParms box = {};
    box.srcArray = array;
    box.srcDevice = 1;
    box.dstArray = theirs;
    box.dstDevice = 0;
    box.extent = make_cudaExtent(8, 4, 1);
    CHECK(cudaMemcpy3DPeer(&box));
    float returned[32];
    CHECK(cudaMemcpy2DFromArray(returned, 32, theirs, 0, 0, 32, 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 32; ++i) EXPECT(returned[i] == texels[i]);
    CHECK(cudaFreeArray(theirs));
    CHECK(cudaSetDevice(1));
    CHECK(cudaFreeArray(array));
    CHECK(cudaFree(sampled));
    CHECK(cudaStreamDestroy(stream));

    size_t stacks[2], free_before[2], free_after[2], total;
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaDeviceGetLimit(&stacks[device], cudaLimitStackSize));
    }
    CHECK(cudaSetDevice(1));
    CHECK(cudaDeviceSetLimit(cudaLimitStackSize, stacks[1] + 1024));
    size_t larger;
    CHECK(cudaDeviceGetLimit(&larger, cudaLimitStackSize));
    EXPECT(larger >= stacks[1] + 1024);
    void *large;
    // Other processes may allocate or free memory meanwhile; then it is measured again.
    for (int tries = 0;; ++tries) {
        for (int device = 0; device < 2; ++device) {
            CHECK(cudaSetDevice(device));
            CHECK(cudaMemGetInfo(&free_before[device], &total));
        }
        CHECK(cudaSetDevice(1));
        CHECK(cudaMalloc(&large, 64 << 20));
        for (int device = 0; device < 2; ++device) {
            CHECK(cudaSetDevice(device));
            CHECK(cudaMemGetInfo(&free_after[device], &total));
        }
        if (free_before[1] >= free_after[1] + (64 << 20) && free_after[0] == free_before[0]) break;
        EXPECT(tries < 40);
        CHECK(cudaFree(large));
        usleep(500000);
    }
    size_t untouched;
    CHECK(cudaSetDevice(0));
    CHECK(cudaDeviceGetLimit(&untouched, cudaLimitStackSize));
    EXPECT(untouched == stacks[0]);
    // Memory is freed from any device.
    CHECK(cudaFree(large));

    int *managed;
    CHECK(cudaMallocManaged(&managed, BYTES));
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        fill<<<BLOCKS, 256>>>(managed, COUNT, 30 + device);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        EXPECT(managed[5] == 5 * (30 + device) + device + 1);
    }
    CHECK(cudaFree(managed));

    // A managed variable is one for all devices.
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        add_to_total<<<1, 1>>>(10 + device);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
    }
    EXPECT(managed_total == 5 + 10 + 11);
}

// Cooperative kernels on both devices, which begin when the earlier work of both devices is complete.
static void cooperative(int *const values[2]) {
    int supported[2];
    int *gate;
    CHECK(cudaHostAlloc(&gate, sizeof *gate, cudaHostAllocPortable | cudaHostAllocMapped));
    *gate = 0;
    cudaStream_t streams[2];
    CUDA_LAUNCH_PARAMS launches[2] = {};
    int count = COUNT, factors[2] = {17, 18};
    void *arguments[2][3];
    for (int device = 0; device < 2; ++device) {
        WORKS(cuDeviceGetAttribute, &supported[device], CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH, device);
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamCreateWithFlags(&streams[device], cudaStreamNonBlocking));
        cudaFunction_t function;
        CHECK(cudaGetFuncBySymbol(&function, reinterpret_cast<const void *>(fill)));
        CHECK(cudaMemset(values[device], 0, BYTES));
        arguments[device][0] = const_cast<int **>(&values[device]);
        arguments[device][1] = &count;
        arguments[device][2] = &factors[device];
        CUDA_LAUNCH_PARAMS &launch = launches[device];
        launch.function = function;
        // As many blocks as are resident at a time; the rest stays 0.
        launch.gridDimX = launch.gridDimY = launch.gridDimZ = 1;
        launch.blockDimX = 256;
        launch.blockDimY = launch.blockDimZ = 1;
        launch.hStream = streams[device];
        launch.kernelParams = arguments[device];
    }
    CHECK(cudaDeviceSynchronize());
    if (supported[0] && supported[1]) {
        RETURNS(CUDA_ERROR_INVALID_VALUE, cuLaunchCooperativeKernelMultiDevice, launches, 3, 0);
        CHECK(cudaSetDevice(0));
        late_fill<<<1, 256, 0, streams[0]>>>(gate, values[0], COUNT);
        CHECK(cudaGetLastError());
        WORKS(cuLaunchCooperativeKernelMultiDevice, launches, 2, 0);
        EXPECT(cudaStreamQuery(streams[1]) == cudaErrorNotReady);
        *static_cast<volatile int *>(gate) = 1;
        for (int device = 0; device < 2; ++device) {
            CHECK(cudaStreamSynchronize(streams[device]));
            int found[2];
            CHECK(cudaMemcpy(found, values[device] + 255, sizeof found, cudaMemcpyDefault));
            EXPECT(found[0] == 255 * factors[device] + device + 1);
            EXPECT(found[1] == (device == 0 ? 256 + 7 : 0));
        }
    }
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(gate));
}

// Contexts that the program creates belong to the device that it names.
static void contexts() {
    CUcontext primary, made, found;
    CUdevice device;
    WORKS(cuDevicePrimaryCtxRetain, &primary, 0);
    WORKS(cuCtxCreate, &made, nullptr, 0, 1);
    WORKS(cuCtxGetDevice, &device);
    HOLDS(device == 1);
    CUdeviceptr address;
    WORKS(cuMemAlloc, &address, BYTES);
    WORKS(cuPointerGetAttribute, &found, CU_POINTER_ATTRIBUTE_CONTEXT, address);
    HOLDS(found == made);
    CUstream stream;
    CUevent event;
    WORKS(cuStreamCreate, &stream, CU_STREAM_DEFAULT);
    WORKS(cuEventCreate, &event, 0);
    WORKS(cuStreamGetCtx, stream, &found);
    HOLDS(found == made);
    WORKS(cuCtxEnablePeerAccess, primary, 0);
    RETURNS(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cuCtxEnablePeerAccess, primary, 0);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuCtxEnablePeerAccess, nullptr, 0);
    WORKS(cuCtxPushCurrent, primary);
    WORKS(cuCtxGetDevice, &device);
    HOLDS(device == 0);
    // Each direction is enabled by itself.
    RETURNS(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, cuCtxDisablePeerAccess, made);
    CUdeviceptr own;
    WORKS(cuMemAlloc, &own, BYTES);
    WORKS(cuMemsetD32, own, 77, COUNT);
    WORKS(cuMemcpyPeer, address, made, own, primary, BYTES);
    // Behind the copy before, which is in the default streams of both devices.
    WORKS(cuMemcpyPeerAsync, own, primary, address, made, BYTES, stream);
    WORKS(cuEventRecord, event, stream);
    WORKS(cuStreamWaitEvent, nullptr, event, 0);
    unsigned word = 0;
    WORKS(cuMemcpyDtoH, &word, address + 4 * (COUNT - 1), sizeof word);
    HOLDS(word == 77);
    WORKS(cuMemcpyPeer, address, nullptr, own, primary, BYTES);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemcpyPeer, address, made, own, primary, BYTES + 1024);
    WORKS(cuMemFree, own);
    WORKS(cuCtxPopCurrent, &found);
    HOLDS(found == primary);
    WORKS(cuCtxDestroy, made);
    WORKS(cuCtxPushCurrent, primary);
    RETURNS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxEnablePeerAccess, made, 0);
    WORKS(cuCtxPopCurrent, &found);
    WORKS(cuDevicePrimaryCtxRelease, 0);
}

// A reset of one device leaves the other's memory alone.
static void resets(int *const values[2]) {
    CHECK(cudaSetDevice(0));
    fill<<<BLOCKS, 256>>>(values[0], COUNT, 2);
    CHECK(cudaGetLastError());
    CHECK(cudaSetDevice(1));
    CHECK(cudaDeviceReset());
    CHECK(cudaSetDevice(0));
    expect_all(values[0], 2, 1);
    CHECK(cudaSetDevice(1));
    int *fresh;
    CHECK(cudaMalloc(&fresh, BYTES));
    fill<<<BLOCKS, 256>>>(fresh, COUNT, 3);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(fresh));
}

int main() {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    if (count < 2) {
        std::printf("FAIL two devices are needed, there is %d\n", count);
        return 1;
    }
    descriptions(count);
    nvml(count);
    int *values[2];
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaMalloc(&values[device], BYTES));
    }
    copies(values);
    peers(values);
    events(values);
    threads();
    pools();
    mappings();
    of_the_second(values);
    cooperative(values);
    contexts();
    resets(values);
    std::printf("PASS peers: %d devices\n", count);
    return 0;
}
