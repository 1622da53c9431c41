//! Kernel queries: the values that reach the device and those that return.

mod support;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use support::recorder::Recorder;
use support::recorder::kernels::NAMES;
use support::served::{Served, handle, launch_with};
use wormhole_api::constants::function_attribute::MAX;
use wormhole_api::constants::launch_attribute::{
    LAUNCH_COMPLETION_EVENT as LAUNCH_COMPLETION, PROGRAMMATIC_EVENT as PROGRAMMATIC,
};
use wormhole_api::{
    AvailableShared, AvailableSharedReply, ClusterOccupancy, ClusterOccupancyReply,
    ClusterQuestion, Decode, DevicePtr, Event as EventKind, EventCreate, EventDestroy,
    EventElapsed, Function, FunctionGetAttribute, FunctionSetAttribute, FunctionSetCacheConfig,
    GraphBegin, GraphInstantiate, GreenDescribe, GreenDescribeReply, GreenSplit, Handle, Items,
    LaunchAttribute, LibraryKernels, MemCreate, Message, Module, ModuleGetFunction, ModuleKernels,
    ModuleKernelsReply, Occupancy, PoolCreate, ResetPersistingL2, SharedEventCreate,
    Stream as StreamKind, StreamCreate, StreamQuery, TensorMapEncode, TensorMapEncodeReply,
    TensorMapMode, TensorMapReplace, TensorMapReplaceReply, TextureCreate, TextureLinearWidth,
    TextureLinearWidthReply, TextureSource,
};
use wormhole_backend_tests::messages::module_load;
use wormhole_device::{CuError, Device};
use wormhole_worker::session::Event;

/// A session with an arena, a module and a function.
struct Ready {
    device: Arc<Recorder>,
    served: Served,
    arena: Box<[AtomicU8; 64]>,
}

const MODULE: u32 = 1;

fn ready() -> Ready {
    let device = Arc::new(Recorder::new());
    let served = Served::start(&(Arc::clone(&device) as Arc<dyn Device>), 5);
    let arena = Box::new([const { AtomicU8::new(0xEE) }; 64]);
    served.notifier.send(Event::ExtentAdded {
        address: arena.as_ptr().expose_provenance() as u64,
        bytes: arena.len() as u64,
    });
    let ready = Ready {
        device,
        served,
        arena,
    };
    let load = module_load(handle(MODULE), DevicePtr(ready.address()), 64);
    ready.served.call(0, 1, &load);
    let look_up = ModuleGetFunction {
        module: handle(MODULE),
        new: handle(1),
        name: b"first",
    };
    ready.served.call(0, 2, &look_up);
    ready
}

impl Ready {
    fn address(&self) -> u64 {
        self.arena.as_ptr().expose_provenance() as u64
    }

    fn ask<M: Message>(&self, sequence: u64, message: &M) -> Vec<u8> {
        self.served.call(0, sequence, message)
    }

    fn try_ask<M: Message>(&self, sequence: u64, message: &M) -> (u32, Vec<u8>) {
        self.served.ask(0, sequence, message);
        self.served.answer(0, sequence)
    }

    fn names(&self, module: Handle<Module>, names: u64, room: u64) -> ModuleKernels {
        ModuleKernels {
            module,
            names: DevicePtr(names),
            room,
        }
    }

    fn arena(&self) -> [u8; 64] {
        std::array::from_fn(|index| self.arena[index].load(Ordering::Relaxed))
    }
}

#[test]
fn names_go_to_the_arena_if_there_is_room() {
    let ready = ready();
    let text = NAMES.map(|name| format!("{name}\0")).concat();
    let ask = |sequence, room| {
        let message = ready.names(handle(MODULE), ready.address(), room);
        let payload = ready.ask(sequence, &message);
        ModuleKernelsReply::decode(&payload).unwrap().bytes
    };
    assert_eq!(ask(3, text.len() as u64 - 1), text.len() as u64);
    assert_eq!(ready.arena(), [0xEE; 64], "there was no room");
    assert_eq!(ask(4, 64), text.len() as u64);
    assert_eq!(ready.arena()[..text.len()], *text.as_bytes());
    assert_eq!(ready.arena()[text.len()..], [0xEE; 64][text.len()..]);
}

#[test]
fn names_go_nowhere_else() {
    let ready = ready();
    let outside = ready.names(handle(MODULE), ready.address(), 65);
    assert_eq!(ready.try_ask(3, &outside).0, 1);
    let missing = ready.names(handle(7), ready.address(), 64);
    assert_eq!(ready.try_ask(4, &missing).0, 400);
    let library = LibraryKernels {
        library: handle(7),
        names: DevicePtr(ready.address()),
        room: 64,
    };
    assert_eq!(ready.try_ask(5, &library).0, 400);
    assert_eq!(ready.arena(), [0xEE; 64]);
    assert_eq!(ready.device.arrivals("kernel_names"), 0);
}

#[test]
fn clusters_are_asked_for_with_the_whole_configuration() {
    let ready = ready();
    let ask = |sequence, function: Handle<Function>, question, attributes| {
        let message = ClusterOccupancy {
            function,
            question,
            grid: [17, 1, 1],
            block: [5, 1, 1],
            shared: 0,
            attributes: Items::new(attributes),
        };
        let (code, payload) = ready.try_ask(sequence, &message);
        (code == 0)
            .then(|| ClusterOccupancyReply::decode(&payload).unwrap().count)
            .ok_or(code)
    };
    let known = handle(1);
    assert_eq!(ask(3, known, ClusterQuestion::ActiveClusters, &[]), Ok(17));
    assert_eq!(ask(4, known, ClusterQuestion::GreatestSize, &[]), Ok(5));
    assert_eq!(
        ask(5, handle(9), ClusterQuestion::GreatestSize, &[]),
        Err(400)
    );
    let with_event = [LaunchAttribute {
        id: 7,
        reserved: 0,
        value: [1; 64],
    }];
    let refused = ask(6, known, ClusterQuestion::GreatestSize, &with_event);
    assert_eq!(refused, Err(801), "the driver would follow what it carries");
}

#[test]
fn available_memory_is_the_devices_answer() {
    let ready = ready();
    let message = AvailableShared {
        function: handle(1),
        blocks: 3,
        block: 64,
    };
    let reply = ready.ask(3, &message);
    let bytes = AvailableSharedReply::decode(&reply).unwrap().bytes;
    assert_eq!(bytes, 3 << 32 | 64);
}

const TENSOR_MAP: TensorMapEncode = TensorMapEncode {
    tensor: 0x1000,
    dimensions: [1; 5],
    strides: [16; 4],
    mode: TensorMapMode::Tiled,
    data_type: 0,
    rank: 2,
    tile: [1; 5],
    steps: [1; 5],
    lower: [0; 3],
    upper: [0; 3],
    channels: 0,
    pixels: 0,
    interleave: 0,
    swizzle: 0,
    promotion: 0,
    fill: 0,
    wide: 0,
};

#[test]
fn tensor_maps_are_encoded_by_the_device_within_the_rank() {
    let ready = ready();
    let mut message = TensorMapEncode {
        tensor: 0x1234,
        mode: TensorMapMode::Im2colWide,
        data_type: 7,
        rank: 5,
        channels: 1,
        pixels: 1,
        wide: 1,
        ..TENSOR_MAP
    };
    let map = TensorMapEncodeReply::decode(&ready.ask(3, &message))
        .unwrap()
        .map;
    assert_eq!(map[..8], 0x1234_u64.to_le_bytes());
    for rank in [0, 6, u32::MAX] {
        message.rank = rank;
        assert_eq!(ready.try_ask(4, &message).0, 1);
    }
    let moved = TensorMapReplace {
        tensor: 0x9876,
        map,
    };
    let moved = TensorMapReplaceReply::decode(&ready.ask(5, &moved)).unwrap();
    assert_eq!(moved.map[..8], 0x9876_u64.to_le_bytes());
}

#[test]
fn only_numbers_of_attributes_reach_the_device() {
    let ready = ready();
    let function = handle(1);
    let mut sequence = 3;
    for (attribute, result, arrivals) in [(0, 0, 1), (MAX - 1, 0, 2), (MAX, 1, 2), (-1, 1, 2)] {
        let get = FunctionGetAttribute {
            function,
            attribute,
        };
        let set = FunctionSetAttribute {
            function,
            attribute,
            value: 1,
        };
        assert_eq!(ready.try_ask(sequence, &get).0, result, "{attribute}");
        assert_eq!(ready.try_ask(sequence + 1, &set).0, result, "{attribute}");
        sequence += 2;
        for call in ["function_get_attribute", "function_set_attribute"] {
            assert_eq!(
                ready.device.arrivals(call),
                arrivals,
                "{call} of {attribute}"
            );
        }
    }
}

#[test]
fn flags_and_modes_that_no_list_has_do_not_reach_the_device() {
    const DEVICE: &[&str] = &[
        "function_set_cache_config",
        "occupancy",
        "create_pool",
        "create_memory",
        "instantiate",
        "encode_tensor_map",
        "create_texture",
        "split",
        "green_stream",
    ];
    let ready = ready();
    let (function, graph) = (handle(1), handle(1));
    let sequence = Cell::new(2);
    let next = || sequence.replace(sequence.get() + 1) + 1;
    macro_rules! refused {
        ($($message:expr;)*) => {$(
            let (result, _) = ready.try_ask(next(), &$message);
            assert_eq!(result, 1, "{:?}", $message);
        )*};
    }
    let texture = TextureCreate {
        source: TextureSource::Rows,
        array: None,
        mipmap: None,
        memory: DevicePtr(ready.address()),
        format: 1,
        channels: 1,
        size: [16, 2, 32],
        address_modes: [3; 3],
        filters: [1; 2],
        flags: 0x73,
        anisotropy: 0,
        level_bias: 0.0,
        level_clamp: [0.0; 2],
        border: [0; 4],
        viewed: 0,
        view_format: 34,
        view_extent: [0; 3],
        view_parts: [0; 4],
    };
    let tensor = TensorMapEncode {
        data_type: 15,
        interleave: 2,
        swizzle: 6,
        promotion: 3,
        fill: 1,
        wide: 1,
        ..TENSOR_MAP
    };
    let part = ready.ask(next(), &GreenDescribe { green: 0 });
    let part = GreenDescribeReply::decode(&part).unwrap().number;
    ready.ask(next(), &GraphBegin { new: graph });
    refused! {
        FunctionSetCacheConfig { function, config: 4 };
        Occupancy { function, block: 32, flags: 2, shared: 0 };
        PoolCreate { new: handle(1), handle_types: 8, most: 0 };
        MemCreate { new: handle(1), bytes: 1 << 21, handle_types: 2 };
        GraphInstantiate { graph, flags: 4 };
        TensorMapEncode { data_type: 16, ..tensor };
        TensorMapEncode { interleave: 3, ..tensor };
        TensorMapEncode { swizzle: 7, ..tensor };
        TensorMapEncode { promotion: 4, ..tensor };
        TensorMapEncode { fill: 2, ..tensor };
        TensorMapEncode { wide: 2, ..tensor };
        TextureCreate { address_modes: [0, 4, 0], ..texture };
        TextureCreate { filters: [2, 0], ..texture };
        TextureCreate { filters: [0, 2], ..texture };
        TextureCreate { flags: 4, ..texture };
        TextureCreate { view_format: 35, ..texture };
        GreenSplit { part, flags: 4, least: 1, groups: 1 };
    }
    assert_eq!(ready.device.order(DEVICE), [""; 0]);
    ready.ask(next(), &tensor);
    ready.ask(next(), &texture);
    // The driver does not use the modes of linear memory.
    let linear = TextureCreate {
        source: TextureSource::Linear,
        address_modes: [9; 3],
        filters: [9; 2],
        ..texture
    };
    ready.ask(next(), &linear);
    // Rows have no third dimension.
    let rows = TextureCreate {
        address_modes: [0, 0, 9],
        ..texture
    };
    ready.ask(next(), &rows);
    let called = ready.device.order(DEVICE);
    assert_eq!(called[0], "encode_tensor_map");
    assert_eq!(called[1..], ["create_texture"; 3]);
    // A graph with refused flags is gone.
    assert_eq!(
        ready
            .try_ask(next(), &GraphInstantiate { graph, flags: 0 })
            .0,
        400
    );
}

#[test]
fn the_longest_linear_texture_is_the_devices_answer() {
    let ready = ready();
    let (format, channels) = (0x20, 4);
    let reply = ready.ask(3, &TextureLinearWidth { format, channels });
    let texels = TextureLinearWidthReply::decode(&reply).unwrap().texels;
    assert_eq!(texels, 0x20 << 32 | 4);
    // Formats of blocks and planes are the device's to answer.
    for (sequence, format) in (4..).zip([0x91, 0xb0, 0xb5]) {
        ready.ask(
            sequence,
            &TextureLinearWidth {
                format,
                channels: 3,
            },
        );
    }
    assert_eq!(ready.device.arrivals("texture_linear_width"), 4);
    let refused = [
        (0, 1),
        (4, 1),
        (0xb6, 1),
        (1 << 16, 1),
        (u32::MAX, 1),
        (0x20, 0),
        (0x20, 5),
        (0x20, u32::MAX),
    ];
    for (sequence, (format, channels)) in (7..).zip(refused) {
        let (result, _) = ready.try_ask(sequence, &TextureLinearWidth { format, channels });
        assert_eq!(
            result,
            wormhole_api::CuResult::INVALID_VALUE.0,
            "{format} {channels}"
        );
    }
    assert_eq!(ready.device.arrivals("texture_linear_width"), 4);
}

#[test]
fn the_cache_is_reset_on_the_device() {
    let ready = ready();
    ready.ask(3, &ResetPersistingL2 {});
    assert_eq!(ready.device.arrivals("reset_persisting_l2"), 1);
}

/// Attribute of a launch that records an event.
fn event(id: u32, handle: u64, at_start: u8) -> LaunchAttribute {
    let mut value = [0; 64];
    value[..8].copy_from_slice(&handle.to_le_bytes());
    value[12] = at_start;
    let reserved = 0;
    LaunchAttribute {
        id,
        reserved,
        value,
    }
}

#[test]
fn an_event_that_a_launch_records_lives_until_the_launch_is_made() {
    let ready = ready();
    let (served, device) = (&ready.served, &ready.device);
    let stream = handle(1);
    served.record(&StreamCreate {
        new: stream,
        flags: 0,
        priority: 0,
    });
    for (sequence, id) in [(3, PROGRAMMATIC), (4, LAUNCH_COMPLETION)] {
        let new = handle(1);
        served.record(&EventCreate { new, flags: 2 });
        let attributes = [event(id, new.to_wire(), 0)];
        let (launched, destroyed) = ["launch", "destroy_event"]
            .map(|call| device.arrivals(call))
            .into();
        device.hold("launch");
        served.ask(0, sequence, &launch_with(&attributes));
        device.wait_for("launch", launched + 1);
        served.record(&EventDestroy { event: new });
        // Served after the record.
        served.call(1, sequence, &StreamQuery { stream });
        assert_eq!(device.arrivals("destroy_event"), destroyed);
        device.let_go("launch");
        assert_eq!(served.answer(0, sequence).0, 0);
        device.wait_for("destroy_event", destroyed + 1);
    }
}

#[test]
fn no_time_between_shared_events_is_asked_of_the_device() {
    let ready = ready();
    let [shared, plain] = [1, 2].map(handle);
    ready.ask(3, &SharedEventCreate { new: shared });
    let (new, flags) = (plain, 0);
    ready.served.record(&EventCreate { new, flags });
    for (sequence, start, end) in [(4, shared, shared), (5, shared, plain), (6, plain, shared)] {
        let refused = ready.try_ask(sequence, &EventElapsed { start, end }).0;
        assert_eq!(refused, CuError::INVALID_HANDLE.0);
    }
    assert_eq!(ready.device.arrivals("event_elapsed"), 0);
    let (start, end) = (plain, plain);
    ready.try_ask(7, &EventElapsed { start, end });
    assert_eq!(ready.device.arrivals("event_elapsed"), 1);
}

#[test]
fn launches_record_the_events_that_they_name_if_these_are_for_it() {
    let ready = ready();
    // Without timing, with timing, and interprocess.
    for (number, flags) in [(1, 2), (2, 0)] {
        let new = handle(number);
        ready.served.record(&EventCreate { new, flags });
    }
    let new = handle(3);
    ready.ask(100, &SharedEventCreate { new });
    ready.served.record(&StreamCreate {
        new: handle(1),
        flags: 0,
        priority: 0,
    });
    let wire = |number: u32| handle::<EventKind>(number).to_wire();
    let mut sequence = 3;
    let mut launch = |attributes: &[LaunchAttribute]| {
        sequence += 1;
        ready.try_ask(sequence, &launch_with(attributes)).0
    };
    let arrivals = || {
        [
            "launch",
            "a programmatic event",
            "an event at the start of blocks",
            "an event of blocks that have begun",
        ]
        .map(|call| ready.device.arrivals(call))
    };
    assert_eq!(launch(&[event(PROGRAMMATIC, wire(1), 0)]), 0);
    assert_eq!(arrivals(), [1, 1, 0, 0]);
    assert_eq!(launch(&[event(PROGRAMMATIC, wire(1), 1)]), 0);
    assert_eq!(arrivals(), [2, 1, 1, 0]);
    let both = [
        event(LAUNCH_COMPLETION, wire(1), 0),
        event(8, 0, 0),
        event(PROGRAMMATIC, wire(1), 0),
    ];
    assert_eq!(launch(&both), 0);
    assert_eq!(arrivals(), [3, 2, 1, 1]);
    // Events for other uses, a null handle, a handle without an event, handles of other types, and
    // handles never issued.
    let stream = handle::<StreamKind>(1).to_wire();
    for id in [PROGRAMMATIC, LAUNCH_COMPLETION] {
        for (handle, code) in [
            (wire(2), 801),
            (wire(3), 801),
            (0, 400),
            (1, 400),
            (wire(9), 400),
            (stream, 400),
            (u64::MAX, 400),
            (0x7fff_0000_1000, 400),
        ] {
            assert_eq!(launch(&[event(id, handle, 0)]), code, "{id}: {handle:#x}");
        }
    }
    assert_eq!(
        arrivals(),
        [3, 2, 1, 1],
        "nothing of that reaches the device"
    );
}
