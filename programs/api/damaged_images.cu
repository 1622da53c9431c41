// Damaged images: loading them returns a code for any header, and the context works afterwards.
#include "driver.cuh"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

using Bytes = std::vector<unsigned char>;

const char PTX[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 address, .param .u32 value)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [address];
    ld.param.u32 %r1, [value];
    st.global.u32 [%rd1], %r1;
    ret;
}
)";

// Its code is in a fat binary of this program's file.
__global__ void of_this_program(int *place) { *place = 1; }

struct Random {
    std::uint64_t state;
    // Below a bound.
    std::size_t below(std::size_t bound) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (state >> 33) % bound;
    }
};

// Puts images where nothing can be read behind them, and loads them.
struct Edge {
    static constexpr std::size_t room = 16 << 20;
    unsigned char *end;

    Edge() {
        const std::size_t page = sysconf(_SC_PAGESIZE);
        void *start = mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        HOLDS(start != MAP_FAILED);
        end = static_cast<unsigned char *>(start) + room;
        HOLDS(mprotect(end, page, PROT_NONE) == 0);
    }

    CUresult load(const Bytes &image, CUmodule *module) const {
        HOLDS(image.size() <= room);
        unsigned char *place = end - image.size();
        std::memcpy(place, image.data(), image.size());
        return DRIVER(cuModuleLoadData)(module, place);
    }
};

// Links PTX to a cubin.
Bytes linked() {
    CUlinkState link = nullptr;
    WORKS(cuLinkCreate, 0, nullptr, nullptr, &link);
    void *text = const_cast<char *>(PTX);
    WORKS(cuLinkAddData, link, CU_JIT_INPUT_PTX, text, sizeof PTX, "store", 0, nullptr, nullptr);
    void *image = nullptr;
    std::size_t bytes = 0;
    WORKS(cuLinkComplete, link, &image, &bytes);
    const auto *start = static_cast<unsigned char *>(image);
    const Bytes copy(start, start + bytes);
    WORKS(cuLinkDestroy, link);
    return copy;
}

// The fat binaries in this program's file: a magic number, version 1, a header of 16 bytes, the length behind it.
std::vector<Bytes> fat_binaries() {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    const Bytes all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const unsigned char head[] = {0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0};
    std::vector<Bytes> found;
    for (std::size_t at = 0; at + 16 <= all.size(); at += 8) {
        if (std::memcmp(&all[at], head, sizeof head) != 0) continue;
        std::uint64_t behind = 0;
        std::memcpy(&behind, &all[at + 8], sizeof behind);
        if (behind <= all.size() - at - 16 && behind < Edge::room / 2)
            found.emplace_back(all.begin() + at, all.begin() + at + 16 + behind);
    }
    return found;
}

// Number of 8 bytes at an offset of an image.
std::uint64_t number_at(const Bytes &image, std::size_t place) {
    HOLDS(place + 8 <= image.size());
    std::uint64_t number = 0;
    std::memcpy(&number, &image[place], sizeof number);
    return number;
}

// Offset of a symbol's value in an ELF image, with the symbol's size behind it; the symbol has a section.
std::size_t symbol_value(const Bytes &image) {
    constexpr std::size_t header_bytes = 64, symbol_bytes = 24, symbols = 2;
    const std::size_t table = number_at(image, 40);
    for (std::size_t header = table; header + header_bytes <= image.size(); header += header_bytes) {
        if (static_cast<std::uint32_t>(number_at(image, header) >> 32) != symbols) continue;
        const std::size_t start = number_at(image, header + 24), bytes = number_at(image, header + 32);
        for (std::size_t symbol = start; symbol < start + bytes; symbol += symbol_bytes) {
            const std::size_t section = number_at(image, symbol) >> 48;
            if (section != 0 && section < 0xff00) return symbol + 8;
        }
    }
    HOLDS(!"the image has a symbol");
    return 0;
}

// The header of an ELF image of a device, with nothing behind it.
Bytes bare_header() {
    Bytes header(64);
    const unsigned char start[] = {0x7f, 'E', 'L', 'F', 2, 1, 1, 0x33, 7};
    std::memcpy(header.data(), start, sizeof start);
    header[18] = 190;
    header[32] = header[40] = header[52] = 64;
    header[54] = 56;
    header[56] = header[60] = 1;
    header[58] = 64;
    return header;
}

int main() {
    WORKS(cuInit, 0);
    CUcontext context = nullptr;
    WORKS(cuDevicePrimaryCtxRetain, &context, 0);
    WORKS(cuCtxSetCurrent, context);

    const Edge edge;
    std::vector<Bytes> images = fat_binaries();
    HOLDS(!images.empty());
    images.push_back(bare_header());
    images.push_back(linked());
    CUmodule good = nullptr;
    HOLDS(edge.load(images.back(), &good) == CUDA_SUCCESS);
    WORKS(cuModuleUnload, good);

    Random random{1};
    int refused = 0, loaded = 0;
    const auto attempt = [&](const Bytes &image) {
        CUmodule module = nullptr;
        const CUresult code = edge.load(image, &module);
        (code == CUDA_SUCCESS ? loaded : refused) += 1;
        if (code == CUDA_SUCCESS) WORKS(cuModuleUnload, module);
    };
    for (const Bytes &image : images) {
        // Each byte of the header, and its highest bit, by which a length becomes huge.
        for (std::size_t place = 4; place < std::min<std::size_t>(64, image.size()); ++place) {
            Bytes damaged = image;
            damaged[place] ^= 0x80;
            attempt(damaged);
        }
        for (int number = 0; number < 60; ++number) {
            Bytes damaged = image;
            const std::size_t reach = number % 2 ? damaged.size() : std::min<std::size_t>(128, damaged.size());
            for (std::size_t count = 1 + random.below(8); count > 0; --count)
                damaged[random.below(reach)] = static_cast<unsigned char>(random.below(256));
            attempt(damaged);
        }
        for (int number = 0; number < 10; ++number) {
            Bytes cut = image;
            cut.resize(4 + random.below(cut.size() - 4));
            attempt(cut);
        }
    }
    HOLDS(refused > 0);

    // A symbol that lies elsewhere than in its section, or is longer, would name memory of others. The linker of the CPU
    // device writes text.
    if (images.back()[0] == 0x7f) {
        const std::size_t value = symbol_value(images.back());
        const std::uint64_t far = 1ull << 44;
        for (const std::size_t place : {value, value + 8}) {
            Bytes damaged = images.back();
            std::memcpy(&damaged[place], &far, sizeof far);
            CUmodule module = nullptr;
            HOLDS(edge.load(damaged, &module) == CUDA_ERROR_INVALID_IMAGE);
        }
    }

    CUdeviceptr place = 0;
    WORKS(cuMemAlloc, &place, 4);
    HOLDS(edge.load(images.back(), &good) == CUDA_SUCCESS);
    CUfunction store = nullptr;
    WORKS(cuModuleGetFunction, &store, good, "store");
    unsigned value = 12345, result = 0;
    void *parameters[] = {&place, &value};
    WORKS(cuLaunchKernel, store, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr);
    WORKS(cuMemcpyDtoH, &result, place, sizeof result);
    HOLDS(result == value);
    std::printf("%d images were refused, %d loaded\n", refused, loaded);
    std::printf("PASS damaged_images\n");
    return 0;
}
