// Calls functions of the driver API with arguments that are wrong, and prints what each call returned.
//
// The first argument is a file of calls: a line is a function and its parameters, each `name:direction:type`, with
// `:length` behind an array. The second is how many functions are tried at a time. A line of the output is a function,
// a case, and the code, with `then` and another code if the context is in error after the call; or the signal that
// ended the process, or `hang`. A case is made in a process of its own unless those before it in that process
// returned errors and left the context as it was.
#include "../api/driver.cuh"

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using Word = std::uint64_t;

constexpr int most_arguments = 18;
// Seconds that one case may take.
constexpr unsigned patience = 20;
// Bytes of an allocation, and of the memory behind a pointer argument.
constexpr Word bytes = 1 << 20, room = 4 << 20;
// Bytes of a mapping.
constexpr Word granule = 2 << 20;
constexpr Word minus_one = ~Word{0};

const char image[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 variable = 7;
.visible .entry kernel(.param .u64 address) { ret; }
.visible .entry fault() { trap; ret; }
)";

struct Parameter {
    std::string name, direction, type;
    bool array;

    bool is_string() const { return type == "string"; }
    // The program passes an address of its own.
    bool is_place() const { return direction != "in" || array || is_string(); }
};

struct Call {
    std::string name;
    std::vector<Parameter> parameters;

    bool uses(const char *type) const {
        for (const Parameter &parameter : parameters)
            if (parameter.type == type) return true;
        return false;
    }
};

Word word(const void *pointer) { return reinterpret_cast<Word>(pointer); }

// Calls a function with words; it ignores words beyond its parameters.
int call_words(const char *name, std::vector<Word> arguments) {
    using Function = int (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                             Word, Word, Word);
    const auto function = reinterpret_cast<Function>(driver_function(name));
    arguments.resize(most_arguments);
    const Word *a = arguments.data();
    return function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
                    a[16], a[17]);
}

void CUDA_CB host_function(void *) {}

void CUDA_CB stream_callback(CUstream, CUresult, void *) {}

// Things that functions are called with: live ones and destroyed ones, by their C types.
class Things {
  public:
    std::map<std::string, Word> live, gone;

    // `foreign` is memory that the driver does not know.
    Things(const Call &call, Word foreign) : call_(call) {
        make("cuDevicePrimaryCtxRetain", &context, {0});
        step("cuCtxSetCurrent", {context});
        live["CUcontext"] = context;
        if (call.uses("CUcontext")) {
            Word created = 0;
            step("cuCtxCreate_v2", {word(&created), 0, 0});
            step("cuCtxDestroy_v2", {created});
            step("cuCtxSetCurrent", {context});
            gone["CUcontext"] = created;
        }
        two("CUdeviceptr", "cuMemAlloc_v2", {bytes}, "cuMemFree_v2");
        two("host", "cuMemAllocHost_v2", {bytes}, "cuMemFreeHost");
        two("CUstream", "cuStreamCreate", {CU_STREAM_NON_BLOCKING}, "cuStreamDestroy_v2");
        const bool between = call.name == "cuIpcGetEventHandle";
        two("CUevent", "cuEventCreate", {between ? 6U : 0U}, "cuEventDestroy_v2");
        step("cuEventRecord", {live["CUevent"], live["CUstream"]});
        if (call.uses("CUmodule") || call.uses("CUfunction"))
            code("CUmodule", "cuModuleLoadData", "cuModuleUnload", "CUfunction", "cuModuleGetFunction");
        if (call.uses("CUlibrary") || call.uses("CUkernel"))
            code("CUlibrary", "cuLibraryLoadData", "cuLibraryUnload", "CUkernel", "cuLibraryGetKernel");
        if (call.uses("CUgraph") || call.uses("CUgraphExec")) graphs();
        if (call.uses("CUarray") || call.uses("CUDA_RESOURCE_DESC") || call.uses("CUtexObject")) arrays();
        if (call.uses("CUmemoryPool")) pools();
        if (call.name.rfind("cuMem", 0) == 0) mappings();
        if (call.name == "cuMemHostUnregister") {
            live["registered"] = foreign;
            step("cuMemHostRegister_v2", {foreign, 65536, 0});
        }
        if (call.name == "cuMemPrefetchAsync_v2") make("cuMemAllocManaged", &live["managed"], {bytes, 1});
        step("cuCtxSynchronize", {});
    }

    Word context = 0;

    // Checks that the context is still current and its work completes; returns the code of the failure otherwise.
    int health() const {
        Word current = 0;
        const int code = call_words("cuCtxGetCurrent", {word(&current)});
        if (code != 0) return code;
        if (current != context) return -1;
        return call_words("cuCtxSynchronize", {});
    }

  private:
    const Call &call_;

    void step(const char *name, const std::vector<Word> &arguments) {
        const int code = call_words(name, arguments);
        if (code != 0) std::fprintf(stderr, "for %s: %s returned %d\n", call_.name.c_str(), name, code);
    }

    // Calls a function that writes its new object to its first argument.
    void make(const char *name, Word *made, std::vector<Word> arguments) {
        arguments.insert(arguments.begin(), word(made));
        step(name, arguments);
    }

    void two(const char *type, const char *create, const std::vector<Word> &arguments, const char *destroy) {
        Word first = 0, second = 0;
        make(create, &first, arguments);
        make(create, &second, arguments);
        step(destroy, {first});
        gone[type] = first;
        live[type] = second;
    }

    void code(const char *type, const char *load, const char *unload, const char *function, const char *find) {
        Word owner = 0, found = 0;
        make(load, &owner, {word(image)});
        make(find, &found, {owner, word("kernel")});
        step(unload, {owner});
        gone[type] = owner;
        gone[function] = found;
        make(load, &owner, {word(image)});
        make(find, &found, {owner, word("kernel")});
        live[type] = owner;
        live[function] = found;
    }

    void graphs() {
        Word graph = 0, node = 0, executable = 0;
        for (int turn = 0; turn < 2; ++turn) {
            make("cuGraphCreate", &graph, {0});
            make("cuGraphAddEmptyNode", &node, {graph, 0, 0});
            make("cuGraphInstantiateWithFlags", &executable, {graph, 0});
            if (turn == 0) {
                step("cuGraphExecDestroy", {executable});
                step("cuGraphDestroy", {graph});
            }
            (turn == 0 ? gone : live)["CUgraph"] = graph;
            (turn == 0 ? gone : live)["CUgraphExec"] = executable;
        }
    }

    void arrays() {
        CUDA_ARRAY_DESCRIPTOR shape = {32, 32, CU_AD_FORMAT_FLOAT, 1};
        two("CUarray", "cuArrayCreate_v2", {word(&shape)}, "cuArrayDestroy");
        if (!call_.uses("CUtexObject")) return;
        CUDA_RESOURCE_DESC resource = {};
        resource.resType = CU_RESOURCE_TYPE_ARRAY;
        resource.res.array.hArray = reinterpret_cast<CUarray>(live["CUarray"]);
        CUDA_TEXTURE_DESC texture = {};
        two("CUtexObject", "cuTexObjectCreate", {word(&resource), word(&texture), 0}, "cuTexObjectDestroy");
    }

    void pools() {
        CUmemPoolProps properties = pool_properties();
        two("CUmemoryPool", "cuMemPoolCreate", {word(&properties)}, "cuMemPoolDestroy");
    }

    void mappings() {
        CUmemAllocationProp properties = memory_properties();
        if (call_.name == "cuMemExportToShareableHandle")
            properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        if (call_.uses("CUmemGenericAllocationHandle") || mapped())
            two("CUmemGenericAllocationHandle", "cuMemCreate", {granule, word(&properties), 0}, "cuMemRelease");
        if (!mapped()) return;
        Word reserved = 0, mapping = 0;
        make("cuMemAddressReserve", &reserved, {granule, 0, 0, 0});
        make("cuMemAddressReserve", &mapping, {granule, 0, 0, 0});
        step("cuMemMap", {mapping, granule, 0, live["CUmemGenericAllocationHandle"], 0});
        live["reserved"] = reserved;
        live["mapping"] = mapping;
    }

    bool mapped() const {
        for (const char *name : {"cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemAddressFree", "cuMemRetainAllocationHandle"})
            if (call_.name == name) return true;
        return false;
    }

  public:
    static CUmemPoolProps pool_properties() {
        CUmemPoolProps properties = {};
        properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
        return properties;
    }

    static CUmemAllocationProp memory_properties() {
        CUmemAllocationProp properties = {};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
        return properties;
    }
};

// Memory of the program that arguments point to; a part for each, and one more.
struct Memory {
    Memory() : base(static_cast<char *>(mmap(nullptr, (most_arguments + 1) * room, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}

    char *part(std::size_t index) const { return base + index * room; }
    // Memory that no function of the driver knows.
    Word foreign() const { return word(part(most_arguments)); }

    char *base;
};

template <typename Value> void put(char *place, const Value &value) { std::memcpy(place, &value, sizeof value); }

bool contains(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

// Fills the memory behind a valid pointer argument.
void fill(char *place, const Call &call, const Parameter &parameter, const Things *things, const Memory &memory) {
    const std::string &type = parameter.type;
    const auto live = [&](const char *kind) {
        const auto found = things ? things->live.find(kind) : std::map<std::string, Word>::const_iterator();
        return things && found != things->live.end() ? found->second : 0;
    };
    std::memset(place, 0, 4096);
    if (parameter.direction == "out" && type != "void*") return;
    if (type == "CUDA_ARRAY3D_DESCRIPTOR") {
        put(place, CUDA_ARRAY3D_DESCRIPTOR{32, 32, 0, CU_AD_FORMAT_FLOAT, 1, 0});
    } else if (type == "CUDA_MEMCPY2D" || type == "CUDA_MEMCPY3D") {
        CUDA_MEMCPY3D copy = {};
        copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = live("CUdeviceptr");
        copy.dstDevice = live("CUdeviceptr") + bytes / 2;
        copy.WidthInBytes = copy.srcPitch = copy.dstPitch = 64;
        copy.Height = copy.srcHeight = copy.dstHeight = 8;
        copy.Depth = 1;
        if (type == "CUDA_MEMCPY3D") return put(place, copy);
        CUDA_MEMCPY2D flat = {};
        flat.srcMemoryType = flat.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        flat.srcDevice = copy.srcDevice;
        flat.dstDevice = copy.dstDevice;
        flat.WidthInBytes = flat.srcPitch = flat.dstPitch = 64;
        flat.Height = 8;
        put(place, flat);
    } else if (type == "CUlaunchConfig") {
        CUlaunchConfig config = {};
        config.gridDimX = config.gridDimY = config.gridDimZ = 1;
        config.blockDimX = config.blockDimY = config.blockDimZ = 1;
        put(place, config);
    } else if (type == "CUmemAllocationProp") {
        put(place, Things::memory_properties());
    } else if (type == "CUmemPoolProps") {
        put(place, Things::pool_properties());
    } else if (type == "CUmemAccessDesc") {
        put(place, CUmemAccessDesc{{CU_MEM_LOCATION_TYPE_DEVICE, {0}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    } else if (type == "CUDA_RESOURCE_DESC") {
        CUDA_RESOURCE_DESC resource = {};
        resource.resType = CU_RESOURCE_TYPE_ARRAY;
        resource.res.array.hArray = reinterpret_cast<CUarray>(live("CUarray"));
        put(place, resource);
    } else if (type == "CUDA_RESOURCE_VIEW_DESC") {
        CUDA_RESOURCE_VIEW_DESC view = {};
        view.format = CU_RES_VIEW_FORMAT_FLOAT_1X32;
        view.width = view.height = 32;
        put(place, view);
    } else if (type == "CUjit_option") {
        put(place, CU_JIT_OPTIMIZATION_LEVEL);
    } else if (type == "CUlibraryOption") {
        put(place, CU_LIBRARY_BINARY_IS_PRESERVED);
    } else if (type == "CUpointer_attribute") {
        put(place, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
    } else if (parameter.name == "jitOptionsValues") {
        put(place, Word{4});
    } else if (parameter.name == "libraryOptionValues") {
        put(place, Word{0});
    } else if (type == "void*") {
        for (int index = 0; index < 8; ++index) put(place + 8 * index, memory.foreign());
    } else if (parameter.name == "globalDim") {
        put(place, Word{32});
        put(place + 8, Word{32});
    } else if (parameter.name == "globalStrides") {
        put(place, Word{128});
    } else if (parameter.name == "boxDim") {
        put(place, Word{8} << 32 | 8);
    } else if (parameter.name == "elementStrides") {
        put(place, Word{1} << 32 | 1);
    } else if (parameter.name == "numNodes") {
        put(place, Word{8});
    } else if (call.name == "cuMemPoolSetAttribute") {
        put(place, Word{1});
    }
}

// Returns a valid argument.
Word good(std::size_t index, const Call &call, const Things *things, const Memory &memory) {
    const Parameter &parameter = call.parameters[index];
    const std::string &name = parameter.name, &type = parameter.type;
    const auto live = [&](const std::string &kind) {
        return things && things->live.count(kind) ? things->live.at(kind) : 0;
    };
    // Beside `kernelParams` it is a contradiction, and a view of an array is not for every array.
    if (name == "extra" || name == "pResViewDesc") return 0;
    if (name == "image" || name == "code") return word(image);
    if (name == "fname") {
        static const int file = [] {
            const int made = memfd_create("image", 0);
            if (write(made, image, sizeof image - 1) < 0) std::exit(1);
            return made;
        }();
        std::snprintf(memory.part(index), 64, "/proc/self/fd/%d", file);
        return word(memory.part(index));
    }
    if (name == "symbol") return word("cuInit");
    if (parameter.is_string() && parameter.direction == "in")
        return word(contains(call.name, "Global") ? "variable" : "kernel");
    if (parameter.is_place()) {
        fill(memory.part(index), call, parameter, things, memory);
        return word(memory.part(index));
    }
    if (type == "void*") {
        if (call.name == "cuMemHostRegister_v2") return memory.foreign();
        if (call.name == "cuMemRetainAllocationHandle") return live("mapping");
        if (call.name == "cuMemHostUnregister") return live("registered");
        return live("host");
    }
    if (type == "CUdeviceptr") {
        if (call.name == "cuMemAddressReserve") return 0;
        if (call.name == "cuMemPrefetchAsync_v2") return live("managed");
        if (call.name == "cuMemMap" || call.name == "cuMemAddressFree") return live("reserved");
        if (call.name == "cuMemUnmap" || call.name == "cuMemSetAccess") return live("mapping");
        return live(type) + (name.rfind("src", 0) == 0 ? bytes / 2 : 0);
    }
    if (live(type) != 0) return live(type);
    if (type == "CUhostFn") return word(reinterpret_cast<void *>(host_function));
    if (type == "CUstreamCallback") return word(reinterpret_cast<void *>(stream_callback));
    if (type == "CUmemLocation") return 1;
    if (type == "CUpointer_attribute") return CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    if (type == "CUmemPool_attribute") return CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    if (type == "CUmemAllocationHandleType") return CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (type == "CUdevice_attribute") return CU_DEVICE_ATTRIBUTE_WARP_SIZE;
    if (type == "CUfunction_attribute")
        return contains(call.name, "Set") ? CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                                          : CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    if (type == "CUresult") return 1;
    if (type.rfind("CU", 0) == 0) return 0;
    if (name == "tensorDataType") return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    if (name == "tensorRank") return 2;
    if (name == "driverVersion") return 12000;
    if (call.name == "cuMemAllocManaged" && name == "flags") return CU_MEM_ATTACH_GLOBAL;
    if (call.name == "cuStreamCreate") return CU_STREAM_NON_BLOCKING;
    if (call.name == "cuMemAllocPitch_v2" && name == "ElementSizeBytes") return 4;
    if (call.name == "cuMemHostRegister_v2" && name == "bytesize") return 65536;
    if (call.name == "cuMemsetD2D8_v2" && name == "dstPitch") return 64;
    if (name == "size") return granule;
    if (name == "len" || name == "WidthInBytes" || name == "Width" || name == "ByteCount" || name == "N" ||
        name == "bytesize")
        return 64;
    if (name == "blockSize") return 32;
    for (const char *part : {"Height", "num", "count", "grid", "block"})
        if (contains(name, part)) return 1;
    return 0;
}

struct Bad {
    std::string label;
    Word value;
};

// Returns the first value behind an enumeration's last.
Word behind(const std::string &type) {
    static const std::map<std::string, Word> known = {
        {"CUdevice_attribute", CU_DEVICE_ATTRIBUTE_MAX},
        {"CUfunction_attribute", CU_FUNC_ATTRIBUTE_MAX},
        {"CUlimit", CU_LIMIT_MAX},
        {"CUfunc_cache", CU_FUNC_CACHE_PREFER_EQUAL + 1},
        {"CUpointer_attribute", CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE + 1},
        {"CUmemPool_attribute", CU_MEMPOOL_ATTR_USED_MEM_HIGH + 1},
        {"CUmemAllocationGranularity_flags", CU_MEM_ALLOC_GRANULARITY_RECOMMENDED + 1},
        {"CUmemAllocationHandleType", CU_MEM_HANDLE_TYPE_FABRIC + 1},
        {"CUstreamCaptureMode", CU_STREAM_CAPTURE_MODE_RELAXED + 1},
        {"CUresult", CUDA_ERROR_UNKNOWN + 1},
    };
    const auto found = known.find(type);
    return found == known.end() ? 0 : found->second;
}

int attribute(CUdevice_attribute which) {
    int value = 0;
    call_words("cuDeviceGetAttribute", {word(&value), static_cast<Word>(which), 0});
    return value;
}

// Returns bad arguments for a parameter.
std::vector<Bad> bad(std::size_t index, const Call &call, const Things &things, const Memory &memory) {
    const Parameter &parameter = call.parameters[index];
    const std::string &name = parameter.name, &type = parameter.type;
    const Word right = good(index, call, &things, memory);
    if (parameter.is_string() && parameter.direction == "in")
        return {{"null", 0}, {"empty", word("")}, {"unknown", word("/none/of/the/kind")}};
    if (name == "image" || name == "code")
        return {{"null", 0}, {"nonsense", word("no image, and no text of a kernel either, but long enough for a header")},
                {"zeros", memory.foreign()}};
    if (parameter.is_place()) {
        std::vector<Bad> found = {{"null", 0}};
        if (parameter.direction != "out" && type.rfind("CU", 0) == 0) found.push_back({"zeros", memory.foreign()});
        return found;
    }
    std::vector<Bad> found;
    const auto other = [&](const char *label, const std::map<std::string, Word> &from, const std::string &kind) {
        if (from.count(kind)) found.push_back({label, from.at(kind)});
    };
    if (type == "CUdevice") return {{"minus-one", minus_one}, {"behind", 64}, {"greatest", 0x7FFFFFFF}};
    if (type == "CUmemLocation")
        return {{"zero", 0}, {"kind-behind", 9}, {"device-behind", Word{64} << 32 | 1}};
    if (type == "CUdeviceptr") {
        const Word base = things.live.at(type);
        found = {{"null", 0}, {"off-by-one", right + 1}, {"last", base + bytes - 1}, {"end", base + bytes}};
        other("freed", things.gone, type);
        other("host", things.live, "host");
        found.push_back({"foreign", memory.foreign()});
        return found;
    }
    if (type == "void*") {
        found = {{"null", 0}, {"off-by-one", right + 1}};
        other("freed", things.gone, "host");
        other("pinned", things.live, "host");
        other("device", things.live, "CUdeviceptr");
        found.push_back({"foreign", memory.foreign() + room / 2});
        return found;
    }
    if (things.live.count(type)) {
        found = {{"null", 0}, {"off-by-one", right + 1}};
        other("freed", things.gone, type);
        other("other-type", things.live, type == "CUstream" ? "CUevent" : "CUstream");
        return found;
    }
    if (type.rfind("CU", 0) == 0) {
        if (right > 1024) return {{"null", 0}};
        if (behind(type) != 0) found.push_back({"behind", behind(type)});
        found.push_back({"minus-one", minus_one});
        found.push_back({"zero", 0});
        return found;
    }
    if (type == "u8") return {};
    found = {{"zero", 0}};
    const bool counts = [&] {
        for (const char *counter : {"numJitOptions", "numLibraryOptions", "numAttributes", "count", "len"})
            if (name == counter) return true;
        return false;
    }();
    if (counts && type != "i32") return found;
    found.push_back({"one-more", right + 1});
    if (type == "i32") found.push_back({"minus-one", minus_one});
    const bool host = parameter.name == "ByteCount" || call.name == "cuMemHostRegister_v2";
    if (type == "usize") found.push_back({"beyond", bytes + 1});
    // More than what the pointers have room for would end the process, and more managed memory than there is the device.
    if (!host && type != "i32" && call.name != "cuMemAllocManaged") found.push_back({"greatest", minus_one});
    if (contains(name, "blockDim") || name == "blockSize")
        found.push_back({"limit", Word(attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)) + 1});
    if (name == "gridDimY" || name == "gridDimZ") found.push_back({"limit", 65536});
    if (contains(name, "haredMem") || name == "dynamicSMemSize")
        found.push_back({"limit", Word(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)) + 1});
    return found;
}

// Bytes of a structure that a program fills in.
std::size_t size_of(const std::string &type) {
    static const std::map<std::string, std::size_t> known = {
        {"CUDA_ARRAY3D_DESCRIPTOR", sizeof(CUDA_ARRAY3D_DESCRIPTOR)},
        {"CUDA_MEMCPY2D", sizeof(CUDA_MEMCPY2D)},
        {"CUDA_MEMCPY3D", sizeof(CUDA_MEMCPY3D)},
        {"CUlaunchConfig", sizeof(CUlaunchConfig)},
        {"CUmemAllocationProp", sizeof(CUmemAllocationProp)},
        {"CUmemPoolProps", sizeof(CUmemPoolProps)},
        {"CUmemAccessDesc", sizeof(CUmemAccessDesc)},
        {"CUDA_RESOURCE_DESC", sizeof(CUDA_RESOURCE_DESC)},
        {"CUDA_TEXTURE_DESC", sizeof(CUDA_TEXTURE_DESC)},
    };
    const auto found = known.find(type);
    return found == known.end() ? 0 : found->second;
}

struct Case {
    std::string label;
    std::size_t index;
    Word value;
    bool replaces, without_context;
    // Where in a structure a field is all ones; -1: nowhere.
    long field = -1;
};

std::vector<Case> cases(const Call &call, const Things &things, const Memory &memory) {
    std::vector<Case> all = {{"good", 0, 0, false, false}};
    for (std::size_t index = 0; index < call.parameters.size(); ++index)
        for (const Bad &one : bad(index, call, things, memory))
            if (one.value != good(index, call, &things, memory))
                all.push_back({call.parameters[index].name + "=" + one.label, index, one.value, true, false});
    for (std::size_t index = 0; index < call.parameters.size(); ++index) {
        const Parameter &parameter = call.parameters[index];
        for (std::size_t field = 0; parameter.direction == "in" && field < size_of(parameter.type); field += 4)
            all.push_back({parameter.name + "+" + std::to_string(field), index, 0, false, false, static_cast<long>(field)});
    }
    all.push_back({"no-context", 0, 0, false, true});
    return all;
}

std::vector<Word> arguments(const Call &call, const Case &one, const Things *things, const Memory &memory) {
    std::vector<Word> list;
    for (std::size_t index = 0; index < call.parameters.size(); ++index)
        list.push_back(good(index, call, things, memory));
    if (one.replaces) list[one.index] = one.value;
    if (one.field >= 0) put(memory.part(one.index) + one.field, ~0U);
    return list;
}

// Pipe on which a child reports its cases.
struct Report {
    int pipe;

    // Reports a case before its call: if the child ends now, this case ended it.
    void start(std::size_t index, const std::string &label) const {
        alarm(patience);
        tell("start " + std::to_string(index) + " " + label);
    }
    void done(const std::string &answer) const { tell("done " + answer); }
    void tell(const std::string &line) const {
        const std::string text = line + "\n";
        if (write(pipe, text.data(), text.size()) < 0) _exit(1);
    }
};

// Runs a part in children: behind one that ended, or that asks for it, another goes on.
void in_children(const std::string &prefix, const std::function<bool(const Report &, std::size_t)> &part) {
    std::size_t from = 0;
    for (;;) {
        int ends[2];
        if (pipe(ends) != 0) std::exit(1);
        const pid_t child = fork();
        if (child == 0) {
            const Report report{ends[1]};
            if (part(report, from)) report.tell("again");
            _exit(0);
        }
        close(ends[1]);
        FILE *output = fdopen(ends[0], "r");
        std::string label;
        bool again = false;
        char line[512];
        while (std::fgets(line, sizeof line, output)) {
            line[std::strcspn(line, "\n")] = '\0';
            char name[400];
            std::size_t index = 0;
            if (std::sscanf(line, "start %zu %399s", &index, name) == 2) {
                from = index + 1;
                label = name;
            } else if (std::strncmp(line, "done ", 5) == 0) {
                dprintf(1, "%s %s\n", (prefix + label).c_str(), line + 5);
                label.clear();
            } else if (std::strcmp(line, "again") == 0) {
                again = true;
            }
        }
        std::fclose(output);
        int status = 0;
        waitpid(child, &status, 0);
        if (!label.empty()) {
            const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
            if (signal == SIGALRM)
                dprintf(1, "%s hang\n", (prefix + label).c_str());
            else
                dprintf(1, "%s %s %d\n", (prefix + label).c_str(), signal ? "signal" : "exit",
                        signal ? signal : WEXITSTATUS(status));
        } else if (!again) {
            return;
        }
    }
}

// Good and bad arguments with a context; an attempt that worked is the last of its process.
bool with_context(const Report &report, const Call &function, std::size_t from) {
    if (function.name != "cuInit") call_words("cuInit", {0});
    const Memory memory;
    call_words("cuInit", {0});
    const Things things(function, memory.foreign());
    const std::vector<Case> all = cases(function, things, memory);
    for (std::size_t index = from; index < all.size(); ++index) {
        const std::vector<Word> list = arguments(function, all[index], &things, memory);
        if (all[index].without_context) call_words("cuCtxSetCurrent", {0});
        const bool captures = function.name == "cuStreamEndCapture";
        if (captures) call_words("cuStreamBeginCapture_v2", {things.live.at("CUstream"), CU_STREAM_CAPTURE_MODE_RELAXED});
        report.start(index, all[index].label);
        const int code = call_words(function.name.c_str(), list);
        if (all[index].without_context) {
            report.done(std::to_string(code));
            return false;
        }
        const int then = things.health();
        report.done(std::to_string(code) + (then != 0 ? " then " + std::to_string(then) : ""));
        if (code == 0 || then != 0 || captures) return true;
    }
    return false;
}

// Calls before `cuInit`, with handles that the driver has not made.
bool before_initialisation(const Report &report, const Call &function, std::size_t from) {
    const Memory memory;
    for (std::size_t index = from; index <= function.parameters.size(); ++index) {
        const bool replaces = index < function.parameters.size();
        if (replaces && !function.parameters[index].is_place()) continue;
        const Case one = {replaces ? function.parameters[index].name + "=null" : "good", index, 0, replaces, false};
        const std::vector<Word> list = arguments(function, one, nullptr, memory);
        report.start(index, "before:" + one.label);
        const int code = call_words(function.name.c_str(), list);
        report.done(std::to_string(code));
        if (code == 0) return true;
    }
    return false;
}

std::function<void()> last;

// Calls in an exit handler that was registered before the driver's, so that the driver's own have run.
bool after_exit(const Report &report, const Call &function, std::size_t from) {
    if (from > 0) return false;
    std::atexit([] {
        last();
        _exit(0);
    });
    call_words("cuInit", {0});
    const auto *memory = new Memory;
    const auto *things = new Things(function, memory->foreign());
    last = [=, &function] {
        const Case one = {"good", 0, 0, false, false};
        const std::vector<Word> list = arguments(function, one, things, *memory);
        report.start(0, "after-exit");
        report.done(std::to_string(call_words(function.name.c_str(), list)));
    };
    std::exit(0);
}

// Calls after a kernel's fault has destroyed the context.
bool after_fault(const Report &report, const Call &function, std::size_t from) {
    if (from > 0) return false;
    const Memory memory;
    call_words("cuInit", {0});
    const Things things(function, memory.foreign());
    Word module = 0, entry = 0;
    call_words("cuModuleLoadData", {word(&module), word(image)});
    call_words("cuModuleGetFunction", {word(&entry), module, word("fault")});
    call_words("cuLaunchKernel", {entry, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0});
    call_words("cuCtxSynchronize", {});
    const std::vector<Word> list = arguments(function, {"good", 0, 0, false, false}, &things, memory);
    report.start(0, "after-fault");
    report.done(std::to_string(call_words(function.name.c_str(), list)));
    return false;
}

std::vector<Call> read_calls(const char *path) {
    std::vector<Call> calls;
    FILE *file = std::fopen(path, "r");
    if (!file) {
        std::printf("FAIL bad_input: there is no %s\n", path);
        std::exit(1);
    }
    char line[4096];
    while (std::fgets(line, sizeof line, file)) {
        Call one;
        for (char *next = std::strtok(line, " \n"); next; next = std::strtok(nullptr, " \n")) {
            if (one.name.empty()) {
                one.name = next;
                continue;
            }
            std::vector<std::string> fields(1);
            for (const char *letter = next; *letter; ++letter)
                if (*letter == ':')
                    fields.emplace_back();
                else
                    fields.back() += *letter;
            one.parameters.push_back({fields[0], fields[1], fields[2], fields.size() > 3});
        }
        if (!one.name.empty()) calls.push_back(one);
    }
    std::fclose(file);
    return calls;
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 3) {
        std::printf("FAIL bad_input: give a file of calls and the number of calls to try at a time\n");
        return 1;
    }
    const std::vector<Call> calls = read_calls(argv[1]);
    const std::size_t turns = std::strtoul(argv[2], nullptr, 10);
    for (std::size_t turn = 0; turn < turns; ++turn) {
        if (fork() != 0) continue;
        for (std::size_t index = turn; index < calls.size(); index += turns) {
            const Call &function = calls[index];
            const auto run = [&](bool (*part)(const Report &, const Call &, std::size_t)) {
                in_children(function.name + " ",
                            [&](const Report &report, std::size_t from) { return part(report, function, from); });
            };
            run(before_initialisation);
            run(with_context);
            run(after_fault);
            run(after_exit);
        }
        _exit(0);
    }
    while (wait(nullptr) > 0) {}
    return 0;
}
