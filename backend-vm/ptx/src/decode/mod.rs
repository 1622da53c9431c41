//! Lowers the syntax tree to decoded code, one kernel with every function that it calls at a time.
//!
//! An instruction that the engine lacks fails its kernel, with an error that names it; the rest of
//! the module remains usable.

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

use wormhole_lock::Mutex;

use crate::error::KernelError;
use crate::limits::{MAX_INSTRUCTIONS, MAX_PARAM_BYTES, MAX_STATIC_SHARED_BYTES};
use crate::parse::ast::{Function, Space, Variable};
pub(crate) use control::is_provided;
use fragment::FragmentKind;
use insn::{FunctionCode, Insn, Pc};

/// Error in lowering a function; the kernel's name and the line are added later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reject {
    /// The engine lacks the instruction.
    Unsupported,
    /// The instruction or declaration is malformed.
    Malformed(String),
    /// The function called is defined neither in the module nor by the device runtime.
    UnknownFunction(String),
    /// A limit of the engine is exceeded.
    TooLarge {
        what: &'static str,
        found: u64,
        limit: u64,
    },
}

/// Returns [`Reject::Malformed`].
pub(crate) fn malformed<T>(reason: impl Into<String>) -> Result<T, Reject> {
    Err(Reject::Malformed(reason.into()))
}

/// Meaning of a name of module scope.
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
    /// Index of a function in the module.
    Function(u32),
}

/// Module, as the decoder reads it.
pub(crate) trait Source {
    /// Returns the symbol of a name.
    fn symbol(&self, name: &str) -> Option<ModuleSymbol>;
    /// Returns the definition (or, without one, the declaration) of a function.
    fn function(&self, index: u32) -> Option<Function<'_>>;
    /// Returns the ranges of the `.const` variables: first address and length.
    fn constant_ranges(&self) -> Vec<(u64, u64)>;
    /// Returns the number of functions.
    fn function_count(&self) -> u32;
}

/// Location of a kernel's parameter in the parameter buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamLayout {
    /// Bytes from the start of the buffer.
    pub offset: u32,
    /// Size in bytes.
    pub size: u32,
}

/// Function of a kernel, with its place in the kernel's code.
#[derive(Debug)]
pub(crate) struct Placed {
    /// Index of its first instruction in the kernel.
    pub start: Pc,
    pub code: Arc<FunctionCode>,
}

/// Decoded kernel, ready to run.
#[derive(Debug, Default)]
pub(crate) struct KernelCode {
    /// Functions of the kernel; the kernel itself is the first.
    pub functions: Vec<Placed>,
    /// Index in `functions` of each function of the module.
    by_module_index: Vec<Option<u32>>,
    /// Number of instructions of all functions.
    instructions: usize,
    pub params: Vec<ParamLayout>,
    pub param_bytes: u32,
    /// Bytes of static shared memory.
    pub shared_bytes: u32,
    /// Offset of dynamic shared memory.
    pub dynamic_shared: u32,
    /// Ranges of the module's `.const` variables, if the kernel tests addresses for them.
    pub constant_ranges: Vec<(u64, u64)>,
    pub uses_printf: bool,
    pub uses_assert: bool,
    pub uses_heap: bool,
    /// Whether the kernel reads its block's position in the cluster, or addresses other blocks of
    /// it.
    pub uses_cluster: bool,
}

impl KernelCode {
    /// Returns the index in `functions` of the module's function `module_index`.
    pub(crate) fn local_index(&self, module_index: u32) -> Option<u32> {
        let known = self.by_module_index.get(module_index as usize);
        known.copied().flatten()
    }

    /// Returns the instruction at `pc` of the kernel.
    pub(crate) fn at(&self, pc: Pc) -> Option<&Insn> {
        let index = self
            .functions
            .partition_point(|function| function.start <= pc);
        let function = self.functions.get(index.checked_sub(1)?)?;
        function.at(pc - function.start)
    }

    /// Appends a function.
    fn push(&mut self, code: Arc<FunctionCode>) {
        let start = Pc::try_from(self.instructions).unwrap_or(Pc::MAX);
        self.instructions += code.instructions.len();
        self.functions.push(Placed { start, code });
    }

    /// Adds the needs of a function to those of the kernel.
    fn merge(&mut self, needs: &Needs, source: &dyn Source) {
        self.uses_printf |= needs.printf;
        self.uses_assert |= needs.assert;
        self.uses_heap |= needs.heap;
        self.uses_cluster |= needs.cluster;
        if needs.constant_ranges && self.constant_ranges.is_empty() {
            self.constant_ranges = source.constant_ranges();
        }
    }
}

impl Placed {
    /// Returns the instruction at `pc` of the function.
    pub(crate) fn at(&self, pc: Pc) -> Option<&Insn> {
        self.code.instructions.get(pc as usize)
    }
}

/// Features of the kernel that a function of it uses.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    pub printf: bool,
    pub assert: bool,
    pub heap: bool,
    pub cluster: bool,
    pub constant_ranges: bool,
    /// Whether it calls functions by their addresses, or takes addresses of functions.
    pub indirect: bool,
    /// Functions that it calls, by their indices in the module.
    pub functions: Vec<u32>,
    /// Shared variables that it names.
    pub shared: Vec<SharedUse>,
    pub dynamic_align: u32,
}

/// Shared variable, and its offset when a function that names it was lowered.
#[derive(Debug)]
pub(crate) struct SharedUse {
    scope: u32,
    name: String,
    bytes: u64,
    align: u32,
    offset: u32,
}

/// Lowered function, and its needs.
#[derive(Debug)]
pub(crate) struct Lowered {
    pub code: Arc<FunctionCode>,
    pub needs: Needs,
}

/// Maximum number of layouts of shared memory for which a function is cached: most modules have one
/// or two.
const VARIANTS: usize = 8;

/// Cache of a module's functions, lowered for one of its kernels and reused for others.
#[derive(Debug, Default)]
pub(crate) struct Cache(Mutex<HashMap<u32, Vec<Arc<Lowered>>>>);

impl Cache {
    /// Finds a function whose shared variables have the offsets that this kernel assigned or would
    /// assign.
    fn find(&self, module_index: u32, shared: &SharedLayout) -> Option<Arc<Lowered>> {
        let known = self.0.lock();
        let mut fitting = known.get(&module_index)?.iter();
        fitting
            .find(|lowered| shared.fits(&lowered.needs.shared))
            .cloned()
    }

    fn add(&self, module_index: u32, lowered: &Arc<Lowered>) {
        let mut known = self.0.lock();
        let variants = known.entry(module_index).or_default();
        if variants.len() < VARIANTS {
            variants.push(Arc::clone(lowered));
        }
    }
}

/// Shared memory of a kernel while it is laid out.
#[derive(Debug, Default)]
pub(crate) struct SharedLayout {
    /// Offset of each variable, by scope and name.
    offsets: HashMap<u32, HashMap<String, u32>>,
    pub bytes: u32,
    pub dynamic_align: u32,
}

/// Function index that stands for module scope in [`SharedLayout`].
const MODULE_SCOPE: u32 = u32::MAX;

/// Returns the start and the end of a variable placed after the first `taken` bytes.
fn behind(taken: u64, bytes: u64, align: u32) -> (u64, u64) {
    let start = taken.next_multiple_of(u64::from(align));
    (start, start.saturating_add(bytes))
}

impl SharedLayout {
    /// Returns whether the variables have, or would get, the offsets that they had.
    fn fits(&self, uses: &[SharedUse]) -> bool {
        let mut trial = u64::from(self.bytes);
        uses.iter().all(|wanted| {
            let offset = match self.offset(wanted.scope, &wanted.name) {
                Some(known) => u64::from(known),
                None => {
                    let (start, end) = behind(trial, wanted.bytes, wanted.align);
                    trial = end;
                    start
                }
            };
            offset == u64::from(wanted.offset) && trial <= u64::from(MAX_STATIC_SHARED_BYTES)
        })
    }

    fn offset(&self, scope: u32, name: &str) -> Option<u32> {
        self.offsets.get(&scope)?.get(name).copied()
    }

    /// Returns the offset of a variable, and places it on first use.
    pub(crate) fn place(
        &mut self,
        scope: u32,
        name: &str,
        bytes: u64,
        align: u32,
    ) -> Result<u32, Reject> {
        if let Some(offset) = self.offset(scope, name) {
            return Ok(offset);
        }
        let (start, end) = behind(u64::from(self.bytes), bytes, align);
        let limit = u64::from(MAX_STATIC_SHARED_BYTES);
        match (u32::try_from(start), u32::try_from(end)) {
            (Ok(offset), Ok(end)) if u64::from(end) <= limit => {
                self.bytes = end;
                let names = self.offsets.entry(scope).or_default();
                names.insert(name.to_owned(), offset);
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

/// State shared by the functions of one kernel while they are lowered.
pub(crate) struct Linker<'s> {
    pub source: &'s dyn Source,
    pub out: KernelCode,
    pub shared: SharedLayout,
    /// Module indices of the functions still to be lowered, in the order of their local indices.
    queue: Vec<u32>,
    indirect: bool,
    /// Positions of the elements of matrix fragments, as far as they were computed.
    pub positions: HashMap<FragmentKind, Arc<[u16]>>,
}

impl Linker<'_> {
    /// Lowers a function, or reuses one that was lowered for another kernel and fits this one.
    fn lower(&mut self, module_index: u32, cache: &Cache) -> Result<(), function::Failure> {
        let is_kernel = self.out.functions.is_empty();
        let known = match is_kernel {
            true => None,
            false => cache.find(module_index, &self.shared),
        };
        let lowered = match known {
            Some(known) => {
                for own in &known.needs.shared {
                    let placed = self
                        .shared
                        .place(own.scope, &own.name, own.bytes, own.align);
                    placed.map_err(|reject| (reject, ".func".to_owned(), 0))?;
                }
                known
            }
            None => {
                let lowered = Arc::new(function::lower(self, module_index, is_kernel)?);
                if !is_kernel {
                    cache.add(module_index, &lowered);
                }
                lowered
            }
        };
        let needs = &lowered.needs;
        self.out.merge(needs, self.source);
        self.indirect |= needs.indirect;
        self.shared.dynamic_align = self.shared.dynamic_align.max(needs.dynamic_align);
        for function in &needs.functions {
            self.local_index(*function);
        }
        self.out.push(Arc::clone(&lowered.code));
        Ok(())
    }

    /// Returns the local index of a function, and queues it on first use.
    fn local_index(&mut self, module_index: u32) -> u32 {
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

/// Returns the layout of a parameter list, and its size in bytes.
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
pub(crate) fn decode(
    source: &dyn Source,
    index: u32,
    cache: &Cache,
) -> Result<KernelCode, KernelError> {
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
        queue: Vec::new(),
        indirect: false,
        positions: HashMap::new(),
    };
    linker.local_index(index);
    let mut next = 0;
    // A function that only an indirect call can reach may fail to be lowered.
    let mut required = usize::MAX;
    loop {
        while let Some(&module_index) = linker.queue.get(next) {
            match linker.lower(module_index, cache) {
                Ok(()) => {}
                Err((_, _, _)) if next >= required => {
                    linker.out.by_module_index[module_index as usize] = None;
                    linker.out.push(Arc::default());
                }
                Err((reject, instruction, line)) => {
                    return Err(explain(&kernel, reject, &instruction, line));
                }
            }
            if linker.out.instructions > MAX_INSTRUCTIONS {
                let (found, limit) = (linker.out.instructions as u64, MAX_INSTRUCTIONS as u64);
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
        mut out, shared, ..
    } = linker;
    out.shared_bytes = shared.bytes;
    out.dynamic_shared = shared.bytes.next_multiple_of(shared.dynamic_align.max(1));
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
