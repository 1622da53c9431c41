//! A session from the hello to the report, over a real supervisor and a real worker.

use std::time::Instant;

use wormhole_api::{
    ContextReset, DeviceDescribe, DeviceDescribeReply, DevicePtr, Encode as _, Fence, FenceWrite,
    Handle, Items, LaunchKernel, Link, LinkInput, LinkReply, MemAlloc, MemAllocReply, MemCopy,
    MemFree, MemGetInfo, MemSet, MemWrite, Message as _, ModuleGetFunction, PartAlloc, PartFree,
    SlabAlloc, SlabAllocReply, SlabFree, Stream, StreamCreate, StreamDestroy, StreamQuery,
    Synchronize,
};
use wormhole_backend_tests::backend::{Backend, PATIENCE};
use wormhole_backend_tests::guest::{Guest, Reply};
use wormhole_backend_tests::messages::module_load;
use wormhole_ring::control::Message;
use wormhole_ring::ring::{RecordHead, Sleep};
use wormhole_ring::slot::SlotIndex;

/// Allocates, writes, copies back through the arena and checks.
fn round_trip(guest: &mut Guest, bytes: &[u8]) {
    let length = bytes.len() as u64;
    let answer = guest.call(&MemAlloc { bytes: length });
    let device = answer.reply::<MemAllocReply>().address;
    guest.arena[0].write(0, bytes);
    let arena = DevicePtr(guest.arena[0].address);
    let back = DevicePtr(guest.arena[0].address + length);
    guest.record(&MemCopy {
        destination: device,
        source: arena,
        bytes: length,
        stream: Handle::LEGACY,
    });
    guest.record(&MemCopy {
        destination: back,
        source: device,
        bytes: length,
        stream: Handle::LEGACY,
    });
    guest.record(&FenceWrite {
        stream: Handle::LEGACY,
        fence: Fence::new(3).unwrap(),
        value: 1,
    });
    guest.wait_for_fence(3, 1);
    assert_eq!(guest.arena[0].read(bytes.len(), bytes.len()), bytes);
    assert_eq!(guest.call(&MemFree { address: device }).status, 0);
}

#[test]
fn a_link_reads_and_writes_only_what_the_session_has() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let bytes = SPIN.len() as u64;
    guest.arena[0].write(0, SPIN.as_bytes());
    let inputs = DevicePtr(guest.arena[0].address);
    let image = DevicePtr(guest.arena[0].address + bytes);
    let link = |image, room, of_second| {
        let part = |bytes| LinkInput {
            kind: 1,
            name: 0,
            bytes,
        };
        let parts = [part(bytes), part(of_second)];
        let parts = if of_second == 0 { &parts[..1] } else { &parts };
        (inputs, image, room, parts.to_vec())
    };
    let mut send = |(inputs, image, room, parts): (DevicePtr, DevicePtr, u64, Vec<LinkInput>)| {
        let answer = guest.call(&Link {
            complete: 1,
            inputs,
            image,
            room,
            log: DevicePtr(0),
            log_bytes: 0,
            parts: Items::new(&parts),
            options: Items::new(&[]),
        });
        let linked = (answer.status == 0).then(|| answer.reply::<LinkReply>().bytes);
        let after = guest.arena[0].read(SPIN.len(), SPIN.len() + 1);
        (answer.status, linked, after)
    };

    let untouched = vec![0; SPIN.len() + 1];
    let too_small = send(link(image, bytes, 0));
    assert_eq!(too_small, (0, Some(bytes + 1), untouched.clone()));
    for (target, room, of_second) in [
        (image, u64::MAX, 0),
        (DevicePtr(8), bytes, 0),
        (image, bytes, u64::MAX),
        (image, bytes, 1 << 40),
    ] {
        let refused = send(link(target, room, of_second));
        assert_eq!(refused, (1, None, untouched.clone()));
    }
    let linked = send(link(image, bytes + 1, 0));
    let text = [SPIN.as_bytes(), &[0]].concat();
    assert_eq!(linked, (0, Some(bytes + 1), text));
}

#[test]
fn a_session_is_served_from_hello_to_report() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let described = guest.call(&DeviceDescribe { ordinal: 0 });
    let description = described.reply::<DeviceDescribeReply<'_>>();
    assert_eq!(description.devices, 1);
    assert!(!description.name.is_empty());
    assert_eq!(guest.call(&DeviceDescribe { ordinal: 1 }).status, 101);
    let bytes: Vec<u8> = (0..200_000u32).map(|at| (at * 7 % 251) as u8).collect();
    round_trip(&mut guest, &bytes);
    assert_eq!(guest.call(&Synchronize { stream: None }).status, 0);
    drop(guest);
    let report = backend.report();
    assert_eq!(report.messages["MemCopy"], 2);
    assert_eq!(report.messages["MemAlloc"], 1);
    assert_eq!(report.records, 3);
    assert_eq!(report.requests, 5);
    assert_eq!(report.fences, 1);
    assert_eq!(report.bytes_in, 200_000);
    assert_eq!(report.bytes_out, 200_000);
    assert_eq!(report.end, "the guest process ended");
    assert!(backend.finish().success());
}

#[test]
fn forged_and_stale_handles_are_invalid_handles() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let never: Handle<Stream> = guest.mint();
    let failing = guest.call(&FenceWrite {
        stream: never,
        fence: Fence::new(0).unwrap(),
        value: 1,
    });
    assert_eq!(failing.status, 400);
    let stream: Handle<Stream> = guest.mint();
    let create = StreamCreate {
        new: stream,
        flags: 1,
        priority: 0,
    };
    assert_eq!(guest.call(&create).status, 0);
    assert_eq!(guest.call(&create).status, 400, "minted twice");
    assert_eq!(
        guest
            .call(&Synchronize {
                stream: Some(stream)
            })
            .status,
        0
    );
    assert_eq!(guest.call(&StreamDestroy { stream }).status, 0);
    assert_eq!(
        guest
            .call(&Synchronize {
                stream: Some(stream)
            })
            .status,
        400
    );
    assert_eq!(guest.call(&StreamDestroy { stream }).status, 400);
    // A pattern that no handle has.
    let answer = guest.call_raw(10, &0x1234_5678u64.to_le_bytes()).unwrap();
    assert_eq!(answer.status, 400);
}

#[test]
fn addresses_outside_what_the_session_holds_are_invalid_values() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let answer = guest.call(&MemAlloc { bytes: 4096 });
    let device = answer.reply::<MemAllocReply>().address.0;
    let (arena, arena_bytes) = (guest.arena[0].address, guest.arena[0].bytes());
    let session = guest.grant.window_base + u64::from(guest.grant.session_segment) * (2 << 20);
    let copy = |destination: u64, source: u64, bytes: u64| MemCopy {
        destination: DevicePtr(destination),
        source: DevicePtr(source),
        bytes,
        stream: Handle::LEGACY,
    };
    for wrong in [
        copy(device, arena, 4097),
        copy(device + 1, arena, 4096),
        copy(device, arena + arena_bytes - 1, 2),
        copy(device, arena - 1, 1),
        copy(arena, session, 8),
        copy(session, arena, 8),
        copy(device, guest.grant.window_base, 8),
        copy(0, arena, 8),
        copy(device, u64::MAX - 3, 8),
        copy(device, arena, u64::MAX),
    ] {
        assert_eq!(guest.call(&wrong).status, 1, "{wrong:?}");
    }
    assert_eq!(guest.call(&copy(device, arena, 4096)).status, 0);
    let fill = |destination, pitch, width, height| MemSet {
        destination: DevicePtr(destination),
        pitch,
        width,
        height,
        value: 7,
        element: wormhole_api::Element::Word,
        stream: Handle::LEGACY,
    };
    assert_eq!(guest.call(&fill(device, 64, 16, 64)).status, 0);
    assert_eq!(guest.call(&fill(device, 64, 16, 65)).status, 1);
    assert_eq!(guest.call(&fill(device, u64::MAX, 1, u64::MAX)).status, 1);
    assert_eq!(guest.call(&fill(device, 4, 1 << 62, 4)).status, 1);
    let write = guest.call(&MemWrite {
        destination: DevicePtr(device + 4095),
        stream: Handle::LEGACY,
        data: &[1, 2],
    });
    assert_eq!(write.status, 1);
    let write = guest.call(&MemWrite {
        destination: DevicePtr(arena),
        stream: Handle::LEGACY,
        data: &[1, 2],
    });
    assert_eq!(write.status, 801, "from host to host");
    let free = |address| MemFree {
        address: DevicePtr(address),
    };
    assert_eq!(guest.call(&free(device + 256)).status, 1);
    assert_eq!(guest.call(&free(device)).status, 0);
    assert_eq!(guest.call(&free(device)).status, 1);
    assert_eq!(guest.call(&copy(device, arena, 16)).status, 1, "freed");
}

#[test]
fn a_malformed_record_ends_its_session_and_no_other() {
    let mut backend = Backend::with_window(64);
    let mut neighbour = backend.connect().open();
    let mut guest = backend.connect().open();
    // A body that is too short for its message.
    guest.start_raw(0, 6, &[&[0; 3]]);
    let cause = guest.wait_for_status();
    assert_eq!((cause.result, cause.cause), (999, 4));
    // The worker logs the cause, and ends when the guest does.
    backend.wait_for_log("MemCopy needs");
    drop(guest);
    let report = backend.report();
    assert!(report.end.contains("corrupted"), "{}", report.end);
    round_trip(&mut neighbour, &[42; 5000]);
}

#[test]
fn a_record_that_fails_unheard_is_sticky() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let stream: Handle<Stream> = guest.mint();
    guest.record(&StreamDestroy { stream });
    let cause = guest.wait_for_status();
    assert_eq!((cause.result, cause.cause), (400, 1));
}

#[test]
fn only_parts_of_slabs_may_be_named_and_only_in_a_slab() {
    const SLAB: u64 = 2 << 20;
    let mut backend = Backend::with_window(256);
    let slab_of = |guest: &mut Guest| {
        let answer = guest.call(&SlabAlloc { bytes: SLAB });
        answer.reply::<SlabAllocReply>().address.0
    };
    let mut guest = backend.connect().open();
    let slab = slab_of(&mut guest);
    let arena = guest.arena[0].address;
    let copy = |destination, bytes| MemCopy {
        destination: DevicePtr(destination),
        source: DevicePtr(arena),
        bytes,
        stream: Handle::LEGACY,
    };
    assert_eq!(guest.call(&copy(slab, 1)).status, 1, "no part");
    guest.record(&part_of(slab, 512));
    guest.record(&part_of(slab + 1024, SLAB - 1024));
    assert_eq!(guest.call(&copy(slab, 512)).status, 0);
    assert_eq!(guest.call(&copy(slab + SLAB - 1, 1)).status, 0);
    assert_eq!(guest.call(&copy(slab, 513)).status, 1, "past a part");
    let address = DevicePtr(slab);
    assert_eq!(guest.call(&MemFree { address }).status, 1, "a part");
    guest.record(&PartFree { address });
    assert_eq!(guest.call(&copy(slab, 1)).status, 1, "freed");
    assert_eq!(guest.call(&SlabFree { address }).status, 0);
    assert_eq!(guest.call(&copy(slab + 1024, 1)).status, 1, "the slab is");
    assert_eq!(guest.call(&SlabFree { address }).status, 1);
    // A record that no honest guest writes ends its session, and nothing else.
    let wrong: [Wrong; 8] = [
        |guest, slab, _| guest.record(&part_of(slab, SLAB + 1)),
        |guest, slab, _| guest.record(&part_of(slab, 0)),
        |guest, slab, _| guest.record(&part_of(slab + 512, u64::MAX)),
        |guest, slab, _| guest.record(&part_of(slab + SLAB, 512)),
        |guest, slab, _| {
            guest.record(&part_of(slab, 1024));
            guest.record(&part_of(slab + 512, 1024));
        },
        |guest, _, whole| guest.record(&part_of(whole, 512)),
        |guest, slab, _| {
            let address = DevicePtr(slab);
            guest.record(&PartFree { address });
        },
        |guest, _, whole| {
            let address = DevicePtr(whole);
            guest.record(&PartFree { address });
        },
    ];
    for (index, wrong) in wrong.into_iter().enumerate() {
        let mut hostile = backend.connect().open();
        let slab = slab_of(&mut hostile);
        let whole = hostile.call(&MemAlloc { bytes: SLAB });
        let whole = whole.reply::<MemAllocReply>().address.0;
        wrong(&mut hostile, slab, whole);
        let cause = hostile.wait_for_status();
        assert_eq!((cause.result, cause.cause), (1, 1), "{index}");
    }
    let slab = slab_of(&mut guest);
    guest.record(&part_of(slab, 1));
    assert_eq!(guest.call(&copy(slab, 1)).status, 0, "it goes on");
}

/// Writes wrong records, given the addresses of a slab and of another allocation.
type Wrong = fn(&mut Guest, u64, u64);

fn part_of(address: u64, bytes: u64) -> PartAlloc {
    PartAlloc {
        address: DevicePtr(address),
        bytes,
    }
}

#[test]
fn an_idle_session_parks_and_the_doorbell_wakes_it() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    for _ in 0..20 {
        wormhole_backend_tests::backend::wait_until(
            || guest.producer.consumer_parked(),
            || "the executor to park".to_owned(),
        );
        assert_eq!(guest.call(&MemGetInfo {}).status, 0);
    }
    drop(guest);
    assert!(backend.report().parks >= 20);
}

#[test]
fn a_guest_on_the_same_system_wakes_an_idle_session_by_a_word() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    for _ in 0..20 {
        wormhole_backend_tests::backend::wait_until(
            || guest.producer.is_consumer_parked(),
            || "the executor to park".to_owned(),
        );
        let sequence = guest.next_sequence(0);
        let head = RecordHead::request(MemGetInfo::ID, SlotIndex::new(0).unwrap(), sequence);
        let pushed = MemGetInfo {}.encode(|parts| guest.producer.push(head, parts));
        pushed.unwrap().unwrap();
        match guest.producer.must_ring() {
            Some(sleep) => assert_eq!(sleep, Sleep::OnWord),
            None => unreachable!("no other thread rings, and the executor is parked"),
        }
        guest.producer.wake_consumer();
        assert_eq!(guest.wait(0, sequence).unwrap().status, 0);
    }
}

#[test]
fn arena_is_granted_used_returned_and_scrubbed() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let run = match guest.request_arena(7, 4) {
        Reply::ArenaGrant(run) => run,
        other => panic!("{other:?}"),
    };
    assert_eq!((run.id, run.count), (7, 4));
    guest.map_arena(run);
    let bytes = vec![9u8; 8 << 20];
    guest.arena[1].write(0, &bytes);
    let memory = guest.memory();
    let held = memory.held();
    assert!(held >= 8 << 20);
    let extent = guest.arena.remove(1);
    let device = guest.call(&MemAlloc { bytes: 1 << 20 });
    let device = device.reply::<MemAllocReply>().address;
    let copy = MemCopy {
        destination: device,
        source: DevicePtr(extent.address),
        bytes: 1 << 20,
        stream: Handle::LEGACY,
    };
    assert_eq!(guest.call(&copy).status, 0);
    assert_eq!(guest.call(&Synchronize { stream: None }).status, 0);
    guest
        .control
        .send(&Message::ArenaReturn(extent.run))
        .unwrap();
    wormhole_backend_tests::backend::wait_until(
        || memory.held() < held - (7 << 20),
        || "the returned arena to be scrubbed".to_owned(),
    );
    assert_eq!(
        guest.call(&copy).status,
        1,
        "returned arena may not be named"
    );
    // The segments can be granted again. Until the supervisor has the report that they are
    // scrubbed, it grants others.
    wormhole_backend_tests::backend::wait_until(
        || match guest.request_arena(8, 4) {
            Reply::ArenaGrant(again) if again.first == run.first => true,
            Reply::ArenaGrant(other) => {
                guest.control.send(&Message::ArenaReturn(other)).unwrap();
                false
            }
            // All other segments are being scrubbed.
            Reply::ArenaDenied(..) => false,
            other => panic!("{other:?}"),
        },
        || "the segments to be granted again".to_owned(),
    );
}

/// Spins until the word at `flag` is not 0.
const SPIN: &str = "\
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 flag)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [flag];
again:
    ld.volatile.global.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra again;
    ret;
}
";

#[test]
fn arena_that_a_busy_session_returns_goes_to_another_when_the_device_lets_go() {
    const SEGMENTS: u32 = 36;
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let mut other = backend.connect().open();
    let run = match guest.request_arena(1, SEGMENTS) {
        Reply::ArenaGrant(run) => run,
        denied => panic!("{denied:?}"),
    };
    // A kernel that runs until the flag is set.
    guest.arena[0].write(0, SPIN.as_bytes());
    let (module, function) = (guest.mint(), guest.mint());
    let load = module_load(module, DevicePtr(guest.arena[0].address), SPIN.len() as u64);
    assert_eq!(guest.call(&load).status, 0);
    let name = b"spin";
    let find = ModuleGetFunction {
        module,
        new: function,
        name,
    };
    assert_eq!(guest.call(&find).status, 0);
    guest.arena[0].write(4096, &[0; 8]);
    let flag = guest.arena[0].address + 4096;
    let launch = LaunchKernel {
        function,
        stream: Handle::LEGACY,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: Items::new(&[]),
        parameters: &flag.to_le_bytes(),
    };
    assert_eq!(guest.call(&launch).status, 0);
    guest.control.send(&Message::ArenaReturn(run)).unwrap();
    // The device still uses the memory, but the session is served.
    for _ in 0..3 {
        wormhole_backend_tests::backend::wait_until(
            || guest.producer.consumer_parked(),
            || "the executor to park".to_owned(),
        );
        let legacy = StreamQuery {
            stream: Handle::LEGACY,
        };
        assert_eq!(guest.call(&legacy).status, 600, "the kernel runs");
    }
    assert!(matches!(
        other.request_arena(1, SEGMENTS),
        Reply::ArenaDenied(1, _)
    ));
    guest.arena[0].write(4096, &[1; 8]);
    let end = Instant::now() + PATIENCE;
    loop {
        match other.request_arena(2, SEGMENTS) {
            Reply::ArenaGrant(again) => break assert_eq!(again.first, run.first),
            Reply::ArenaDenied(..) => assert!(Instant::now() < end, "it does not come back"),
            reply => panic!("{reply:?}"),
        }
    }
    assert_eq!(guest.call(&Synchronize { stream: None }).status, 0);
}

#[test]
fn a_reset_waits_for_jobs_takes_every_object_and_keeps_the_arena() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let stream: Handle<Stream> = guest.mint();
    guest.record(&StreamCreate {
        new: stream,
        flags: 1,
        priority: 0,
    });
    let answer = guest.call(&MemAlloc { bytes: 4096 });
    let device = answer.reply::<MemAllocReply>().address;
    let waiting = guest.start(1, &Synchronize { stream: None });
    assert_eq!(guest.call(&ContextReset {}).status, 0);
    assert_eq!(guest.wait(1, waiting).unwrap().status, 0);
    let old = Synchronize {
        stream: Some(stream),
    };
    assert_eq!(guest.call(&old).status, 400);
    assert_eq!(guest.call(&MemFree { address: device }).status, 1);
    // The arena is registered again: copies and fences work as before.
    round_trip(&mut guest, &[77; 10_000]);
}
