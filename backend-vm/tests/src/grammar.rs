//! A valid record of every message, as a base for mutations.

use wormhole_api::constants::memory_handle_type::POSIX_FILE_DESCRIPTOR;
use wormhole_api::handle::{HandleKind, Key};
use wormhole_api::{
    AddressReserve, AddressReserveReply, ContextReset, DevicePtr, Event, EventCreate, EventDestroy,
    EventQuery, Fence, GreenCreate, GreenPartNumber, Handle, Items, JitOption, Kind,
    LaunchAttribute, LaunchKernel, Link, LinkInput, ManagedMirror, ManagedOpen, ManagedPlace,
    MemAlloc, MemAllocReply, MemCopy, MemCreate, MemWrite, Memory, MemoryOperation, Message,
    PartAlloc, PeerEnable, PoolAlloc, PoolAllocReply, PoolCreate, PoolDestroy, PoolSetAccess,
    ShareEvent, ShareMemory, SharePool, SharedEventCreate, SlabAlloc, SlabAllocReply, StreamMemory,
    SurfaceCreate, SurfaceCreateReply, SurfaceDestroy, TextureCreate, TextureCreateReply,
    TextureDestroy,
};
use wormhole_ring::layout::{FILES, MANAGED, MANAGED_ALIGN};

use crate::attack::Entry;
use crate::grammar_graphs;
use crate::guest::Guest;

/// A module with a kernel that writes its thread's number, and references to bind.
pub const PTX: &str = "\
.version 7.0
.target sm_70
.address_size 64
.global .align 4 .b8 table[256];
.global .texref texture;
.global .surfref surface;
.visible .entry store(.param .u64 out)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r1;
    ret;
}
";

/// Addresses of a session, for valid records.
pub struct Things {
    pub device: DevicePtr,
    /// Reserved addresses; the existing memory is mapped to the first half.
    pub reserved: DevicePtr,
    pub arena: u64,
}

/// Bytes of device memory at [`Things::device`].
pub const DEVICE_BYTES: u64 = 65536;

/// Bytes of a row of the existing array, and its number of rows.
pub const ARRAY: [u64; 2] = [256, 16];
/// Bytes of the existing memory; twice as many are reserved at [`Things::reserved`].
pub const MAPPED_BYTES: u64 = 2 << 20;

/// Handle of the one object of each kind that a session prepares. [`Guest::mint`] never returns it.
pub fn existing<K: HandleKind>() -> Handle<K> {
    Handle::new(Key {
        index: 0,
        generation: 1,
    })
    .unwrap()
}

/// Source of the handles and addresses of a session, for examples.
pub struct Source<'g> {
    guest: &'g mut Guest,
    things: &'g Things,
    /// Newest minted handle of each kind, on the wire.
    newest: [u64; 16],
}

impl Source<'_> {
    #[allow(clippy::unused_self, reason = "generated code asks the source")]
    pub fn existing<K: HandleKind>(&self) -> Handle<K> {
        existing()
    }

    pub fn minted<K: HandleKind>(&mut self) -> Handle<K> {
        let handle = self.guest.mint();
        self.newest[K::TYPE as usize] = handle.to_wire();
        handle
    }

    /// Last minted handle of this kind.
    pub fn newest<K: HandleKind>(&self) -> Handle<K> {
        Handle::from_wire(self.newest[K::TYPE as usize]).expect("one was minted")
    }

    #[allow(clippy::unused_self, reason = "generated code asks the source")]
    pub fn fence(&self) -> Fence {
        Fence::new(9).unwrap()
    }

    pub fn device(&self) -> DevicePtr {
        self.things.device
    }

    /// Device memory that no other record names.
    pub fn spare(&mut self) -> DevicePtr {
        let alloc = MemAlloc::example(self);
        self.guest.call(&alloc).reply::<MemAllocReply>().address
    }

    /// Slab that no other record names.
    pub fn slab(&mut self) -> DevicePtr {
        let alloc = SlabAlloc::example(self);
        self.guest.call(&alloc).reply::<SlabAllocReply>().address
    }

    /// Part of such a slab.
    pub fn part(&mut self) -> DevicePtr {
        let alloc = PartAlloc::example(self);
        self.guest.record(&alloc);
        alloc.address
    }

    /// Memory of the existing pool that no other record names.
    pub fn pooled(&mut self) -> DevicePtr {
        let alloc = PoolAlloc::example(self);
        self.guest.call(&alloc).reply::<PoolAllocReply>().address
    }

    /// Address of [`PTX`].
    pub fn arena(&self) -> DevicePtr {
        DevicePtr(self.things.arena)
    }

    /// Unused part of the arena.
    pub fn scratch(&self) -> DevicePtr {
        DevicePtr(self.things.arena + 65536)
    }

    /// Segment of the arena that no other record names.
    pub fn home(&mut self) -> DevicePtr {
        DevicePtr(self.guest.more_arena())
    }

    /// Address in the band of managed memory that no other record names.
    pub fn unopened(&mut self) -> DevicePtr {
        let number = self
            .guest
            .mint::<Event>()
            .key()
            .map_or(0, |key| u64::from(key.index));
        DevicePtr(MANAGED.0 + number * 2 * MANAGED_ALIGN)
    }

    /// Managed memory that no other record names.
    pub fn managed(&mut self) -> DevicePtr {
        let open = ManagedOpen::example(self);
        self.guest.call(&open).reply::<()>();
        open.address
    }

    /// Managed memory on the device that no other record names.
    pub fn placed(&mut self) -> DevicePtr {
        let place = ManagedPlace::example(self);
        self.guest.call(&place).reply::<()>();
        place.address
    }

    /// Mappable memory that no other record names.
    pub fn created(&mut self) -> Handle<Memory> {
        let create = MemCreate::example(self);
        self.guest.call(&create).reply::<()>();
        create.new
    }

    /// Managed memory with a mirror that no other record names.
    pub fn mirrored(&mut self) -> DevicePtr {
        let mirror = ManagedMirror::example(self);
        self.guest.call(&mirror).reply::<()>();
        mirror.address
    }

    pub fn reserved(&self) -> DevicePtr {
        self.things.reserved
    }

    /// Second half of [`Things::reserved`].
    pub fn unmapped(&self) -> DevicePtr {
        DevicePtr(self.things.reserved.0 + MAPPED_BYTES)
    }

    /// Reserved addresses that no other record names.
    pub fn reservation(&mut self) -> DevicePtr {
        let reserve = AddressReserve::example(self);
        let answer = self.guest.call(&reserve);
        answer.reply::<AddressReserveReply>().address
    }

    /// Texture of the existing array that no other record names.
    pub fn texture(&mut self) -> u64 {
        let create = TextureCreate::example(self);
        let answer = self.guest.call(&create);
        answer.reply::<TextureCreateReply>().texture
    }

    /// Surface of the existing array that no other record names.
    pub fn surface(&mut self) -> u64 {
        let create = SurfaceCreate::example(self);
        let answer = self.guest.call(&create);
        answer.reply::<SurfaceCreateReply>().surface
    }

    #[allow(clippy::unused_self, reason = "generated code asks the source")]
    pub fn files(&self) -> DevicePtr {
        DevicePtr(FILES.0)
    }
}

/// Message with an example in the table.
pub trait Example: Message {
    /// Makes the message from the values that the table gives its fields.
    fn example(source: &mut Source<'_>) -> Self;
}

#[allow(unused_variables, reason = "an example of numbers needs no source")]
mod generated {
    use wormhole_api::*;

    use super::{Entry, Example, Source, entry};

    include!(concat!(env!("OUT_DIR"), "/examples.rs"));
}

pub fn entry<M: Message>(message: &M) -> Entry {
    Entry {
        message: M::ID,
        // A request without a slot ends its session.
        slot: match M::KIND {
            Kind::Record => 0xFFFF,
            Kind::Request | Kind::Blocking => M::ID % 128,
        },
        device: 0,
        body: message.encode(|parts| parts.concat()).unwrap(),
        body_len: None,
        units: None,
        lap: None,
        pad: false,
    }
}

/// Returns records that an example cannot express, then the example of every message. The last one resets the context,
/// which destroys the objects that the others need.
pub fn grammar(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let source = &mut Source {
        guest,
        things,
        newest: [0; 16],
    };
    let mut entries = [
        copies(source),
        launches(source),
        links(source),
        objects(source),
        peers(source),
        grammar_graphs::graphs(source),
        generated::examples(source),
    ]
    .concat();
    entries.sort_by_key(|entry| entry.message == ContextReset::ID);
    entries
}

fn copies(source: &mut Source<'_>) -> Vec<Entry> {
    let address = source.device().0;
    let operation = |kind, flags, address, value| MemoryOperation {
        kind,
        flags,
        address,
        value,
    };
    vec![
        entry(&MemWrite {
            data: &[5; 100],
            ..Example::example(source)
        }),
        entry(&StreamMemory {
            operations: Items::new(&[
                operation(2, 0, address, 7),
                operation(1, 0, address, 7),
                operation(6, 1, 0, 0),
            ]),
            ..Example::example(source)
        }),
    ]
}

/// Returns launches with parameters, and with attributes that name an event.
fn launches(source: &mut Source<'_>) -> Vec<Entry> {
    let recorded: Handle<Event> = source.minted();
    let mut value = [0; 64];
    value[..8].copy_from_slice(&recorded.to_wire().to_le_bytes());
    let attribute = |id, value| LaunchAttribute {
        id,
        reserved: 0,
        value,
    };
    let parameters = source.device().0.to_le_bytes();
    let mut launch = |attributes: &[LaunchAttribute]| {
        entry(&LaunchKernel {
            attributes: Items::new(attributes),
            parameters: &parameters,
            ..Example::example(source)
        })
    };
    vec![
        launch(&[attribute(8, [0; 64])]),
        entry(&EventCreate {
            new: recorded,
            flags: 2,
        }),
        launch(&[attribute(7, value), attribute(12, value)]),
        entry(&EventQuery { event: recorded }),
        entry(&EventDestroy { event: recorded }),
    ]
}

fn links(source: &mut Source<'_>) -> Vec<Entry> {
    let bytes = PTX.len() as u64;
    vec![entry(&Link {
        parts: Items::new(&[LinkInput {
            kind: 1,
            name: 0,
            bytes,
        }]),
        options: Items::new(&[JitOption {
            option: 3,
            reserved: 0,
            value: bytes,
        }]),
        ..Example::example(source)
    })]
}

/// Returns records that create and destroy a pool, destroy a texture and a surface, share an event, memory and a pool,
/// and create a green context of a part that an earlier record described.
fn objects(source: &mut Source<'_>) -> Vec<Entry> {
    let (texture, surface) = (source.texture(), source.surface());
    vec![
        entry(&TextureDestroy { texture }),
        entry(&SurfaceDestroy { surface }),
        entry(&MemCreate {
            handle_types: POSIX_FILE_DESCRIPTOR,
            ..Example::example(source)
        }),
        entry(&ShareMemory {
            memory: source.newest(),
        }),
        entry(&PoolCreate {
            handle_types: POSIX_FILE_DESCRIPTOR,
            ..Example::example(source)
        }),
        entry(&SharePool {
            pool: source.newest(),
        }),
        entry(&PoolCreate::example(source)),
        entry(&PoolDestroy::example(source)),
        entry(&SharedEventCreate::example(source)),
        entry(&ShareEvent::example(source)),
        entry(&GreenCreate {
            parts: Items::new(&[GreenPartNumber { number: 1 }]),
        }),
    ]
}

/// Returns records that name their own device as peer, memory of the other device, and a copy that it makes.
fn peers(source: &mut Source<'_>) -> Vec<Entry> {
    let on_other = |entry| Entry { device: 1, ..entry };
    vec![
        entry(&PeerEnable { peer: 0 }),
        entry(&PoolSetAccess {
            peer: 0,
            ..Example::example(source)
        }),
        on_other(entry(&MemAlloc::example(source))),
        on_other(entry(&MemCopy {
            source: DevicePtr(source.device().0 + 8192),
            stream: Handle::LEGACY,
            ..Example::example(source)
        })),
    ]
}
