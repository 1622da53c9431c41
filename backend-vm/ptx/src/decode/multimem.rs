//! Lowers `multimem`: accesses to multicast objects.
//!
//! The device has no multicast objects, so no address belongs to one. A kernel may contain such instructions, for
//! devices that have some; it faults when it executes one.

use super::function::Lowering;
use super::insn::Op;
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::parse::ast::{Operand, Type};

/// Message of the fault.
const NO_OBJECT: &str = "multimem at an address that is no multicast object's";

/// Returns whether elements of a type can be stored.
fn is_stored(ty: Type) -> bool {
    reduced("add", ty) == Some(true) || matches!(ty, Type::B32 | Type::B64)
}

/// Returns whether elements of a type can be reduced by `operation`; `None` if that is no operation.
fn reduced(operation: &str, ty: Type) -> Option<bool> {
    let integer = matches!(ty, Type::U32 | Type::S32 | Type::U64 | Type::S64);
    let small = matches!(ty, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2);
    Some(match operation {
        "add" => integer || small || matches!(ty, Type::F32 | Type::F64),
        "min" | "max" => integer || small,
        "and" | "or" | "xor" => matches!(ty, Type::B32 | Type::B64),
        _ => return None,
    })
}

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn multimem(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        if name != "multimem" {
            return Ok(false);
        }
        let ty = m.ty()?;
        let loads = m.take("ld_reduce");
        let stores = !loads && m.take("st");
        if !loads && !stores && !m.take("red") {
            return Err(Reject::Unsupported);
        }
        if stores {
            if !is_stored(ty) {
                return Err(Reject::Unsupported);
            }
        } else {
            match m.take_map(|part| reduced(part, ty)) {
                Some(true) => {}
                Some(false) => return Err(Reject::Unsupported),
                None => return malformed("it does not say how it reduces"),
            }
        }
        let order = if loads { "acquire" } else { "release" };
        m.ignore(|part| {
            matches!(
                part,
                "weak" | "relaxed" | "cta" | "cluster" | "gpu" | "sys" | "global"
            ) || part == order
                || part == "acc::f32" && loads
        });
        let count = m.vector();
        let [first, second] = operands else {
            return malformed("it has the wrong number of operands");
        };
        let (value, address) = if loads {
            (first, second)
        } else {
            (second, first)
        };
        self.address(address)?;
        let pieces = match (value, count) {
            (Operand::Vector(list), Some(count)) if list.len() == count => list.as_slice(),
            (Operand::Vector(_), _) | (_, Some(_)) => {
                return malformed("the vector has the wrong length");
            }
            _ => std::slice::from_ref(value),
        };
        for piece in pieces {
            if loads {
                self.dest(piece)?;
            } else {
                self.source(piece, ty)?;
            }
        }
        self.emit(Op::Illegal(NO_OBJECT));
        Ok(true)
    }
}
