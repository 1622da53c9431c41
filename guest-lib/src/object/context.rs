//! Contexts: primary ones, those that programs create, and each thread's stack of them.
//!
//! The worker has one CUDA context of each device; contexts of a program are kept apart here. Every answer about
//! them is local.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use wormhole_api::Handle;
use wormhole_api::handle::Context as ContextKind;

use crate::device::MOST;
use crate::error::{CuError, Result};
use crate::handle::{self, Table};
use crate::object::core_dump;
use crate::object::storage::Storage;
use crate::session::{self, OnDevice, Session};
use crate::types::CUcontext;

/// What is known of a context.
#[derive(Debug, Default)]
pub struct Context {
    /// The device's number for the program.
    device: AtomicUsize,
    /// `CU_CTX_*` flags.
    pub flags: AtomicU32,
    pub cache_config: AtomicU32,
    /// A primary context that nobody retains is not active; others are active until destroyed.
    active: AtomicBool,
    retained: AtomicU32,
    /// `cuCtxAttach` without `cuCtxDetach`.
    attached: AtomicU32,
    storage: AtomicPtr<Storage>,
}

static CONTEXTS: Table<ContextKind, Context> = Table::new();
/// The primary contexts by device, minted before all others: each has its device's number.
static PRIMARY: OnceLock<Result<Vec<Handle<ContextKind>>>> = OnceLock::new();

thread_local! {
    /// The context on top of this thread's stack; null for none.
    static CURRENT: Cell<CUcontext> = const { Cell::new(std::ptr::null_mut()) };
    /// The contexts below it.
    static BELOW: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// The thread runs host functions, which may not call the driver. It never has a context.
    static FORBIDDEN: Cell<bool> = const { Cell::new(false) };
}

/// The session and the context that a call is made in.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    pub session: OnDevice,
    /// Which context, by its number: what is made in it goes with it.
    pub context: u32,
}

impl Context {
    /// The device's number for the program.
    pub fn device(&self) -> usize {
        self.device.load(Ordering::Relaxed)
    }

    /// Context-local storage; made when first used.
    pub fn storage(&self) -> &Storage {
        let storage = self.storage.load(Ordering::Acquire);
        // SAFETY: what is stored is leaked, and an entry's storage serves whatever context lives there.
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
                // SAFETY: another thread was faster; this one is nobody else's.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: as in `storage`.
                unsafe { &*other }
            }
        }
    }

    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// Makes one more user of the context.
    pub fn attach(&self) {
        self.attached.fetch_add(1, Ordering::AcqRel);
    }

    /// One user less; false if there is none but who created it.
    pub fn detach(&self) -> bool {
        let less = |count: u32| count.checked_sub(1);
        self.attached
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less)
            .is_ok()
    }

    /// Ends what is kept with the context; its values' destructors run.
    pub fn clear(&self, handle: CUcontext) {
        for (key, value, destructor) in self.storage().drain() {
            if let Some(destructor) = destructor {
                let [key, value] =
                    [key, value].map(std::ptr::with_exposed_provenance_mut::<c_void>);
                // SAFETY: the runtime that stored the value wants to be called with it.
                unsafe { destructor(handle, key, value) };
            }
        }
    }
}

/// The handle of a device's primary context, whether it is active or not.
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

/// A device's primary context and what a program holds for it.
pub fn primary_context(device: usize) -> Result<(&'static Context, CUcontext)> {
    let handle = primary(device)?;
    let context = CONTEXTS.get(handle).ok_or(CuError::UNKNOWN)?;
    Ok((context, handle::to_pointer(handle)))
}

/// A context by what a program passed.
#[inline]
pub fn find(context: CUcontext) -> Option<(&'static Context, Handle<ContextKind>)> {
    let handle = handle::from_pointer(context)?;
    Some((CONTEXTS.get(handle)?, handle))
}

/// A context by what a program passed, while it may be used.
pub fn find_active(context: CUcontext) -> Result<(&'static Context, Handle<ContextKind>)> {
    let (context, handle) = find(context).ok_or(CuError::INVALID_CONTEXT)?;
    if context.is_active() {
        Ok((context, handle))
    } else {
        Err(CuError::CONTEXT_IS_DESTROYED)
    }
}

/// A context that is named beside the current one, while it may be used. One that is gone is told from what is none.
pub fn find_peer(context: CUcontext) -> Result<(&'static Context, Handle<ContextKind>)> {
    let handle = handle::from_pointer(context).ok_or(CuError::INVALID_CONTEXT)?;
    let found = CONTEXTS.get(handle).filter(|context| context.is_active());
    Ok((found.ok_or(CuError::CONTEXT_IS_DESTROYED)?, handle))
}

/// What the calling thread holds as its current context; null for none.
#[inline]
pub fn current() -> CUcontext {
    let current = CURRENT.get();
    if current.is_null() && FORBIDDEN.get() {
        // Calls that set a context first then fail at the call itself, with its own code.
        return primary_context(0).map_or(current, |(_, handle)| handle);
    }
    current
}

/// The session and context of the calling thread; error 201 without one.
#[inline]
pub fn scope() -> Result<Scope> {
    let session = session::session()?;
    let current = CURRENT.get();
    if current.is_null() {
        return Err(no_context());
    }
    let (context, handle) = find_active(current)?;
    Ok(scope_in(session, context, handle))
}

/// The session and a context.
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

/// The number of the device that the context with a number is of.
pub fn device_of(number: u32) -> Option<usize> {
    // A primary context has its device's.
    if let Some(device) = usize::try_from(number).ok().filter(|number| *number < MOST) {
        return Some(device);
    }
    let mut all = CONTEXTS.live();
    let found = all.find(|(handle, _)| handle.key().is_some_and(|key| key.index == number));
    found.map(|(_, context)| context.device())
}

/// The session and the context with a number, whether it lives or not.
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

/// Calls of this thread that need a context are not permitted from now on.
pub fn forbid_calls() {
    FORBIDDEN.set(true);
}

fn permitted() -> Result {
    if FORBIDDEN.get() {
        Err(CuError::NOT_PERMITTED)
    } else {
        Ok(())
    }
}

/// The session with the current context, or with the primary one where there is none: for calls that
/// need no context.
pub fn scope_or_primary() -> Result<Scope> {
    match scope() {
        Err(CuError::INVALID_CONTEXT) => Ok(primary_scope(session::session()?, 0)),
        scope => scope,
    }
}

/// The calling thread's scope, or that of the context with a number where the thread has none: for calls that name
/// something which belongs to a context.
#[inline]
pub fn scope_or(number: impl FnOnce() -> Result<u32>) -> Result<Scope> {
    match scope() {
        Err(CuError::INVALID_CONTEXT) => Ok(scope_numbered(session::session()?, number()?)),
        scope => scope,
    }
}

/// As [`scope_or_primary`], for what is about a device whatever the context.
pub fn on_device(device: usize) -> Result<Scope> {
    let scope = scope_or_primary()?;
    Ok(Scope {
        session: scope.session.session().on(device),
        ..scope
    })
}

/// The session and a device's primary context.
pub fn primary_scope(session: &'static Session, device: usize) -> Scope {
    Scope {
        session: session.on(device),
        context: u32::try_from(device).unwrap_or(0),
    }
}

/// What a program holds for the context with a number.
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

/// `cuCtxGetId`: different for every context of the process.
pub fn identity(context: CUcontext) -> Option<u64> {
    let key = find(context)?.1.key()?;
    Some(u64::from(key.generation) << 32 | u64::from(key.index))
}

/// Whether any other context is active than a device's primary one.
pub fn others_active(device: usize) -> bool {
    CONTEXTS
        .live()
        .any(|(handle, context)| Ok(handle) != primary(device) && context.is_active())
}

/// Replaces the top of the calling thread's stack; null takes it off.
pub fn set_current(context: CUcontext) -> Result {
    if FORBIDDEN.get() {
        return Ok(());
    }
    if context.is_null() {
        let below = BELOW.with_borrow_mut(Vec::pop);
        CURRENT.set(std::ptr::with_exposed_provenance_mut(below.unwrap_or(0)));
        return Ok(());
    }
    // A primary context may be made current before anybody retains it; runtimes do so.
    find(context).ok_or(CuError::INVALID_CONTEXT)?;
    CURRENT.set(context);
    Ok(())
}

/// Puts a context on top of the calling thread's stack.
pub fn push(context: CUcontext) -> Result {
    permitted()?;
    find(context).ok_or(CuError::INVALID_CONTEXT)?;
    let covered = CURRENT.replace(context);
    if !covered.is_null() {
        BELOW.with_borrow_mut(|below| below.push(covered.expose_provenance()));
    }
    Ok(())
}

/// Takes the top off the calling thread's stack.
pub fn pop() -> Result<CUcontext> {
    let top = CURRENT.get();
    if top.is_null() {
        return Err(CuError::INVALID_CONTEXT);
    }
    let below = BELOW.with_borrow_mut(Vec::pop);
    CURRENT.set(std::ptr::with_exposed_provenance_mut(below.unwrap_or(0)));
    Ok(top)
}

/// Makes one more user of a primary context.
pub fn retain_primary(device: usize) -> Result<CUcontext> {
    permitted()?;
    let (context, handle) = primary_context(device)?;
    context.retained.fetch_add(1, Ordering::AcqRel);
    if !context.active.swap(true, Ordering::AcqRel)
        && let Some(identity) = identity(handle)
    {
        core_dump::begin(identity);
    }
    Ok(handle)
}

/// One user less; true when it was the last, and the context is to be torn down.
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

/// Makes a primary context inactive, with nobody retaining it.
pub fn deactivate_primary(device: usize) -> Result {
    let (context, _) = primary_context(device)?;
    context.retained.store(0, Ordering::Release);
    context.active.store(false, Ordering::Release);
    Ok(())
}

/// A context of the program's own; it becomes the calling thread's current one.
pub fn create(device: usize, flags: u32) -> Result<CUcontext> {
    let pointer = create_aside(device, flags)?;
    push(pointer)?;
    Ok(pointer)
}

/// The same, current in no thread.
pub fn create_aside(device: usize, flags: u32) -> Result<CUcontext> {
    // The primary contexts' numbers are taken before any other.
    primary(device)?;
    let handle = CONTEXTS.mint(|context| {
        context.device.store(device, Ordering::Relaxed);
        context.flags.store(flags, Ordering::Relaxed);
        context.cache_config.store(0, Ordering::Relaxed);
        context.attached.store(0, Ordering::Relaxed);
        context.active.store(true, Ordering::Release);
    })?;
    let pointer = handle::to_pointer(handle);
    if let Some(identity) = identity(pointer) {
        core_dump::begin(identity);
    }
    Ok(pointer)
}

/// Ends a context that stays known, as one that is destroyed.
pub fn deactivate(context: CUcontext) -> Result {
    let (facts, _) = find_active(context)?;
    facts.active.store(false, Ordering::Release);
    facts.clear(context);
    Ok(())
}

/// Ends a context that [`create`] made.
pub fn destroy(context: CUcontext) -> Result {
    let (facts, handle) = find_active(context)?;
    if handle == primary(facts.device())? {
        return Err(CuError::INVALID_CONTEXT);
    }
    facts.active.store(false, Ordering::Release);
    facts.clear(context);
    if CURRENT.get() == context {
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
