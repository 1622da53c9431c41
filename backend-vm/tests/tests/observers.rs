//! Observation of devices without a session: a tenant sees its own memory and processes, and no
//! other tenant's.

use std::time::Instant;

use wormhole_api::{
    DevicePtr, MemAlloc, MemAllocReply, MemFree, MemGetInfo, MemGetInfoReply, PROTOCOL_HASH,
};
use wormhole_backend_tests::backend::{Backend, PATIENCE, Tenant, Workers};
use wormhole_backend_tests::guest::{Control, Guest, Reply};
use wormhole_ring::bootstrap;
use wormhole_ring::control::{
    Attach, FEATURE_FILES, FEATURE_PROCESS, FEATURE_WITHIN, Message, Observe, ProcessNumber,
    Refusal, facts,
};

fn question(device: u32) -> Message<'static> {
    Message::Observe(Observe {
        bootstrap_version: bootstrap::VERSION,
        device,
    })
}

/// Observes the only device and returns the facts.
fn ask(control: &mut Control) -> String {
    ask_of(control, 0, 1)
}

/// Observes one of `count` devices.
fn ask_of(control: &mut Control, device: u32, count: u32) -> String {
    control.send(&question(device)).unwrap();
    let mut text = String::new();
    loop {
        match control.receive() {
            Reply::Observation(told, devices, more, facts) => {
                assert_eq!((told, devices), (device, count));
                text.push_str(&facts);
                if !more {
                    return text;
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Returns the processes in an answer with the bytes that each holds, sorted.
fn processes(text: &str) -> Vec<(u32, u64)> {
    let mut processes: Vec<(u32, u64)> = facts::all(text)
        .filter(|(name, _)| *name == facts::PROCESS)
        .map(|(_, value)| {
            let (pid, bytes) = value.split_once(' ').unwrap();
            (pid.parse().unwrap(), bytes.parse().unwrap())
        })
        .collect();
    processes.sort_unstable();
    processes
}

fn used(text: &str) -> u64 {
    facts::number(text, facts::USED_MEMORY).unwrap()
}

fn name_process(guest: &mut Guest, pid: u32) {
    let process = ProcessNumber { pid, reserved: 0 };
    guest.control.send(&Message::Process(process)).unwrap();
}

fn allocate(guest: &mut Guest, bytes: u64) -> DevicePtr {
    let answer = guest.call(&MemAlloc { bytes });
    answer.reply::<MemAllocReply>().address
}

#[test]
fn a_device_is_described_to_who_has_no_session() {
    let mut backend = Backend::with_window(64);
    let mut observer = backend.connect();
    let text = ask(&mut observer);
    assert!(
        facts::get(&text, facts::NAME)
            .unwrap()
            .starts_with("Wormhole CPU device")
    );
    assert_eq!(facts::get(&text, facts::UUID).unwrap().len(), 32);
    assert_eq!(facts::number(&text, facts::CUDA_VERSION), Some(13_000));
    assert!(facts::number(&text, facts::TOTAL_MEMORY).unwrap() > 0);
    assert_eq!(facts::number(&text, "attribute.75"), Some(9));
    assert_eq!((used(&text), processes(&text)), (0, Vec::new()));
    // A device that does not exist has no facts, and the stream stays usable.
    observer.send(&question(7)).unwrap();
    let none = Reply::Observation(7, 1, false, String::new());
    assert_eq!(observer.receive(), none);
    assert_eq!(ask(&mut observer), text);
    assert!(backend.ready_report().is_none(), "it never had a session");
}

#[test]
fn a_tenant_sees_its_own_memory_and_processes_alone() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("tenants");
    let listen = ["--listen", socket.to_str().unwrap()];
    let mut backend = Backend::start(Workers::built(), &listen);
    backend.attach(64, Attach::default()).unwrap();
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, Attach::default()).unwrap();

    let mut observer = backend.connect();
    let mut stranger = neighbour.connect();
    let (mut first, mut second) = (backend.connect().open(), backend.connect().open());
    let (mib, page) = (1 << 20, 2 << 20);
    name_process(&mut first, 4001);
    name_process(&mut second, 4002);
    let held = allocate(&mut first, 3 * mib);
    allocate(&mut second, 5 * mib);

    // The reports of the two sessions arrive independently, so the first may be visible before the
    // second.
    let expected = [(4001, 3 * mib), (4002, 5 * mib)];
    let end = Instant::now() + PATIENCE;
    let mut text = ask(&mut observer);
    while processes(&text) != expected {
        assert!(Instant::now() < end, "{text}");
        text = ask(&mut observer);
    }
    assert_eq!(used(&text), 8 * mib);

    let other = ask(&mut stranger);
    assert_eq!((used(&other), processes(&other)), (0, Vec::new()));
    let mut theirs = neighbour.connect().open();
    allocate(&mut theirs, page);
    let other = ask(&mut stranger);
    // The session has not sent its process number, so it counts in the sum alone.
    assert_eq!((used(&other), processes(&other)), (page, Vec::new()));
    assert_eq!(used(&ask(&mut observer)), 8 * mib);

    assert_eq!(first.call(&MemFree { address: held }).status, 0);
    assert_eq!(used(&ask(&mut observer)), 5 * mib);
    drop(second);
    assert_eq!(backend.report().end, "the guest process ended");
    let text = ask(&mut observer);
    assert_eq!((used(&text), processes(&text)), (0, vec![(4001, 0)]));
}

/// Returns the free and total memory of a device that a process sees.
fn memory(guest: &mut Guest, device: u16) -> (u64, u64) {
    let answer = guest.call_on(device, &MemGetInfo {});
    let reply = answer.reply::<MemGetInfoReply>();
    (reply.free, reply.total)
}

#[test]
fn each_device_of_a_tenant_tells_of_its_own_memory() {
    let mut backend = Backend::start(Workers::built(), &["--device", "cpu:2"]);
    backend.attach(64, Attach::default()).unwrap();
    let mut observer = backend.connect();
    let mut guest = backend.connect().open();
    name_process(&mut guest, 4001);
    let mib = 1 << 20;
    let totals = [0, 1].map(|device| memory(&mut guest, device).1);
    let held = [3 * mib, 5 * mib];
    for (device, bytes) in (0..).zip(held) {
        assert_eq!(guest.call_on(device, &MemAlloc { bytes }).status, 0);
    }
    let end = Instant::now() + PATIENCE;
    while processes(&ask_of(&mut observer, 1, 2)) != [(4001, 5 * mib)] {
        assert!(Instant::now() < end, "the process is not heard of");
    }
    for (device, (bytes, total)) in (0..).zip(held.into_iter().zip(totals)) {
        let text = ask_of(&mut observer, device.into(), 2);
        assert_eq!(facts::number(&text, facts::TOTAL_MEMORY), Some(total));
        assert_eq!(
            (used(&text), processes(&text)),
            (bytes, vec![(4001, bytes)])
        );
        assert_eq!(memory(&mut guest, device), (total - bytes, total));
    }
}

/// Memory that the worker may not allocate is not reported as free, and memory reported as free can
/// be allocated. The idle spare worker does not appear in the tenant's figures.
#[test]
fn what_is_free_can_be_allocated_and_no_more() {
    let (mib, limit) = (1 << 20, 600 << 20);
    for devices in [1, 2] {
        let choice = format!("cpu:{devices}");
        let options = ["--device", &choice, "--worker-memory", "600M"];
        let mut backend = Backend::start(Workers::built(), &options);
        backend.attach(64, Attach::default()).unwrap();
        let mut observer = backend.connect();
        let mut guest = backend.connect().open();
        let mut together = 0;
        for device in 0..devices {
            let (free, total) = memory(&mut guest, device);
            assert_eq!(free, total);
            let text = ask_of(&mut observer, device.into(), devices.into());
            assert_eq!(facts::number(&text, facts::TOTAL_MEMORY), Some(total));
            assert_eq!(used(&text), 0);
            together += total;
            let all = guest.call_on(device, &MemAlloc { bytes: free });
            let address = all.reply::<MemAllocReply>().address;
            assert_eq!(memory(&mut guest, device), (0, total));
            assert_eq!(guest.call_on(device, &MemAlloc { bytes: 1 }).status, 2);
            assert_eq!(guest.call_on(device, &MemFree { address }).status, 0);
            assert_eq!(memory(&mut guest, device), (total, total));
        }
        assert!((64 * mib..=limit / 3 * 2).contains(&together), "{together}");
    }
}

#[test]
fn a_grant_says_that_the_supervisor_takes_the_process() {
    let mut backend = Backend::with_window(64);
    for (features, granted) in [
        (0, 0),
        (u64::MAX, FEATURE_PROCESS | FEATURE_FILES | FEATURE_WITHIN),
    ] {
        let mut control = backend.connect();
        control
            .send(&Message::Hello {
                bootstrap_version: bootstrap::VERSION,
                protocol_hash: PROTOCOL_HASH,
                features,
                environment: "",
            })
            .unwrap();
        let Reply::Grant(grant) = control.receive() else {
            panic!("not granted");
        };
        assert_eq!(grant.features, granted);
    }
}

#[test]
fn who_observes_against_the_rules_is_cut_off_and_no_other() {
    let mut backend = Backend::with_window(64);
    let mut neighbour = backend.connect();
    ask(&mut neighbour);

    let mut old = backend.connect();
    old.send(&Message::Observe(Observe {
        bootstrap_version: bootstrap::VERSION + 1,
        device: 0,
    }))
    .unwrap();
    let Reply::Refused(code, reason) = old.receive() else {
        panic!("not refused");
    };
    assert_eq!(code, Refusal::Version as u32);
    assert!(reason.contains("version 2"), "{reason}");
    assert_eq!(old.receive(), Reply::Ended);

    // A stream that observes gets no session, and a stream with a session may not observe.
    let mut observer = backend.connect();
    ask(&mut observer);
    observer.hello(PROTOCOL_HASH, "");
    assert_eq!(observer.receive(), Reply::Ended);
    let mut guest = backend.connect().open();
    guest.control.send(&question(0)).unwrap();
    assert_eq!(guest.control.receive(), Reply::Ended);
    let end = backend.report().end;
    assert!(end.contains("sent Observe"), "{end}");

    // A second question before the first is answered ends the stream.
    let mut impatient = backend.connect();
    let frame = question(0).to_vec().unwrap();
    impatient.send_raw(&frame.repeat(300));
    while matches!(impatient.receive(), Reply::Observation(..)) {}
    backend.wait_for_log("asked again before it was answered");
    ask(&mut neighbour);
}

#[test]
fn who_observes_before_there_is_a_window_is_cut_off() {
    let mut backend = Backend::start(Workers::built(), &["--device", "cpu"]);
    let mut observer = backend.connect();
    observer.send(&question(0)).unwrap();
    assert_eq!(observer.receive(), Reply::Ended);
    backend.wait_for_log("before its launcher attached a window");
    backend.attach(64, Attach::default()).unwrap();
    assert!(ask(&mut backend.connect()).contains(facts::NAME));
}

#[test]
fn a_question_before_the_device_works_is_answered_once_its_failure_is_known() {
    let mut backend = Backend::start(Workers::built(), &["--device", "cuda:0"]);
    let _ = backend.attach(64, Attach::default());
    let mut observer = backend.connect();
    observer.send(&question(0)).unwrap();
    let Reply::Refused(code, _) = observer.receive() else {
        panic!("not refused");
    };
    assert_eq!(code, Refusal::NoDevice as u32);
}
