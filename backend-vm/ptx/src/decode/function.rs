//! Lowers one function: scopes, rows, labels and the dispatch by opcode.

use std::collections::HashMap;
use std::sync::Arc;

use super::insn::{FunctionCode, Insn, Op, Param, Pc, Pred, PredSource, Reg, Slot, TRUE};
use super::modifiers::Modifiers;
use super::{Linker, Lowered, MODULE_SCOPE, ModuleSymbol, Needs, Reject, SharedUse, malformed};
use crate::limits::{MAX_LOCAL_BYTES, MAX_ROWS};
use crate::parse::ast::{Instruction, Signature, Space, Statement, Type, Variable};
use crate::parse::parse_body;

/// Meaning of a name inside a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Symbol {
    Register(Reg),
    /// 128-bit register: the row of its low half. The high half is in the next row.
    Wide(Reg),
    Predicate(Pred),
    Global(u64),
    Shared(u32),
    DynamicShared,
    /// Offset in the frame's local memory.
    Frame(u32),
    KernelParam(u32),
    Function(u32),
}

/// Registers declared as `%r<n>`.
#[derive(Debug, Clone, Copy)]
struct Range<'a> {
    prefix: &'a str,
    count: u32,
    kind: RegisterKind,
}

/// Storage of a register's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RegisterKind {
    Row,
    TwoRows,
    Predicate,
}

impl RegisterKind {
    fn of(ty: Type) -> Self {
        match ty {
            Type::Pred => Self::Predicate,
            Type::B128 => Self::TwoRows,
            _ => Self::Row,
        }
    }
}

#[derive(Debug, Default)]
struct Scope<'a> {
    names: HashMap<&'a str, Symbol>,
    ranges: Vec<Range<'a>>,
    lists: HashMap<&'a str, Vec<&'a str>>,
    prototypes: HashMap<&'a str, Signature<'a>>,
    id: u32,
    local_bytes: u32,
}

/// State of lowering one function.
pub(crate) struct Lowering<'a, 'l, 's> {
    pub linker: &'l mut Linker<'s>,
    pub needs: Needs,
    module_index: u32,
    pub entry: bool,
    scopes: Vec<Scope<'a>>,
    /// Enclosing scope of each scope, by number.
    parents: Vec<u32>,
    labels: HashMap<(u32, &'a str), usize>,
    label_pcs: Vec<Option<Pc>>,
    code: FunctionCode,
    local_bytes: u32,
    constants: HashMap<u64, Reg>,
    dynamic: HashMap<i64, Reg>,
    guard: PredSource,
    line: u32,
}

/// Failure of lowering: the reason, the instruction and its line.
pub(crate) type Failure = (Reject, String, u32);

/// Lowers the function for the kernel.
pub(crate) fn lower(
    linker: &mut Linker<'_>,
    module_index: u32,
    entry: bool,
) -> Result<Lowered, Failure> {
    let source = linker.source;
    let Some(function) = source.function(module_index) else {
        return Err((
            Reject::Malformed("it is not in the module".to_owned()),
            ".func".to_owned(),
            0,
        ));
    };
    let Some(body) = function.body else {
        return Err((
            Reject::UnknownFunction(function.name.to_owned()),
            ".func".to_owned(),
            function.line,
        ));
    };
    let statements = parse_body(body).map_err(|error| {
        (
            Reject::Malformed(error.to_string()),
            ".func".to_owned(),
            function.line,
        )
    })?;
    let mut lowering = Lowering {
        linker,
        needs: Needs::default(),
        module_index,
        entry,
        scopes: vec![Scope::default()],
        parents: vec![0],
        labels: HashMap::new(),
        label_pcs: Vec::new(),
        code: FunctionCode {
            preds: 1,
            ..FunctionCode::default()
        },
        local_bytes: 0,
        constants: HashMap::new(),
        dynamic: HashMap::new(),
        guard: TRUE,
        line: function.line,
    };
    let code = lowering.run(&statements, &function.signature)?;
    Ok(Lowered {
        code: Arc::new(code),
        needs: lowering.needs,
    })
}

impl<'a> Lowering<'a, '_, '_> {
    fn run(
        &mut self,
        statements: &[Statement<'a>],
        signature: &Signature<'a>,
    ) -> Result<FunctionCode, Failure> {
        let failed = |line| move |reject| (reject, ".func".to_owned(), line);
        self.declare_signature(signature)
            .map_err(failed(self.line))?;
        self.find_labels(statements);
        let mut next_scope = 0;
        for statement in statements {
            match statement {
                Statement::Open => {
                    next_scope += 1;
                    let local_bytes = self.local_bytes;
                    self.scopes.push(Scope {
                        id: next_scope,
                        local_bytes,
                        ..Scope::default()
                    });
                }
                Statement::Close => {
                    if let Some(scope) = self.scopes.pop() {
                        // Later scopes may reuse the local memory of this one.
                        self.local_bytes = scope.local_bytes;
                    }
                }
                Statement::Variable(variable) => self.declare(variable).map_err(|reject| {
                    (
                        reject,
                        format!("declaration of {}", variable.name),
                        variable.line,
                    )
                })?,
                Statement::Label(name) => {
                    let pc = self.pc();
                    if let Some(&label) = self.labels.get(&(self.scope_id(), *name)) {
                        self.label_pcs[label] = Some(pc);
                    }
                }
                Statement::BranchTargets(name, list) | Statement::CallTargets(name, list) => {
                    if let Some(scope) = self.scopes.last_mut() {
                        scope.lists.insert(name, list.clone());
                    }
                }
                Statement::Prototype(name, signature) => {
                    if let Some(scope) = self.scopes.last_mut() {
                        scope.prototypes.insert(name, signature.clone());
                    }
                }
                Statement::Instruction(instruction) => {
                    self.line = instruction.line;
                    self.instruction(instruction).map_err(|reject| {
                        (reject, instruction.opcode.to_owned(), instruction.line)
                    })?;
                }
            }
        }
        self.guard = TRUE;
        self.emit(Op::FallOff);
        self.patch().map_err(failed(self.line))?;
        let mut code = std::mem::take(&mut self.code);
        code.local_bytes = code.local_bytes.next_multiple_of(16);
        code.instructions.shrink_to_fit();
        Ok(code)
    }

    fn scope_id(&self) -> u32 {
        self.scopes.last().map_or(0, |scope| scope.id)
    }

    /// Numbers the scopes as `run` will, and the labels in them.
    fn find_labels(&mut self, statements: &[Statement<'a>]) {
        let mut stack = vec![0_u32];
        for statement in statements {
            let scope = stack.last().copied().unwrap_or(0);
            match statement {
                Statement::Open => {
                    let id = u32::try_from(self.parents.len()).unwrap_or(u32::MAX);
                    self.parents.push(scope);
                    stack.push(id);
                }
                Statement::Close => {
                    stack.pop();
                }
                Statement::Label(name) => {
                    self.labels.insert((scope, name), self.label_pcs.len());
                    self.label_pcs.push(None);
                }
                _ => {}
            }
        }
    }

    /// Turns label numbers in branches into addresses.
    fn patch(&mut self) -> Result<(), Reject> {
        let pcs = &self.label_pcs;
        let resolve = |target: &mut Pc| match pcs.get(*target as usize) {
            Some(Some(pc)) => {
                *target = *pc;
                Ok(())
            }
            _ => malformed("a label is never placed"),
        };
        for insn in &mut self.code.instructions {
            match &mut insn.op {
                Op::Branch { target } => resolve(target)?,
                Op::BranchIndexed { targets, .. } => targets.iter_mut().try_for_each(resolve)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn pc(&self) -> Pc {
        u32::try_from(self.code.instructions.len()).unwrap_or(u32::MAX)
    }

    /// Returns the number of a label, as seen from the current scope.
    pub(crate) fn label(&self, name: &str) -> Result<Pc, Reject> {
        let mut scope = self.scope_id();
        loop {
            if let Some(&label) = self.labels.get(&(scope, name)) {
                return Ok(u32::try_from(label).unwrap_or(u32::MAX));
            }
            if scope == 0 {
                return malformed(format!("label `{name}` is not defined"));
            }
            scope = self.parents.get(scope as usize).copied().unwrap_or(0);
        }
    }

    /// Returns the names of a `.branchtargets` or `.calltargets` list.
    pub(crate) fn list(&self, name: &str) -> Option<Vec<&'a str>> {
        self.scopes
            .iter()
            .rev()
            .find_map(|scope| scope.lists.get(name))
            .cloned()
    }

    /// Returns a `.callprototype`.
    pub(crate) fn prototype(&self, name: &str) -> Option<Signature<'a>> {
        self.scopes
            .iter()
            .rev()
            .find_map(|scope| scope.prototypes.get(name))
            .cloned()
    }

    fn declare_signature(&mut self, signature: &Signature<'a>) -> Result<(), Reject> {
        if self.entry {
            let params = self.linker.out.params.clone();
            for (param, layout) in signature.params.iter().zip(params) {
                self.bind(param.name, Symbol::KernelParam(layout.offset));
            }
            return Ok(());
        }
        for (list, returns) in [(&signature.params, false), (&signature.returns, true)] {
            for param in list {
                let bytes = u32::try_from(param.bytes().unwrap_or(u64::MAX)).unwrap_or(u32::MAX);
                let slot = if param.space == Space::Reg {
                    let reg = self.temporary()?;
                    self.bind(param.name, Symbol::Register(reg));
                    Slot::Row(reg)
                } else {
                    let at = self.frame(u64::from(bytes), param.align)?;
                    self.bind(param.name, Symbol::Frame(at));
                    Slot::Memory(at)
                };
                let list = if returns {
                    &mut self.code.returns
                } else {
                    &mut self.code.params
                };
                list.push(Param { slot, bytes });
            }
        }
        Ok(())
    }

    fn bind(&mut self, name: &'a str, symbol: Symbol) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(name, symbol);
        }
    }

    /// Reserves local memory in the frame.
    fn frame(&mut self, bytes: u64, align: u32) -> Result<u32, Reject> {
        let limit = u64::from(MAX_LOCAL_BYTES);
        let start = u64::from(self.local_bytes).next_multiple_of(u64::from(align));
        let end = start.saturating_add(bytes);
        match (u32::try_from(start), u32::try_from(end)) {
            (Ok(start), Ok(end_offset)) if end <= limit => {
                self.local_bytes = end_offset;
                self.code.local_bytes = self.code.local_bytes.max(end_offset);
                Ok(start)
            }
            _ => Err(Reject::TooLarge {
                what: "local memory",
                found: end,
                limit,
            }),
        }
    }

    fn declare(&mut self, variable: &Variable<'a>) -> Result<(), Reject> {
        let bytes = variable.bytes().unwrap_or(u64::MAX);
        match variable.space {
            Space::Reg => {
                if variable.vector > 1 {
                    return Err(Reject::Unsupported);
                }
                let kind = RegisterKind::of(variable.ty);
                if let Some(count) = variable.range {
                    if let Some(scope) = self.scopes.last_mut() {
                        scope.ranges.push(Range {
                            prefix: variable.name,
                            count,
                            kind,
                        });
                    }
                } else {
                    let symbol = self.register(kind)?;
                    self.bind(variable.name, symbol);
                }
            }
            Space::Local | Space::Param => {
                let at = self.frame(bytes, variable.align)?;
                self.bind(variable.name, Symbol::Frame(at));
            }
            Space::Shared => {
                // A name may be declared again in another scope.
                let unique = format!("{}#{}", variable.name, self.needs.shared.len());
                let at = self.shared(self.module_index, &unique, bytes, variable.align)?;
                self.bind(variable.name, Symbol::Shared(at));
            }
            Space::Global | Space::Const => return Err(Reject::Unsupported),
        }
        Ok(())
    }

    /// Reserves a shared variable's memory, if it has none yet, and returns its offset.
    fn shared(&mut self, scope: u32, name: &str, bytes: u64, align: u32) -> Result<u32, Reject> {
        let offset = self.linker.shared.place(scope, name, bytes, align)?;
        self.needs.shared.push(SharedUse {
            scope,
            name: name.to_owned(),
            bytes,
            align,
            offset,
        });
        Ok(offset)
    }

    fn register(&mut self, kind: RegisterKind) -> Result<Symbol, Reject> {
        match kind {
            RegisterKind::Predicate => self.scratch_pred().map(Symbol::Predicate),
            RegisterKind::Row => self.temporary().map(Symbol::Register),
            RegisterKind::TwoRows => {
                let low = self.temporary()?;
                self.temporary()?;
                Ok(Symbol::Wide(low))
            }
        }
    }

    /// Allocates a row.
    pub(crate) fn temporary(&mut self) -> Result<Reg, Reject> {
        let reg = self.code.rows;
        if reg as usize >= MAX_ROWS {
            let limit = MAX_ROWS as u64;
            return Err(Reject::TooLarge {
                what: "the number of registers",
                found: limit + 1,
                limit,
            });
        }
        self.code.rows += 1;
        Ok(reg)
    }

    /// Allocates a predicate.
    pub(crate) fn scratch_pred(&mut self) -> Result<Pred, Reject> {
        let pred = self.code.preds;
        if pred as usize >= MAX_ROWS {
            let limit = MAX_ROWS as u64;
            return Err(Reject::TooLarge {
                what: "the number of predicates",
                found: limit + 1,
                limit,
            });
        }
        self.code.preds += 1;
        Ok(pred)
    }

    /// Returns the row of a constant, and allocates it on first use.
    pub(crate) fn constant(&mut self, bits: u64) -> Result<Reg, Reject> {
        if let Some(&reg) = self.constants.get(&bits) {
            return Ok(reg);
        }
        let reg = self.temporary()?;
        self.constants.insert(bits, reg);
        self.code.constants.push((reg, bits));
        Ok(reg)
    }

    /// Returns the row of an address in dynamic shared memory. Its value is known when the kernel
    /// is complete.
    pub(crate) fn dynamic_shared(&mut self, offset: i64) -> Result<Reg, Reject> {
        if let Some(&reg) = self.dynamic.get(&offset) {
            return Ok(reg);
        }
        let reg = self.temporary()?;
        self.dynamic.insert(offset, reg);
        self.code.dynamic.push((reg, offset.cast_unsigned()));
        Ok(reg)
    }

    /// Appends an instruction under the current guard.
    pub(crate) fn emit(&mut self, op: Op) {
        let (guard, line) = (self.guard, self.line);
        self.code.instructions.push(Insn { op, guard, line });
    }

    /// Appends an instruction that all active lanes execute.
    pub(crate) fn emit_unguarded(&mut self, op: Op) {
        let line = self.line;
        self.code.instructions.push(Insn {
            op,
            guard: TRUE,
            line,
        });
    }

    /// Returns the meaning of a name in the current scope.
    pub(crate) fn lookup(&mut self, name: &'a str) -> Result<Option<Symbol>, Reject> {
        let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (prefix, number) = name.split_at(name.len() - digits);
        let number = number.parse::<u32>().ok().filter(|_| digits > 0);
        for depth in (0..self.scopes.len()).rev() {
            let scope = &self.scopes[depth];
            if let Some(&symbol) = scope.names.get(name) {
                return Ok(Some(symbol));
            }
            // `%r12` may belong to `%r<20>` as well as to `%r1<5>`.
            let range = scope.ranges.iter().find(|range| {
                if range.prefix == prefix {
                    return number.is_some_and(|number| number < range.count);
                }
                let rest = name
                    .strip_prefix(range.prefix)
                    .filter(|rest| !rest.is_empty());
                rest.and_then(|rest| rest.parse::<u32>().ok())
                    .is_some_and(|number| number < range.count)
            });
            if let Some(range) = range {
                let kind = range.kind;
                let symbol = self.register(kind)?;
                self.scopes[depth].names.insert(name, symbol);
                return Ok(Some(symbol));
            }
        }
        let symbol = match self.linker.source.symbol(name) {
            None => return Ok(None),
            Some(ModuleSymbol::Address(address)) => Symbol::Global(address),
            Some(ModuleSymbol::Function(index)) => Symbol::Function(index),
            Some(ModuleSymbol::Shared {
                align,
                dynamic: true,
                ..
            }) => {
                self.needs.dynamic_align = self.needs.dynamic_align.max(align);
                Symbol::DynamicShared
            }
            Some(ModuleSymbol::Shared { bytes, align, .. }) => {
                Symbol::Shared(self.shared(MODULE_SCOPE, name, u64::from(bytes), align)?)
            }
        };
        self.scopes[0].names.insert(name, symbol);
        Ok(Some(symbol))
    }

    fn instruction(&mut self, instruction: &Instruction<'a>) -> Result<(), Reject> {
        self.guard = match instruction.guard {
            None => TRUE,
            Some((name, negated)) => match self.lookup(name)? {
                Some(Symbol::Predicate(pred)) => PredSource { pred, negated },
                _ => return malformed(format!("guard `{name}` is not a predicate")),
            },
        };
        let (name, mut modifiers) = Modifiers::split(instruction.opcode);
        let operands = &instruction.operands;
        let done = self.arithmetic(name, &mut modifiers, operands)?
            || self.memory(name, &mut modifiers, operands)?
            || self.atomic(name, &mut modifiers, operands)?
            || self.asynchronous(name, &mut modifiers, operands)?
            || self.multimem(name, &mut modifiers, operands)?
            || self.matrix(name, &mut modifiers, operands)?
            || self.texture(name, &mut modifiers, operands)?
            || self.video(name, &mut modifiers, operands)?
            || self.control(name, &mut modifiers, operands)?
            || self.synchronization(name, &mut modifiers, operands)?;
        if done {
            modifiers.finish()
        } else {
            Err(Reject::Unsupported)
        }
    }
}
