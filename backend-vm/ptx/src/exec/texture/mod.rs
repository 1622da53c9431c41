//! Texture and surface objects, which the caller of a launch provides.
//!
//! Images are device memory like any other: rows of texels, slices of rows.

mod cube;
mod filter;
mod sample;
mod surface;
mod texel;

use std::sync::Arc;

pub(super) use sample::sample;
pub(super) use surface::access;

use super::frame::Frame;
use super::global::Global;
use super::launch::Launch;
use super::memory::{LaneFault, Lanes};
use super::step::{lane_fault, word};
use crate::decode::insn::{Query, QueryArgs};
use crate::error::FaultKind;

/// Type of a texel's channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelType {
    /// An unsigned byte.
    Unsigned8,
    /// An unsigned integer of 16 bits.
    Unsigned16,
    /// An unsigned integer of 32 bits.
    Unsigned32,
    /// A signed byte.
    Signed8,
    /// A signed integer of 16 bits.
    Signed16,
    /// A signed integer of 32 bits.
    Signed32,
    /// Half precision.
    Half,
    /// Single precision.
    Single,
}

impl ChannelType {
    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            Self::Unsigned8 | Self::Signed8 => 1,
            Self::Unsigned16 | Self::Signed16 | Self::Half => 2,
            Self::Unsigned32 | Self::Signed32 | Self::Single => 4,
        }
    }
}

/// Level of detail of an image, or the image if it has only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    /// Device address of the first texel, a multiple of a texel's size.
    pub address: u64,
    /// Texels of a row, rows of a slice, slices; 1 in dimensions that the level lacks.
    pub extent: [u32; 3],
    /// Bytes from one row to the next, a multiple of a texel's size.
    pub row_pitch: u64,
    /// Bytes from one slice, layer or face to the next, a multiple of a texel's size.
    pub slice_pitch: u64,
}

/// Texels in device memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Type of the channels.
    pub channel: ChannelType,
    /// Number of channels of a texel: 1, 2 or 4.
    pub channels: u32,
    /// Number of dimensions of a layer or a face.
    pub dimensions: u32,
    /// Number of layers, with each face of a cube counted; 1 if the image is not layered.
    pub layers: u32,
    /// Whether the image is layered, and whether it consists of cubes.
    pub layered: bool,
    pub cubes: bool,
    /// Levels of detail, the finest first; at least one.
    pub levels: Vec<Level>,
}

impl Image {
    /// Returns the size of a texel in bytes.
    #[must_use]
    pub fn texel_bytes(&self) -> u32 {
        self.channel.bytes() * self.channels
    }
}

/// Meaning of a coordinate outside an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressMode {
    /// The image repeats; normalized coordinates only, otherwise as `Clamp`.
    Wrap,
    /// The nearest texel of the edge.
    Clamp,
    /// The image repeats, every other time mirrored; normalized coordinates only, otherwise as `Clamp`.
    Mirror,
    /// The border's colour.
    Border,
}

/// Texture object.
#[derive(Debug, Clone, PartialEq)]
pub struct Texture {
    /// Image that holds the texels.
    pub image: Image,
    /// Addressing mode of each dimension.
    pub address_modes: [AddressMode; 3],
    /// Whether results are interpolated between texels.
    pub linear: bool,
    /// Whether results are interpolated between levels of detail.
    pub linear_levels: bool,
    /// Whether coordinates run from 0 to 1.
    pub normalized: bool,
    /// Whether integers of up to 16 bits are read as floats from 0 or -1 to 1.
    pub as_floats: bool,
    /// Whether unsigned bytes hold colours with the sRGB curve, which reading undoes.
    pub srgb: bool,
    /// Whether filtering a cube continues beyond the edges of its faces.
    pub seamless: bool,
    /// The border's channels, as bits.
    pub border: [u32; 4],
    /// Bias added to levels of detail.
    pub level_bias: f32,
    /// Minimum and maximum level of detail.
    pub level_clamp: [f32; 2],
}

/// Lookup of the texture and surface objects that kernels name by handle.
pub trait Objects: std::fmt::Debug + Sync {
    /// Returns the texture object of a handle.
    fn texture(&self, handle: u64) -> Option<Arc<Texture>>;
    /// Returns the image of a surface object's handle.
    fn surface(&self, handle: u64) -> Option<Arc<Image>>;
}

/// Most recently used objects.
#[derive(Debug, Default)]
pub(super) struct Recent {
    texture: Option<(u64, Arc<Texture>)>,
    surface: Option<(u64, Arc<Image>)>,
}

impl Recent {
    /// Calls `each` for every lane of `mask`, with the objects borrowed apart from the memory that
    /// contains them.
    fn beside(
        global: &mut Global<'_>,
        mask: u32,
        mut each: impl FnMut(&mut Global<'_>, &mut Self, usize) -> Result<(), FaultKind>,
    ) -> Result<(), LaneFault> {
        let mut objects = std::mem::take(&mut global.objects);
        let done = Lanes(mask).try_for_each(|lane| {
            each(global, &mut objects, lane).map_err(|kind| lane_fault(kind, lane))
        });
        global.objects = objects;
        done
    }

    fn texture(&mut self, launch: &Launch<'_>, handle: u64) -> Result<&Texture, FaultKind> {
        let objects = launch.config.objects;
        kept(
            &mut self.texture,
            handle,
            || objects?.texture(handle),
            |texture| is_sound(&texture.image),
        )
    }

    fn surface(&mut self, launch: &Launch<'_>, handle: u64) -> Result<&Image, FaultKind> {
        let objects = launch.config.objects;
        kept(
            &mut self.surface,
            handle,
            || objects?.surface(handle),
            is_sound,
        )
    }
}

/// Returns the object of a handle: the cached one, or one that `find` returns, which is then cached.
fn kept<T>(
    place: &mut Option<(u64, Arc<T>)>,
    handle: u64,
    find: impl FnOnce() -> Option<Arc<T>>,
    is_sound: impl Fn(&T) -> bool,
) -> Result<&T, FaultKind> {
    if !matches!(place, Some((known, _)) if *known == handle) {
        *place = find()
            .filter(|object| is_sound(object))
            .map(|object| (handle, object));
    }
    place
        .as_ref()
        .map(|(_, object)| &**object)
        .ok_or(FaultKind::InvalidObject { handle })
}

/// Returns whether an image has the properties that this code relies on.
fn is_sound(image: &Image) -> bool {
    let extents = image.levels.iter().flat_map(|level| level.extent);
    matches!(image.channels, 1 | 2 | 4)
        && image.layers > 0
        && !image.levels.is_empty()
        && extents
            .into_iter()
            .all(|extent| (1..=1 << 30).contains(&extent))
}

/// Executes `txq` and `suq`.
pub(super) fn query(
    global: &mut Global<'_>,
    launch: &Launch<'_>,
    frame: &mut Frame,
    args: &QueryArgs,
    mask: u32,
) -> Result<(), LaneFault> {
    let handles = frame.rows[args.handle as usize];
    let levels = args.level.map(|reg| frame.rows[reg as usize]);
    for lane in Lanes(mask) {
        let handle = handles[lane];
        let fault = |kind| lane_fault(kind, lane);
        let (image, normalized) = if args.surface {
            let image = global.objects.surface(launch, handle).map_err(fault)?;
            (image, false)
        } else {
            let texture = global.objects.texture(launch, handle).map_err(fault)?;
            (&texture.image, texture.normalized)
        };
        let level = levels.map_or(0, |row| word(&row, lane) as usize);
        let extent = image.levels.get(level).map_or([0; 3], |level| level.extent);
        let value = match args.query {
            Query::Width => extent[0],
            Query::Height => height(image, extent, args.surface),
            Query::Depth => depth(image, extent, args.surface),
            Query::Layers => image.layers,
            Query::Levels => u32::try_from(image.levels.len()).unwrap_or(u32::MAX),
            Query::Normalized => u32::from(normalized),
        };
        frame.rows[args.dest as usize][lane] = u64::from(value);
    }
    Ok(())
}

/// Returns the value of a `.height` query: for layers of lines, the number of layers.
fn height(image: &Image, extent: [u32; 3], surface: bool) -> u32 {
    match (image.dimensions, image.layered) {
        (1, true) => image.layers,
        (1, false) if surface => 0,
        _ => extent[1],
    }
}

/// Returns the value of a `.depth` query: for layers, their number. A surface counts each face as one.
fn depth(image: &Image, extent: [u32; 3], surface: bool) -> u32 {
    match image.dimensions {
        3 => extent[2],
        2 if image.cubes && surface => image.layers,
        2 if image.cubes && image.layered => image.layers / cube::FACES,
        2 if image.layered => image.layers,
        _ => 0,
    }
}
