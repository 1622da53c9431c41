//! Contexts: primary contexts, created contexts, and each thread's context stack.
//!
//! The worker has one CUDA context for each device; the contexts of a program are separate objects here. Queries
//! about them cause no request.

use std::cell::RefCell;
use std::ffi::c_void;
use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use wormhole_api::Handle;
use wormhole_api::constants::context_flags::{
    SCHED_BLOCKING_SYNC, SCHED_MASK, SCHED_SPIN, SCHED_YIELD,
};
use wormhole_api::handle::Context as ContextKind;

use crate::device::MOST;
use crate::error::{CuError, Result};
use crate::handle::{self, Table};
use crate::object::core_dump;
use crate::object::storage::Storage;
use crate::session::{self, Manner, OnDevice, Session};
use crate::thread::THREAD;
use crate::types::CUcontext;

/// Record of a context.
#[derive(Debug, Default)]
pub struct Context {
    /// Device ordinal as the program sees it.
    device: AtomicUsize,
    /// `CU_CTX_*` flags.
    pub flags: AtomicU32,
    pub cache_config: AtomicU32,
    /// True while the context is usable: a primary context while it is retained, a created context until it is
    /// destroyed.
    active: AtomicBool,
    retained: AtomicU32,
    /// Number of `cuCtxAttach` calls without a `cuCtxDetach`.
    attached: AtomicU32,
    storage: AtomicPtr<Storage>,
}

static CONTEXTS: Table<ContextKind, Context> = Table::new();
/// Primary contexts by device. They are minted before all others, so the index of each is its device's ordinal.
static PRIMARY: OnceLock<Result<Vec<Handle<ContextKind>>>> = OnceLock::new();

/// Number of active contexts.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Contexts below the top of the thread's stack.
    static BELOW: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Returns the context on top of the calling thread's stack, or null.
#[inline]
fn top() -> CUcontext {
    THREAD.with(|thread| thread.context.get())
}

/// Replaces the top of the calling thread's stack. Returns the context that was there.
fn replace_top(context: CUcontext) -> CUcontext {
    THREAD.with(|thread| thread.context.replace(context))
}

fn is_forbidden() -> bool {
    THREAD.with(|thread| thread.is_forbidden.get())
}

/// Session and context of a call.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    pub session: OnDevice,
    /// Table index of the context, which owns all objects created in this scope.
    pub context: u32,
}

impl Context {
    /// Returns the device ordinal as the program sees it.
    pub fn device(&self) -> usize {
        self.device.load(Ordering::Relaxed)
    }

    /// Returns the context-local storage, allocated at the first call.
    pub fn storage(&self) -> &Storage {
        let storage = self.storage.load(Ordering::Acquire);
        // SAFETY: a stored pointer is leaked, and an entry's storage serves every context that uses the entry.
        match unsafe { storage.as_ref() } {
            Some(storage) => storage,
            None => self.make_storage(),
        }
    }

    #[cold]
    fn make_storage(&self) -> &Storage {
        let made = Box::into_raw(Box::new(Storage::default()));
        let stored = self.storage.compare_exchange(
            std::ptr::null_mut(),
            made,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        match stored {
            // SAFETY: just made, and leaked from here on.
            Ok(_) => unsafe { &*made },
            Err(other) => {
                // SAFETY: another thread stored its own first, so only this thread has the pointer.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: as in `storage`.
                unsafe { &*other }
            }
        }
    }

    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// Makes the context usable or not. Returns whether it was usable before.
    fn set_active(&self, active: bool) -> bool {
        let before = self.active.swap(active, Ordering::AcqRel);
        match (before, active) {
            (false, true) => ACTIVE.fetch_add(1, Ordering::Relaxed),
            (true, false) => ACTIVE.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
        before
    }

    /// Returns how a thread waits for work of the context.
    fn manner(&self) -> Manner {
        match self.flags.load(Ordering::Relaxed) & SCHED_MASK {
            SCHED_SPIN => Manner::Spin,
            SCHED_YIELD => Manner::Yield,
            SCHED_BLOCKING_SYNC => Manner::Block,
            _ if ACTIVE.load(Ordering::Relaxed) > processors() => Manner::Yield,
            _ => Manner::Auto,
        }
    }

    /// Increments the attach count.
    pub fn attach(&self) {
        self.attached.fetch_add(1, Ordering::AcqRel);
    }

    /// Decrements the attach count. Returns false if it was zero: the creator is then the only user.
    pub fn detach(&self) -> bool {
        let less = |count: u32| count.checked_sub(1);
        self.attached
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less)
            .is_ok()
    }

    /// Empties the context-local storage and calls the destructors of its values.
    pub fn clear(&self, handle: CUcontext) {
        for (key, value, destructor) in self.storage().drain() {
            if let Some(destructor) = destructor {
                let [key, value] =
                    [key, value].map(std::ptr::with_exposed_provenance_mut::<c_void>);
                // SAFETY: the runtime that stored the value registered this destructor for it.
                unsafe { destructor(handle, key, value) };
            }
        }
    }
}

/// Returns the handle of a device's primary context, active or not.
pub fn primary(device: usize) -> Result<Handle<ContextKind>> {
    let minted = PRIMARY.get_or_init(|| {
        let mint =
            |device| CONTEXTS.mint(|context| context.device.store(device, Ordering::Relaxed));
        (0..MOST).map(mint).collect()
    });
    match minted {
        Ok(handles) => handles.get(device).copied().ok_or(CuError::INVALID_DEVICE),
        Err(error) => Err(*error),
    }
}

/// Returns a device's primary context and its `CUcontext`.
pub fn primary_context(device: usize) -> Result<(&'static Context, CUcontext)> {
    let handle = primary(device)?;
    let context = CONTEXTS.get(handle).ok_or(CuError::UNKNOWN)?;
    Ok((context, handle::to_pointer(handle)))
}

/// Looks up a context by its `CUcontext`.
#[inline]
pub fn find(context: CUcontext) -> Option<(&'static Context, Handle<ContextKind>)> {
    let handle = handle::from_pointer(context)?;
    Some((CONTEXTS.get(handle)?, handle))
}

/// Looks up an active context by its `CUcontext`.
pub fn find_active(context: CUcontext) -> Result<(&'static Context, Handle<ContextKind>)> {
    let (context, handle) = find(context).ok_or(CuError::INVALID_CONTEXT)?;
    if context.is_active() {
        Ok((context, handle))
    } else {
        Err(CuError::CONTEXT_IS_DESTROYED)
    }
}

/// Looks up an active context that a call names beside the current one. Fails with `CONTEXT_IS_DESTROYED` for a
/// destroyed context and with `INVALID_CONTEXT` for a value that is no handle.
pub fn find_peer(context: CUcontext) -> Result<(&'static Context, Handle<ContextKind>)> {
    let handle = handle::from_pointer(context).ok_or(CuError::INVALID_CONTEXT)?;
    let found = CONTEXTS.get(handle).filter(|context| context.is_active());
    Ok((found.ok_or(CuError::CONTEXT_IS_DESTROYED)?, handle))
}

/// Returns the `CUcontext` of the calling thread's current context, or null.
#[inline(always)]
pub fn current() -> CUcontext {
    let current = top();
    if current.is_null() && is_forbidden() {
        // A non-null result makes a call that first sets a context fail in that call, with that call's own code.
        return primary_context(0).map_or(current, |(_, handle)| handle);
    }
    current
}

/// Returns how the calling thread waits, by the flags of its current context.
pub fn manner() -> Manner {
    find(top()).map_or(Manner::Auto, |(context, _)| context.manner())
}

/// Returns the number of processors, with which CUDA compares the number of active contexts (CUDA driver API,
/// `CU_CTX_SCHED_AUTO`).
fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, NonZero::get))
}

/// Returns the session and context of the calling thread, or error 201 if it has no context.
#[inline(always)]
pub fn scope() -> Result<Scope> {
    let session = session::session()?;
    let current = top();
    if current.is_null() {
        return Err(no_context());
    }
    let (context, handle) = find_active(current)?;
    Ok(scope_in(session, context, handle))
}

/// Combines the session and a context.
#[inline]
pub fn scope_in(
    session: &'static Session,
    context: &Context,
    handle: Handle<ContextKind>,
) -> Scope {
    Scope {
        session: session.on(context.device()),
        context: handle.key().map_or(0, |key| key.index),
    }
}

/// Returns the device ordinal of the context with this index.
pub fn device_of(number: u32) -> Option<usize> {
    // The index of a primary context is its device's ordinal.
    if let Some(device) = usize::try_from(number).ok().filter(|number| *number < MOST) {
        return Some(device);
    }
    let mut all = CONTEXTS.live();
    let found = all.find(|(handle, _)| handle.key().is_some_and(|key| key.index == number));
    found.map(|(_, context)| context.device())
}

/// Combines the session and the context with this index, which need not exist any more.
pub fn scope_numbered(session: &'static Session, number: u32) -> Scope {
    Scope {
        session: session.on(device_of(number).unwrap_or(0)),
        context: number,
    }
}

#[cold]
fn no_context() -> CuError {
    permitted().err().unwrap_or(CuError::INVALID_CONTEXT)
}

/// Forbids calls that need a context on this thread from now on.
pub fn forbid_calls() {
    THREAD.with(|thread| thread.is_forbidden.set(true));
}

fn permitted() -> Result {
    if is_forbidden() {
        Err(CuError::NOT_PERMITTED)
    } else {
        Ok(())
    }
}

/// Returns the scope of the current context, or of device 0's primary context if there is none, for calls that need
/// no context.
pub fn scope_or_primary() -> Result<Scope> {
    match scope() {
        Err(CuError::INVALID_CONTEXT) => Ok(primary_scope(session::session()?, 0)),
        scope => scope,
    }
}

/// Returns the calling thread's scope, or the scope of the context with this index if the thread has no context, for
/// calls that name an object of a context.
#[inline(always)]
pub fn scope_or(number: impl FnOnce() -> Result<u32>) -> Result<Scope> {
    match scope() {
        Err(CuError::INVALID_CONTEXT) => Ok(scope_numbered(session::session()?, number()?)),
        scope => scope,
    }
}

/// Returns the scope of [`scope_or_primary`] with another device, for calls that concern a device in any context.
pub fn on_device(device: usize) -> Result<Scope> {
    let scope = scope_or_primary()?;
    Ok(Scope {
        session: scope.session.session().on(device),
        ..scope
    })
}

/// Combines the session and a device's primary context.
pub fn primary_scope(session: &'static Session, device: usize) -> Scope {
    Scope {
        session: session.on(device),
        context: u32::try_from(device).unwrap_or(0),
    }
}

/// Returns the `CUcontext` of the context with this index.
pub fn by_number(number: u32) -> Result<CUcontext> {
    if let Some(device) = usize::try_from(number).ok().filter(|number| *number < MOST) {
        return primary(device).map(handle::to_pointer);
    }
    CONTEXTS
        .live()
        .find(|(handle, _)| handle.key().is_some_and(|key| key.index == number))
        .map(|(handle, _)| handle::to_pointer(handle))
        .ok_or(CuError::INVALID_CONTEXT)
}

/// Returns the identity of a context (`cuCtxGetId`), unique in the process.
pub fn identity(context: CUcontext) -> Option<u64> {
    let key = find(context)?.1.key()?;
    Some(u64::from(key.generation) << 32 | u64::from(key.index))
}

/// Returns whether any context of a device is active beside its primary one.
pub fn others_active(device: usize) -> bool {
    CONTEXTS
        .live()
        .any(|(handle, context)| Ok(handle) != primary(device) && context.is_active())
}

/// Replaces the top of the calling thread's stack; null removes the top.
pub fn set_current(context: CUcontext) -> Result {
    if is_forbidden() {
        return Ok(());
    }
    if context.is_null() {
        let below = BELOW.with_borrow_mut(Vec::pop);
        replace_top(std::ptr::with_exposed_provenance_mut(below.unwrap_or(0)));
        return Ok(());
    }
    // A primary context may be made current before it is retained; runtimes do so.
    find(context).ok_or(CuError::INVALID_CONTEXT)?;
    replace_top(context);
    Ok(())
}

/// Pushes a context on the calling thread's stack.
pub fn push(context: CUcontext) -> Result {
    permitted()?;
    find(context).ok_or(CuError::INVALID_CONTEXT)?;
    let covered = replace_top(context);
    if !covered.is_null() {
        BELOW.with_borrow_mut(|below| below.push(covered.expose_provenance()));
    }
    Ok(())
}

/// Pops the top of the calling thread's stack.
pub fn pop() -> Result<CUcontext> {
    let top = top();
    if top.is_null() {
        return Err(CuError::INVALID_CONTEXT);
    }
    let below = BELOW.with_borrow_mut(Vec::pop);
    replace_top(std::ptr::with_exposed_provenance_mut(below.unwrap_or(0)));
    Ok(top)
}

/// Increments the retain count of a primary context and activates it.
pub fn retain_primary(device: usize) -> Result<CUcontext> {
    permitted()?;
    let (context, handle) = primary_context(device)?;
    context.retained.fetch_add(1, Ordering::AcqRel);
    if !context.set_active(true)
        && let Some(identity) = identity(handle)
    {
        core_dump::begin(identity);
    }
    Ok(handle)
}

/// Decrements the retain count of a primary context. Returns true if it is now zero: the caller then resets the
/// context.
pub fn release_primary(device: usize) -> Result<bool> {
    let (context, _) = primary_context(device)?;
    let before = context
        .retained
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            count.checked_sub(1)
        })
        .map_err(|_| CuError::INVALID_CONTEXT)?;
    Ok(before == 1)
}

/// Deactivates a primary context and sets its retain count to zero.
pub fn deactivate_primary(device: usize) -> Result {
    let (context, _) = primary_context(device)?;
    context.retained.store(0, Ordering::Release);
    context.set_active(false);
    Ok(())
}

/// Creates a context and makes it current in the calling thread.
pub fn create(device: usize, flags: u32) -> Result<CUcontext> {
    let pointer = create_aside(device, flags)?;
    push(pointer)?;
    Ok(pointer)
}

/// Creates a context that is current in no thread.
pub fn create_aside(device: usize, flags: u32) -> Result<CUcontext> {
    // Minted first, so that the primary contexts take the lowest indices.
    primary(device)?;
    let handle = CONTEXTS.mint(|context| {
        context.device.store(device, Ordering::Relaxed);
        context.flags.store(flags, Ordering::Relaxed);
        context.cache_config.store(0, Ordering::Relaxed);
        context.attached.store(0, Ordering::Relaxed);
        context.set_active(true);
    })?;
    let pointer = handle::to_pointer(handle);
    if let Some(identity) = identity(pointer) {
        core_dump::begin(identity);
    }
    Ok(pointer)
}

/// Deactivates a context. Its handle stays valid, so that calls answer `CONTEXT_IS_DESTROYED`.
pub fn deactivate(context: CUcontext) -> Result {
    let (facts, _) = find_active(context)?;
    facts.set_active(false);
    facts.clear(context);
    Ok(())
}

/// Destroys a context that [`create`] made.
pub fn destroy(context: CUcontext) -> Result {
    let (facts, handle) = find_active(context)?;
    if handle == primary(facts.device())? {
        return Err(CuError::INVALID_CONTEXT);
    }
    facts.set_active(false);
    facts.clear(context);
    if top() == context {
        pop()?;
    }
    CONTEXTS.retire(handle).ok_or(CuError::INVALID_CONTEXT)?;
    CONTEXTS.recycle(handle);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_of_a_thread_gives_back_what_was_covered() {
        let outer = create(0, 0).unwrap();
        assert_eq!(current(), outer);
        let inner = create(0, 4).unwrap();
        assert_eq!(current(), inner);
        assert_eq!(pop().unwrap(), inner);
        assert_eq!(current(), outer);
        push(inner).unwrap();
        set_current(outer).unwrap();
        assert_eq!(pop().unwrap(), outer);
        assert_eq!(pop().unwrap(), outer);
        assert_eq!(pop(), Err(CuError::INVALID_CONTEXT));
        destroy(inner).unwrap();
        destroy(outer).unwrap();
        assert_eq!(set_current(inner), Err(CuError::INVALID_CONTEXT));
    }

    #[test]
    fn other_threads_have_stacks_of_their_own() {
        let mine = create(0, 0).unwrap();
        let theirs = std::thread::spawn(|| current().is_null()).join().unwrap();
        assert!(theirs);
        destroy(mine).unwrap();
        assert!(current().is_null());
    }

    #[test]
    fn values_kept_with_a_context_go_with_it() {
        static CALLED: AtomicU32 = AtomicU32::new(0);
        unsafe extern "C" fn destructor(_: CUcontext, key: *mut c_void, value: *mut c_void) {
            assert_eq!((key.addr(), value.addr()), (0x10, 0x20));
            CALLED.fetch_add(1, Ordering::Relaxed);
        }
        let context = create(0, 0).unwrap();
        find(context)
            .unwrap()
            .0
            .storage()
            .put(0x10, 0x20, Some(destructor));
        destroy(context).unwrap();
        assert_eq!(CALLED.load(Ordering::Relaxed), 1);
    }
}
