//! Runs a warp: its frames, and the groups into which its lanes have diverged.

use super::barrier::Barriers;
use super::check::{Checker, Watch};
use super::frame::{FrameId, Frames, Local, NO_FRAME};
use super::global::Global;
use super::launch::Launch;
use super::memory::{LaneFault, Spaces};
use crate::alu::LANES;
use crate::decode::Placed;
use crate::decode::insn::{BarrierKind, Op, Pc};
use crate::error::{Fault, FaultKind};

/// Number of instructions that a group may execute while other ready ones wait.
const PATIENCE: u64 = 4096;

/// Condition for which a group waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// None: the group can run.
    Ready,
    /// Completion of a barrier of the block, whose generation then changes.
    Barrier { id: usize, generation: u32 },
    /// Arrival of the other lanes of a collective operation.
    Collective { members: u32 },
    /// Time on the clock of [`super::special::now`].
    Sleep { until: u64 },
}

/// Lanes at one place in one frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    /// Program counter in the frame's function.
    pub pc: Pc,
    pub mask: u32,
    pub frame: FrameId,
    pub wait: Wait,
    /// The warp's count of instructions when the group last ran.
    pub ran: u64,
}

/// Result of a warp's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// The warp can run on.
    Ready,
    /// The warp sleeps until a time.
    Asleep(u64),
    /// The warp waits for others.
    Blocked,
    /// All threads have ended.
    Done,
}

/// Launch, memory and block that a warp uses while it runs.
pub(super) struct Context<'w, 'a> {
    pub launch: &'w Launch<'w>,
    pub global: &'w mut Global<'a>,
    pub shared: &'w mut [u8],
    pub barriers: &'w mut Barriers,
    pub checker: Option<&'w mut Checker>,
    /// Index of the block in each dimension.
    pub block: [u32; 3],
    /// Whether the block has triggered the launch of dependents.
    pub triggered: &'w mut bool,
}

impl Context<'_, '_> {
    /// Records that the block permits the launch of dependents.
    pub(super) fn trigger(&mut self) {
        if !std::mem::replace(self.triggered, true) {
            self.launch.block_triggered();
        }
    }
}

/// State of a warp.
#[derive(Debug)]
pub(super) struct Warp {
    pub index: u32,
    pub frames: Frames,
    pub groups: Vec<Group>,
    pub local: Local,
    /// Lanes that have not ended.
    pub alive: u32,
    /// Number of instructions executed. One that may be part of a polling loop counts as many.
    pub count: u64,
    /// Generation of the cluster's barrier at which each lane has arrived.
    pub cluster: [u32; LANES],
}

impl Warp {
    /// Makes a warp at the beginning of the kernel.
    pub(super) fn new(launch: &Launch<'_>, index: u32, alive: u32) -> Result<Self, FaultKind> {
        let kernel = launch.code;
        let entry = &*kernel.functions[0].code;
        let mut warp = Self {
            index,
            frames: Frames::default(),
            groups: Vec::with_capacity(2),
            local: Local::default(),
            alive,
            count: 0,
            cluster: [u32::MAX; LANES],
        };
        warp.local.reserve(entry.local_bytes)?;
        let frame = warp
            .frames
            .push((0, entry, kernel.dynamic_shared), NO_FRAME, 0, alive)?;
        warp.groups.push(Group {
            pc: 0,
            mask: alive,
            frame,
            wait: Wait::Ready,
            ran: 0,
        });
        Ok(warp)
    }

    /// Restarts the kernel for another block.
    pub(super) fn restart(&mut self, launch: &Launch<'_>, alive: u32) -> Result<(), FaultKind> {
        let kernel = launch.code;
        let entry = &*kernel.functions[0].code;
        self.groups.clear();
        self.alive = alive;
        self.cluster = [u32::MAX; LANES];
        let frame = self
            .frames
            .push((0, entry, kernel.dynamic_shared), NO_FRAME, 0, alive)?;
        self.groups.push(Group {
            pc: 0,
            mask: alive,
            frame,
            wait: Wait::Ready,
            ran: self.count,
        });
        Ok(())
    }

    /// Returns the memory spaces of this warp's lanes.
    pub(super) fn spaces<'w, 'a>(
        local: &'w mut Local,
        cx: &'w mut Context<'_, 'a>,
        (warp, pc): (u32, Pc),
    ) -> Spaces<'w, 'a> {
        Spaces {
            global: cx.global,
            shared: cx.shared,
            local,
            params: cx.launch.config.params,
            watch: cx.checker.as_deref_mut().map(|checker| Watch {
                checker,
                launch: cx.launch,
                block: cx.block,
                warp,
                pc,
                asynchronous: false,
            }),
        }
    }

    /// Runs until `budget` instructions are executed or nothing can run.
    pub(super) fn run(
        &mut self,
        cx: &mut Context<'_, '_>,
        budget: u64,
    ) -> Result<Turn, Box<Fault>> {
        let end = self.count + budget;
        while self.count < end {
            let Some((index, forced)) = self.pick(cx) else {
                return Ok(self.idle());
            };
            let group = self.groups.swap_remove(index);
            let (limit, stop) = self.bounds(&group, forced, end);
            self.step(cx, group, limit, stop)?;
        }
        Ok(if self.groups.is_empty() {
            Turn::Done
        } else {
            Turn::Ready
        })
    }

    /// Returns how long a group may run: a count of instructions, and the place of the next group
    /// ahead of it.
    fn bounds(&self, group: &Group, forced: bool, end: u64) -> (u64, Pc) {
        if self.groups.is_empty() {
            return (end, Pc::MAX);
        }
        let limit = end.min(self.count + PATIENCE);
        if forced {
            return (limit, Pc::MAX);
        }
        let ahead = self
            .groups
            .iter()
            .filter(|other| other.wait == Wait::Ready && other.frame == group.frame);
        (limit, ahead.map(|other| other.pc).min().unwrap_or(Pc::MAX))
    }

    fn idle(&self) -> Turn {
        if self.groups.is_empty() {
            return Turn::Done;
        }
        let wakes = self.groups.iter().filter_map(|group| match group.wait {
            Wait::Sleep { until } => Some(until),
            _ => None,
        });
        wakes.min().map_or(Turn::Blocked, Turn::Asleep)
    }

    /// Chooses the group that runs next, and returns whether it does because it has waited too long.
    fn pick(&mut self, cx: &mut Context<'_, '_>) -> Option<(usize, bool)> {
        if let [group] = &self.groups[..]
            && group.wait == Wait::Ready
        {
            return Some((0, false));
        }
        loop {
            self.wake(cx);
            let mut best: Option<(usize, (u32, Pc))> = None;
            let mut oldest: Option<(usize, u64)> = None;
            for (index, group) in self
                .groups
                .iter()
                .enumerate()
                .filter(|(_, group)| group.wait == Wait::Ready)
            {
                // The deepest call first, so that callers reconverge; then the group that is furthest
                // behind.
                let key = (u32::MAX - self.frames.get(group.frame).depth, group.pc);
                if best.is_none_or(|(_, found)| key < found) {
                    best = Some((index, key));
                }
                if oldest.is_none_or(|(_, ran)| group.ran < ran) {
                    oldest = Some((index, group.ran));
                }
            }
            if let Some((index, ran)) = oldest
                && self.count - ran > PATIENCE
            {
                return Some((index, true));
            }
            if let Some((index, _)) = best {
                return Some((index, false));
            }
            if !self.resolve_collectives(cx) {
                return None;
            }
        }
    }

    /// Makes groups ready whose wait has ended.
    fn wake(&mut self, cx: &mut Context<'_, '_>) {
        let mut now = None;
        for index in 0..self.groups.len() {
            let group = self.groups[index];
            let over = match group.wait {
                Wait::Barrier { id, generation } => {
                    let done = cx.barriers.generation(id) != generation;
                    if done {
                        self.barrier_result(cx, group, id);
                        if let Some(checker) = &mut cx.checker {
                            checker.complete_barrier(id, cx.barriers);
                            checker.leave(id, self.index, group.mask);
                        }
                    }
                    done
                }
                Wait::Sleep { until } => *now.get_or_insert_with(super::special::now) >= until,
                Wait::Ready | Wait::Collective { .. } => false,
            };
            if over {
                self.groups[index].wait = Wait::Ready;
                self.groups[index].pc += 1;
            }
        }
        // Groups at the same place merge.
        let mut index = 0;
        while index < self.groups.len() {
            let group = self.groups[index];
            let twin = self.groups[..index].iter().position(|other| {
                same_place(other, &group) && group.wait == Wait::Ready && other.wait == Wait::Ready
            });
            match twin {
                Some(twin) => {
                    self.groups[twin].mask |= group.mask;
                    self.groups.swap_remove(index);
                }
                None => index += 1,
            }
        }
    }

    fn barrier_result(&mut self, cx: &Context<'_, '_>, group: Group, id: usize) {
        let Some(Op::Barrier(barrier)) = self.operation(cx, &group) else {
            return;
        };
        let result = cx.barriers.result(id);
        let frame = self.frames.get_mut(group.frame);
        let set = |pred: &mut u32, value: bool| {
            *pred = if value {
                *pred | group.mask
            } else {
                *pred & !group.mask
            };
        };
        match barrier.kind {
            BarrierKind::Sync | BarrierKind::Arrive => {}
            BarrierKind::Count(reg) => {
                let row = [u64::from(result.count); LANES];
                crate::alu::commit(&mut frame.rows[reg as usize], &row, group.mask);
            }
            BarrierKind::All(pred) => set(&mut frame.preds[pred as usize], result.all),
            BarrierKind::Any(pred) => set(&mut frame.preds[pred as usize], result.any),
        }
    }

    /// Returns the function of a frame.
    pub(super) fn function<'c>(&self, cx: &Context<'c, '_>, frame: FrameId) -> &'c Placed {
        &cx.launch.code.functions[self.frames.get(frame).function as usize]
    }

    /// Returns the operation that a group executes next.
    pub(super) fn operation<'c>(&self, cx: &Context<'c, '_>, group: &Group) -> Option<&'c Op> {
        Some(&self.function(cx, group.frame).at(group.pc)?.op)
    }

    /// Adds a group, or merges it into one at the same place.
    pub(super) fn push(&mut self, group: Group) {
        if group.mask == 0 {
            return;
        }
        if group.wait == Wait::Ready
            && let Some(twin) = self
                .groups
                .iter_mut()
                .find(|other| other.wait == Wait::Ready && same_place(other, &group))
        {
            twin.mask |= group.mask;
            return;
        }
        self.groups.push(group);
    }

    /// Ends lanes: they leave their frames, and barriers no longer wait for them.
    pub(super) fn end_lanes(&mut self, cx: &mut Context<'_, '_>, frame: FrameId, mask: u32) {
        self.alive &= !mask;
        let mut id = frame;
        while id != NO_FRAME {
            let parent = self.frames.get(id).parent;
            self.frames.leave(id, mask);
            id = parent;
        }
        cx.barriers.leave(mask.count_ones());
    }

    /// Makes the fault of a lane.
    #[cold]
    pub(super) fn fault(
        &self,
        cx: &Context<'_, '_>,
        (frame, pc): (FrameId, Pc),
        fault: LaneFault,
    ) -> Box<Fault> {
        let insn = self.function(cx, frame).at(pc);
        let line = insn.map_or(0, |insn| insn.line);
        let thread = cx.launch.thread_index(self.index * 32 + fault.lane);
        Box::new(Fault {
            kind: fault.kind,
            kernel: cx.launch.name.to_owned(),
            line,
            block: cx.block,
            thread,
        })
    }
}

fn same_place(a: &Group, b: &Group) -> bool {
    a.pc == b.pc && a.frame == b.frame
}
