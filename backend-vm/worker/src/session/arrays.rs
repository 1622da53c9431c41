//! Arrays, textures, surfaces, and three-dimensional copies.

use std::collections::HashSet;
use std::iter;
use std::sync::Arc;

use wormhole_api::array::{ArrayShape, Format, Texels, span};
use wormhole_api::{
    Array, ArrayCreate, ArrayDestroy, CuResult, DevicePtr, Handle, MemCopy3d, Mipmap, MipmapCreate,
    MipmapDestroy, MipmapGetLevel, Outcome, Serve, Served, SurfaceCreate, SurfaceCreateReply,
    SurfaceDestroy, TexRefBindTexture, TextureCreate, TextureCreateReply, TextureDestroy,
    TextureLinearWidth, TextureLinearWidthReply, TextureSource,
};
use wormhole_device::{Copy3dEnd, Resource, Sampling, View};
use wormhole_link::counters::Counters;

use super::addresses::Place;
use super::closed;
use super::handles::Table;
use super::{Answer, Call, OBJECTS, Session};
use crate::devices::SessionDevice;
use crate::objects::{ArrayObject, MipmapObject, Used, let_go_of_array, let_go_of_mipmap};
use crate::peers;
use crate::registrar::Task;

/// A mipmapped array under its handle.
#[derive(Debug)]
struct HeldMipmap {
    object: Arc<MipmapObject>,
    /// Handles of the arrays of its levels. They are removed with it.
    levels: Vec<Handle<Array>>,
}

/// The arrays, textures and surfaces of a session.
#[derive(Debug)]
pub(super) struct Arrays {
    pub arrays: Table<Array, Arc<ArrayObject>>,
    mipmaps: Table<Mipmap, HeldMipmap>,
    /// The devices' own values for the textures and surfaces, with the device's number.
    textures: HashSet<(usize, u64)>,
    surfaces: HashSet<(usize, u64)>,
}

impl Arrays {
    pub fn new(counters: &Arc<Counters>) -> Self {
        Self {
            arrays: Table::new(counters),
            mipmaps: Table::new(counters),
            textures: HashSet::new(),
            surfaces: HashSet::new(),
        }
    }

    /// Forgets all objects, because their context is going to be reset.
    pub fn clear(&mut self) {
        self.arrays.drain().for_each(drop);
        self.mipmaps.drain().for_each(drop);
        self.textures.clear();
        self.surfaces.clear();
    }
}

/// Checks that the session may have one more texture or surface.
fn has_room(objects: &HashSet<(usize, u64)>) -> Result<(), CuResult> {
    if objects.len() < OBJECTS as usize {
        Ok(())
    } else {
        Err(CuResult::OUT_OF_MEMORY)
    }
}

/// Resource that a texture is to read, in the terms of the messages.
pub(super) struct Wanted {
    pub source: TextureSource,
    pub array: Option<Handle<Array>>,
    pub mipmap: Option<Handle<Mipmap>>,
    pub memory: u64,
    pub format: u32,
    pub channels: u32,
    pub size: [u64; 3],
}

/// Common fields of the messages that create or bind textures: the resource and the sampling.
pub(super) trait TextureMessage {
    fn wanted(&self) -> Wanted;
    fn settings(&self) -> Sampling;

    /// Returns the settings for a resource. Unknown modes that the driver ignores are cleared: all of linear memory, and the
    /// address modes of dimensions that the resource lacks.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: a mode or a flag is unknown.
    fn sampling(&self, used: &Used) -> Result<Sampling, CuResult> {
        let mut sampling = self.settings();
        let Sampling {
            address_modes,
            filter,
            level_filter,
            ..
        } = &mut sampling;
        let is_linear = self.wanted().source == TextureSource::Linear;
        let dimensions = match used {
            Used::Memory if is_linear => 0,
            Used::Memory => 2,
            Used::Array(array) => dimensions(&array.shape),
            Used::Mipmap(mipmap) => dimensions(&mipmap.shape),
        };
        for mode in &mut address_modes[dimensions..] {
            *mode = closed::ADDRESS_MODE.known_or_zero(*mode);
        }
        if is_linear {
            for mode in [&mut *filter, &mut *level_filter] {
                *mode = closed::FILTER_MODE.known_or_zero(*mode);
            }
        }
        for mode in address_modes {
            closed::ADDRESS_MODE.check(*mode)?;
        }
        closed::FILTER_MODE.check(*filter)?;
        closed::FILTER_MODE.check(*level_filter)?;
        closed::TEXTURE.check(sampling.flags)?;
        Ok(sampling)
    }
}

/// Returns the number of an array's dimensions, layers among them.
fn dimensions(shape: &ArrayShape) -> usize {
    shape.extent().iter().filter(|extent| **extent > 0).count()
}

macro_rules! texture_messages {
    ($($message:ty),*) => {$(
        impl TextureMessage for $message {
            fn wanted(&self) -> Wanted {
                Wanted {
                    source: self.source,
                    array: self.array,
                    mipmap: self.mipmap,
                    memory: self.memory.0,
                    format: self.format,
                    channels: self.channels,
                    size: self.size,
                }
            }

            fn settings(&self) -> Sampling {
                let [filter, level_filter] = self.filters;
                Sampling {
                    address_modes: self.address_modes,
                    filter,
                    level_filter,
                    flags: self.flags,
                    anisotropy: self.anisotropy,
                    level_bias: self.level_bias,
                    level_clamp: self.level_clamp,
                    border: self.border,
                }
            }
        }
    )*};
}

texture_messages!(TextureCreate, TexRefBindTexture<'_>);

impl Session {
    fn enter_array(&mut self, new: Handle<Array>, array: Arc<ArrayObject>) -> Result<(), CuResult> {
        let entered = self.objects.arrays.arrays.enter(new, Arc::clone(&array));
        entered.inspect_err(|_| self.let_go_quietly(iter::once(Used::Array(array))))
    }

    /// Releases resources on the registrar, because destroying them may block.
    pub(super) fn let_go_quietly(&self, used: impl Iterator<Item = Used> + Send + Sync + 'static) {
        self.registrar
            .run(Task::new(move |_| used.for_each(Used::let_go)));
    }
}

impl Serve<ArrayCreate> for Session {
    fn serve(&mut self, call: &Call, message: &ArrayCreate) -> Outcome<()> {
        let (format, channels) = (message.format, message.channels);
        let shape = ArrayShape::new(message.extent, format, channels, message.flags)?;
        let (new, device) = (message.new, self.here(call));
        self.ask_for_memory(
            call,
            device.clone(),
            move |device| device.create_array(&shape),
            move |session, raw| {
                let array = Arc::new(ArrayObject {
                    device,
                    raw,
                    shape,
                    mipmap: None,
                });
                Answer::of(session.enter_array(new, array))
            },
        )
    }
}

impl Serve<ArrayDestroy> for Session {
    fn serve(&mut self, call: &Call, message: &ArrayDestroy) -> Outcome<()> {
        let handle = message.array;
        if self.objects.arrays.arrays.get(handle)?.mipmap.is_some() {
            // A level is destroyed with its mipmapped array.
            return Err(CuResult::INVALID_VALUE);
        }
        let array = self.objects.arrays.arrays.remove(handle)?;
        self.order(call, array.device.clone(), move |_| let_go_of_array(array))
    }
}

impl Serve<MipmapCreate> for Session {
    fn serve(&mut self, call: &Call, message: &MipmapCreate) -> Outcome<()> {
        let (format, channels) = (message.format, message.channels);
        let shape = ArrayShape::new(message.extent, format, channels, message.flags)?;
        let (new, levels) = (message.new, message.levels);
        if levels == 0 || levels > shape.most_levels() {
            return Err(CuResult::INVALID_VALUE);
        }
        let device = self.here(call);
        self.ask(
            call,
            device.clone(),
            move |device| device.create_mipmap(&shape, levels),
            move |session, raw| {
                let object = Arc::new(MipmapObject {
                    device,
                    raw,
                    shape,
                    levels,
                });
                let held = HeldMipmap {
                    object: Arc::clone(&object),
                    levels: Vec::new(),
                };
                match session.objects.arrays.mipmaps.enter(new, held) {
                    Ok(()) => Answer::done(),
                    Err(error) => {
                        session.let_go_quietly(iter::once(Used::Mipmap(object)));
                        Answer::failed(error)
                    }
                }
            },
        )
    }
}

impl Serve<MipmapDestroy> for Session {
    fn serve(&mut self, call: &Call, message: &MipmapDestroy) -> Outcome<()> {
        let arrays = &mut self.objects.arrays;
        let mipmap = arrays.mipmaps.remove(message.mipmap)?;
        let levels: Vec<_> = mipmap
            .levels
            .into_iter()
            .filter_map(|level| arrays.arrays.remove(level).ok())
            .collect();
        let object = mipmap.object;
        self.order(call, object.device.clone(), move |_| {
            levels.into_iter().try_for_each(let_go_of_array)?;
            let_go_of_mipmap(object)
        })
    }
}

impl Serve<MipmapGetLevel> for Session {
    fn serve(&mut self, _: &Call, message: &MipmapGetLevel) -> Outcome<()> {
        let held = self.objects.arrays.mipmaps.get(message.mipmap)?;
        let mipmap = Arc::clone(&held.object);
        if message.level >= mipmap.levels {
            return Err(CuResult::INVALID_VALUE);
        }
        let raw = self.done(mipmap.device.mipmap_get_level(mipmap.raw, message.level))?;
        let level = ArrayObject {
            device: mipmap.device.clone(),
            raw,
            shape: mipmap.shape.level(message.level),
            mipmap: Some(mipmap),
        };
        self.enter_array(message.new, Arc::new(level))?;
        let held = self.objects.arrays.mipmaps.get_mut(message.mipmap)?;
        held.levels.push(message.new);
        Ok(Served::Done(()))
    }
}

impl Session {
    /// Returns the resource of a texture, if the session may name it. Of linear memory only the
    /// start is checked, as the driver does: beyond it, the texture reads as any kernel may.
    pub(super) fn resource(
        &self,
        device: &SessionDevice,
        wanted: &Wanted,
    ) -> Result<(Resource, Used), CuResult> {
        let address = wanted.memory;
        let texels = || Texels::new(wanted.format, wanted.channels);
        let arrays = &self.objects.arrays;
        Ok(match wanted.source {
            TextureSource::Array => {
                let array = match wanted.array {
                    Some(array) => Arc::clone(arrays.arrays.get(array)?),
                    None => return arrays.arrays.refused(CuResult::INVALID_HANDLE),
                };
                let raw = self.done(device.own(&array.device, array.raw))?;
                (Resource::Array(raw), Used::Array(array))
            }
            TextureSource::Mipmap => {
                let mipmap = match wanted.mipmap {
                    Some(mipmap) => Arc::clone(&arrays.mipmaps.get(mipmap)?.object),
                    None => return arrays.mipmaps.refused(CuResult::INVALID_HANDLE),
                };
                let raw = self.done(device.own(&mipmap.device, mipmap.raw))?;
                (Resource::Mipmap(raw), Used::Mipmap(mipmap))
            }
            TextureSource::Linear => {
                let (texels, [bytes, ..]) = (texels()?, wanted.size);
                self.addresses.place(address, 1)?;
                let resource = Resource::Linear {
                    address,
                    texels,
                    bytes,
                };
                (resource, Used::Memory)
            }
            TextureSource::Rows => {
                let (texels, [width, height, pitch]) = (texels()?, wanted.size);
                self.addresses.place(address, 1)?;
                let resource = Resource::Rows {
                    address,
                    texels,
                    width,
                    height,
                    pitch,
                };
                (resource, Used::Memory)
            }
        })
    }
}

impl Serve<TextureCreate> for Session {
    fn serve(&mut self, call: &Call, message: &TextureCreate) -> Outcome<TextureCreateReply> {
        has_room(&self.objects.arrays.textures)?;
        let device = self.here(call);
        let (resource, used) = self.resource(&device, &message.wanted())?;
        let sampling = message.sampling(&used)?;
        closed::VIEW_FORMAT.check(message.view_format)?;
        let [first_level, last_level, first_layer, last_layer] = message.view_parts;
        let view = (message.viewed != 0).then_some(View {
            format: message.view_format,
            extent: message.view_extent,
            levels: [first_level, last_level],
            layers: [first_layer, last_layer],
        });
        let number = device.number();
        self.ask(
            call,
            device,
            move |device| {
                let made = device.create_texture(&resource, &sampling, view.as_ref());
                used.let_go();
                made
            },
            move |session, texture| {
                session.objects.arrays.textures.insert((number, texture));
                Answer::reply(&TextureCreateReply { texture })
            },
        )
    }
}

impl Serve<TextureDestroy> for Session {
    fn serve(&mut self, call: &Call, message: &TextureDestroy) -> Outcome<()> {
        let texture = message.texture;
        let arrays = &mut self.objects.arrays;
        if !arrays.textures.remove(&(call.device, texture)) {
            return arrays.arrays.refused(CuResult::INVALID_HANDLE);
        }
        self.done(self.devices[call.device].texture_destroy(texture))
            .map(Served::Done)
    }
}

impl Serve<SurfaceCreate> for Session {
    fn serve(&mut self, call: &Call, message: &SurfaceCreate) -> Outcome<SurfaceCreateReply> {
        let handle = message.array;
        has_room(&self.objects.arrays.surfaces)?;
        let array = Arc::clone(self.objects.arrays.arrays.get(handle)?);
        let device = self.here(call);
        let raw = self.done(device.own(&array.device, array.raw))?;
        let number = device.number();
        self.ask(
            call,
            device,
            move |device| {
                let made = device.create_surface(raw);
                Used::Array(array).let_go();
                made
            },
            move |session, surface| {
                session.objects.arrays.surfaces.insert((number, surface));
                Answer::reply(&SurfaceCreateReply { surface })
            },
        )
    }
}

impl Serve<SurfaceDestroy> for Session {
    fn serve(&mut self, call: &Call, message: &SurfaceDestroy) -> Outcome<()> {
        let surface = message.surface;
        let arrays = &mut self.objects.arrays;
        if !arrays.surfaces.remove(&(call.device, surface)) {
            return arrays.arrays.refused(CuResult::INVALID_HANDLE);
        }
        self.done(self.devices[call.device].surface_destroy(surface))
            .map(Served::Done)
    }
}

/// Memory of a copy's end: address, pitch and rows.
type Memory = (DevicePtr, u64, u64);

/// End of a copy as messages name it: an array, or memory if there is none; and the origin in the array.
type NamedEnd = (Option<Handle<Array>>, [u64; 3], Memory);

/// 3-D copy whose ends the session may name. Destinations come first.
pub(super) struct CheckedCopy3d<'s> {
    pub copy: wormhole_device::MemCopy3d,
    places: [Place; 2],
    pub arrays: [Option<&'s Arc<ArrayObject>>; 2],
}

impl Session {
    /// Checks that both ends of a copy contain the 3-D region, and that the session may name them.
    pub(super) fn copy3d(
        &self,
        extent: [u64; 3],
        to: NamedEnd,
        from: NamedEnd,
    ) -> Result<CheckedCopy3d<'_>, CuResult> {
        let (to, to_place, to_array) = self.copy3d_end(extent, to)?;
        let (from, from_place, from_array) = self.copy3d_end(extent, from)?;
        Ok(CheckedCopy3d {
            copy: wormhole_device::MemCopy3d { to, from, extent },
            places: [to_place, from_place],
            arrays: [to_array, from_array],
        })
    }

    fn copy3d_end(
        &self,
        extent: [u64; 3],
        (array, origin, (address, pitch, rows)): NamedEnd,
    ) -> Result<(Copy3dEnd, Place, Option<&Arc<ArrayObject>>), CuResult> {
        if let Some(handle) = array {
            let array = self.objects.arrays.arrays.get(handle)?;
            if !array.shape.holds(origin, extent) {
                return Err(self.addresses.refused());
            }
            let end = Copy3dEnd::Array {
                array: array.raw,
                origin,
            };
            return Ok((end, Place::Device, Some(array)));
        }
        let Some(bytes) = span(extent, pitch, rows) else {
            return Err(self.addresses.refused());
        };
        let place = self.addresses.place(address.0, bytes)?;
        let end = Copy3dEnd::Memory {
            address: address.0,
            pitch,
            rows,
        };
        Ok((end, place, None))
    }
}

impl Serve<TextureLinearWidth> for Session {
    fn serve(
        &mut self,
        call: &Call,
        message: &TextureLinearWidth,
    ) -> Outcome<TextureLinearWidthReply> {
        let (format, channels) = (message.format, message.channels);
        // The device also answers for formats that no array of ours has.
        let is_format = Format::new(format) != Err(CuResult::INVALID_VALUE);
        if !is_format || !(1..=4).contains(&channels) {
            return Err(CuResult::INVALID_VALUE);
        }
        self.ask(
            call,
            self.here(call),
            move |device| device.texture_linear_width(format, channels),
            |_, texels| Answer::reply(&TextureLinearWidthReply { texels }),
        )
    }
}

impl Serve<MemCopy3d> for Session {
    fn serve(&mut self, call: &Call, message: &MemCopy3d) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        let extent = message.extent;
        if extent.contains(&0) {
            return Ok(Served::Done(()));
        }
        let checked = self.copy3d(
            extent,
            (
                message.to_array,
                message.to_origin,
                (message.to_memory, message.to_pitch, message.to_rows),
            ),
            (
                message.from_array,
                message.from_origin,
                (message.from_memory, message.from_pitch, message.from_rows),
            ),
        )?;
        let [to, from] = checked.places;
        // Both ends contain the region, so the product does not overflow.
        self.count_copy(from, to, extent.iter().product())?;
        let owners = checked.arrays.map(|array| Some(&array?.device));
        self.done(peers::copy_3d(&checked.copy, owners, stream))
            .map(Served::Done)
    }
}
