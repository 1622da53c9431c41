// Unpacks the images of a fat binary: Zstandard, as CUDA 13 packs them, or LZ4. Stands in for LZ4's function, which is
// the only one that GVirtuS calls.
#pragma once
#include <lz4.h>
#include <string.h>
#include <zstd.h>

static inline int unpack_image(const char *packed, char *image, int packed_size, int image_size) {
    const unsigned char magic[4] = {0x28, 0xb5, 0x2f, 0xfd};
    if (packed_size < 4 || memcmp(packed, magic, 4) != 0) {
        return LZ4_decompress_safe(packed, image, packed_size, image_size);
    }
    size_t size = ZSTD_decompress(image, image_size, packed, packed_size);
    return ZSTD_isError(size) ? -1 : (int)size;
}
#define LZ4_decompress_safe unpack_image
