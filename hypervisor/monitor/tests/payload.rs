//! Runs the payloads of `hypervisor/payload` on this machine's KVM. Without KVM the tests print that
//! they are skipped.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};
use wormhole_monitor::payload::{PayloadConfig, PayloadVm, PayloadWindow};
use wormhole_monitor::{DisabledExits, ExitReason, KvmCaps, VmError, probe, sealed_file};

const WINDOW_ADDRESS: u64 = 0x5000_0000_0000;
const WINDOW_BYTES: usize = 4 << 20;
/// Bytes of the window's replaced part.
const SHOWN: u64 = 2 << 20;

/// Returns whether payloads can run here; prints the reason if not.
fn kvm() -> bool {
    if let KvmCaps::Missing { why } | KvmCaps::Denied { why } = probe() {
        eprintln!("skipped: {why}");
        return false;
    }
    true
}

/// Returns the ELF file of a payload. Builds the payloads once.
fn payload(name: &str) -> Vec<u8> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("payload");
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../payload/Cargo.toml");
        let status = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--release", "--manifest-path", manifest])
            .arg("--target-dir")
            .arg(&target)
            .env_remove("RUSTFLAGS")
            .status()
            .expect("cargo runs");
        assert!(status.success(), "the payloads do not build");
        target.join("release")
    });
    std::fs::read(folder.join(name)).expect("the payload was built")
}

fn config(name: &str, parameters: Vec<Vec<u64>>) -> PayloadConfig {
    PayloadConfig {
        elf: payload(name),
        parameters,
        memory_mib: 16,
        window: None,
        timeout: Some(Duration::from_secs(60)),
        disabled_exits: DisabledExits::default(),
        pins: Vec::new(),
        doorbell: None,
    }
}

fn window_memfd() -> OwnedFd {
    sealed_file("window", WINDOW_BYTES as u64).expect("a memfd")
}

#[test]
fn spin_makes_its_turns_on_every_vcpu_without_exits() {
    if !kvm() {
        return;
    }
    let turns = 10_000_000;
    let vm = PayloadVm::new(config("spin", vec![vec![turns], vec![turns]])).expect("payload");
    let blocks = [0, 1].map(|vcpu| vm.parameters(vcpu).expect("block"));
    let report = vm.run().expect("run");
    assert_eq!(report.outcome, ExitReason::Exited { status: 0 });
    assert_eq!(report.statuses.len(), 2);
    // One exit per vCPU: the write of its status.
    assert_eq!((report.exits.io, report.exits.mmio), (2, 0));
    for block in blocks {
        assert_eq!(block.load(2), Some(turns));
    }
}

#[test]
fn spin_stops_at_a_word_in_its_parameter_block() {
    if !kvm() {
        return;
    }
    let vm = PayloadVm::new(config("spin", vec![vec![0]])).expect("payload");
    let block = vm.parameters(0).expect("block");
    let stats = vm.stats();
    let before = stats.read().expect("statistics");
    let running = std::thread::spawn(move || vm.run());
    // Waits until the statistics show that a vCPU has entered the guest.
    while stats
        .read()
        .expect("statistics")
        .since(&before)
        .vcpu_sum("exits")
        == 0
    {
        std::thread::yield_now();
    }
    assert!(block.store(1, 1));
    let report = running.join().expect("thread").expect("run");
    assert_eq!(report.outcome, ExitReason::Exited { status: 0 });
    // The vCPU may have left the guest once before its first turn, and then makes none. The duration is written always.
    assert!(block.load(3) > Some(0));
}

#[test]
fn a_payload_that_does_not_end_is_stopped() {
    if !kvm() {
        return;
    }
    let vm = PayloadVm::new(config("spin", vec![vec![0]])).expect("payload");
    let stop = vm.stop_handle();
    let running = std::thread::spawn(move || vm.run());
    stop.stop();
    let report = running.join().expect("thread").expect("run");
    assert_eq!(report.outcome, ExitReason::Stopped);

    let after = Duration::from_millis(50);
    let vm = PayloadVm::new(PayloadConfig {
        timeout: Some(after),
        ..config("spin", vec![vec![0]])
    })
    .expect("payload");
    assert_eq!(
        vm.run().expect("run").outcome,
        ExitReason::TimedOut { after }
    );
}

#[test]
fn pingpong_reaches_the_host_through_the_window() {
    if !kvm() {
        return;
    }
    let rounds = 1000u64;
    let memfd = window_memfd();
    let file = std::fs::File::from(memfd.try_clone().expect("clone"));
    let view = MmapRegion::<()>::from_file(FileOffset::new(file, 0), WINDOW_BYTES).expect("map");
    let parameters = vec![
        WINDOW_ADDRESS,
        WINDOW_ADDRESS + 128,
        rounds,
        WINDOW_ADDRESS + 0x1000,
    ];
    let vm = PayloadVm::new(PayloadConfig {
        window: Some(PayloadWindow {
            memfd,
            address: WINDOW_ADDRESS,
        }),
        ..config("pingpong", vec![parameters])
    })
    .expect("payload");
    let running = std::thread::spawn(move || vm.run());
    let slice = view.as_volatile_slice();
    let word = |offset| {
        slice
            .get_atomic_ref::<std::sync::atomic::AtomicU64>(offset)
            .expect("in the window")
    };
    let (ping, pong) = (word(0), word(128));
    for round in 1..=rounds {
        while ping.load(std::sync::atomic::Ordering::Acquire) != round {
            assert!(!running.is_finished(), "the payload ended in round {round}");
            std::thread::yield_now();
        }
        pong.store(round, std::sync::atomic::Ordering::Release);
    }
    let report = running.join().expect("thread").expect("run");
    assert_eq!(report.outcome, ExitReason::Exited { status: 0 });
    assert_eq!(report.exits.total(), 1, "{:?}", report.exits);
    for round in 0..1000 {
        let duration = word(0x1000 + 8 * round).load(std::sync::atomic::Ordering::Relaxed);
        assert!(duration > 0, "round {round} was not recorded");
    }
}

#[test]
fn parts_of_a_window_change_under_a_running_payload() {
    if !kvm() {
        return;
    }
    let rounds = 900u64;
    let own = window_memfd();
    let other = window_memfd();
    let view = |memfd: &OwnedFd| {
        let file = std::fs::File::from(memfd.try_clone().expect("clone"));
        MmapRegion::<()>::from_file(FileOffset::new(file, 0), WINDOW_BYTES).expect("map")
    };
    let views = [view(&own), view(&other)];
    let vm = PayloadVm::new(PayloadConfig {
        window: Some(PayloadWindow {
            memfd: own,
            address: WINDOW_ADDRESS,
        }),
        ..config(
            "pingpong",
            vec![vec![
                WINDOW_ADDRESS,
                WINDOW_ADDRESS + 128,
                rounds,
                WINDOW_ADDRESS + 0x1000,
            ]],
        )
    })
    .expect("payload");
    let window = vm.window().expect("it has one");
    let running = std::thread::spawn(move || vm.run());
    let load = |view: usize, offset: usize| {
        views[view]
            .as_volatile_slice()
            .load::<u64>(offset, std::sync::atomic::Ordering::Acquire)
            .expect("in the window")
    };
    let mut seen = 0;
    for round in 1..=rounds {
        while load(seen, 0) != round {
            assert!(!running.is_finished(), "the payload ended in round {round}");
            std::thread::yield_now();
        }
        // The awaited value is written to the file that the window shows from then on.
        if round == 300 {
            window.show(&other, 0, SHOWN).expect("shown");
            seen = 1;
        } else if round == 600 {
            window.hide(0, SHOWN).expect("hidden");
            seen = 0;
        }
        views[seen]
            .as_volatile_slice()
            .store(round, 128, std::sync::atomic::Ordering::Release)
            .expect("in the window");
    }
    let report = running.join().expect("thread").expect("run");
    assert_eq!(report.outcome, ExitReason::Exited { status: 0 });
    assert_eq!(
        load(1, 0),
        600,
        "the last round that the other file was seen in"
    );
}

#[test]
fn exceptions_are_reported_with_their_place() {
    if !kvm() {
        return;
    }
    // Read of an unmapped page, undefined instruction, write to code, execution of data, write to
    // the monitor's own tables.
    for (fault, target, expected_vector, expected_code, expected_cr2) in [
        (0, 0, 14, Some(4), Some(0x7000_0000_1000)),
        (1, 0, 6, Some(0), None),
        (2, 0, 14, Some(7), None),
        (3, 0, 14, Some(0x15), None),
        (4, 0x1000, 14, Some(7), Some(0x1000)),
    ] {
        let vm = PayloadVm::new(config("fault", vec![vec![fault, target]])).expect("payload");
        let report = vm.run().expect("run");
        let ExitReason::PayloadException {
            vector,
            error_code,
            registers,
            ..
        } = report.outcome
        else {
            panic!("fault {fault}: {}", report.outcome);
        };
        assert_eq!(vector, expected_vector, "fault {fault}");
        assert_eq!(Some(error_code), expected_code, "fault {fault}");
        assert_eq!(registers.cs & 3, 3, "fault {fault}");
        if let Some(address) = expected_cr2 {
            assert_eq!(registers.cr2, address, "fault {fault}");
        }
    }
}

#[test]
fn a_window_at_an_impossible_address_is_refused() {
    if !kvm() {
        return;
    }
    for address in [0, WINDOW_ADDRESS + 4096, 1 << 47, u64::MAX - (2 << 20) + 1] {
        let memfd = window_memfd();
        assert!(memfd.as_raw_fd() >= 0);
        let error = PayloadVm::new(PayloadConfig {
            window: Some(PayloadWindow { memfd, address }),
            ..config("spin", vec![vec![1]])
        })
        .expect_err("impossible");
        assert!(error.to_string().contains("multiple of 2 MiB"), "{error}");
    }
}

/// Returns the processors on which this process may run.
fn processors() -> Vec<usize> {
    let allowed = sched_getaffinity(None).expect("the kernel tells");
    (0..CpuSet::MAX_CPU)
        .filter(|&processor| allowed.is_set(processor))
        .collect()
}

/// Returns the processors on which threads of this process with a name may run, as the kernel writes them.
fn places_of(thread: &str) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("it is there");
    tasks
        .flatten()
        // A thread may end meanwhile.
        .filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok())
        .filter(|status| {
            status
                .lines()
                .any(|line| line == format!("Name:\t{thread}"))
        })
        .filter_map(|status| {
            let list = |line: &str| line.strip_prefix("Cpus_allowed_list:\t").map(str::to_owned);
            status.lines().find_map(list)
        })
        .collect()
}

#[test]
fn every_vcpu_stays_on_its_processor() {
    if !kvm() {
        return;
    }
    let mut pins = processors();
    if pins.len() < 2 {
        eprintln!("skipped: this process may run on one processor only");
        return;
    }
    // The order differs from that of their numbers.
    pins.truncate(2);
    pins.reverse();
    let vm = PayloadVm::new(PayloadConfig {
        pins: pins.clone(),
        ..config("spin", vec![vec![0], vec![0]])
    });
    let vm = vm.expect("payload");
    let stop = vm.stop_handle();
    let running = std::thread::spawn(move || vm.run());
    // No other test binds its vCPUs.
    let is_bound = |vcpu: usize| {
        let places = places_of(&format!("vcpu{vcpu}"));
        places.contains(&pins[vcpu].to_string())
    };
    let start = Instant::now();
    while !(is_bound(0) && is_bound(1)) {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "they run on {:?} and {:?}, not on {pins:?}",
            places_of("vcpu0"),
            places_of("vcpu1")
        );
        std::thread::yield_now();
    }
    stop.stop();
    let report = running.join().expect("thread").expect("run");
    assert_eq!(report.outcome, ExitReason::Stopped);
}

#[test]
fn a_vcpu_without_its_processor_does_not_run() {
    if !kvm() {
        return;
    }
    for nowhere in [CpuSet::MAX_CPU, usize::MAX] {
        let vm = PayloadVm::new(PayloadConfig {
            pins: vec![nowhere],
            doorbell: None,
            ..config("spin", vec![vec![0]])
        });
        let outcome = vm.expect("payload").run().expect("run").outcome;
        assert!(
            matches!(&outcome, ExitReason::RunFailed { vcpu: 0, error }
                if error.contains(&format!("cannot be bound to processor {nowhere}"))),
            "{outcome}"
        );
    }
    let error = PayloadVm::new(PayloadConfig {
        pins: vec![0],
        doorbell: None,
        ..config("spin", vec![vec![1], vec![1]])
    });
    assert!(matches!(error, Err(VmError::Pins { pins: 1, vcpus: 2 })));
}

#[test]
fn exits_are_disabled_where_kvm_offers_that_and_refused_where_not() {
    if !kvm() {
        return;
    }
    let offered = DisabledExits::offered().expect("there is a KVM");
    for (pause, halt) in [(true, false), (false, true), (true, true)] {
        let vm = PayloadVm::new(PayloadConfig {
            disabled_exits: DisabledExits { pause, halt },
            ..config("spin", vec![vec![1000]])
        });
        if (pause && !offered.pause) || (halt && !offered.halt) {
            let refused = matches!(vm, Err(VmError::DisableExits { .. }));
            assert!(refused, "{pause} {halt}, of {offered:?}");
        } else {
            let report = vm.expect("payload").run().expect("run");
            assert_eq!(report.outcome, ExitReason::Exited { status: 0 });
        }
    }
    println!("KVM offers {offered:?}");
}
