//! The heartbeat: threads that do next to nothing at a fixed period, and note when they could not.
//!
//! A lane that stands while every beat goes on waits for Wormhole. A beat that stands as well says that the
//! machine does: its processors, its file system, or its making of processes. Each processor has two: one with the
//! priority that the lanes have, and one before which no other thread comes. Where the second goes on and the first
//! does not, the machine has not paused: it had others to serve. With `sched_autogroup` (sched(7)) that concerns all
//! that one session has started at the same time, as a pause does.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::family::{Spawned, locked};
use crate::command::Failure;

const PERIOD: Duration = Duration::from_millis(100);
/// The same of the beat that starts a process.
const PROCESS_PERIOD: Duration = Duration::from_secs(1);
/// A beat that comes later than this is noted.
const LATE: Duration = Duration::from_secs(1);

/// What a beat does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Sleeps, on this processor, and executes when its turn comes.
    Processor(usize),
    /// The same, and executes at once.
    Urgent(usize),
    /// Writes a file and removes it.
    File,
    /// Starts a process in namespaces of its own, as a supervisor does.
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

/// Two beats that lay further apart than they should.
#[derive(Clone, Copy, Debug)]
pub struct Gap {
    pub kind: Kind,
    pub begin: Instant,
    /// By CLOCK_MONOTONIC, which does not count the time of a suspended system.
    pub length: Duration,
    /// By CLOCK_BOOTTIME, which does.
    pub with_suspension: Duration,
    /// Time that the hypervisor gave to others, of the processor or of all.
    pub stolen: Duration,
}

/// The beats and what they noted.
#[derive(Debug)]
pub struct Heartbeat {
    gaps: Arc<Mutex<Vec<Gap>>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Heartbeat {
    /// Starts a beat for each processor, one for the file system of `folder`, and one for processes.
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

    /// For how much of the interval one beat of the machine, a processor's or the file's, was missing. That of processes
    /// is not counted: starting them is a part of what Wormhole does.
    pub fn missing(&self, begin: Instant, end: Instant) -> Duration {
        let mut by_kind: BTreeMap<Kind, Duration> = BTreeMap::new();
        for gap in locked(&self.gaps).iter() {
            let end = end.min(gap.begin + gap.length);
            *by_kind.entry(gap.kind).or_default() +=
                end.saturating_duration_since(begin.max(gap.begin));
        }
        by_kind.remove(&Kind::Process);
        by_kind.into_values().max().unwrap_or_default()
    }

    /// The gaps that began since the last call's.
    pub fn since(&self, seen: &mut usize) -> Vec<Gap> {
        let gaps = locked(&self.gaps);
        let fresh = gaps[*seen..].to_vec();
        *seen = gaps.len();
        fresh
    }

    /// The longest gap of each kind, for the closing line.
    pub fn longest(&self) -> String {
        let gaps = locked(&self.gaps);
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
                locked(gaps).push(Gap {
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

/// Has this thread executed before every thread that is not as urgent.
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

/// What a clock that counts from the start of something says.
pub fn duration(time: Timespec) -> Duration {
    Duration::new(
        time.tv_sec.try_into().unwrap_or(0),
        time.tv_nsec.try_into().unwrap_or(0),
    )
}

/// The eighth number of a processor's line in `/proc/stat`: hundredths of a second that the hypervisor gave to others
/// (proc_stat(5)).
fn stolen(processor: Option<usize>) -> Duration {
    let name = processor.map_or_else(|| "cpu".to_owned(), |number| format!("cpu{number}"));
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{name} ")));
    let hundredths = line.and_then(|line| line.split_whitespace().nth(7)?.parse::<u64>().ok());
    Duration::from_millis(10 * hundredths.unwrap_or(0))
}
