//! What is asked of kernels beside their attributes, and tensor maps.

use crate::{LaunchAttribute, RawFunction, RawModule, Result};

/// A launch that is only asked about.
#[derive(Clone, Debug)]
pub struct ClusterLaunch<'a> {
    pub function: RawFunction,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    pub attributes: &'a [LaunchAttribute],
}

/// How a tensor map is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMapMode {
    /// In boxes of elements.
    Tiled { tile: [u32; 5] },
    /// In columns of pixels.
    Im2col {
        lower: [i32; 3],
        upper: [i32; 3],
        channels: u32,
        pixels: u32,
    },
    /// In columns of pixels along the width.
    Im2colWide {
        lower: i32,
        upper: i32,
        channels: u32,
        pixels: u32,
        /// `CUtensorMapIm2ColWideMode`.
        mode: u32,
    },
}

/// A tensor map that is to be encoded. Enumerations are the driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    pub mode: TensorMapMode,
    pub data_type: u32,
    /// Dimensions, at most 5: that many entries of the arrays are meant.
    pub rank: u32,
    pub address: u64,
    pub dimensions: [u64; 5],
    /// Bytes from element to element of each dimension but the first.
    pub strides: [u64; 4],
    pub steps: [u32; 5],
    pub interleave: u32,
    pub swizzle: u32,
    pub promotion: u32,
    pub fill: u32,
}

/// An encoded tensor map, aligned as the driver wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(128))]
pub struct EncodedTensorMap(pub [u8; 128]);

/// Questions about kernels, and tensor maps.
pub trait Kernels {
    /// The names of a module's kernels.
    fn kernel_names(&self, module: RawModule) -> Result<Vec<String>>;
    /// Blocks of the greatest cluster (`cuOccupancyMaxPotentialClusterSize`).
    fn greatest_cluster(&self, launch: &ClusterLaunch<'_>) -> Result<i32>;
    /// Clusters that fit the device at a time (`cuOccupancyMaxActiveClusters`).
    fn active_clusters(&self, launch: &ClusterLaunch<'_>) -> Result<i32>;
    /// Encodes a tensor map (`cuTensorMapEncodeTiled` and its kin).
    fn encode_tensor_map(&self, map: &TensorMap) -> Result<EncodedTensorMap>;
    /// The same tensor map of another address (`cuTensorMapReplaceAddress`).
    fn replace_tensor_address(
        &self,
        map: EncodedTensorMap,
        address: u64,
    ) -> Result<EncodedTensorMap>;
}
