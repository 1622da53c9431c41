// Batches of copies: pageable, page-locked and device memory in one call, 3-D regions of memory and of arrays, refused
// copies, and copies that wait because of SYNC_MEMOPS.
#include "../api/driver.cuh"
#include "../check.cuh"

#include <cstring>
#include <vector>

static void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("FAIL batches: %s\n", what);
    std::exit(1);
}

static void refused(cudaError_t error, const char *what) {
    if (error != cudaErrorInvalidValue) {
        std::printf("FAIL batches: %s: %s\n", what, cudaGetErrorName(error));
        std::exit(1);
    }
    cudaGetLastError();
}

// Boxes, in elements of the arrays among their ends.
static void regions(cudaStream_t stream) {
    const int width = 8, height = 4, row = 10, rows = 5;
    std::vector<unsigned> source(row * rows * 2), plain(8 * 4 * 2), back(source.size());
    for (size_t i = 0; i < source.size(); ++i) source[i] = 1000 + (unsigned)i;
    cudaArray_t image;
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned>();
    CHECK(cudaMallocArray(&image, &format, width, height));
    unsigned *device;
    CHECK(cudaMalloc(&device, plain.size() * sizeof(unsigned)));
    CHECK(cudaMemset(device, 0, plain.size() * sizeof(unsigned)));
    const std::vector<unsigned> zeros(width * height);
    CHECK(cudaMemcpy2DToArray(image, 0, 0, zeros.data(), width * 4, width * 4, height, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());

    cudaMemcpy3DBatchOp copies[2] = {};
    // The first two rows of the source, three texels of each, into the middle of the array.
    copies[0].src.type = cudaMemcpyOperandTypePointer;
    copies[0].src.op.ptr.ptr = source.data();
    copies[0].src.op.ptr.rowLength = row;
    copies[0].dst.type = cudaMemcpyOperandTypeArray;
    copies[0].dst.op.array.array = image;
    copies[0].dst.op.array.offset = {2, 1, 0};
    copies[0].extent = make_cudaExtent(3, 2, 1);
    copies[0].srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    // Two layers of memory: bytes, as neither end is an array.
    copies[1].src.type = copies[1].dst.type = cudaMemcpyOperandTypePointer;
    copies[1].src.op.ptr.ptr = source.data();
    copies[1].src.op.ptr.rowLength = row * 4;
    copies[1].src.op.ptr.layerHeight = rows;
    copies[1].dst.op.ptr.ptr = device;
    copies[1].extent = make_cudaExtent(width * 4, height, 2);
    copies[1].srcAccessOrder = cudaMemcpySrcAccessOrderDuringApiCall;
    CHECK(cudaMemcpy3DBatchAsync(2, copies, 0, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(plain.data(), device, plain.size() * 4, cudaMemcpyDeviceToHost));
    for (int z = 0; z < 2; ++z)
        for (int y = 0; y < height; ++y)
            for (int x = 0; x < width; ++x)
                expect(plain[(z * height + y) * width + x] == source[(z * rows + y) * row + x], "a region of memory");
    CHECK(cudaMemcpy2DFromArray(back.data(), width * 4, image, 0, 0, width * 4, height, cudaMemcpyDeviceToHost));
    for (int y = 0; y < height; ++y)
        for (int x = 0; x < width; ++x) {
            const bool inside = x >= 2 && x < 5 && y >= 1 && y < 3;
            expect(back[y * width + x] == (inside ? source[(y - 1) * row + x - 2] : 0), "a region of an array");
        }

    // If one copy is not possible, none is made.
    CHECK(cudaMemset(device, 7, 4));
    CHECK(cudaDeviceSynchronize());
    copies[0].extent.width = width;
    refused(cudaMemcpy3DBatchAsync(2, copies, 0, stream), "past the edge of the array");
    copies[0].extent = make_cudaExtent(3, 0, 1);
    refused(cudaMemcpy3DBatchAsync(2, copies, 0, stream), "no rows");
    copies[0].extent = make_cudaExtent(3, 2, 1);
    copies[0].src.op.ptr.rowLength = 2;
    refused(cudaMemcpy3DBatchAsync(2, copies, 0, stream), "rows that overlap");
    refused(cudaMemcpy3DBatchAsync(0, copies, 0, stream), "no copies");
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(plain.data(), device, 4, cudaMemcpyDeviceToHost));
    expect(plain[0] == 0x07070707, "no region is copied");
    CHECK(cudaFree(device));
    CHECK(cudaFreeArray(image));
}

__global__ void late(volatile unsigned *flag) {
    for (int i = 0; i < 20000; ++i) {
        if (*flag == 7) return;
    }
    *flag = 1;
}

// Copies and fills of device memory wait once the program sets the attribute.
static void waiting() {
    volatile unsigned *flag;
    void *data, *other;
    CHECK(cudaHostAlloc((void **)&flag, sizeof *flag, cudaHostAllocMapped));
    CHECK(cudaMalloc(&data, 4096));
    CHECK(cudaMalloc(&other, 4096));
    const CUdeviceptr place = (CUdeviceptr)data;
    int set = 1;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuPointerSetAttribute, &set, CU_POINTER_ATTRIBUTE_CONTEXT, place);
    WORKS(cuPointerSetAttribute, &set, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, place);
    set = 77;
    WORKS(cuPointerGetAttribute, &set, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, place);
    expect(set == 1, "what was set is kept");
    *flag = 0;
    late<<<1, 1>>>(flag);
    CHECK(cudaMemcpy(data, other, 4096, cudaMemcpyDeviceToDevice));
    expect(*flag == 1, "the copy has waited");
    *flag = 0;
    late<<<1, 1>>>(flag);
    CHECK(cudaMemset(data, 0, 4096));
    expect(*flag == 1, "the fill has waited");
    CHECK(cudaFree(data));
    CHECK(cudaFree(other));
    CHECK(cudaFreeHost((void *)flag));
}

int main() {
    const size_t size = 100000;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    unsigned char *device, *other, *pinned;
    CHECK(cudaMalloc(&device, 4 * size));
    CHECK(cudaMalloc(&other, 4 * size));
    CHECK(cudaMallocHost(&pinned, 4 * size));
    std::vector<unsigned char> source(4 * size), back(4 * size);
    Random random(5);
    for (auto &byte : source) byte = (unsigned char)random.next();
    std::memcpy(pinned, source.data(), 4 * size);

    cudaMemcpyAttributes attributes[2] = {};
    attributes[0].srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes[1].srcAccessOrder = cudaMemcpySrcAccessOrderDuringApiCall;
    size_t firsts[2] = {0, 2};
    // From the program's memory, and from page-locked memory: two sources may be overwritten at once.
    const void *from[4] = {source.data(), pinned + size, source.data() + 2 * size, pinned + 3 * size};
    void *to[4] = {device, device + size, device + 2 * size, device + 3 * size};
    size_t sizes[4] = {size, size - 1, 100, size};
    CHECK(cudaMemset(device, 0, 4 * size));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpyBatchAsync(to, from, sizes, 4, attributes, firsts, 2, stream));
    std::memset(pinned + 3 * size, 0, size);
    // On the device, and back.
    const void *inside[2] = {device, device + 2 * size};
    void *beside[2] = {other + 2 * size, other};
    size_t halves[2] = {2 * size, 2 * size};
    CHECK(cudaMemcpyBatchAsync(beside, inside, halves, 2, attributes, firsts, 1, stream));
    const void *out[2] = {other + 2 * size, other};
    void *home[2] = {back.data(), back.data() + 2 * size};
    CHECK(cudaMemcpyBatchAsync(home, out, halves, 2, attributes, firsts, 1, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < 4 * size; ++i) {
        const size_t part = i / size, at = i % size;
        const unsigned char expected = at < sizes[part] ? source[i] : 0;
        expect(back[i] == expected, "every byte arrived, and no other");
    }

    // If one copy is not possible, those before it are made.
    CHECK(cudaMemset(device, 7, 4 * size));
    CHECK(cudaDeviceSynchronize());
    sizes[3] = size + 1;
    refused(cudaMemcpyBatchAsync(to, from, sizes, 4, attributes, firsts, 2, stream), "past the end");
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(back.data(), device, 4 * size, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < 4 * size; ++i) {
        const size_t part = i / size, at = i % size;
        expect(back[i] == (part < 3 && at < sizes[part] ? source[i] : 7), "those before it and no other");
    }
    sizes[3] = size;
    sizes[1] = 0;
    refused(cudaMemcpyBatchAsync(to, from, sizes, 4, attributes, firsts, 2, stream), "an empty copy");
    sizes[1] = size - 1;
    attributes[0].srcLocHint.type = cudaMemLocationTypeDevice;
    attributes[0].srcLocHint.id = 99;
    refused(cudaMemcpyBatchAsync(to, from, sizes, 4, attributes, firsts, 2, stream), "no such device");
    attributes[0].srcLocHint = {};
    refused(cudaMemcpyBatchAsync(to, from, sizes, 4, attributes, firsts, 2, 0), "the legacy stream");
    refused(cudaMemcpyBatchAsync(to, from, sizes, 0, attributes, firsts, 1, stream), "no copies");
    refused(cudaMemcpyBatchAsync(to, from, sizes, 4, attributes, firsts, 0, stream), "no attributes");
    size_t late[1] = {1};
    refused(cudaMemcpyBatchAsync(to, from, sizes, 4, attributes, late, 1, stream), "a copy without attributes");
    attributes[0].srcAccessOrder = cudaMemcpySrcAccessOrderInvalid;
    refused(cudaMemcpyBatchAsync(to, from, sizes, 4, attributes, firsts, 2, stream), "no order of access");

    regions(stream);
    waiting();
    std::printf("PASS batches\n");
    return 0;
}
