//! Lowers `atom` and `red`.

use super::function::Lowering;
use super::insn::{AddressSpace, Atomic, AtomicOp, Op, Place, Reg, Short, ShortOp};
use super::memory::advisory;
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::parse::ast::{Operand, Type};

fn short(name: &str, ty: Type) -> Option<AtomicOp> {
    let op = match name {
        "add" => ShortOp::Add,
        "min" => ShortOp::Min,
        "max" => ShortOp::Max,
        _ => return None,
    };
    let (bfloat, pair) = match ty {
        Type::F16 => (false, false),
        Type::F16x2 => (false, true),
        Type::Bf16 => (true, false),
        Type::Bf16x2 => (true, true),
        _ => return None,
    };
    Some(AtomicOp::Short(Short { op, bfloat, pair }))
}

/// Returns the operation `name` on one element of type `ty`.
pub(super) fn operation(name: &str, ty: Type) -> Option<AtomicOp> {
    let bits = matches!(ty, Type::B32 | Type::B64);
    let any = bits || matches!(ty, Type::U32 | Type::S32 | Type::U64 | Type::S64);
    Some(match (name, ty) {
        ("and", _) if any => AtomicOp::And,
        ("or", _) if any => AtomicOp::Or,
        ("xor", _) if any => AtomicOp::Xor,
        ("exch", Type::B128) => AtomicOp::Exchange,
        ("exch", Type::F32 | Type::F64) => AtomicOp::Exchange,
        ("exch", _) if any => AtomicOp::Exchange,
        ("cas", Type::B16 | Type::U16 | Type::S16 | Type::B128) => AtomicOp::CompareExchange,
        ("cas", _) if any => AtomicOp::CompareExchange,
        ("add", Type::F32) => AtomicOp::AddF32,
        ("add", Type::F64) => AtomicOp::AddF64,
        ("add", _) if any && !bits => AtomicOp::Add,
        ("inc", Type::U32) => AtomicOp::Increment,
        ("dec", Type::U32) => AtomicOp::Decrement,
        ("min", Type::U32 | Type::U64) => AtomicOp::MinUnsigned,
        ("max", Type::U32 | Type::U64) => AtomicOp::MaxUnsigned,
        ("min", Type::S32 | Type::S64) => AtomicOp::MinSigned,
        ("max", Type::S32 | Type::S64) => AtomicOp::MaxSigned,
        _ => return short(name, ty),
    })
}

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn atomic(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let returns = match name {
            "atom" => true,
            // `red.async` also signals a barrier: it is not supported.
            "red" if !m.take("async") => false,
            _ => return Ok(false),
        };
        // The type stands before or after the operation.
        let ty = m.take_map(Type::named).ok_or(Reject::Unsupported)?;
        let space = self.space(m);
        Self::order(m);
        let hint = m.take("L2::cache_hint");
        m.ignore(advisory);
        let lanes = m.vector();
        let op = m
            .first()
            .and_then(|name| operation(name, ty))
            .ok_or(Reject::Unsupported)?;
        let operands = match operands {
            [operands @ .., _] if hint => operands,
            operands => operands,
        };
        let (dest, rest) = match operands {
            [dest, rest @ ..] if returns => (Some(dest), rest),
            rest => (None, rest),
        };
        let (address, a, b) = match rest {
            [address, a] if op != AtomicOp::CompareExchange => (address, a, a),
            [address, a, b] if op == AtomicOp::CompareExchange => (address, a, b),
            _ => return malformed("it has the wrong number of operands"),
        };
        let address = self.address(address)?;
        let space = address.space.or(space).unwrap_or(AddressSpace::Generic);
        if space == AddressSpace::Param {
            return Err(Reject::Unsupported);
        }
        let place = Place {
            space,
            base: address.base,
            offset: address.offset,
        };
        let size = ty.bytes();
        let one = Atomic {
            op,
            place,
            size,
            align: size,
            dest: None,
            a: 0,
            b: 0,
        };
        let Some(lanes) = lanes else {
            let (a, b) = (self.atomic_source(a, ty)?, self.atomic_source(b, ty)?);
            let dest = match dest {
                Some(Operand::Name("_")) | None => None,
                Some(dest) if ty == Type::B128 => Some(self.wide(dest)?),
                Some(dest) => Some(self.dest(dest)?),
            };
            self.emit(Op::Atomic(Box::new(Atomic { dest, a, b, ..one })));
            return Ok(true);
        };
        // Each element of a vector is an atomic operation of its own.
        let adds = matches!(op, AtomicOp::AddF32 | AtomicOp::Short(_));
        let (true, Operand::Vector(sources)) = (adds && lanes * size as usize <= 16, a) else {
            return Err(Reject::Unsupported);
        };
        let dests = match dest {
            Some(Operand::Vector(dests)) if dests.len() == lanes => dests.as_slice(),
            None | Some(Operand::Name("_")) => &[],
            _ => return malformed("the destination is not a vector of the same length"),
        };
        if sources.len() != lanes {
            return malformed("the vector has the wrong length");
        }
        let mut align = u32::try_from(lanes).unwrap_or(1) * size;
        for (index, source) in sources.iter().enumerate() {
            let a = self.source(source, ty)?;
            let dest = match dests.get(index) {
                Some(dest) => self.optional_dest(dest)?,
                None => None,
            };
            let bytes = i64::from(size) * i64::try_from(index).unwrap_or(0);
            let place = Place {
                offset: place.offset.wrapping_add(bytes),
                ..place
            };
            self.emit(Op::Atomic(Box::new(Atomic {
                place,
                align,
                dest,
                a,
                b: a,
                ..one
            })));
            align = size;
        }
        Ok(true)
    }

    fn atomic_source(&mut self, operand: &Operand<'a>, ty: Type) -> Result<Reg, Reject> {
        if ty == Type::B128 {
            self.wide(operand)
        } else {
            self.source(operand, ty)
        }
    }
}
