//! Lowers comparison and selection.

use super::arith::exactly;
use super::function::Lowering;
use super::insn::{Logic, Op, PredSource, Reg, Test};
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::alu::{compare, int};
use crate::parse::ast::{Operand, Type};

/// Returns the bits of a true `set` of type `ty`, for one 16-bit lane if `pair`.
fn set_value(ty: Type, pair: bool) -> Option<u64> {
    Some(match ty {
        Type::F16x2 if pair => 0x3c00,
        Type::Bf16x2 if pair => 0x3f80,
        Type::U32 | Type::S32 if pair => u64::from(u16::MAX),
        _ if pair => return None,
        Type::F32 => u64::from(1.0_f32.to_bits()),
        Type::U32 | Type::S32 => u64::from(u32::MAX),
        Type::U16 | Type::S16 => u64::from(u16::MAX),
        Type::F16 => 0x3c00,
        Type::Bf16 => 0x3f80,
        _ => return None,
    })
}

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers `set`, `setp`, `selp`, `slct` and `testp`.
    pub(super) fn comparison(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        match name {
            "selp" => {
                let ty = m.ty()?;
                exactly::<4>(operands)?;
                let (a, b) = (
                    self.source(&operands[1], ty)?,
                    self.source(&operands[2], ty)?,
                );
                let p = self.source_pred(&operands[3])?;
                let d = self.dest(&operands[0])?;
                self.emit(Op::Select { d, a, b, p });
            }
            "slct" => self.select_by_sign(m, operands)?,
            "testp" => {
                let ty = m.ty()?;
                let property = m.first().ok_or(Reject::Unsupported)?;
                exactly::<2>(operands)?;
                let compare = compare::property(property, ty).ok_or(Reject::Unsupported)?;
                let a = self.source(&operands[1], ty)?;
                let d = self.one_dest_pred(&operands[0])?;
                self.emit(Op::Compare {
                    compare,
                    d,
                    a,
                    b: a,
                });
            }
            _ => self.compare(name, m, operands)?,
        }
        Ok(true)
    }

    fn select_by_sign(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<(), Reject> {
        let condition = m.ty()?;
        let (ty, ftz) = (m.ty()?, m.take("ftz"));
        exactly::<4>(operands)?;
        let compare = compare::not_negative(condition, ftz).ok_or(Reject::Unsupported)?;
        let c = self.source(&operands[3], condition)?;
        let (a, b) = (
            self.source(&operands[1], ty)?,
            self.source(&operands[2], ty)?,
        );
        let pred = self.scratch_pred()?;
        let d = self.dest(&operands[0])?;
        self.emit(Op::Compare {
            compare,
            d: pred,
            a: c,
            b: c,
        });
        self.emit(Op::Select {
            d,
            a,
            b,
            p: PredSource {
                pred,
                negated: false,
            },
        });
        Ok(())
    }

    fn compare(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<(), Reject> {
        let ty = m.ty()?;
        let dest_ty = if name == "set" { Some(m.ty()?) } else { None };
        let ftz = m.take("ftz");
        let logic = m.take_map(|part| match part {
            "and" => Some(Logic::And),
            "or" => Some(Logic::Or),
            "xor" => Some(Logic::Xor),
            _ => None,
        });
        let relation = m.first().ok_or(Reject::Unsupported)?;
        let pair = matches!(ty, Type::F16x2 | Type::Bf16x2);
        let find = |upper| compare::find(relation, ty, ftz, upper).ok_or(Reject::Unsupported);
        let low = find(false)?;
        if operands.len() != 3 + usize::from(logic.is_some()) {
            return malformed("it has the wrong number of operands");
        }
        let (a, b) = (
            self.source(&operands[1], ty)?,
            self.source(&operands[2], ty)?,
        );
        let combine = match logic {
            Some(logic) => Some((logic, self.source_pred(&operands[3])?)),
            None => None,
        };
        let low = Test {
            compare: low,
            a,
            b,
            combine,
        };
        let high = if pair {
            Some(Test {
                compare: find(true)?,
                ..low
            })
        } else {
            None
        };
        match dest_ty {
            Some(dest_ty) => {
                let value = set_value(dest_ty, pair).ok_or(Reject::Unsupported)?;
                let d = self.dest(&operands[0])?;
                match high {
                    Some(high) => self.set_pair(low, high, d, value),
                    None => {
                        let test = Box::new(low);
                        self.emit(Op::Set { test, d, value });
                        Ok(())
                    }
                }
            }
            None => self.set_predicates(low, high, &operands[0]),
        }
    }

    /// Lowers `set` on both lanes of a pair.
    fn set_pair(&mut self, low: Test, high: Test, d: Reg, value: u64) -> Result<(), Reject> {
        let (a, b) = (self.temporary()?, self.temporary()?);
        self.emit(Op::Set {
            test: Box::new(low),
            d: a,
            value,
        });
        self.emit(Op::Set {
            test: Box::new(high),
            d: b,
            value: value << 16,
        });
        let f = int::binary("or", Type::B32).ok_or(Reject::Unsupported)?;
        self.emit(Op::Alu {
            f,
            ops: [d, a, b, 0, 0],
        });
        Ok(())
    }

    fn set_predicates(
        &mut self,
        low: Test,
        high: Option<Test>,
        dest: &Operand<'a>,
    ) -> Result<(), Reject> {
        match (dest, high) {
            (Operand::Name(_), None) => {
                let d = self.one_dest_pred(dest)?;
                self.emit(match low.combine {
                    None => Op::Compare {
                        compare: low.compare,
                        d,
                        a: low.a,
                        b: low.b,
                    },
                    Some(_) => Op::SetPredicate {
                        test: Box::new(low),
                        d,
                        q: None,
                    },
                });
            }
            (Operand::Pair(p, q), None) => {
                let d = match self.dest_pred(p)? {
                    Some(d) => d,
                    None => self.scratch_pred()?,
                };
                let q = self.dest_pred(q)?;
                let test = Box::new(low);
                self.emit(Op::SetPredicate { test, d, q });
            }
            (Operand::Pair(p, q), Some(high)) => {
                // The first result goes into a temporary predicate: the other test may read the
                // destination.
                let first = self.scratch_pred()?;
                self.emit(Op::SetPredicate {
                    test: Box::new(low),
                    d: first,
                    q: None,
                });
                if let Some(d) = self.dest_pred(q)? {
                    let test = Box::new(high);
                    self.emit(Op::SetPredicate { test, d, q: None });
                }
                if let Some(d) = self.dest_pred(p)? {
                    let a = PredSource {
                        pred: first,
                        negated: false,
                    };
                    let logic = Logic::And;
                    self.emit(Op::Predicate { logic, d, a, b: a });
                }
            }
            _ => return malformed("the destination is not a predicate, or not a pair of them"),
        }
        Ok(())
    }
}
