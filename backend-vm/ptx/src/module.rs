//! Modules, their variables and their kernels.

use std::collections::HashMap;
use std::sync::Arc;

use wormhole_lock::Mutex;

use crate::decode::{self, KernelCode, ModuleSymbol, ParamLayout, Source};
use crate::error::{KernelError, LoadError};
use crate::image::{Found, find_ptx};
use crate::limits::MAX_BLOCK_THREADS;
use crate::parse::ast::{Ast, Function, InitValue, Linkage, Reference, Space, Tuning, Type};
use crate::parse::{ParseError, parse_body, parse_function, parse_module};

/// Scalar of a variable's initialiser, before addresses are assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Initial {
    Bits(u64),
    /// Address of a variable of the module, plus bytes.
    Variable(usize, i64),
    /// Address of a function.
    Function(u32),
}

/// Variable of a module that is allocated in device memory.
#[derive(Debug, Clone)]
pub struct ModuleVariable {
    name: String,
    size: u64,
    align: u64,
    constant: bool,
    managed: bool,
    reference: Option<Reference>,
    element: u32,
    init: Vec<(u64, Initial)>,
}

impl ModuleVariable {
    /// Returns the name, mangled as in the PTX.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Returns the size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }
    /// Returns the alignment in bytes, a power of two.
    #[must_use]
    pub fn align(&self) -> u64 {
        self.align
    }
    /// Returns whether it is a `.const` variable.
    #[must_use]
    pub fn is_constant(&self) -> bool {
        self.constant
    }
    /// Returns whether it is a `__managed__` variable.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        self.managed
    }
    /// Returns the kind of reference, if it is one: its value is the handle of the object that is bound to
    /// it.
    #[must_use]
    pub fn reference(&self) -> Option<Reference> {
        self.reference
    }
}

/// Function of a module: the range of its text.
#[derive(Debug, Clone)]
struct FunctionItem {
    name: String,
    entry: bool,
    start: usize,
    end: usize,
    line: u32,
}

/// Loaded module: parsed and checked, its variables without addresses.
#[derive(Debug)]
pub struct Module {
    text: Arc<str>,
    version: (u32, u32),
    target: String,
    functions: Vec<FunctionItem>,
    function_names: HashMap<String, u32>,
    variables: Vec<ModuleVariable>,
    variable_names: HashMap<String, usize>,
    shared: HashMap<String, ModuleSymbol>,
    prints: bool,
}

/// PTX of a loaded image that has no kernels.
const EMPTY: &str = ".version 8.0\n.target sm_90\n.address_size 64\n";

impl Module {
    /// Loads an image as `cuModuleLoadData` and `cuLibraryLoadData` do: PTX text (with or without a NUL at
    /// its end), a fatbin, or an ELF file.
    ///
    /// # Errors
    ///
    /// [`LoadError`].
    pub fn load(image: &[u8]) -> Result<Self, LoadError> {
        match find_ptx(image)? {
            Found::Ptx(text) => Self::from_ptx(&text),
            Found::Empty => Self::from_ptx(EMPTY),
        }
    }

    /// Loads PTX text.
    ///
    /// # Errors
    ///
    /// [`LoadError`] if it is not valid.
    pub fn from_ptx(text: &str) -> Result<Self, LoadError> {
        let text: Arc<str> = Arc::from(text);
        let ast = parse_module(&text)?;
        let mut module = Self {
            text: Arc::clone(&text),
            version: ast.version,
            target: ast.target.to_owned(),
            functions: Vec::new(),
            function_names: HashMap::new(),
            variables: Vec::new(),
            variable_names: HashMap::new(),
            shared: HashMap::new(),
            prints: false,
        };
        module.take_functions(&ast)?;
        module.take_variables(&ast)?;
        Ok(module)
    }

    fn take_functions(&mut self, ast: &Ast<'_>) -> Result<(), LoadError> {
        let mut defined = vec![];
        for function in &ast.functions {
            if let Some(body) = function.body {
                parse_body(body)?;
            }
            self.prints |= matches!(function.name, "vprintf" | "__assertfail");
            let item = FunctionItem {
                name: function.name.to_owned(),
                entry: function.entry,
                start: function.start,
                end: function.end,
                line: function.line,
            };
            match self
                .function_names
                .get(function.name)
                .map(|&index| index as usize)
            {
                None => {
                    let index = u32::try_from(self.functions.len()).unwrap_or(u32::MAX);
                    self.function_names.insert(item.name.clone(), index);
                    self.functions.push(item);
                    defined.push(function.body.is_some());
                }
                // A definition replaces the declarations before it.
                Some(index) if function.body.is_some() => {
                    if defined[index] {
                        return Err(LoadError::Duplicate {
                            name: item.name,
                            line: item.line,
                        });
                    }
                    self.functions[index] = item;
                    defined[index] = true;
                }
                Some(_) => {}
            }
        }
        for &(second, first) in &ast.aliases {
            if let Some(&index) = self.function_names.get(first) {
                self.function_names.insert(second.to_owned(), index);
            }
        }
        Ok(())
    }

    fn take_variables(&mut self, ast: &Ast<'_>) -> Result<(), LoadError> {
        let mut pending = Vec::new();
        for variable in &ast.variables {
            let size = variable.bytes().unwrap_or(0);
            let name = variable.name.to_owned();
            match variable.space {
                Space::Shared => {
                    let dynamic = variable.count == 0 || variable.linkage == Linkage::Extern;
                    let bytes = u32::try_from(size).unwrap_or(u32::MAX);
                    self.shared.insert(
                        name,
                        ModuleSymbol::Shared {
                            bytes,
                            align: variable.align,
                            dynamic,
                        },
                    );
                }
                Space::Global | Space::Const if variable.linkage != Linkage::Extern => {
                    if self.variable_names.contains_key(&name) {
                        return Err(LoadError::Duplicate {
                            name,
                            line: variable.line,
                        });
                    }
                    self.variable_names
                        .insert(name.clone(), self.variables.len());
                    pending.push(variable);
                    self.variables.push(ModuleVariable {
                        name,
                        size,
                        align: u64::from(variable.align),
                        constant: variable.space == Space::Const,
                        managed: variable.managed,
                        reference: variable.reference,
                        element: variable.ty.bytes(),
                        init: Vec::new(),
                    });
                }
                _ => {}
            }
        }
        for (index, variable) in pending.iter().enumerate() {
            let element = u64::from(variable.ty.bytes());
            let mut init = Vec::with_capacity(variable.init.len());
            for item in &variable.init {
                let value = self.initial(item.value, variable.ty).ok_or_else(|| {
                    LoadError::UnknownSymbol {
                        variable: variable.name.to_owned(),
                        symbol: match item.value {
                            InitValue::Symbol { name, .. } => name.to_owned(),
                            _ => String::new(),
                        },
                        line: variable.line,
                    }
                })?;
                init.push((item.index * element, value));
            }
            self.variables[index].init = init;
        }
        Ok(())
    }

    fn initial(&self, value: InitValue<'_>, ty: Type) -> Option<Initial> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "an initialiser is rounded to its variable's type"
        )]
        Some(match value {
            InitValue::Int(value) => Initial::Bits(value),
            InitValue::F32(bits) if ty == Type::F64 => {
                Initial::Bits(f64::from(f32::from_bits(bits)).to_bits())
            }
            InitValue::F32(bits) => Initial::Bits(u64::from(bits)),
            InitValue::F64(bits) if ty == Type::F32 => {
                Initial::Bits(u64::from((f64::from_bits(bits) as f32).to_bits()))
            }
            InitValue::F64(bits) => Initial::Bits(bits),
            InitValue::Symbol { name, offset, .. } => match self.variable_names.get(name) {
                Some(&index) => Initial::Variable(index, offset),
                None => Initial::Function(*self.function_names.get(name)?),
            },
        })
    }

    /// Returns the variables that need device memory before [`Module::link`].
    #[must_use]
    pub fn variables(&self) -> &[ModuleVariable] {
        &self.variables
    }

    /// Returns `.version` of the PTX: major and minor.
    #[must_use]
    pub fn ptx_version(&self) -> (u32, u32) {
        self.version
    }

    /// Returns `.target` of the PTX.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Returns whether any kernel may print or assert, so that a synchronization must fetch output.
    #[must_use]
    pub fn may_print(&self) -> bool {
        self.prints
    }

    /// Returns the names of the kernels, in the order of the PTX.
    pub fn kernel_names(&self) -> impl Iterator<Item = &str> {
        self.functions
            .iter()
            .filter(|function| function.entry)
            .map(|function| function.name.as_str())
    }

    /// Assigns addresses to the variables: `addresses[i]` is the device address of `variables()[i]`.
    ///
    /// # Panics
    ///
    /// Panics if the number of addresses is not that of the variables.
    #[must_use]
    pub fn link(self, addresses: Vec<u64>) -> Program {
        assert_eq!(
            addresses.len(),
            self.variables.len(),
            "one address for each variable"
        );
        Program {
            module: self,
            addresses,
            kernels: Mutex::new(HashMap::new()),
            lowered: decode::Cache::default(),
        }
    }
}

/// Module whose variables have addresses. Its kernels can be decoded.
#[derive(Debug)]
pub struct Program {
    module: Module,
    addresses: Vec<u64>,
    kernels: Mutex<HashMap<String, Result<Arc<Kernel>, KernelError>>>,
    lowered: decode::Cache,
}

/// Maximum bytes of initial values written at once.
const CHUNK: usize = 64 << 10;

impl Program {
    /// Returns the module.
    #[must_use]
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// Returns the address and the size of the variable `name`.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<(u64, u64)> {
        let &index = self.module.variable_names.get(name)?;
        Some((self.addresses[index], self.module.variables[index].size))
    }

    /// Returns the address of the reference `name`, if it is one of this kind and has room for a handle.
    #[must_use]
    pub fn reference(&self, name: &str, kind: Reference) -> Option<u64> {
        let &index = self.module.variable_names.get(name)?;
        let variable = &self.module.variables[index];
        let is_wanted = variable.reference == Some(kind) && variable.size >= 8;
        is_wanted.then_some(self.addresses[index])
    }

    /// Calls `write(offset, bytes)` for every range of the variable `index` that its initialiser sets. All
    /// other bytes are zero: the caller must have zeroed the memory.
    pub fn write_initial(&self, index: usize, mut write: impl FnMut(u64, &[u8])) {
        let Some(variable) = self.module.variables.get(index) else {
            return;
        };
        let element = variable.element.min(8) as usize;
        let mut start = 0;
        let mut pending: Vec<u8> = Vec::new();
        for &(offset, value) in &variable.init {
            let bits = match value {
                Initial::Bits(bits) => bits,
                Initial::Variable(other, offset) => {
                    self.addresses[other].wrapping_add_signed(offset)
                }
                Initial::Function(function) => crate::exec::function_address(function),
            };
            if start + pending.len() as u64 != offset || pending.len() >= CHUNK {
                if !pending.is_empty() {
                    write(start, &pending);
                }
                pending.clear();
                start = offset;
            }
            pending.extend_from_slice(&bits.to_le_bytes()[..element]);
            pending.resize(pending.len() + variable.element as usize - element, 0);
        }
        if !pending.is_empty() {
            write(start, &pending);
        }
    }

    /// Returns the kernel `name`, decoded on first request.
    ///
    /// # Errors
    ///
    /// [`KernelError`] if there is none, or if it needs a feature that this device lacks.
    pub fn kernel(&self, name: &str) -> Result<Arc<Kernel>, KernelError> {
        let mut kernels = self.kernels.lock();
        if let Some(known) = kernels.get(name) {
            return known.clone();
        }
        let index = self.module.function_names.get(name).copied();
        let index = index.filter(|&index| self.module.functions[index as usize].entry);
        let Some(index) = index else {
            return Err(KernelError::NotFound(name.to_owned()));
        };
        let made = self.decode(name, index).map(Arc::new);
        kernels.insert(name.to_owned(), made.clone());
        made
    }

    fn decode(&self, name: &str, index: u32) -> Result<Kernel, KernelError> {
        let code = decode::decode(self, index, &self.lowered)?;
        let tuning = self
            .function(index)
            .map(|function| function.tuning)
            .unwrap_or_default();
        let constants = self
            .module
            .variables
            .iter()
            .filter(|variable| variable.constant);
        Ok(Kernel {
            name: name.to_owned(),
            tuning,
            constant_bytes: constants.map(|variable| variable.size).sum(),
            version: self.module.version,
            code,
        })
    }
}

impl Source for Program {
    fn symbol(&self, name: &str) -> Option<ModuleSymbol> {
        if let Some(&index) = self.module.variable_names.get(name) {
            return Some(ModuleSymbol::Address(self.addresses[index]));
        }
        if let Some(&index) = self.module.function_names.get(name) {
            return Some(ModuleSymbol::Function(index));
        }
        self.module.shared.get(name).copied()
    }

    fn function(&self, index: u32) -> Option<Function<'_>> {
        let item = self.module.functions.get(index as usize)?;
        let text = self.module.text.get(item.start..item.end)?;
        let parsed: Result<Function<'_>, ParseError> = parse_function(text, item.line, item.entry);
        parsed.ok()
    }

    fn constant_ranges(&self) -> Vec<(u64, u64)> {
        let placed = self.module.variables.iter().zip(&self.addresses);
        placed
            .filter(|(variable, _)| variable.constant)
            .map(|(variable, &address)| (address, variable.size))
            .collect()
    }

    fn function_count(&self) -> u32 {
        u32::try_from(self.module.functions.len()).unwrap_or(u32::MAX)
    }
}

/// Decoded kernel, ready to be launched.
#[derive(Debug)]
pub struct Kernel {
    name: String,
    tuning: Tuning,
    constant_bytes: u64,
    version: (u32, u32),
    code: KernelCode,
}

impl Kernel {
    /// Returns the name, mangled as in the PTX.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Returns the parameters: the offset of each in the parameter buffer, and its size.
    #[must_use]
    pub fn params(&self) -> &[ParamLayout] {
        &self.code.params
    }
    /// Returns the size of the parameter buffer in bytes.
    #[must_use]
    pub fn param_bytes(&self) -> u32 {
        self.code.param_bytes
    }
    /// Returns the bytes of static shared memory of a block.
    #[must_use]
    pub fn shared_bytes(&self) -> u32 {
        self.code.shared_bytes
    }
    /// Returns the bytes of local memory of a thread, without that of the functions it calls.
    #[must_use]
    pub fn local_bytes(&self) -> u32 {
        self.code.functions[0].code.local_bytes
    }
    /// Returns the bytes of `.const` memory of its module.
    #[must_use]
    pub fn constant_bytes(&self) -> u64 {
        self.constant_bytes
    }
    /// Returns the maximum number of threads of a block, by `.maxntid` and `.reqntid`.
    #[must_use]
    pub fn max_threads_per_block(&self) -> u32 {
        let extents = self.tuning.required_threads.or(self.tuning.max_threads);
        let product = |extents: [u32; 3]| {
            extents
                .iter()
                .fold(1_u32, |product, &extent| product.saturating_mul(extent))
        };
        extents.map_or(MAX_BLOCK_THREADS, |extents| {
            product(extents).clamp(1, MAX_BLOCK_THREADS)
        })
    }
    /// Returns the block that `.reqntid` demands.
    #[must_use]
    pub fn required_block(&self) -> Option<[u32; 3]> {
        self.tuning.required_threads
    }
    /// Returns the cluster that `.reqnctapercluster` demands.
    #[must_use]
    pub fn required_cluster(&self) -> Option<[u32; 3]> {
        self.tuning.required_cluster
    }
    /// Returns `.version` of its PTX: major and minor.
    #[must_use]
    pub fn ptx_version(&self) -> (u32, u32) {
        self.version
    }
    /// Returns whether it or a function it calls may print.
    #[must_use]
    pub fn uses_printf(&self) -> bool {
        self.code.uses_printf
    }
    /// Returns whether it or a function it calls may assert.
    #[must_use]
    pub fn uses_assert(&self) -> bool {
        self.code.uses_assert
    }
    /// Returns whether it or a function it calls may use the device's heap.
    #[must_use]
    pub fn uses_heap(&self) -> bool {
        self.code.uses_heap
    }
    /// Returns whether it or a function it calls reads its cluster, which contains its own block only.
    #[must_use]
    pub fn uses_cluster(&self) -> bool {
        self.code.uses_cluster
    }

    pub(crate) fn code(&self) -> &KernelCode {
        &self.code
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_share_a_function_whose_shared_variables_lie_alike() {
        let text = include_str!("../tests/kernels/shared_functions.ptx");
        let program = Module::from_ptx(text).unwrap().link(Vec::new());
        let called = |name| {
            let kernel = program.kernel(name).unwrap();
            Arc::clone(&kernel.code.functions[1].code)
        };
        let (first, second, wide) = (called("first"), called("second"), called("wide"));
        assert!(Arc::ptr_eq(&first, &second));
        assert!(!Arc::ptr_eq(&first, &wide), "its variable is elsewhere");
        let shared = |name| program.kernel(name).unwrap().shared_bytes();
        assert_eq!(["first", "second", "wide"].map(shared), [4, 4, 68]);
    }

    /// A kernel has the variables that it declares, each separately and with its declared size.
    #[test]
    fn shared_variables_of_one_name_are_distinguished() {
        let head = ".version 8.7\n.target sm_90\n.address_size 64\n";
        let module = |bytes: u32| {
            let function = format!(
                ".func f() {{ {{ .shared .b8 x[4]; }} {{ .shared .b8 x[{bytes}]; }} \
                 {{ .shared .align 16 .b8 y[4]; }} ret; }}\n"
            );
            let kernels =
                ["a", "b"].map(|name| format!(".visible .entry {name}() {{ call f; ret; }}\n"));
            let text = head.to_owned() + &function + &kernels.concat();
            Module::from_ptx(&text).unwrap().link(Vec::new())
        };
        let program = module(20);
        let shared = |name| program.kernel(name).unwrap().shared_bytes();
        assert_eq!(["a", "b"].map(shared), [36, 36]);
        let program = module(u32::MAX);
        for name in ["a", "b"] {
            let error = program.kernel(name).unwrap_err();
            assert!(matches!(error, KernelError::TooLarge { .. }), "{error}");
        }
    }
}
