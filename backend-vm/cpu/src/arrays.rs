//! Arrays, textures and surfaces.
//!
//! An array is ordinary device memory with packed rows. Only this module knows its address. Kernels look up textures
//! and surfaces in [`Objects`]; a launch uses the objects that exist when it is submitted.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_device::array::{CUBEMAP, LAYERED};
use wormhole_device::constants::resource_view_format::{
    FLOAT_4X32, UINT_1X8, UNSIGNED_BC1, UNSIGNED_BC7,
};
use wormhole_device::constants::{address_mode, filter_mode, texture_flags};
use wormhole_device::{
    ArrayShape, CuError, Format, RawArray, RawMipmap, Resource, Result, Sampling, Texels, View,
};
use wormhole_lock::{Mutex, MutexGuard};
use wormhole_ptx::{AddressMode, ChannelType, Image, Level, Texture};

use crate::image_limits::{self, check_array, check_mipmap};
use crate::memory::{ALIGNMENT, Memory, Owner, Use};

/// Objects that kernels look up by handle.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    textures: HashMap<u64, Arc<Texture>>,
    surfaces: HashMap<u64, Arc<Image>>,
}

impl wormhole_ptx::Objects for Objects {
    fn texture(&self, handle: u64) -> Option<Arc<Texture>> {
        self.textures.get(&handle).cloned()
    }

    fn surface(&self, handle: u64) -> Option<Arc<Image>> {
        self.surfaces.get(&handle).cloned()
    }
}

/// An array, or a level of a mipmapped one.
#[derive(Clone, Copy, Debug)]
struct Array {
    shape: ArrayShape,
    address: u64,
    /// Owner of the memory; `None` for a level, whose memory belongs to its mipmapped array.
    owner: Option<Owner>,
}

#[derive(Debug)]
struct Mipmap {
    address: u64,
    owner: Owner,
    levels: Vec<RawArray>,
}

/// Shape and address of an array, for copies.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    pub shape: ArrayShape,
    pub address: u64,
}

impl Placed {
    /// Returns the row pitch and the slice pitch in bytes.
    pub fn pitches(&self) -> (u64, u64) {
        let [row, rows, _] = self.shape.copied();
        (row, row * rows)
    }

    fn level(&self) -> Result<Level> {
        let (row_pitch, slice_pitch) = self.pitches();
        let [width, height, depth] = self.shape.extent();
        let depth = if self.shape.has_layers() { 1 } else { depth };
        Ok(Level {
            address: self.address,
            extent: [
                number(width)?,
                number(height.max(1))?,
                number(depth.max(1))?,
            ],
            row_pitch,
            slice_pitch,
        })
    }
}

#[derive(Debug, Default)]
struct Table {
    arrays: HashMap<u64, Array>,
    mipmaps: HashMap<u64, Mipmap>,
    /// Handles of existing textures and surfaces, each with its source: the number of an array or mipmapped array, 0
    /// for linear memory.
    sources: HashMap<u64, u64>,
    objects: Arc<Objects>,
}

/// Returns a number that is unique in the process, across all devices.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Table {
    /// Removes the textures and surfaces of an array from the objects.
    fn forget_source(&mut self, source: u64) {
        let handles = self
            .sources
            .iter()
            .filter(|(_, read)| **read == source)
            .map(|(handle, _)| *handle);
        for handle in handles {
            let objects = Arc::make_mut(&mut self.objects);
            objects.textures.remove(&handle);
            objects.surfaces.remove(&handle);
        }
    }
}

/// Arrays, textures and surfaces of a context.
#[derive(Debug, Default)]
pub struct Arrays(Mutex<Table>);

fn number(value: u64) -> Result<u32> {
    u32::try_from(value).map_err(|_| CuError::INVALID_VALUE)
}

/// Returns the bytes of a level, rounded up so that the next one is aligned.
fn level_bytes(shape: &ArrayShape) -> u64 {
    shape
        .copied()
        .iter()
        .product::<u64>()
        .next_multiple_of(ALIGNMENT)
}

impl Arrays {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock()
    }

    /// Returns the objects that kernels of a launch may use.
    pub fn objects(&self) -> Arc<Objects> {
        Arc::clone(&self.table().objects)
    }

    pub fn create(&self, shape: &ArrayShape, memory: &Memory) -> Result<RawArray> {
        check_array(shape)?;
        let owner = Owner::internal();
        let address = memory.allocate(level_bytes(shape), owner)?;
        let mut table = self.table();
        let raw = next_number();
        let array = Array {
            shape: *shape,
            address,
            owner: Some(owner),
        };
        table.arrays.insert(raw, array);
        Ok(RawArray(raw))
    }

    /// Frees an array. No submitted work uses it any more.
    pub fn destroy(&self, array: RawArray, memory: &Memory) -> Result<()> {
        let mut table = self.table();
        let found = table.arrays.get(&array.0).ok_or(CuError::INVALID_HANDLE)?;
        let owner = found.owner.ok_or(CuError::INVALID_VALUE)?;
        let address = found.address;
        table.arrays.remove(&array.0);
        table.forget_source(array.0);
        memory.free(address, owner)
    }

    pub fn create_mipmap(
        &self,
        shape: &ArrayShape,
        levels: u32,
        memory: &Memory,
    ) -> Result<RawMipmap> {
        if levels == 0 || levels > shape.most_levels() {
            return Err(CuError::INVALID_VALUE);
        }
        check_mipmap(shape)?;
        let shapes: Vec<ArrayShape> = (0..levels).map(|level| shape.level(level)).collect();
        let owner = Owner::internal();
        let address = memory.allocate(shapes.iter().map(level_bytes).sum(), owner)?;
        let mut table = self.table();
        let mut at = address;
        let levels = shapes
            .into_iter()
            .map(|shape| {
                let raw = next_number();
                let array = Array {
                    shape,
                    address: at,
                    owner: None,
                };
                table.arrays.insert(raw, array);
                at += level_bytes(&shape);
                RawArray(raw)
            })
            .collect();
        let raw = next_number();
        let mipmap = Mipmap {
            address,
            owner,
            levels,
        };
        table.mipmaps.insert(raw, mipmap);
        Ok(RawMipmap(raw))
    }

    /// Frees a mipmapped array. No submitted work uses it any more.
    pub fn destroy_mipmap(&self, mipmap: RawMipmap, memory: &Memory) -> Result<()> {
        let mut table = self.table();
        let found = table
            .mipmaps
            .remove(&mipmap.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        table.forget_source(mipmap.0);
        for level in found.levels {
            table.arrays.remove(&level.0);
            table.forget_source(level.0);
        }
        memory.free(found.address, found.owner)
    }

    pub fn level(&self, mipmap: RawMipmap, level: u32) -> Result<RawArray> {
        let table = self.table();
        let mipmap = table
            .mipmaps
            .get(&mipmap.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        let level = mipmap.levels.get(level as usize);
        level.copied().ok_or(CuError::INVALID_VALUE)
    }

    /// Returns shape and address of an array.
    pub fn find(&self, array: RawArray) -> Result<Placed> {
        let table = self.table();
        let found = table.arrays.get(&array.0).ok_or(CuError::INVALID_HANDLE)?;
        Ok(Placed {
            shape: found.shape,
            address: found.address,
        })
    }

    pub fn create_texture(
        &self,
        resource: &Resource,
        sampling: &Sampling,
        view: Option<&View>,
        memory: &Memory,
    ) -> Result<u64> {
        let (source, mut image) = match *resource {
            Resource::Array(array) => (array.0, self.image(&[array])?),
            Resource::Mipmap(mipmap) => {
                let levels = {
                    let table = self.table();
                    let found = table.mipmaps.get(&mipmap.0);
                    found.ok_or(CuError::INVALID_HANDLE)?.levels.clone()
                };
                (mipmap.0, self.image(&levels)?)
            }
            Resource::Linear {
                address,
                texels,
                bytes,
            } => {
                image_limits::check_linear(address)?;
                memory.check(address, 1, Use::Read)?;
                let width = bytes / texels.bytes();
                let width = width.clamp(1, image_limits::LINEAR_TEXELS);
                (0, plane(address, texels, [width, 1], bytes)?)
            }
            Resource::Rows {
                address,
                texels,
                width,
                height,
                pitch,
            } => {
                image_limits::check_rows(address, [width, height, pitch])?;
                memory.check(address, 1, Use::Read)?;
                (0, plane(address, texels, [width, height], pitch)?)
            }
        };
        if let Some(view) = view {
            image = viewed(image, view)?;
        }
        let texture = texture(image, sampling)?;
        let mut table = self.table();
        let handle = next_number();
        table.sources.insert(handle, source);
        let objects = Arc::make_mut(&mut table.objects);
        objects.textures.insert(handle, Arc::new(texture));
        Ok(handle)
    }

    pub fn create_surface(&self, array: RawArray) -> Result<u64> {
        let image = self.image(&[array])?;
        let mut table = self.table();
        let handle = next_number();
        table.sources.insert(handle, array.0);
        let objects = Arc::make_mut(&mut table.objects);
        objects.surfaces.insert(handle, Arc::new(image));
        Ok(handle)
    }

    /// Removes a texture or a surface. Launches submitted before still find it.
    pub fn destroy_object(&self, handle: u64) -> Result<()> {
        let mut table = self.table();
        table
            .sources
            .remove(&handle)
            .ok_or(CuError::INVALID_VALUE)?;
        let objects = Arc::make_mut(&mut table.objects);
        objects.textures.remove(&handle);
        objects.surfaces.remove(&handle);
        Ok(())
    }

    /// Creates the image of these levels.
    fn image(&self, levels: &[RawArray]) -> Result<Image> {
        let placed = levels
            .iter()
            .map(|level| self.find(*level))
            .collect::<Result<Vec<_>>>()?;
        let first = placed.first().ok_or(CuError::INVALID_VALUE)?.shape;
        let layers = if first.has_layers() {
            number(first.extent()[2])?
        } else {
            1
        };
        Ok(Image {
            channel: channel(first.texels().format),
            channels: first.texels().channels(),
            dimensions: match first.extent() {
                [_, 0, _] => 1,
                [_, _, 0] => 2,
                _ if first.has_layers() => 2,
                _ => 3,
            },
            layers,
            layered: first.flags() & LAYERED != 0,
            cubes: first.flags() & CUBEMAP != 0,
            levels: placed.iter().map(Placed::level).collect::<Result<_>>()?,
        })
    }
}

/// Creates an image of linear memory.
fn plane(address: u64, texels: Texels, [width, height]: [u64; 2], pitch: u64) -> Result<Image> {
    Ok(Image {
        channel: channel(texels.format),
        channels: texels.channels(),
        dimensions: if height > 1 { 2 } else { 1 },
        layers: 1,
        layered: false,
        cubes: false,
        levels: vec![Level {
            address,
            extent: [number(width)?, number(height)?, 1],
            row_pitch: pitch,
            slice_pitch: 0,
        }],
    })
}

fn channel(format: Format) -> ChannelType {
    match format {
        Format::Unsigned8 => ChannelType::Unsigned8,
        Format::Unsigned16 => ChannelType::Unsigned16,
        Format::Unsigned32 => ChannelType::Unsigned32,
        Format::Signed8 => ChannelType::Signed8,
        Format::Signed16 => ChannelType::Signed16,
        Format::Signed32 => ChannelType::Signed32,
        Format::Half => ChannelType::Half,
        Format::Single => ChannelType::Single,
    }
}

/// Channel types in the order of `CUresourceViewFormat`, which starts at 1 and has three values for each type: one, two
/// and four channels.
const VIEWED: [ChannelType; 8] = [
    ChannelType::Unsigned8,
    ChannelType::Signed8,
    ChannelType::Unsigned16,
    ChannelType::Signed16,
    ChannelType::Unsigned32,
    ChannelType::Signed32,
    ChannelType::Half,
    ChannelType::Single,
];

/// Applies a resource view to an image (CUDA driver API, `cuTexObjectCreate`).
fn viewed(mut image: Image, view: &View) -> Result<Image> {
    let [width, height, _] = image.levels.first().map_or([0; 3], |level| level.extent);
    if view.extent[0] != u64::from(width) || view.extent[1].max(1) != u64::from(height) {
        return Err(CuError::INVALID_VALUE);
    }
    match view.format {
        UINT_1X8..=FLOAT_4X32 => {
            let before = image.texel_bytes();
            let index = view.format - UINT_1X8;
            image.channel = VIEWED[(index / 3) as usize];
            image.channels = [1, 2, 4][(index % 3) as usize];
            if image.texel_bytes() != before {
                return Err(CuError::INVALID_VALUE);
            }
        }
        UNSIGNED_BC1..=UNSIGNED_BC7 => return Err(CuError::NOT_SUPPORTED),
        _ => return Err(CuError::INVALID_VALUE),
    }
    let [first, last] = view.levels.map(|level| level as usize);
    image.levels = image
        .levels
        .get(first..=last.max(first))
        .ok_or(CuError::INVALID_VALUE)?
        .to_vec();
    if image.layers > 1 {
        let [first, last] = view.layers;
        if last < first || last >= image.layers {
            return Err(CuError::INVALID_VALUE);
        }
        image.layers = last - first + 1;
        for level in &mut image.levels {
            level.address += u64::from(first) * level.slice_pitch;
        }
    }
    Ok(image)
}

fn texture(image: Image, sampling: &Sampling) -> Result<Texture> {
    const KNOWN: u32 = texture_flags::READ_AS_INTEGER
        | texture_flags::NORMALIZED_COORDINATES
        | texture_flags::SRGB
        | texture_flags::DISABLE_TRILINEAR_OPTIMIZATION
        | texture_flags::SEAMLESS_CUBEMAP;
    let mode = |mode| match mode {
        address_mode::WRAP => Ok(AddressMode::Wrap),
        address_mode::CLAMP => Ok(AddressMode::Clamp),
        address_mode::MIRROR => Ok(AddressMode::Mirror),
        address_mode::BORDER => Ok(AddressMode::Border),
        _ => Err(CuError::INVALID_VALUE),
    };
    let linear = |filter| match filter {
        filter_mode::POINT => Ok(false),
        filter_mode::LINEAR => Ok(true),
        _ => Err(CuError::INVALID_VALUE),
    };
    let [x, y, z] = sampling.address_modes;
    // As natively, the third address mode is checked only if the image has a third dimension.
    let deep = image
        .levels
        .first()
        .is_some_and(|level| level.extent[2] > 1);
    let z = if deep { z } else { address_mode::CLAMP };
    let flags = sampling.flags;
    if flags & !KNOWN != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(Texture {
        image,
        address_modes: [mode(x)?, mode(y)?, mode(z)?],
        linear: linear(sampling.filter)?,
        linear_levels: linear(sampling.level_filter)?,
        normalized: flags & texture_flags::NORMALIZED_COORDINATES != 0,
        as_floats: flags & texture_flags::READ_AS_INTEGER == 0,
        srgb: flags & texture_flags::SRGB != 0,
        seamless: flags & texture_flags::SEAMLESS_CUBEMAP != 0,
        border: sampling.border,
        level_bias: sampling.level_bias,
        level_clamp: sampling.level_clamp,
    })
}
