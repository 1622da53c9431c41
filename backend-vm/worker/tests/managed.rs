//! Managed memory that changes sides. A whole worker runs in this process, on the CPU device; the test plays its supervisor
//! and its guest.

mod support;

use std::sync::Arc;

use support::recorder::Recorder;
use support::whole;
use wormhole_api::{
    ContextReset, CuResult, DevicePtr, Element, Handle, ManagedClose, ManagedFetch, ManagedIdle,
    ManagedMirror, ManagedOpen, ManagedPlace, ManagedPush, ManagedRefresh, ManagedRefreshReply,
    MemCopy, MemGetInfo, MemGetInfoReply, MemSet, MemoryOperation, StreamMemory, Synchronize,
};
use wormhole_backend_tests::guest::Guest;
use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::Device;
use wormhole_ring::control::{ArenaRun, Message};
use wormhole_ring::layout::{MANAGED, MANAGED_ALIGN, SEGMENT_BYTES, WINDOW_BASE};

const SEGMENT: u64 = SEGMENT_BYTES as u64;
/// Segments of one test: the session's, and the arena.
const SHARE: u32 = 5;
const ARENA: u32 = 4;
const WINDOW: u64 = 14 * SHARE as u64 * SEGMENT;
const MEMORY: u64 = 64 << 20;

struct Served {
    guest: Guest,
    /// Address of the managed memory, and of its home.
    address: u64,
    home: u64,
}

/// Starts a worker for test `number`, with managed memory of two segments.
fn serve(number: u32) -> Served {
    let options = Options {
        memory: Some(MEMORY),
        ..Options::default()
    };
    let device = CpuDevice::open_several(&options, 1).unwrap();
    let devices = device
        .into_iter()
        .map(|device| Arc::new(device) as Arc<dyn Device>)
        .collect();
    serve_on(devices, number)
}

fn serve_on(devices: Vec<Arc<dyn Device>>, number: u32) -> Served {
    let first = number * SHARE;
    let mut served = Served {
        guest: whole::serve(devices, first, ARENA, WINDOW),
        address: MANAGED.0 + u64::from(number) * 4 * MANAGED_ALIGN,
        home: WINDOW_BASE + u64::from(first + 1) * SEGMENT,
    };
    assert_eq!(served.open(served.address, served.home, 2 * SEGMENT), 0);
    served
}

impl Served {
    fn open(&mut self, address: u64, home: u64, bytes: u64) -> u32 {
        let message = ManagedOpen {
            address: DevicePtr(address),
            home: DevicePtr(home),
            bytes,
        };
        self.guest.call(&message).status
    }

    fn place(&mut self) -> u32 {
        let address = DevicePtr(self.address);
        self.guest.call(&ManagedPlace { address }).status
    }

    fn close(&mut self) -> u32 {
        let address = DevicePtr(self.address);
        self.guest.call(&ManagedClose { address }).status
    }

    fn fetch(&mut self, offset: u64, bytes: u64, concurrent: bool) -> u32 {
        let message = ManagedFetch {
            address: DevicePtr(self.address.wrapping_add(offset)),
            bytes,
            concurrent: concurrent.into(),
        };
        self.guest.call(&message).status
    }

    fn push(&mut self, offset: u64, bytes: u64) -> u32 {
        let message = ManagedPush {
            address: DevicePtr(self.address.wrapping_add(offset)),
            bytes,
        };
        self.guest.call(&message).status
    }

    fn mirror(&mut self, wanted: bool) -> u32 {
        let message = ManagedMirror {
            address: DevicePtr(self.address),
            wanted: wanted.into(),
        };
        self.guest.call(&message).status
    }

    /// Asks for a refresh, and returns the error or whether the home is current.
    fn refresh(&mut self, offset: u64, bytes: u64, most: u64) -> Result<bool, CuResult> {
        let message = ManagedRefresh {
            address: DevicePtr(self.address.wrapping_add(offset)),
            bytes,
            most,
        };
        let answer = self.guest.call(&message);
        match answer.status {
            0 => Ok(answer.reply::<ManagedRefreshReply>().current != 0),
            error => Err(CuResult(error)),
        }
    }

    /// Has the device fill bytes of the managed memory.
    fn fill(&mut self, offset: u64, value: u32, width: u64) {
        self.guest.record(&MemSet {
            destination: DevicePtr(self.address + offset),
            pitch: 0,
            width,
            height: 1,
            value,
            element: Element::Byte,
            stream: Handle::LEGACY,
        });
        self.synchronize();
    }

    fn synchronize(&mut self) {
        assert_eq!(self.guest.call(&Synchronize { stream: None }).status, 0);
    }

    /// Returns what the device finds in the managed memory.
    fn on_device(&mut self, offset: u64, bytes: u64) -> Vec<u8> {
        let back = 3 * SEGMENT;
        self.guest.record(&MemCopy {
            destination: DevicePtr(self.home + back),
            source: DevicePtr(self.address + offset),
            bytes,
            stream: Handle::LEGACY,
        });
        self.synchronize();
        self.guest.arena[0].read(to_usize(back), to_usize(bytes))
    }

    fn at_home(&self, offset: u64, bytes: u64) -> Vec<u8> {
        self.guest.arena[0].read(to_usize(offset), to_usize(bytes))
    }

    fn write_home(&self, offset: u64, bytes: &[u8]) {
        self.guest.arena[0].write(to_usize(offset), bytes);
    }

    fn free_memory(&mut self) -> u64 {
        let answer = self.guest.call(&MemGetInfo {});
        answer.reply::<MemGetInfoReply>().free
    }

    /// Has the legacy stream wait for a word of the arena, which holds 0.
    fn occupy(&mut self, value: u64) {
        let word = self.home + 3 * SEGMENT + 8192;
        let operation = MemoryOperation {
            kind: 4,
            flags: 0,
            address: word,
            value,
        };
        self.guest.record(&StreamMemory {
            stream: Handle::LEGACY,
            operations: wormhole_api::Items::new(&[operation]),
        });
    }

    fn release(&self, value: u64) {
        self.write_home(3 * SEGMENT + 8192, &value.to_le_bytes());
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap()
}

#[test]
fn bytes_go_to_the_device_and_back() {
    let mut served = serve(0);
    let before = served.free_memory();
    served.write_home(0, &[1, 2, 3]);
    served.fill(3, 4, 1);
    assert_eq!(served.at_home(0, 4), [1, 2, 3, 4], "the device is at home");
    assert_eq!(served.place(), 0);
    assert_eq!(served.place(), CuResult::INVALID_VALUE.0, "once");
    assert_eq!(served.free_memory(), before - 2 * SEGMENT);
    served.fill(1, 9, 1);
    served.fill(SEGMENT, 8, 1);
    assert_eq!(served.on_device(0, 4), [1, 9, 3, 4]);
    assert_eq!(served.at_home(0, 4), [1, 2, 3, 4], "the home is apart");
    assert_eq!(served.fetch(0, SEGMENT, false), 0);
    assert_eq!(served.at_home(0, 4), [1, 9, 3, 4]);
    assert_eq!(served.at_home(SEGMENT, 1), [0], "another part");
    served.write_home(2, &[7]);
    served.write_home(SEGMENT, &[6]);
    assert_eq!(served.push(0, SEGMENT), 0);
    assert_eq!(served.on_device(0, 4), [1, 9, 7, 4]);
    assert_eq!(served.on_device(SEGMENT, 1), [8], "another part");
    assert_eq!(served.close(), 0);
    assert_eq!(served.free_memory(), before);
    assert_eq!(served.close(), CuResult::INVALID_VALUE.0);
    assert_eq!(served.open(served.address, served.home, 2 * SEGMENT), 0);
    served.fill(1, 5, 1);
    assert_eq!(served.at_home(0, 3), [1, 5, 7], "the home again");
}

#[test]
fn a_concurrent_fetch_lets_a_push_change_only_what_the_guest_changed() {
    let mut served = serve(1);
    assert_eq!(served.place(), 0);
    served.fill(0, 1, 200);
    assert_eq!(served.fetch(0, SEGMENT, true), 0);
    served.write_home(3, &[5, 5]);
    served.write_home(130, &[6]);
    served.fill(0, 2, 3);
    served.fill(5, 2, 100);
    assert_eq!(served.push(0, SEGMENT), 0);
    let mut wanted = vec![1; 200];
    wanted[..105].fill(2);
    wanted[3..5].fill(5);
    wanted[130] = 6;
    assert_eq!(served.on_device(0, 200), wanted);
    // Without another such fetch the whole part goes.
    served.write_home(0, &[9; 200]);
    assert_eq!(served.push(0, SEGMENT), 0);
    assert_eq!(served.on_device(0, 200), [9; 200]);
    assert_eq!(
        served.fetch(0, 2 * SEGMENT, true),
        CuResult::OUT_OF_MEMORY.0,
        "a twin is one part"
    );
}

#[test]
fn a_busy_device_keeps_memory_where_it_is() {
    let mut served = serve(2);
    served.occupy(5);
    assert_eq!(
        served.guest.call(&ManagedIdle {}).status,
        CuResult::NOT_READY.0
    );
    assert_eq!(served.place(), CuResult::NOT_READY.0);
    served.release(5);
    served.synchronize();
    assert_eq!(served.guest.call(&ManagedIdle {}).status, 0);
    assert_eq!(served.place(), 0);
    served.occupy(6);
    assert_eq!(served.fetch(0, SEGMENT, false), CuResult::NOT_READY.0);
    assert_eq!(served.fetch(0, SEGMENT, true), 0, "as the guest wants it");
    assert_eq!(served.push(0, SEGMENT), 0, "past the work");
    served.release(6);
    served.synchronize();
    assert_eq!(served.fetch(0, SEGMENT, false), 0);
}

#[test]
fn memory_goes_once_no_device_has_work_that_may_reach_it() {
    let devices = [0, 1].map(|_| Arc::new(Recorder::new()));
    let [owner, other] = &devices;
    let of_worker = devices.iter().map(|device| Arc::clone(device) as _);
    let mut served = serve_on(of_worker.collect(), 8);
    assert_eq!(served.place(), 0);
    other.hold("synchronize");
    let address = DevicePtr(served.address);
    let closing = served.guest.start(1, &ManagedClose { address });
    other.wait_for("synchronize", 1);
    assert_eq!(owner.arrivals("displace"), 0);
    other.let_go("synchronize");
    assert_eq!(served.guest.wait(1, closing).unwrap().status, 0);
    assert_eq!(owner.arrivals("displace"), 1);
}

#[test]
fn work_of_a_destroyed_stream_keeps_the_device_busy() {
    let mut served = serve(3);
    assert_eq!(served.guest.call(&ManagedIdle {}).status, 0);
    let stream = served.guest.mint();
    served.guest.record(&wormhole_api::StreamCreate {
        new: stream,
        flags: 1,
        priority: 0,
    });
    let word = served.home + 3 * SEGMENT + 8192;
    let operation = MemoryOperation {
        kind: 4,
        flags: 0,
        address: word,
        value: 7,
    };
    served.guest.record(&StreamMemory {
        stream,
        operations: wormhole_api::Items::new(&[operation]),
    });
    served.guest.record(&wormhole_api::StreamDestroy { stream });
    assert_eq!(
        served.guest.call(&ManagedIdle {}).status,
        CuResult::NOT_READY.0
    );
    served.release(7);
    while served.guest.call(&ManagedIdle {}).status == CuResult::NOT_READY.0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_guest_names_no_memory_but_its_own() {
    let mut served = serve(4);
    let (address, home) = (served.address, served.home);
    let other = address + 2 * MANAGED_ALIGN;
    for (at, of, bytes) in [
        (other, home, SEGMENT - 4096),
        (other, home + 4096, SEGMENT),
        (other + 4096, home, SEGMENT),
        (other, home, 0),
        (other, home, u64::MAX - SEGMENT + 1),
        (other, home + 3 * SEGMENT, 2 * SEGMENT),
        (other, home - SEGMENT, SEGMENT),
        (MANAGED.0 - SEGMENT, home, SEGMENT),
        (MANAGED.0 + MANAGED.1 - SEGMENT, home, 2 * SEGMENT),
        (home, home, SEGMENT),
        (address, home, SEGMENT),
        // The home is open at another address.
        (other, home, SEGMENT),
        (other, home + SEGMENT, SEGMENT),
        (address + SEGMENT, home, SEGMENT),
        (address - SEGMENT, home, 2 * SEGMENT),
    ] {
        assert_eq!(
            served.open(at, of, bytes),
            CuResult::INVALID_VALUE.0,
            "{at:#x} {of:#x} {bytes:#x}"
        );
    }
    for bytes in [SEGMENT, 1] {
        assert_eq!(
            served.fetch(0, bytes, false),
            CuResult::INVALID_VALUE.0,
            "not placed"
        );
        assert_eq!(
            served.push(0, bytes),
            CuResult::INVALID_VALUE.0,
            "not placed"
        );
    }
    assert_eq!(served.place(), 0);
    for (offset, bytes) in [
        (0, 0),
        (0, 2 * SEGMENT + 1),
        (2 * SEGMENT, 1),
        (2 * SEGMENT - 1, 2),
        (u64::MAX, 1),
        (1, u64::MAX),
    ] {
        for concurrent in [false, true] {
            assert_eq!(
                served.fetch(offset, bytes, concurrent),
                CuResult::INVALID_VALUE.0
            );
        }
        assert_eq!(served.push(offset, bytes), CuResult::INVALID_VALUE.0);
    }
    assert_eq!(served.on_device(0, 1), [0], "the session lives");
}

#[test]
fn memory_that_does_not_fit_the_device_stays_at_home() {
    let mut served = serve(5);
    let bytes = MEMORY - SEGMENT;
    let alloc = wormhole_api::MemAlloc { bytes };
    assert_eq!(served.guest.call(&alloc).status, 0);
    served.write_home(0, &[3]);
    assert_eq!(served.place(), CuResult::OUT_OF_MEMORY.0);
    served.fill(1, 4, 1);
    assert_eq!(served.at_home(0, 2), [3, 4]);
}

#[test]
fn it_outlives_a_reset_and_its_home_is_not_taken_away() {
    let mut served = serve(6);
    assert_eq!(served.place(), 0);
    served.fill(0, 5, 1);
    assert_eq!(served.guest.call(&ContextReset {}).status, 0);
    assert_eq!(served.fetch(0, SEGMENT, false), 0);
    assert_eq!(served.at_home(0, 1), [5]);
    assert_eq!(served.on_device(0, 1), [5]);
    let run = served.guest.arena[0].run;
    served
        .guest
        .control
        .send(&Message::ArenaRemove(ArenaRun { id: 1, ..run }))
        .unwrap();
    served.synchronize();
    // The worker keeps the run, so the home still works.
    for _ in 0..100 {
        assert_eq!(served.push(0, SEGMENT), 0);
    }
    assert_eq!(served.close(), 0);
}

#[test]
fn twins_are_bounded_however_many_are_asked_for_at_once() {
    let mut served = serve(7);
    assert_eq!(served.place(), 0);
    let fetch = |part: u16| ManagedFetch {
        address: DevicePtr(served.address + u64::from(part) * 4096),
        bytes: SEGMENT,
        concurrent: 1,
    };
    let asked: Vec<(u16, u64)> = (1..100)
        .map(|slot| (slot, served.guest.start(slot, &fetch(slot))))
        .collect();
    let answers = asked
        .into_iter()
        .map(|(slot, sequence)| served.guest.wait(slot, sequence).expect("it lives").status);
    let (made, refused): (Vec<u32>, Vec<u32>) = answers.partition(|status| *status == 0);
    assert_eq!(made.len(), 16);
    assert!(
        refused
            .iter()
            .all(|status| *status == CuResult::OUT_OF_MEMORY.0)
    );
    assert_eq!(
        served.fetch(4096, SEGMENT, true),
        0,
        "it has a twin already"
    );
}

#[test]
fn a_refresh_copies_what_the_device_has_changed_since_and_nothing_else() {
    let mut served = serve(9);
    assert_eq!(served.place(), 0);
    assert_eq!(served.mirror(true), 0);
    assert_eq!(served.fetch(0, 2 * SEGMENT, false), 0);
    // Copied only if the part is.
    served.write_home(SEGMENT + 3, &[7]);
    for byte in 1..4 {
        let last = SEGMENT - u64::from(byte);
        served.fill(last, byte.into(), 1);
        assert_eq!(served.refresh(0, 2 * SEGMENT, SEGMENT), Ok(true));
        assert_eq!(served.at_home(last, 1), [byte]);
        assert_eq!(served.at_home(SEGMENT + 3, 1), [7], "no other part");
        assert_eq!(served.refresh(0, 2 * SEGMENT, 0), Ok(true), "nothing since");
    }
    served.fill(0, 5, 1);
    served.fill(SEGMENT, 5, 1);
    assert_eq!(served.refresh(0, 2 * SEGMENT, 2 * SEGMENT - 1), Ok(false));
    assert_eq!(served.at_home(0, 1), [0], "nothing was copied");
    assert_eq!(
        served.refresh(SEGMENT, SEGMENT, SEGMENT),
        Ok(true),
        "of a part"
    );
    assert_eq!(served.at_home(SEGMENT, 4), [5, 0, 0, 0]);
    assert_eq!(served.at_home(0, 1), [0]);
    assert_eq!(
        served.refresh(0, 2 * SEGMENT, SEGMENT),
        Ok(true),
        "one is left"
    );
    assert_eq!(served.at_home(0, 1), [5]);
}

#[test]
fn a_mirror_knows_what_the_guest_has_pushed() {
    let mut served = serve(10);
    assert_eq!(served.place(), 0);
    assert_eq!(served.mirror(true), 0);
    assert_eq!(served.fetch(0, SEGMENT, false), 0);
    served.write_home(0, &[1, 2, 3]);
    assert_eq!(served.push(0, SEGMENT), 0);
    assert_eq!(served.refresh(0, SEGMENT, 0), Ok(true));
    served.fill(1, 2, 1);
    assert_eq!(
        served.refresh(0, SEGMENT, 0),
        Ok(true),
        "the same byte again"
    );
    served.fill(1, 9, 1);
    assert_eq!(served.refresh(0, SEGMENT, 0), Ok(false));
    served.occupy(5);
    assert_eq!(
        served.refresh(0, SEGMENT, SEGMENT),
        Err(CuResult::NOT_READY)
    );
    served.release(5);
    served.synchronize();
    assert_eq!(served.refresh(0, SEGMENT, SEGMENT), Ok(true));
    assert_eq!(served.at_home(0, 3), [1, 9, 3]);
}

#[test]
fn a_mirror_is_memory_of_the_device_and_goes_with_what_it_mirrors() {
    let mut served = serve(11);
    let unplaced = served.free_memory();
    assert_eq!(served.mirror(true), CuResult::INVALID_VALUE.0, "not placed");
    assert_eq!(served.place(), 0);
    let before = served.free_memory();
    assert_eq!(served.mirror(false), 0, "there is none");
    for _ in 0..3 {
        assert_eq!(served.mirror(true), 0);
        assert_eq!(served.mirror(true), CuResult::INVALID_VALUE.0, "once");
        assert!(served.free_memory() <= before - 2 * SEGMENT);
        assert_eq!(served.mirror(false), 0);
        assert_eq!(served.free_memory(), before);
    }
    let rest = wormhole_api::MemAlloc {
        bytes: before - SEGMENT,
    };
    let answer = served.guest.call(&rest);
    assert_eq!(answer.status, 0);
    let address = answer.reply::<wormhole_api::MemAllocReply>().address;
    assert_eq!(served.mirror(true), CuResult::OUT_OF_MEMORY.0);
    assert_eq!(served.refresh(0, SEGMENT, 0), Err(CuResult::INVALID_VALUE));
    let free = wormhole_api::MemFree { address };
    assert_eq!(served.guest.call(&free).status, 0);
    assert_eq!(served.mirror(true), 0);
    assert_eq!(served.close(), 0);
    assert_eq!(served.free_memory(), unplaced, "with the mirror");
}

#[test]
fn a_reset_takes_the_mirror_away() {
    let mut served = serve(12);
    assert_eq!(served.place(), 0);
    assert_eq!(served.mirror(true), 0);
    assert_eq!(served.fetch(0, SEGMENT, false), 0);
    served.fill(0, 5, 1);
    assert_eq!(served.guest.call(&ContextReset {}).status, 0);
    assert_eq!(
        served.refresh(0, SEGMENT, SEGMENT),
        Err(CuResult::INVALID_VALUE)
    );
    assert_eq!(served.push(0, SEGMENT), 0);
    assert_eq!(served.mirror(true), 0, "another");
    assert_eq!(served.fetch(0, SEGMENT, false), 0);
    assert_eq!(served.refresh(0, SEGMENT, 0), Ok(true));
    assert_eq!(served.close(), 0);
}

#[test]
fn a_refresh_names_whole_parts_of_mirrored_memory() {
    let mut served = serve(13);
    for mirrored in [false, true] {
        if mirrored {
            assert_eq!(served.place(), 0);
            assert_eq!(served.refresh(0, SEGMENT, 0), Err(CuResult::INVALID_VALUE));
            assert_eq!(served.mirror(true), 0);
        }
        for (offset, bytes) in [
            (0, 0),
            (0, 4096),
            (4096, SEGMENT),
            (0, SEGMENT + 4096),
            (0, 3 * SEGMENT),
            (SEGMENT, 2 * SEGMENT),
            (2 * SEGMENT, SEGMENT),
            (0_u64.wrapping_sub(SEGMENT), SEGMENT),
            (0, 0_u64.wrapping_sub(SEGMENT)),
        ] {
            let refused = served.refresh(offset, bytes, u64::MAX);
            assert_eq!(
                refused,
                Err(CuResult::INVALID_VALUE),
                "{offset:#x} {bytes:#x}"
            );
        }
    }
    let address = DevicePtr(served.address + SEGMENT);
    let message = ManagedMirror { address, wanted: 1 };
    let inside = served.guest.call(&message).status;
    assert_eq!(inside, CuResult::INVALID_VALUE.0);
    assert_eq!(served.fetch(0, 2 * SEGMENT, false), 0);
    assert_eq!(served.refresh(0, 2 * SEGMENT, 0), Ok(true));
}
