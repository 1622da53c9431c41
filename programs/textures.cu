// Textures of arrays, of linear memory and of rows, and a surface, each against its formula on the CPU. Linear
// filtering weighs by fractions of 8 bits (CUDA programming guide, "Texture Fetching").
#include "check.cuh"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

__global__ void sample_plane(cudaTextureObject_t texture, const float2 *at, float *result, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) result[i] = tex2D<float>(texture, at[i].x, at[i].y);
}

__global__ void sample_volume(cudaTextureObject_t texture, const float4 *at, float *result, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) result[i] = tex3D<float>(texture, at[i].x, at[i].y, at[i].z);
}

__global__ void fetch_line(cudaTextureObject_t texture, int *result, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) result[i] = tex1Dfetch<int>(texture, count - 1 - i);
}

__global__ void read_bytes(cudaTextureObject_t texture, float *result, int width, int height) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    if (x < width && y < height) result[y * width + x] = tex2D<float>(texture, x + 0.5f, y + 0.5f);
}

__global__ void write_surface(cudaSurfaceObject_t surface, int width, int height) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    if (x < width && y < height) surf2Dwrite(y * 1000 + x, surface, x * static_cast<int>(sizeof(int)), y);
}

static void expect(const char *what, int index, double got, double expected, double error) {
    if (std::fabs(got - expected) <= error) return;
    std::printf("FAIL textures: index %d of %s: %.9g, expected %.9g\n", index, what, got, expected);
    std::exit(1);
}

static cudaTextureObject_t texture_of(const cudaResourceDesc &resource, cudaTextureFilterMode filter,
                                      cudaTextureAddressMode mode, bool normalized, cudaTextureReadMode read) {
    cudaTextureDesc sampling;
    std::memset(&sampling, 0, sizeof sampling);
    for (cudaTextureAddressMode &dimension : sampling.addressMode) dimension = mode;
    sampling.filterMode = filter;
    sampling.normalizedCoords = normalized;
    sampling.readMode = read;
    sampling.borderColor[0] = -2.0f;
    cudaTextureObject_t texture;
    CHECK(cudaCreateTextureObject(&texture, &resource, &sampling, nullptr));
    return texture;
}

static cudaResourceDesc resource_of(cudaArray_t array) {
    cudaResourceDesc resource;
    std::memset(&resource, 0, sizeof resource);
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    return resource;
}

// Returns the index inside an image to which an index outside is mapped; -1 for the border.
static int inside(int index, int extent, cudaTextureAddressMode mode) {
    switch (mode) {
        case cudaAddressModeWrap: return ((index % extent) + extent) % extent;
        case cudaAddressModeMirror: {
            const int place = ((index % (2 * extent)) + 2 * extent) % (2 * extent);
            return std::min(place, 2 * extent - 1 - place);
        }
        case cudaAddressModeBorder: return index < 0 || index >= extent ? -1 : index;
        default: return std::clamp(index, 0, extent - 1);
    }
}

// Linear filtering of up to three dimensions at texel coordinates.
static float filtered(const std::vector<float> &image, const int *extent, int dimensions, const float *at,
                      cudaTextureAddressMode mode) {
    double sum = 0.0;
    for (int corner = 0; corner < 1 << dimensions; ++corner) {
        double weight = 1.0;
        int index = 0, stride = 1;
        bool border = false;
        for (int d = 0; d < dimensions; ++d) {
            const double centred = static_cast<double>(at[d]) - 0.5;
            const double fraction = std::round((centred - std::floor(centred)) * 256.0) / 256.0;
            const int far = corner >> d & 1;
            const int place = inside(static_cast<int>(std::floor(centred)) + far, extent[d], mode);
            weight *= far ? fraction : 1.0 - fraction;
            border |= place < 0;
            index += std::max(place, 0) * stride;
            stride *= extent[d];
        }
        sum += weight * (border ? -2.0 : image[index]);
    }
    return static_cast<float>(sum);
}

static void plane(int width, int height, Random &random) {
    std::vector<float> image(width * height);
    for (float &texel : image) texel = random.fraction() * 100.0f;
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaArray_t array;
    CHECK(cudaMallocArray(&array, &format, width, height));
    const size_t row = width * sizeof(float);
    CHECK(cudaMemcpy2DToArray(array, 0, 0, image.data(), row, row, height, cudaMemcpyHostToDevice));

    const int count = 500;
    std::vector<float2> at(count);
    std::vector<float> result(count);
    float2 *device_at;
    float *device_result;
    CHECK(cudaMalloc(&device_at, count * sizeof(float2)));
    CHECK(cudaMalloc(&device_result, count * sizeof(float)));
    const cudaTextureAddressMode modes[] = {cudaAddressModeWrap, cudaAddressModeClamp, cudaAddressModeMirror,
                                            cudaAddressModeBorder};
    const char *names[] = {"wrap", "clamp", "mirror", "border"};
    for (int m = 0; m < 4; ++m) {
        // From outside by a whole image to outside by another; the fractions are not halves of 1/256.
        for (float2 &place : at) {
            place.x = (static_cast<int>(random.next() % (3 * 256 * width)) - 256 * width + 0.25f) / 256.0f / width;
            place.y = (static_cast<int>(random.next() % (3 * 256 * height)) - 256 * height + 0.25f) / 256.0f / height;
        }
        cudaTextureObject_t texture =
            texture_of(resource_of(array), cudaFilterModeLinear, modes[m], true, cudaReadModeElementType);
        CHECK(cudaMemcpy(device_at, at.data(), count * sizeof(float2), cudaMemcpyHostToDevice));
        sample_plane<<<(count + 127) / 128, 128>>>(texture, device_at, device_result, count);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(result.data(), device_result, count * sizeof(float), cudaMemcpyDeviceToHost));
        CHECK(cudaDestroyTextureObject(texture));
        const int extent[] = {width, height};
        for (int i = 0; i < count; ++i) {
            const float texel[] = {at[i].x * width, at[i].y * height};
            // A fraction may be off by one where coordinates are rounded: 1/256 of the range in each direction.
            expect(names[m], i, result[i], filtered(image, extent, 2, texel, modes[m]), 2.0 * 102.0 / 256.0);
        }
    }
    // The array still holds what was copied into it: a part of it comes back.
    std::vector<float> part(6, 0.0f);
    CHECK(cudaMemcpy2DFromArray(part.data(), 3 * sizeof(float), array, 2 * sizeof(float), 1, 3 * sizeof(float), 2,
                                cudaMemcpyDeviceToHost));
    for (int i = 0; i < 6; ++i) expect("a part", i, part[i], image[(1 + i / 3) * width + 2 + i % 3], 0.0);
    CHECK(cudaFree(device_at));
    CHECK(cudaFree(device_result));
    CHECK(cudaFreeArray(array));
}

static void volume(Random &random) {
    const int extent[] = {9, 7, 5};
    std::vector<float> image(extent[0] * extent[1] * extent[2]);
    for (float &texel : image) texel = random.fraction() * 100.0f;
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    const cudaExtent size = make_cudaExtent(extent[0], extent[1], extent[2]);
    cudaArray_t array;
    CHECK(cudaMalloc3DArray(&array, &format, size));
    cudaMemcpy3DParms copy;
    std::memset(&copy, 0, sizeof copy);
    copy.srcPtr = make_cudaPitchedPtr(image.data(), extent[0] * sizeof(float), extent[0], extent[1]);
    copy.dstArray = array;
    copy.extent = size;
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
    const int count = 300;
    std::vector<float4> at(count);
    for (float4 &place : at) {
        place.x = random.next() % (256 * (extent[0] + 2)) / 256.0f - 1.0f;
        place.y = random.next() % (256 * (extent[1] + 2)) / 256.0f - 1.0f;
        place.z = random.next() % (256 * (extent[2] + 2)) / 256.0f - 1.0f;
    }
    std::vector<float> result(count);
    float4 *device_at;
    float *device_result;
    CHECK(cudaMalloc(&device_at, count * sizeof(float4)));
    CHECK(cudaMalloc(&device_result, count * sizeof(float)));
    CHECK(cudaMemcpy(device_at, at.data(), count * sizeof(float4), cudaMemcpyHostToDevice));
    cudaTextureObject_t texture = texture_of(resource_of(array), cudaFilterModeLinear, cudaAddressModeClamp, false,
                                             cudaReadModeElementType);
    sample_volume<<<(count + 127) / 128, 128>>>(texture, device_at, device_result, count);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(result.data(), device_result, count * sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < count; ++i) {
        // Coordinates are exact, and so are their fractions; weights of three dimensions are rounded twice.
        expect("a volume", i, result[i], filtered(image, extent, 3, &at[i].x, cudaAddressModeClamp), 8 * 100.0 / 256.0);
    }
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaFree(device_at));
    CHECK(cudaFree(device_result));
    CHECK(cudaFreeArray(array));
}

static void line(Random &random) {
    const int count = 4096;
    std::vector<int> values(count), result(count);
    for (int &value : values) value = static_cast<int>(random.next());
    int *memory, *device_result;
    CHECK(cudaMalloc(&memory, count * sizeof(int)));
    CHECK(cudaMalloc(&device_result, count * sizeof(int)));
    cudaResourceDesc resource;
    std::memset(&resource, 0, sizeof resource);
    resource.resType = cudaResourceTypeLinear;
    resource.res.linear.devPtr = memory;
    resource.res.linear.desc = cudaCreateChannelDesc<int>();
    resource.res.linear.sizeInBytes = count * sizeof(int);
    cudaTextureObject_t texture = texture_of(resource, cudaFilterModePoint, cudaAddressModeClamp, false,
                                             cudaReadModeElementType);
    // The texture reads the values that the memory has when the kernel runs.
    CHECK(cudaMemcpy(memory, values.data(), count * sizeof(int), cudaMemcpyHostToDevice));
    fetch_line<<<count / 128, 128>>>(texture, device_result, count);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(result.data(), device_result, count * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < count; ++i) expect("linear memory", i, result[i], values[count - 1 - i], 0.0);
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaFree(memory));
    CHECK(cudaFree(device_result));
}

static void rows(int width, int height, Random &random) {
    std::vector<unsigned char> image(width * height);
    for (unsigned char &texel : image) texel = static_cast<unsigned char>(random.next());
    unsigned char *memory;
    size_t pitch;
    float *device_result;
    CHECK(cudaMallocPitch(&memory, &pitch, width, height));
    CHECK(cudaMalloc(&device_result, image.size() * sizeof(float)));
    CHECK(cudaMemcpy2D(memory, pitch, image.data(), width, width, height, cudaMemcpyHostToDevice));
    cudaResourceDesc resource;
    std::memset(&resource, 0, sizeof resource);
    resource.resType = cudaResourceTypePitch2D;
    resource.res.pitch2D.devPtr = memory;
    resource.res.pitch2D.desc = cudaCreateChannelDesc<unsigned char>();
    resource.res.pitch2D.width = width;
    resource.res.pitch2D.height = height;
    resource.res.pitch2D.pitchInBytes = pitch;
    cudaTextureObject_t texture = texture_of(resource, cudaFilterModePoint, cudaAddressModeClamp, false,
                                             cudaReadModeNormalizedFloat);
    read_bytes<<<dim3((width + 63) / 64, height), 64>>>(texture, device_result, width, height);
    CHECK(cudaGetLastError());
    std::vector<float> result(image.size());
    CHECK(cudaMemcpy(result.data(), device_result, image.size() * sizeof(float), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < image.size(); ++i) expect("rows", i, result[i], image[i] / 255.0, 1e-6);
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaFree(memory));
    CHECK(cudaFree(device_result));
}

static void surfaces(int width, int height) {
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<int>();
    cudaArray_t array;
    CHECK(cudaMallocArray(&array, &format, width, height, cudaArraySurfaceLoadStore));
    const cudaResourceDesc resource = resource_of(array);
    cudaSurfaceObject_t object;
    CHECK(cudaCreateSurfaceObject(&object, &resource));
    write_surface<<<dim3((width + 63) / 64, height), 64>>>(object, width, height);
    CHECK(cudaGetLastError());
    std::vector<int> result(width * height);
    const size_t row = width * sizeof(int);
    CHECK(cudaMemcpy2DFromArray(result.data(), row, array, 0, 0, row, height, cudaMemcpyDeviceToHost));
    for (int i = 0; i < width * height; ++i) expect("a surface", i, result[i], i / width * 1000 + i % width, 0.0);
    CHECK(cudaDestroySurfaceObject(object));
    CHECK(cudaFreeArray(array));
}

int main(int argc, char **argv) {
    const int width = size_argument(argc, argv, 61);
    const int height = (width + 1) / 2;
    Random random(21);
    plane(std::max(width, 8), std::max(height, 4), random);
    volume(random);
    line(random);
    rows(width, height, random);
    surfaces(width, height);
    std::printf("PASS textures %dx%d\n", width, height);
    return 0;
}
