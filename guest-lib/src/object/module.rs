//! Modules and libraries: loaded images, and the functions and variables looked up in them.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use wormhole_api::constants::image_flags::{ANY_KERNEL_PRINTS, USES_OUTPUT};
use wormhole_api::handle::{
    Function as FunctionKind, HandleKind, Library as LibraryKind, Module as ModuleKind,
};
use wormhole_api::{
    DevicePtr, Handle, Items, JitOption, LibraryGetGlobal, LibraryGetKernel, LibraryGetModule,
    LibraryKernels, LibraryLoad, LibraryUnload, ModuleGetFunction, ModuleGetGlobal, ModuleKernels,
    ModuleLoad, ModuleUnload,
};
use wormhole_lock::{Mutex, MutexGuard};

use crate::error::{CuError, Result};
use crate::handle::{self, HandleMap, Table};
use crate::memory::map::Origin;
use crate::memory::{self, memory_map};
use crate::object::context::Scope;
use crate::object::function::{self, Function, Owner};
use crate::object::jit::{self, Jit, Logs};
use crate::object::stream::output;

/// Record of a module or library.
#[derive(Debug, Default)]
pub struct Image {
    contents: Mutex<Contents>,
}

#[derive(Debug, Default)]
struct Contents {
    /// Index of the context that it was loaded in, and its device's ordinal.
    context: u32,
    device: usize,
    functions: HandleMap<CString, Handle<FunctionKind>>,
    globals: HandleMap<CString, (u64, u64)>,
    /// Module of a library (`cuLibraryGetModule`).
    module: Option<Handle<ModuleKind>>,
    /// Library that this module belongs to.
    library: Option<Handle<LibraryKind>>,
    /// Image of a library. Libraries outlive a reset of the context, so the worker may have to load it again.
    source: Option<Source>,
    /// Managed variables, shared by a library and its copies.
    managed: Option<Variables>,
    /// True after a reset, until the worker has loaded the image again.
    stale: bool,
    /// Copies of a library on other devices, by ordinal.
    elsewhere: BTreeMap<usize, usize>,
    /// Library that this one is a copy of.
    original: Option<usize>,
}

/// Image that can be sent again.
#[derive(Clone, Debug)]
pub enum Source {
    /// Memory of the program (`CU_LIBRARY_BINARY_IS_PRESERVED`).
    Preserved {
        address: usize,
        bytes: usize,
    },
    Kept(Arc<[u8]>),
}

impl Source {
    fn with<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        match self {
            Self::Preserved { address, bytes } => {
                let start = std::ptr::with_exposed_provenance(*address);
                // SAFETY: the program has promised to keep the image until the library is unloaded.
                read(unsafe { std::slice::from_raw_parts(start, *bytes) })
            }
            Self::Kept(image) => read(image),
        }
    }
}

impl Image {
    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock()
    }
}

/// Kind of image: modules and libraries use different messages.
pub trait Loadable: HandleKind + 'static {
    fn table() -> &'static Table<Self, Image>
    where
        Self: Sized;
    /// Requests the load. Returns flags, and the size of the memory that managed variables need. If that is not 0, the
    /// image is not loaded yet.
    fn load(scope: Scope, new: Handle<Self>, image: &Sent<'_>) -> Result<(u32, u64)>;
    /// Unloads the image. Waits if the device may be using it.
    fn unload(scope: Scope, handle: Handle<Self>, waits: bool) -> Result;
    fn function(
        scope: Scope,
        image: Handle<Self>,
        new: Handle<FunctionKind>,
        name: &CStr,
    ) -> Result<Function>;
    fn global(scope: Scope, image: Handle<Self>, name: &CStr) -> Result<(u64, u64)>;
    /// Has the worker write the names of all kernels to `names`, if they fit in `room` bytes. Returns their length.
    fn kernels(scope: Scope, image: Handle<Self>, names: u64, room: u64) -> Result<u64>;
}

/// Implements [`Loadable`] for a kind with its messages, which all name the image by one field.
macro_rules! loadable {
    ($kind:ident as $image:ident: $owner:path, $load:ident, $unload:ident, $function:ident, $global:ident, $kernels:ident) => {
        impl Loadable for $kind {
            fn table() -> &'static Table<Self, Image> {
                static TABLE: Table<$kind, Image> = Table::new();
                &TABLE
            }

            fn load(scope: Scope, new: Handle<Self>, image: &Sent<'_>) -> Result<(u32, u64)> {
                let message = $load {
                    new,
                    image: DevicePtr(image.address),
                    bytes: image.bytes,
                    log: DevicePtr(image.address + image.bytes),
                    log_bytes: image.log_bytes,
                    place: DevicePtr(image.place.0),
                    place_bytes: image.place.1,
                    keep: u32::from(image.keep),
                    options: Items::new(image.options),
                };
                memory::with_unused(scope, || {
                    scope
                        .session
                        .request(&message, |reply| (reply.flags, reply.managed))
                })
            }

            fn unload(scope: Scope, $image: Handle<Self>, waits: bool) -> Result {
                match waits {
                    true => scope.session.request(&$unload { $image }, |()| ()),
                    false => scope.session.record(&$unload { $image }),
                }
            }

            fn function(
                scope: Scope,
                $image: Handle<Self>,
                new: Handle<FunctionKind>,
                name: &CStr,
            ) -> Result<Function> {
                let message = $function {
                    $image,
                    new,
                    name: name.to_bytes(),
                };
                memory::with_unused(scope, || {
                    scope.session.request(&message, |reply| {
                        let owner = $owner(handle::to_pointer($image));
                        let device = scope.session.ordinal();
                        let (parameters, attributes) = (&reply.parameters, &reply.attributes);
                        let (name, flags) = (name.to_owned(), reply.flags);
                        Function::new(owner, device, name, flags, parameters, attributes)
                    })
                })
            }

            fn global(scope: Scope, $image: Handle<Self>, name: &CStr) -> Result<(u64, u64)> {
                let message = $global {
                    $image,
                    name: name.to_bytes(),
                };
                memory::with_unused(scope, || {
                    scope
                        .session
                        .request(&message, |reply| (reply.address.0, reply.bytes))
                })
            }

            fn kernels(scope: Scope, $image: Handle<Self>, names: u64, room: u64) -> Result<u64> {
                let names = wormhole_api::DevicePtr(names);
                let message = $kernels {
                    $image,
                    names,
                    room,
                };
                scope.session.request(&message, |reply| reply.bytes)
            }
        }
    };
}

loadable!(ModuleKind as module: Owner::Module,
    ModuleLoad, ModuleUnload, ModuleGetFunction, ModuleGetGlobal, ModuleKernels);
loadable!(LibraryKind as library: Owner::Library,
    LibraryLoad, LibraryUnload, LibraryGetKernel, LibraryGetGlobal, LibraryKernels);

/// Looks up a live module or library by its handle.
pub fn find<K: Loadable>(pointer: *mut c_void) -> Result<(Handle<K>, &'static Image)> {
    let handle = handle::from_pointer(pointer).ok_or(CuError::INVALID_HANDLE)?;
    Ok((
        handle,
        K::table().get(handle).ok_or(CuError::INVALID_HANDLE)?,
    ))
}

/// Returns the index of the context that a module belongs to.
pub fn context_of(module: *mut c_void) -> Result<u32> {
    Ok(find::<ModuleKind>(module)?.1.contents().context)
}

/// Looks up a module or library, and has the worker load it again if it is stale.
fn fresh<K: Loadable>(scope: Scope, pointer: *mut c_void) -> Result<(Handle<K>, &'static Image)> {
    let (_, image) = find::<K>(pointer)?;
    let contents = image.contents();
    let original = contents.original.filter(|_| contents.stale);
    drop(contents);
    // A copy shares the managed variables of its original, so the original is loaded first.
    let shared = match original {
        Some(original) => {
            let (handle, image) = find::<K>(std::ptr::with_exposed_provenance_mut(original))?;
            let mut contents = image.contents();
            contents.refresh(scope, handle, None)?;
            contents.managed
        }
        None => None,
    };
    fresh_with(scope, pointer, shared)
}

/// Does the same as [`fresh`] with the managed variables that a copy shares.
fn fresh_with<K: Loadable>(
    scope: Scope,
    pointer: *mut c_void,
    shared: Option<Variables>,
) -> Result<(Handle<K>, &'static Image)> {
    let (handle, image) = find::<K>(pointer)?;
    let mut contents = image.contents();
    contents.refresh(scope, handle, shared)?;
    if contents.device != scope.session.ordinal()
        && contents.original.is_none()
        && let Some(source) = contents.source.clone()
    {
        return there::<K>(scope, pointer, &mut contents, source);
    }
    Ok((handle, image))
}

/// Returns a library's copy on the scope's device, loaded at its first use.
fn there<K: Loadable>(
    scope: Scope,
    original: *mut c_void,
    contents: &mut Contents,
    source: Source,
) -> Result<(Handle<K>, &'static Image)> {
    let device = scope.session.ordinal();
    if let Some(copy) = contents.elsewhere.get(&device) {
        let copy = std::ptr::with_exposed_provenance_mut(*copy);
        return fresh_with::<K>(scope, copy, contents.managed);
    }
    let (keep, logs, shared) = (Some(source.clone()), &mut Logs::default(), contents.managed);
    let copy = source.with(|bytes| load_with::<K>(scope, bytes, keep, &jit::NONE, logs, shared))?;
    let (handle, image) = find::<K>(copy)?;
    image.contents().original = Some(original.expose_provenance());
    contents.elsewhere.insert(device, copy.expose_provenance());
    Ok((handle, image))
}

/// Returns the library that the program loaded, given that library or one of its copies.
pub fn original(library: *mut c_void) -> Result<*mut c_void> {
    let original = find::<LibraryKind>(library)?.1.contents().original;
    Ok(original.map_or(library, std::ptr::with_exposed_provenance_mut))
}

/// Image in the arena. Room for the compiler's logs follows it.
#[derive(Debug)]
pub struct Sent<'a> {
    address: u64,
    bytes: u64,
    log_bytes: u64,
    /// Address and size of the managed variables.
    place: (u64, u64),
    /// True if the managed variables are initialized already.
    keep: bool,
    options: &'a [JitOption],
}

/// Memory of an image's managed variables.
#[derive(Clone, Copy, Debug)]
struct Variables {
    /// Address of the allocation.
    memory: u64,
    /// Address of the variables in it.
    place: u64,
    bytes: u64,
}

/// Sends an image to the worker through the arena. Reads the compiler's logs even if loading fails. Returns the
/// managed variables: those of the original, or new ones.
fn send<K: Loadable>(
    scope: Scope,
    handle: Handle<K>,
    image: &[u8],
    jit: &Jit,
    logs: &mut Logs,
    shared: Option<Variables>,
) -> Result<Option<Variables>> {
    let log_bytes = jit.log_bytes();
    let total = image.len() + 2 * log_bytes;
    let buffer = scope.session.allocate_for_image(total as u64, 16)?;
    let place: *mut u8 =
        std::ptr::with_exposed_provenance_mut(usize::try_from(buffer).unwrap_or(0));
    // SAFETY: the arena handed out that many bytes there, and the program's image lies outside the arena.
    unsafe {
        place.copy_from_nonoverlapping(image.as_ptr(), image.len());
        place.add(image.len()).write_bytes(0, 2 * log_bytes);
    }
    let mut sent = Sent {
        address: buffer,
        bytes: image.len() as u64,
        log_bytes: log_bytes as u64,
        place: (0, 0),
        keep: shared.is_some(),
        options: jit.options(),
    };
    let mut managed = shared;
    let mut loaded = K::load(scope, handle, &sent);
    if let Ok((_, bytes @ 1..)) = loaded {
        loaded = variables(scope, bytes, shared).and_then(|found| {
            managed = Some(found);
            sent.place = (found.place, found.bytes);
            K::load(scope, handle, &sent)
        });
    }
    // SAFETY: as above, and the worker has answered or is gone.
    *logs = unsafe { Logs::at(place.add(image.len()), log_bytes) };
    scope.session.free_arena(buffer);
    match loaded {
        Ok((flags, _)) => {
            if flags & USES_OUTPUT != 0 {
                scope.session.expect_output();
            }
            if flags & ANY_KERNEL_PRINTS != 0 {
                output::expect_always();
            }
            Ok(managed)
        }
        Err(error) => {
            if let Some(found) = managed
                && shared.is_none()
            {
                memory::free_variables(scope, found.memory);
            }
            Err(error)
        }
    }
}

fn variables(scope: Scope, bytes: u64, shared: Option<Variables>) -> Result<Variables> {
    if let Some(shared) = shared {
        return Ok(shared);
    }
    let (memory, place) = memory::allocate_variables(scope, bytes)?;
    Ok(Variables {
        memory,
        place,
        bytes,
    })
}

/// Loads an image and returns its handle. With a `source`, the image can be sent again.
pub fn load<K: Loadable>(
    scope: Scope,
    image: &[u8],
    source: Option<Source>,
    jit: &Jit,
    logs: &mut Logs,
) -> Result<*mut c_void> {
    load_with::<K>(scope, image, source, jit, logs, None)
}

fn load_with<K: Loadable>(
    scope: Scope,
    image: &[u8],
    source: Option<Source>,
    jit: &Jit,
    logs: &mut Logs,
    shared: Option<Variables>,
) -> Result<*mut c_void> {
    let (context, device) = (scope.context, scope.session.ordinal());
    let handle = K::table().mint(|image| {
        *image.contents() = Contents {
            context,
            device,
            source,
            ..Contents::default()
        };
    })?;
    match send(scope, handle, image, jit, logs, shared) {
        Ok(managed) => {
            if let Some(image) = K::table().get(handle) {
                image.contents().managed = managed;
            }
            Ok(handle::to_pointer(handle))
        }
        Err(error) => {
            K::table().forget(handle);
            Err(error)
        }
    }
}

/// Unloads an image with its functions and variables.
pub fn unload<K: Loadable>(scope: Scope, pointer: *mut c_void) -> Result {
    let (handle, _) = find::<K>(pointer)?;
    let image = K::table().retire(handle).ok_or(CuError::INVALID_HANDLE)?;
    let contents = std::mem::take(&mut *image.contents());
    let mut sent = if contents.stale {
        Ok(())
    } else {
        K::unload(contents.own(scope), handle, contents.may_be_in_use())
    };
    for copy in contents.elsewhere.values() {
        sent = sent.and(unload::<K>(
            scope,
            std::ptr::with_exposed_provenance_mut(*copy),
        ));
    }
    contents.forget();
    contents.free_variables(scope);
    if let Some(module) = contents.module
        && let Some(image) = ModuleKind::table().retire(module)
    {
        std::mem::take(&mut *image.contents()).forget();
        ModuleKind::table().recycle(module);
    }
    K::table().recycle(handle);
    sent
}

/// Unloads the modules of a context. Libraries belong to no context.
pub fn unload_of(scope: Scope) {
    for (handle, image) in ModuleKind::table().live() {
        let contents = image.contents();
        let is_own = contents.context == scope.context && contents.library.is_none();
        drop(contents);
        if is_own {
            // An error is ignored: the context is destroyed, and another thread may have unloaded the module first.
            let _ = unload::<ModuleKind>(scope, handle::to_pointer(handle));
        }
    }
}

/// Drops all modules after a reset of the worker's context, and marks libraries to be loaded again at their next use.
pub fn forget_all(scope: Scope) {
    for (handle, image) in ModuleKind::table().live() {
        if ModuleKind::table().retire(handle).is_some() {
            let contents = std::mem::take(&mut *image.contents());
            contents.free_variables(scope);
            contents.forget();
            ModuleKind::table().recycle(handle);
        }
    }
    for (_, image) in LibraryKind::table().live() {
        let mut contents = image.contents();
        contents.stale = true;
        contents.free_variables(scope);
        contents.managed = None;
        contents.module = None;
        contents.globals.clear();
        for function in contents.functions.values() {
            if let Ok(facts) = function::facts(*function) {
                facts.stale.store(true, Ordering::Release);
            }
        }
    }
}

/// Looks up a library's function again after a reset, under the same handle.
pub fn refresh_function(scope: Scope, handle: Handle<FunctionKind>, facts: &Function) -> Result {
    let Owner::Library(library) = facts.owner else {
        return Err(CuError::INVALID_HANDLE);
    };
    let (library, image) = fresh::<LibraryKind>(scope, library)?;
    // The lock is held during the request, so that two threads do not look the same function up twice.
    let contents = image.contents();
    if function::facts(handle)?.stale.load(Ordering::Acquire) {
        function::publish(
            handle,
            LibraryKind::function(scope, library, handle, &facts.name)?,
        );
    }
    drop(contents);
    Ok(())
}

impl Contents {
    /// Sends an image to the worker again after a reset.
    fn refresh<K: Loadable>(
        &mut self,
        scope: Scope,
        handle: Handle<K>,
        shared: Option<Variables>,
    ) -> Result {
        if self.stale
            && let Some(source) = self.source.clone()
        {
            let (own, logs) = (self.own(scope), &mut Logs::default());
            self.managed =
                source.with(|bytes| send::<K>(own, handle, bytes, &jit::NONE, logs, shared))?;
            self.stale = false;
        }
        Ok(())
    }

    /// Returns the scope with the image's own device.
    fn own(&self, scope: Scope) -> Scope {
        if self.device == scope.session.ordinal() {
            return scope;
        }
        Scope {
            session: scope.session.session().on(self.device),
            context: self.context,
        }
    }

    /// Frees the managed variables, unless this is a copy: those belong to the original.
    fn free_variables(&self, scope: Scope) {
        if let Some(variables) = self.managed
            && self.original.is_none()
        {
            memory::free_variables(scope, variables.memory);
        }
    }

    /// Returns true if work on the device may use the image: if a kernel of it has been launched or is part of a graph, or
    /// if the program has the address of a variable.
    fn may_be_in_use(&self) -> bool {
        let is_used = |function: &Handle<FunctionKind>| {
            function::facts(*function).is_ok_and(|facts| {
                facts.launched.load(Ordering::Relaxed) || facts.in_graph.load(Ordering::Relaxed)
            })
        };
        let has_addresses = !self.globals.is_empty() || self.managed.is_some();
        has_addresses || self.module.is_some() || self.functions.values().any(is_used)
    }

    fn forget(&self) {
        for function in self.functions.values() {
            function::forget(*function);
        }
        for (address, _) in self.globals.values() {
            // A variable may be known under two names.
            let _ = memory_map().remove(*address, |allocation| allocation.origin == Origin::Global);
        }
    }
}

/// Looks up a function by name. Returns the same handle at each call.
pub fn function<K: Loadable>(
    scope: Scope,
    pointer: *mut c_void,
    name: &CStr,
) -> Result<*mut c_void> {
    let (_, image) = find::<K>(pointer)?;
    let contents = image.contents();
    if let Some(known) = contents.functions.get(name).filter(|_| !contents.stale) {
        return Ok(handle::to_pointer(*known));
    }
    // The program's handles of a library's kernels belong to the device that it was loaded on.
    let scope = contents.own(scope);
    drop(contents);
    function_there::<K>(scope, pointer, name)
}

/// Looks up a function by name on the scope's device.
pub fn function_there<K: Loadable>(
    scope: Scope,
    pointer: *mut c_void,
    name: &CStr,
) -> Result<*mut c_void> {
    let (handle, image) = fresh::<K>(scope, pointer)?;
    // The lock is held during the request, so that two threads do not look the same name up twice.
    let mut contents = image.contents();
    let scope = contents.own(scope);
    if let Some(function) = contents.functions.get(name) {
        return Ok(handle::to_pointer(*function));
    }
    let new = function::reserve()?;
    match K::function(scope, handle, new, name) {
        Ok(facts) => function::publish(new, facts),
        Err(error) => {
            function::forget(new);
            return Err(error);
        }
    }
    contents.functions.insert(name.to_owned(), new);
    Ok(handle::to_pointer(new))
}

/// Room for the names of a typical image's kernels, in bytes.
const NAMES: u64 = 64 << 10;

/// Returns the names of all kernels of an image.
pub fn kernels<K: Loadable>(scope: Scope, pointer: *mut c_void) -> Result<Vec<CString>> {
    let (handle, _) = fresh::<K>(scope, pointer)?;
    let mut room = NAMES;
    loop {
        let buffer = scope.session.allocate_for_image(room, 16)?;
        let written = K::kernels(scope, handle, buffer, room);
        let names = written.as_ref().ok().filter(|bytes| **bytes <= room);
        let names = names.map(|bytes| {
            let place: *const u8 =
                std::ptr::with_exposed_provenance(usize::try_from(buffer).unwrap_or(0));
            let mut copy = vec![0; usize::try_from(*bytes).unwrap_or(0)];
            // SAFETY: the arena handed out more bytes than that, and the worker has answered.
            unsafe { place.copy_to_nonoverlapping(copy.as_mut_ptr(), copy.len()) };
            copy
        });
        scope.session.free_arena(buffer);
        room = written?;
        if let Some(names) = names {
            let names = names.split_inclusive(|byte| *byte == 0);
            return Ok(names
                .filter_map(|name| CStr::from_bytes_with_nul(name).ok())
                .map(CStr::to_owned)
                .collect());
        }
    }
}

/// Returns the address and size of a variable.
pub fn global<K: Loadable>(scope: Scope, pointer: *mut c_void, name: &CStr) -> Result<(u64, u64)> {
    let (handle, image) = fresh::<K>(scope, pointer)?;
    let mut contents = image.contents();
    if let Some(known) = contents.globals.get(name) {
        return Ok(*known);
    }
    let scope = contents.own(scope);
    let (address, bytes) = K::global(scope, handle, name)?;
    if contents.managed.is_none() || !is_managed(address) {
        memory_map().insert(address, bytes, Origin::Global, scope.context);
    }
    contents.globals.insert(name.to_owned(), (address, bytes));
    Ok((address, bytes))
}

/// Returns whether an address is in managed memory.
pub fn is_managed(address: u64) -> bool {
    let found = memory_map().find(address);
    found.is_some_and(|allocation| allocation.is_managed())
}

/// Returns the module of a library (`cuLibraryGetModule`).
pub fn of_library(scope: Scope, pointer: *mut c_void) -> Result<*mut c_void> {
    let (library, image) = fresh::<LibraryKind>(scope, pointer)?;
    let mut contents = image.contents();
    if let Some(module) = contents.module {
        return Ok(handle::to_pointer(module));
    }
    let new = ModuleKind::table().mint(|image| {
        *image.contents() = Contents {
            library: Some(library),
            context: scope.context,
            device: scope.session.ordinal(),
            ..Contents::default()
        };
    })?;
    let message = LibraryGetModule { library, new };
    if let Err(error) = scope.session.request(&message, |()| ()) {
        ModuleKind::table().forget(new);
        return Err(error);
    }
    contents.module = Some(new);
    Ok(handle::to_pointer(new))
}

/// Returns whether a module belongs to a library; the program must not unload such a module.
pub fn is_of_library(pointer: *mut c_void) -> bool {
    find::<ModuleKind>(pointer).is_ok_and(|(_, image)| image.contents().library.is_some())
}

/// Returns the kernels of an image, at most `most`.
pub fn functions<K: Loadable>(
    scope: Scope,
    image: *mut c_void,
    most: usize,
) -> Result<Vec<*mut c_void>> {
    let names = kernels::<K>(scope, image)?;
    let wanted = names.iter().take(most);
    wanted
        .map(|name| function::<K>(scope, image, name))
        .collect()
}
