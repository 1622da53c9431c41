//! Textures and surfaces.

use super::{AtomicOp, Pred, Reg};

/// The shape of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Geometry {
    OneD,
    TwoD,
    ThreeD,
    Cube,
}

impl Geometry {
    /// Dimensions of what a fetch reads from: a cube's faces are flat.
    pub(crate) fn dimensions(self) -> usize {
        match self {
            Self::OneD => 1,
            Self::TwoD | Self::Cube => 2,
            Self::ThreeD => 3,
        }
    }

    /// Coordinates of an access.
    pub(crate) fn coordinates(self) -> usize {
        match self {
            Self::Cube => 3,
            other => other.dimensions(),
        }
    }
}

/// Which level of detail a fetch is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Detail {
    /// The finest.
    Base,
    Level(Reg),
    /// That which suits the steps between neighbours, in two directions.
    Gradients([Box<[Reg]>; 2]),
}

/// What a fetch gives for a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TexelType {
    /// An integer or a single.
    Word,
    Half,
    /// Two channels.
    HalfPair,
}

/// `tex` and `tld4`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SampleArgs {
    pub geometry: Geometry,
    pub texel: TexelType,
    /// Whether coordinates are integers, which are neither filtered nor normalized.
    pub integers: bool,
    pub handle: Reg,
    pub layer: Option<Reg>,
    pub coordinates: Box<[Reg]>,
    pub detail: Detail,
    /// The channel of four texels that is wanted, instead of one texel's channels.
    pub gather: Option<usize>,
    pub dests: Box<[Option<Reg>]>,
    /// Learns that the texels are in memory.
    pub resident: Option<Pred>,
}

/// What an access beyond a surface does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Boundary {
    /// Takes the nearest element.
    Clamp,
    /// Reads 0 and writes nothing.
    Zero,
    Trap,
}

/// What an access of a surface does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SurfaceAction {
    Load,
    Store,
    Reduce(AtomicOp),
}

/// `suld`, `sust` and `sured`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SurfaceArgs {
    pub action: SurfaceAction,
    pub geometry: Geometry,
    pub boundary: Boundary,
    /// Bytes of one element.
    pub size: u32,
    pub handle: Reg,
    pub layer: Option<Reg>,
    pub coordinates: Box<[Reg]>,
    pub regs: Box<[Reg]>,
}

/// What is asked of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Query {
    Width,
    Height,
    Depth,
    Layers,
    Levels,
    Normalized,
}

/// `txq` and `suq`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QueryArgs {
    pub surface: bool,
    pub query: Query,
    pub dest: Reg,
    pub handle: Reg,
    pub level: Option<Reg>,
}
