//! Instructions on textures and surfaces.

use super::{AtomicOp, Pred, Reg};

/// Geometry of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Geometry {
    OneD,
    TwoD,
    ThreeD,
    Cube,
}

impl Geometry {
    /// Returns the number of dimensions that a fetch reads from: 2 for a face of a cube.
    pub(crate) fn dimensions(self) -> usize {
        match self {
            Self::OneD => 1,
            Self::TwoD | Self::Cube => 2,
            Self::ThreeD => 3,
        }
    }

    /// Returns the number of coordinates of an access.
    pub(crate) fn coordinates(self) -> usize {
        match self {
            Self::Cube => 3,
            other => other.dimensions(),
        }
    }
}

/// Level of detail of a fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Finest level.
    Base,
    Level(Reg),
    /// Level that fits the coordinates' steps between neighbours, in two directions.
    Gradients([Box<[Reg]>; 2]),
}

/// Type of a fetched channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TexelType {
    /// Integer or single.
    Word,
    Half,
    /// Pair of channels.
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
    /// Channel to fetch from four texels, instead of all channels of one texel.
    pub gather: Option<usize>,
    pub dests: Box<[Option<Reg>]>,
    /// Destination predicate: whether the texels are in memory.
    pub resident: Option<Pred>,
}

/// Behaviour of an access outside a surface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Boundary {
    /// Accesses the nearest element.
    Clamp,
    /// Reads 0 and writes nothing.
    Zero,
    Trap,
}

/// Operation of a surface access.
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

/// Attribute that a query reads from an object.
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
