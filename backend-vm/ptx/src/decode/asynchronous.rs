//! Lowers asynchronous copies and the `mbarrier`s that track their completion.
//!
//! A copy completes when it is executed, which every wait permits: a copy group is empty when a
//! thread waits for it, and a barrier counts the bytes during the copy.

use super::arith::exactly;
use super::function::Lowering;
use super::insn::{
    AddressSpace, BulkCopy, Copy, CopyGroup, MbarrierAction, MbarrierArgs, Op, Place,
};
use super::memory::advisory;
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::parse::ast::{Operand, Type};

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn asynchronous(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        match name {
            "cp" if m.take("async") => {
                if m.take("commit_group") {
                    let bulk = m.take("bulk");
                    self.group(bulk, CopyGroup::Commit);
                } else if m.take("wait_all") {
                    self.group(false, CopyGroup::Wait { but: None });
                } else if m.take("wait_group") {
                    let bulk = m.take("bulk");
                    m.take("read");
                    let [Operand::Int(but)] = operands else {
                        return malformed("a count of groups is not constant");
                    };
                    let but = Some(u32::try_from(*but).unwrap_or(u32::MAX));
                    self.group(bulk, CopyGroup::Wait { but });
                } else if m.take("mbarrier") {
                    self.arrive_when_copied(m, operands)?;
                } else if m.take("bulk") {
                    self.bulk_copy(m, operands)?;
                } else {
                    self.copy(m, operands)?;
                }
            }
            "mbarrier" => self.mbarrier(m, operands)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Emits an operation on a copy group; none for bulk copies, which complete when they are
    /// executed.
    fn group(&mut self, bulk: bool, group: CopyGroup) {
        self.emit(if bulk {
            Op::Nothing
        } else {
            Op::CopyGroup(group)
        });
    }

    /// Lowers an address in shared memory. The address is generic unless its symbol or the
    /// modifiers name the space.
    fn shared_place(&mut self, space: bool, operand: &Operand<'a>) -> Result<Place, Reject> {
        let address = self.address(operand)?;
        let space = match address.space {
            Some(space) => space,
            None if space => AddressSpace::Shared,
            None => AddressSpace::Generic,
        };
        Ok(Place {
            space,
            base: address.base,
            offset: address.offset,
        })
    }

    fn take_shared(m: &mut Modifiers<'a>) -> bool {
        m.take("shared") || m.take("shared::cta") || m.take("shared::cluster")
    }

    /// Lowers `cp.async.ca` and `cp.async.cg`.
    fn copy(&mut self, m: &mut Modifiers<'a>, operands: &[Operand<'a>]) -> Result<(), Reject> {
        let hint = m.take("L2::cache_hint");
        m.ignore(advisory);
        if !((m.take("shared") || m.take("shared::cta")) && m.take("global")) {
            return Err(Reject::Unsupported);
        }
        let [dest, source, Operand::Int(bytes @ (4 | 8 | 16)), rest @ ..] = operands else {
            return malformed("its operands are not two addresses and a size");
        };
        let dest = self.shared_place(true, dest)?;
        let source = self.address(source)?;
        let rest = match rest {
            [rest @ .., _] if hint => rest,
            rest => rest,
        };
        let (mut source_bytes, mut ignore) = (None, None);
        match rest {
            [] => {}
            [size] if self.is_predicate(size)? => ignore = Some(self.source_pred(size)?),
            [size] => source_bytes = Some(self.source(size, Type::U32)?),
            _ => return malformed("it has too many operands"),
        }
        let copy = Copy {
            dest,
            source: Place {
                space: AddressSpace::Global,
                base: source.base,
                offset: source.offset,
            },
            bytes: u32::try_from(*bytes).unwrap_or(4),
            source_bytes,
            ignore,
        };
        self.emit(Op::Copy(Box::new(copy)));
        Ok(())
    }

    /// Lowers `cp.async.bulk` of bytes, not of tensors.
    fn bulk_copy(&mut self, m: &mut Modifiers<'a>, operands: &[Operand<'a>]) -> Result<(), Reject> {
        let hint = m.take("L2::cache_hint");
        if m.take("prefetch") {
            m.take("L2");
            m.take("global");
            self.emit(Op::Nothing);
            return Ok(());
        }
        let operands = match operands {
            [operands @ .., _] if hint => operands,
            operands => operands,
        };
        let to_global = m.take("bulk_group");
        let (dest, source, bytes, barrier) = match operands {
            [dest, source, bytes] if to_global => (dest, source, bytes, None),
            [dest, source, bytes, barrier]
                if !to_global && m.take("mbarrier::complete_tx::bytes") =>
            {
                (dest, source, bytes, Some(barrier))
            }
            _ => return Err(Reject::Unsupported),
        };
        // In the order of the opcode: the destination's space, then the source's.
        let mut space = || {
            m.take_map(|part| match part {
                "global" => Some(AddressSpace::Global),
                "shared::cta" | "shared::cluster" => Some(AddressSpace::Shared),
                _ => None,
            })
        };
        let (Some(to), Some(from)) = (space(), space()) else {
            return Err(Reject::Unsupported);
        };
        let mut place = |space, operand| {
            self.address(operand).map(|address| Place {
                space,
                base: address.base,
                offset: address.offset,
            })
        };
        let (dest, source) = (place(to, dest)?, place(from, source)?);
        let barrier = barrier
            .map(|barrier| place(AddressSpace::Shared, barrier))
            .transpose()?;
        let bytes = self.source(bytes, Type::U32)?;
        let copy = BulkCopy {
            dest,
            source,
            bytes,
            barrier,
        };
        self.emit(Op::BulkCopy(Box::new(copy)));
        Ok(())
    }

    /// Lowers `cp.async.mbarrier.arrive`. Without `.noinc` the barrier first expects one more
    /// arrival.
    fn arrive_when_copied(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<(), Reject> {
        m.ty()?;
        exactly::<1>(operands)?;
        let place = {
            let shared = Self::take_shared(m);
            self.shared_place(shared, &operands[0])?
        };
        if !m.take("arrive") {
            return Err(Reject::Unsupported);
        }
        self.emit(Op::CopiesArrive(Box::new(place)));
        if !m.take("noinc") {
            return Ok(());
        }
        let one = self.constant(1)?;
        self.emit(Op::Mbarrier(Box::new(MbarrierArgs {
            action: MbarrierAction::Arrive,
            place,
            dest: None,
            dest_pred: None,
            operand: one,
        })));
        Ok(())
    }

    fn mbarrier(&mut self, m: &mut Modifiers<'a>, operands: &[Operand<'a>]) -> Result<(), Reject> {
        if m.ty()? != Type::B64 {
            return Err(Reject::Unsupported);
        }
        m.ignore(|part| {
            matches!(
                part,
                "release" | "acquire" | "relaxed" | "cta" | "cluster" | "noComplete"
            )
        });
        let shared = Self::take_shared(m);
        let parity = m.take("parity");
        let transactions = m.take("expect_tx");
        let action = match m.first() {
            None if transactions => MbarrierAction::ExpectBytes,
            Some("init") => MbarrierAction::Init,
            Some("inval") => MbarrierAction::Invalidate,
            Some("complete_tx") => MbarrierAction::CompleteBytes,
            Some("arrive") if transactions => MbarrierAction::ArriveExpectingBytes,
            Some("arrive_drop") if transactions => MbarrierAction::DropExpectingBytes,
            Some("arrive") => MbarrierAction::Arrive,
            Some("arrive_drop") => MbarrierAction::Drop,
            Some(wait @ ("test_wait" | "try_wait")) => MbarrierAction::Test {
                parity,
                suspends: wait == "try_wait",
            },
            Some("pending_count") => return self.pending_count(operands),
            _ => return Err(Reject::Unsupported),
        };
        let returns = matches!(
            action,
            MbarrierAction::Arrive
                | MbarrierAction::Drop
                | MbarrierAction::ArriveExpectingBytes
                | MbarrierAction::DropExpectingBytes
        );
        let waits = matches!(action, MbarrierAction::Test { .. });
        let (first, rest) = match operands {
            [first, rest @ ..] if returns || waits => (Some(first), rest),
            rest => (None, rest),
        };
        let [address, rest @ ..] = rest else {
            return malformed("it has no address");
        };
        let place = self.shared_place(shared, address)?;
        let operand = match (action, rest) {
            (MbarrierAction::Invalidate, []) => self.constant(0)?,
            (MbarrierAction::Arrive | MbarrierAction::Drop, []) => self.constant(1)?,
            // The remaining operand of a `try_wait` is its time limit.
            (MbarrierAction::Test { suspends: true, .. }, [operand, _]) | (_, [operand]) => {
                let ty = if waits && !parity {
                    Type::B64
                } else {
                    Type::U32
                };
                self.source(operand, ty)?
            }
            _ => return malformed("it has the wrong number of operands"),
        };
        let (mut dest, mut dest_pred) = (None, None);
        match first {
            Some(first) if waits => dest_pred = Some(self.one_dest_pred(first)?),
            Some(first) => dest = self.optional_dest(first)?,
            None => {}
        }
        self.emit(Op::Mbarrier(Box::new(MbarrierArgs {
            action,
            place,
            dest,
            dest_pred,
            operand,
        })));
        Ok(())
    }

    /// Lowers `mbarrier.pending_count`: the number of arrivals that a phase lacked when its state
    /// was read.
    fn pending_count(&mut self, operands: &[Operand<'a>]) -> Result<(), Reject> {
        exactly::<2>(operands)?;
        let a = self.source(&operands[1], Type::B64)?;
        let d = self.dest(&operands[0])?;
        self.emit(Op::Alu {
            f: crate::exec::pending_count(),
            ops: [d, a, 0, 0, 0],
        });
        Ok(())
    }

    fn is_predicate(&mut self, operand: &Operand<'a>) -> Result<bool, Reject> {
        Ok(match operand {
            Operand::Not(_) => true,
            Operand::Name(name) => {
                matches!(
                    self.lookup(name)?,
                    Some(super::function::Symbol::Predicate(_))
                )
            }
            _ => false,
        })
    }
}
