//! Arrays, textures, surfaces, and copies of boxes.

use wormhole_api::array::{ArrayShape, Texels};

use crate::{RawStream, Result};

raw_handle! {
    /// An array, or a level of a mipmapped one.
    RawArray
    /// A mipmapped array.
    RawMipmap
}

/// What a texture reads.
#[derive(Clone, Copy, Debug)]
pub enum Resource {
    Array(RawArray),
    Mipmap(RawMipmap),
    /// Memory in one dimension.
    Linear {
        address: u64,
        texels: Texels,
        bytes: u64,
    },
    /// Memory in two dimensions: texels of a row, rows, bytes from row to row.
    Rows {
        address: u64,
        texels: Texels,
        width: u64,
        height: u64,
        pitch: u64,
    },
}

/// How a texture is read (`CUDA_TEXTURE_DESC`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// `CUaddress_mode` of each dimension.
    pub address_modes: [u32; 3],
    /// `CUfilter_mode` between texels and between levels.
    pub filter: u32,
    pub level_filter: u32,
    /// `CU_TRSF_*`.
    pub flags: u32,
    pub anisotropy: u32,
    pub level_bias: f32,
    /// The least and the greatest level.
    pub level_clamp: [f32; 2],
    /// The border's channels, as bits.
    pub border: [u32; 4],
}

/// How a texture sees its array (`CUDA_RESOURCE_VIEW_DESC`).
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// `CUresourceViewFormat`.
    pub format: u32,
    pub extent: [u64; 3],
    /// First and last.
    pub levels: [u32; 2],
    pub layers: [u32; 2],
}

/// One end of a copy of a box.
#[derive(Clone, Copy, Debug)]
pub enum Copy3dEnd {
    /// Device memory or registered host memory, from the box's first byte.
    Memory {
        address: u64,
        /// Bytes from row to row.
        pitch: u64,
        /// Rows from slice to slice.
        rows: u64,
    },
    Array {
        array: RawArray,
        /// Bytes, rows, slices.
        origin: [u64; 3],
    },
}

/// A copy of a box, of which no dimension is 0.
#[derive(Clone, Copy, Debug)]
pub struct MemCopy3d {
    pub to: Copy3dEnd,
    pub from: Copy3dEnd,
    /// Bytes of a row, rows, slices.
    pub extent: [u64; 3],
}

/// What a device does with arrays. Callers pass arrays that live, and ends that were checked to hold the box.
pub trait Arrays {
    fn create_array(&self, shape: &ArrayShape) -> Result<RawArray>;
    /// Waits as `cuArrayDestroy` does. Not for levels.
    fn destroy_array(&self, array: RawArray) -> Result<()>;
    /// `levels` is from 1 to the most that the shape has.
    fn create_mipmap(&self, shape: &ArrayShape, levels: u32) -> Result<RawMipmap>;
    /// Waits; the arrays of its levels go too.
    fn destroy_mipmap(&self, mipmap: RawMipmap) -> Result<()>;
    /// An array that lives as long as the mipmapped one.
    fn mipmap_level(&self, mipmap: RawMipmap, level: u32) -> Result<RawArray>;
    /// What kernels are given.
    fn create_texture(
        &self,
        resource: &Resource,
        sampling: &Sampling,
        view: Option<&View>,
    ) -> Result<u64>;
    fn destroy_texture(&self, texture: u64) -> Result<()>;
    /// What kernels are given.
    fn create_surface(&self, array: RawArray) -> Result<u64>;
    fn destroy_surface(&self, surface: u64) -> Result<()>;
    /// Asynchronous.
    fn copy_3d(&self, copy: &MemCopy3d, stream: RawStream) -> Result<()>;
}
