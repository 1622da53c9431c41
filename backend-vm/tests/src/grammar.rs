//! A valid record of every message, as a base for mutations.

use wormhole_api::{
    Access, AddressFree, AddressReserve, Array, ArrayCreate, ArrayDestroy, AvailableShared,
    ClusterOccupancy, ClusterQuestion, ContextGetLimit, ContextReset, ContextSetLimit,
    DeviceDescribe, DevicePtr, Element, Event, EventCreate, EventDestroy, EventElapsed, EventQuery,
    EventRecord, EventSynchronize, Fence, FenceWrite, Function, FunctionGetAttribute,
    FunctionSetAttribute, FunctionSetCacheConfig, Handle, Items, JitOption, Kind, LaunchAttribute,
    LaunchKernel, Library, LibraryGetGlobal, LibraryGetKernel, LibraryGetModule, LibraryKernels,
    LibraryUnload, Link, LinkInput, MemAlloc, MemCopy, MemCopy3d, MemCreate, MemFree, MemGetInfo,
    MemGranularity, MemMap, MemRelease, MemSet, MemSetAccess, MemUnmap, MemWrite, Memory,
    MemoryOperation, Message, Mipmap, MipmapCreate, MipmapDestroy, MipmapGetLevel, Module,
    ModuleGetFunction, ModuleGetGlobal, ModuleKernels, ModuleUnload, Occupancy, PeerAttribute,
    PeerDisable, PeerEnable, Pool, PoolAlloc, PoolCreate, PoolDefault, PoolDestroy, PoolFree,
    PoolGetAttribute, PoolSetAccess, PoolSetAttribute, PoolTrim, ResetPersistingL2, Stream,
    StreamCreate, StreamDestroy, StreamMemory, StreamQuery, StreamSetAttribute, StreamWaitEvent,
    SurfaceCreate, SurfaceDestroy, Synchronize, TakeOutput, TensorMapEncode, TensorMapMode,
    TensorMapReplace, TextureCreate, TextureDestroy, TextureLinearWidth, TextureSource,
};

use crate::attack::Entry;
use crate::guest::Guest;
use crate::messages::{library_load, module_load};
use crate::{grammar_code, grammar_graphs, grammar_sharing};

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

/// Objects of a session, for valid records.
pub struct Things {
    pub stream: Handle<Stream>,
    pub event: Handle<Event>,
    pub module: Handle<Module>,
    pub library: Handle<Library>,
    pub function: Handle<Function>,
    pub array: Handle<Array>,
    pub mipmap: Handle<Mipmap>,
    pub pool: Handle<Pool>,
    pub memory: Handle<Memory>,
    pub device: DevicePtr,
    /// Reserved addresses; `memory` is mapped to the first part.
    pub reserved: DevicePtr,
    pub arena: u64,
}

/// Bytes of device memory at [`Things::device`].
pub const DEVICE_BYTES: u64 = 65536;

/// Bytes of a row of [`Things::array`], and its number of rows.
pub const ARRAY: [u64; 2] = [256, 16];
/// Bytes of [`Things::memory`]; twice as many are reserved at [`Things::reserved`].
pub const MAPPED_BYTES: u64 = 2 << 20;

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

/// Returns a valid record of every kind, in the order of a program. The last one resets the
/// context, which destroys the objects that the others need.
pub fn grammar(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    [
        memory(things),
        streams(things, guest),
        code(things, guest),
        kernels(things, guest),
        arrays(things, guest),
        pools(things, guest),
        peers(things),
        grammar_code::references(things),
        grammar_code::green_contexts(guest),
        virtual_memory(things, guest),
        grammar_graphs::graphs(things, guest),
        grammar_sharing::sharing(things, guest),
        device(),
    ]
    .concat()
}

fn memory(things: &Things) -> Vec<Entry> {
    let Things {
        stream,
        device,
        arena,
        ..
    } = *things;
    let host = DevicePtr(arena + 65536);
    vec![
        entry(&MemGetInfo {}),
        entry(&MemAlloc { bytes: 4096 }),
        entry(&MemFree {
            address: DevicePtr(1),
        }),
        entry(&MemWrite {
            destination: device,
            stream,
            data: &[5; 100],
        }),
        entry(&MemCopy {
            destination: device,
            source: host,
            bytes: 4096,
            stream,
        }),
        entry(&MemSet {
            destination: device,
            pitch: 256,
            width: 16,
            height: 4,
            value: 3,
            element: Element::Word,
            stream,
        }),
    ]
}

fn streams(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let Things {
        stream,
        event,
        device,
        ..
    } = *things;
    let (new_stream, new_event) = (guest.mint(), guest.mint());
    vec![
        entry(&StreamMemory {
            stream,
            operations: Items::new(&[
                MemoryOperation {
                    kind: 2,
                    flags: 0,
                    address: device.0,
                    value: 7,
                },
                MemoryOperation {
                    kind: 1,
                    flags: 0,
                    address: device.0,
                    value: 7,
                },
                MemoryOperation {
                    kind: 6,
                    flags: 1,
                    address: 0,
                    value: 0,
                },
            ]),
        }),
        entry(&StreamSetAttribute {
            stream,
            id: 3,
            value: [1; 64],
        }),
        entry(&StreamCreate {
            new: new_stream,
            flags: 1,
            priority: 0,
        }),
        entry(&StreamDestroy { stream: new_stream }),
        entry(&StreamQuery { stream }),
        entry(&StreamWaitEvent {
            stream,
            event,
            flags: 0,
        }),
        entry(&FenceWrite {
            stream,
            fence: Fence::new(9).unwrap(),
            value: 1,
        }),
        entry(&Synchronize {
            stream: Some(stream),
        }),
        entry(&EventCreate {
            new: new_event,
            flags: 0,
        }),
        entry(&EventRecord {
            event,
            stream,
            flags: 0,
            fence: Fence::new(4),
            value: 7,
        }),
        entry(&EventQuery { event }),
        entry(&EventSynchronize { event }),
        entry(&EventElapsed {
            start: event,
            end: event,
        }),
        entry(&EventDestroy { event: new_event }),
    ]
}

fn code(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let Things {
        module,
        library,
        arena,
        ..
    } = *things;
    let (new_module, new_library) = (guest.mint(), guest.mint());
    let (image, bytes) = (DevicePtr(arena), PTX.len() as u64);
    let (names, room) = (DevicePtr(arena + 65536), 4096);
    let name = b"store";
    vec![
        entry(&module_load(new_module, image, bytes)),
        entry(&ModuleGetFunction {
            module,
            new: guest.mint(),
            name,
        }),
        entry(&ModuleGetGlobal {
            module,
            name: b"table",
        }),
        entry(&ModuleUnload { module: new_module }),
        entry(&Link {
            complete: 1,
            inputs: image,
            image,
            room: bytes,
            log: image,
            log_bytes: bytes / 2,
            parts: Items::new(&[LinkInput {
                kind: 1,
                name: 1,
                bytes,
            }]),
            options: Items::new(&[JitOption {
                option: 3,
                reserved: 0,
                value: bytes,
            }]),
        }),
        entry(&library_load(new_library, image, bytes)),
        entry(&LibraryGetKernel {
            library,
            new: guest.mint(),
            name,
        }),
        entry(&LibraryGetGlobal {
            library,
            name: b"table",
        }),
        entry(&LibraryGetModule {
            library,
            new: guest.mint(),
        }),
        entry(&LibraryUnload {
            library: new_library,
        }),
        entry(&ModuleKernels {
            module,
            names,
            room,
        }),
        entry(&LibraryKernels {
            library,
            names,
            room,
        }),
    ]
}

fn kernels(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let Things {
        stream,
        function,
        device,
        ..
    } = *things;
    let attribute = [LaunchAttribute {
        id: 8,
        reserved: 0,
        value: [0; 64],
    }];
    let recorded: Handle<Event> = guest.mint();
    let mut value = [0; 64];
    value[..8].copy_from_slice(&recorded.to_wire().to_le_bytes());
    let reserved = 0;
    let of_events = [7, 12].map(|id| LaunchAttribute {
        id,
        reserved,
        value,
    });
    vec![
        entry(&FunctionGetAttribute {
            function,
            attribute: 0,
        }),
        entry(&FunctionSetAttribute {
            function,
            attribute: 8,
            value: 1024,
        }),
        entry(&FunctionSetCacheConfig {
            function,
            config: 1,
        }),
        entry(&Occupancy {
            function,
            block: 32,
            flags: 0,
            shared: 0,
        }),
        entry(&LaunchKernel {
            function,
            stream,
            grid: [1, 1, 1],
            block: [32, 1, 1],
            shared: 0,
            attributes: Items::new(&attribute),
            parameters: &device.0.to_le_bytes(),
        }),
        entry(&EventCreate {
            new: recorded,
            flags: 2,
        }),
        entry(&LaunchKernel {
            function,
            stream,
            grid: [2, 1, 1],
            block: [32, 1, 1],
            shared: 0,
            attributes: Items::new(&of_events),
            parameters: &device.0.to_le_bytes(),
        }),
        entry(&EventQuery { event: recorded }),
        entry(&EventDestroy { event: recorded }),
        entry(&ClusterOccupancy {
            function,
            question: ClusterQuestion::GreatestSize,
            grid: [8, 1, 1],
            block: [32, 1, 1],
            shared: 0,
            attributes: Items::new(&attribute),
        }),
        entry(&AvailableShared {
            function,
            blocks: 2,
            block: 32,
        }),
        entry(&TensorMapEncode {
            tensor: device.0,
            dimensions: [64, 16, 0, 0, 0],
            strides: [256, 0, 0, 0],
            mode: TensorMapMode::Tiled,
            data_type: 2,
            rank: 2,
            tile: [16, 8, 0, 0, 0],
            steps: [1, 1, 0, 0, 0],
            lower: [0; 3],
            upper: [0; 3],
            channels: 0,
            pixels: 0,
            interleave: 0,
            swizzle: 0,
            promotion: 0,
            fill: 0,
            wide: 0,
        }),
        entry(&TensorMapReplace {
            tensor: device.0,
            map: [0; 128],
        }),
    ]
}

fn arrays(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let Things {
        stream,
        array,
        mipmap,
        device,
        ..
    } = *things;
    let (new_array, new_mipmap, level) = (guest.mint(), guest.mint(), guest.mint());
    // Format of single bytes, with one channel.
    let (format, channels) = (1, 1);
    let [width, height] = ARRAY;
    vec![
        entry(&ArrayCreate {
            new: new_array,
            extent: [32, 8, 4],
            format,
            channels,
            flags: 0,
        }),
        entry(&ArrayDestroy { array: new_array }),
        entry(&MipmapCreate {
            new: new_mipmap,
            extent: [64, 64, 0],
            format,
            channels,
            flags: 0,
            levels: 3,
        }),
        entry(&MipmapGetLevel {
            mipmap,
            level: 1,
            new: level,
        }),
        entry(&MipmapDestroy { mipmap: new_mipmap }),
        entry(&TextureCreate {
            source: TextureSource::Array,
            array: Some(array),
            mipmap: None,
            memory: DevicePtr(0),
            format,
            channels,
            size: [0; 3],
            address_modes: [1; 3],
            filters: [0; 2],
            flags: 0,
            anisotropy: 0,
            level_bias: 0.0,
            level_clamp: [0.0; 2],
            border: [0; 4],
            viewed: 0,
            view_format: 0,
            view_extent: [0; 3],
            view_parts: [0; 4],
        }),
        entry(&TextureDestroy { texture: 1 }),
        entry(&TextureLinearWidth { format, channels }),
        entry(&SurfaceCreate { array }),
        entry(&SurfaceDestroy { surface: 1 }),
        entry(&MemCopy3d {
            extent: [width / 2, height / 2, 1],
            to_array: Some(array),
            to_origin: [3, 2, 0],
            to_memory: DevicePtr(0),
            to_pitch: 0,
            to_rows: 0,
            from_array: None,
            from_origin: [0; 3],
            from_memory: device,
            from_pitch: width,
            from_rows: height,
            stream,
        }),
    ]
}

/// Records of two devices: valid ones, and one that names its own device as peer.
fn peers(things: &Things) -> Vec<Entry> {
    let set = |peer| PoolSetAccess {
        pool: things.pool,
        peer,
        access: Access::ReadWrite,
    };
    vec![
        entry(&PeerAttribute {
            peer: 1,
            attribute: 2,
        }),
        entry(&PeerEnable { peer: 1 }),
        entry(&PeerEnable { peer: 0 }),
        entry(&PeerDisable { peer: 1 }),
        entry(&set(1)),
        entry(&set(0)),
        // Memory of the other device, and a copy that it makes.
        Entry {
            device: 1,
            ..entry(&MemAlloc { bytes: 4096 })
        },
        Entry {
            device: 1,
            ..entry(&MemCopy {
                destination: things.device,
                source: DevicePtr(things.device.0 + 8192),
                bytes: 4096,
                stream: Handle::LEGACY,
            })
        },
    ]
}

fn pools(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let Things { stream, pool, .. } = *things;
    let (new, default) = (guest.mint(), guest.mint());
    vec![
        entry(&PoolCreate {
            new,
            handle_types: 0,
            most: 0,
        }),
        entry(&PoolDefault { new: default }),
        entry(&PoolTrim { pool, keep: 0 }),
        entry(&PoolGetAttribute { pool, attribute: 4 }),
        entry(&PoolSetAttribute {
            pool,
            attribute: 4,
            value: 1 << 20,
        }),
        entry(&PoolAlloc {
            pool,
            stream,
            bytes: 4096,
        }),
        entry(&PoolFree {
            address: DevicePtr(1),
            stream,
        }),
        entry(&PoolDestroy { pool: new }),
    ]
}

fn virtual_memory(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let Things {
        memory, reserved, ..
    } = *things;
    let new = guest.mint();
    let (address, bytes) = (reserved, MAPPED_BYTES);
    let free = DevicePtr(reserved.0 + MAPPED_BYTES);
    vec![
        entry(&MemGranularity {}),
        entry(&AddressReserve {
            bytes,
            alignment: 0,
            hint: 0,
        }),
        entry(&MemCreate {
            new,
            bytes,
            handle_types: 0,
        }),
        entry(&MemMap {
            address: free,
            memory,
        }),
        entry(&MemSetAccess {
            address,
            bytes,
            access: Access::ReadWrite,
        }),
        entry(&MemUnmap { address, bytes }),
        entry(&MemRelease { memory: new }),
        entry(&AddressFree {
            address,
            bytes: 2 * MAPPED_BYTES,
        }),
    ]
}

fn device() -> Vec<Entry> {
    vec![
        entry(&DeviceDescribe { ordinal: 0 }),
        entry(&ContextGetLimit { limit: 0 }),
        entry(&ContextSetLimit {
            limit: 0,
            value: 1024,
        }),
        entry(&ResetPersistingL2 {}),
        entry(&TakeOutput {}),
        entry(&ContextReset {}),
    ]
}
