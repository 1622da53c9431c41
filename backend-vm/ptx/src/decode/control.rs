//! Lowers branches, calls and the ends of threads.

use super::function::{Lowering, Symbol};
use super::insn::{Builtin, Call, Callee, Op, Param, Slot};
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::parse::ast::{Operand, Signature, Type, Variable};

/// Returns whether the device runtime provides the function `name`.
pub(crate) fn is_provided(name: &str) -> bool {
    builtin(name).is_some()
}

/// Returns the device runtime's function `name`.
fn builtin(name: &str) -> Option<Builtin> {
    match name {
        "vprintf" => Some(Builtin::Vprintf),
        "malloc" => Some(Builtin::Malloc),
        "free" => Some(Builtin::Free),
        "__assertfail" => Some(Builtin::AssertFail),
        "cudaGraphSetConditional" => Some(Builtin::SetConditional),
        _ => None,
    }
}

impl<'a, 's> Lowering<'a, '_, 's> {
    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn control(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        match name {
            "bra" => {
                m.take("uni");
                let [Operand::Name(label)] = operands else {
                    return malformed("it needs a label");
                };
                let target = self.label(label)?;
                self.emit(Op::Branch { target });
            }
            "brx" => {
                m.take("uni");
                if !m.take("idx") {
                    return Err(Reject::Unsupported);
                }
                let [index, Operand::Name(list)] = operands else {
                    return malformed("it needs an index and a list");
                };
                let index = self.source(index, Type::U32)?;
                let names = self
                    .list(list)
                    .ok_or_else(|| Reject::Malformed(format!("`{list}` is no list")))?;
                let targets = names
                    .iter()
                    .map(|label| self.label(label))
                    .collect::<Result<_, _>>()?;
                self.emit(Op::BranchIndexed { index, targets });
            }
            "call" => {
                m.take("uni");
                self.call(operands)?;
            }
            "ret" => {
                m.take("uni");
                self.emit(if self.entry { Op::Exit } else { Op::Return });
            }
            "exit" => self.emit(Op::Exit),
            "trap" | "brkpt" => self.emit(Op::Trap),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn call(&mut self, operands: &[Operand<'a>]) -> Result<(), Reject> {
        let (returns, rest) = match operands {
            [Operand::List(list), rest @ ..] => (list.as_slice(), rest),
            rest => (&[][..], rest),
        };
        let (target, args, prototype) = match rest {
            [Operand::Name(target)] => (*target, &[][..], None),
            [Operand::Name(target), Operand::List(list)] => (*target, list.as_slice(), None),
            [
                Operand::Name(target),
                Operand::List(list),
                Operand::Name(prototype),
            ] => (*target, list.as_slice(), Some(*prototype)),
            [Operand::Name(target), Operand::Name(prototype)] => {
                (*target, &[][..], Some(*prototype))
            }
            _ => return malformed("its operands are not those of a call"),
        };
        let (callee, signature) = match self.lookup(target)? {
            Some(Symbol::Function(index)) => self.direct(target, index)?,
            Some(Symbol::Register(reg)) => {
                let Some(name) = prototype else {
                    return malformed("an indirect call needs a prototype");
                };
                self.needs.indirect = true;
                let signature = match self.prototype(name) {
                    Some(signature) => Some(signature),
                    None => {
                        let targets = self.list(name).unwrap_or_default();
                        let first = targets.first().copied();
                        match first.map(|first| self.lookup(first)).transpose()?.flatten() {
                            Some(Symbol::Function(index)) => {
                                self.linker.source.function(index).map(|f| f.signature)
                            }
                            _ => None,
                        }
                    }
                };
                let signature = signature
                    .ok_or_else(|| Reject::Malformed(format!("`{name}` is no prototype")))?;
                (Callee::Indirect(reg), signature)
            }
            _ => return Err(Reject::UnknownFunction(target.to_owned())),
        };
        if args.len() != signature.params.len() || returns.len() != signature.returns.len() {
            return malformed("the call does not match the function's parameters");
        }
        let args = self.params(args, &signature.params)?;
        let returns = self.params(returns, &signature.returns)?;
        self.emit(Op::Call(Box::new(Call {
            callee,
            args,
            returns,
        })));
        Ok(())
    }

    fn direct(&mut self, name: &str, index: u32) -> Result<(Callee, Signature<'s>), Reject> {
        let Some(function) = self.linker.source.function(index) else {
            return Err(Reject::UnknownFunction(name.to_owned()));
        };
        let callee = match (function.body.is_some(), builtin(name)) {
            (false, Some(builtin)) => {
                let needs = &mut self.needs;
                match builtin {
                    Builtin::Vprintf => needs.printf = true,
                    Builtin::AssertFail => needs.assert = true,
                    Builtin::Malloc | Builtin::Free => needs.heap = true,
                    Builtin::SetConditional => {}
                }
                Callee::Builtin(builtin)
            }
            (false, None) => return Err(Reject::UnknownFunction(name.to_owned())),
            (true, _) => {
                self.needs.functions.push(index);
                Callee::Function(index)
            }
        };
        Ok((callee, function.signature))
    }

    fn params(
        &mut self,
        actual: &[Operand<'a>],
        formal: &[Variable<'_>],
    ) -> Result<Box<[Param]>, Reject> {
        actual
            .iter()
            .zip(formal)
            .map(|(operand, variable)| {
                let bytes = u32::try_from(variable.bytes().unwrap_or(u64::MAX)).unwrap_or(u32::MAX);
                let slot = if *operand == Operand::Name("_") {
                    Slot::Row(self.temporary()?)
                } else {
                    self.call_slot(operand, variable.ty)?
                };
                if matches!(slot, Slot::Row(_)) && bytes > 8 {
                    return malformed("a register cannot hold the parameter");
                }
                Ok(Param { slot, bytes })
            })
            .collect()
    }
}
