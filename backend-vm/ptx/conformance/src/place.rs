//! Creates images on a device.

use wormhole_device::{
    ArrayShape, Copy3dEnd, CuError, Device, MemCopy3d, RawArray, RawMipmap, RawStream, Resource,
    Result, Texels,
};

use crate::object::{Object, Picture, Source};

const STREAM: RawStream = RawStream::LEGACY;

/// Device object that holds the texels.
#[derive(Debug)]
enum Holder {
    Array(RawArray),
    Mipmap(RawMipmap),
    Memory(u64),
}

/// Image on a device, and the texture or surface object through which kernels access it.
#[derive(Debug)]
pub(crate) struct Placed {
    holder: Holder,
    is_texture: bool,
    /// Handle that kernels receive.
    pub handle: u64,
}

impl Placed {
    pub fn new(device: &dyn Device, object: &Object) -> Result<Self> {
        let picture = object.picture();
        let (holder, resource) = hold(device, picture)?;
        let (is_texture, handle) = match (object, &holder) {
            (Object::Texture(_, sampling), _) => {
                (true, device.create_texture(&resource, sampling, None)?)
            }
            (_, Holder::Array(array)) => (false, device.create_surface(*array)?),
            _ => return Err(CuError::INVALID_VALUE),
        };
        Ok(Self {
            holder,
            is_texture,
            handle,
        })
    }

    pub fn free(&self, device: &dyn Device) -> Result<()> {
        if self.is_texture {
            device.texture_destroy(self.handle)?;
        } else {
            device.surface_destroy(self.handle)?;
        }
        match self.holder {
            Holder::Array(array) => device.array_destroy(array),
            Holder::Mipmap(mipmap) => device.mipmap_destroy(mipmap),
            Holder::Memory(address) => device.mem_free(address),
        }
    }

    /// Copies the texels into device memory, and returns their size in bytes.
    pub fn read(&self, device: &dyn Device, picture: &Picture, to: u64) -> Result<u64> {
        let Holder::Array(array) = self.holder else {
            return Err(CuError::INVALID_VALUE);
        };
        let (memory, extent) = ends(picture, 0, to);
        device.copy_3d(
            &MemCopy3d {
                to: memory,
                from: whole(array),
                extent,
            },
            STREAM,
        )?;
        Ok(extent.iter().product())
    }
}

fn whole(array: RawArray) -> Copy3dEnd {
    Copy3dEnd::Array {
        array,
        origin: [0; 3],
    }
}

/// Returns a level's bytes in memory as one end of a copy, and the extent of the copy.
fn ends(picture: &Picture, level: u32, address: u64) -> (Copy3dEnd, [u64; 3]) {
    let [_, rows, slices] = picture.extent_of(level);
    let pitch = picture.pitch(level);
    let memory = Copy3dEnd::Memory {
        address,
        pitch,
        rows,
    };
    (memory, [pitch, rows, slices])
}

/// Allocates device memory, and writes a level to it.
fn upload(device: &dyn Device, picture: &Picture, level: u32) -> Result<u64> {
    let bytes = picture.contents(level);
    let address = device.mem_alloc(bytes.len() as u64)?;
    device.write(address, &bytes, STREAM)?;
    Ok(address)
}

fn fill(device: &dyn Device, picture: &Picture, level: u32, array: RawArray) -> Result<()> {
    let address = upload(device, picture, level)?;
    let (memory, extent) = ends(picture, level, address);
    device.copy_3d(
        &MemCopy3d {
            to: whole(array),
            from: memory,
            extent,
        },
        STREAM,
    )?;
    device.mem_free(address)
}

fn hold(device: &dyn Device, picture: &Picture) -> Result<(Holder, Resource)> {
    let number = picture.format as u32;
    let texels = Texels::new(number, picture.channels)?;
    let [width, height, _] = picture.extent;
    let shape = || ArrayShape::new(picture.extent, number, picture.channels, picture.flags);
    Ok(match picture.source {
        Source::Array { levels: 1 } => {
            let array = device.create_array(&shape()?)?;
            fill(device, picture, 0, array)?;
            (Holder::Array(array), Resource::Array(array))
        }
        Source::Array { levels } => {
            let mipmap = device.create_mipmap(&shape()?, levels)?;
            for level in 0..levels {
                fill(
                    device,
                    picture,
                    level,
                    device.mipmap_get_level(mipmap, level)?,
                )?;
            }
            (Holder::Mipmap(mipmap), Resource::Mipmap(mipmap))
        }
        Source::Linear => {
            let address = upload(device, picture, 0)?;
            let bytes = picture.pitch(0);
            let resource = Resource::Linear {
                address,
                texels,
                bytes,
            };
            (Holder::Memory(address), resource)
        }
        Source::Rows => {
            let address = upload(device, picture, 0)?;
            let resource = Resource::Rows {
                address,
                texels,
                width,
                height,
                pitch: picture.pitch(0),
            };
            (Holder::Memory(address), resource)
        }
    })
}
