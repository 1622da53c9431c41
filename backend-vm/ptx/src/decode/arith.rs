//! Lowers arithmetic, logic and moves.

use super::function::Lowering;
use super::insn::{Carry, CarryOp, Logic, Op, TRUE};
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::alu::float::Style;
use crate::alu::half::Rounding;
use crate::alu::int::Part;
use crate::alu::{Alu, float, int};
use crate::parse::ast::{Operand, Type};

fn is_float(ty: Type) -> bool {
    matches!(
        ty,
        Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2 | Type::F32 | Type::F64
    )
}

/// Checks the number of operands.
pub(crate) fn exactly<const N: usize>(operands: &[Operand<'_>]) -> Result<(), Reject> {
    if operands.len() == N {
        Ok(())
    } else {
        malformed(format!("it has {} operands instead of {N}", operands.len()))
    }
}

impl<'a> Lowering<'a, '_, '_> {
    /// Emits `f` with sources of the given types.
    pub(super) fn alu(
        &mut self,
        f: Option<Alu>,
        operands: &[Operand<'a>],
        types: &[Type],
    ) -> Result<bool, Reject> {
        self.styled_alu(f, operands, types, 0)
    }

    /// Emits `f` with sources of the given types and a word of modifiers.
    pub(super) fn styled_alu(
        &mut self,
        f: Option<Alu>,
        operands: &[Operand<'a>],
        types: &[Type],
        style: u32,
    ) -> Result<bool, Reject> {
        let f = f.ok_or(Reject::Unsupported)?;
        if operands.len() != types.len() + 1 {
            return malformed(format!(
                "it has {} operands instead of {}",
                operands.len(),
                types.len() + 1
            ));
        }
        let mut ops = [0, 0, 0, 0, style];
        for (index, ty) in types.iter().enumerate() {
            ops[index + 1] = self.source(&operands[index + 1], *ty)?;
        }
        ops[0] = self.dest(&operands[0])?;
        self.emit(Op::Alu { f, ops });
        Ok(true)
    }

    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn arithmetic(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        match name {
            "mov" => self.mov(m, operands),
            "add" | "sub" | "mul" | "div" | "rem" | "min" | "max" | "abs" | "neg" | "mad"
            | "fma" | "addc" | "subc" | "madc" => self.basic(name, m, operands),
            "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" => self.logic(name, m, operands),
            "setp" | "set" | "selp" | "slct" | "testp" => self.comparison(name, m, operands),
            "cvt" => self.convert(m, operands),
            "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "lg2" | "ex2" | "tanh" => {
                let ty = m.ty()?;
                let approximate = m.take("approx");
                let rounding = m.rounding();
                if approximate == rounding.is_some() {
                    return Err(Reject::Unsupported);
                }
                let rounding = rounding.unwrap_or(Rounding::Nearest);
                let style = Style {
                    rounding,
                    ftz: m.take("ftz"),
                    saturate: false,
                };
                self.alu(float::function(name, ty, style), operands, &[ty])
            }
            "copysign" => {
                let ty = m.ty()?;
                self.alu(float::copy_sign(ty), operands, &[ty, ty])
            }
            _ => self.bits(name, m, operands),
        }
    }

    fn mov(&mut self, m: &mut Modifiers<'a>, operands: &[Operand<'a>]) -> Result<bool, Reject> {
        let ty = m.ty()?;
        exactly::<2>(operands)?;
        if ty == Type::Pred {
            let a = self.source_pred(&operands[1])?;
            let d = self.one_dest_pred(&operands[0])?;
            self.emit(Op::Predicate {
                logic: Logic::And,
                d,
                a,
                b: TRUE,
            });
            return Ok(true);
        }
        if ty == Type::B128 {
            return self.move_wide(&operands[0], &operands[1]);
        }
        match (&operands[0], &operands[1]) {
            (Operand::Vector(list), source) => {
                let bits = self.piece_bits(ty, list.len())?;
                let a = self.source(source, ty)?;
                let d = list
                    .iter()
                    .map(|piece| self.optional_dest(piece))
                    .collect::<Result<_, _>>()?;
                self.emit(Op::Unpack { d, a, bits });
            }
            (dest, Operand::Vector(list)) => {
                let bits = self.piece_bits(ty, list.len())?;
                let piece_ty = if bits == 32 { Type::B32 } else { Type::B16 };
                let a = list
                    .iter()
                    .map(|piece| self.source(piece, piece_ty))
                    .collect::<Result<_, _>>()?;
                let d = self.dest(dest)?;
                self.emit(Op::Pack { d, a, bits });
            }
            (dest, source) => {
                let a = self.source(source, ty)?;
                let d = self.dest(dest)?;
                let f = int::unary("mov", ty).ok_or(Reject::Unsupported)?;
                self.emit(Op::Alu {
                    f,
                    ops: [d, a, 0, 0, 0],
                });
            }
        }
        Ok(true)
    }

    /// Lowers `mov.b128`. Both halves go through temporary rows, since source and destination may
    /// overlap.
    fn move_wide(&mut self, dest: &Operand<'a>, source: &Operand<'a>) -> Result<bool, Reject> {
        let f = int::unary("mov", Type::B64).ok_or(Reject::Unsupported)?;
        let sources = match source {
            Operand::Vector(list) => match &list[..] {
                [low, high] => [self.source(low, Type::B64)?, self.source(high, Type::B64)?],
                _ => return malformed("the vector does not have two halves"),
            },
            source => {
                let low = self.wide(source)?;
                [low, low + 1]
            }
        };
        let dests = match dest {
            Operand::Vector(list) => match &list[..] {
                [low, high] => [self.dest(low)?, self.dest(high)?],
                _ => return malformed("the vector does not have two halves"),
            },
            dest => {
                let low = self.wide(dest)?;
                [low, low + 1]
            }
        };
        let copies = [self.temporary()?, self.temporary()?];
        for (d, a) in copies
            .into_iter()
            .zip(sources)
            .chain(dests.into_iter().zip(copies))
        {
            self.emit(Op::Alu {
                f,
                ops: [d, a, 0, 0, 0],
            });
        }
        Ok(true)
    }

    fn piece_bits(&self, ty: Type, pieces: usize) -> Result<u32, Reject> {
        match (ty.bytes(), pieces) {
            (8, 2) => Ok(32),
            (8, 4) | (4, 2) => Ok(16),
            (4, 4) | (2, 2) => Ok(8),
            _ => Err(Reject::Unsupported),
        }
    }

    fn basic(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let relu = m.take("relu");
        let saturate = m.take("sat");
        if m.take("u16x2") {
            return self.alu(
                int::packed(name, "u16x2", relu),
                operands,
                &[Type::B32, Type::B32],
            );
        }
        if m.take("s16x2") {
            return self.alu(
                int::packed(name, "s16x2", relu),
                operands,
                &[Type::B32, Type::B32],
            );
        }
        let ty = m.ty()?;
        if is_float(ty) {
            return self.float(name, ty, saturate, relu, m, operands);
        }
        let carry_out = m.take("cc");
        let carry_in = matches!(name, "addc" | "subc" | "madc");
        if carry_out || carry_in {
            return self.carry(name, ty, carry_in, carry_out, m, operands);
        }
        match name {
            "abs" | "neg" => self.alu(int::unary(name, ty), operands, &[ty]),
            "mul" | "mad" => {
                let part = if m.take("wide") {
                    Part::Wide
                } else if m.take("hi") {
                    Part::High
                } else {
                    m.take("lo");
                    Part::Low
                };
                if name == "mul" {
                    return self.alu(int::multiply(part, ty), operands, &[ty, ty]);
                }
                let wide = match ty {
                    Type::U32 | Type::S32 if part == Part::Wide => Type::U64,
                    _ => ty,
                };
                self.alu(
                    int::multiply_add(part, ty, saturate),
                    operands,
                    &[ty, ty, wide],
                )
            }
            _ if relu || saturate => {
                if ty != Type::S32 {
                    return Err(Reject::Unsupported);
                }
                self.alu(int::saturating(name, relu), operands, &[ty, ty])
            }
            _ => self.alu(int::binary(name, ty), operands, &[ty, ty]),
        }
    }

    fn float(
        &mut self,
        name: &str,
        ty: Type,
        saturate: bool,
        relu: bool,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let ftz = m.take("ftz");
        // Exact results satisfy `.noftz` and `.full` too.
        m.take("noftz");
        let approximate = name == "div" && m.take("approx");
        if name == "div" {
            m.take("full");
        }
        let rounding = m.rounding().unwrap_or(Rounding::Nearest);
        let style = Style {
            rounding,
            ftz,
            saturate,
        };
        match name {
            "div" if approximate => {
                let plain = ty == Type::F32 && rounding == Rounding::Nearest && !saturate && !relu;
                let f = plain.then(|| float::approximate_quotient(ftz));
                self.alu(f, operands, &[ty, ty])
            }
            "add" | "sub" | "mul" | "div" if !relu => {
                self.alu(float::binary(name, ty, style), operands, &[ty, ty])
            }
            "fma" | "mad" => self.alu(float::fused(ty, style, relu), operands, &[ty, ty, ty]),
            "min" | "max" if !relu && !saturate => {
                let (nan, xorsign) = (m.take("NaN"), m.take("xorsign"));
                if xorsign && !m.take("abs") {
                    return Err(Reject::Unsupported);
                }
                self.alu(
                    float::extreme(name, ty, ftz, nan, xorsign),
                    operands,
                    &[ty, ty],
                )
            }
            "abs" | "neg" => self.alu(float::sign(name, ty, ftz), operands, &[ty]),
            _ => Err(Reject::Unsupported),
        }
    }

    fn carry(
        &mut self,
        name: &str,
        ty: Type,
        carry_in: bool,
        carry_out: bool,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let op = match name {
            "add" | "addc" => CarryOp::Add,
            "sub" | "subc" => CarryOp::Sub,
            "mad" | "madc" if m.take("hi") => CarryOp::MadHigh,
            "mad" | "madc" if m.take("lo") => CarryOp::MadLow,
            _ => return Err(Reject::Unsupported),
        };
        if !matches!(ty.bytes(), 4 | 8) {
            return Err(Reject::Unsupported);
        }
        let a = operands.get(1).map(|a| self.source(a, ty)).transpose()?;
        let b = operands.get(2).map(|b| self.source(b, ty)).transpose()?;
        let (Some(a), Some(b)) = (a, b) else {
            return malformed("operands are missing");
        };
        let multiplies = matches!(op, CarryOp::MadHigh | CarryOp::MadLow);
        if operands.len() != 3 + usize::from(multiplies) {
            return malformed("it has the wrong number of operands");
        }
        let c = if multiplies {
            self.source(&operands[3], ty)?
        } else {
            a
        };
        let d = self.dest(&operands[0])?;
        let carry = Carry {
            op,
            bytes: ty.bytes(),
            signed: ty.is_signed(),
            carry_in,
            carry_out,
            d,
            a,
            b,
            c,
        };
        self.emit(Op::Carry(Box::new(carry)));
        Ok(true)
    }

    fn logic(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let ty = m.ty()?;
        if ty == Type::Pred {
            let a = operands.get(1).map(|a| self.source_pred(a)).transpose()?;
            let Some(mut a) = a else {
                return malformed("operands are missing");
            };
            let (logic, b) = if name == "not" {
                a.negated = !a.negated;
                (Logic::And, TRUE)
            } else {
                exactly::<3>(operands)?;
                let logic = match name {
                    "and" => Logic::And,
                    "or" => Logic::Or,
                    "xor" => Logic::Xor,
                    _ => return Err(Reject::Unsupported),
                };
                (logic, self.source_pred(&operands[2])?)
            };
            let d = self.one_dest_pred(&operands[0])?;
            self.emit(Op::Predicate { logic, d, a, b });
            return Ok(true);
        }
        match name {
            "not" | "cnot" => self.alu(int::unary(name, ty), operands, &[ty]),
            "shl" | "shr" => self.alu(int::binary(name, ty), operands, &[ty, Type::U32]),
            _ => self.alu(int::binary(name, ty), operands, &[ty, ty]),
        }
    }
}
