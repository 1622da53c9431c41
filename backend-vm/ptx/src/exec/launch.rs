//! Launches a kernel: checks the configuration, and distributes the blocks of the grid over host threads.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use wormhole_lock::Mutex;

use super::block::{Block, Progress};
use super::check::Findings;
use super::global::Global;
use super::helpers::{HELPERS, Permit};
use super::special::now;
use super::{GlobalMemory, LaunchConfig, Output};
use crate::decode::KernelCode;
use crate::error::{Fault, FaultKind};
use crate::limits::{
    MAX_BLOCK_LOCAL_BYTES, MAX_BLOCK_ROW_BYTES, MAX_BLOCK_THREADS, MAX_SHARED_BYTES,
};
use crate::module::Kernel;

/// Number of rounds of turns that a block runs before another may.
const ROUNDS: u32 = 16;
/// Maximum number of host threads of a launch.
const THREADS: usize = 1024;
/// Maximum number of blocks in progress on one host thread, unless the launch is cooperative.
const RESIDENT: usize = 32;
/// Maximum bytes that those blocks may use.
const RESIDENT_BYTES: usize = 256 << 20;
/// Maximum bytes that the blocks of a cooperative launch may use.
const COOPERATIVE_BYTES: u64 = 8 << 30;
/// Duration of work below which another thread is not worth starting.
const ALONE: Duration = Duration::from_micros(40);
/// Longest sleep between two checks for cancellation.
const NAP: Duration = Duration::from_micros(500);

/// State shared by all blocks of a launch.
pub(super) struct Launch<'a> {
    pub code: &'a KernelCode,
    pub name: &'a str,
    pub config: LaunchConfig<'a>,
    pub output: &'a dyn Output,
    /// Bytes of shared memory of a block, static and dynamic.
    pub shared_bytes: usize,
    /// Number of blocks that one host thread begins before it ends one.
    resident: usize,
    stop: AtomicBool,
    /// Numbers of blocks of the grid: all, those begun, and those that have triggered the launch of
    /// dependents.
    blocks: u64,
    begun: AtomicU64,
    triggered: AtomicU64,
    /// Findings of the checker.
    pub findings: Findings,
}

impl Launch<'_> {
    /// Returns the number of threads of a block.
    pub(super) fn threads(&self) -> u32 {
        self.config.block.iter().product()
    }

    /// Returns the number of warps of a block.
    pub(super) fn warps(&self) -> u32 {
        self.threads().div_ceil(32)
    }

    /// Returns the mask of a warp's lanes that have a thread.
    pub(super) fn lanes(&self, warp: u32) -> u32 {
        let threads = self.threads() - warp * 32;
        if threads >= 32 {
            u32::MAX
        } else {
            (1 << threads) - 1
        }
    }

    /// Returns the index of a block of the grid, by its number.
    pub(super) fn block_index(&self, number: u64) -> [u32; 3] {
        let [x, y, _] = self.config.grid.map(u64::from);
        let index = [number % x, number / x % y, number / (x * y)];
        index.map(|axis| u32::try_from(axis).unwrap_or(u32::MAX))
    }

    /// Returns the index of a thread of a block, by its number.
    pub(super) fn thread_index(&self, number: u32) -> [u32; 3] {
        let [x, y, _] = self.config.block;
        [number % x, number / x % y, number / (x * y)]
    }

    fn block_begun(&self) {
        if let Some(milestones) = self.config.milestones
            && self.is_last(&self.begun)
        {
            milestones.begun();
        }
    }

    pub(super) fn block_triggered(&self) {
        if let Some(milestones) = self.config.milestones
            && self.is_last(&self.triggered)
        {
            milestones.triggered();
        }
    }

    /// Counts one more block. Returns true for the last one, ordered after the effects of all blocks.
    fn is_last(&self, count: &AtomicU64) -> bool {
        count.fetch_add(1, Ordering::AcqRel) + 1 == self.blocks
    }

    /// Returns whether the launch is to end early.
    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
            || self
                .config
                .cancel
                .is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }
}

/// Blocks that have not begun, and the first fault.
struct Queue {
    next: AtomicU64,
    blocks: u64,
    fault: Mutex<Option<Box<Fault>>>,
}

impl Queue {
    fn take(&self) -> Option<u64> {
        // The counter cannot overflow: there are fewer than 2^63 blocks, and few threads that take them.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number < self.blocks).then_some(number)
    }

    fn is_empty(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.blocks
    }

    fn fail(&self, launch: &Launch<'_>, fault: Box<Fault>) {
        launch.stop.store(true, Ordering::Relaxed);
        self.fault.lock().get_or_insert(fault);
    }
}

/// Runs `kernel` to its end on the calling thread and, if it takes long, on others.
///
/// # Errors
///
/// The first fault of any thread; the other blocks are then abandoned.
pub fn launch(
    kernel: &Kernel,
    config: &LaunchConfig<'_>,
    memory: &dyn GlobalMemory,
    output: &dyn Output,
) -> Result<(), Fault> {
    let code = kernel.code();
    let failed = |kind| {
        Err(Fault {
            kind,
            kernel: kernel.name().to_owned(),
            line: 0,
            block: [0; 3],
            thread: [0; 3],
        })
    };
    let shared = u64::from(code.dynamic_shared) + u64::from(config.dynamic_shared);
    let threads = config
        .block
        .iter()
        .map(|&extent| u64::from(extent))
        .product::<u64>();
    let blocks = config
        .grid
        .iter()
        .try_fold(1_u64, |count, &extent| count.checked_mul(u64::from(extent)));
    // The largest grid of the described device has less than 2^63 blocks.
    let Some(blocks) = blocks.filter(|&blocks| blocks > 0 && blocks < 1 << 63) else {
        return failed(FaultKind::InvalidLaunch("the grid is empty or too large"));
    };
    if threads == 0 {
        return failed(FaultKind::InvalidLaunch("the block is empty"));
    }
    if threads > u64::from(MAX_BLOCK_THREADS.min(kernel.max_threads_per_block())) {
        return failed(FaultKind::OutOfResources {
            what: "more threads in a block than the kernel can have",
        });
    }
    if kernel
        .required_block()
        .is_some_and(|required| required != config.block)
    {
        return failed(FaultKind::InvalidLaunch(
            "the block differs from the one that .reqntid demands",
        ));
    }
    if shared > u64::from(MAX_SHARED_BYTES) {
        return failed(FaultKind::OutOfResources {
            what: "more shared memory than a block can have",
        });
    }
    if config.params.len() < code.param_bytes as usize {
        return failed(FaultKind::InvalidLaunch(
            "the parameter buffer is too short",
        ));
    }
    let warps = usize::try_from(threads.div_ceil(32)).unwrap_or(usize::MAX);
    let entry = &code.functions[0].code;
    let rows = entry.rows as usize * size_of::<crate::alu::Row>();
    let local = entry.local_bytes as usize * 32;
    let (rows, local) = (rows.saturating_mul(warps), local.saturating_mul(warps));
    if rows > MAX_BLOCK_ROW_BYTES || local > MAX_BLOCK_LOCAL_BYTES {
        let what = "more registers or local memory than a block can have";
        return failed(FaultKind::OutOfResources { what });
    }
    let block_bytes = rows + local + usize::try_from(shared).unwrap_or(0);
    if config.cooperative && blocks.saturating_mul(block_bytes as u64) > COOPERATIVE_BYTES {
        let what = "more blocks at once than the device can hold";
        return failed(FaultKind::OutOfResources { what });
    }
    let launch = Launch {
        code,
        name: kernel.name(),
        config: *config,
        output,
        shared_bytes: usize::try_from(shared).unwrap_or(0),
        resident: (RESIDENT_BYTES / block_bytes.max(1)).clamp(1, RESIDENT),
        stop: AtomicBool::new(false),
        blocks,
        begun: AtomicU64::new(0),
        triggered: AtomicU64::new(0),
        findings: Findings::default(),
    };
    let queue = Queue {
        next: AtomicU64::new(0),
        blocks,
        fault: Mutex::new(None),
    };
    run(&launch, &queue, memory);
    let first = queue.fault.into_inner();
    match first {
        Some(first) => Err(*first),
        None if launch.stopped() => failed(FaultKind::Cancelled),
        None => Ok(()),
    }
}

/// Runs the blocks of a launch on this thread and, if they take long, on helpers.
fn run(launch: &Launch<'_>, queue: &Queue, memory: &dyn GlobalMemory) {
    let blocks = usize::try_from(queue.blocks).unwrap_or(usize::MAX);
    let threads = launch.config.threads.clamp(1, THREADS);
    let wanted = threads.min(blocks) - 1;
    let started = Instant::now();
    thread::scope(|scope| {
        // Starts a helper that runs at most `capacity` blocks at a time. Returns false if the system has no thread for it.
        let help = |permit: Permit<'static>, capacity| {
            let help = move || {
                let _permit = permit;
                work(launch, queue, memory, capacity, &mut || {});
            };
            thread::Builder::new().spawn_scoped(scope, help).is_ok()
        };
        if launch.config.cooperative {
            // The blocks wait for each other, so this thread has those for which there is no helper.
            let permits: Vec<_> = (0..wanted).map_while(|_| HELPERS.permit(threads)).collect();
            let share = blocks.div_ceil(permits.len() + 1);
            let mut helped = 0;
            for permit in permits {
                if !help(permit, share) {
                    break;
                }
                helped += share;
            }
            let rest = blocks.saturating_sub(helped).max(share);
            return work(launch, queue, memory, rest, &mut || {});
        }
        let mut missing = wanted;
        let mut hire = || {
            while missing > 0 && started.elapsed() > ALONE && !queue.is_empty() {
                let Some(permit) = HELPERS.permit(threads) else {
                    return;
                };
                missing = match help(permit, launch.resident) {
                    true => missing - 1,
                    false => 0,
                };
            }
        };
        work(launch, queue, memory, launch.resident, &mut hire);
    });
}

/// Runs blocks until none is left, at most `capacity` at a time.
fn work(
    launch: &Launch<'_>,
    queue: &Queue,
    memory: &dyn GlobalMemory,
    capacity: usize,
    hire: &mut dyn FnMut(),
) {
    let mut global = Global::new(memory);
    let mut resident: VecDeque<Block> = VecDeque::new();
    let mut spare: Option<Block> = None;
    // Number of turns since a block was begun or ended. When every block has had one, another may begin.
    let mut turns = 0;
    let mut wake: Option<u64> = None;
    loop {
        if launch.stopped() {
            return;
        }
        let room = resident.len() < capacity;
        if room && (launch.config.cooperative || turns >= resident.len()) {
            match begin(launch, queue, &mut spare) {
                Ok(Some(block)) => {
                    launch.block_begun();
                    resident.push_front(block);
                    turns = 0;
                    wake = None;
                    if launch.config.cooperative && resident.len() < capacity {
                        continue;
                    }
                }
                Ok(None) if resident.is_empty() => return,
                Ok(None) => {}
                Err(kind) => {
                    let kernel = launch.name.to_owned();
                    let fault = Fault {
                        kind,
                        kernel,
                        line: 0,
                        block: [0; 3],
                        thread: [0; 3],
                    };
                    return queue.fail(launch, Box::new(fault));
                }
            }
        }
        hire();
        let Some(mut block) = resident.pop_front() else {
            continue;
        };
        turns += 1;
        match block.run(launch, &mut global, ROUNDS) {
            Ok(Progress::Done) => {
                spare = Some(block);
                turns = resident.len();
                wake = None;
                continue;
            }
            Ok(Progress::Ready) => wake = Some(0),
            Ok(Progress::Asleep(until)) => wake = Some(wake.unwrap_or(u64::MAX).min(until)),
            Err(fault) => return queue.fail(launch, fault),
        }
        resident.push_back(block);
        if turns >= resident.len() && (resident.len() >= capacity || queue.is_empty()) {
            let pause = wake.take().unwrap_or(0).saturating_sub(now());
            if pause > 0 {
                thread::sleep(Duration::from_nanos(pause).min(NAP));
            }
            turns = 0;
        }
    }
}

fn begin(
    launch: &Launch<'_>,
    queue: &Queue,
    spare: &mut Option<Block>,
) -> Result<Option<Block>, FaultKind> {
    let Some(number) = queue.take() else {
        return Ok(None);
    };
    match spare.take() {
        Some(mut block) => block.restart(launch, number).map(|()| Some(block)),
        None => Block::new(launch, number).map(Some),
    }
}
