//! Modules with their variables and kernels.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use wormhole_device::{
    CuError, ImageOutput, Layout, LoadedFunction, LoadedModule, Loading, ManagedPlace, RawFunction,
    RawModule, Result,
};
use wormhole_lock::Mutex;
use wormhole_ptx::{DeviceHeap, Program, Reference};

use crate::errors;
use crate::kernel::Kernel;
use crate::limits::Limits;
use crate::memory::{ALIGNMENT, Memory, Owner, Use, pointer};

#[derive(Debug)]
struct Module {
    program: Arc<Program>,
    /// Memory of the variables, freed with the module.
    _variables: Variables,
    functions: HashMap<String, RawFunction>,
}

/// Memory of a module's variables, freed on drop.
#[derive(Debug)]
struct Variables {
    owner: Owner,
    memory: Arc<Memory>,
    addresses: Vec<u64>,
}

impl Drop for Variables {
    fn drop(&mut self) {
        for address in &self.addresses {
            // Fails after a reset, which has freed them.
            let _ = self.memory.free(*address, self.owner);
        }
    }
}

#[derive(Debug, Default)]
struct Slab {
    modules: HashMap<u64, Module>,
    kernels: HashMap<u64, Arc<Kernel>>,
    next: u64,
}

impl Slab {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn module(&self, module: RawModule) -> Result<&Module> {
        self.modules.get(&module.0).ok_or(CuError::INVALID_HANDLE)
    }
}

/// Modules of one context. Their numbers are never reused.
#[derive(Debug, Default)]
pub struct Modules {
    slab: Mutex<Slab>,
    heap: OnceLock<Option<Arc<DeviceHeap>>>,
}

impl Modules {
    /// Adds a module: allocates and initialises its variables, managed ones in `place`.
    pub fn load(
        &self,
        loaded: wormhole_ptx::Module,
        memory: &Arc<Memory>,
        place: Option<ManagedPlace>,
    ) -> Result<Loading> {
        let mut layout = Layout::default();
        let mut offsets = Vec::new();
        for variable in loaded.variables() {
            let offset = if variable.is_managed() {
                layout.add(variable.size(), variable.align())
            } else {
                (variable.align() <= ALIGNMENT).then_some(0)
            };
            offsets.push(offset.ok_or_else(|| {
                let name = variable.name();
                tracing::warn!(
                    variable = name,
                    "an image is refused: a variable's alignment"
                );
                CuError::NOT_SUPPORTED
            })?);
        }
        let managed = place.and_then(|place| layout.start_in(place)).unwrap_or(0);
        if managed == 0 && layout.bytes() > 0 {
            return Ok(Loading::NeedsPlace(layout.bytes()));
        }
        let output = if loaded.may_print() {
            ImageOutput::Kernels
        } else {
            ImageOutput::None
        };
        let owner = Owner::internal();
        let mut variables = Variables {
            owner,
            memory: Arc::clone(memory),
            addresses: Vec::new(),
        };
        let mut addresses = Vec::new();
        for (variable, offset) in loaded.variables().iter().zip(offsets) {
            addresses.push(if variable.is_managed() {
                managed + offset
            } else {
                let address = memory.allocate(variable.size().max(1), owner)?;
                variables.addresses.push(address);
                address
            });
        }
        let program = loaded.link(addresses.clone());
        let mut initial = Vec::new();
        let shared = program.module().variables().iter();
        for (index, (variable, address)) in shared.zip(addresses).enumerate() {
            if variable.is_managed() {
                // Managed variables are initialised completely, because `place` may hold older
                // data.
                let bytes = usize::try_from(variable.size()).map_err(|_| CuError::OUT_OF_MEMORY)?;
                let mut values = vec![0; bytes];
                program.write_initial(index, |offset, bytes| put(&mut values, offset, bytes));
                initial.push((address, values));
            } else {
                program.write_initial(index, |offset, bytes| {
                    write(memory, address + offset, bytes)
                });
            }
        }
        let mut slab = self.slab.lock();
        let number = slab.number();
        let module = Module {
            program: Arc::new(program),
            _variables: variables,
            functions: HashMap::new(),
        };
        slab.modules.insert(number, module);
        Ok(Loading::Done(LoadedModule {
            module: RawModule(number),
            output,
            initial,
        }))
    }

    /// Checks that the module exists.
    pub fn check(&self, module: RawModule) -> Result<()> {
        self.slab.lock().module(module).map(drop)
    }

    /// Unloads a module with its functions and variables. None of its kernels runs any more.
    pub fn unload(&self, module: RawModule) -> Result<()> {
        let mut slab = self.slab.lock();
        let gone = slab
            .modules
            .remove(&module.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        for function in gone.functions.values() {
            slab.kernels.remove(&function.0);
        }
        Ok(())
    }

    /// Returns a kernel of a module, decoded at the first call. Later calls return the same handle.
    pub fn function(&self, module: RawModule, name: &str) -> Result<LoadedFunction> {
        let program = Arc::clone(&self.slab.lock().module(module)?.program);
        let code = program.kernel(name).map_err(|error| {
            tracing::warn!(%error, "a kernel is refused");
            errors::of_kernel(&error)
        })?;
        let mut slab = self.slab.lock();
        let known = slab.module(module)?.functions.get(name).copied();
        let function = known.unwrap_or_else(|| RawFunction(slab.number()));
        let kernel = slab
            .kernels
            .entry(function.0)
            .or_insert_with(|| Arc::new(Kernel::new(code, program.module().target())));
        let kernel = Arc::clone(kernel);
        if let Some(module) = slab.modules.get_mut(&module.0) {
            module.functions.insert(name.to_owned(), function);
        }
        Ok(LoadedFunction {
            function,
            parameters: kernel.parameters(),
            attributes: kernel.attributes(),
            prints: kernel.prints(),
        })
    }

    /// Calls `each` with the name of each of a module's kernels, in the order of the image.
    pub fn kernel_names(&self, module: RawModule, each: &mut dyn FnMut(&[u8])) -> Result<()> {
        let program = Arc::clone(&self.slab.lock().module(module)?.program);
        let names = program.module().kernel_names();
        names.for_each(|name| each(name.as_bytes()));
        Ok(())
    }

    /// Returns address and size of a variable. Fails for texture, surface and sampler references.
    pub fn global(&self, module: RawModule, name: &str) -> Result<(u64, u64)> {
        let slab = self.slab.lock();
        let program = &slab.module(module)?.program;
        let kinds = [Reference::Texture, Reference::Surface, Reference::Sampler];
        if kinds
            .iter()
            .any(|kind| program.reference(name, *kind).is_some())
        {
            return Err(CuError::INVALID_VALUE);
        }
        program.variable(name).ok_or(CuError::NOT_FOUND)
    }

    /// Returns the address of a reference.
    pub fn reference(&self, module: RawModule, name: &str, kind: Reference) -> Result<u64> {
        self.slab
            .lock()
            .module(module)?
            .program
            .reference(name, kind)
            .ok_or(CuError::NOT_FOUND)
    }

    /// Returns a kernel by its handle.
    pub fn kernel(&self, function: RawFunction) -> Result<Arc<Kernel>> {
        self.slab
            .lock()
            .kernels
            .get(&function.0)
            .cloned()
            .ok_or(CuError::INVALID_HANDLE)
    }

    /// Returns the heap of device `malloc`. Allocates it at the first call, with the size of the
    /// current limit. Returns `None` if there is no memory for it.
    pub fn heap(&self, memory: &Memory, limits: &Limits) -> Option<Arc<DeviceHeap>> {
        let make = || {
            let bytes = limits.heap();
            let start = memory.allocate(bytes, Owner::internal()).ok()?;
            Some(Arc::new(DeviceHeap::new(start, bytes)))
        };
        self.heap.get_or_init(make).clone()
    }
}

/// Copies some of a variable's initial bytes to their offset. Ignores bytes outside `values`.
fn put(values: &mut [u8], offset: u64, bytes: &[u8]) {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let end = start.saturating_add(bytes.len());
    if let Some(place) = values.get_mut(start..end) {
        place.copy_from_slice(bytes);
    }
}

/// Writes some of a variable's initial bytes. Ignores bytes outside its memory.
fn write(memory: &Memory, address: u64, bytes: &[u8]) {
    if memory
        .check(address, bytes.len() as u64, Use::Write)
        .is_ok()
    {
        // SAFETY: the range was checked to lie in an allocation whose address no other code has
        // yet.
        unsafe {
            pointer(address).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }
}
