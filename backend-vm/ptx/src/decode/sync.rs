//! Lowers barriers and collective operations of a warp's lanes.

use super::arith::exactly;
use super::function::Lowering;
use super::insn::{Barrier, BarrierKind, Collective, CollectiveArgs, Op, PredSource, TRUE};
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::parse::ast::{Operand, Type};

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn synchronization(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        match name {
            "bar" if m.take("warp") => {
                m.take("sync");
                exactly::<1>(operands)?;
                let members = self.source(&operands[0], Type::U32)?;
                let args = CollectiveArgs {
                    kind: Collective::WarpBarrier,
                    dest: None,
                    dest_pred: None,
                    a: members,
                    b: members,
                    c: members,
                    source: TRUE,
                    members,
                };
                self.emit(Op::Collective(Box::new(args)));
                Ok(true)
            }
            "barrier" if m.take("cluster") => self.cluster_barrier(m, operands),
            "bar" | "barrier" => self.barrier(m, operands),
            "shfl" | "vote" | "match" | "redux" | "elect" => self.collective(name, m, operands),
            "activemask" => {
                m.ty()?;
                exactly::<1>(operands)?;
                let d = self.dest(&operands[0])?;
                self.emit(Op::ActiveMask { d });
                Ok(true)
            }
            "nanosleep" => {
                m.ty()?;
                exactly::<1>(operands)?;
                let nanoseconds = self.source(&operands[0], Type::U32)?;
                self.emit(Op::Sleep { nanoseconds });
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Lowers `barrier.cluster`: every cluster is one block on this device.
    fn cluster_barrier(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        m.take("aligned");
        m.ignore(|part| matches!(part, "release" | "relaxed" | "acquire"));
        exactly::<0>(operands)?;
        self.needs.cluster = true;
        if m.take("arrive") {
            self.emit(Op::ClusterArrive);
        } else if m.take("wait") {
            self.emit(Op::ClusterWait);
        } else {
            return Err(Reject::Unsupported);
        }
        Ok(true)
    }

    fn barrier(&mut self, m: &mut Modifiers<'a>, operands: &[Operand<'a>]) -> Result<bool, Reject> {
        m.take("cta");
        m.take("aligned");
        if m.take("arrive") {
            return self.arrive(operands);
        }
        let mut rest = operands;
        let mut take = |what: &str| match rest {
            [first, tail @ ..] => {
                rest = tail;
                Ok(first)
            }
            [] => Err(Reject::Malformed(format!("it lacks {what}"))),
        };
        if m.take("sync") {
            let id = self.source(take("a barrier")?, Type::U32)?;
            let count = match rest {
                [] => None,
                [count] => Some(self.source(count, Type::U32)?),
                _ => return malformed("it has too many operands"),
            };
            self.emit(Op::Barrier(Box::new(Barrier {
                kind: BarrierKind::Sync,
                id,
                count,
                source: TRUE,
            })));
            return Ok(true);
        }
        if !m.take("red") {
            return Err(Reject::Unsupported);
        }
        let dest = take("a destination")?;
        let kind = if m.take("popc") {
            m.ty()?;
            BarrierKind::Count(self.dest(dest)?)
        } else if m.take("and") {
            m.take("pred");
            BarrierKind::All(self.one_dest_pred(dest)?)
        } else if m.take("or") {
            m.take("pred");
            BarrierKind::Any(self.one_dest_pred(dest)?)
        } else {
            return Err(Reject::Unsupported);
        };
        let id = self.source(take("a barrier")?, Type::U32)?;
        let (count, source) = match rest {
            [source] => (None, source),
            [count, source] => (Some(self.source(count, Type::U32)?), source),
            _ => return malformed("it has the wrong number of operands"),
        };
        let source = self.source_pred(source)?;
        self.emit(Op::Barrier(Box::new(Barrier {
            kind,
            id,
            count,
            source,
        })));
        Ok(true)
    }

    fn arrive(&mut self, operands: &[Operand<'a>]) -> Result<bool, Reject> {
        exactly::<2>(operands)?;
        let id = self.source(&operands[0], Type::U32)?;
        let count = Some(self.source(&operands[1], Type::U32)?);
        self.emit(Op::Barrier(Box::new(Barrier {
            kind: BarrierKind::Arrive,
            id,
            count,
            source: TRUE,
        })));
        Ok(true)
    }

    fn collective(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let synchronous = m.take("sync");
        if !synchronous && !matches!(name, "shfl" | "vote") {
            return Err(Reject::Unsupported);
        }
        let Some((first, rest)) = operands.split_first() else {
            return malformed("it has no operands");
        };
        let (kind, inputs) = match name {
            "shfl" => {
                m.take("b32");
                let kind = match m.first() {
                    Some("up") => Collective::ShuffleUp,
                    Some("down") => Collective::ShuffleDown,
                    Some("bfly") => Collective::ShuffleButterfly,
                    Some("idx") => Collective::ShuffleIndex,
                    _ => return Err(Reject::Unsupported),
                };
                (kind, 3)
            }
            "vote" => {
                let kind = match m.first() {
                    Some("all") => Collective::VoteAll,
                    Some("any") => Collective::VoteAny,
                    Some("uni") => Collective::VoteUniform,
                    Some("ballot") => Collective::VoteBallot,
                    _ => return Err(Reject::Unsupported),
                };
                m.first();
                (kind, 1)
            }
            "match" => {
                let bytes = m.ty()?.bytes();
                if !matches!(bytes, 4 | 8) {
                    return Err(Reject::Unsupported);
                }
                match m.first() {
                    Some("any") => (Collective::MatchAny { bytes }, 1),
                    Some("all") => (Collective::MatchAll { bytes }, 1),
                    _ => return Err(Reject::Unsupported),
                }
            }
            "redux" => {
                let ty = m.ty()?;
                let kind = match (m.first(), ty) {
                    (Some("add"), Type::U32 | Type::S32) => Collective::ReduceAdd,
                    (Some("min"), Type::U32) => Collective::ReduceMinUnsigned,
                    (Some("max"), Type::U32) => Collective::ReduceMaxUnsigned,
                    (Some("min"), Type::S32) => Collective::ReduceMinSigned,
                    (Some("max"), Type::S32) => Collective::ReduceMaxSigned,
                    (Some("and"), Type::B32) => Collective::ReduceAnd,
                    (Some("or"), Type::B32) => Collective::ReduceOr,
                    (Some("xor"), Type::B32) => Collective::ReduceXor,
                    _ => return Err(Reject::Unsupported),
                };
                (kind, 1)
            }
            _ => (Collective::ElectSync, 0),
        };
        if rest.len() != inputs + usize::from(synchronous) {
            return malformed("it has the wrong number of operands");
        }
        let votes = name == "vote";
        let source: PredSource = if votes {
            self.source_pred(&rest[0])?
        } else {
            TRUE
        };
        let members = if synchronous {
            self.source(&rest[inputs], Type::U32)?
        } else {
            // The forms of PTX 6.3 and before have no member mask: the active lanes take part.
            let d = self.temporary()?;
            self.emit(Op::ActiveMask { d });
            d
        };
        let mut row = |index: usize| {
            if index < inputs && !votes {
                self.source(&rest[index], Type::B32)
            } else {
                Ok(members)
            }
        };
        let (a, b, c) = (row(0)?, row(1)?, row(2)?);
        let (dest, dest_pred) = match first {
            Operand::Pair(d, p) => (self.optional_dest(&Operand::Name(d))?, self.dest_pred(p)?),
            Operand::Name(p) if votes && kind != Collective::VoteBallot => {
                (None, self.dest_pred(p)?)
            }
            d => (self.optional_dest(d)?, None),
        };
        self.emit(Op::Collective(Box::new(CollectiveArgs {
            kind,
            dest,
            dest_pred,
            a,
            b,
            c,
            source,
            members,
        })));
        Ok(true)
    }
}
