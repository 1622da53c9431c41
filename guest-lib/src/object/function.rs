//! Kernels: their parameter layouts and attributes, from the answer to the look-up. A `CUkernel` is the same object
//! as a `CUfunction`, because CUDA accepts either for the other.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};

use wormhole_api::constants::function_cache::PREFER_EQUAL;
use wormhole_api::constants::kernel_flags::PRINTS;
use wormhole_api::handle::{Function as FunctionKind, Library as LibraryKind};
use wormhole_api::{
    Attribute, FunctionGetAttribute, FunctionSetAttribute, FunctionSetCacheConfig, Handle, Items,
    Occupancy, Parameter,
};
use wormhole_lock::{Mutex, MutexGuard};

use crate::device::MOST;
use crate::error::{CuError, Result};
use crate::handle::{self, Table};
use crate::object::context::{self, Scope, primary_scope};
use crate::object::{launch_v3, module};

pub use wormhole_api::constants::function_attribute as attribute;

/// Size of the attribute cache: attributes below this are cached.
const ATTRIBUTES: usize = 32;
/// Value of an attribute that is not cached.
const UNKNOWN: i32 = i32::MIN;

/// Image that a function belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Module(*mut c_void),
    Library(*mut c_void),
}

/// Launch configuration that the device must accept once: cooperative, or with clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Configuration {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub cluster: [u32; 3],
    pub cooperative: bool,
}

/// Maximum number of cached configurations for each function. A launch with any other stays a request.
const CONFIGURATIONS: usize = 64;

/// Configurations that the device has accepted. The list only grows, so it is read without a lock.
#[derive(Debug, Default)]
struct Agreed {
    first: AtomicPtr<AgreedEntry>,
}

#[derive(Debug)]
struct AgreedEntry {
    configuration: Configuration,
    next: *mut AgreedEntry,
}

impl Agreed {
    fn iter(&self) -> impl Iterator<Item = &Configuration> {
        let mut next = self.first.load(Ordering::Acquire);
        std::iter::from_fn(move || {
            // SAFETY: entries are published whole, never changed, and freed with the list alone.
            let entry = unsafe { next.as_ref() }?;
            next = entry.next;
            Some(&entry.configuration)
        })
    }

    fn contains(&self, configuration: &Configuration) -> bool {
        self.iter().any(|agreed| agreed == configuration)
    }

    fn insert(&self, configuration: Configuration) {
        if self.contains(&configuration) || self.iter().count() >= CONFIGURATIONS {
            return;
        }
        let mut next = self.first.load(Ordering::Acquire);
        let entry = Box::into_raw(Box::new(AgreedEntry {
            configuration,
            next,
        }));
        while let Err(other) =
            self.first
                .compare_exchange(next, entry, Ordering::AcqRel, Ordering::Acquire)
        {
            next = other;
            // SAFETY: the entry is not published yet, so no other thread reads it.
            unsafe { (*entry).next = next };
        }
    }
}

impl Drop for Agreed {
    fn drop(&mut self) {
        let mut next = *self.first.get_mut();
        while !next.is_null() {
            // SAFETY: made by `insert`, in the list once, and the list is used no more.
            next = unsafe { Box::from_raw(next) }.next;
        }
    }
}

/// Record of a function.
#[derive(Debug)]
pub struct Function {
    pub owner: Owner,
    /// Ordinal of the device that it is loaded on.
    pub device: usize,
    /// Wire handles of the same library's kernel on other devices, by ordinal; 0 if not looked up yet.
    elsewhere: OnceLock<Box<[AtomicU64; MOST]>>,
    pub name: CString,
    pub parameters: Box<[Parameter]>,
    /// End of the last parameter in the packed buffer.
    pub parameter_bytes: usize,
    /// Whether it may print: a synchronization must then fetch the text.
    pub prints: bool,
    /// True once the kernel has run. Until then its first launch may fail for reasons that later launches cannot.
    pub launched: AtomicBool,
    /// True once an executable graph contains the kernel.
    pub in_graph: AtomicBool,
    /// True after a reset, until the function is looked up again at its next use.
    pub stale: AtomicBool,
    attributes: [AtomicI32; ATTRIBUTES],
    /// Settings of the launch functions before CUDA 4.
    pub legacy: Mutex<launch_v3::Settings>,
    configurations: Agreed,
    occupancy: Mutex<HashMap<(u32, u64, u32), i32>>,
}

// SAFETY: the owner's pointer is a minted handle: a number that is never followed.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Table entry: a pointer to a record that was published once. Records of unloaded functions are not freed, because a
/// launch may be reading them.
#[derive(Debug, Default)]
pub struct Entry(AtomicPtr<Function>);

static FUNCTIONS: Table<FunctionKind, Entry> = Table::new();

/// Mints a handle for a function that is about to be looked up; [`publish`] or [`forget`] follows.
pub fn reserve() -> Result<Handle<FunctionKind>> {
    FUNCTIONS.mint(|entry| entry.0.store(std::ptr::null_mut(), Ordering::Relaxed))
}

/// Publishes the record of a function.
pub fn publish(handle: Handle<FunctionKind>, function: Function) {
    if let Some(entry) = FUNCTIONS.get(handle) {
        entry
            .0
            .store(Box::into_raw(Box::new(function)), Ordering::Release);
    }
}

/// Retires a function when its module is unloaded.
pub fn forget(handle: Handle<FunctionKind>) {
    FUNCTIONS.forget(handle);
}

/// Looks up a function by its `CUfunction` or `CUkernel`.
#[inline]
pub fn find(function: *mut c_void) -> Result<(Handle<FunctionKind>, &'static Function)> {
    let handle = handle::from_pointer(function).ok_or(CuError::INVALID_HANDLE)?;
    let function = facts(handle)?;
    if function.stale.load(Ordering::Acquire) {
        return refresh(handle, function);
    }
    Ok((handle, function))
}

/// Returns the record of a function, stale or not.
#[inline]
pub fn facts(handle: Handle<FunctionKind>) -> Result<&'static Function> {
    let entry = FUNCTIONS.get(handle).ok_or(CuError::INVALID_HANDLE)?;
    let function = entry.0.load(Ordering::Acquire);
    // SAFETY: a record that `publish` stored is never freed.
    unsafe { function.as_ref() }.ok_or(CuError::INVALID_HANDLE)
}

#[cold]
fn refresh(
    handle: Handle<FunctionKind>,
    function: &'static Function,
) -> Result<(Handle<FunctionKind>, &'static Function)> {
    let session = context::scope_or_primary()?.session.session();
    module::refresh_function(primary_scope(session, function.device), handle, function)?;
    Ok((handle, facts(handle)?))
}

/// Looks up a function on the device of a scope. A kernel of a library exists on all devices; any other function is
/// found on its own device.
#[inline]
pub fn find_on(
    scope: Scope,
    function: *mut c_void,
) -> Result<(Handle<FunctionKind>, &'static Function)> {
    let (handle, facts) = find(function)?;
    if facts.device == scope.session.ordinal() {
        return Ok((handle, facts));
    }
    facts.find_elsewhere(scope, handle)
}

impl Function {
    pub fn new(
        owner: Owner,
        device: usize,
        name: CString,
        flags: u32,
        parameters: &Items<'_, Parameter>,
        attributes: &Items<'_, Attribute>,
    ) -> Self {
        let parameters: Box<[Parameter]> = parameters.iter().collect();
        let ends = parameters.iter();
        let ends = ends.map(|parameter| parameter.offset as usize + parameter.size as usize);
        let function = Self {
            owner,
            device,
            elsewhere: OnceLock::new(),
            name,
            parameter_bytes: ends.max().unwrap_or(0),
            parameters,
            prints: flags & PRINTS != 0,
            launched: AtomicBool::new(false),
            in_graph: AtomicBool::new(false),
            stale: AtomicBool::new(false),
            attributes: [const { AtomicI32::new(UNKNOWN) }; ATTRIBUTES],
            legacy: Mutex::default(),
            configurations: Agreed::default(),
            occupancy: Mutex::default(),
        };
        for attribute in attributes.iter() {
            function.cache_attribute(attribute.id, attribute.value);
        }
        function
    }

    fn find_elsewhere(
        &'static self,
        scope: Scope,
        handle: Handle<FunctionKind>,
    ) -> Result<(Handle<FunctionKind>, &'static Self)> {
        let Owner::Library(library) = self.owner else {
            return Ok((handle, self));
        };
        let places = self
            .elsewhere
            .get_or_init(|| Box::new([const { AtomicU64::new(0) }; MOST]));
        let place = &places[scope.session.ordinal()];
        // A handle that is no longer valid is looked up again.
        if let Some(known) = Handle::<FunctionKind>::from_wire(place.load(Ordering::Acquire))
            && let Ok(found) = find(handle::to_pointer(known))
        {
            return Ok(found);
        }
        if module::original(library)? != library {
            return Ok((handle, self));
        }
        let there = primary_scope(scope.session.session(), scope.session.ordinal());
        let found = module::function_there::<LibraryKind>(there, library, &self.name)?;
        let (handle, facts) = find(found)?;
        place.store(handle.to_wire(), Ordering::Release);
        Ok((handle, facts))
    }

    fn cache_attribute(&self, attribute: i32, value: i32) {
        if let Some(place) = usize::try_from(attribute)
            .ok()
            .and_then(|id| self.attributes.get(id))
        {
            place.store(value, Ordering::Relaxed);
        }
    }

    /// Returns an attribute if it is cached.
    #[inline]
    pub fn known(&self, attribute: i32) -> Option<i32> {
        let place = self.attributes.get(usize::try_from(attribute).ok()?)?;
        Some(place.load(Ordering::Relaxed)).filter(|value| *value != UNKNOWN)
    }

    /// Returns whether the kernel has a required cluster size, which limits the possible grids.
    #[inline]
    pub fn demands_cluster(&self) -> bool {
        self.known(attribute::REQUIRED_CLUSTER_WIDTH)
            .is_some_and(|width| width != 0)
    }

    /// Returns an attribute (`cuFuncGetAttribute`).
    pub fn attribute(
        &self,
        scope: Scope,
        handle: Handle<FunctionKind>,
        attribute: i32,
    ) -> Result<i32> {
        if let Some(value) = self.known(attribute) {
            return Ok(value);
        }
        let message = FunctionGetAttribute {
            function: handle,
            attribute,
        };
        let value = scope.session.request(&message, |reply| reply.value)?;
        self.cache_attribute(attribute, value);
        Ok(value)
    }

    /// Sets an attribute (`cuFuncSetAttribute`).
    pub fn set_attribute(
        &self,
        scope: Scope,
        handle: Handle<FunctionKind>,
        attribute: i32,
        value: i32,
    ) -> Result {
        // Libraries set the same value before each launch, so an unchanged one is not sent.
        if self.known(attribute) == Some(value) {
            return scope.session.alive();
        }
        let message = FunctionSetAttribute {
            function: handle,
            attribute,
            value,
        };
        scope.session.request(&message, |()| ())?;
        self.cache_attribute(attribute, value);
        self.occupancy().clear();
        Ok(())
    }

    /// Sets the preferred cache configuration (`cuFuncSetCacheConfig`).
    pub fn set_cache_config(
        &self,
        scope: Scope,
        handle: Handle<FunctionKind>,
        config: u32,
    ) -> Result {
        if config > PREFER_EQUAL {
            return Err(CuError::INVALID_VALUE);
        }
        self.occupancy().clear();
        let message = FunctionSetCacheConfig {
            function: handle,
            config,
        };
        scope.session.request(&message, |()| ())
    }

    /// Returns the number of resident blocks per multiprocessor.
    pub fn blocks(
        &self,
        scope: Scope,
        handle: Handle<FunctionKind>,
        block: u32,
        shared: u64,
        flags: u32,
    ) -> Result<i32> {
        let key = (block, shared, flags);
        if let Some(blocks) = self.occupancy().get(&key) {
            return Ok(*blocks);
        }
        let message = Occupancy {
            function: handle,
            block,
            flags,
            shared,
        };
        let blocks = scope.session.request(&message, |reply| reply.blocks)?;
        self.occupancy().insert(key, blocks);
        Ok(blocks)
    }

    fn occupancy(&self) -> MutexGuard<'_, HashMap<(u32, u64, u32), i32>> {
        self.occupancy.lock()
    }

    /// Returns whether the device has accepted a configuration before.
    pub fn agreed(&self, configuration: &Configuration) -> bool {
        self.configurations.contains(configuration)
    }

    pub fn agree(&self, configuration: Configuration) {
        self.configurations.insert(configuration);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(number: u32) -> Configuration {
        Configuration {
            grid: [number, 1, 1],
            block: [32, 1, 1],
            shared: 0,
            cluster: [0; 3],
            cooperative: true,
        }
    }

    #[test]
    fn configurations_of_all_threads_are_remembered_up_to_a_number() {
        const EACH: u32 = 8;
        let agreed = Agreed::default();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let agreed = &agreed;
                scope.spawn(move || {
                    for number in 0..EACH {
                        agreed.insert(configuration(thread * EACH + number));
                    }
                });
            }
        });
        assert!((0..4 * EACH).all(|number| agreed.contains(&configuration(number))));
        assert!(!agreed.contains(&configuration(4 * EACH)));
        for number in 0..1000 {
            agreed.insert(configuration(number));
        }
        assert_eq!(agreed.iter().count(), CONFIGURATIONS);
    }
}
