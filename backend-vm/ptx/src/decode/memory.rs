//! Lowers loads, stores, atomics, address conversion and fences.

use super::arith::exactly;
use super::function::Lowering;
use super::insn::{Access, AddressSpace, Op, Order, Reg};
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::alu::int;
use crate::parse::ast::{Operand, Type};

/// Returns whether a modifier only advises caches, or names a property of every access on this device.
pub(super) fn advisory(part: &str) -> bool {
    matches!(
        part,
        "weak"
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
            "cvta" => self.convert_address(m, operands),
            "mapa" | "getctarank" | "createpolicy" => self.address_of_cluster(name, m, operands),
            "isspacep" => {
                exactly::<2>(operands)?;
                let constant = m.take("const");
                let space = if constant {
                    AddressSpace::Global
                } else {
                    self.space(m).ok_or(Reject::Unsupported)?
                };
                if space == AddressSpace::Global {
                    self.needs.constant_ranges = true;
                }
                let a = self.source(&operands[1], Type::U64)?;
                let d = self.one_dest_pred(&operands[0])?;
                self.emit(Op::IsSpace {
                    d,
                    a,
                    space,
                    constant,
                });
                Ok(true)
            }
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
            // `alloca` memory is freed when its function returns, so `stacksave` and `stackrestore` save
            // and restore nothing.
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
                // Every fence is the strongest one: without `.sc` or `.acq_rel`, and for proxies, too.
                while m.first().is_some() {}
                self.emit(Op::Fence);
                Ok(true)
            }
            // `griddepcontrol.wait` does nothing: the grids that this one depends on are complete when it
            // begins.
            "griddepcontrol" if m.take("launch_dependents") => {
                self.emit(Op::LaunchDependents);
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

    /// Lowers `mapa`, `getctarank` and `createpolicy`. A cluster has one block, and caches are not
    /// modelled.
    fn address_of_cluster(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let ty = m.ty()?;
        self.needs.cluster |= name != "createpolicy";
        let a = match (name, operands) {
            // A variable of shared memory has the same address in every block.
            ("mapa", [_, a, rank]) => {
                self.source(rank, Type::U32)?;
                self.source(a, ty)?
            }
            ("getctarank", [_, a]) => {
                self.source(a, ty)?;
                self.constant(0)?
            }
            ("createpolicy", [_, ..]) => {
                while m.first().is_some() {}
                self.constant(0)?
            }
            _ => return malformed("it has the wrong number of operands"),
        };
        m.ignore(|part| part == "shared::cluster");
        let d = self.dest(&operands[0])?;
        let f = int::unary("mov", ty).ok_or(Reject::Unsupported)?;
        self.emit(Op::Alu {
            f,
            ops: [d, a, 0, 0, 0],
        });
        Ok(true)
    }

    pub(super) fn space(&self, m: &mut Modifiers<'a>) -> Option<AddressSpace> {
        let entry = self.entry;
        m.take_map(|part| match part {
            "global" | "const" => Some(AddressSpace::Global),
            "shared" | "shared::cta" | "shared::cluster" => Some(AddressSpace::Shared),
            "local" => Some(AddressSpace::Local),
            // Parameters of a function are in its frame.
            "param" if !entry => Some(AddressSpace::Local),
            "param::func" => Some(AddressSpace::Local),
            "param" | "param::entry" => Some(AddressSpace::Param),
            _ => None,
        })
    }

    pub(super) fn order(m: &mut Modifiers<'a>) -> Order {
        let both = m.take("acq_rel") || m.take("sc");
        let volatile = m.take("volatile");
        let relaxed = m.take("relaxed") || m.take("mmio");
        let acquire = m.take("acquire") || both || volatile;
        let release = m.take("release") || both || volatile;
        Order {
            strong: acquire || release || relaxed,
            acquire,
            release,
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
        let vector = m.vector();
        m.ignore(advisory);
        // A third operand is a cache policy.
        if !matches!(operands.len(), 2 | 3) {
            return malformed("it has the wrong number of operands");
        }
        if ty == Type::Pred || ty == Type::B128 && vector.is_some() {
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
        let regs: Box<[Reg]> = if ty == Type::B128 {
            let low = self.wide(value)?;
            Box::new([low, low + 1])
        } else {
            let rows = pieces.iter().map(|piece| {
                if load {
                    self.dest(piece)
                } else {
                    self.source(piece, ty)
                }
            });
            rows.collect::<Result<_, _>>()?
        };
        let space = address.space.or(space).unwrap_or(AddressSpace::Generic);
        let access = Access {
            space,
            base: address.base,
            offset: address.offset,
            size: ty.bytes().min(8),
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

    /// Lowers `cvta`: a generic address is the offset in its space plus the base of the space's window.
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
