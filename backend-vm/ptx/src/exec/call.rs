//! Calls and returns: creates and leaves frames, and copies parameters between them.

use super::memory::{LaneFault, Lanes};
use super::step::{first, lane_fault};
use super::warp::{Context, Group, Wait, Warp};
use super::{builtin, function_address, function_at};
use crate::alu::commit;
use crate::decode::insn::{Call, Callee, Op, Param, Pc, Slot};
use crate::error::FaultKind;

impl Warp {
    /// Calls a function. Returns whether the group has moved into it; a builtin has already
    /// returned.
    pub(super) fn call(
        &mut self,
        cx: &mut Context<'_, '_>,
        call: &Call,
        group: &Group,
        pc: Pc,
        mask: u32,
    ) -> Result<bool, LaneFault> {
        let rest = Group {
            pc: pc + 1,
            mask: group.mask & !mask,
            ran: self.count,
            ..*group
        };
        match call.callee {
            Callee::Builtin(function) => {
                builtin::call(self, cx, function, call, group.frame, mask)?;
                Ok(false)
            }
            Callee::Function(index) => {
                self.push(rest);
                self.enter(cx, call, index, group, pc, mask)?;
                Ok(true)
            }
            Callee::Indirect(reg) => {
                self.push(rest);
                let row = self.frames.get(group.frame).rows[reg as usize];
                let mut left = mask;
                while left != 0 {
                    let lane = left.trailing_zeros() as usize;
                    let address = row[lane];
                    let same = Lanes(left)
                        .filter(|&other| row[other] == address)
                        .fold(0, |m, l| m | 1 << l);
                    let Some(index) = function_at(address) else {
                        return Err(lane_fault(FaultKind::InvalidPc { address }, lane));
                    };
                    self.enter(cx, call, index, group, pc, same)?;
                    left &= !same;
                }
                Ok(true)
            }
        }
    }

    fn enter(
        &mut self,
        cx: &mut Context<'_, '_>,
        call: &Call,
        module_index: u32,
        group: &Group,
        pc: Pc,
        mask: u32,
    ) -> Result<(), LaneFault> {
        let kernel = cx.launch.code;
        let found = kernel.local_index(module_index).and_then(|index| {
            let placed = kernel.functions.get(index as usize)?;
            let function = &*placed.code;
            // A function that could not be decoded has no predicates.
            let matches = function.preds > 0
                && call.args.len() == function.params.len()
                && call.returns.len() == function.returns.len();
            matches.then_some((index, function))
        });
        let Some((index, function)) = found else {
            let address = function_address(module_index);
            return Err(first(FaultKind::InvalidPc { address }, mask));
        };
        let parent = self.frames.get(group.frame);
        let parent_bytes = self.function(cx, group.frame).code.local_bytes;
        let local_base = parent.local_base + parent_bytes + parent.allocated;
        let made = self
            .local
            .reserve(local_base.saturating_add(function.local_bytes))
            .and_then(|()| {
                let own = (index, function, kernel.dynamic_shared);
                self.frames.push(own, group.frame, pc, mask)
            });
        let frame = made.map_err(|kind| first(kind, mask))?;
        self.frames.get_mut(frame).local_base = local_base;
        for (actual, formal) in call.args.iter().zip(&function.params) {
            self.copy_param(group.frame, actual, frame, formal, mask);
        }
        self.push(Group {
            pc: 0,
            mask,
            frame,
            wait: Wait::Ready,
            ran: self.count,
        });
        Ok(())
    }

    pub(super) fn return_lanes(&mut self, cx: &Context<'_, '_>, group: &Group, mask: u32) {
        let frame = self.frames.get(group.frame);
        let (parent, call_pc) = (frame.parent, frame.call_pc);
        let called = &self.function(cx, group.frame).code;
        let caller = self.function(cx, parent);
        if let Some(Op::Call(call)) = caller.at(call_pc).map(|insn| &insn.op) {
            for (actual, formal) in call.returns.iter().zip(&called.returns) {
                self.copy_param(group.frame, formal, parent, actual, mask);
            }
        }
        self.frames.leave(group.frame, mask);
        self.push(Group {
            pc: call_pc + 1,
            mask,
            frame: parent,
            wait: Wait::Ready,
            ran: self.count,
        });
    }

    /// Copies a parameter from one frame's slot to another's.
    fn copy_param(&mut self, from: u32, source: &Param, to: u32, dest: &Param, mask: u32) {
        let bytes = source.bytes.min(dest.bytes);
        let (from_frame, to_frame) = self.frames.pair(from, to);
        match (source.slot, dest.slot) {
            (Slot::Row(a), Slot::Row(d)) => {
                commit(
                    &mut to_frame.rows[d as usize],
                    &from_frame.rows[a as usize],
                    mask,
                );
            }
            (Slot::Memory(a), Slot::Row(d)) => {
                let address = u64::from(from_frame.local_base + a);
                for lane in Lanes(mask) {
                    let mut value = [0; 8];
                    if let Some(found) = self.local.slice(lane, address, bytes.min(8)) {
                        value[..found.len()].copy_from_slice(found);
                    }
                    to_frame.rows[d as usize][lane] = u64::from_le_bytes(value);
                }
            }
            (Slot::Row(a), Slot::Memory(d)) => {
                let address = u64::from(to_frame.local_base + d);
                for lane in Lanes(mask) {
                    let value = from_frame.rows[a as usize][lane].to_le_bytes();
                    if let Some(place) = self.local.slice_mut(lane, address, bytes.min(8)) {
                        let length = place.len();
                        place.copy_from_slice(&value[..length]);
                    }
                }
            }
            (Slot::Memory(a), Slot::Memory(d)) => {
                let (a, d) = (
                    u64::from(from_frame.local_base + a),
                    u64::from(to_frame.local_base + d),
                );
                for lane in Lanes(mask) {
                    self.local.copy(lane, a, d, bytes);
                }
            }
        }
    }
}
