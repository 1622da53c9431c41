//! Collective operations of a warp's lanes (PTX ISA 9.7.9.6, 9.7.13).
//!
//! A lane waits until every living lane of its member mask has reached the same operation with the
//! same mask. Usually they arrive together, as one group; otherwise the groups wait for each other
//! and are served together.

use super::frame::Frame;
use super::memory::Lanes;
use super::step::{pred, word};
use super::warp::{Context, Group, Wait, Warp};
use crate::alu::{LANES, Row, commit};
use crate::decode::insn::{Collective, CollectiveArgs, Op, Pc};

/// Inputs of the lanes.
#[derive(Debug, Clone, Copy)]
struct Inputs<'r> {
    a: &'r Row,
    b: &'r Row,
    c: &'r Row,
    source: u32,
}

impl<'r> Inputs<'r> {
    /// Returns the inputs of lanes in one frame.
    fn of(frame: &'r Frame, args: &CollectiveArgs) -> Self {
        let row = |reg: u32| &frame.rows[reg as usize];
        Self {
            a: row(args.a),
            b: row(args.b),
            c: row(args.c),
            source: pred(frame, args.source),
        }
    }
}

/// Inputs of lanes in several frames, combined.
#[derive(Debug, Default)]
struct Gathered {
    a: Row,
    b: Row,
    c: Row,
    source: u32,
}

impl Gathered {
    fn add(&mut self, inputs: Inputs<'_>, mask: u32) {
        commit(&mut self.a, inputs.a, mask);
        commit(&mut self.b, inputs.b, mask);
        commit(&mut self.c, inputs.c, mask);
        self.source |= inputs.source & mask;
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            a: &self.a,
            b: &self.b,
            c: &self.c,
            source: self.source,
        }
    }
}

fn scatter(frame: &mut Frame, args: &CollectiveArgs, out: &Row, holds: u32, mask: u32) {
    if let Some(dest) = args.dest {
        commit(&mut frame.rows[dest as usize], out, mask);
    }
    if let Some(dest) = args.dest_pred {
        let old = &mut frame.preds[dest as usize];
        *old = *old & !mask | holds & mask;
    }
}

/// Shuffles all lanes. `from` maps own lane, distance, upper bound, lower bound and segment to the
/// lane to read and whether it is in bounds.
#[inline(always)]
fn shuffle(
    inputs: &Inputs<'_>,
    from: impl Fn(u32, u32, u32, u32, u32) -> (u32, bool),
) -> (Row, u32) {
    let mut out = [0; LANES];
    let mut holds = 0;
    for (lane, out) in out.iter_mut().enumerate() {
        #[expect(clippy::cast_possible_truncation, reason = "a lane is below 32")]
        let me = lane as u32;
        let (b, c) = (word(inputs.b, lane) & 31, word(inputs.c, lane));
        let (clamp, segment) = (c & 31, c >> 8 & 31);
        let (max, min) = (me & segment | clamp & !segment, me & segment);
        let (source, inside) = from(me, b, max, min, segment);
        let source = if inside { source & 31 } else { me };
        *out = inputs.a[source as usize] & u64::from(u32::MAX);
        holds |= u32::from(inside) << lane;
    }
    (out, holds)
}

/// Computes the operation for lanes that share a member mask.
fn compute(kind: Collective, inputs: &Inputs<'_>, lanes: u32) -> (Row, u32) {
    let mut out = [0; LANES];
    let uniform =
        |value: u32, holds: bool| ([u64::from(value); LANES], if holds { u32::MAX } else { 0 });
    let value = |lane: usize| word(inputs.a, lane);
    let reduce =
        |f: fn(u32, u32) -> u32| uniform(Lanes(lanes).map(value).reduce(f).unwrap_or(0), false);
    match kind {
        Collective::ShuffleUp => shuffle(inputs, |me, b, max, _, _| {
            (
                me.wrapping_sub(b),
                me.cast_signed() - b.cast_signed() >= max.cast_signed(),
            )
        }),
        Collective::ShuffleDown => shuffle(inputs, |me, b, max, _, _| (me + b, me + b <= max)),
        Collective::ShuffleButterfly => shuffle(inputs, |me, b, max, _, _| (me ^ b, me ^ b <= max)),
        Collective::ShuffleIndex => shuffle(inputs, |_, b, max, min, segment| {
            let from = min | b & !segment;
            (from, from <= max)
        }),
        Collective::VoteAll => uniform(0, inputs.source & lanes == lanes),
        Collective::VoteAny => uniform(0, inputs.source & lanes != 0),
        Collective::VoteUniform => uniform(
            0,
            matches!(inputs.source & lanes, 0) || inputs.source & lanes == lanes,
        ),
        Collective::VoteBallot => uniform(inputs.source & lanes, false),
        Collective::MatchAny { bytes } => {
            let cut = |lane: usize| {
                if bytes == 8 {
                    inputs.a[lane]
                } else {
                    u64::from(value(lane))
                }
            };
            for lane in Lanes(lanes) {
                let same = Lanes(lanes).filter(|&other| cut(other) == cut(lane));
                out[lane] = same.fold(0, |mask, other| mask | 1 << other);
            }
            (out, 0)
        }
        Collective::MatchAll { bytes } => {
            let cut = |lane: usize| {
                if bytes == 8 {
                    inputs.a[lane]
                } else {
                    u64::from(value(lane))
                }
            };
            let first = cut(lanes.trailing_zeros() as usize & 31);
            let all = Lanes(lanes).all(|lane| cut(lane) == first);
            uniform(if all { lanes } else { 0 }, all)
        }
        Collective::ReduceAdd => reduce(u32::wrapping_add),
        Collective::ReduceMinUnsigned => reduce(u32::min),
        Collective::ReduceMaxUnsigned => reduce(u32::max),
        Collective::ReduceMinSigned => {
            reduce(|a, b| a.cast_signed().min(b.cast_signed()).cast_unsigned())
        }
        Collective::ReduceMaxSigned => {
            reduce(|a, b| a.cast_signed().max(b.cast_signed()).cast_unsigned())
        }
        Collective::ReduceAnd => reduce(|a, b| a & b),
        Collective::ReduceOr => reduce(|a, b| a | b),
        Collective::ReduceXor => reduce(|a, b| a ^ b),
        Collective::ElectSync => {
            let leader = lanes.trailing_zeros();
            ([u64::from(leader); LANES], 1 << (leader & 31))
        }
        Collective::WarpBarrier => (out, 0),
    }
}

/// Returns whether lanes at the two operations wait for each other.
fn pair(a: &CollectiveArgs, b: &CollectiveArgs) -> bool {
    a.kind == b.kind
}

impl Warp {
    fn args_at<'c>(&self, cx: &Context<'c, '_>, group: usize) -> Option<&'c CollectiveArgs> {
        match self.operation(cx, &self.groups[group])? {
            Op::Collective(args) => Some(args),
            _ => None,
        }
    }

    /// Executes a collective operation for the lanes `mask` of `group` if all its members are
    /// there, and returns whether it did. Otherwise these lanes, and the lanes `rest` that skip it,
    /// return to the list of groups.
    pub(super) fn collective(
        &mut self,
        args: &CollectiveArgs,
        group: &Group,
        pc: Pc,
        mask: u32,
        rest: u32,
    ) -> bool {
        let alive = self.alive;
        let frame = self.frames.get_mut(group.frame);
        let members = frame.rows[args.members as usize];
        let wanted = word(&members, mask.trailing_zeros() as usize);
        let same = |wanted: u32, left: u32| {
            let equal = (0..LANES).fold(0, |equal, lane| {
                equal | u32::from(word(&members, lane) == wanted) << lane
            });
            equal & left
        };
        if wanted & alive & !mask == 0 && same(wanted, mask) == mask {
            let (out, holds) = compute(args.kind, &Inputs::of(frame, args), mask);
            scatter(frame, args, &out, holds, mask);
            return true;
        }
        let mut sets: [(u32, u32); LANES] = [(0, 0); LANES];
        let mut count = 0;
        let mut left = mask;
        let mut complete = true;
        while left != 0 {
            let wanted = word(&members, left.trailing_zeros() as usize);
            let lanes = same(wanted, left);
            complete &= wanted & alive & !lanes == 0;
            sets[count] = (wanted, lanes);
            count += 1;
            left &= !lanes;
        }
        if complete {
            for &(_, lanes) in &sets[..count] {
                let (out, holds) = compute(args.kind, &Inputs::of(frame, args), lanes);
                scatter(frame, args, &out, holds, lanes);
            }
            return true;
        }
        self.push(Group {
            pc: pc + 1,
            mask: rest,
            ran: self.count,
            ..*group
        });
        for &(wanted, lanes) in &sets[..count] {
            let wait = Wait::Collective { members: wanted };
            self.push(Group {
                pc,
                mask: lanes,
                wait,
                ran: self.count,
                ..*group
            });
        }
        false
    }

    /// Serves waiting groups whose members have all arrived or ended, and returns whether it served
    /// any.
    pub(super) fn resolve_collectives(&mut self, cx: &mut Context<'_, '_>) -> bool {
        for first in 0..self.groups.len() {
            let Wait::Collective { members } = self.groups[first].wait else {
                continue;
            };
            let Some(args) = self.args_at(cx, first) else {
                continue;
            };
            let together: Vec<usize> = (first..self.groups.len())
                .filter(|&other| {
                    self.groups[other].wait == Wait::Collective { members }
                        && self
                            .args_at(cx, other)
                            .is_some_and(|other| pair(args, other))
                })
                .collect();
            let lanes = together
                .iter()
                .fold(0, |lanes, &index| lanes | self.groups[index].mask);
            if members & self.alive & !lanes != 0 {
                continue;
            }
            let mut gathered = Gathered::default();
            for &index in &together {
                let group = self.groups[index];
                if let Some(args) = self.args_at(cx, index) {
                    gathered.add(Inputs::of(self.frames.get(group.frame), args), group.mask);
                }
            }
            let (out, holds) = compute(args.kind, &gathered.inputs(), lanes);
            if let Some(checker) = &mut cx.checker {
                checker.meet(self.index, lanes, |_| members);
            }
            for &index in &together {
                let group = self.groups[index];
                if let Some(args) = self.args_at(cx, index) {
                    scatter(
                        self.frames.get_mut(group.frame),
                        args,
                        &out,
                        holds,
                        group.mask,
                    );
                }
                self.groups[index].wait = Wait::Ready;
                self.groups[index].pc += 1;
            }
            return true;
        }
        false
    }
}
