//! Heartbeat: threads that do a small action at a fixed period, and record when it was late.
//!
//! If a lane stands while every beat continues, the lane waits for Wormhole. If a beat stands as well, the machine
//! does: its processors, its file system, or its creation of processes. Each processor has two beats: one with the
//! priority of the lanes, and one with a real-time priority. If the second continues and the first does not, the
//! machine has not paused but executed other threads. With `sched_autogroup` (sched(7)) that affects all processes of
//! one session at the same time, as a pause does.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wormhole_lock::Mutex;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::family::Spawned;
use crate::command::Failure;

const PERIOD: Duration = Duration::from_millis(100);
/// Period of the beat that starts a process.
const PROCESS_PERIOD: Duration = Duration::from_secs(1);
/// Delay above which a beat is recorded as late.
const LATE: Duration = Duration::from_secs(1);

/// Kind of a beat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Sleeps on this processor and executes when it is scheduled.
    Processor(usize),
    /// Sleeps on this processor and executes at once, with real-time priority.
    Urgent(usize),
    /// Writes a file and removes it.
    File,
    /// Starts a process in new namespaces, as a supervisor does.
    Process,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Processor(number) => write!(f, "processor {number}"),
            Self::Urgent(number) => write!(f, "processor {number}, the urgent one,"),
            Self::File => f.write_str("file"),
            Self::Process => f.write_str("process"),
        }
    }
}

/// An interval between two beats that was too long.
#[derive(Clone, Copy, Debug)]
pub struct Gap {
    pub kind: Kind,
    pub begin: Instant,
    /// Length by CLOCK_MONOTONIC, which excludes time in which the system was suspended.
    pub length: Duration,
    /// Length by CLOCK_BOOTTIME, which includes it.
    pub with_suspension: Duration,
    /// Time stolen by the hypervisor, of the processor or of all processors.
    pub stolen: Duration,
}

/// The beats and their recorded gaps.
#[derive(Debug)]
pub struct Heartbeat {
    gaps: Arc<Mutex<Vec<Gap>>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Heartbeat {
    /// Starts two beats for each processor, one for the file system of `folder`, and one for processes.
    pub fn start(folder: &Path, spawned: &Arc<Spawned>) -> Result<Self, Failure> {
        let processors = sched_getaffinity(None)
            .map_err(|error| Failure::new(format!("cannot tell the processors: {error}")))?;
        let kinds = (0..CpuSet::MAX_CPU)
            .filter(|number| processors.is_set(*number))
            .flat_map(|number| [Kind::Processor(number), Kind::Urgent(number)])
            .chain([Kind::File, Kind::Process]);
        let gaps = Arc::default();
        let stop = Arc::default();
        let mut threads = Vec::new();
        for kind in kinds {
            let beat = Beat {
                kind,
                file: folder.join("beat"),
                spawned: Arc::clone(spawned),
            };
            let (gaps, stop) = (Arc::clone(&gaps), Arc::clone(&stop));
            let thread = std::thread::Builder::new()
                .name(format!("beat of {kind}"))
                .spawn(move || beat.run(&gaps, &stop));
            let thread =
                thread.map_err(|error| Failure::new(format!("no thread for a beat: {error}")))?;
            threads.push(thread);
        }
        Ok(Self {
            gaps,
            stop,
            threads,
        })
    }

    /// Returns for how much of the interval a beat was missing: the largest value of the processors' and the file's
    /// beats. The beat of processes does not count, because Wormhole itself starts processes.
    pub fn missing(&self, begin: Instant, end: Instant) -> Duration {
        let mut by_kind: BTreeMap<Kind, Duration> = BTreeMap::new();
        for gap in self.gaps.lock().iter() {
            let end = end.min(gap.begin + gap.length);
            *by_kind.entry(gap.kind).or_default() +=
                end.saturating_duration_since(begin.max(gap.begin));
        }
        by_kind.remove(&Kind::Process);
        by_kind.into_values().max().unwrap_or_default()
    }

    /// Returns the gaps recorded since the last call with this `seen`.
    pub fn since(&self, seen: &mut usize) -> Vec<Gap> {
        let gaps = self.gaps.lock();
        let fresh = gaps[*seen..].to_vec();
        *seen = gaps.len();
        fresh
    }

    /// Returns the longest gap of each kind, for the closing line.
    pub fn longest(&self) -> String {
        let gaps = self.gaps.lock();
        let of = |name: &str, wanted: fn(Kind) -> bool| {
            let lengths = gaps.iter().filter(|gap| wanted(gap.kind));
            let longest = lengths.map(|gap| gap.length).max().unwrap_or_default();
            format!("{name}:{:.1}s", longest.as_secs_f64())
        };
        [
            of("urgent", |kind| matches!(kind, Kind::Urgent(_))),
            of("processor", |kind| matches!(kind, Kind::Processor(_))),
            of("file", |kind| kind == Kind::File),
            of("process", |kind| kind == Kind::Process),
        ]
        .join(",")
    }

    pub fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

struct Beat {
    kind: Kind,
    file: std::path::PathBuf,
    spawned: Arc<Spawned>,
}

impl Beat {
    fn run(&self, gaps: &Mutex<Vec<Gap>>, stop: &AtomicBool) {
        if let Kind::Processor(number) | Kind::Urgent(number) = self.kind {
            let mut own = CpuSet::new();
            own.set(number);
            if let Err(error) = sched_setaffinity(None, &own) {
                eprintln!("xtask: the beat of {} is not pinned: {error}", self.kind);
            }
        }
        if let Kind::Urgent(_) = self.kind
            && let Err(error) = become_urgent()
        {
            eprintln!("xtask: there is no beat of {}: {error}", self.kind);
            return;
        }
        let period = match self.kind {
            Kind::Process => PROCESS_PERIOD,
            _ => PERIOD,
        };
        let mut last = self.now();
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(period);
            self.act();
            let now = self.now();
            let length = now.monotonic.duration_since(last.monotonic);
            let with_suspension = now.boot.saturating_sub(last.boot);
            if length.max(with_suspension) > period + LATE {
                gaps.lock().push(Gap {
                    kind: self.kind,
                    begin: last.monotonic,
                    length,
                    with_suspension,
                    stolen: now.stolen.saturating_sub(last.stolen),
                });
            }
            last = now;
        }
    }

    fn act(&self) {
        match self.kind {
            Kind::Processor(_) | Kind::Urgent(_) => {}
            Kind::File => {
                let beaten =
                    fs::write(&self.file, b"beat").and_then(|()| fs::remove_file(&self.file));
                if let Err(error) = beaten {
                    eprintln!("xtask: the beat of {}: {error}", self.kind);
                }
            }
            Kind::Process => {
                let mut command = std::process::Command::new("unshare");
                command.args([
                    "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "true",
                ]);
                if let Err(error) = self.spawned.run(&mut command) {
                    eprintln!("xtask: the beat of {}: {error}", self.kind);
                }
            }
        }
    }

    fn now(&self) -> Now {
        Now {
            monotonic: Instant::now(),
            boot: duration(clock_gettime(ClockId::Boottime)),
            stolen: stolen(match self.kind {
                Kind::Processor(number) | Kind::Urgent(number) => Some(number),
                _ => None,
            }),
        }
    }
}

/// Sets SCHED_FIFO for this thread, so that it runs before all threads without a real-time priority.
fn become_urgent() -> std::io::Result<()> {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: a live local structure; 0 is the calling thread.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

struct Now {
    monotonic: Instant,
    boot: Duration,
    stolen: Duration,
}

/// Converts a time that a clock counts from its start.
pub fn duration(time: Timespec) -> Duration {
    Duration::new(
        time.tv_sec.try_into().unwrap_or(0),
        time.tv_nsec.try_into().unwrap_or(0),
    )
}

/// Reads the steal time of a processor, or of all: the eighth number of its line in `/proc/stat`, in hundredths of a
/// second (proc_stat(5)).
fn stolen(processor: Option<usize>) -> Duration {
    let name = processor.map_or_else(|| "cpu".to_owned(), |number| format!("cpu{number}"));
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{name} ")));
    let hundredths = line.and_then(|line| line.split_whitespace().nth(7)?.parse::<u64>().ok());
    Duration::from_millis(10 * hundredths.unwrap_or(0))
}
