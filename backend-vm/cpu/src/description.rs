//! Description of the device: the limits of compute capability 9.0, and the size of this machine.

use std::arch::x86_64::__cpuid;

use wormhole_device::Description;
use wormhole_device::constants::api_version::VERSION;
use wormhole_device::constants::device_attribute as attribute;

/// Threads of a warp.
pub const WARP: u32 = 32;
/// Most threads of a block.
pub const MAX_BLOCK_THREADS: u32 = 1024;
/// Most threads of a block in each dimension.
pub const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
/// Most blocks of a grid in each dimension.
pub const MAX_GRID: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];
/// Bytes of shared memory: of a block by default, of a block with opt-in, and of a multiprocessor.
pub const SHARED_PER_BLOCK: u32 = 48 << 10;
pub const SHARED_PER_BLOCK_OPTIN: u32 = 227 << 10;
pub const SHARED_PER_MULTIPROCESSOR: u32 = 228 << 10;
/// Bytes of shared memory that the system reserves in each block.
pub const SHARED_RESERVED: u32 = 1 << 10;
/// Resources of a multiprocessor.
pub const THREADS_PER_MULTIPROCESSOR: u32 = 2048;
pub const BLOCKS_PER_MULTIPROCESSOR: u32 = 32;
pub const REGISTERS_PER_MULTIPROCESSOR: u32 = 64 << 10;
/// Most registers of a block.
pub const REGISTERS_PER_BLOCK: u32 = 64 << 10;
/// Alignment in bytes of textures of linear memory, and of their pitch.
pub const TEXTURE_ALIGNMENT: u32 = 512;
pub const TEXTURE_PITCH_ALIGNMENT: u32 = 32;
/// Least and greatest stream priority.
pub const PRIORITIES: (i32, i32) = (0, -5);

/// A UUID of version 8 (RFC 9562, section 5.8) that spells the first device's name.
const UUID: [u8; 16] = *b"wormho\x80e\x80cpudev0";
const L2_BYTES: u32 = 4 << 20;

/// Describes a device with `memory` bytes and one multiprocessor for each of `processors`. `number` is its number in
/// the process, below 64.
pub fn describe(memory: u64, processors: u32, number: u8) -> Description {
    let mut attributes = attributes(processors);
    for (id, value) in &mut attributes {
        // Each device has its own bus.
        if matches!(
            *id,
            attribute::PCI_BUS_ID | attribute::MULTI_GPU_BOARD_GROUP_ID
        ) {
            *value = number.into();
        }
    }
    let mut uuid = UUID;
    uuid[15] += number;
    Description {
        name: format!("Wormhole CPU device ({})", processor_name()),
        uuid,
        total_memory: memory,
        driver_version: VERSION,
        attributes,
        stream_priorities: PRIORITIES,
    }
}

/// Returns the brand string of the processor (CPUID, leaves 0x8000_0002 to 0x8000_0004). A worker has no `/proc/cpuinfo`.
fn processor_name() -> String {
    const FIRST: u32 = 0x8000_0002;
    const LAST: u32 = 0x8000_0004;
    if __cpuid(0x8000_0000).eax < LAST {
        return std::env::consts::ARCH.to_owned();
    }
    let leaves = (FIRST..=LAST).map(__cpuid);
    let words = leaves.flat_map(|leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]);
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    let text = String::from_utf8_lossy(&bytes);
    let name = text.trim_matches(['\0', ' ']);
    match name.is_empty() {
        true => std::env::consts::ARCH.to_owned(),
        false => name.to_owned(),
    }
}

fn signed(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// Returns each `CUdevice_attribute` (CUDA driver API 13.0, "Data types used by CUDA driver") with its value.
///
/// Attributes of features that the device lacks are 0.
fn attributes(processors: u32) -> Vec<(i32, i32)> {
    let mut all = vec![
        (attribute::MAX_THREADS_PER_BLOCK, signed(MAX_BLOCK_THREADS)),
        (attribute::MAX_BLOCK_DIM_X, signed(MAX_BLOCK[0])),
        (attribute::MAX_BLOCK_DIM_Y, signed(MAX_BLOCK[1])),
        (attribute::MAX_BLOCK_DIM_Z, signed(MAX_BLOCK[2])),
        (attribute::MAX_GRID_DIM_X, signed(MAX_GRID[0])),
        (attribute::MAX_GRID_DIM_Y, signed(MAX_GRID[1])),
        (attribute::MAX_GRID_DIM_Z, signed(MAX_GRID[2])),
        (
            attribute::MAX_SHARED_MEMORY_PER_BLOCK,
            signed(SHARED_PER_BLOCK),
        ),
        (attribute::TOTAL_CONSTANT_MEMORY, 64 << 10),
        (attribute::WARP_SIZE, signed(WARP)),
        (attribute::MAX_PITCH, i32::MAX),
        (
            attribute::MAX_REGISTERS_PER_BLOCK,
            signed(REGISTERS_PER_BLOCK),
        ),
        (attribute::CLOCK_RATE, 1_000_000), // kHz
        (attribute::TEXTURE_ALIGNMENT, signed(TEXTURE_ALIGNMENT)),
        (attribute::GPU_OVERLAP, 1),
        (attribute::MULTIPROCESSOR_COUNT, signed(processors)),
        (attribute::CAN_MAP_HOST_MEMORY, 1),
        (attribute::SURFACE_ALIGNMENT, 512),
        (attribute::CONCURRENT_KERNELS, 1),
        (attribute::MEMORY_CLOCK_RATE, 1_000_000), // kHz
        (attribute::GLOBAL_MEMORY_BUS_WIDTH, 64),  // bits
        (attribute::L2_CACHE_SIZE, signed(L2_BYTES)),
        (
            attribute::MAX_THREADS_PER_MULTIPROCESSOR,
            signed(THREADS_PER_MULTIPROCESSOR),
        ),
        (attribute::ASYNC_ENGINE_COUNT, 1),
        (attribute::UNIFIED_ADDRESSING, 1),
        (
            attribute::TEXTURE_PITCH_ALIGNMENT,
            signed(TEXTURE_PITCH_ALIGNMENT),
        ),
        (attribute::COMPUTE_CAPABILITY_MAJOR, 9),
        (attribute::COMPUTE_CAPABILITY_MINOR, 0),
        (attribute::STREAM_PRIORITIES_SUPPORTED, 1),
        (attribute::GLOBAL_L1_CACHE_SUPPORTED, 1),
        (attribute::LOCAL_L1_CACHE_SUPPORTED, 1),
        (
            attribute::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            signed(SHARED_PER_MULTIPROCESSOR),
        ),
        (
            attribute::MAX_REGISTERS_PER_MULTIPROCESSOR,
            signed(REGISTERS_PER_MULTIPROCESSOR),
        ),
        (attribute::HOST_NATIVE_ATOMIC_SUPPORTED, 1),
        (attribute::SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2),
        (attribute::COMPUTE_PREEMPTION_SUPPORTED, 1),
        (attribute::CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1),
        (attribute::COOPERATIVE_LAUNCH, 1),
        (attribute::COOPERATIVE_MULTI_DEVICE_LAUNCH, 1),
        (
            attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            signed(SHARED_PER_BLOCK_OPTIN),
        ),
        (attribute::HOST_REGISTER_SUPPORTED, 1),
        (attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1),
        (attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1),
        (
            attribute::MAX_BLOCKS_PER_MULTIPROCESSOR,
            signed(BLOCKS_PER_MULTIPROCESSOR),
        ),
        (
            attribute::RESERVED_SHARED_MEMORY_PER_BLOCK,
            signed(SHARED_RESERVED),
        ),
        (attribute::MEMORY_POOLS_SUPPORTED, 1),
        (attribute::IPC_EVENT_SUPPORTED, 1),
        (attribute::MEMPOOL_SUPPORTED_HANDLE_TYPES, 1),
        (attribute::CAN_USE_64_BIT_STREAM_MEM_OPS, 1),
        (attribute::CAN_USE_STREAM_WAIT_VALUE_NOR, 1),
        (attribute::MEM_SYNC_DOMAIN_COUNT, 1),
        (attribute::NUMA_CONFIG, 0), // none
        (attribute::NUMA_ID, -1),
        (attribute::HOST_NUMA_ID, -1),
    ];
    all.extend(TEXTURE_LIMITS);
    for id in 1..attribute::MAX {
        if !all.iter().any(|(known, _)| *known == id) {
            all.push((id, 0));
        }
    }
    all.sort_unstable();
    all
}

/// Limits of textures and surfaces ("CUDA C++ programming guide", technical specifications per
/// compute capability).
pub const TEXTURE_LIMITS: [(i32, i32); 41] = [
    (attribute::MAXIMUM_TEXTURE1D_WIDTH, 131_072),
    (attribute::MAXIMUM_TEXTURE2D_WIDTH, 131_072),
    (attribute::MAXIMUM_TEXTURE2D_HEIGHT, 65_536),
    (attribute::MAXIMUM_TEXTURE3D_WIDTH, 16_384),
    (attribute::MAXIMUM_TEXTURE3D_HEIGHT, 16_384),
    (attribute::MAXIMUM_TEXTURE3D_DEPTH, 16_384),
    (attribute::MAXIMUM_TEXTURE2D_LAYERED_WIDTH, 32_768),
    (attribute::MAXIMUM_TEXTURE2D_LAYERED_HEIGHT, 32_768),
    (attribute::MAXIMUM_TEXTURE2D_LAYERED_LAYERS, 2_048),
    (attribute::MAXIMUM_TEXTURE1D_LAYERED_WIDTH, 32_768),
    (attribute::MAXIMUM_TEXTURE1D_LAYERED_LAYERS, 2_048),
    (attribute::CAN_TEX2D_GATHER, 1),
    (attribute::MAXIMUM_TEXTURE2D_GATHER_WIDTH, 32_768),
    (attribute::MAXIMUM_TEXTURE2D_GATHER_HEIGHT, 32_768),
    (attribute::MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE, 8_192),
    (attribute::MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE, 8_192),
    (attribute::MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE, 32_768),
    (attribute::MAXIMUM_TEXTURECUBEMAP_WIDTH, 32_768),
    (attribute::MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH, 32_768),
    (attribute::MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS, 2_046),
    (attribute::MAXIMUM_SURFACE1D_WIDTH, 32_768),
    (attribute::MAXIMUM_SURFACE2D_WIDTH, 131_072),
    (attribute::MAXIMUM_SURFACE2D_HEIGHT, 65_536),
    (attribute::MAXIMUM_SURFACE3D_WIDTH, 16_384),
    (attribute::MAXIMUM_SURFACE3D_HEIGHT, 16_384),
    (attribute::MAXIMUM_SURFACE3D_DEPTH, 16_384),
    (attribute::MAXIMUM_SURFACE1D_LAYERED_WIDTH, 32_768),
    (attribute::MAXIMUM_SURFACE1D_LAYERED_LAYERS, 2_048),
    (attribute::MAXIMUM_SURFACE2D_LAYERED_WIDTH, 32_768),
    (attribute::MAXIMUM_SURFACE2D_LAYERED_HEIGHT, 32_768),
    (attribute::MAXIMUM_SURFACE2D_LAYERED_LAYERS, 2_048),
    (attribute::MAXIMUM_SURFACECUBEMAP_WIDTH, 32_768),
    (attribute::MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH, 32_768),
    (attribute::MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS, 2_046),
    (attribute::MAXIMUM_TEXTURE1D_LINEAR_WIDTH, 268_435_456),
    (attribute::MAXIMUM_TEXTURE2D_LINEAR_WIDTH, 131_072),
    (attribute::MAXIMUM_TEXTURE2D_LINEAR_HEIGHT, 65_000),
    (attribute::MAXIMUM_TEXTURE2D_LINEAR_PITCH, 2_097_120),
    (attribute::MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH, 32_768),
    (attribute::MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT, 32_768),
    (attribute::MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH, 32_768),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attribute_is_answered_once_in_order() {
        let ids: Vec<i32> = attributes(4).into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids, (1..attribute::MAX).collect::<Vec<_>>());
    }
}
