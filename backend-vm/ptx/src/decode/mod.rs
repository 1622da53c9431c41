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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::KernelError;
use crate::limits::{MAX_INSTRUCTIONS, MAX_PARAM_BYTES, MAX_STATIC_SHARED_BYTES};
use crate::parse::ast::{Function, Space, Variable};
pub(crate) use control::is_provided;
use fragment::FragmentKind;
use insn::{FunctionCode, Insn, Pc};

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

/// A function of a kernel.
#[derive(Debug)]
pub(crate) struct Placed {
    /// Where its instructions begin among those of the kernel.
    pub start: Pc,
    pub code: Arc<FunctionCode>,
}

/// A kernel, ready to run.
#[derive(Debug, Default)]
pub(crate) struct KernelCode {
    /// The kernel itself is the first.
    pub functions: Vec<Placed>,
    /// From a function's index in the module to its index here.
    by_module_index: Vec<Option<u32>>,
    /// How many instructions all of them have.
    instructions: usize,
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

impl KernelCode {
    /// The index here of a function, by its index in the module.
    pub(crate) fn local_index(&self, module_index: u32) -> Option<u32> {
        let known = self.by_module_index.get(module_index as usize);
        known.copied().flatten()
    }

    /// The instruction at a place of the kernel.
    pub(crate) fn at(&self, pc: Pc) -> Option<&Insn> {
        let index = self
            .functions
            .partition_point(|function| function.start <= pc);
        let function = self.functions.get(index.checked_sub(1)?)?;
        function.at(pc - function.start)
    }

    /// Adds the next function.
    fn push(&mut self, code: Arc<FunctionCode>) {
        let start = Pc::try_from(self.instructions).unwrap_or(Pc::MAX);
        self.instructions += code.instructions.len();
        self.functions.push(Placed { start, code });
    }

    /// Takes over what a function needs of its kernel.
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
    /// The instruction at a place of the function.
    pub(crate) fn at(&self, pc: Pc) -> Option<&Insn> {
        self.code.instructions.get(pc as usize)
    }
}

/// What a function needs of the kernel that it is in.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    pub printf: bool,
    pub assert: bool,
    pub heap: bool,
    pub cluster: bool,
    pub constant_ranges: bool,
    /// It calls functions by their addresses, or takes these.
    pub indirect: bool,
    /// The functions that it calls, by their indices in the module.
    pub functions: Vec<u32>,
    /// The shared variables that it names.
    pub shared: Vec<SharedUse>,
    pub dynamic_align: u32,
}

/// A shared variable and where it was when a function that names it was lowered.
#[derive(Debug)]
pub(crate) struct SharedUse {
    scope: u32,
    name: String,
    bytes: u64,
    align: u32,
    offset: u32,
}

/// A function that was lowered, and for whom.
#[derive(Debug)]
pub(crate) struct Lowered {
    pub code: Arc<FunctionCode>,
    pub needs: Needs,
}

/// For how many layouts of shared memory a function is kept: most modules have one or two.
const VARIANTS: usize = 8;

/// Functions of a module that were lowered for one of its kernels and serve others.
#[derive(Debug, Default)]
pub(crate) struct Cache(Mutex<HashMap<u32, Vec<Arc<Lowered>>>>);

impl Cache {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Vec<Arc<Lowered>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A function whose shared variables lie where this kernel has or will have them.
    fn find(&self, module_index: u32, shared: &SharedLayout) -> Option<Arc<Lowered>> {
        let known = self.lock();
        let mut fitting = known.get(&module_index)?.iter();
        fitting
            .find(|lowered| shared.fits(&lowered.needs.shared))
            .cloned()
    }

    fn add(&self, module_index: u32, lowered: &Arc<Lowered>) {
        let mut known = self.lock();
        let variants = known.entry(module_index).or_default();
        if variants.len() < VARIANTS {
            variants.push(Arc::clone(lowered));
        }
    }
}

/// The shared memory of a kernel while it is laid out.
#[derive(Debug, Default)]
pub(crate) struct SharedLayout {
    /// By the variable's scope and name.
    offsets: HashMap<u32, HashMap<String, u32>>,
    pub bytes: u32,
    pub dynamic_align: u32,
}

/// The function index that stands for module scope in [`SharedLayout`].
const MODULE_SCOPE: u32 = u32::MAX;

/// Where a variable begins and ends that is placed behind so many bytes.
fn behind(taken: u64, bytes: u64, align: u32) -> (u64, u64) {
    let start = taken.next_multiple_of(u64::from(align));
    (start, start.saturating_add(bytes))
}

impl SharedLayout {
    /// Whether variables are, or would be, placed as they were.
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

    /// The offset of a variable, which is placed when it is first used.
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

/// What the functions of one kernel share while they are lowered.
pub(crate) struct Linker<'s> {
    pub source: &'s dyn Source,
    pub out: KernelCode,
    pub shared: SharedLayout,
    /// Module indices of the functions still to be lowered, in the order of their local indices.
    queue: Vec<u32>,
    indirect: bool,
    /// Where the elements of matrix fragments lie, as far as it was worked out.
    pub positions: HashMap<FragmentKind, Arc<[u16]>>,
}

impl Linker<'_> {
    /// A function, as it was lowered for another kernel if it fits this one.
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

    /// The local index of a function, which is queued when it is first named.
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
    // Functions that only an indirect call may reach are tolerated if they cannot be lowered.
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
