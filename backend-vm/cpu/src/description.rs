//! Description of the device: the limits of compute capability 9.0, and the size of this machine.

use std::fs;

use wormhole_device::Description;

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
/// Attributes that differ between devices: each has its own bus.
const PCI_BUS_ID: i32 = 33;
const MULTI_GPU_BOARD_GROUP_ID: i32 = 85;
const CUDA_VERSION: i32 = 13_000;
const L2_BYTES: u32 = 4 << 20;

/// Describes a device with `memory` bytes and one multiprocessor for each of `processors`. `number` is its number in
/// the process, below 64.
pub fn describe(memory: u64, processors: u32, number: u8) -> Description {
    let mut attributes = attributes(processors);
    for (id, value) in &mut attributes {
        if matches!(*id, PCI_BUS_ID | MULTI_GPU_BOARD_GROUP_ID) {
            *value = number.into();
        }
    }
    let mut uuid = UUID;
    uuid[15] += number;
    Description {
        name: format!("Wormhole CPU device ({})", processor_name()),
        uuid,
        total_memory: memory,
        driver_version: CUDA_VERSION,
        attributes,
        stream_priorities: PRIORITIES,
    }
}

fn processor_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or_else(
            || std::env::consts::ARCH.to_owned(),
            |(_, name)| name.trim().to_owned(),
        )
}

fn signed(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// Returns each `CUdevice_attribute` (CUDA driver API 13.0, "Data types used by CUDA driver") with its value.
///
/// Attributes of features that the device lacks are 0.
fn attributes(processors: u32) -> Vec<(i32, i32)> {
    let mut all = vec![
        (1, signed(MAX_BLOCK_THREADS)),             // MAX_THREADS_PER_BLOCK
        (2, signed(MAX_BLOCK[0])),                  // MAX_BLOCK_DIM_X
        (3, signed(MAX_BLOCK[1])),                  // MAX_BLOCK_DIM_Y
        (4, signed(MAX_BLOCK[2])),                  // MAX_BLOCK_DIM_Z
        (5, signed(MAX_GRID[0])),                   // MAX_GRID_DIM_X
        (6, signed(MAX_GRID[1])),                   // MAX_GRID_DIM_Y
        (7, signed(MAX_GRID[2])),                   // MAX_GRID_DIM_Z
        (8, signed(SHARED_PER_BLOCK)),              // MAX_SHARED_MEMORY_PER_BLOCK
        (9, 64 << 10),                              // TOTAL_CONSTANT_MEMORY
        (10, signed(WARP)),                         // WARP_SIZE
        (11, i32::MAX),                             // MAX_PITCH
        (12, signed(REGISTERS_PER_BLOCK)),          // MAX_REGISTERS_PER_BLOCK
        (13, 1_000_000),                            // CLOCK_RATE, kHz
        (14, signed(TEXTURE_ALIGNMENT)),            // TEXTURE_ALIGNMENT
        (15, 1),                                    // GPU_OVERLAP
        (16, signed(processors)),                   // MULTIPROCESSOR_COUNT
        (19, 1),                                    // CAN_MAP_HOST_MEMORY
        (30, 512),                                  // SURFACE_ALIGNMENT
        (31, 1),                                    // CONCURRENT_KERNELS
        (36, 1_000_000),                            // MEMORY_CLOCK_RATE, kHz
        (37, 64),                                   // GLOBAL_MEMORY_BUS_WIDTH, bits
        (38, signed(L2_BYTES)),                     // L2_CACHE_SIZE
        (39, signed(THREADS_PER_MULTIPROCESSOR)),   // MAX_THREADS_PER_MULTIPROCESSOR
        (40, 1),                                    // ASYNC_ENGINE_COUNT
        (41, 1),                                    // UNIFIED_ADDRESSING
        (51, signed(TEXTURE_PITCH_ALIGNMENT)),      // TEXTURE_PITCH_ALIGNMENT
        (75, 9),                                    // COMPUTE_CAPABILITY_MAJOR
        (76, 0),                                    // COMPUTE_CAPABILITY_MINOR
        (78, 1),                                    // STREAM_PRIORITIES_SUPPORTED
        (79, 1),                                    // GLOBAL_L1_CACHE_SUPPORTED
        (80, 1),                                    // LOCAL_L1_CACHE_SUPPORTED
        (81, signed(SHARED_PER_MULTIPROCESSOR)),    // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        (82, signed(REGISTERS_PER_MULTIPROCESSOR)), // MAX_REGISTERS_PER_MULTIPROCESSOR
        (86, 1),                                    // HOST_NATIVE_ATOMIC_SUPPORTED
        (87, 2),                                    // SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO
        (90, 1),                                    // COMPUTE_PREEMPTION_SUPPORTED
        (91, 1),                                    // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        (95, 1),                                    // COOPERATIVE_LAUNCH
        (96, 1),                                    // COOPERATIVE_MULTI_DEVICE_LAUNCH
        (97, signed(SHARED_PER_BLOCK_OPTIN)),       // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        (99, 1),                                    // HOST_REGISTER_SUPPORTED
        (102, 1),                                   // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        (103, 1),                                   // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        (106, signed(BLOCKS_PER_MULTIPROCESSOR)),   // MAX_BLOCKS_PER_MULTIPROCESSOR
        (111, signed(SHARED_RESERVED)),             // RESERVED_SHARED_MEMORY_PER_BLOCK
        (115, 1),                                   // MEMORY_POOLS_SUPPORTED
        (125, 1),                                   // IPC_EVENT_SUPPORTED
        (119, 1),                                   // MEMPOOL_SUPPORTED_HANDLE_TYPES
        (122, 1),                                   // CAN_USE_64_BIT_STREAM_MEM_OPS
        (123, 1),                                   // CAN_USE_STREAM_WAIT_VALUE_NOR
        (126, 1),                                   // MEM_SYNC_DOMAIN_COUNT
        (130, 0),                                   // NUMA_CONFIG: none
        (131, -1),                                  // NUMA_ID
        (134, -1),                                  // HOST_NUMA_ID
    ];
    all.extend(TEXTURE_LIMITS);
    for id in 1..ATTRIBUTES_END {
        if !all.iter().any(|(known, _)| *known == id) {
            all.push((id, 0));
        }
    }
    all.sort_unstable();
    all
}

/// One past the last attribute of CUDA 13.0.
const ATTRIBUTES_END: i32 = 148;

/// Limits of textures and surfaces ("CUDA C++ programming guide", technical specifications per
/// compute capability), attributes 21 to 29, 42 to 49, 52 to 74 and 77.
pub const TEXTURE_LIMITS: [(i32, i32); 41] = [
    (21, 131_072),
    (22, 131_072),
    (23, 65_536),
    (24, 16_384),
    (25, 16_384),
    (26, 16_384),
    (27, 32_768),
    (28, 32_768),
    (29, 2_048),
    (42, 32_768),
    (43, 2_048),
    (44, 1),
    (45, 32_768),
    (46, 32_768),
    (47, 8_192),
    (48, 8_192),
    (49, 32_768),
    (52, 32_768),
    (53, 32_768),
    (54, 2_046),
    (55, 32_768),
    (56, 131_072),
    (57, 65_536),
    (58, 16_384),
    (59, 16_384),
    (60, 16_384),
    (61, 32_768),
    (62, 2_048),
    (63, 32_768),
    (64, 32_768),
    (65, 2_048),
    (66, 32_768),
    (67, 32_768),
    (68, 2_046),
    (69, 268_435_456),
    (70, 131_072),
    (71, 65_000),
    (72, 2_097_120),
    (73, 32_768),
    (74, 32_768),
    (77, 32_768),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attribute_is_answered_once_in_order() {
        let ids: Vec<i32> = attributes(4).into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids, (1..ATTRIBUTES_END).collect::<Vec<_>>());
    }
}
