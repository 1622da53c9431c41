//! Handles: streams, events, modules, libraries, functions, memory pools, mappable memory, arrays.
//!
//! The guest mints them. A handle is `type << 38 | index << 18 | generation << 6`. The program gets that value plus
//! the base of the reserved handle band: it looks like an aligned pointer and equals no other pointer. The wire
//! carries the handle without the base, so the worker checks it without an address.

#[cfg(feature = "std")]
mod slab;

use core::fmt;
use core::hash::{Hash, Hasher};
use core::marker::PhantomData;

#[cfg(feature = "std")]
pub use slab::{Slab, SlabError};

/// Size of the handle band. The type is in the upper four bits.
pub const BAND_SIZE: u64 = 1 << 42;

const TYPE_SHIFT: u32 = 38;
const INDEX_SHIFT: u32 = 18;
const GENERATION_SHIFT: u32 = 6;
/// Alignment of handles.
pub const ALIGNMENT: u64 = 1 << GENERATION_SHIFT;
/// Upper bound of indices, exclusive.
pub const INDICES: u32 = 1 << (TYPE_SHIFT - INDEX_SHIFT);
/// Upper bound of generations, exclusive. Generations wrap.
pub const GENERATIONS: u16 = 1 << (INDEX_SHIFT - GENERATION_SHIFT);

/// Type of a handle.
pub trait HandleKind: Copy + fmt::Debug + PartialEq {
    /// Upper four bits; not zero.
    const TYPE: u64;
    const NAME: &'static str;
    /// True if the value 1 is the legacy default stream.
    const HAS_LEGACY: bool = false;
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal $(, $legacy:ident)?;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name;

        impl HandleKind for $name {
            const TYPE: u64 = $number;
            const NAME: &'static str = stringify!($name);
            $(const HAS_LEGACY: bool = stringify!($legacy).len() != 0;)?
        }
    )*};
}

kinds! {
    /// `CUstream`.
    Stream = 1, legacy;
    /// `CUevent`.
    Event = 2;
    /// `CUmodule`.
    Module = 3;
    /// `CUlibrary`.
    Library = 4;
    /// `CUfunction` and `CUkernel`: CUDA accepts either in place of the other.
    Function = 5;
    /// `CUcontext`; contexts never cross the ring as handles.
    Context = 6;
    /// `CUgraphExec`.
    Graph = 7;
    /// `CUgraph`. Never crosses the ring: the guest sends nodes and edges instead.
    GraphTemplate = 8;
    /// `CUgraphNode`.
    GraphNode = 9;
    /// `CUmemoryPool`.
    Pool = 10;
    /// `CUmemGenericAllocationHandle`.
    Memory = 11;
    /// `CUarray`.
    Array = 12;
    /// `CUmipmappedArray`.
    Mipmap = 13;
    /// `CUuserObject`; never crosses the ring.
    UserObject = 14;
}

/// Handle of one type: minted by the guest, or the legacy stream.
pub struct Handle<K> {
    bits: u64,
    kind: PhantomData<fn() -> K>,
}

/// Entry of a slab that a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Below [`INDICES`].
    pub index: u32,
    /// Below [`GENERATIONS`].
    pub generation: u16,
}

impl Handle<Stream> {
    /// Legacy default stream (`CU_STREAM_LEGACY`).
    pub const LEGACY: Self = Self {
        bits: 1,
        kind: PhantomData,
    };

    #[must_use]
    pub const fn is_legacy(self) -> bool {
        self.bits == 1
    }
}

impl<K: HandleKind> Handle<K> {
    /// Makes the handle of an entry; `None` if the index or the generation is out of range.
    #[must_use]
    pub const fn new(key: Key) -> Option<Self> {
        if key.index >= INDICES || key.generation >= GENERATIONS {
            return None;
        }
        let bits = K::TYPE << TYPE_SHIFT
            | (key.index as u64) << INDEX_SHIFT
            | (key.generation as u64) << GENERATION_SHIFT;
        Some(Self {
            bits,
            kind: PhantomData,
        })
    }

    /// Entry that the handle names; `None` for the legacy stream.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "masked to the fields' widths"
    )]
    pub const fn key(self) -> Option<Key> {
        if self.bits >> TYPE_SHIFT == 0 {
            return None;
        }
        Some(Key {
            index: (self.bits >> INDEX_SHIFT) as u32 & (INDICES - 1),
            generation: (self.bits >> GENERATION_SHIFT) as u16 & (GENERATIONS - 1),
        })
    }

    /// Returns the value on the wire.
    #[must_use]
    pub const fn to_wire(self) -> u64 {
        self.bits
    }

    /// Converts a value on the wire; `None` if it is not a handle of this type.
    #[must_use]
    pub const fn from_wire(bits: u64) -> Option<Self> {
        let minted = bits >> TYPE_SHIFT == K::TYPE && bits & ((1 << GENERATION_SHIFT) - 1) == 0;
        if minted || (K::HAS_LEGACY && bits == 1) {
            Some(Self {
                bits,
                kind: PhantomData,
            })
        } else {
            None
        }
    }

    /// Returns the program's value of the handle. `band` is the base of the handle band.
    #[must_use]
    pub const fn to_pointer(self, band: u64) -> u64 {
        if self.key().is_some() {
            band + self.bits
        } else {
            self.bits
        }
    }

    /// Converts a program's value of a minted handle. Rejects null and streams 1 and 2, whose meaning depends on the
    /// called function.
    #[must_use]
    pub const fn from_pointer(band: u64, pointer: u64) -> Option<Self> {
        match pointer.checked_sub(band) {
            Some(bits) if bits >> TYPE_SHIFT == K::TYPE => Self::from_wire(bits),
            _ => None,
        }
    }
}

impl<K> Clone for Handle<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Handle<K> {}

impl<K> PartialEq for Handle<K> {
    fn eq(&self, other: &Self) -> bool {
        self.bits == other.bits
    }
}

impl<K> Eq for Handle<K> {}

impl<K> Hash for Handle<K> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bits.hash(state);
    }
}

impl<K: HandleKind> fmt::Debug for Handle<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.key() {
            Some(key) => write!(f, "{}({}.{})", K::NAME, key.index, key.generation),
            None => write!(f, "{}(legacy)", K::NAME),
        }
    }
}
