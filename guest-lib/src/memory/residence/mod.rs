//! Residence of managed memory: on the device while the device works with it, on the host while the program does.
//!
//! A large allocation has a home in the arena, and an address in a band of its own, at which both sides see the home or,
//! each by itself, something else. It begins in its home, where host and device reach it at the same time, and comes to
//! the device in steps that keep every access right:
//!
//! - At the first work after the program has used the allocation, the library takes the pages away from the program
//!   ([`Place::Watched`]). The device still reaches the home. A program that accesses the allocation while the device
//!   works gets the home back for good ([`Place::Shared`]): kernel and program then see each other's writes at once, as
//!   kernels that wait for the program need it.
//! - If the work has ended without such an access, the worker puts memory of the device at the allocation's addresses
//!   ([`Place::Device`]). The program's pages are absent.
//! - An access of the program waits until the device is idle, fetches the part of [`PART`] bytes (and its neighbours, if
//!   accesses are sequential) into the home, and maps that. Before the next work the gate (`session::gate`) gives the
//!   parts back: the pages become absent in one step, and the worker copies the parts to the device.
//!
//! Memory that the program advises to be read mostly stays on both sides as far as neither changes it ([`mirror`]).
//!
//! So the device works or the program writes a part, never both. The exception is an allocation that is on the device
//! already when a kernel waits for the program: an access that has waited for [`PATIENCE`] goes on, and every
//! [`TICK`] the bytes that the program has changed go to the device, and the device's changes come to the
//! program at its next access. There is no order between the bytes of one tick. Atomic operations of both sides on one
//! word lose updates.
//!
//! The state belongs to one lock. A thread that holds it never accesses managed memory, and never waits for a passage of
//! the gate longer than [`PATIENCE`]. Signals to it are blocked, because their handlers may access managed memory.

mod allocation;
mod mirror;
mod service;

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use wormhole_api::{DevicePtr, ManagedClose, ManagedIdle, ManagedOpen};
use wormhole_lock::{Mutex, MutexGuard};
use wormhole_ring::arena::Arena;
use wormhole_ring::band;
use wormhole_ring::layout::{MANAGED, MANAGED_ALIGN, SEGMENT_BYTES};

use self::allocation::{Fetched, Given, Managed, Part, Place, wait_until, wake};
use self::mirror::{Mirror, Unused};
use crate::error::{CuError, Result};
use crate::faults::{Access, Faults};
use crate::log;
use crate::session::{OnDevice, gate};
use crate::signals::BlockedSignals;

/// Bytes of a part, the unit in which memory changes sides. The window of a VM can be mapped in no smaller one.
const PART: u64 = SEGMENT_BYTES as u64;
/// Bytes of the smallest allocation that changes sides.
const SMALLEST: u64 = 1 << 20;
/// Longest time that an access waits for the device to become idle.
const PATIENCE: Duration = Duration::from_millis(50);
/// Time that streams may take to be idle after the fences behind their work are written.
const SETTLING: Duration = Duration::from_millis(1);
/// Time between exchanges of parts that both sides use.
const TICK: Duration = Duration::from_millis(1);
/// Greatest number of parts that both sides use between two ticks.
const MOST_TAINTED: usize = 8;

#[derive(Debug, Default)]
struct State {
    /// Addresses of the band. Empty before the first allocation.
    band: Arena,
    allocations: BTreeMap<u64, Managed>,
    /// Parts that both sides use, by address.
    tainted: Vec<u64>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
/// Descriptor of absent pages; nothing if this process may not use one.
static FAULTS: LazyLock<Option<Arc<Faults>>> = LazyLock::new(service::start);
/// Whether the program has ever had an allocation that changes sides.
static IS_USED: AtomicBool = AtomicBool::new(false);
/// Whether an allocation is watched.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

/// The locked state. No handler of a signal runs on the thread meanwhile.
struct Locked {
    state: MutexGuard<'static, State>,
    /// Dropped last.
    _signals: BlockedSignals,
}

impl Deref for Locked {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

fn state() -> Locked {
    let signals = BlockedSignals::new();
    Locked {
        state: STATE.lock(),
        _signals: signals,
    }
}

/// Returns true if the program's pages can be taken away and given back.
pub fn is_possible() -> bool {
    FAULTS.is_some()
}

/// Allocates managed memory that changes sides. Returns nothing if the allocation is small, or this is impossible.
pub fn allocate(session: OnDevice, bytes: u64) -> Result<Option<u64>> {
    if bytes < SMALLEST || session.devices().len() != 1 || !is_possible() {
        return Ok(None);
    }
    let bytes = bytes
        .checked_next_multiple_of(PART)
        .ok_or(CuError::OUT_OF_MEMORY)?;
    let home = session.allocate_arena(bytes, PART)?;
    let opened = open(session, home, bytes);
    if !matches!(opened, Ok(Some(_))) {
        session.free_arena(home);
    }
    opened
}

fn open(session: OnDevice, home: u64, bytes: u64) -> Result<Option<u64>> {
    gate::keep(gate::Keeper {
        open: open_gate,
        refresh,
    });
    IS_USED.store(true, Ordering::Relaxed);
    let mut state = state();
    let Some(base) = state.take(bytes) else {
        return Ok(None);
    };
    let message = ManagedOpen {
        address: DevicePtr(base),
        home: DevicePtr(home),
        bytes,
    };
    // From now on the worker notes the work of streams that are destroyed.
    let opened = match session.request_after_end(&ManagedIdle {}, |()| ()) {
        Ok(()) | Err(CuError::NOT_READY) => session.request_after_end(&message, |()| ()),
        Err(error) => Err(error),
    };
    let opened = opened.and_then(|()| {
        session.map_again(base, home, bytes).map_err(|error| {
            log::error_once!("managed memory cannot be mapped: {error}");
            CuError::OUT_OF_MEMORY
        })
    });
    match opened {
        Ok(()) => {
            let managed = Managed {
                session,
                base,
                bytes,
                home,
                place: Place::Home,
                is_proven: false,
                next: (0, 0),
                mirror: Mirror::None,
            };
            state.allocations.insert(base, managed);
            gate::close();
            Ok(Some(base))
        }
        Err(error) => {
            state.give_back(base, bytes);
            match error {
                CuError::NOT_SUPPORTED => Ok(None),
                error => Err(error),
            }
        }
    }
}

/// Frees an allocation, with which the device has finished. Returns false for an allocation that does not change sides.
pub fn free(base: u64) -> bool {
    if !IS_USED.load(Ordering::Relaxed) {
        return false;
    }
    let mut locked = state();
    let Some(managed) = locked.allocations.remove(&base) else {
        return false;
    };
    let (bytes, session, home) = (managed.bytes, managed.session, managed.home);
    locked
        .tainted
        .retain(|part| !(base..base + bytes).contains(part));
    locked.note();
    // The worker waits for work of other threads, and that perhaps for a thread that waits for the lock.
    drop(locked);
    let address = DevicePtr(base);
    let closed = session.request_after_end(&ManagedClose { address }, |()| ());
    // Threads that still wait for an access go on, and fault as after a native free.
    state().give_back(base, bytes);
    wake(base, bytes);
    match closed {
        Ok(()) => session.free_arena(home),
        // The home stays until the session ends.
        Err(error) => log::debug!("managed memory cannot be freed: {error}"),
    }
    true
}

/// Returns true if memory of the device is at the address of managed memory.
pub fn is_placed(address: u64) -> bool {
    IS_USED.load(Ordering::Relaxed)
        && state()
            .find(address)
            .is_some_and(|managed| matches!(managed.place, Place::Device { .. }))
}

/// Leaves an allocation in its home for good, unless it is on the device already: something names it as host memory, or
/// the device itself waits for it.
pub fn keep_home(address: u64) {
    if !IS_USED.load(Ordering::Relaxed) {
        return;
    }
    let mut state = state();
    if let Some(managed) = state.find(address)
        && matches!(managed.place, Place::Home | Place::Watched)
    {
        managed.come_home(Place::Shared);
    }
}

/// Moves an allocation to the device if the device is idle. No use of it need be known: the program has announced one.
pub fn expect_device(address: u64) {
    if !IS_USED.load(Ordering::Relaxed) {
        return;
    }
    let mut state = state();
    // A part that both sides use has a twin: only bytes that differ from the twin go to the device.
    state.push_tainted();
    if let Some(managed) = state.find(address) {
        managed.is_proven = true;
        let base = managed.base;
        state.give(base);
    }
    state.note();
}

/// Notes whether the program has advised that a whole allocation is mostly read.
pub fn advise_read_mostly(base: u64, advised: bool) {
    if !IS_USED.load(Ordering::Relaxed) {
        return;
    }
    let mut state = state();
    if let Some(managed) = state.find(base) {
        managed.advise_read_mostly(advised);
        if !advised {
            gate::close();
            // A busy device has it until the next fetch.
            let _ = wait_until(Duration::ZERO, || managed.renew_mirror());
        }
    }
    state.note();
}

/// Returns true if an allocation has a mirror.
pub fn has_mirrors() -> bool {
    mirror_bytes() != 0
}

/// Returns the bytes of all mirrors, which an allocation gets that finds no other memory.
pub fn mirror_bytes() -> u64 {
    if !IS_USED.load(Ordering::Relaxed) {
        return 0;
    }
    let state = state();
    let managed = state.allocations.values();
    let mirrored =
        managed.filter(|managed| !matches!(managed.mirror, Mirror::None | Mirror::Wanted));
    mirrored.map(|managed| managed.bytes).sum()
}

/// Frees the mirrors of allocations that are mostly read. Returns false if there are none.
pub fn free_mirrors() -> bool {
    if !IS_USED.load(Ordering::Relaxed) {
        return false;
    }
    let mut state = state();
    let ended = state.end_mirrors();
    // The worker waits for the device, and that perhaps for a thread that waits for the lock.
    drop(state);
    ended.iter().for_each(Unused::free);
    !ended.is_empty()
}

/// Moves allocations that the program has not accessed during the work that has just ended to the device.
#[inline]
pub fn settle() {
    if IS_WATCHED.load(Ordering::Relaxed) {
        settle_watched();
    }
}

#[cold]
fn settle_watched() {
    let mut state = state();
    for base in state.bases() {
        if let Some(managed) = state.find(base)
            && managed.place == Place::Watched
        {
            managed.is_proven = true;
            state.give(base);
            // The device still works. No other allocation comes to it either.
            if state
                .find(base)
                .is_some_and(|managed| managed.place == Place::Watched)
            {
                break;
            }
        }
    }
    state.note();
}

/// Gives the device everything that the program uses, and opens the gate.
fn open_gate() {
    let mut state = state();
    state.push_tainted();
    for base in state.bases() {
        state.give(base);
    }
    state.note();
    gate::open();
}

fn refresh() {
    state().push_tainted();
}

impl State {
    /// Reserves addresses of the band, at which the program has mapped nothing.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        if self.band.capacity() == 0 {
            self.band.add_extent(MANAGED.0, MANAGED.1).ok()?;
        }
        let room = bytes.checked_add(MANAGED_ALIGN)?;
        loop {
            let address = self.band.allocate(room, MANAGED_ALIGN).ok()?.address;
            if band::reserve(address, bytes).is_ok() {
                return Some(address);
            }
            // The addresses stay allocated: something else is there.
        }
    }

    /// Unmaps addresses that [`State::take`] has reserved.
    fn give_back(&mut self, address: u64, bytes: u64) {
        // SAFETY: the range was reserved, and the program uses memory there no more than after any free.
        unsafe { band::release(address, bytes) };
        // The address was allocated, so this cannot fail.
        let _ = self.band.free(address);
    }

    fn find(&mut self, address: u64) -> Option<&mut Managed> {
        let (_, managed) = self.allocations.range_mut(..=address).next_back()?;
        (address - managed.base < managed.bytes).then_some(managed)
    }

    /// Returns the addresses of all allocations.
    fn bases(&self) -> Vec<u64> {
        self.allocations.keys().copied().collect()
    }

    /// Gives the device what the program uses of an allocation. Mirrors make room for it if the device has none.
    fn give(&mut self, base: u64) {
        let give = |state: &mut Self| state.find(base).map(Managed::give) == Some(Given::NoRoom);
        if !give(self) {
            return;
        }
        let ended = self.end_mirrors();
        // The device is idle.
        ended.iter().for_each(Unused::free);
        if ended.is_empty() || give(self) {
            log::debug!("managed memory stays on the host: the device has no room for it");
            self.find(base)
                .into_iter()
                .for_each(|managed| managed.come_home(Place::Shared));
        }
    }

    /// Ends the mirrors of all allocations, and returns those that the worker has.
    fn end_mirrors(&mut self) -> Vec<Unused> {
        let ended = self.allocations.values_mut().filter_map(|managed| {
            managed.end_mirror();
            managed.take_ended()
        });
        ended.collect()
    }

    /// Publishes whether an allocation is watched, and opens the gate if the program uses nothing that the device must
    /// have.
    fn note(&self) {
        let any = |is: fn(&Managed) -> bool| self.allocations.values().any(is);
        let is_watched = any(|managed| managed.place == Place::Watched);
        IS_WATCHED.store(is_watched, Ordering::Relaxed);
        let in_use = any(|managed| match &managed.place {
            Place::Home => true,
            Place::Device { parts } => parts.iter().any(|part| part.is_mapped()),
            Place::Watched | Place::Shared => false,
        });
        if !in_use {
            gate::open();
        }
    }

    /// Serves an access of the program to an absent page.
    fn serve(&mut self, access: Access) {
        let address = access.address;
        let tainted = self.tainted.len();
        if self.find(address).is_some_and(|managed| managed.is_full()) {
            self.push_tainted();
            if let Some(base) = self.find(address).map(|managed| managed.base) {
                self.give(base);
            }
        }
        let Some(managed) = self.find(address) else {
            // Freed meanwhile, and mapped.
            wake(address, 1);
            return;
        };
        match &managed.place {
            Place::Home | Place::Shared => wake(address, 1),
            Place::Watched => {
                managed.watched_access();
                self.note();
            }
            Place::Device { parts } => {
                let part = managed.part(address);
                match parts.get(part) {
                    Some(Part::Absent | Part::Copied) => {}
                    Some(Part::Shown) if access.writes => {
                        managed.let_write(part);
                        return;
                    }
                    Some(Part::Shown | Part::Used) | None => {
                        wake(address, 1);
                        return;
                    }
                }
                if managed.absent_access(part, access.writes) == Fetched::Busy {
                    if tainted >= MOST_TAINTED {
                        self.push_tainted();
                    }
                    self.fetch_tainted(address);
                }
            }
        }
    }

    /// Fetches a part while the device works.
    fn fetch_tainted(&mut self, address: u64) {
        let Some(managed) = self.find(address) else {
            return;
        };
        let part = managed.part(address);
        let start = managed.base + part as u64 * PART;
        // Known before the program has the part: a thread that synchronizes meanwhile waits for the lock, and the end of a
        // host function brings what it has written to the device.
        self.tainted.push(start);
        gate::set_stale(true);
        if let Some(managed) = self.find(address)
            && managed.fetch_parts(part, 1, true).is_err()
        {
            managed.come_home(Place::Shared);
        }
    }

    /// Exchanges the parts that both sides use.
    fn push_tainted(&mut self) {
        for address in std::mem::take(&mut self.tainted) {
            // Both sides see an allocation that has come home for good.
            if let Some(managed) = self.find(address)
                && matches!(managed.place, Place::Device { .. })
            {
                let part = managed.part(address);
                managed.push(part);
            }
        }
        gate::set_stale(false);
    }
}
