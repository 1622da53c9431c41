//! Runs a block: its warps take turns on one host thread.

use super::barrier::Barriers;
use super::check::Checker;
use super::global::Global;
use super::launch::Launch;
use super::special::now;
use super::warp::{Context, Turn, Warp};
use crate::error::{Fault, FaultKind};

/// Number of instructions of a warp's turn.
const TURN: u64 = 16_384;

/// Result of a block's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// The block can run on.
    Ready,
    /// All threads that do not wait are asleep, the first of them until this time.
    Asleep(u64),
    /// All threads have ended.
    Done,
}

/// State of a block that has begun and not ended.
#[derive(Debug)]
pub(super) struct Block {
    index: [u32; 3],
    shared: Vec<u8>,
    warps: Vec<Warp>,
    barriers: Barriers,
    checker: Option<Box<Checker>>,
    triggered: bool,
}

impl Block {
    /// Makes a block at the beginning of the kernel.
    pub(super) fn new(launch: &Launch<'_>, number: u64) -> Result<Self, FaultKind> {
        let warps = (0..launch.warps()).map(|warp| Warp::new(launch, warp, launch.lanes(warp)));
        Ok(Self {
            index: launch.block_index(number),
            shared: vec![0; launch.shared_bytes],
            warps: warps.collect::<Result<_, _>>()?,
            barriers: Barriers::new(launch.threads()),
            checker: checker(launch),
            triggered: false,
        })
    }

    /// Begins another block in the memory of one that has ended.
    pub(super) fn restart(&mut self, launch: &Launch<'_>, number: u64) -> Result<(), FaultKind> {
        self.index = launch.block_index(number);
        self.barriers = Barriers::new(launch.threads());
        self.checker = checker(launch);
        self.triggered = false;
        for warp in &mut self.warps {
            warp.restart(launch, launch.lanes(warp.index))?;
        }
        Ok(())
    }

    /// Runs every warp in turn until `rounds` rounds have passed or none can run.
    pub(super) fn run(
        &mut self,
        launch: &Launch<'_>,
        global: &mut Global<'_>,
        rounds: u32,
    ) -> Result<Progress, Box<Fault>> {
        let mut cx = Context {
            launch,
            global,
            shared: &mut self.shared,
            barriers: &mut self.barriers,
            checker: self.checker.as_deref_mut(),
            block: self.index,
            triggered: &mut self.triggered,
        };
        for _ in 0..rounds {
            let mut ready = false;
            let mut wake = u64::MAX;
            let mut progress = false;
            for warp in &mut self.warps {
                let before = warp.count;
                match warp.run(&mut cx, TURN)? {
                    Turn::Ready => ready = true,
                    Turn::Asleep(until) => wake = wake.min(until),
                    Turn::Blocked | Turn::Done => {}
                }
                progress |= warp.count != before;
            }
            if cx.barriers.live() == 0 {
                cx.trigger();
                return Ok(Progress::Done);
            }
            if launch.stopped() {
                return Ok(Progress::Ready);
            }
            // A warp that ran may have released one whose turn had passed.
            if ready || progress {
                continue;
            }
            if wake != u64::MAX {
                return Ok(if wake <= now() {
                    Progress::Ready
                } else {
                    Progress::Asleep(wake)
                });
            }
            return Err(Box::new(Fault {
                kind: FaultKind::Deadlock,
                kernel: launch.name.to_owned(),
                line: 0,
                block: self.index,
                thread: [0; 3],
            }));
        }
        Ok(Progress::Ready)
    }
}

/// Returns the checker of a block, if the launch is checked.
fn checker(launch: &Launch<'_>) -> Option<Box<Checker>> {
    launch.config.check.then(|| Box::new(Checker::new(launch)))
}
