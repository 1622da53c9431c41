//! Lifetime of objects: those in use by jobs, streams and images outlive their handle and end with
//! the last user.

mod support;

use std::sync::Arc;
use std::time::Instant;

use support::recorder::Recorder;
use support::served::{Served, handle};
use wormhole_api::{
    Array, ArrayCreate, ArrayDestroy, ContextReset, CuResult, Decode, DevicePtr, GreenCreate,
    GreenCreateReply, GreenDescribe, GreenDescribeReply, GreenDestroy, GreenPartNumber, GreenSplit,
    GreenSplitReply, GreenStream, Items, Module, ModuleUnload, Stream, StreamDestroy, StreamQuery,
    TexRefBindSurface,
};
use wormhole_backend_tests::backend::PATIENCE;
use wormhole_backend_tests::messages::{bind_texture, module_load};
use wormhole_device::{CuError, Device};
use wormhole_worker::session::Event;

fn served() -> (Arc<Recorder>, Served) {
    let device = Arc::new(Recorder::new());
    let served = Served::start(&(Arc::clone(&device) as Arc<dyn Device>), 5);
    (device, served)
}

fn create(served: &Served, sequence: u64) -> u32 {
    let parts = Items::new(&[]);
    let payload = served.call(0, sequence, &GreenCreate { parts });
    GreenCreateReply::decode(&payload).unwrap().green
}

/// Returns the number of the part that a green context has.
fn part_of(served: &Served, sequence: u64, green: u32) -> u32 {
    let payload = served.call(0, sequence, &GreenDescribe { green });
    GreenDescribeReply::decode(&payload).unwrap().number
}

fn split(part: u32, groups: u32) -> GreenSplit {
    GreenSplit {
        part,
        flags: 0,
        least: 1,
        groups,
    }
}

/// Splits a part, and returns the numbers of the new ones.
fn groups_of(served: &Served, sequence: u64, part: u32, groups: u32) -> Vec<u32> {
    let payload = served.call(0, sequence, &split(part, groups));
    let reply = GreenSplitReply::decode(&payload).unwrap();
    reply.parts.iter().map(|part| part.number).collect()
}

fn stream_of(green: u32) -> GreenStream {
    GreenStream {
        new: handle(1),
        green,
        flags: 1,
        priority: 0,
    }
}

/// Waits until all earlier records and requests were served.
fn wait_until_served(served: &Served, sequence: u64) {
    let stream = wormhole_api::Handle::<Stream>::LEGACY;
    served.call(9, sequence, &StreamQuery { stream });
}

#[test]
fn a_green_context_lives_as_long_as_a_stream_is_made_of_it() {
    let (device, served) = served();
    let green = create(&served, 1);
    device.hold("green_stream");
    served.ask(1, 1, &stream_of(green));
    device.wait_for("green_stream", 1);
    served.call(2, 1, &GreenDestroy { green });
    assert_eq!(
        device.arrivals("destroy_green"),
        0,
        "a stream is being made"
    );
    device.let_go("green_stream");
    assert_eq!(served.answer(1, 1).0, 0);
    let stream = handle(1);
    served.call(1, 2, &StreamQuery { stream });
    assert_eq!(device.arrivals("destroy_green"), 0, "it has a stream");
    served.ask(1, 3, &stream_of(green));
    assert_eq!(served.answer(1, 3).0, CuResult::INVALID_CONTEXT.0);
    served.record(&StreamDestroy { stream });
    device.wait_for("destroy_green", 1);
    wait_until_served(&served, 1);
    assert_eq!(device.alive(), 1, "the legacy stream is left");
}

#[test]
fn a_green_context_lives_as_long_as_it_is_asked() {
    let (device, served) = served();
    let green = create(&served, 1);
    device.hold("multiprocessors");
    served.ask(1, 1, &GreenDescribe { green });
    device.wait_for("multiprocessors", 1);
    served.call(2, 1, &GreenDestroy { green });
    assert_eq!(device.arrivals("destroy_green"), 0, "it is being asked");
    device.let_go("multiprocessors");
    assert_eq!(served.answer(1, 1).0, 0);
    device.wait_for("destroy_green", 1);
}

#[test]
fn green_contexts_go_before_a_reset_and_their_streams_before_them() {
    let (device, served) = served();
    let (named, condemned) = (create(&served, 1), create(&served, 2));
    served.call(0, 3, &stream_of(condemned));
    served.call(0, 4, &GreenDestroy { green: condemned });
    device.hold("reset");
    served.ask(0, 5, &ContextReset {});
    device.wait_for("reset", 1);
    assert_eq!(device.arrivals("destroy_green"), 2);
    assert_eq!(
        device.alive(),
        1,
        "streams first, and then what they belong to"
    );
    device.let_go("reset");
    assert_eq!(served.answer(0, 5).0, 0);
    for (sequence, green) in [(6, named), (7, condemned)] {
        served.ask(0, sequence, &GreenDescribe { green });
        assert_eq!(served.answer(0, sequence).0, CuResult::INVALID_CONTEXT.0);
    }
    create(&served, 8);
    wait_until_served(&served, 1);
    assert_eq!(device.arrivals("destroy_green"), 2, "once each");
}

#[test]
fn numbers_of_green_contexts_and_parts_do_not_run_out() {
    let (_, served) = served();
    let mut sequence = 0;
    let mut next = || {
        sequence += 1;
        sequence
    };
    let kept = create(&served, next());
    let mut seen = Vec::new();
    for _ in 0..3 {
        let part = part_of(&served, next(), 0);
        let parts = groups_of(&served, next(), part, 2);
        assert_eq!(parts.len(), 2);
        let green = create(&served, next());
        assert_ne!(green, kept);
        served.call(0, next(), &GreenDestroy { green });
        seen.push((part, parts, green));
    }
    assert!(seen.iter().all(|these| *these == seen[0]), "{seen:?}");
}

#[test]
fn a_part_of_a_green_context_is_named_while_the_green_context_lives() {
    let (device, served) = served();
    let green = create(&served, 1);
    let part = part_of(&served, 2, green);
    let group = groups_of(&served, 3, part, 1)[0];
    let numbers = [part, group].map(|number| [GreenPartNumber { number }]);
    let create_of = |numbers: &[GreenPartNumber], sequence| {
        let parts = Items::new(numbers);
        served.ask(0, sequence, &GreenCreate { parts });
        served.answer(0, sequence).0
    };
    assert_eq!(create_of(&numbers[0], 4), 0);
    // A job that uses the part keeps its green context.
    device.hold("create_green");
    let parts = Items::new(&numbers[1]);
    served.ask(1, 1, &GreenCreate { parts });
    device.wait_for("create_green", 3);
    served.call(2, 1, &GreenDestroy { green });
    assert_eq!(device.arrivals("destroy_green"), 0);
    device.let_go("create_green");
    assert_eq!(served.answer(1, 1).0, 0);
    device.wait_for("destroy_green", 1);
    let gone = CuResult::INVALID_RESOURCE_CONFIGURATION.0;
    for (numbers, sequence) in numbers.iter().zip(5..) {
        assert_eq!(create_of(numbers, sequence), gone);
    }
    served.ask(0, 7, &split(part, 1));
    assert_eq!(served.answer(0, 7).0, gone);
    assert_eq!(device.arrivals("create_green"), 3);
}

#[test]
fn green_contexts_are_few_also_those_without_a_handle() {
    const MOST: u64 = 128;
    let device: Arc<dyn Device> = Arc::new(Recorder::new());
    let served = Served::start(&device, 5);
    let parts = || Items::new(&[]);
    let mut sequence = 0;
    let mut next = || {
        sequence += 1;
        sequence
    };
    for index in 1..=MOST {
        let green = create(&served, next());
        let new = handle(u32::try_from(index).unwrap());
        let stream = GreenStream {
            new,
            ..stream_of(green)
        };
        served.call(0, next(), &stream);
        served.call(0, next(), &GreenDestroy { green });
    }
    let more = || GreenCreate { parts: parts() };
    let at = next();
    served.ask(0, at, &more());
    assert_eq!(served.answer(0, at).0, CuResult::OUT_OF_MEMORY.0);
    let stream = handle(7);
    served.call(0, next(), &StreamDestroy { stream });
    // The registrar destroys the green context of the stream.
    let end = Instant::now() + PATIENCE;
    loop {
        let at = next();
        served.ask(0, at, &more());
        match served.answer(0, at).0 {
            0 => break,
            result => assert_eq!(result, CuResult::OUT_OF_MEMORY.0),
        }
        assert!(Instant::now() < end, "the room stays taken");
    }
}

#[test]
fn parts_and_green_contexts_are_of_their_device_alone() {
    let members = (0..2).map(|_| Arc::new(Recorder::new()) as Arc<dyn Device>);
    let served = Served::start_on(members.collect(), 5);
    let (result, payload) = served.on(0, 1, &GreenDescribe { green: 0 });
    assert_eq!(result, 0);
    let part = GreenDescribeReply::decode(&payload).unwrap().number;
    let numbers = [GreenPartNumber { number: part }];
    let parts = || Items::new(&numbers);
    let (result, payload) = served.on(0, 2, &GreenCreate { parts: parts() });
    assert_eq!(result, 0);
    let green = GreenCreateReply::decode(&payload).unwrap().green;
    let split = GreenSplit {
        part,
        flags: 0,
        least: 1,
        groups: 1,
    };
    let refused = [
        served.on(1, 3, &split),
        served.on(1, 4, &GreenCreate { parts: parts() }),
        served.on(1, 5, &GreenDescribe { green }),
        served.on(1, 6, &stream_of(green)),
        served.on(1, 7, &GreenDestroy { green }),
    ];
    for (result, _) in refused {
        assert_eq!(result, CuError::INVALID_DEVICE.0);
    }
    assert_eq!(served.on(0, 8, &split).0, 0);
    assert_eq!(served.on(0, 9, &GreenDestroy { green }).0, 0);
    // The parts of the two devices are equal, but have different numbers.
    let (_, payload) = served.on(1, 10, &GreenDescribe { green: 0 });
    assert_ne!(GreenDescribeReply::decode(&payload).unwrap().number, part);
}

const MODULE: u32 = 1;

#[test]
fn what_a_reference_names_lives_until_it_names_something_else() {
    let (device, served) = served();
    let image = Box::new([0_u8; 64]);
    let address = image.as_ptr().expose_provenance() as u64;
    let bytes = image.len() as u64;
    served.notifier.send(Event::ExtentAdded { address, bytes });
    let module: wormhole_api::Handle<Module> = handle(MODULE);
    let load = module_load(module, DevicePtr(address), bytes);
    served.call(0, 1, &load);
    let made: Vec<u64> = (1..=4)
        .map(|index| {
            let create = ArrayCreate {
                new: handle(index),
                extent: [8, 8, 0],
                format: 1,
                channels: 1,
                flags: wormhole_api::array::SURFACE_LDST,
            };
            served.call(0, 1 + u64::from(index), &create);
            device.last_made()
        })
        .collect();
    let alive = || -> Vec<bool> { made.iter().map(|array| device.is_alive(*array)).collect() };
    let bind_surface = |index| TexRefBindSurface {
        module,
        array: handle(index),
        name: b"surface",
    };
    served.call(0, 10, &bind_texture(module, Some(handle(1)), b"texture"));
    served.call(0, 11, &bind_surface(2));
    for index in [1, 2] {
        let array: wormhole_api::Handle<Array> = handle(index);
        served.call(0, 11 + u64::from(index), &ArrayDestroy { array });
    }
    assert_eq!(alive(), [true; 4], "both are bound");
    served.call(0, 14, &bind_texture(module, Some(handle(3)), b"texture"));
    assert_eq!(alive(), [false, true, true, true]);
    served.call(0, 15, &bind_surface(4));
    assert_eq!(alive(), [false, false, true, true]);
    for index in [3, 4] {
        let array: wormhole_api::Handle<Array> = handle(index);
        served.call(0, 13 + u64::from(index), &ArrayDestroy { array });
    }
    assert_eq!(alive(), [false, false, true, true]);
    served.call(0, 18, &bind_texture(module, None, b"texture"));
    assert_eq!(alive(), [false, false, false, true]);
    served.call(0, 19, &ModuleUnload { module });
    assert_eq!(alive(), [false; 4], "the module held the last");
}
