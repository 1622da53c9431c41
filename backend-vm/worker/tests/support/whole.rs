//! A whole worker in the test's process. The test plays its supervisor and its guest.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;

use wormhole_backend_tests::guest::{Control, Guest, Reply};
use wormhole_device::Device;
use wormhole_link::channel::Outgoing;
use wormhole_link::counters::CountersFile;
use wormhole_link::memory::anonymous_file;
use wormhole_link::neighbours::NeighboursFile;
use wormhole_ring::control::{Grant, Message};
use wormhole_ring::layout::WINDOW_BASE;
use wormhole_worker::Tuning;
use wormhole_worker::lanes::Plan;

static BAND: LazyLock<()> =
    LazyLock::new(|| wormhole_worker::reserve_bands().expect("free addresses"));

/// Starts a worker with a session in segment `first` of a window of this size, and with the arena behind it.
pub fn serve(devices: Vec<Arc<dyn Device>>, first: u32, arena_count: u32, window: u64) -> Guest {
    serve_in_lanes(devices, first, arena_count, window, Plan::none()).0
}

/// Starts such a worker whose launches may go to lanes. Returns its main thread too.
pub fn serve_in_lanes(
    devices: Vec<Arc<dyn Device>>,
    first: u32,
    arena_count: u32,
    window: u64,
    lanes: Plan,
) -> (Guest, JoinHandle<i32>) {
    LazyLock::force(&BAND);
    let (near, far) = UnixStream::pair().unwrap();
    let worker = std::thread::spawn(move || {
        let socket = Arc::new(OwnedFd::from(far));
        wormhole_worker::run_on(
            devices,
            Tuning {
                lanes,
                ..Tuning::default()
            },
            socket,
        )
        .expect("an honest supervisor")
    });
    let file = anonymous_file(c"window").unwrap();
    File::from(file.try_clone().unwrap())
        .set_len(window)
        .unwrap();
    let grant = Grant {
        session_segment: first,
        arena_first: first + 1,
        arena_count,
        window_base: WINDOW_BASE,
        window_size: window,
        ..Grant::default()
    };
    let counters = CountersFile::create().unwrap();
    let descriptors = vec![
        file.try_clone().unwrap(),
        OwnedFd::from(counters.file().try_clone().unwrap()),
        NeighboursFile::create().unwrap().descriptor().unwrap(),
    ];
    Outgoing::default()
        .send(&near, &Message::Assign(grant), descriptors)
        .unwrap();
    let mut control = Control::new(near);
    for wanted in ["Ready", "Assigned"] {
        assert_eq!(control.receive(), Reply::Other(wanted));
    }
    (Guest::new(control, grant, file), worker)
}
