//! Names and cluster occupancy of kernels, and tensor maps.

use wormhole_api::ctypes::CUtensorMap;

use crate::{LaunchAttribute, RawFunction, RawModule, Result};

/// Launch configuration for occupancy queries.
#[derive(Clone, Debug)]
pub struct ClusterLaunch<'a> {
    pub function: RawFunction,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    pub attributes: &'a [LaunchAttribute],
}

/// Encoding of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMapMode {
    /// Boxes of elements.
    Tiled { tile: [u32; 5] },
    /// Columns of pixels.
    Im2col {
        lower: [i32; 3],
        upper: [i32; 3],
        channels: u32,
        pixels: u32,
    },
    /// Columns of pixels along the width.
    Im2colWide {
        lower: i32,
        upper: i32,
        channels: u32,
        pixels: u32,
        /// `CUtensorMapIm2ColWideMode`.
        mode: u32,
    },
}

/// Parameters of a tensor map. Enumerations are the driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    pub mode: TensorMapMode,
    pub data_type: u32,
    /// Number of dimensions, at most 5; only that many entries of the arrays are used.
    pub rank: u32,
    pub address: u64,
    pub dimensions: [u64; 5],
    /// Strides in bytes of all dimensions but the first.
    pub strides: [u64; 4],
    pub steps: [u32; 5],
    pub interleave: u32,
    pub swizzle: u32,
    pub promotion: u32,
    pub fill: u32,
}

/// Encoded tensor map, with the driver's alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(128))]
pub struct EncodedTensorMap(pub CUtensorMap);

/// Queries of kernels, and tensor maps.
pub trait Kernels {
    /// Calls `each` with the name of each of a module's kernels. Keeps no name: they may be many and long.
    fn kernel_names(&self, module: RawModule, each: &mut dyn FnMut(&[u8])) -> Result<()>;
    /// Returns the blocks of the greatest cluster (`cuOccupancyMaxPotentialClusterSize`).
    fn greatest_cluster(&self, launch: &ClusterLaunch<'_>) -> Result<i32>;
    /// Returns the number of clusters that fit the device at a time (`cuOccupancyMaxActiveClusters`).
    fn active_clusters(&self, launch: &ClusterLaunch<'_>) -> Result<i32>;
    /// Encodes a tensor map (`cuTensorMapEncodeTiled`, `…Im2col`, `…Im2colWide`).
    fn encode_tensor_map(&self, map: &TensorMap) -> Result<EncodedTensorMap>;
    /// Replaces the address of a tensor map (`cuTensorMapReplaceAddress`).
    fn replace_tensor_address(
        &self,
        map: EncodedTensorMap,
        address: u64,
    ) -> Result<EncodedTensorMap>;
}
