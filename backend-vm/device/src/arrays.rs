//! Arrays, textures, surfaces, and 3-D copies.

use wormhole_api::array::{ArrayShape, Texels};

use crate::{RawStream, Result};

raw_handle! {
    /// Handle of an array, or of a level of a mipmapped one.
    RawArray
    /// Handle of a mipmapped array.
    RawMipmap
}

/// Source of a texture's texels.
#[derive(Clone, Copy, Debug)]
pub enum Resource {
    Array(RawArray),
    Mipmap(RawMipmap),
    /// Linear memory, one-dimensional.
    Linear {
        address: u64,
        texels: Texels,
        bytes: u64,
    },
    /// Two-dimensional memory: texels of a row, rows, pitch in bytes.
    Rows {
        address: u64,
        texels: Texels,
        width: u64,
        height: u64,
        pitch: u64,
    },
}

/// Sampling of a texture (`CUDA_TEXTURE_DESC`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// `CUaddress_mode` of each dimension.
    pub address_modes: [u32; 3],
    /// `CUfilter_mode` within a level; `level_filter` between levels.
    pub filter: u32,
    pub level_filter: u32,
    /// `CU_TRSF_*`.
    pub flags: u32,
    pub anisotropy: u32,
    pub level_bias: f32,
    /// Least and greatest level.
    pub level_clamp: [f32; 2],
    /// Bits of the border's channels.
    pub border: [u32; 4],
}

/// Resource view of a texture's array (`CUDA_RESOURCE_VIEW_DESC`).
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// `CUresourceViewFormat`.
    pub format: u32,
    pub extent: [u64; 3],
    /// First and last level; `layers` likewise.
    pub levels: [u32; 2],
    pub layers: [u32; 2],
}

/// One end of a 3-D copy.
#[derive(Clone, Copy, Debug)]
pub enum Copy3dEnd {
    /// Device memory or registered host memory. The address is that of the region's first byte.
    Memory {
        address: u64,
        /// Pitch in bytes.
        pitch: u64,
        /// Rows of a slice.
        rows: u64,
    },
    Array {
        array: RawArray,
        /// Origin of the region: bytes, rows, slices.
        origin: [u64; 3],
    },
}

/// 3-D copy. No dimension is 0.
#[derive(Clone, Copy, Debug)]
pub struct MemCopy3d {
    pub to: Copy3dEnd,
    pub from: Copy3dEnd,
    /// Extent of the region: bytes of a row, rows, slices.
    pub extent: [u64; 3],
}

/// Operations on arrays. Callers pass live arrays, and ends that were checked to contain the 3-D region.
pub trait Arrays {
    fn create_array(&self, shape: &ArrayShape) -> Result<RawArray>;
    /// Creates a mipmapped array. `levels` is from 1 to the greatest number for the shape.
    fn create_mipmap(&self, shape: &ArrayShape, levels: u32) -> Result<RawMipmap>;
    /// Creates a texture object. Returns the value for kernels.
    fn create_texture(
        &self,
        resource: &Resource,
        sampling: &Sampling,
        view: Option<&View>,
    ) -> Result<u64>;
    /// Creates a surface object. Returns the value for kernels.
    fn create_surface(&self, array: RawArray) -> Result<u64>;
    /// Copies a 3-D region. Asynchronous.
    fn copy_3d(&self, copy: &MemCopy3d, stream: RawStream) -> Result<()>;
}
