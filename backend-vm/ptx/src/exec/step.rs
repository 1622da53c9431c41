//! Executes decoded instructions for one group of lanes.

use super::atomic;
use super::barrier::CLUSTER;
use super::copy;
use super::frame::{Frame, NO_FRAME};
use super::matrix;
use super::mbarrier;
use super::memory::{LaneFault, Lanes, resolve};
use super::special;
use super::texture;
use super::warp::{Context, Group, Wait, Warp};
use crate::alu::{LANES, commit};
use crate::decode::insn::{
    AddressSpace, Barrier, BarrierKind, Carry, CarryOp, Logic, Op, Pc, PredSource, Test,
};
use crate::error::{Fault, FaultKind};

/// Number of instructions for which a strong load counts: it may be part of a loop that waits for
/// others, which must then run soon.
const POLL: u64 = 128;
/// Number of instructions for which an atomic operation counts that changed nothing.
const FUTILE: u64 = 1024;
/// Nanoseconds for which an `mbarrier.try_wait` suspends its lanes before it gives up.
const SUSPENSION: u64 = 2000;

/// Returns the mask of a predicate operand.
#[inline]
pub(super) fn pred(frame: &Frame, source: PredSource) -> u32 {
    let mask = frame.preds[source.pred as usize];
    if source.negated { !mask } else { mask }
}

#[inline]
fn set_pred(frame: &mut Frame, pred: u32, value: u32, mask: u32) {
    let old = &mut frame.preds[pred as usize];
    *old = *old & !mask | value & mask;
}

fn combine(logic: Logic, a: u32, b: u32) -> u32 {
    match logic {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
    }
}

/// Returns the result of a test, and of its complement.
fn test(frame: &Frame, test: &Test) -> (u32, u32) {
    let holds = (test.compare)(&frame.rows, test.a, test.b);
    match test.combine {
        None => (holds, !holds),
        Some((logic, source)) => {
            let other = pred(frame, source);
            (combine(logic, holds, other), combine(logic, !holds, other))
        }
    }
}

/// Returns the value of a lane's 32-bit register.
#[inline]
pub(super) fn word(row: &[u64; LANES], lane: usize) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a 32-bit register is the low half of its slot"
    )]
    let value = row[lane] as u32;
    value
}

impl Warp {
    /// Runs `group` until the warp has executed `limit` instructions, the group reaches `stop` (the
    /// place of another group), or it splits, waits or ends.
    pub(super) fn step(
        &mut self,
        cx: &mut Context<'_, '_>,
        mut group: Group,
        limit: u64,
        stop: Pc,
    ) -> Result<(), Box<Fault>> {
        let launch = cx.launch;
        let function = self.function(cx, group.frame);
        let (code, start) = (&function.code.instructions[..], function.start);
        let mut pc = group.pc;
        loop {
            if pc >= stop || self.count >= limit {
                break;
            }
            let insn = &code[pc as usize];
            self.count += 1;
            let frame = self.frames.get_mut(group.frame);
            let mask = group.mask & pred(frame, insn.guard);
            if mask == 0 {
                pc += 1;
                continue;
            }
            // Location: in its function for a fault, in the kernel for the checker.
            let (place, at) = ((group.frame, pc), (self.index, start + pc));
            match &insn.op {
                Op::Alu { f, ops } => f(&mut frame.rows, mask, ops),
                Op::Compare { compare, d, a, b } => {
                    let holds = compare(&frame.rows, *a, *b);
                    set_pred(frame, *d, holds, mask);
                }
                Op::Branch { target } => {
                    if mask == group.mask {
                        pc = *target;
                        continue;
                    }
                    let rest = Group {
                        pc: pc + 1,
                        mask: group.mask & !mask,
                        ran: self.count,
                        ..group
                    };
                    self.push(rest);
                    group.mask = mask;
                    pc = *target;
                    break;
                }
                Op::Load(access) => {
                    if access.order.strong {
                        self.count += POLL;
                    }
                    let loaded = Self::spaces(&mut self.local, cx, at).load(frame, access, mask);
                    loaded.map_err(|fault| self.fault(cx, place, fault))?;
                }
                Op::Store(access) => {
                    let stored = Self::spaces(&mut self.local, cx, at).store(frame, access, mask);
                    stored.map_err(|fault| self.fault(cx, place, fault))?;
                }
                Op::SetPredicate {
                    test: condition,
                    d,
                    q,
                } => {
                    let (holds, complement) = test(frame, condition);
                    set_pred(frame, *d, holds, mask);
                    if let Some(q) = q {
                        set_pred(frame, *q, complement, mask);
                    }
                }
                Op::Set {
                    test: condition,
                    d,
                    value,
                } => {
                    let (holds, _) = test(frame, condition);
                    let mut row = [0; LANES];
                    for lane in Lanes(holds) {
                        row[lane] = *value;
                    }
                    commit(&mut frame.rows[*d as usize], &row, mask);
                }
                Op::Select { d, a, b, p } => {
                    let chosen = pred(frame, *p);
                    let mut row = frame.rows[*b as usize];
                    commit(&mut row, &frame.rows[*a as usize], chosen);
                    commit(&mut frame.rows[*d as usize], &row, mask);
                }
                Op::Predicate { logic, d, a, b } => {
                    let value = combine(*logic, pred(frame, *a), pred(frame, *b));
                    set_pred(frame, *d, value, mask);
                }
                Op::Unpack { d, a, bits } => {
                    let row = frame.rows[*a as usize];
                    for (index, reg) in d.iter().enumerate() {
                        let Some(reg) = reg else { continue };
                        let shift = u32::try_from(index).unwrap_or(0) * bits;
                        let piece = row.map(|value| value >> shift & ((1 << bits) - 1));
                        commit(&mut frame.rows[*reg as usize], &piece, mask);
                    }
                }
                Op::Pack { d, a, bits } => {
                    let mut row = [0; LANES];
                    for (index, reg) in a.iter().enumerate() {
                        let shift = u32::try_from(index).unwrap_or(0) * bits;
                        for (whole, piece) in row.iter_mut().zip(&frame.rows[*reg as usize]) {
                            *whole |= (piece & ((1 << bits) - 1)) << shift;
                        }
                    }
                    commit(&mut frame.rows[*d as usize], &row, mask);
                }
                Op::Special { d, special } => {
                    let row = special::read(*special, launch, cx.block, self.index);
                    commit(&mut frame.rows[*d as usize], &row, mask);
                }
                Op::FrameAddress { d, offset } => {
                    let row = [u64::from(frame.local_base.wrapping_add(*offset)); LANES];
                    commit(&mut frame.rows[*d as usize], &row, mask);
                }
                Op::IsSpace {
                    d,
                    a,
                    space,
                    constant,
                } => {
                    let row = &frame.rows[*a as usize];
                    let ranges = &launch.code.constant_ranges;
                    let is_constant = |address: u64| {
                        ranges
                            .iter()
                            .any(|&(start, bytes)| address.wrapping_sub(start) < bytes)
                    };
                    let holds = (0..LANES).fold(0, |holds, lane| {
                        let address = row[lane];
                        let inside = resolve(address).0 == *space
                            && (*space != AddressSpace::Global
                                || is_constant(address) == *constant);
                        holds | u32::from(inside) << lane
                    });
                    set_pred(frame, *d, holds, mask);
                }
                Op::Carry(carry) => add_with_carry(frame, carry, mask),
                Op::Atomic(operation) => {
                    let done = atomic::execute(
                        &mut Self::spaces(&mut self.local, cx, at),
                        frame,
                        operation,
                        mask,
                    );
                    let changed = done.map_err(|fault| self.fault(cx, place, fault))?;
                    if !changed {
                        self.count += FUTILE;
                    }
                }
                Op::Fence => std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst),
                Op::ActiveMask { d } => {
                    commit(
                        &mut frame.rows[*d as usize],
                        &[u64::from(mask); LANES],
                        mask,
                    );
                }
                Op::Nothing => {}
                Op::LaunchDependents => cx.trigger(),
                Op::CopyGroup(copies) => {
                    copy::watch_group(cx.checker.as_deref_mut(), *copies, self.index, mask);
                }
                Op::CopiesArrive(place) => {
                    let mut spaces = Self::spaces(&mut self.local, cx, at);
                    if spaces.watch.is_some() {
                        let addresses = place.addresses(frame);
                        for lane in Lanes(mask) {
                            spaces.watch_copies(lane, place.space, addresses[lane]);
                        }
                    }
                }
                Op::Copy(copy) => {
                    let mut spaces = Self::spaces(&mut self.local, cx, at);
                    let copied = copy::execute(&mut spaces, frame, copy, mask);
                    copied.map_err(|fault| self.fault(cx, place, fault))?;
                }
                Op::BulkCopy(copy) => {
                    let mut spaces = Self::spaces(&mut self.local, cx, at);
                    let copied = copy::execute_bulk(&mut spaces, frame, copy, mask);
                    copied.map_err(|fault| self.fault(cx, place, fault))?;
                }
                Op::Matrix(matrix) => {
                    let mut spaces = Self::spaces(&mut self.local, cx, at);
                    let done = matrix::execute(&mut spaces, frame, matrix, mask);
                    done.map_err(|fault| self.fault(cx, place, fault))?;
                }
                Op::Sample(args) => {
                    let done = texture::sample(cx.global, launch, frame, args, mask);
                    done.map_err(|fault| self.fault(cx, place, fault))?;
                }
                Op::Surface(args) => {
                    let done = texture::access(cx.global, launch, frame, args, mask);
                    done.map_err(|fault| self.fault(cx, place, fault))?;
                }
                Op::Query(args) => {
                    let done = texture::query(cx.global, launch, frame, args, mask);
                    done.map_err(|fault| self.fault(cx, place, fault))?;
                }
                Op::Mbarrier(args) => {
                    let mut spaces = Self::spaces(&mut self.local, cx, at);
                    let done = mbarrier::execute(&mut spaces, frame, args, mask);
                    let early = done.map_err(|fault| self.fault(cx, place, fault))?;
                    if early != 0 {
                        let until = special::now() + SUSPENSION;
                        self.part(&group, pc, early, Wait::Sleep { until });
                        return Ok(());
                    }
                }
                Op::Allocate { d, bytes, align } => {
                    let own = function.code.local_bytes;
                    let wanted = Lanes(mask)
                        .map(|lane| frame.rows[*bytes as usize][lane])
                        .max();
                    let reserved = frame.allocate(own, wanted.unwrap_or(0), *align);
                    let row = reserved.and_then(|(start, end)| {
                        self.local.reserve(end)?;
                        Ok([u64::from(start); LANES])
                    });
                    match row {
                        Ok(row) => commit(&mut frame.rows[*d as usize], &row, mask),
                        Err(kind) => {
                            return Err(self.fault(cx, place, first(kind, mask)));
                        }
                    }
                }
                Op::Collective(args) => {
                    let rest = group.mask & !mask;
                    if !self.collective(args, &group, pc, mask, rest) {
                        return Ok(());
                    }
                    if let Some(checker) = &mut cx.checker {
                        let members = &self.frames.get(group.frame).rows[args.members as usize];
                        checker.meet(self.index, mask, |lane| word(members, lane));
                    }
                }
                Op::Barrier(barrier) => {
                    let arrived = self.arrive(cx, barrier, &group, mask);
                    let wait = arrived.map_err(|fault| self.fault(cx, place, fault))?;
                    if let Some(wait) = wait {
                        self.part(&group, pc, mask, wait);
                        return Ok(());
                    }
                }
                Op::ClusterArrive => {
                    let generation = cx.barriers.arrive_at_cluster(mask.count_ones());
                    if let Some(checker) = &mut cx.checker {
                        checker.arrive(CLUSTER, self.index, mask, false);
                        checker.complete_barrier(CLUSTER, cx.barriers);
                    }
                    for lane in Lanes(mask) {
                        self.cluster[lane] = generation;
                    }
                }
                Op::ClusterWait => {
                    let generation = cx.barriers.generation(CLUSTER);
                    let early = Lanes(mask)
                        .filter(|&lane| self.cluster[lane] == generation)
                        .fold(0, |early, lane| early | 1 << lane);
                    if let Some(checker) = &mut cx.checker {
                        checker.leave(CLUSTER, self.index, mask & !early);
                    }
                    if early != 0 {
                        let id = CLUSTER;
                        self.part(&group, pc, early, Wait::Barrier { id, generation });
                        return Ok(());
                    }
                }
                Op::Sleep { nanoseconds } => {
                    let row = &frame.rows[*nanoseconds as usize];
                    let longest = Lanes(mask).map(|lane| word(row, lane)).max().unwrap_or(0);
                    // As on hardware, never longer than a millisecond at a time.
                    let until = special::now() + u64::from(longest.min(1_000_000));
                    self.part(&group, pc, mask, Wait::Sleep { until });
                    return Ok(());
                }
                Op::BranchIndexed { index, targets } => {
                    let row = frame.rows[*index as usize];
                    self.push(Group {
                        pc: pc + 1,
                        mask: group.mask & !mask,
                        ran: self.count,
                        ..group
                    });
                    for lane in Lanes(mask) {
                        let target =
                            targets
                                .get(word(&row, lane) as usize)
                                .copied()
                                .ok_or_else(|| {
                                    let kind =
                                        FaultKind::IllegalInstruction("brx.idx beyond its list");
                                    self.fault(cx, place, lane_fault(kind, lane))
                                })?;
                        self.push(Group {
                            pc: target,
                            mask: 1 << lane,
                            ran: self.count,
                            ..group
                        });
                    }
                    return Ok(());
                }
                Op::Call(call) => {
                    let called = self.call(cx, call, &group, pc, mask);
                    if called.map_err(|fault| self.fault(cx, place, fault))? {
                        return Ok(());
                    }
                }
                Op::Return | Op::FallOff | Op::Exit => {
                    self.push(Group {
                        pc: pc + 1,
                        mask: group.mask & !mask,
                        ran: self.count,
                        ..group
                    });
                    if matches!(insn.op, Op::Exit) || frame_is_kernel(self, group.frame) {
                        self.end_lanes(cx, group.frame, mask);
                    } else {
                        self.return_lanes(cx, &group, mask);
                    }
                    return Ok(());
                }
                Op::Trap => {
                    return Err(self.fault(cx, place, first(FaultKind::Trap, mask)));
                }
                Op::Illegal(why) => {
                    let kind = FaultKind::IllegalInstruction(why);
                    return Err(self.fault(cx, place, first(kind, mask)));
                }
            }
            pc += 1;
        }
        self.push(Group {
            pc,
            ran: self.count,
            ..group
        });
        Ok(())
    }

    /// Splits a group: the lanes of `mask` wait at `pc`, the others continue after it.
    fn part(&mut self, group: &Group, pc: Pc, mask: u32, wait: Wait) {
        let ran = self.count;
        self.push(Group {
            pc: pc + 1,
            mask: group.mask & !mask,
            ran,
            ..*group
        });
        self.push(Group {
            pc,
            mask,
            wait,
            ran,
            ..*group
        });
    }

    /// Arrives at a barrier. Returns the wait that follows, `None` if the lanes continue.
    fn arrive(
        &mut self,
        cx: &mut Context<'_, '_>,
        barrier: &Barrier,
        group: &Group,
        mask: u32,
    ) -> Result<Option<Wait>, LaneFault> {
        let frame = self.frames.get(group.frame);
        let lane = mask.trailing_zeros() as usize;
        let id = u64::from(word(&frame.rows[barrier.id as usize], lane));
        let expected = barrier
            .count
            .map(|count| word(&frame.rows[count as usize], lane));
        let holds = (pred(frame, barrier.source) & mask).count_ones();
        let whole = mask == self.alive;
        let arrived = cx
            .barriers
            .arrive(id, expected, mask.count_ones(), holds, whole);
        let (id, generation) = arrived.map_err(|kind| first(kind, mask))?;
        if let Some(checker) = &mut cx.checker {
            checker.arrive(id, self.index, mask, barrier.kind != BarrierKind::Arrive);
            checker.complete_barrier(id, cx.barriers);
        }
        Ok(if barrier.kind == BarrierKind::Arrive {
            None
        } else {
            Some(Wait::Barrier { id, generation })
        })
    }
}

fn frame_is_kernel(warp: &Warp, frame: u32) -> bool {
    warp.frames.get(frame).parent == NO_FRAME
}

#[expect(clippy::cast_possible_truncation, reason = "a lane is below 32")]
pub(super) fn lane_fault(kind: FaultKind, lane: usize) -> LaneFault {
    LaneFault {
        kind,
        lane: lane as u32,
    }
}

pub(super) fn first(kind: FaultKind, mask: u32) -> LaneFault {
    LaneFault {
        kind,
        lane: mask.trailing_zeros(),
    }
}

/// Executes one link of a carry chain.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "arithmetic on halves of products"
)]
fn add_with_carry(frame: &mut Frame, carry: &Carry, mask: u32) {
    let width = carry.bytes * 8;
    let low = if width == 64 {
        u64::MAX
    } else {
        (1 << width) - 1
    };
    let mut flags = frame.carry;
    for lane in Lanes(mask) {
        let a = frame.rows[carry.a as usize][lane] & low;
        let b = frame.rows[carry.b as usize][lane] & low;
        let c = frame.rows[carry.c as usize][lane] & low;
        let flag = if carry.carry_in {
            u128::from(frame.carry >> lane & 1)
        } else {
            0
        };
        let extend = |x: u64| -> i128 {
            if carry.signed && width == 64 {
                i128::from(x.cast_signed())
            } else if carry.signed {
                i128::from((x as u32).cast_signed())
            } else {
                i128::from(x)
            }
        };
        let sum = match carry.op {
            CarryOp::Add => u128::from(a) + u128::from(b) + flag,
            // The flag of a subtraction is its borrow.
            CarryOp::Sub => u128::from(a).wrapping_sub(u128::from(b)).wrapping_sub(flag),
            CarryOp::MadLow => u128::from(a.wrapping_mul(b) & low) + u128::from(c) + flag,
            CarryOp::MadHigh => {
                let product = if carry.signed {
                    (extend(a) * extend(b)) as u128
                } else {
                    u128::from(a) * u128::from(b)
                };
                u128::from((product >> width) as u64 & low) + u128::from(c) + flag
            }
        };
        if carry.carry_out {
            flags = flags & !(1 << lane) | ((sum >> width) as u32 & 1) << lane;
        }
        frame.rows[carry.d as usize][lane] = sum as u64 & low;
    }
    frame.carry = flags;
}
