//! Validates launches and computes occupancy.
//!
//! Limits and error codes are the native driver's. Where the CPU itself has no limit, the described device's limit
//! applies, so that a program behaves as on a GPU.

use wormhole_device::constants::launch_attribute::{
    CLUSTER_DIMENSION, COOPERATIVE, DEVICE_UPDATABLE_KERNEL_NODE, LAUNCH_COMPLETION_EVENT,
    PROGRAMMATIC_EVENT,
};
use wormhole_device::{ClusterLaunch, CuError, Launch, LaunchAttribute, Result};

use crate::description::{
    BLOCKS_PER_MULTIPROCESSOR, MAX_BLOCK, MAX_BLOCK_THREADS, MAX_GRID,
    REGISTERS_PER_MULTIPROCESSOR, SHARED_PER_BLOCK_OPTIN, SHARED_PER_MULTIPROCESSOR,
    SHARED_RESERVED, THREADS_PER_MULTIPROCESSOR, WARP,
};

/// Largest portable cluster size, in blocks.
const MAX_CLUSTER: u32 = 8;
/// Unit in which registers are allocated to warps.
const REGISTER_UNIT: u32 = 256;

/// Resources that a block of a kernel needs.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Most threads of a block (`.maxntid`, `.reqntid`).
    pub max_threads: u32,
    /// Block size required by the kernel (`.reqntid`).
    pub block: Option<[u32; 3]>,
    /// Static shared memory, bytes.
    pub shared: u32,
    /// Most dynamic shared memory, bytes.
    pub max_dynamic_shared: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of the packed parameters.
    pub parameters: u32,
    /// Cluster size required by the kernel (`.reqnctapercluster`).
    pub cluster: Option<[u32; 3]>,
    /// Whether the kernel uses cluster operations.
    pub uses_cluster: bool,
}

/// Refuses launches that the device cannot run. Returns whether the launch is cooperative.
pub fn validate(needs: &Needs, launch: &Launch<'_>, multiprocessors: u32) -> Result<bool> {
    let within = |value: [u32; 3], most: [u32; 3]| {
        value
            .iter()
            .zip(most)
            .all(|(value, most)| (1..=most).contains(value))
    };
    if !within(launch.grid, MAX_GRID) || !within(launch.block, MAX_BLOCK) {
        return Err(CuError::INVALID_VALUE);
    }
    // Each dimension is at most 1024, so the product fits.
    let threads: u32 = launch.block.iter().product();
    if threads > MAX_BLOCK_THREADS.min(needs.max_threads)
        || launch.shared > needs.max_dynamic_shared
        || launch.parameters.len() < needs.parameters as usize
        || needs.block.is_some_and(|block| block != launch.block)
    {
        return Err(CuError::INVALID_VALUE);
    }
    let Asked {
        cooperative,
        cluster,
    } = attributes(launch.attributes)?;
    cluster_size(needs, cluster, launch.grid)?;
    let fitting = occupancy(needs, threads, launch.shared.into());
    if fitting == 0 {
        return Err(CuError::LAUNCH_OUT_OF_RESOURCES);
    }
    let blocks = launch.grid.iter().fold(1_u64, |product, count| {
        product.saturating_mul(u64::from(*count))
    });
    if cooperative && blocks > u64::from(fitting) * u64::from(multiprocessors) {
        return Err(CuError::COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    Ok(cooperative)
}

fn product(extent: [u32; 3]) -> Option<u32> {
    let [x, y, z] = extent;
    x.checked_mul(y)?.checked_mul(z)
}

/// Attributes of a launch that the device handles.
#[derive(Debug, Default)]
struct Asked {
    cooperative: bool,
    cluster: Option<[u32; 3]>,
}

/// Returns the number of blocks of a cluster. Clusters have no effect here, so kernels that use cluster operations are
/// refused in clusters of several blocks.
fn cluster_size(needs: &Needs, asked: Option<[u32; 3]>, grid: [u32; 3]) -> Result<u32> {
    let cluster = needs.cluster.or(asked).unwrap_or([1; 3]);
    let differs = asked.is_some_and(|asked| asked != cluster);
    let divides = |(blocks, size): (&u32, &u32)| blocks.checked_rem(*size) == Some(0);
    match product(cluster).filter(|blocks| *blocks <= MAX_CLUSTER) {
        Some(2..) if needs.uses_cluster => Err(CuError::NOT_SUPPORTED),
        Some(blocks) if !differs && grid.iter().zip(&cluster).all(divides) => Ok(blocks),
        _ => Err(CuError::INVALID_CLUSTER_SIZE),
    }
}

/// Decodes the attributes. Refuses those whose effect a program would miss; the others are hints.
fn attributes(attributes: &[LaunchAttribute]) -> Result<Asked> {
    let mut asked = Asked::default();
    for attribute in attributes {
        let word = |index: usize| {
            attribute.value[4 * index..][..4]
                .iter()
                .rev()
                .fold(0_u32, |word, byte| word << 8 | u32::from(*byte))
        };
        match attribute.id {
            COOPERATIVE => asked.cooperative = word(0) != 0,
            CLUSTER_DIMENSION => {
                asked.cluster = Some([0, 1, 2].map(|index| word(index).max(1)));
            }
            // Events of a launch are passed in [`Launch::events`].
            PROGRAMMATIC_EVENT | LAUNCH_COMPLETION_EVENT | DEVICE_UPDATABLE_KERNEL_NODE => {
                return Err(CuError::NOT_SUPPORTED);
            }
            _ => {}
        }
    }
    Ok(asked)
}

/// Returns the number of blocks that are resident on a multiprocessor at a time (CUDA programming guide,
/// "Multiprocessor level").
pub fn occupancy(needs: &Needs, threads: u32, dynamic_shared: u64) -> u32 {
    if threads == 0 || threads > needs.max_threads.min(MAX_BLOCK_THREADS) {
        return 0;
    }
    let warps = threads.div_ceil(WARP);
    let by_threads = THREADS_PER_MULTIPROCESSOR / (warps * WARP);
    let warp_registers = (needs.registers * WARP).next_multiple_of(REGISTER_UNIT);
    let by_registers = (REGISTERS_PER_MULTIPROCESSOR / warp_registers.max(1)) / warps;
    let taken = u64::from(needs.shared) + u64::from(SHARED_RESERVED);
    let shared = dynamic_shared.saturating_add(taken);
    let by_shared = u64::from(SHARED_PER_MULTIPROCESSOR) / shared;
    let by_shared = u32::try_from(by_shared).unwrap_or(u32::MAX);
    BLOCKS_PER_MULTIPROCESSOR
        .min(by_threads)
        .min(by_registers)
        .min(by_shared)
}

/// Returns the most bytes of dynamic shared memory for each of `blocks` blocks of `threads` threads that are resident
/// on one multiprocessor, or 0 if they do not fit without any.
pub fn available_shared(needs: &Needs, blocks: u32, threads: u32) -> u64 {
    if occupancy(needs, threads, 0) < blocks {
        return 0;
    }
    let share = (SHARED_PER_MULTIPROCESSOR / blocks).min(SHARED_PER_BLOCK_OPTIN + SHARED_RESERVED);
    let taken = needs.shared + SHARED_RESERVED;
    u64::from(share.saturating_sub(taken))
}

/// Returns the number of clusters that are resident on the device at a time.
pub fn active_clusters(
    needs: &Needs,
    launch: &ClusterLaunch<'_>,
    multiprocessors: u32,
) -> Result<u32> {
    let asked = attributes(launch.attributes)?.cluster;
    let threads = product(launch.block).filter(|threads| (1..=MAX_BLOCK_THREADS).contains(threads));
    let threads = threads.ok_or(CuError::INVALID_VALUE)?;
    if launch.grid.contains(&0) || launch.shared > needs.max_dynamic_shared {
        return Err(CuError::INVALID_VALUE);
    }
    let size = cluster_size(needs, asked, launch.grid)?;
    let blocks = occupancy(needs, threads, launch.shared.into()).saturating_mul(multiprocessors);
    Ok(blocks / size)
}

/// Returns the largest cluster size that a kernel can be launched with.
pub fn greatest_cluster(needs: &Needs) -> u32 {
    match (needs.uses_cluster, needs.cluster) {
        (true, _) => 1,
        (false, None) => MAX_CLUSTER,
        // `active_clusters` has validated the required size.
        (false, Some(cluster)) => cluster.iter().product(),
    }
}

#[cfg(test)]
mod tests {
    use wormhole_device::{LaunchEvents, RawFunction, RawStream};

    use super::*;

    const NEEDS: Needs = Needs {
        max_threads: 256,
        block: None,
        shared: 1024,
        max_dynamic_shared: 48 << 10,
        registers: 32,
        parameters: 12,
        cluster: None,
        uses_cluster: true,
    };

    fn try_launch(
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        id: u32,
        value: u8,
    ) -> Result<bool> {
        let mut bytes = [0; 64];
        bytes[0] = value;
        let launch = Launch {
            function: RawFunction(1),
            stream: RawStream::LEGACY,
            grid,
            block,
            shared,
            attributes: &[LaunchAttribute::new(id, bytes)],
            events: LaunchEvents::default(),
            parameters: &[0; 12],
        };
        validate(&NEEDS, &launch, 2)
    }

    #[test]
    fn each_impossible_launch_has_the_native_code() {
        assert_eq!(
            try_launch([1, 1, 1], [256, 1, 1], 48 << 10, 0, 0),
            Ok(false)
        );
        let invalid = [
            ([0, 1, 1], [1, 1, 1], 0),
            ([1, 65_536, 1], [1, 1, 1], 0),
            ([1, 1, 1], [1, 1, 65], 0),
            ([1, 1, 1], [1025, 1, 1], 0),
            ([1, 1, 1], [64, 64, 1], 0),
            ([1, 1, 1], [257, 1, 1], 0),
            ([1, 1, 1], [1, 1, 1], (48 << 10) + 1),
        ];
        for (grid, block, shared) in invalid {
            let result = try_launch(grid, block, shared, 0, 0);
            assert_eq!(
                result,
                Err(CuError::INVALID_VALUE),
                "{grid:?} {block:?} {shared}"
            );
        }
        assert_eq!(
            try_launch([16, 1, 1], [256, 1, 1], 0, COOPERATIVE, 1),
            Ok(true)
        );
        let large = try_launch([17, 1, 1], [256, 1, 1], 0, COOPERATIVE, 1);
        assert_eq!(large, Err(CuError::COOPERATIVE_LAUNCH_TOO_LARGE));
        assert_eq!(
            try_launch([17, 1, 1], [256, 1, 1], 0, COOPERATIVE, 0),
            Ok(false)
        );
        assert_eq!(
            try_launch([2, 1, 1], [1, 1, 1], 0, CLUSTER_DIMENSION, 1),
            Ok(false)
        );
        let cluster = try_launch([2, 1, 1], [1, 1, 1], 0, CLUSTER_DIMENSION, 2);
        assert_eq!(cluster, Err(CuError::NOT_SUPPORTED));
        for missed in [
            PROGRAMMATIC_EVENT,
            LAUNCH_COMPLETION_EVENT,
            DEVICE_UPDATABLE_KERNEL_NODE,
        ] {
            let missed = try_launch([1; 3], [1; 3], 0, missed, 1);
            assert_eq!(missed, Err(CuError::NOT_SUPPORTED));
        }
    }

    #[test]
    fn clusters_are_for_kernels_that_do_not_ask_for_them() {
        let check = |uses_cluster, demanded, asked, grid| {
            let needs = Needs {
                cluster: demanded,
                uses_cluster,
                ..NEEDS
            };
            cluster_size(&needs, asked, grid)
        };
        let two = Some([2, 1, 1]);
        assert_eq!(check(false, None, two, [4, 1, 1]), Ok(2));
        assert_eq!(check(false, two, None, [4, 1, 1]), Ok(2));
        assert_eq!(check(false, two, two, [4, 1, 1]), Ok(2));
        assert_eq!(check(true, None, None, [4, 1, 1]), Ok(1));
        let other = check(false, two, Some([1; 3]), [4, 1, 1]);
        assert_eq!(other, Err(CuError::INVALID_CLUSTER_SIZE));
        for (demanded, asked) in [(two, None), (None, two)] {
            let refused = check(true, demanded, asked, [4, 1, 1]);
            assert_eq!(refused, Err(CuError::NOT_SUPPORTED));
        }
        for (cluster, grid) in [
            ([2, 1, 1], [3, 1, 1]),
            ([3, 3, 1], [9, 9, 1]),
            ([u32::MAX; 3], [8; 3]),
        ] {
            let refused = check(false, None, Some(cluster), grid);
            assert_eq!(refused, Err(CuError::INVALID_CLUSTER_SIZE), "{cluster:?}");
        }
    }

    #[test]
    fn what_is_available_lets_as_many_blocks_fit_and_no_more() {
        for blocks in 1..=8 {
            let bytes = available_shared(&NEEDS, blocks, 256);
            assert!(occupancy(&NEEDS, 256, bytes) >= blocks);
            if bytes + 2048 < u64::from(SHARED_PER_BLOCK_OPTIN) {
                assert!(occupancy(&NEEDS, 256, bytes + 2048) < blocks.max(2));
            }
        }
        assert_eq!(available_shared(&NEEDS, 9, 256), 0, "threads are too few");
        assert_eq!(available_shared(&NEEDS, 1, 257), 0);
        assert_eq!(occupancy(&NEEDS, 256, u64::MAX), 0);
    }

    #[test]
    fn the_scarcest_resource_bounds_the_occupancy() {
        let needs = |registers, shared| Needs {
            max_threads: 1024,
            shared,
            registers,
            ..NEEDS
        };
        assert_eq!(occupancy(&needs(16, 0), 1024, 0), 2, "threads");
        assert_eq!(occupancy(&needs(16, 0), 32, 0), 32, "blocks");
        assert_eq!(occupancy(&needs(128, 0), 256, 0), 2, "registers");
        assert_eq!(
            occupancy(&needs(16, 47 << 10), 32, 0),
            4,
            "static shared memory"
        );
        assert_eq!(
            occupancy(&needs(16, 0), 32, 227 << 10),
            1,
            "dynamic shared memory"
        );
        assert_eq!(occupancy(&needs(255, 0), 1024, 0), 0, "nothing fits");
    }
}
