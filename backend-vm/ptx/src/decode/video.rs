//! Lowers video instructions.

use super::function::Lowering;
use super::insn::Op;
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::alu::video::{self, Merge, Multiply, Operation, Part, Video};
use crate::parse::ast::{Operand, Type};

/// Returns an instruction's operation, unless it compares, and the base-2 logarithm of its number
/// of parts.
fn named(name: &str) -> Option<(Option<Operation>, u32)> {
    let (stem, lanes) = match name.strip_suffix('2') {
        Some(stem) => (stem, 1),
        None => match name.strip_suffix('4') {
            Some(stem) => (stem, 2),
            None => (name, 0),
        },
    };
    let operation = match stem {
        "vadd" => Operation::Add,
        "vsub" => Operation::Subtract,
        "vabsdiff" => Operation::Difference,
        "vmin" => Operation::Min,
        "vmax" => Operation::Max,
        "vavrg" if lanes > 0 => Operation::Average,
        "vshl" if lanes == 0 => Operation::ShiftLeft,
        "vshr" if lanes == 0 => Operation::ShiftRight,
        "vset" => return Some((None, lanes)),
        _ => return None,
    };
    Some((Some(operation), lanes))
}

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn video(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        if name == "vmad" {
            return self.multiply_parts(m, operands);
        }
        let Some((operation, lanes)) = named(name) else {
            return Ok(false);
        };
        let shifts = matches!(
            operation,
            Some(Operation::ShiftLeft | Operation::ShiftRight)
        );
        // Types come first; `.min` and similar modifiers last.
        let mut ty = || match m.take_map(Type::named) {
            Some(Type::U32) => Ok(false),
            Some(Type::S32) => Ok(true),
            _ => Err(Reject::Unsupported),
        };
        let signed = if operation.is_some() {
            let dest = ty()?;
            [ty()?, ty()?, dest]
        } else {
            [ty()?, ty()?, false]
        };
        let operation = match operation {
            Some(operation) => operation,
            None => m
                .take_map(|part| {
                    Some(match part {
                        "eq" => Operation::Equal,
                        "ne" => Operation::NotEqual,
                        "lt" => Operation::Less,
                        "le" => Operation::LessOrEqual,
                        "gt" => Operation::Greater,
                        "ge" => Operation::GreaterOrEqual,
                        _ => return None,
                    })
                })
                .ok_or(Reject::Unsupported)?,
        };
        let saturate = m.take("sat");
        let wrap = m.take("wrap");
        if shifts && !wrap && !m.take("clamp") {
            return Err(Reject::Unsupported);
        }
        let second = m.take_map(|part| match part {
            "add" => Some(Merge::Add),
            "min" if lanes == 0 => Some(Merge::Min),
            "max" if lanes == 0 => Some(Merge::Max),
            _ => None,
        });
        let (d, a, b, c) = match operands {
            [d, a, b] if second.is_none() && lanes == 0 => (d, a, b, None),
            [d, a, b, c] => (d, a, b, Some(c)),
            _ => return malformed("it has the wrong number of operands"),
        };
        let ((d, dest), (a, a_part), (b, b_part)) = (select(d), select(a), select(b));
        let part = if lanes == 0 {
            Part::WHOLE
        } else {
            let selected = dest.or(a_part).or(b_part);
            if selected.is_some() {
                return Err(Reject::Unsupported);
            }
            Part {
                bits: 32 >> lanes,
                shift: 0,
            }
        };
        let video = Video {
            operation,
            merge: second.unwrap_or(Merge::Insert),
            a: a_part.unwrap_or(part),
            b: b_part.unwrap_or(part),
            dest: dest.unwrap_or(part),
            signed,
            saturate,
            wrap,
            lanes,
        };
        let u = Type::U32;
        let c = match c {
            Some(c) => self.source(c, u)?,
            None => self.constant(0)?,
        };
        let (a, b) = (self.source(&a, u)?, self.source(&b, u)?);
        let d = self.dest(&d)?;
        self.emit(Op::Alu {
            f: video::handler(),
            ops: [d, a, b, c, video.encode()],
        });
        Ok(true)
    }

    /// Lowers `vmad`.
    fn multiply_parts(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let [d, a, b, c] = operands else {
            return malformed("it has the wrong number of operands");
        };
        let mut ty = || match m.take_map(Type::named) {
            Some(Type::U32) => Ok(false),
            Some(Type::S32) => Ok(true),
            _ => Err(Reject::Unsupported),
        };
        // The result is signed if its sources are.
        ty()?;
        let signed = [ty()?, ty()?];
        let plus_one = m.take("po");
        let saturate = m.take("sat");
        let scale = m.take_map(|part| match part {
            "shr7" => Some(7),
            "shr15" => Some(15),
            _ => None,
        });
        let ((a, a_negated), (b, b_negated)) = (negated(a), negated(b));
        let (c, negate_sum) = negated(c);
        let negate_product = a_negated != b_negated;
        if usize::from(plus_one) + usize::from(negate_product) + usize::from(negate_sum) > 1 {
            return malformed("more than one of its terms is negated or incremented");
        }
        let ((a, a_part), (b, b_part)) = (select(&a), select(&b));
        let multiply = Multiply {
            a: a_part.unwrap_or(Part::WHOLE),
            b: b_part.unwrap_or(Part::WHOLE),
            signed,
            negate_product,
            negate_sum,
            plus_one,
            saturate,
            scale: scale.unwrap_or(0),
        };
        self.styled_alu(
            Some(video::multiplier()),
            &[d.clone(), a, b, c],
            &[Type::U32; 3],
            multiply.encode(),
        )
    }
}

/// Returns an operand without its sign, and whether it had one.
fn negated<'a>(operand: &Operand<'a>) -> (Operand<'a>, bool) {
    match operand {
        Operand::Negative(name) => (Operand::Name(name), true),
        other => (other.clone(), false),
    }
}

/// Returns an operand without its selector, and the selected part.
fn select<'a>(operand: &Operand<'a>) -> (Operand<'a>, Option<Part>) {
    if let Operand::Name(name) = operand
        && let Some((register, part)) = name.rsplit_once('.')
        && let Some(part) = Part::named(part)
    {
        return (Operand::Name(register), Some(part));
    }
    (operand.clone(), None)
}
