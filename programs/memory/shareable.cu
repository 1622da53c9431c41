// Two processes share mappable memory and a pool by descriptors, as NCCL's ranks do: the second process is this
// program, executed anew, and gets the descriptors over a socket.
#include "../api/driver.cuh"
#include "../check.cuh"

#include <cstring>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static const int COUNT = 1 << 16;

__global__ void add(int *data, int count, int value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] += value;
}

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL shareable: %s\n", what);
    std::fflush(stdout);
    std::_Exit(1);
}

struct Offer {
    CUmemPoolPtrExportData pointer;
    size_t bytes;
};

static void send(int socket, const Offer &offer, const int (&descriptors)[2]) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptors)] = {};
    iovec part = {const_cast<Offer *>(&offer), sizeof offer};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptors);
    std::memcpy(CMSG_DATA(header), descriptors, sizeof descriptors);
    expect(sendmsg(socket, &message, 0) == sizeof offer, "sent");
}

static void receive(int socket, Offer &offer, int (&descriptors)[2]) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptors)] = {};
    iovec part = {&offer, sizeof offer};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    expect(recvmsg(socket, &message, 0) == sizeof offer && CMSG_FIRSTHDR(&message), "received");
    std::memcpy(descriptors, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptors);
}

static void turn(int socket) {
    char word = 'x';
    expect(write(socket, &word, 1) == 1, "the other process is there");
}

static void await(int socket) {
    char word;
    expect(read(socket, &word, 1) == 1, "the other process answers");
}

static CUdeviceptr map(CUmemGenericAllocationHandle memory, size_t bytes) {
    CUdeviceptr address;
    WORKS(cuMemAddressReserve, &address, bytes, 0, 0, 0);
    WORKS(cuMemMap, address, bytes, 0, memory, 0);
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    WORKS(cuMemSetAccess, address, bytes, &access, 1);
    return address;
}

static void unmap(CUdeviceptr address, size_t bytes) {
    WORKS(cuMemUnmap, address, bytes);
    WORKS(cuMemAddressFree, address, bytes);
}

static unsigned long long attribute(CUpointer_attribute which, CUdeviceptr address) {
    unsigned long long value = 0;
    WORKS(cuPointerGetAttribute, &value, which, address);
    return value;
}

static void change(CUdeviceptr data, int value) {
    add<<<(COUNT + 255) / 256, 256>>>(reinterpret_cast<int *>(data), COUNT, value);
    CHECK(cudaDeviceSynchronize());
}

static void holds(CUdeviceptr data, int value, const char *what) {
    static int copy[COUNT];
    WORKS(cuMemcpyDtoH, copy, data, sizeof copy);
    for (int i = 0; i < COUNT; ++i) expect(copy[i] == value, what);
}

static int importer(int socket) {
    CHECK(cudaFree(nullptr));
    Offer offer;
    int descriptors[2];
    receive(socket, offer, descriptors);
    CUmemGenericAllocationHandle memory, again;
    void *passed = reinterpret_cast<void *>(static_cast<uintptr_t>(descriptors[0]));
    WORKS(cuMemImportFromShareableHandle, &memory, passed, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    WORKS(cuMemImportFromShareableHandle, &again, passed, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    expect(memory != again, "a handle of its own each time");
    WORKS(cuMemRelease, again);
    CUmemAllocationProp properties;
    WORKS(cuMemGetAllocationPropertiesFromHandle, &properties, memory);
    expect(properties.type == CU_MEM_ALLOCATION_TYPE_PINNED, "pinned");
    const CUdeviceptr mapped = map(memory, offer.bytes);
    WORKS(cuMemRelease, memory);
    expect(attribute(CU_POINTER_ATTRIBUTE_CONTEXT, mapped) == 0, "of no context");
    expect(attribute(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, mapped) == 0, "not its own to export");
    holds(mapped, 7, "what the exporter wrote");
    change(mapped, 5);

    CUmemoryPool pool;
    passed = reinterpret_cast<void *>(static_cast<uintptr_t>(descriptors[1]));
    WORKS(cuMemPoolImportFromShareableHandle, &pool, passed, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    WORKS(cuMemPoolSetAccess, pool, &access, 1);
    CUdeviceptr pooled;
    WORKS(cuMemPoolImportPointer, &pooled, pool, &offer.pointer);
    holds(pooled, 3, "what the exporter wrote into its pool");
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemPoolTrimTo, pool, 0);
    CUdeviceptr none;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemAllocFromPoolAsync, &none, 64, pool, nullptr);
    change(pooled, 4);
    turn(socket);
    // The exporter has let go of its memory; this process still has it.
    await(socket);
    holds(mapped, 7 + 5 + 6, "memory that only this process has");
    WORKS(cuMemFreeAsync, pooled, nullptr);
    CHECK(cudaDeviceSynchronize());
    WORKS(cuMemPoolDestroy, pool);
    unmap(mapped, offer.bytes);
    turn(socket);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1) return importer(std::atoi(argv[1]));
    int sockets[2];
    expect(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "a socket");
    const pid_t child = fork();
    if (child == 0) {
        close(sockets[0]);
        char number[16];
        std::snprintf(number, sizeof number, "%d", sockets[1]);
        execl("/proc/self/exe", argv[0], number, static_cast<char *>(nullptr));
        std::_Exit(1);
    }
    close(sockets[1]);
    const int socket = sockets[0];
    CHECK(cudaFree(nullptr));
    int supported = 0;
    WORKS(cuDeviceGetAttribute, &supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 0);
    expect(supported == 1, "memory is shared by descriptors");
    WORKS(cuDeviceGetAttribute, &supported, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 0);
    expect(supported & 1, "and so are pools");
    int handles = 0;
    WORKS(cuDeviceGetAttribute, &handles, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0);

    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    size_t bytes;
    WORKS(cuMemGetAllocationGranularity, &bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    CUmemGenericAllocationHandle memory, plain;
    int descriptors[2] = {-1, -1}, other = -1;
    WORKS(cuMemCreate, &plain, bytes, &properties, 0);
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    WORKS(cuMemCreate, &memory, bytes, &properties, 0);
    const CUmemAllocationHandleType descriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemExportToShareableHandle, &other, plain, descriptor, 0);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemExportToShareableHandle, &other, memory, CU_MEM_HANDLE_TYPE_NONE, 0);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemExportToShareableHandle, &other, memory, descriptor, 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemExportToShareableHandle, nullptr, memory, descriptor, 0);
    WORKS(cuMemRelease, plain);
    WORKS(cuMemExportToShareableHandle, &descriptors[0], memory, descriptor, 0);
    WORKS(cuMemExportToShareableHandle, &other, memory, descriptor, 0);
    expect(other >= 0 && other != descriptors[0], "a descriptor of its own each time");
    expect(fcntl(other, F_GETFD) == FD_CLOEXEC, "that no other program inherits");
    close(other);
    for (long wrong : {-1L, 9999L, static_cast<long>(socket)}) {
        CUmemGenericAllocationHandle none;
        RETURNS(CUDA_ERROR_UNKNOWN, cuMemImportFromShareableHandle, &none, reinterpret_cast<void *>(wrong), descriptor);
    }
    CUmemGenericAllocationHandle own;
    WORKS(cuMemImportFromShareableHandle, &own, reinterpret_cast<void *>(static_cast<uintptr_t>(descriptors[0])), descriptor);
    expect(own != memory, "a handle of its own");
    const CUdeviceptr mapped = map(memory, bytes), view = map(own, bytes);
    expect(attribute(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, mapped) == descriptor, "what it may be exported as");
    WORKS(cuMemsetD32, view, 7, COUNT);
    holds(mapped, 7, "one memory at two addresses");
    unmap(view, bytes);
    WORKS(cuMemRelease, own);

    CUmemPoolProps wanted = {};
    wanted.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemoryPool pool, local;
    WORKS(cuMemPoolCreate, &local, &wanted);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemPoolExportToShareableHandle, &other, local, descriptor, 0);
    WORKS(cuMemPoolDestroy, local);
    wanted.handleTypes = descriptor;
    WORKS(cuMemPoolCreate, &pool, &wanted);
    WORKS(cuMemPoolExportToShareableHandle, &descriptors[1], pool, descriptor, 0);
    CUdeviceptr pooled, before, device;
    WORKS(cuMemAllocFromPoolAsync, &before, 512, pool, nullptr);
    WORKS(cuMemAllocFromPoolAsync, &pooled, COUNT * sizeof(int), pool, nullptr);
    WORKS(cuMemsetD32Async, pooled, 3, COUNT, nullptr);
    CHECK(cudaDeviceSynchronize());
    expect(attribute(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, pooled) == descriptor, "what its pool may be exported as");
    expect(attribute(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pooled) == reinterpret_cast<unsigned long long>(pool), "its pool");
    WORKS(cuMemAlloc, &device, 512);
    Offer offer;
    offer.bytes = bytes;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemPoolExportPointer, &offer.pointer, device);
    expect(attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, device) == handles, "shared by handles, or not");
    CUipcMemHandle handle;
    RETURNS(handles ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED, cuIpcGetMemHandle, &handle, device);
    WORKS(cuMemFree, device);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuMemPoolExportPointer, &offer.pointer, pooled + 16);
    WORKS(cuMemPoolExportPointer, &offer.pointer, pooled);
    expect(attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, mapped) == 0, "not by handles");

    send(socket, offer, descriptors);
    close(descriptors[0]);
    close(descriptors[1]);
    await(socket);
    holds(mapped, 12, "what the importer changed");
    holds(pooled, 7, "what the importer changed in the pool");
    change(mapped, 6);
    size_t free_before, free_after, total;
    unmap(mapped, bytes);
    WORKS(cuMemRelease, memory);
    turn(socket);
    await(socket);
    WORKS(cuMemFreeAsync, before, nullptr);
    WORKS(cuMemFreeAsync, pooled, nullptr);
    CHECK(cudaDeviceSynchronize());
    WORKS(cuMemPoolDestroy, pool);
    int status = 0;
    expect(waitpid(child, &status, 0) == child && status == 0, "the importer ends well");

    // A descriptor references memory too, here as the last reference. Other processes may allocate or free memory
    // meanwhile; then it is measured again.
    for (int tries = 0;; ++tries) {
        WORKS(cuMemCreate, &memory, bytes, &properties, 0);
        WORKS(cuMemExportToShareableHandle, &descriptors[0], memory, descriptor, 0);
        WORKS(cuMemRelease, memory);
        WORKS(cuMemGetInfo, &free_before, &total);
        void *held = reinterpret_cast<void *>(static_cast<uintptr_t>(descriptors[0]));
        WORKS(cuMemImportFromShareableHandle, &own, held, descriptor);
        WORKS(cuMemRelease, own);
        close(descriptors[0]);
        // The next creation releases the memory.
        WORKS(cuMemCreate, &memory, bytes, &properties, 0);
        WORKS(cuMemGetInfo, &free_after, &total);
        WORKS(cuMemRelease, memory);
        if (free_after == free_before) break;
        expect(tries < 40, "memory that nobody can name is gone");
        usleep(500000);
    }
    std::printf("PASS shareable\n");
    return 0;
}
