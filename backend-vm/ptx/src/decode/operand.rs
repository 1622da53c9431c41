//! Resolves operands to rows, predicates and addresses.

use super::function::{Lowering, Symbol};
use super::insn::{AddressSpace, Base, Op, Pred, PredSource, Reg, Slot};
use super::{Reject, malformed, special};
use crate::parse::ast::{Operand, Type};

/// Resolved address operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    /// Space of the symbol, if the address names one.
    pub space: Option<AddressSpace>,
    pub base: Base,
    pub offset: i64,
}

/// Returns the bits of a literal as a value of type `ty`.
fn literal(operand: &Operand<'_>, ty: Type) -> Option<u64> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a literal of a narrower type is rounded"
    )]
    Some(match (operand, ty) {
        (Operand::F32(bits), Type::F64) => f64::from(f32::from_bits(*bits)).to_bits(),
        (Operand::F32(bits), _) => u64::from(*bits),
        (Operand::F64(bits), Type::F32 | Type::B32) => {
            u64::from((f64::from_bits(*bits) as f32).to_bits())
        }
        (Operand::F64(bits), _) => *bits,
        (Operand::Int(value), _) => *value,
        _ => return None,
    })
}

impl<'a> Lowering<'a, '_, '_> {
    /// Returns the row of a source operand of type `ty`.
    pub(crate) fn source(&mut self, operand: &Operand<'a>, ty: Type) -> Result<Reg, Reject> {
        if let Some(bits) = literal(operand, ty) {
            return self.constant(bits);
        }
        match operand {
            Operand::Name(name) => self.named(name, 0),
            Operand::Offset(name, offset) => self.named(name, *offset),
            _ => malformed("an operand is neither a register nor a constant"),
        }
    }

    fn named(&mut self, name: &'a str, offset: i64) -> Result<Reg, Reject> {
        let symbol = self.lookup(name)?;
        match symbol {
            Some(Symbol::Register(reg)) if offset == 0 => Ok(reg),
            Some(Symbol::Register(_)) => {
                malformed(format!("`{name}` is a register and takes no offset"))
            }
            Some(Symbol::Wide(_)) => malformed(format!("`{name}` has 128 bits")),
            Some(Symbol::Predicate(_)) => malformed(format!("`{name}` is a predicate")),
            Some(Symbol::Global(address)) => self.constant(address.wrapping_add_signed(offset)),
            Some(Symbol::Shared(at)) => self.constant(u64::from(at).wrapping_add_signed(offset)),
            Some(Symbol::KernelParam(at)) => {
                self.constant(u64::from(at).wrapping_add_signed(offset))
            }
            Some(Symbol::DynamicShared) => self.dynamic_shared(offset),
            Some(Symbol::Frame(at)) => {
                let d = self.temporary()?;
                let offset = u32::try_from(i64::from(at).wrapping_add(offset)).map_err(|_| {
                    Reject::Malformed(format!("`{name}` with an offset outside its frame"))
                })?;
                self.emit(Op::FrameAddress { d, offset });
                Ok(d)
            }
            Some(Symbol::Function(index)) => {
                self.needs.indirect = true;
                self.constant(crate::exec::function_address(index))
            }
            None => {
                let Some(special) = special::find(name) else {
                    return if name.starts_with('%') {
                        Err(Reject::Malformed(format!(
                            "register `{name}` is not declared"
                        )))
                    } else {
                        malformed(format!("`{name}` is not declared"))
                    };
                };
                self.needs.cluster |= special::is_of_clusters(name);
                let d = self.temporary()?;
                self.emit_unguarded(Op::Special { d, special });
                Ok(d)
            }
        }
    }

    /// Returns the low row of a 128-bit register; the high row is the next one.
    pub(crate) fn wide(&mut self, operand: &Operand<'a>) -> Result<Reg, Reject> {
        if let Operand::Name(name) = operand
            && let Some(Symbol::Wide(low)) = self.lookup(name)?
        {
            return Ok(low);
        }
        malformed("an operand is not a register of 128 bits")
    }

    /// Returns the row of a destination operand. `_` gets a row that is never read.
    pub(crate) fn dest(&mut self, operand: &Operand<'a>) -> Result<Reg, Reject> {
        match operand {
            Operand::Name("_") => self.temporary(),
            Operand::Name(name) => match self.lookup(name)? {
                Some(Symbol::Register(reg)) => Ok(reg),
                _ => malformed(format!("destination `{name}` is not a register")),
            },
            _ => malformed("the destination is not a register"),
        }
    }

    /// Returns the row of a destination operand, `None` for `_`.
    pub(crate) fn optional_dest(&mut self, operand: &Operand<'a>) -> Result<Option<Reg>, Reject> {
        if *operand == Operand::Name("_") {
            Ok(None)
        } else {
            self.dest(operand).map(Some)
        }
    }

    /// Returns the predicate of a destination name, `None` for `_`.
    pub(crate) fn dest_pred(&mut self, name: &'a str) -> Result<Option<Pred>, Reject> {
        if name == "_" {
            return Ok(None);
        }
        match self.lookup(name)? {
            Some(Symbol::Predicate(pred)) => Ok(Some(pred)),
            _ => malformed(format!("`{name}` is not a predicate")),
        }
    }

    /// Returns the predicate of a destination operand. `_` gets a predicate that is never read.
    pub(crate) fn one_dest_pred(&mut self, operand: &Operand<'a>) -> Result<Pred, Reject> {
        let Operand::Name(name) = operand else {
            return malformed("the destination is not a predicate");
        };
        match self.dest_pred(name)? {
            Some(pred) => Ok(pred),
            None => self.scratch_pred(),
        }
    }

    /// Returns a source predicate, possibly negated. An integer is a constant predicate.
    pub(crate) fn source_pred(&mut self, operand: &Operand<'a>) -> Result<PredSource, Reject> {
        let (name, negated) = match operand {
            Operand::Name(name) => (*name, false),
            Operand::Not(name) => (*name, true),
            Operand::Int(value) => {
                return Ok(PredSource {
                    pred: 0,
                    negated: *value == 0,
                });
            }
            _ => return malformed("an operand is not a predicate"),
        };
        match self.lookup(name)? {
            Some(Symbol::Predicate(pred)) => Ok(PredSource { pred, negated }),
            None if name == "%is_explicit_cluster" => {
                self.needs.cluster = true;
                Ok(PredSource {
                    pred: 0,
                    negated: !negated,
                })
            }
            _ => malformed(format!("`{name}` is not a predicate")),
        }
    }

    /// Resolves an address operand.
    pub(crate) fn address(&mut self, operand: &Operand<'a>) -> Result<Address, Reject> {
        let (name, offset) = match operand {
            Operand::Address(Some(name), offset) => (*name, *offset),
            Operand::Address(None, offset) => {
                return Ok(Address {
                    space: None,
                    base: Base::Absolute,
                    offset: *offset,
                });
            }
            _ => return malformed("an operand is not an address"),
        };
        let symbol = self.lookup(name)?;
        let absolute = |space, at: u64| Address {
            space: Some(space),
            base: Base::Absolute,
            offset: at.cast_signed().wrapping_add(offset),
        };
        Ok(match symbol {
            Some(Symbol::Register(reg)) => Address {
                space: None,
                base: Base::Row(reg),
                offset,
            },
            Some(Symbol::Global(at)) => absolute(AddressSpace::Global, at),
            Some(Symbol::Shared(at)) => absolute(AddressSpace::Shared, u64::from(at)),
            Some(Symbol::KernelParam(at)) => absolute(AddressSpace::Param, u64::from(at)),
            Some(Symbol::DynamicShared) => {
                let reg = self.dynamic_shared(0)?;
                Address {
                    space: Some(AddressSpace::Shared),
                    base: Base::Row(reg),
                    offset,
                }
            }
            Some(Symbol::Frame(at)) => Address {
                space: Some(AddressSpace::Local),
                base: Base::Frame,
                offset: i64::from(at).wrapping_add(offset),
            },
            _ => return malformed(format!("`{name}` is not an address")),
        })
    }

    /// Returns the location of a call's parameter.
    pub(crate) fn call_slot(&mut self, operand: &Operand<'a>, ty: Type) -> Result<Slot, Reject> {
        if let Operand::Name(name) = operand {
            match self.lookup(name)? {
                Some(Symbol::Frame(at)) => return Ok(Slot::Memory(at)),
                Some(Symbol::Register(reg)) => return Ok(Slot::Row(reg)),
                _ => {}
            }
        }
        self.source(operand, ty).map(Slot::Row)
    }
}
