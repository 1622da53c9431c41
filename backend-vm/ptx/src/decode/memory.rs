//! Loads, stores, atomics, address conversion and fences.

use super::arith::exactly;
use super::function::Lowering;
use super::insn::{Access, AddressSpace, Atomic, AtomicOp, Copy, Op, Order, Reg};
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::alu::int;
use crate::parse::ast::{Operand, Type};

/// Modifiers that only advise caches, or name what every access here is anyway.
fn advisory(part: &str) -> bool {
    matches!(
        part,
        "weak"
            | "volatile"
            | "relaxed"
            | "mmio"
            | "cta"
            | "cluster"
            | "gpu"
            | "sys"
            | "gl"
            | "ca"
            | "cg"
            | "cs"
            | "lu"
            | "cv"
            | "wb"
            | "wt"
            | "nc"
            | "unified"
            | "noftz"
    ) || part.starts_with("L1::")
        || part.starts_with("L2::")
}

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn memory(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        match name {
            "ld" | "ldu" => self.load_or_store(true, m, operands),
            "st" => self.load_or_store(false, m, operands),
            "atom" | "red" => self.atomic(name == "atom", m, operands),
            "cvta" => self.convert_address(m, operands),
            "isspacep" => {
                exactly::<2>(operands)?;
                let space = self.space(m).ok_or(Reject::Unsupported)?;
                let a = self.source(&operands[1], Type::U64)?;
                let d = self.one_dest_pred(&operands[0])?;
                self.emit(Op::IsSpace { d, a, space });
                Ok(true)
            }
            "cp" => self.copy(m, operands),
            "alloca" => {
                if m.ty()?.bytes() != 8 || !matches!(operands.len(), 2 | 3) {
                    return Err(Reject::Unsupported);
                }
                let bytes = self.source(&operands[1], Type::U64)?;
                let align = match operands.get(2) {
                    None => 8,
                    Some(Operand::Int(align @ 1..=4096)) if align.is_power_of_two() => *align,
                    Some(_) => return malformed("the alignment is not a small power of two"),
                };
                let d = self.dest(&operands[0])?;
                let align = u32::try_from(align).unwrap_or(16).max(16);
                self.emit(Op::Allocate { d, bytes, align });
                Ok(true)
            }
            // The memory of an `alloca` lasts until its function returns.
            "stacksave" => {
                m.ty()?;
                exactly::<1>(operands)?;
                let zero = self.constant(0)?;
                let d = self.dest(&operands[0])?;
                let f = int::unary("mov", Type::B64).ok_or(Reject::Unsupported)?;
                self.emit(Op::Alu {
                    f,
                    ops: [d, zero, 0, 0, 0],
                });
                Ok(true)
            }
            "stackrestore" => {
                m.ty()?;
                self.emit(Op::Nothing);
                Ok(true)
            }
            "membar" | "fence" => {
                // Without `.sc` or `.acq_rel`, and for proxies: the strongest.
                while m.first().is_some() {}
                self.emit(Op::Fence);
                Ok(true)
            }
            "prefetch" | "prefetchu" | "applypriority" | "discard" | "pmevent"
            | "griddepcontrol" | "setmaxnreg" => {
                while m.first().is_some() {}
                self.emit(Op::Nothing);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// `cp.async` in its forms without barriers.
    fn copy(&mut self, m: &mut Modifiers<'a>, operands: &[Operand<'a>]) -> Result<bool, Reject> {
        if !m.take("async") {
            return Err(Reject::Unsupported);
        }
        if m.take("commit_group") || m.take("wait_group") || m.take("wait_all") {
            self.emit(Op::Nothing);
            return Ok(true);
        }
        m.ignore(advisory);
        if !((m.take("shared") || m.take("shared::cta")) && m.take("global")) {
            return Err(Reject::Unsupported);
        }
        let [dest, source, Operand::Int(bytes @ (4 | 8 | 16)), rest @ ..] = operands else {
            return malformed("its operands are not two addresses and a size");
        };
        let (dest, source) = (self.address(dest)?, self.address(source)?);
        let source_bytes = match rest {
            [] => None,
            [size] => Some(self.source(size, Type::U32)?),
            // A predicate to ignore the source, or a cache policy.
            _ => return Err(Reject::Unsupported),
        };
        let copy = Copy {
            dest: (dest.base, dest.offset),
            source: (source.base, source.offset),
            bytes: u32::try_from(*bytes).unwrap_or(4),
            source_bytes,
        };
        self.emit(Op::Copy(Box::new(copy)));
        Ok(true)
    }

    fn space(&self, m: &mut Modifiers<'a>) -> Option<AddressSpace> {
        let entry = self.entry;
        m.take_map(|part| match part {
            "global" | "const" => Some(AddressSpace::Global),
            "shared" | "shared::cta" | "shared::cluster" => Some(AddressSpace::Shared),
            "local" => Some(AddressSpace::Local),
            // A function's parameters lie in its frame.
            "param" if !entry => Some(AddressSpace::Local),
            "param::func" => Some(AddressSpace::Local),
            "param" | "param::entry" => Some(AddressSpace::Param),
            _ => None,
        })
    }

    fn order(m: &mut Modifiers<'a>) -> Order {
        let both = m.take("acq_rel") || m.take("sc");
        let volatile = m.take("volatile");
        Order {
            acquire: m.take("acquire") || both || volatile,
            release: m.take("release") || both || volatile,
        }
    }

    fn load_or_store(
        &mut self,
        load: bool,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let ty = m.ty()?;
        let order = Self::order(m);
        let space = self.space(m);
        let vector = m.take_map(|part| match part {
            "v2" => Some(2),
            "v4" => Some(4),
            "v8" => Some(8),
            _ => None,
        });
        m.ignore(advisory);
        // A third operand is a cache policy.
        if !matches!(operands.len(), 2 | 3) {
            return malformed("it has the wrong number of operands");
        }
        if matches!(ty, Type::Pred | Type::B128) {
            return Err(Reject::Unsupported);
        }
        let (value, address) = if load {
            (&operands[0], &operands[1])
        } else {
            (&operands[1], &operands[0])
        };
        let address = self.address(address)?;
        let single = std::slice::from_ref(value);
        let pieces = match (value, vector) {
            (Operand::Vector(list), Some(count)) if list.len() == count => list.as_slice(),
            (Operand::Vector(list), None) if list.len() == 1 => list.as_slice(),
            (Operand::Vector(_), _) | (_, Some(_)) => {
                return malformed("the vector has the wrong length");
            }
            _ => single,
        };
        let regs: Box<[Reg]> = pieces
            .iter()
            .map(|piece| {
                if load {
                    self.dest(piece)
                } else {
                    self.source(piece, ty)
                }
            })
            .collect::<Result<_, _>>()?;
        let space = address.space.or(space).unwrap_or(AddressSpace::Generic);
        let access = Access {
            space,
            base: address.base,
            offset: address.offset,
            size: ty.bytes(),
            signed: ty.is_signed(),
            regs,
            order,
        };
        self.emit(if load {
            Op::Load(Box::new(access))
        } else {
            Op::Store(Box::new(access))
        });
        Ok(true)
    }

    fn atomic(
        &mut self,
        returns: bool,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let ty = m.ty()?;
        let space = self.space(m);
        Self::order(m);
        m.ignore(advisory);
        let name = m.first().ok_or(Reject::Unsupported)?;
        let op = match (name, ty) {
            ("and", _) => AtomicOp::And,
            ("or", _) => AtomicOp::Or,
            ("xor", _) => AtomicOp::Xor,
            ("exch", _) => AtomicOp::Exchange,
            ("cas", _) => AtomicOp::CompareExchange,
            ("add", Type::F32) => AtomicOp::AddF32,
            ("add", Type::F64) => AtomicOp::AddF64,
            ("add", Type::F16) => AtomicOp::AddF16,
            ("add", Type::F16x2) => AtomicOp::AddF16x2,
            ("add", Type::Bf16) => AtomicOp::AddBf16,
            ("add", Type::Bf16x2) => AtomicOp::AddBf16x2,
            ("add", Type::U32 | Type::S32 | Type::U64 | Type::S64) => AtomicOp::Add,
            ("inc", Type::U32) => AtomicOp::Increment,
            ("dec", Type::U32) => AtomicOp::Decrement,
            ("min", Type::U32 | Type::U64) => AtomicOp::MinUnsigned,
            ("max", Type::U32 | Type::U64) => AtomicOp::MaxUnsigned,
            ("min", Type::S32 | Type::S64) => AtomicOp::MinSigned,
            ("max", Type::S32 | Type::S64) => AtomicOp::MaxSigned,
            _ => return Err(Reject::Unsupported),
        };
        let size = ty.bytes();
        let narrow = matches!(
            op,
            AtomicOp::CompareExchange | AtomicOp::AddF16 | AtomicOp::AddBf16
        );
        if !(matches!(size, 4 | 8) || size == 2 && narrow) {
            return Err(Reject::Unsupported);
        }
        let operands_wanted =
            2 + usize::from(returns) + usize::from(op == AtomicOp::CompareExchange);
        if operands.len() != operands_wanted && operands.len() != operands_wanted + 1 {
            return malformed("it has the wrong number of operands");
        }
        let (dest, rest) = if returns {
            (Some(&operands[0]), &operands[1..])
        } else {
            (None, operands)
        };
        let address = self.address(&rest[0])?;
        let a = self.source(&rest[1], ty)?;
        let b = if op == AtomicOp::CompareExchange {
            self.source(&rest[2], ty)?
        } else {
            a
        };
        let dest = match dest {
            Some(dest) => self.optional_dest(dest)?,
            None => None,
        };
        let space = address.space.or(space).unwrap_or(AddressSpace::Generic);
        if space == AddressSpace::Param {
            return Err(Reject::Unsupported);
        }
        let (base, offset) = (address.base, address.offset);
        self.emit(Op::Atomic(Box::new(Atomic {
            op,
            space,
            base,
            offset,
            size,
            dest,
            a,
            b,
        })));
        Ok(true)
    }

    /// `cvta`: a window's addresses differ from offsets in its space by the window's base.
    fn convert_address(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        exactly::<2>(operands)?;
        if m.ty()?.bytes() != 8 {
            return Err(Reject::Unsupported);
        }
        let to_space = m.take("to");
        let space = self.space(m).ok_or(Reject::Unsupported)?;
        let base = crate::exec::window_base(space);
        let a = self.source(&operands[1], Type::U64)?;
        let base = self.constant(if to_space { base.wrapping_neg() } else { base })?;
        let d = self.dest(&operands[0])?;
        let f = int::binary("add", Type::U64).ok_or(Reject::Unsupported)?;
        self.emit(Op::Alu {
            f,
            ops: [d, a, base, 0, 0],
        });
        Ok(true)
    }
}
