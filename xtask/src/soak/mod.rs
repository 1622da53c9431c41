//! `cargo xtask soak`: runs lanes of programs under load for a given time, beside a heartbeat that distinguishes a
//! pause of the machine from a stall of Wormhole.
//!
//! [`judge`] distinguishes a stalled lane from one that is slow or gets no processor.

mod family;
mod heartbeat;
mod judge;
mod lane;
mod members;
mod memory;
mod shared;
mod stop;
mod watch;
mod windows;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::set_child_subreaper;
use rustix::time::{ClockId, clock_gettime};

use self::heartbeat::{Heartbeat, duration};
use self::lane::{Lane, Program, Soak};
use self::shared::SharedBackend;
use self::stop::Stop;
use self::watch::Watch;
use crate::command::{Failure, step};
use crate::nvcc;
use crate::stage::{self, Stage};

#[derive(Debug, Args)]
pub struct Options {
    /// Minutes for which programs are started, also less than one.
    #[arg(long, default_value_t = 60.0)]
    minutes: f64,
    /// Number of programs that run at the same time.
    #[arg(long, default_value_t = 4)]
    lanes: usize,
    /// Staged installation. Without it, the installation is built first.
    #[arg(long)]
    stage: Option<PathBuf>,
    /// Tests the judge: stops a process of this kind for 8 s, and passes only if the judge reports a stall. The worker
    /// belongs to the shared backend, the supervisor to a lane.
    #[arg(long)]
    stop: Option<stop::Kind>,
    /// Attach as many windows to a backend VM and detach them, beside a guest that works, instead of running lanes.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(conflicts_with_all = ["minutes", "lanes", "stop"])]
    windows: Option<u32>,
}

/// Time above which a standing lane counts as stalled, without the time in which the machine stood.
const STALL: Duration = Duration::from_secs(5);
/// Time for which the lanes run before a process is stopped on purpose.
const WARM: Duration = Duration::from_secs(10);
/// Number of busy threads.
const BUSY: u32 = 2;
/// Folders below `target/programs` that hold the programs.
const LINKS: [&str; 3] = ["static", "shared", "per-thread"];
/// Programs of the lanes. They verify their own results.
const PROGRAMS: [&str; 36] = [
    "batches",
    "bitonic_sort",
    "black_scholes",
    "copies_3d",
    "captures",
    "conditional_nodes",
    "contexts",
    "convolution",
    "graph_nodes",
    "graphs",
    "green_contexts",
    "grid_sync",
    "half_gemm",
    "handoff",
    "histogram",
    "host_functions",
    "ipc",
    "kernels",
    "linked_units",
    "managed",
    "managed_variables",
    "matrix_mul",
    "memory_operations",
    "nbody",
    "pools",
    "prefix_scan",
    "reduction",
    "registered",
    "shareable",
    "shared_files",
    "spin_lock",
    "streams_events",
    "textures",
    "transpose",
    "vector_add",
    "virtual_memory",
];

/// Busy threads: they are the load, and the measure of the time that a busy thread gets.
#[derive(Debug, Default)]
struct Load {
    /// Total execution time of these threads in nanoseconds.
    executed: AtomicU64,
    stop: AtomicBool,
}

impl Load {
    fn run(&self) {
        let executed = || duration(clock_gettime(ClockId::ThreadCPUTime));
        let mut counted = Duration::ZERO;
        while !self.stop.load(Ordering::Relaxed) {
            for _ in 0..1 << 16 {
                std::hint::spin_loop();
            }
            let now = executed();
            let more = now.saturating_sub(counted).as_nanos();
            self.executed
                .fetch_add(more.try_into().unwrap_or(0), Ordering::Relaxed);
            counted = now;
        }
    }

    /// Returns the average execution time of one busy thread.
    fn share(&self) -> Duration {
        Duration::from_nanos(self.executed.load(Ordering::Relaxed)) / BUSY
    }
}

/// Runs the lanes, prints the closing line, and returns whether the soak passed.
pub fn soak(root: &Path, options: &Options) -> Result<bool, Failure> {
    let stage = match &options.stage {
        Some(prefix) => Stage {
            prefix: prefix.clone(),
        },
        None => stage::stage(root)?,
    };
    if let Some(count) = options.windows {
        return windows::run(root, &stage, count);
    }
    let start = Instant::now();
    let soak = Arc::new(prepare(root, &stage.prefix, start, options)?);
    // Orphans become children of this process, so that all processes of the runs are its descendants.
    set_child_subreaper(rustix::process::Pid::from_raw(family::own_number()))
        .map_err(|error| Failure::new(format!("orphans would be lost: {error}")))?;
    let heartbeat = Heartbeat::start(&soak.folder, &soak.spawned)?;
    let backend =
        SharedBackend::start(&soak.wormhole, &soak.folder, &soak.temporary, &soak.spawned)?;
    let backend = Arc::new(backend);
    let lanes: Vec<Arc<Lane>> = (0..options.lanes)
        .map(|number| {
            let shares = number >= options.lanes.div_ceil(2);
            Arc::new(Lane::new(number, shares.then(|| Arc::clone(&backend))))
        })
        .collect();
    step(&format!(
        "{} lanes of {} programs for {} min; logs and dumps in {}",
        lanes.len(),
        soak.programs.len(),
        options.minutes,
        soak.folder.display()
    ));

    let load = Load::default();
    let stop = options.stop.map(|kind| {
        let lane = match kind {
            stop::Kind::Worker => lanes.len().saturating_sub(1),
            stop::Kind::Supervisor => 0,
        };
        Stop::new(kind, lane, Instant::now() + WARM)
    });
    let mut watch = Watch::new(&soak, &lanes, &backend, &heartbeat, &load, stop);
    std::thread::scope(|scope| {
        for _ in 0..BUSY {
            scope.spawn(|| load.run());
        }
        let threads: Vec<_> = lanes
            .iter()
            .map(|lane| scope.spawn(|| lane.serve(&soak)))
            .collect();
        while !threads
            .iter()
            .all(std::thread::ScopedJoinHandle::is_finished)
        {
            watch.look();
            std::thread::sleep(watch::INTERVAL);
        }
        load.stop.store(true, Ordering::Relaxed);
    });
    let mut wrong = watch.finish();
    let (pause, stood) = (watch.longest_pause(), watch.longest_stand());
    let (starved, memory) = (watch.starved(), watch.memory());
    if !backend.finish()? {
        wrong.push("the shared backend ended with an error".to_owned());
    }
    let left = fs::read_dir(&soak.temporary).map_or(0, Iterator::count);
    if left > 0 {
        wrong.push(format!(
            "{left} files are left in {}",
            soak.temporary.display()
        ));
    }
    let mut verified = 0;
    let mut ended = 0;
    let mut longest = Duration::ZERO;
    for lane in &lanes {
        let tally = lane.tally.lock();
        verified += tally.verified;
        ended += tally.ended;
        longest = longest.max(tally.longest);
        wrong.extend(tally.wrong.iter().cloned());
    }
    for text in &wrong {
        eprintln!("xtask: FAILED: {text}");
    }
    let gaps = heartbeat.longest();
    heartbeat.stop();
    let passed = wrong.is_empty() && verified > 0;
    println!(
        "soak: {} minutes={} verified={verified} ended={ended} wrong={} longest_run={:.1}s longest_pause={:.1}s \
         longest_stall={:.1}s starved={starved} longest_gaps={gaps} {memory}",
        if passed { "PASS" } else { "FAIL" },
        start.elapsed().as_secs() / 60,
        wrong.len(),
        longest.as_secs_f64(),
        pause.as_secs_f64(),
        stood.as_secs_f64(),
    );
    Ok(passed)
}

/// Finds the programs to run and creates an empty folder for the soak.
fn prepare(root: &Path, prefix: &Path, start: Instant, options: &Options) -> Result<Soak, Failure> {
    let built = root.join("target/programs");
    let mut found = Vec::new();
    for link in LINKS {
        let named = PROGRAMS.map(|name| (built.join(link).join(name), name));
        found.extend(named.into_iter().filter(|(path, _)| path.is_file()));
    }
    if found.is_empty() {
        return Err(Failure::new(format!(
            "no program is built in {}: run cargo xtask setup",
            built.display()
        )));
    }
    let folder = root.join("target/soak");
    let temporary = folder.join("tmp");
    let made = match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => fs::create_dir_all(&temporary),
    };
    made.map_err(|error| Failure::new(format!("cannot make {}: {error}", folder.display())))?;
    let end = Duration::try_from_secs_f64(60.0 * options.minutes).ok();
    let end = end.filter(|time| !time.is_zero());
    let end = end.and_then(|time| start.checked_add(time));
    let end = end.ok_or_else(|| {
        let minutes = options.minutes;
        Failure::new(format!(
            "--minutes {minutes} is no time: say a number of minutes above 0"
        ))
    })?;
    Ok(Soak {
        wormhole: prefix.join("bin/wormhole"),
        folder,
        temporary,
        programs: found
            .into_iter()
            .map(|(path, name)| Program {
                path,
                name: name.to_owned(),
            })
            .collect(),
        endless: built.join(nvcc::Link::Static.name()).join(lane::ENDLESS),
        spawned: Arc::default(),
        end,
    })
}
