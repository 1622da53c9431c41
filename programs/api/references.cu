// Texture and surface references, which programs of CUDA 11 use and the present headers lack: their state, and reads
// and writes of kernels through them.
#include "driver.cuh"

#include <cstdint>
#include <cstring>
#include <vector>

typedef void *Reference;

#define GOOD(...) HOLDS(call(__VA_ARGS__) == CUDA_SUCCESS)
#define BAD_VALUE(...) HOLDS(call(__VA_ARGS__) == CUDA_ERROR_INVALID_VALUE)
#define BAD_HANDLE(...) HOLDS(call(__VA_ARGS__) == CUDA_ERROR_INVALID_HANDLE)

static const char PTX[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .global .texref plane;
.visible .global .texref other;
.visible .global .surfref canvas;
.visible .global .u32 word;
.visible .entry fetch(.param .u64 out, .param .f32 x, .param .f32 y)
{
    .reg .b64 %o;
    .reg .f32 %x, %y, %a, %b, %c, %d;
    ld.param.u64 %o, [out];
    ld.param.f32 %x, [x];
    ld.param.f32 %y, [y];
    tex.2d.v4.f32.f32 {%a, %b, %c, %d}, [plane, {%x, %y}];
    st.global.f32 [%o], %a;
    ret;
}
.visible .entry element(.param .u64 out, .param .s32 x)
{
    .reg .b64 %o;
    .reg .s32 %x;
    .reg .b32 %a, %b, %c, %d;
    ld.param.u64 %o, [out];
    ld.param.s32 %x, [x];
    tex.1d.v4.s32.s32 {%a, %b, %c, %d}, [other, {%x}];
    st.global.b32 [%o], %a;
    ret;
}
.visible .entry store(.param .s32 x, .param .s32 y, .param .u32 v)
{
    .reg .s32 %x, %y;
    .reg .b32 %v;
    ld.param.s32 %x, [x];
    ld.param.s32 %y, [y];
    ld.param.u32 %v, [v];
    sust.b.2d.b32.trap [canvas, {%x, %y}], {%v};
    ret;
}
)";

static CUmodule module;
static CUdeviceptr out;

static void launch(const char *name, void **arguments) {
    CUfunction function;
    WORKS(cuModuleGetFunction, &function, module, name);
    WORKS(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr);
}

static float fetch(float x, float y) {
    float value = -1;
    void *arguments[] = {&out, &x, &y};
    launch("fetch", arguments);
    WORKS(cuMemcpyDtoH, &value, out, sizeof value);
    return value;
}

static int element(int x) {
    int value = -1;
    void *arguments[] = {&out, &x};
    launch("element", arguments);
    WORKS(cuMemcpyDtoH, &value, out, sizeof value);
    return value;
}

template <typename T>
static T get(const char *name, Reference reference) {
    T value{};
    HOLDS(call(name, &value, reference) == CUDA_SUCCESS);
    return value;
}

static int mode(Reference reference, int dimension) {
    int value = -1;
    GOOD("cuTexRefGetAddressMode", &value, reference, dimension);
    return value;
}

static CUarray image(unsigned flags, CUarray_format format) {
    const CUDA_ARRAY3D_DESCRIPTOR shape = {4, 4, 0, format, 1, flags};
    CUarray array;
    WORKS(cuArray3DCreate, &array, &shape);
    return array;
}

static void copy(CUarray array, void *rows, bool back) {
    CUDA_MEMCPY2D whole;
    std::memset(&whole, 0, sizeof whole);
    whole.srcMemoryType = back ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_HOST;
    whole.dstMemoryType = back ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_ARRAY;
    whole.srcArray = whole.dstArray = array;
    whole.srcHost = whole.dstHost = rows;
    whole.srcPitch = whole.dstPitch = whole.WidthInBytes = 16;
    whole.Height = 4;
    WORKS(cuMemcpy2D, &whole);
}

// State of a new reference.
static void fresh(Reference reference) {
    CUdeviceptr address = 7;
    int format = 7, channels = 7;
    float low = 7, high = 7, border[4] = {7, 7, 7, 7};
    CUarray array;
    CUmipmappedArray mipmap;
    BAD_VALUE("cuTexRefGetAddress_v2", &address, reference);
    HOLDS(address == 0);
    BAD_VALUE("cuTexRefGetArray", &array, reference);
    BAD_VALUE("cuTexRefGetMipmappedArray", &mipmap, reference);
    for (int dimension = 0; dimension < 3; ++dimension) HOLDS(mode(reference, dimension) == CU_TR_ADDRESS_MODE_CLAMP);
    BAD_VALUE("cuTexRefGetAddressMode", &format, reference, 3);
    GOOD("cuTexRefGetFormat", &format, &channels, reference);
    HOLDS(format == CU_AD_FORMAT_FLOAT && channels == 1);
    HOLDS(get<int>("cuTexRefGetFilterMode", reference) == CU_TR_FILTER_MODE_POINT);
    HOLDS(get<int>("cuTexRefGetMipmapFilterMode", reference) == CU_TR_FILTER_MODE_POINT);
    HOLDS(get<float>("cuTexRefGetMipmapLevelBias", reference) == 0);
    GOOD("cuTexRefGetMipmapLevelClamp", &low, &high, reference);
    GOOD("cuTexRefGetBorderColor", border, reference);
    HOLDS(low == 0 && high == 0 && border[0] == 0 && border[3] == 0);
    HOLDS(get<int>("cuTexRefGetMaxAnisotropy", reference) == 0 && get<unsigned>("cuTexRefGetFlags", reference) == 0);
}

static void textures() {
    Reference plane, again, other;
    GOOD("cuModuleGetTexRef", &plane, module, "plane");
    GOOD("cuModuleGetTexRef", &again, module, "plane");
    HOLDS(plane == again);
    GOOD("cuModuleGetTexRef", &other, module, "other");
    HOLDS(plane != other);
    for (const char *name : {"missing", "word", "canvas"}) {
        HOLDS(call("cuModuleGetTexRef", &again, module, name) == CUDA_ERROR_NOT_FOUND);
    }
    BAD_VALUE("cuModuleGetTexRef", nullptr, module, "plane");
    BAD_VALUE("cuModuleGetTexRef", &again, module, nullptr);
    BAD_HANDLE("cuModuleGetTexRef", &again, nullptr, "plane");
    CUdeviceptr address;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuModuleGetGlobal, &address, nullptr, module, "plane");
    fresh(plane);

    // An array, read in several ways.
    float texels[16];
    for (int i = 0; i < 16; ++i) texels[i] = (float)i;
    const CUarray array = image(0, CU_AD_FORMAT_FLOAT);
    copy(array, texels, false);
    GOOD("cuTexRefSetArray", plane, array, 1u);
    HOLDS(get<CUarray>("cuTexRefGetArray", plane) == array);
    HOLDS(fetch(1.5f, 1.5f) == 5);
    GOOD("cuTexRefSetFilterMode", plane, 1);
    HOLDS(fetch(1.5f, 2.0f) == 7);
    GOOD("cuTexRefSetFlags", plane, 2u);
    HOLDS(fetch(0.5f, 0.5f) == 7.5f);
    GOOD("cuTexRefSetAddressMode", plane, 0, 0);
    GOOD("cuTexRefSetAddressMode", plane, 1, 3);
    HOLDS(mode(plane, 0) == 0 && mode(plane, 1) == 3 && mode(plane, 2) == 1);
    HOLDS(fetch(1.125f, 0.125f) == 0);
    const float border[4] = {9, 8, 7, 6};
    GOOD("cuTexRefSetBorderColor", plane, border);
    HOLDS(fetch(0.125f, 2.0f) == 9);
    float kept[4];
    GOOD("cuTexRefGetBorderColor", kept, plane);
    HOLDS(std::memcmp(kept, border, sizeof kept) == 0);
    HOLDS(get<unsigned>("cuTexRefGetFlags", plane) == 2 && get<int>("cuTexRefGetFilterMode", plane) == 1);

    BAD_VALUE("cuTexRefSetArray", plane, array, 2u);
    BAD_HANDLE("cuTexRefSetArray", plane, nullptr, 1u);
    BAD_HANDLE("cuTexRefSetArray", nullptr, array, 1u);
    BAD_VALUE("cuTexRefSetFlags", plane, 0x80u);
    BAD_VALUE("cuTexRefSetAddressMode", plane, 3, 0);
    BAD_VALUE("cuTexRefSetMipmapFilterMode", plane, 2);
    BAD_VALUE("cuTexRefSetBorderColor", plane, nullptr);
    BAD_VALUE("cuTexRefSetFormat", plane, CU_AD_FORMAT_UNSIGNED_INT32, 3);
    GOOD("cuTexRefSetAddressMode", plane, 0, 4);
    HOLDS(mode(plane, 0) == CU_TR_ADDRESS_MODE_CLAMP);
    GOOD("cuTexRefSetMaxAnisotropy", plane, 99u);
    HOLDS(get<int>("cuTexRefGetMaxAnisotropy", plane) == 99);

    // Memory, from a multiple of the alignment on.
    CUdeviceptr memory;
    size_t offset = 77;
    int words[1024];
    for (int i = 0; i < 1024; ++i) words[i] = 100 + i;
    WORKS(cuMemAlloc, &memory, sizeof words);
    WORKS(cuMemcpyHtoD, memory, words, sizeof words);
    GOOD("cuTexRefSetFlags", other, 1u);
    GOOD("cuTexRefSetFormat", other, CU_AD_FORMAT_SIGNED_INT32, 1);
    GOOD("cuTexRefSetAddress_v2", &offset, other, memory, (size_t)64);
    HOLDS(offset == 0 && get<CUdeviceptr>("cuTexRefGetAddress_v2", other) == memory);
    HOLDS(element(3) == 103 && element(16) == 0 && element(-1) == 0);
    GOOD("cuTexRefSetAddress_v2", &offset, other, memory + 4, (size_t)60);
    HOLDS(offset == 4 && element(1) == 101);
    BAD_VALUE("cuTexRefSetAddress_v2", (size_t *)nullptr, other, memory + 4, (size_t)60);
    GOOD("cuTexRefSetAddress_v2", (size_t *)nullptr, other, memory + 512, (size_t)64);
    HOLDS(element(0) == 228);
    BAD_VALUE("cuTexRefSetAddress_v2", &offset, other, memory, (size_t)1 << 40);
    BAD_HANDLE("cuTexRefSetAddress_v2", &offset, nullptr, memory, (size_t)64);
    GOOD("cuTexRefSetAddress_v2", &offset, other, (CUdeviceptr)0, (size_t)0);
    GOOD("cuTexRefGetAddress_v2", &address, other);
    HOLDS(address == 0);

    // Rows of memory.
    std::vector<float> rows(1024);
    for (int i = 0; i < 1024; ++i) rows[i] = (float)i;
    WORKS(cuMemcpyHtoD, memory, rows.data(), 4096);
    const CUDA_ARRAY_DESCRIPTOR shape = {4, 4, CU_AD_FORMAT_FLOAT, 1};
    GOOD("cuTexRefSetFlags", plane, 0u);
    GOOD("cuTexRefSetFilterMode", plane, 0);
    for (const char *name : {"cuTexRefSetAddress2D_v2", "cuTexRefSetAddress2D_v3"}) {
        GOOD("cuTexRefSetArray", plane, array, 1u);
        GOOD(name, plane, &shape, memory, (size_t)512);
        HOLDS(get<CUdeviceptr>("cuTexRefGetAddress_v2", plane) == memory && fetch(1.5f, 2.5f) == 257);
    }
    // The last version checks its arguments.
    const char *last = "cuTexRefSetAddress2D_v3";
    BAD_VALUE(last, plane, &shape, memory, (size_t)500);
    BAD_VALUE(last, plane, &shape, memory + 4, (size_t)512);
    BAD_VALUE(last, plane, (void *)nullptr, memory, (size_t)512);
    BAD_VALUE(last, plane, &shape, memory, (size_t)8);

    // A reference of no module: its state is stored, but no kernel reads through it.
    Reference own;
    CUfunction function;
    WORKS(cuModuleGetFunction, &function, module, "fetch");
    GOOD("cuTexRefCreate", &own);
    fresh(own);
    GOOD("cuTexRefSetArray", own, array, 1u);
    HOLDS(get<CUarray>("cuTexRefGetArray", own) == array && fetch(1.5f, 2.5f) == 257);
    GOOD("cuParamSetTexRef", function, -1, own);
    GOOD("cuParamSetTexRef", function, -1, plane);
    BAD_HANDLE("cuParamSetTexRef", nullptr, -1, plane);
    BAD_HANDLE("cuParamSetTexRef", function, -1, nullptr);
    GOOD("cuTexRefDestroy", own);
    BAD_HANDLE("cuTexRefDestroy", nullptr);
    BAD_VALUE("cuTexRefCreate", nullptr);
    GOOD("cuTexRefSetAddress_v2", &offset, plane, (CUdeviceptr)0, (size_t)0);
    WORKS(cuMemFree, memory);
    WORKS(cuArrayDestroy, array);
}

static void levels() {
    Reference plane;
    GOOD("cuModuleGetTexRef", &plane, module, "plane");
    const CUDA_ARRAY3D_DESCRIPTOR shape = {8, 8, 0, CU_AD_FORMAT_FLOAT, 1, 0};
    CUmipmappedArray mipmap;
    WORKS(cuMipmappedArrayCreate, &mipmap, &shape, 2);
    for (unsigned level = 0; level < 2; ++level) {
        float texels[64];
        for (int i = 0; i < 64; ++i) texels[i] = 100.0f * level + i;
        CUarray array;
        WORKS(cuMipmappedArrayGetLevel, &array, mipmap, level);
        CUDA_MEMCPY2D whole;
        std::memset(&whole, 0, sizeof whole);
        whole.srcMemoryType = CU_MEMORYTYPE_HOST;
        whole.srcHost = texels;
        whole.dstMemoryType = CU_MEMORYTYPE_ARRAY;
        whole.dstArray = array;
        whole.srcPitch = whole.WidthInBytes = 32 >> level;
        whole.Height = 8 >> level;
        WORKS(cuMemcpy2D, &whole);
    }
    GOOD("cuTexRefSetMipmappedArray", plane, mipmap, 1u);
    HOLDS(get<CUmipmappedArray>("cuTexRefGetMipmappedArray", plane) == mipmap);
    GOOD("cuTexRefSetAddressMode", plane, 1, 1);
    GOOD("cuTexRefSetFlags", plane, 2u);
    GOOD("cuTexRefSetMaxAnisotropy", plane, 0u);
    HOLDS(fetch(.3f, .3f) == 18);
    GOOD("cuTexRefSetMipmapLevelClamp", plane, 1.0f, 1.0f);
    HOLDS(fetch(.3f, .3f) == 105);
    float low = 0, high = 0;
    GOOD("cuTexRefGetMipmapLevelClamp", &low, &high, plane);
    HOLDS(low == 1 && high == 1);
    GOOD("cuTexRefSetMipmapLevelBias", plane, 1.0f);
    HOLDS(get<float>("cuTexRefGetMipmapLevelBias", plane) == 1);
    GOOD("cuTexRefSetMipmapFilterMode", plane, 1);
    HOLDS(get<int>("cuTexRefGetMipmapFilterMode", plane) == 1);
    BAD_HANDLE("cuTexRefSetMipmappedArray", plane, nullptr, 1u);
    size_t offset;
    GOOD("cuTexRefSetAddress_v2", &offset, plane, (CUdeviceptr)0, (size_t)0);
    WORKS(cuMipmappedArrayDestroy, mipmap);
}

static void surfaces() {
    Reference canvas, other;
    CUarray found;
    GOOD("cuModuleGetSurfRef", &canvas, module, "canvas");
    HOLDS(call("cuModuleGetSurfRef", &other, module, "plane") == CUDA_ERROR_NOT_FOUND);
    HOLDS(call("cuModuleGetSurfRef", &other, module, "missing") == CUDA_ERROR_NOT_FOUND);
    BAD_VALUE("cuModuleGetSurfRef", nullptr, module, "canvas");
    BAD_VALUE("cuSurfRefGetArray", &found, canvas);
    const CUarray array = image(CUDA_ARRAY3D_SURFACE_LDST, CU_AD_FORMAT_UNSIGNED_INT32);
    const CUarray plain = image(0, CU_AD_FORMAT_UNSIGNED_INT32);
    unsigned texels[16] = {};
    copy(array, texels, false);
    BAD_VALUE("cuSurfRefSetArray", canvas, plain, 0u);
    BAD_VALUE("cuSurfRefSetArray", canvas, array, 1u);
    BAD_HANDLE("cuSurfRefSetArray", canvas, nullptr, 0u);
    BAD_HANDLE("cuSurfRefSetArray", nullptr, array, 0u);
    GOOD("cuSurfRefSetArray", canvas, array, 0u);
    GOOD("cuSurfRefGetArray", &found, canvas);
    HOLDS(found == array);
    int x = 4, y = 2;
    unsigned value = 0x1234;
    void *arguments[] = {&x, &y, &value};
    launch("store", arguments);
    copy(array, texels, true);
    for (int i = 0; i < 16; ++i) HOLDS(texels[i] == (i == 9 ? 0x1234 : 0));
    WORKS(cuArrayDestroy, plain);
}

int main() {
    CUdevice device;
    CUcontext context;
    WORKS(cuInit, 0);
    WORKS(cuDeviceGet, &device, 0);
    WORKS(cuDevicePrimaryCtxRetain, &context, device);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuModuleLoadData, &module, PTX);
    WORKS(cuMemAlloc, &out, 64);
    textures();
    levels();
    surfaces();
    WORKS(cuModuleUnload, module);
    WORKS(cuDevicePrimaryCtxRelease, device);
    std::printf("PASS references\n");
    return 0;
}
