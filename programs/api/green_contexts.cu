// Green contexts: parts of a device's multiprocessors, and streams of these parts.
#include "driver.cuh"

#include <cstring>
#include <vector>

static const char PTX[] =
    ".version 8.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry add(.param .u64 place)\n"
    "{ .reg .b64 %p; ld.param.u64 %p,[place]; red.global.add.u32 [%p],1; ret; }\n";

static CUdevice device;
static CUcontext primary;
static CUdeviceptr place;
static CUfunction add;

static void launch(CUstream stream) {
    void *arguments[] = {&place};
    WORKS(cuLaunchKernel, add, 10, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr);
}

static unsigned counted() {
    unsigned value = 0;
    WORKS(cuMemcpyDtoH, &value, place, sizeof value);
    return value;
}

// Splits the multiprocessors and checks refusals; returns the description of one part, and its number of
// multiprocessors.
static CUdevResourceDesc parts(unsigned *multiprocessors) {
    CUdevResource all, same, rest, other;
    RETURNS(CUDA_ERROR_INVALID_RESOURCE_TYPE, cuDeviceGetDevResource, device, &all, CU_DEV_RESOURCE_TYPE_INVALID);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuDeviceGetDevResource, device, nullptr, CU_DEV_RESOURCE_TYPE_SM);
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetDevResource, 99, &all, CU_DEV_RESOURCE_TYPE_SM);
    WORKS(cuDeviceGetDevResource, device, &all, CU_DEV_RESOURCE_TYPE_SM);
    WORKS(cuCtxGetDevResource, primary, &same, CU_DEV_RESOURCE_TYPE_SM);
    HOLDS(std::memcmp(&all, &same, sizeof all) == 0);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuCtxGetDevResource, nullptr, &same, CU_DEV_RESOURCE_TYPE_SM);
    int count = 0;
    WORKS(cuDeviceGetAttribute, &count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    HOLDS(all.type == CU_DEV_RESOURCE_TYPE_SM && all.sm.smCount == (unsigned)count);
    HOLDS(all.sm.minSmPartitionSize >= 1 && all.sm.minSmPartitionSize <= all.sm.smCount);

    // Queries the number of groups, and then makes that many.
    unsigned groups = 77;
    WORKS(cuDevSmResourceSplitByCount, nullptr, &groups, &all, nullptr, 0, 1);
    HOLDS(groups >= 1 && groups <= all.sm.smCount);
    std::vector<CUdevResource> made(groups + 1);
    unsigned wanted = groups + 1, sum = 0;
    WORKS(cuDevSmResourceSplitByCount, made.data(), &wanted, &all, &rest, 0, 1);
    HOLDS(wanted == groups);
    for (unsigned i = 0; i < groups; ++i) {
        HOLDS(made[i].type == CU_DEV_RESOURCE_TYPE_SM && made[i].sm.smCount == made[0].sm.smCount);
        sum += made[i].sm.smCount;
    }
    HOLDS(sum + (rest.type == CU_DEV_RESOURCE_TYPE_SM ? rest.sm.smCount : 0) == all.sm.smCount);

    wanted = 1;
    const auto split = [&](const CUdevResource *input, unsigned flags, unsigned least) {
        unsigned one = 1;
        return (int)DRIVER(cuDevSmResourceSplitByCount)(&other, &one, input, &rest, flags, least);
    };
    HOLDS(split(&all, 0, all.sm.smCount + 1) == CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    HOLDS(split(&all, 3, 1) == CUDA_ERROR_INVALID_VALUE && split(nullptr, 0, 1) == CUDA_ERROR_INVALID_VALUE);
    HOLDS(split(&made[0], 0, 1) == CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    same = all;
    same.type = CU_DEV_RESOURCE_TYPE_INVALID;
    HOLDS(split(&same, 0, 1) == CUDA_ERROR_INVALID_RESOURCE_TYPE);
    same = all;
    same.sm.smCount += 1;
    HOLDS(split(&same, 0, 1) == CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    wanted = 0;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuDevSmResourceSplitByCount, &other, &wanted, &all, &rest, 0, 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuDevSmResourceSplitByCount, &other, nullptr, &all, &rest, 0, 1);

    CUdevResourceDesc description;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuDevResourceGenerateDesc, nullptr, made.data(), 1);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuDevResourceGenerateDesc, &description, nullptr, 1);
    same = made[0];
    same.type = CU_DEV_RESOURCE_TYPE_INVALID;
    RETURNS(CUDA_ERROR_INVALID_RESOURCE_TYPE, cuDevResourceGenerateDesc, &description, &same, 1);
    same = made[0];
    same.sm.smCount += 8;
    RETURNS(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, cuDevResourceGenerateDesc, &description, &same, 1);
    WORKS(cuDevResourceGenerateDesc, &description, made.data(), 1);
    *multiprocessors = made[0].sm.smCount;
    return description;
}

int main() {
    WORKS(cuInit, 0);
    WORKS(cuDeviceGet, &device, 0);
    WORKS(cuDevicePrimaryCtxRetain, &primary, device);
    WORKS(cuCtxSetCurrent, primary);
    CUmodule module;
    WORKS(cuModuleLoadData, &module, PTX);
    WORKS(cuModuleGetFunction, &add, module, "add");
    WORKS(cuMemAlloc, &place, 4);
    WORKS(cuMemsetD32, place, 0, 1);
    // The streams below do not wait for the default stream.
    WORKS(cuCtxSynchronize);
    unsigned multiprocessors;
    const CUdevResourceDesc description = parts(&multiprocessors);

    CUgreenCtx green, second, whole;
    const unsigned flags = CU_GREEN_CTX_DEFAULT_STREAM;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGreenCtxCreate, &green, description, device, 0);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGreenCtxCreate, &green, description, device, 3);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGreenCtxCreate, nullptr, description, device, flags);
    RETURNS(CUDA_ERROR_INVALID_DEVICE, cuGreenCtxCreate, &green, description, 99, flags);
    WORKS(cuGreenCtxCreate, &green, description, device, flags);
    WORKS(cuGreenCtxCreate, &second, description, device, flags);
    WORKS(cuGreenCtxCreate, &whole, nullptr, device, flags);
    HOLDS(green != second);

    CUdevResource own;
    WORKS(cuGreenCtxGetDevResource, green, &own, CU_DEV_RESOURCE_TYPE_SM);
    HOLDS(own.sm.smCount == multiprocessors && own.sm.minSmPartitionSize >= 1);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuGreenCtxGetDevResource, nullptr, &own, CU_DEV_RESOURCE_TYPE_SM);
    RETURNS(CUDA_ERROR_INVALID_RESOURCE_TYPE, cuGreenCtxGetDevResource, green, &own, CU_DEV_RESOURCE_TYPE_INVALID);
    CUcontext context, again;
    WORKS(cuCtxFromGreenCtx, &context, green);
    WORKS(cuCtxFromGreenCtx, &again, green);
    HOLDS(context == again && context != primary);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuCtxFromGreenCtx, nullptr, green);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuCtxFromGreenCtx, &again, nullptr);
    unsigned long long first = 0, other = 0;
    WORKS(cuGreenCtxGetId, green, &first);
    WORKS(cuGreenCtxGetId, second, &other);
    HOLDS(first != other);
    WORKS(cuCtxGetId, context, &other);
    HOLDS(first == other);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuGreenCtxGetId, nullptr, &other);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGreenCtxGetId, green, nullptr);

    // Streams, from outside and from inside.
    CUstream stream, inside, plain;
    CUgreenCtx found;
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGreenCtxStreamCreate, &stream, green, 0, 0);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuGreenCtxStreamCreate, nullptr, green, CU_STREAM_NON_BLOCKING, 0);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuGreenCtxStreamCreate, &stream, nullptr, CU_STREAM_NON_BLOCKING, 0);
    WORKS(cuGreenCtxStreamCreate, &stream, green, CU_STREAM_NON_BLOCKING, 0);
    WORKS(cuStreamCreate, &plain, CU_STREAM_NON_BLOCKING);
    WORKS(cuStreamGetGreenCtx, stream, &found);
    HOLDS(found == green);
    WORKS(cuStreamGetGreenCtx, plain, &found);
    HOLDS(found == nullptr);
    RETURNS(CUDA_ERROR_INVALID_VALUE, cuStreamGetGreenCtx, stream, nullptr);
    CUcontext of = nullptr;
    WORKS(cuStreamGetCtx, stream, &of);
    HOLDS(of == context);
    found = nullptr;
    WORKS(cuStreamGetCtx_v2, stream, &of, &found);
    HOLDS(of == primary && found == green);
    WORKS(cuCtxSetCurrent, context);
    WORKS(cuGreenCtxGetId, nullptr, &other);
    HOLDS(first == other);
    WORKS(cuStreamCreate, &inside, CU_STREAM_DEFAULT);
    WORKS(cuStreamGetGreenCtx, inside, &found);
    HOLDS(found == green);
    WORKS(cuCtxGetDevResource, context, &own, CU_DEV_RESOURCE_TYPE_SM);
    HOLDS(own.sm.smCount == multiprocessors);
    for (CUstream each : {stream, inside, plain, (CUstream)nullptr}) launch(each);
    WORKS(cuStreamSynchronize, stream);
    WORKS(cuStreamSynchronize, plain);
    WORKS(cuCtxSynchronize);
    HOLDS(counted() == 40);
    WORKS(cuCtxSetCurrent, primary);

    // Events of the whole green context.
    CUevent event;
    WORKS(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    launch(stream);
    WORKS(cuGreenCtxRecordEvent, green, event);
    WORKS(cuStreamWaitEvent, plain, event, 0);
    WORKS(cuGreenCtxWaitEvent, second, event);
    WORKS(cuEventSynchronize, event);
    HOLDS(counted() == 50);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuGreenCtxRecordEvent, nullptr, event);
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuGreenCtxRecordEvent, green, nullptr);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuGreenCtxWaitEvent, nullptr, event);
    RETURNS(CUDA_ERROR_INVALID_HANDLE, cuGreenCtxWaitEvent, green, nullptr);

    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy, context);
    WORKS(cuGreenCtxDestroy, green);
    RETURNS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuGreenCtxDestroy, green);
    RETURNS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuGreenCtxGetId, green, &other);
    RETURNS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxFromGreenCtx, &again, green);
    WORKS(cuCtxSetCurrent, context);
    RETURNS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxSynchronize);
    WORKS(cuCtxSetCurrent, primary);
    WORKS(cuGreenCtxDestroy, second);
    WORKS(cuGreenCtxDestroy, whole);
    RETURNS(CUDA_ERROR_INVALID_CONTEXT, cuGreenCtxDestroy, nullptr);
    launch(plain);
    WORKS(cuStreamSynchronize, plain);
    HOLDS(counted() == 60);

    // Green contexts one after the other: each has the multiprocessors of its description, also while a stream of the
    // previous one is left.
    CUdevResource all;
    WORKS(cuDeviceGetDevResource, device, &all, CU_DEV_RESOURCE_TYPE_SM);
    for (unsigned i = 0; i < 8; ++i) {
        WORKS(cuGreenCtxCreate, &green, i % 2 == 0 ? description : nullptr, device, flags);
        WORKS(cuGreenCtxGetDevResource, green, &own, CU_DEV_RESOURCE_TYPE_SM);
        HOLDS(own.sm.smCount == (i % 2 == 0 ? multiprocessors : all.sm.smCount));
        WORKS(cuGreenCtxStreamCreate, &stream, green, CU_STREAM_NON_BLOCKING, 0);
        launch(stream);
        WORKS(cuStreamSynchronize, stream);
        HOLDS(counted() == 70 + 10 * i);
        WORKS(cuGreenCtxDestroy, green);
    }
    WORKS(cuDevicePrimaryCtxRelease, device);
    std::printf("PASS green_contexts\n");
    return 0;
}
