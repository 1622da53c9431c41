//! The process behind a monitor that speaks vhost-user.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;
use wormhole_fs::abi::{InHeader, InitIn, InitOut, OutHeader, opcode};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of the guest's memory.
const MEMORY: u64 = 1 << 16;
/// Address of the memory in the monitor.
const MONITOR: u64 = 1 << 32;
const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const REQUEST: u64 = 0x4000;
const REPLY: u64 = 0x5000;
/// The queue of requests, and its buffers.
const QUEUE: usize = 1;
const SIZE: u16 = 16;

/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Connects a monitor with this memory and two queues. Returns it with the eventfds of the second.
fn monitor(socket: UnixStream, memory: &File) -> (Frontend, [EventFd; 2]) {
    let mut frontend = Frontend::from_stream(socket, 2);
    frontend.set_owner().expect("the process answers");
    let features = frontend.get_features().expect("features");
    assert_ne!(features & 1 << 32, 0, "virtio 1");
    let protocol = frontend.get_protocol_features().expect("features");
    frontend.set_protocol_features(protocol).expect("taken");
    frontend.set_features(features).expect("taken");
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: MEMORY,
        userspace_addr: MONITOR,
        mmap_offset: 0,
        mmap_handle: memory.as_raw_fd(),
    };
    frontend.set_mem_table(&[region]).expect("taken");
    let events = [(); 2].map(|()| EventFd::new(0).expect("an eventfd"));
    frontend.set_vring_num(QUEUE, SIZE).expect("taken");
    frontend.set_vring_base(QUEUE, 0).expect("taken");
    let rings = VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr: MONITOR + TABLE,
        used_ring_addr: MONITOR + USED,
        avail_ring_addr: MONITOR + AVAILABLE,
        log_addr: None,
    };
    frontend.set_vring_addr(QUEUE, &rings).expect("taken");
    frontend.set_vring_call(QUEUE, &events[1]).expect("taken");
    frontend.set_vring_kick(QUEUE, &events[0]).expect("taken");
    frontend.set_vring_enable(QUEUE, true).expect("taken");
    (frontend, events)
}

#[test]
fn the_process_serves_the_queues_of_another_monitor_and_ends_with_it() {
    let place = tempfile::tempdir().expect("a folder");
    let name = place.path().join("socket");
    let listener = UnixListener::bind(&name).expect("a listener");
    let socket = UnixStream::connect(&name).expect("connected");
    let child = Command::new(env!("CARGO_BIN_EXE_wormhole-fs"))
        .arg("--vhost-user")
        .arg(place.path())
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .spawn();
    let mut child = child.expect("it starts");
    let memory = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
    let memory = File::from(memory);
    memory.set_len(MEMORY).expect("room");
    let write = |bytes: &[u8], at: u64| memory.write_all_at(bytes, at).expect("written");
    let (frontend, [kick, call]) = monitor(socket, &memory);

    let len = size_of::<InHeader>() + size_of::<InitIn>();
    let header = InHeader {
        len: u32::try_from(len).expect("short"),
        opcode: opcode::INIT,
        unique: 42,
        node: 0,
        uid: 0,
        gid: 0,
        pid: 0,
        extension: 0,
    };
    let asked = [7u32, 38, 1 << 17, u32::MAX];
    write(&[header.as_bytes(), asked.as_bytes()].concat(), REQUEST);
    // A request whose buffer for the reply is whole, one whose buffer is too small, one outside of memory, and one
    // longer than any.
    let table: [(u64, u32, u16, u16); 7] = [
        (REQUEST, header.len, NEXT, 1),
        (REPLY, 4096, WRITE, 0),
        (REQUEST, header.len, NEXT, 3),
        (REPLY + 4096, 20, WRITE, 0),
        (MEMORY - 8, header.len, NEXT, 5),
        (REPLY + 4096, 4096, WRITE, 0),
        (0, 0xf000, 0, 0),
    ];
    for (index, (address, len, flags, next)) in (0u64..).zip(table) {
        let at = TABLE + 16 * index;
        write(&address.to_le_bytes(), at);
        write(&len.to_le_bytes(), at + 8);
        write(&[flags, next].map(u16::to_le_bytes).concat(), at + 12);
    }
    let heads = [0u16, 4, 0, 2, 4, 6];
    write(&heads.map(u16::to_le_bytes).concat(), AVAILABLE);
    kick.write(1).expect("kicked");

    let mut lengths = Vec::new();
    while lengths.len() < 4 {
        call.read().expect("called");
        let mut used = [0; 4];
        memory.read_exact_at(&mut used, USED).expect("read");
        let used = u64::from(u16::from_le_bytes([used[2], used[3]]));
        lengths = (0..used)
            .map(|index| {
                let mut len = [0; 4];
                let at = USED + 4 + 8 * index + 4;
                memory.read_exact_at(&mut len, at).expect("read");
                u32::from_le_bytes(len)
            })
            .collect();
    }
    assert_eq!(lengths, [80, 0, 0, 0]);
    let mut reply = [0; 80];
    memory.read_exact_at(&mut reply, REPLY).expect("read");
    let (header, body) = OutHeader::read_from_prefix(&reply).expect("a header");
    assert_eq!((header.len, header.error, header.unique), (80, 0, 42));
    let (answer, _) = InitOut::read_from_prefix(body).expect("an answer");
    assert_eq!((answer.major, answer.minor), (7, 31));

    drop(frontend);
    assert!(child.wait().expect("it ends").success());
}
