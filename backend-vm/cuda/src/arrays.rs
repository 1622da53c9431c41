//! Arrays, textures, surfaces and 3-D copies by the driver.

use std::ffi::c_void;
use std::ptr;

use wormhole_api::constants::memory_type::{ARRAY, UNIFIED};
use wormhole_api::constants::resource_type;
use wormhole_api::ctypes::{
    CUDA_MEMCPY3D, CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC, CUDA_TEXTURE_DESC,
};
use wormhole_device::{
    ArrayShape, Arrays, Copy3dEnd, MemCopy3d, RawArray, RawMipmap, RawStream, Resource, Result,
    Sampling, View,
};

use crate::device::{CudaDevice, handle, pointer, size, stream};

fn resource_desc(resource: &Resource) -> CUDA_RESOURCE_DESC {
    let described = |kind, address| CUDA_RESOURCE_DESC {
        resType: kind,
        address,
        format: 0,
        numChannels: 0,
        width: 0,
        height: 0,
        pitchInBytes: 0,
        reserved: [0; _],
        flags: 0,
    };
    match *resource {
        Resource::Array(array) => described(resource_type::ARRAY, array.0),
        Resource::Mipmap(mipmap) => described(resource_type::MIPMAPPED_ARRAY, mipmap.0),
        Resource::Linear {
            address,
            texels,
            bytes,
        } => CUDA_RESOURCE_DESC {
            format: texels.format as u32,
            numChannels: texels.channels(),
            width: bytes,
            ..described(resource_type::LINEAR, address)
        },
        Resource::Rows {
            address,
            texels,
            width,
            height,
            pitch,
        } => CUDA_RESOURCE_DESC {
            format: texels.format as u32,
            numChannels: texels.channels(),
            width,
            height,
            pitchInBytes: pitch,
            ..described(resource_type::PITCH2D, address)
        },
    }
}

fn texture_desc(sampling: &Sampling) -> CUDA_TEXTURE_DESC {
    let [least, greatest] = sampling.level_clamp;
    CUDA_TEXTURE_DESC {
        addressMode: sampling.address_modes,
        filterMode: sampling.filter,
        flags: sampling.flags,
        maxAnisotropy: sampling.anisotropy,
        mipmapFilterMode: sampling.level_filter,
        mipmapLevelBias: sampling.level_bias,
        minMipmapLevelClamp: least,
        maxMipmapLevelClamp: greatest,
        borderColor: sampling.border.map(f32::from_bits),
        reserved: [0; 12],
    }
}

fn view_desc(view: &View) -> CUDA_RESOURCE_VIEW_DESC {
    let [width, height, depth] = view.extent.map(size);
    CUDA_RESOURCE_VIEW_DESC {
        format: view.format,
        width,
        height,
        depth,
        firstMipmapLevel: view.levels[0],
        lastMipmapLevel: view.levels[1],
        firstLayer: view.layers[0],
        lastLayer: view.layers[1],
        reserved: [0; 16],
    }
}

/// One end of a copy in the fields of `CUDA_MEMCPY3D`: kind, address, array, origin, pitch, rows.
struct End {
    kind: u32,
    address: u64,
    array: *mut c_void,
    origin: [usize; 3],
    pitch: usize,
    rows: usize,
}

impl End {
    fn new(end: &Copy3dEnd) -> Self {
        match *end {
            Copy3dEnd::Memory {
                address,
                pitch,
                rows,
            } => Self {
                kind: UNIFIED,
                address,
                array: ptr::null_mut(),
                origin: [0; 3],
                pitch: size(pitch),
                rows: size(rows),
            },
            Copy3dEnd::Array { array, origin } => Self {
                kind: ARRAY,
                address: 0,
                array: pointer(array.0),
                origin: origin.map(size),
                pitch: 0,
                rows: 0,
            },
        }
    }
}

/// Converts a copy to the driver's description.
pub(crate) fn described(copy: &MemCopy3d) -> CUDA_MEMCPY3D {
    let (from, to) = (End::new(&copy.from), End::new(&copy.to));
    let [width, height, depth] = copy.extent.map(size);
    CUDA_MEMCPY3D {
        srcXInBytes: from.origin[0],
        srcY: from.origin[1],
        srcZ: from.origin[2],
        srcLOD: 0,
        srcMemoryType: from.kind,
        srcHost: ptr::null(),
        srcDevice: from.address,
        srcArray: from.array,
        reserved0: ptr::null_mut(),
        srcPitch: from.pitch,
        srcHeight: from.rows,
        dstXInBytes: to.origin[0],
        dstY: to.origin[1],
        dstZ: to.origin[2],
        dstLOD: 0,
        dstMemoryType: to.kind,
        dstHost: ptr::null_mut(),
        dstDevice: to.address,
        dstArray: to.array,
        reserved1: ptr::null_mut(),
        dstPitch: to.pitch,
        dstHeight: to.rows,
        WidthInBytes: width,
        Height: height,
        Depth: depth,
    }
}

impl Arrays for CudaDevice {
    fn create_array(&self, shape: &ArrayShape) -> Result<RawArray> {
        let mut array = ptr::null_mut();
        let descriptor = shape.descriptor();
        // SAFETY: the pointers are good.
        unsafe {
            self.driver()
                .cuArray3DCreate_v2(&raw mut array, &raw const descriptor)
        }?;
        Ok(RawArray(handle(array)))
    }

    fn create_mipmap(&self, shape: &ArrayShape, levels: u32) -> Result<RawMipmap> {
        let mut mipmap = ptr::null_mut();
        let descriptor = shape.descriptor();
        // SAFETY: the pointers are good.
        unsafe {
            self.driver()
                .cuMipmappedArrayCreate(&raw mut mipmap, &raw const descriptor, levels)
        }?;
        Ok(RawMipmap(handle(mipmap)))
    }

    fn create_texture(
        &self,
        resource: &Resource,
        sampling: &Sampling,
        view: Option<&View>,
    ) -> Result<u64> {
        let mut texture = 0;
        let (resource, sampling) = (resource_desc(resource), texture_desc(sampling));
        let view = view.map(view_desc);
        // SAFETY: the descriptions name what lives and is good for the call; without a view there is none.
        unsafe {
            self.driver().cuTexObjectCreate(
                &raw mut texture,
                &raw const resource,
                &raw const sampling,
                view.as_ref().map_or(ptr::null(), ptr::from_ref),
            )
        }?;
        Ok(texture)
    }

    fn create_surface(&self, array: RawArray) -> Result<u64> {
        let mut surface = 0;
        let resource = resource_desc(&Resource::Array(array));
        // SAFETY: the description names an array that lives.
        unsafe {
            self.driver()
                .cuSurfObjectCreate(&raw mut surface, &raw const resource)
        }?;
        Ok(surface)
    }

    fn copy_3d(&self, copy: &MemCopy3d, on: RawStream) -> Result<()> {
        let description = described(copy);
        // SAFETY: both ends live and hold the region, which the caller checked.
        unsafe {
            self.driver()
                .cuMemcpy3DAsync_v2(&raw const description, stream(on))
        }
    }
}
