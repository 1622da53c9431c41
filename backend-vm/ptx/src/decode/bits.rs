//! Integer instructions on bits, bytes and 24-bit numbers.

use super::Reject;
use super::function::Lowering;
use super::modifiers::Modifiers;
use crate::alu::int::{self, Part};
use crate::parse::ast::{Operand, Type};

impl<'a> Lowering<'a, '_, '_> {
    /// Integer instructions beyond the basic ones.
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
                let f = int::multiply_add24(part, ty);
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
            "lop3" => {
                if m.ty()? != Type::B32 {
                    return Err(Reject::Unsupported);
                }
                self.alu(Some(int::logic3()), operands, &[u, u, u, u])
            }
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
}
