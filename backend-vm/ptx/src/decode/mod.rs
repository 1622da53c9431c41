//! From syntax to decoded code, one kernel with everything it calls at a time.
//!
//! An instruction that the engine lacks is refused here, by name, and with it
//! the kernel; the rest of the module stays usable.

mod arith;
mod asynchronous;
mod atomic;
mod bits;
mod compare;
mod control;
mod convert;
mod fragment;
mod function;
pub(crate) mod insn;
mod matrix;
mod memory;
mod modifiers;
mod multimem;
mod operand;
mod special;
mod sync;
mod texture;
mod video;

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::KernelError;
use crate::limits::{MAX_INSTRUCTIONS, MAX_PARAM_BYTES, MAX_STATIC_SHARED_BYTES};
use crate::parse::ast::{Function, Space, Variable};
pub(crate) use control::is_provided;
use fragment::FragmentKind;
use insn::{FunctionCode, Insn};

/// Why a function cannot be lowered; the kernel's name and the line are added later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reject {
    /// The engine lacks it.
    Unsupported,
    /// It is wrong.
    Malformed(String),
    /// It calls what nobody defines.
    UnknownFunction(String),
    /// It exceeds a limit.
    TooLarge {
        what: &'static str,
        found: u64,
        limit: u64,
    },
}

/// Fails as malformed.
pub(crate) fn malformed<T>(reason: impl Into<String>) -> Result<T, Reject> {
    Err(Reject::Malformed(reason.into()))
}

/// What a name of module scope stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModuleSymbol {
    /// Device memory at an address.
    Address(u64),
    /// Shared memory, laid out per kernel.
    Shared {
        bytes: u32,
        align: u32,
        dynamic: bool,
    },
    /// A function, by its index in the module.
    Function(u32),
}

/// What the decoder sees of a module.
pub(crate) trait Source {
    /// The symbol of a name.
    fn symbol(&self, name: &str) -> Option<ModuleSymbol>;
    /// The definition (or, without one, the declaration) of a function.
    fn function(&self, index: u32) -> Option<Function<'_>>;
    /// Where the `.const` variables lie: first address and length.
    fn constant_ranges(&self) -> Vec<(u64, u64)>;
    /// How many functions there are.
    fn function_count(&self) -> u32;
}

/// A parameter of a kernel, as it lies in the parameter buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamLayout {
    /// Bytes from the start of the buffer.
    pub offset: u32,
    /// Its size in bytes.
    pub size: u32,
}

/// A kernel, ready to run.
#[derive(Debug, Default)]
pub(crate) struct KernelCode {
    pub code: Vec<Insn>,
    /// The kernel itself is the first.
    pub functions: Vec<FunctionCode>,
    /// From a function's index in the module to its index here.
    pub by_module_index: Vec<Option<u32>>,
    pub params: Vec<ParamLayout>,
    pub param_bytes: u32,
    /// Static shared memory.
    pub shared_bytes: u32,
    /// Where dynamic shared memory begins.
    pub dynamic_shared: u32,
    /// Where the module's `.const` variables lie, if the kernel asks.
    pub constant_ranges: Vec<(u64, u64)>,
    pub uses_printf: bool,
    pub uses_assert: bool,
    pub uses_heap: bool,
    /// Whether it asks which block of its cluster it is, or for the others.
    pub uses_cluster: bool,
}

/// The shared memory of a kernel while it is laid out.
#[derive(Debug, Default)]
pub(crate) struct SharedLayout {
    offsets: HashMap<(u32, String), u32>,
    pub bytes: u32,
    pub dynamic_align: u32,
}

/// The function index that stands for module scope in [`SharedLayout`].
const MODULE_SCOPE: u32 = u32::MAX;

impl SharedLayout {
    /// The offset of a variable, which is placed when it is first used.
    pub(crate) fn place(
        &mut self,
        scope: u32,
        name: &str,
        bytes: u64,
        align: u32,
    ) -> Result<u32, Reject> {
        if let Some(&offset) = self.offsets.get(&(scope, name.to_owned())) {
            return Ok(offset);
        }
        let start = u64::from(self.bytes).next_multiple_of(u64::from(align));
        let end = start.saturating_add(bytes);
        let limit = u64::from(MAX_STATIC_SHARED_BYTES);
        match (u32::try_from(start), u32::try_from(end)) {
            (Ok(offset), Ok(end)) if u64::from(end) <= limit => {
                self.bytes = end;
                self.offsets.insert((scope, name.to_owned()), offset);
                Ok(offset)
            }
            _ => Err(Reject::TooLarge {
                what: "static shared memory",
                found: end,
                limit,
            }),
        }
    }
}

/// A row that will hold where dynamic shared memory begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DynamicSharedFixup {
    pub function: u32,
    pub constant: usize,
}

/// What the functions of one kernel share while they are lowered.
pub(crate) struct Linker<'s> {
    pub source: &'s dyn Source,
    pub out: KernelCode,
    pub shared: SharedLayout,
    pub fixups: Vec<DynamicSharedFixup>,
    /// Module indices of the functions still to be lowered, in the order of their local indices.
    pub queue: Vec<u32>,
    pub indirect: bool,
    /// Where the elements of matrix fragments lie, as far as it was worked out.
    pub positions: HashMap<FragmentKind, Arc<[u16]>>,
}

impl Linker<'_> {
    /// The local index of a function, which is queued when it is first named.
    pub(crate) fn local_index(&mut self, module_index: u32) -> u32 {
        let slot = module_index as usize;
        if self.out.by_module_index.len() <= slot {
            self.out.by_module_index.resize(slot + 1, None);
        }
        if let Some(local) = self.out.by_module_index[slot] {
            return local;
        }
        let local = u32::try_from(self.queue.len()).unwrap_or(u32::MAX);
        self.out.by_module_index[slot] = Some(local);
        self.queue.push(module_index);
        local
    }
}

/// The layout of a parameter list.
fn layout(params: &[Variable<'_>]) -> Option<(Vec<ParamLayout>, u32)> {
    let mut at = 0_u32;
    let mut list = Vec::with_capacity(params.len());
    for param in params {
        let size = u32::try_from(param.bytes()?).ok()?;
        let offset = at.checked_next_multiple_of(param.align)?;
        at = offset.checked_add(size)?;
        list.push(ParamLayout { offset, size });
    }
    Some((list, at))
}

/// Decodes the kernel whose index in the module is `index`.
pub(crate) fn decode(source: &dyn Source, index: u32) -> Result<KernelCode, KernelError> {
    let Some(entry) = source.function(index) else {
        return Err(KernelError::NotFound(format!("#{index}")));
    };
    let kernel = entry.name.to_owned();
    let at_entry = |reject| explain(&kernel, reject, ".entry", entry.line);
    if entry
        .signature
        .params
        .iter()
        .any(|param| param.space != Space::Param)
    {
        return Err(at_entry(Reject::Malformed(
            "a kernel's parameters are in .param".to_owned(),
        )));
    }
    if entry.tuning.blocks_are_clusters {
        return Err(explain(
            &kernel,
            Reject::Unsupported,
            ".blocksareclusters",
            entry.line,
        ));
    }
    let laid_out = layout(&entry.signature.params);
    let Some((params, param_bytes)) = laid_out.filter(|(_, bytes)| *bytes <= MAX_PARAM_BYTES)
    else {
        let limit = u64::from(MAX_PARAM_BYTES);
        return Err(at_entry(Reject::TooLarge {
            what: "the size of its parameters",
            found: limit + 1,
            limit,
        }));
    };
    let mut linker = Linker {
        source,
        out: KernelCode {
            params,
            param_bytes,
            ..KernelCode::default()
        },
        shared: SharedLayout {
            dynamic_align: 16,
            ..SharedLayout::default()
        },
        fixups: Vec::new(),
        queue: Vec::new(),
        indirect: false,
        positions: HashMap::new(),
    };
    linker.local_index(index);
    let mut next = 0;
    // Functions that only an indirect call may reach are tolerated if they cannot be lowered.
    let mut required = usize::MAX;
    loop {
        while let Some(&module_index) = linker.queue.get(next) {
            let result = function::lower(&mut linker, module_index, next == 0);
            match result {
                Ok(()) => {}
                Err((_, _, _)) if next >= required => {
                    linker.out.by_module_index[module_index as usize] = None;
                    linker.out.functions.push(FunctionCode::default());
                }
                Err((reject, instruction, line)) => {
                    return Err(explain(&kernel, reject, &instruction, line));
                }
            }
            if linker.out.code.len() > MAX_INSTRUCTIONS {
                let (found, limit) = (linker.out.code.len() as u64, MAX_INSTRUCTIONS as u64);
                return Err(at_entry(Reject::TooLarge {
                    what: "the number of instructions",
                    found,
                    limit,
                }));
            }
            next += 1;
        }
        if !linker.indirect || required != usize::MAX {
            break;
        }
        required = next;
        for other in 0..source.function_count() {
            let callable = source
                .function(other)
                .is_some_and(|function| !function.entry && function.body.is_some());
            if callable {
                linker.local_index(other);
            }
        }
    }
    let Linker {
        mut out,
        shared,
        fixups,
        ..
    } = linker;
    out.shared_bytes = shared.bytes;
    out.dynamic_shared = shared.bytes.next_multiple_of(shared.dynamic_align.max(1));
    for fixup in fixups {
        let function = out.functions.get_mut(fixup.function as usize);
        if let Some(constant) =
            function.and_then(|function| function.constants.get_mut(fixup.constant))
        {
            constant.1 = constant.1.wrapping_add(u64::from(out.dynamic_shared));
        }
    }
    Ok(out)
}

fn explain(kernel: &str, reject: Reject, instruction: &str, line: u32) -> KernelError {
    let kernel = kernel.to_owned();
    let instruction = instruction.to_owned();
    match reject {
        Reject::Unsupported => KernelError::Unsupported {
            kernel,
            instruction,
            line,
        },
        Reject::Malformed(reason) => KernelError::Malformed {
            kernel,
            instruction,
            reason,
            line,
        },
        Reject::UnknownFunction(function) => KernelError::UnknownFunction {
            kernel,
            function,
            line,
        },
        Reject::TooLarge { what, found, limit } => KernelError::TooLarge {
            kernel,
            what,
            found,
            limit,
        },
    }
}
