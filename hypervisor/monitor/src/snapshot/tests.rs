//! Saves and restores VMs of a small program in kernel mode, on this machine's KVM.

use std::io::{Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::payload::elf::tests::program;
use crate::{
    BootSource, DisabledExits, DiskAccess, DiskImage, ExitReason, KvmCaps, Report, Start,
    StopHandle, Vm, VmConfig, VmError,
};

const CODE: u64 = 0x20_0000;
const COUNTER: u64 = 0x30_0000;
/// Bytes of RAM of a guest.
const MEMORY: u64 = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Counts in RCX, and writes the count and the TSC to memory, and the count's low byte to the serial port.
const COUNTING: [u8; 39] = [
    0x48, 0x31, 0xc9, // xor rcx, rcx
    0x48, 0xff, 0xc1, // again: inc rcx
    0x0f, 0x31, // rdtsc
    0x89, 0x04, 0x25, 0x08, 0x00, 0x30, 0x00, // mov [0x300008], eax
    0x89, 0x14, 0x25, 0x0c, 0x00, 0x30, 0x00, // mov [0x30000c], edx
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0x48, 0x89, 0x0c, 0x25, 0x00, 0x00, 0x30, 0x00, // mov [0x300000], rcx
    0x88, 0xc8, // mov al, cl
    0xee, // out dx, al
    0xeb, 0xdc, // jmp again
];

/// Returns whether VMs can run here; prints the reason if not.
fn kvm() -> bool {
    if let KvmCaps::Missing { why } | KvmCaps::Denied { why } = crate::probe() {
        eprintln!("skipped: {why}");
        return false;
    }
    true
}

/// Bytes that a guest has written to its console.
#[derive(Clone, Default)]
struct Console(Arc<Mutex<Vec<u8>>>);

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Console {
    fn len(&self) -> usize {
        self.0.lock().len()
    }

    fn until(&self, len: usize) {
        let start = Instant::now();
        while self.len() < len {
            assert!(start.elapsed() < PATIENCE, "{} bytes", self.len());
            std::thread::yield_now();
        }
    }
}

/// A guest that counts, which can have disks.
fn guest(
    console: &Console,
    snapshot: Option<Snapshot>,
    disks: Vec<DiskImage>,
) -> Result<Vm, VmError> {
    let mut kernel = tempfile::NamedTempFile::new().expect("a file");
    let elf = program(COUNTING, CODE, 4096);
    kernel.write_all(&elf).expect("room");
    let boot = BootSource {
        kernel: kernel.path().to_owned(),
        initramfs: Vec::new(),
        command_line: String::new(),
    };
    Vm::new(VmConfig {
        start: snapshot.map_or(Start::Boot(boot), |snapshot| {
            Start::Restore(Box::new(snapshot))
        }),
        memory_mib: MEMORY >> 20,
        vcpus: 1,
        window: None,
        file_memory: None,
        vsock: None,
        file_systems: Vec::new(),
        disks,
        networks: Vec::new(),
        passed_through: Vec::new(),
        prefault: false,
        console: Box::new(console.clone()),
        timeout: Some(PATIENCE),
        disabled_exits: DisabledExits::default(),
        pins: Vec::new(),
        server: None,
    })
}

struct Running {
    snapshots: SnapshotHandle,
    stop: StopHandle,
    thread: JoinHandle<Result<Report, VmError>>,
}

impl Running {
    fn start(vm: Vm) -> Self {
        Self {
            snapshots: vm.snapshot_handle(),
            stop: vm.stop_handle(),
            thread: std::thread::spawn(move || vm.run()),
        }
    }

    /// Takes a snapshot, whose state passes through text as it does for a user.
    fn save(&self, after: AfterSnapshot) -> Snapshot {
        let memory = tempfile::tempfile().expect("a file");
        let (sender, saved): (_, Receiver<VmState>) = channel();
        let conclude = move |state: Result<VmState, SnapshotError>| {
            let sent = sender.send(state.expect("it is saved"));
            sent.expect("the test waits");
            after
        };
        let file = memory.try_clone().expect("a descriptor");
        self.snapshots.request(file, Box::new(conclude));
        let state = saved.recv_timeout(PATIENCE).expect("a snapshot");
        Snapshot {
            state: through_text(&state),
            memory,
        }
    }

    fn end(self) -> ExitReason {
        self.stop.stop();
        self.thread
            .join()
            .expect("no panic")
            .expect("it ran")
            .outcome
    }
}

fn through_text(state: &VmState) -> VmState {
    let text = serde_json::to_string(state).expect("it is text");
    serde_json::from_str(&text).expect("it is a state")
}

fn again(snapshot: &Snapshot) -> Snapshot {
    let mut memory = snapshot.memory.try_clone().expect("a descriptor");
    memory.rewind().expect("a file");
    Snapshot {
        state: through_text(&snapshot.state),
        memory,
    }
}

fn word(snapshot: &Snapshot, at: u64) -> u64 {
    let mut bytes = [0; 8];
    snapshot
        .memory
        .read_exact_at(&mut bytes, at)
        .expect("memory");
    u64::from_le_bytes(bytes)
}

/// Checks that a guest counts on from the count of a snapshot. The last byte may not have been written before.
fn counts_on(console: &Console, snapshot: &Snapshot) {
    let count = word(snapshot, COUNTER).to_le_bytes()[0];
    console.until(1000);
    let written = console.0.lock().clone();
    let first = written[0];
    assert!(
        [count, count.wrapping_add(1)].contains(&first),
        "{first} follows {count}"
    );
    let follows = written
        .windows(2)
        .all(|pair| pair[1] == pair[0].wrapping_add(1));
    assert!(follows, "{written:?}");
}

#[test]
fn a_guest_goes_on_where_it_was_as_often_as_it_is_restored() {
    if !kvm() {
        return;
    }
    let console = Console::default();
    let running = Running::start(guest(&console, None, Vec::new()).expect("a guest"));
    console.until(300);
    let first = running.save(AfterSnapshot::Continue);
    let at_snapshot = console.len();
    console.until(at_snapshot + 300);
    let second = running.save(AfterSnapshot::Stop);
    let ended = running.thread.join().expect("no panic").expect("it ran");
    assert_eq!(ended.outcome, ExitReason::Stopped);
    // The snapshots did not disturb it.
    let written = console.0.lock().clone();
    assert!(
        written
            .windows(2)
            .all(|pair| pair[1] == pair[0].wrapping_add(1))
    );
    assert!(word(&second, COUNTER) >= word(&first, COUNTER) + 300);

    for snapshot in [&first, &first, &second] {
        let console = Console::default();
        let restored = guest(&console, Some(again(snapshot)), Vec::new());
        let restored = Running::start(restored.expect("it fits"));
        counts_on(&console, snapshot);
        let later = restored.save(AfterSnapshot::Stop);
        restored.thread.join().expect("no panic").expect("it ran");
        // The TSC goes on as well.
        assert!(word(&later, COUNTER + 8) > word(snapshot, COUNTER + 8));
        assert!(word(&later, COUNTER) > word(snapshot, COUNTER));
    }
}

#[test]
fn a_guest_that_is_stopped_by_its_snapshot_runs_no_further() {
    if !kvm() {
        return;
    }
    // A guest that is let go has time for some steps, and not always for one.
    for _ in 0..8 {
        let console = Console::default();
        let running = Running::start(guest(&console, None, Vec::new()).expect("a guest"));
        console.until(300);
        let snapshot = running.save(AfterSnapshot::Stop);
        running.thread.join().expect("no panic").expect("it ran");
        let (saved, written) = (word(&snapshot, COUNTER), console.len() as u64);
        // The snapshot may lie between the count in memory and its byte on the console.
        assert!(
            [saved, saved - 1].contains(&written),
            "{written} bytes, and the count of the snapshot is {saved}"
        );
    }
}

#[test]
fn a_snapshot_is_refused_by_a_machine_that_is_another_one() {
    if !kvm() {
        return;
    }
    let console = Console::default();
    let running = Running::start(guest(&console, None, Vec::new()).expect("a guest"));
    let snapshot = running.save(AfterSnapshot::Stop);
    let refusal = |change: fn(&mut Snapshot)| {
        let mut other = again(&snapshot);
        // Each refusal has a file of its own, as far as the memory is concerned.
        other.memory = tempfile::tempfile().expect("a file");
        memory::identify(&other.memory, MEMORY, &other.state.identity).expect("room");
        change(&mut other);
        let refused = guest(&console, Some(other), Vec::new());
        refused.expect_err("another machine").to_string()
    };
    let stepping = refusal(|other| other.state.processor[1].eax ^= 1);
    assert!(stepping.contains("CPUID leaf 0x1."), "{stepping}");
    let unknown = refusal(|other| {
        other.state.processor.push(kvm_cpuid_entry2 {
            function: 0x1234,
            edx: 1,
            ..Default::default()
        });
    });
    assert!(unknown.contains("CPUID leaf 0x1234."), "{unknown}");
    let other = refusal(|other| other.state.identity[0] ^= 1);
    assert!(other.contains("of two snapshots"), "{other}");
    let vcpus = refusal(|other| other.state.vcpus.clear());
    assert!(vcpus.contains("0 vCPUs, and this one has 1"), "{vcpus}");
    let memory = refusal(|other| other.memory.set_len(4096).expect("room"));
    assert!(memory.contains("has 4096 bytes"), "{memory}");
    let disks = refusal(|other| {
        let image = tempfile::NamedTempFile::new().expect("a file");
        image.as_file().set_len(4096).expect("room");
        let image = DiskImage::open(image.path(), DiskAccess::ReadOnly).expect("an image");
        let disk = image.handle().and_then(|disk| disk.identity());
        other.state.disks.push(disk.expect("a disk"));
    });
    assert!(disks.contains("1 disks, and this one has 0"), "{disks}");
}

#[test]
fn a_disk_that_was_written_after_the_snapshot_is_refused_by_its_number() {
    if !kvm() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let paths = ["first", "second"].map(|name| folder.path().join(name));
    for path in &paths {
        std::fs::write(path, [0; 4096]).expect("room");
    }
    let images = || {
        let open = |path: &PathBuf| DiskImage::open(path, DiskAccess::ReadWrite).expect("an image");
        paths.iter().map(open).collect::<Vec<_>>()
    };
    let console = Console::default();
    let running = Running::start(guest(&console, None, images()).expect("a guest"));
    let snapshot = running.save(AfterSnapshot::Stop);
    running.thread.join().expect("no panic").expect("it ran");
    let same = guest(&console, Some(again(&snapshot)), images());
    drop(same.expect("both are the same"));
    let second = File::options().write(true).open(&paths[1]).expect("a file");
    second.write_all_at(&[1], 0).expect("room");
    let later = std::time::SystemTime::now() + Duration::from_secs(1);
    second.set_modified(later).expect("it is ours");
    let refused = guest(&console, Some(snapshot), images()).expect_err("it was written");
    let text = refused.to_string();
    assert!(text.contains("disk 1 (/dev/vdb in the guest)"), "{text}");
    assert!(text.contains("written after the snapshot"), "{text}");
}

#[test]
fn a_guest_that_has_another_kernels_processor_goes_on() {
    if !kvm() {
        return;
    }
    let console = Console::default();
    let running = Running::start(guest(&console, None, Vec::new()).expect("a guest"));
    console.until(300);
    let mut snapshot = running.save(AfterSnapshot::Stop);
    running.thread.join().expect("no panic").expect("it ran");
    // As if the kernel of the snapshot had not offered RDRAND.
    const RDRAND: u32 = 1 << 30;
    let leaf = |entries: &mut Vec<kvm_cpuid_entry2>| {
        let at = entries.iter().position(|entry| entry.function == 1);
        at.expect("each processor has it")
    };
    let at = leaf(&mut snapshot.state.processor);
    snapshot.state.processor[at].ecx &= !RDRAND;
    let console = Console::default();
    let restored = guest(&console, Some(again(&snapshot)), Vec::new()).expect("more is offered");
    let restored = Running::start(restored);
    counts_on(&console, &snapshot);
    let later = restored.save(AfterSnapshot::Stop);
    restored.thread.join().expect("no panic").expect("it ran");
    assert_eq!(
        later.state.processor[at].ecx & RDRAND,
        0,
        "it does not change"
    );
}

#[test]
fn a_snapshot_that_cannot_be_stored_leaves_the_guest_running() {
    if !kvm() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk");
    std::fs::write(&path, [0; 4096]).expect("room");
    let disk = DiskImage::open(&path, DiskAccess::ReadWrite).expect("an image");
    let console = Console::default();
    let running = Running::start(guest(&console, None, vec![disk]).expect("a guest"));
    console.until(300);
    for _ in 0..2 {
        let full = File::options().write(true).open("/dev/full");
        let (sender, ended) = channel();
        let conclude = move |state: Result<VmState, SnapshotError>| {
            sender.send(state.map(drop)).expect("the test waits");
            AfterSnapshot::Continue
        };
        let full = full.expect("a device without room");
        running.snapshots.request(full, Box::new(conclude));
        let refused = ended.recv_timeout(PATIENCE).expect("an answer");
        let refused = refused.expect_err("there is no room");
        assert!(matches!(refused, SnapshotError::Write(_)), "{refused}");
        console.until(console.len() + 300);
    }
    let snapshot = running.save(AfterSnapshot::Stop);
    running.thread.join().expect("no panic").expect("it ran");
    let written = console.0.lock().clone();
    let follows = written
        .windows(2)
        .all(|pair| pair[1] == pair[0].wrapping_add(1));
    assert!(follows, "a count is lost or comes twice");
    assert!(word(&snapshot, COUNTER) >= 900);
}

#[test]
fn a_guest_that_has_ended_drops_the_request() {
    if !kvm() {
        return;
    }
    let console = Console::default();
    let running = Running::start(guest(&console, None, Vec::new()).expect("a guest"));
    let snapshots = running.snapshots.clone();
    assert_eq!(running.end(), ExitReason::Stopped);
    let (sender, saved) = channel::<()>();
    let conclude = move |_| {
        drop(sender);
        AfterSnapshot::Continue
    };
    snapshots.request(tempfile::tempfile().expect("a file"), Box::new(conclude));
    assert!(
        saved
            .recv_timeout(PATIENCE)
            .is_err_and(|error| { error == std::sync::mpsc::RecvTimeoutError::Disconnected })
    );
}

/// Returns the text of the state of a guest that has just started.
fn text() -> &'static str {
    static TEXT: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    TEXT.get_or_init(|| {
        let console = Console::default();
        let running = Running::start(guest(&console, None, Vec::new()).expect("a guest"));
        let snapshot = running.save(AfterSnapshot::Stop);
        serde_json::to_string(&snapshot.state).expect("it is text")
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_damaged_state_is_refused_or_restored(
        damages in proptest::collection::vec((any::<proptest::sample::Index>(), 0u8..10), 1..8)
    ) {
        if !kvm() {
            return Ok(());
        }
        let mut bytes = text().as_bytes().to_vec();
        let digits: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at].is_ascii_digit()).collect();
        for (place, digit) in damages {
            bytes[digits[place.index(digits.len())]] = b'0' + digit;
        }
        let Ok(state) = serde_json::from_slice::<VmState>(&bytes) else {
            return Ok(());
        };
        let memory = tempfile::tempfile().expect("a file");
        memory::identify(&memory, MEMORY, &state.identity).expect("room");
        let console = Console::default();
        // All results are valid. A guest that is restored runs, with its devices.
        if let Ok(vm) = guest(&console, Some(Snapshot { state, memory }), Vec::new()) {
            let running = Running::start(vm);
            running.stop.stop();
            let _ = running.thread.join().expect("no panic");
        }
    }
}
