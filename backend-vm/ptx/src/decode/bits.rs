//! Lowers integer instructions on bits, bytes and 24-bit numbers.

use super::function::Lowering;
use super::insn::{Logic, Op, Test};
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::alu::compare;
use crate::alu::int::{self, Part};
use crate::parse::ast::{Operand, Type};

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers the instruction if it is one of this module's.
    pub(super) fn bits(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let u = Type::U32;
        match name {
            "mul24" | "mad24" => {
                let part = if m.take("hi") { Part::High } else { Part::Low };
                m.take("lo");
                let ty = m.ty()?;
                let saturate = name == "mad24" && m.take("sat");
                let f = int::multiply_add24(part, ty, saturate);
                if name == "mad24" {
                    return self.alu(f, operands, &[ty, ty, ty]);
                }
                let mut operands = operands.to_vec();
                operands.push(Operand::Int(0));
                self.alu(f, &operands, &[ty, ty, ty])
            }
            "sad" => {
                let ty = m.ty()?;
                self.alu(int::sum_of_differences(ty), operands, &[ty, ty, ty])
            }
            "popc" | "clz" | "brev" => {
                let ty = m.ty()?;
                self.alu(int::unary(name, ty), operands, &[ty])
            }
            "bfind" => {
                let ty = m.ty()?;
                let shift_amount = m.take("shiftamt");
                self.alu(int::find_bit(ty, shift_amount), operands, &[ty])
            }
            "fns" => {
                m.ty()?;
                self.alu(Some(int::nth_set()), operands, &[u, u, Type::S32])
            }
            "bfe" => {
                let ty = m.ty()?;
                self.alu(int::extract(ty), operands, &[ty, u, u])
            }
            "bfi" => {
                let ty = m.ty()?;
                self.alu(int::insert(ty), operands, &[ty, ty, u, u])
            }
            "bmsk" | "szext" => {
                let ty = m.ty()?;
                let wrap = m.take("wrap");
                m.take("clamp");
                self.alu(int::mask_or_extend(name, wrap, ty), operands, &[ty, u])
            }
            "shf" => {
                let left = m.take("l");
                if !left && !m.take("r") {
                    return Err(Reject::Unsupported);
                }
                let wrap = m.take("wrap");
                m.take("clamp");
                let ty = m.ty()?;
                self.alu(Some(int::funnel(left, wrap)), operands, &[ty, ty, u])
            }
            "lop3" => self.logic3(m, operands),
            "prmt" => {
                if m.take("b32") {
                    let mode = m.first();
                    self.alu(int::permute(mode), operands, &[u, u, u])
                } else {
                    Err(Reject::Unsupported)
                }
            }
            "dp4a" | "dp2a" => {
                let high = m.take("hi");
                m.take("lo");
                let b = m.ty()?;
                let a = m.ty()?;
                self.alu(
                    int::dot(name, high, a.is_signed(), b.is_signed()),
                    operands,
                    &[u, u, u],
                )
            }
            _ => Ok(false),
        }
    }

    /// Lowers `lop3`, with an optional predicate that states whether the result is not 0. The result
    /// itself may be `_`.
    fn logic3(&mut self, m: &mut Modifiers<'a>, operands: &[Operand<'a>]) -> Result<bool, Reject> {
        if m.ty()? != Type::B32 {
            return Err(Reject::Unsupported);
        }
        let types = [Type::U32; 4];
        let logic = m.take_map(|part| match part {
            "and" => Some(Logic::And),
            "or" => Some(Logic::Or),
            _ => None,
        });
        let Some(logic) = logic else {
            return self.alu(Some(int::logic3()), operands, &types);
        };
        let [Operand::Pair(d, p), a, b, c, table, q] = operands else {
            return malformed("its operands are not a pair, four sources and a predicate");
        };
        let combine = Some((logic, self.source_pred(q)?));
        let d = self.dest(&Operand::Name(d))?;
        let mut ops = [d, 0, 0, 0, 0];
        for (op, source) in ops[1..].iter_mut().zip([a, b, c, table]) {
            *op = self.source(source, Type::U32)?;
        }
        let f = int::logic3();
        self.emit(Op::Alu { f, ops });
        let p = match self.dest_pred(p)? {
            Some(p) => p,
            None => self.scratch_pred()?,
        };
        let compare = compare::find("ne", Type::U32, false, false).ok_or(Reject::Unsupported)?;
        let test = Box::new(Test {
            compare,
            a: d,
            b: self.constant(0)?,
            combine,
        });
        self.emit(Op::SetPredicate {
            test,
            d: p,
            q: None,
        });
        Ok(true)
    }
}
