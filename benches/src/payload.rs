//! Runs a payload in a VM on one processor, and a host thread on another.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::thread::{CpuSet, sched_setaffinity};
use vm_memory::{FileOffset, MmapRegion};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_monitor::payload::{
    Doorbell, ParameterBlock, PayloadConfig, PayloadReport, PayloadVm, PayloadWindow,
};
use wormhole_monitor::stats::VmStats;
use wormhole_monitor::{DisabledExits, ExitReason, VmError};
use wormhole_ring::layout::{SEGMENT_BYTES, WINDOW_BASE};
use wormhole_ring::memory::{MemoryError, SessionMemory};

/// Error from a measurement.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("cannot read the payload {path}: build it with `cargo xtask bench`")]
    Payload {
        path: String,
        source: std::io::Error,
    },
    #[error("cannot make a window")]
    Window(#[from] rustix::io::Errno),
    #[error("cannot use the window's file")]
    File(#[source] std::io::Error),
    #[error("KVM's statistics cannot be read")]
    Stats(#[from] wormhole_monitor::stats::StatsError),
    #[error("cannot map the window")]
    Map(#[from] vm_memory::mmap::MmapRegionError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error("the payload {name} failed: {outcome}")]
    Failed {
        name: &'static str,
        outcome: ExitReason,
    },
    #[error("the ring broke")]
    Ring(#[from] wormhole_ring::ring::Violation),
    #[error("the stream broke")]
    Stream(#[from] wormhole_ring::stream::StreamError),
    #[error("an answer does not fit")]
    Answer(#[from] wormhole_ring::slot::SlotError),
    #[error("the payload ended before its work was done")]
    Ended,
    #[error("there is no {0}")]
    Missing(&'static str),
}

/// A window, mapped at [`WINDOW_BASE`] in payloads and at an address of the kernel's choice in this process.
#[derive(Debug)]
pub struct Window {
    file: File,
    region: MmapRegion<()>,
}

impl Window {
    /// Creates a window.
    pub fn new(segments: usize) -> Result<Self, BenchError> {
        let file: File = memfd_create(
            "wormhole-bench",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?
        .into();
        ftruncate(&file, (segments * SEGMENT_BYTES) as u64)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Self::of(file)
    }

    /// Maps a window file.
    pub fn of(file: File) -> Result<Self, BenchError> {
        let bytes = file.metadata().map_err(BenchError::File)?.len();
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let shared = file.try_clone().map_err(BenchError::File)?;
        Ok(Self {
            file,
            region: MmapRegion::from_file(FileOffset::new(shared, 0), bytes)?,
        })
    }

    pub fn bytes(&self) -> usize {
        self.region.size()
    }

    /// Returns `count` words from `offset` on.
    pub fn words(&self, offset: usize, count: u64) -> Vec<u64> {
        let count = usize::try_from(count).unwrap_or(0);
        (0..count)
            .map(|index| self.word(offset + 8 * index).load(Ordering::Relaxed))
            .collect()
    }

    /// Returns the session in segment `index`.
    pub fn session(&self, index: usize) -> Result<SessionMemory, BenchError> {
        // SAFETY: the region maps that segment for as long as this window lives, and the window outlives
        // the runs that use the session.
        Ok(unsafe {
            SessionMemory::new(
                self.region.as_ptr().add(index * SEGMENT_BYTES),
                SEGMENT_BYTES,
            )
        }?)
    }

    /// Returns the word at `offset` in this process's mapping.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < self.region.size());
        // SAFETY: inside the mapping, aligned, and accessed only as an atomic word in this process.
        unsafe { AtomicU64::from_ptr(self.region.as_ptr().add(offset).cast()) }
    }

    /// Tells the server of a stream the session whose segment lies at `offset`.
    pub fn introduce(&self, stream: &UnixStream, offset: u64) -> std::io::Result<()> {
        let sent = stream.send_with_fd(&offset.to_ne_bytes()[..], self.file.as_raw_fd());
        sent.map(drop)
            .map_err(|error| std::io::Error::from_raw_os_error(error.errno()))
    }

    fn share(&self) -> Result<OwnedFd, BenchError> {
        Ok(self.file.try_clone().map_err(BenchError::File)?.into())
    }
}

/// Returns the payload's address of `offset` in the window.
pub fn guest_address(offset: usize) -> u64 {
    WINDOW_BASE + offset as u64
}

/// State of a run for the host's thread.
#[derive(Debug)]
pub struct Beside {
    pub parameters: ParameterBlock,
    stats: VmStats,
    ended: AtomicBool,
}

impl Beside {
    /// Returns the payload's VM exits so far.
    pub fn exits(&self) -> Result<u64, BenchError> {
        Ok(self.stats.read()?.vcpu_sum("exits"))
    }

    /// Returns an error once the payload has ended, so that loops that wait for it stop.
    pub fn goes_on(&self) -> Result<(), BenchError> {
        if self.ended.load(Ordering::Acquire) {
            return Err(BenchError::Ended);
        }
        Ok(())
    }
}

/// Runs a payload on processor 0 and `host` on processor 1, and returns the result of `host`.
pub fn run<T: Send>(
    folder: &Path,
    name: &'static str,
    parameters: Vec<u64>,
    window: &Window,
    host: impl FnOnce(&Beside) -> Result<T, BenchError> + Send,
) -> Result<T, BenchError> {
    run_rung(folder, name, parameters, window, None, host)
}

/// Runs a payload as [`run`] does, with a doorbell.
pub fn run_rung<T: Send>(
    folder: &Path,
    name: &'static str,
    parameters: Vec<u64>,
    window: &Window,
    doorbell: Option<Doorbell>,
    host: impl FnOnce(&Beside) -> Result<T, BenchError> + Send,
) -> Result<T, BenchError> {
    let rung = doorbell.as_ref().map(|doorbell| doorbell.rung.try_clone());
    let rung = rung.transpose().map_err(BenchError::File)?;
    let path = folder.join(name);
    let elf = std::fs::read(&path).map_err(|source| BenchError::Payload {
        path: path.display().to_string(),
        source,
    })?;
    let vm = PayloadVm::new(PayloadConfig {
        elf,
        parameters: vec![parameters],
        memory_mib: 16,
        window: Some(PayloadWindow {
            memfd: window.share()?,
            address: WINDOW_BASE,
        }),
        timeout: Some(Duration::from_secs(120)),
        disabled_exits: DisabledExits {
            pause: true,
            halt: false,
        },
        pins: Vec::new(),
        doorbell,
    })?;
    let beside = Beside {
        parameters: vm
            .parameters(0)
            .ok_or(BenchError::Missing("parameter block"))?,
        stats: vm.stats(),
        ended: AtomicBool::new(false),
    };
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| -> Result<PayloadReport, BenchError> {
            let report = pin(0).and_then(|()| Ok(vm.run()?));
            beside.ended.store(true, Ordering::Release);
            if let Some(rung) = &rung {
                // Ends a sleep for the doorbell.
                let _ = rung.write(1);
            }
            report
        });
        let host = scope.spawn(|| {
            pin(1)?;
            host(&beside)
        });
        let report = guest
            .join()
            .map_err(|_| BenchError::Missing("report of the guest's thread"))??;
        match report.outcome {
            ExitReason::Exited { status: 0 } => host
                .join()
                .map_err(|_| BenchError::Missing("result of the host's thread"))?,
            outcome => Err(BenchError::Failed { name, outcome }),
        }
    })
}

/// Pins the calling thread, and the threads that it starts, to one processor.
fn pin(processor: usize) -> Result<(), BenchError> {
    let mut set = CpuSet::new();
    set.set(processor);
    Ok(sched_setaffinity(None, &set)?)
}
