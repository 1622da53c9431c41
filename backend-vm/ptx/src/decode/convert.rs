//! Lowers conversions.

use super::Reject;
use super::function::Lowering;
use super::modifiers::Modifiers;
use crate::alu::convert::{self, Style};
use crate::alu::half::Rounding;
use crate::alu::narrow::{self, ToTf32};
use crate::parse::ast::{Operand, Type};

fn is_pair_of_bytes(ty: Type) -> bool {
    matches!(ty, Type::E4m3x2 | Type::E5m2x2)
}

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers `cvt`.
    pub(super) fn convert(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        if m.take("pack") {
            return self.convert_and_pack(m, operands);
        }
        let from = m.ty()?;
        let to = m.ty()?;
        let integral = m.integral_rounding();
        let away = m.take("rna");
        let rounding = m.rounding();
        let style = Style {
            rounding: integral.or(rounding).unwrap_or(Rounding::Nearest),
            integral: integral.is_some(),
            ftz: m.take("ftz"),
            saturate: m.take("sat"),
            relu: m.take("relu"),
            finite: m.take("satfinite"),
        };
        let nearest = rounding == Some(Rounding::Nearest);
        if is_pair_of_bytes(to) || is_pair_of_bytes(from) {
            let plain = nearest && !style.ftz && !style.saturate;
            if !plain || style.finite != is_pair_of_bytes(to) {
                return Err(Reject::Unsupported);
            }
            let types = [from, from];
            let sources = 1 + usize::from(from == Type::F32);
            let f = narrow::pair_of_bytes(to, from, style.relu);
            return self.alu(f, operands, &types[..sources]);
        }
        if to == Type::Tf32 {
            let mode = match rounding {
                None if away => ToTf32::Away,
                Some(Rounding::Nearest) if !away => ToTf32::Nearest,
                Some(Rounding::Zero) if !away => ToTf32::Zero,
                _ => return Err(Reject::Unsupported),
            };
            if from != Type::F32 || style.ftz || style.saturate || style.integral {
                return Err(Reject::Unsupported);
            }
            let f = narrow::tf32(mode, style.relu, style.finite);
            return self.alu(Some(f), operands, &[from]);
        }
        if away {
            return Err(Reject::Unsupported);
        }
        if matches!(to, Type::F16x2 | Type::Bf16x2) {
            if from != Type::F32 {
                return Err(Reject::Unsupported);
            }
            return self.styled_alu(
                convert::pack_halves(to, style),
                operands,
                &[from, from],
                style.encode(),
            );
        }
        self.styled_alu(
            convert::find(to, from, style),
            operands,
            &[from],
            style.encode(),
        )
    }

    /// Lowers `cvt.pack.sat.u8.s32.b32 d, a, b, c` and its kin.
    fn convert_and_pack(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let above = m.take("b32");
        if !m.take("sat") || !m.take("s32") {
            return Err(Reject::Unsupported);
        }
        let ty = m.first().ok_or(Reject::Unsupported)?;
        let (kind, bits) = ty.split_at_checked(1).ok_or(Reject::Unsupported)?;
        let bits: u32 = bits.parse().map_err(|_| Reject::Unsupported)?;
        if !matches!(kind, "u" | "s") || above != (bits < 16) {
            return Err(Reject::Unsupported);
        }
        let f = narrow::pack(bits, kind == "s");
        let types = [Type::S32, Type::S32, Type::B32];
        self.alu(f, operands, &types[..2 + usize::from(above)])
    }
}
