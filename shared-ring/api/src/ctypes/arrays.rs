//! C structures of arrays, textures and 3-D copies.

use super::{CUarray, CUdeviceptr, c_void};

/// `CUDA_MEMCPY3D` (version 2). `CUDA_MEMCPY3D_PEER` has the contexts of the two ends in the reserved fields.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUDA_MEMCPY3D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcZ: usize,
    pub srcLOD: usize,
    pub srcMemoryType: u32,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr,
    pub srcArray: CUarray,
    pub reserved0: *mut c_void,
    pub srcPitch: usize,
    pub srcHeight: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstZ: usize,
    pub dstLOD: usize,
    pub dstMemoryType: u32,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr,
    pub dstArray: CUarray,
    pub reserved1: *mut c_void,
    pub dstPitch: usize,
    pub dstHeight: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
    pub Depth: usize,
}

/// `CUDA_MEMCPY3D_PEER`.
pub type CUDA_MEMCPY3D_PEER = CUDA_MEMCPY3D;

/// `CUDA_ARRAY_DESCRIPTOR` (version 2).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUDA_ARRAY_DESCRIPTOR {
    pub Width: usize,
    pub Height: usize,
    pub Format: u32,
    pub NumChannels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR` (version 2).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUDA_ARRAY3D_DESCRIPTOR {
    pub Width: usize,
    pub Height: usize,
    pub Depth: usize,
    pub Format: u32,
    pub NumChannels: u32,
    pub Flags: u32,
}

/// `CUDA_RESOURCE_DESC`. The members of its union are prefixes of its `pitch2D`, with other names.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUDA_RESOURCE_DESC {
    pub resType: u32,
    /// `devPtr`, `hArray` or `hMipmappedArray`.
    pub address: u64,
    pub format: u32,
    pub numChannels: u32,
    /// `width`, or `sizeInBytes` of linear memory.
    pub width: u64,
    pub height: u64,
    pub pitchInBytes: u64,
    pub reserved: [u64; 11],
    pub flags: u32,
}

/// `CUDA_TEXTURE_DESC`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUDA_TEXTURE_DESC {
    pub addressMode: [u32; 3],
    pub filterMode: u32,
    pub flags: u32,
    pub maxAnisotropy: u32,
    pub mipmapFilterMode: u32,
    pub mipmapLevelBias: f32,
    pub minMipmapLevelClamp: f32,
    pub maxMipmapLevelClamp: f32,
    pub borderColor: [f32; 4],
    pub reserved: [i32; 12],
}

/// `CUDA_RESOURCE_VIEW_DESC`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUDA_RESOURCE_VIEW_DESC {
    pub format: u32,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub firstMipmapLevel: u32,
    pub lastMipmapLevel: u32,
    pub firstLayer: u32,
    pub lastLayer: u32,
    pub reserved: [u32; 16],
}
