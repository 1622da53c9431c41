//! Gate before the records by which the device executes work of the program.
//!
//! The memory layer closes the gate while the program holds pages that the device must have first. A thread that finds it
//! closed opens it, by the function that the memory layer has set. [`Passage`] marks a thread between the gate and the
//! ring: once the gate is closed and no passage is left ([`is_quiet`]), the ring contains all work of the program.
//!
//! Programs without such memory pay for one relaxed load.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use wormhole_api::{
    GraphLaunch, LaunchKernel, MemCopy, MemCopy3d, MemSet, MemWrite, Message, StreamMemory,
};

/// Messages by which the device reads or writes memory of the program.
const WORK: [u16; 7] = [
    LaunchKernel::ID,
    GraphLaunch::ID,
    MemCopy::ID,
    MemCopy3d::ID,
    MemSet::ID,
    MemWrite::ID,
    StreamMemory::ID,
];

const fn is_work(message: u16) -> bool {
    let mut index = 0;
    while index < WORK.len() {
        if WORK[index] == message {
            return true;
        }
        index += 1;
    }
    false
}

/// Functions of the memory layer.
#[derive(Clone, Copy, Debug)]
pub struct Keeper {
    /// Gives the device what it must have, and opens the gate.
    pub open: fn(),
    /// Takes pages from the program that work has made stale.
    pub refresh: fn(),
}

static KEEPER: OnceLock<Keeper> = OnceLock::new();
/// Whether there is a keeper.
static IS_KEPT: AtomicBool = AtomicBool::new(false);
static IS_CLOSED: AtomicBool = AtomicBool::new(false);
static IS_STALE: AtomicBool = AtomicBool::new(false);
static PASSAGES: AtomicUsize = AtomicUsize::new(0);

/// A thread between the gate and the ring.
#[derive(Debug)]
pub struct Passage(());

impl Drop for Passage {
    fn drop(&mut self) {
        PASSAGES.fetch_sub(1, Ordering::Release);
    }
}

/// Passes the gate, if the message is work.
#[inline]
pub fn enter<M: Message>() -> Option<Passage> {
    if const { is_work(M::ID) } && IS_KEPT.load(Ordering::Relaxed) {
        Some(pass())
    } else {
        None
    }
}

fn pass() -> Passage {
    loop {
        // In one order with `close` and `is_quiet`: either this sees the closed gate, or they see the passage.
        PASSAGES.fetch_add(1, Ordering::SeqCst);
        let passage = Passage(());
        if !IS_CLOSED.load(Ordering::SeqCst) {
            return passage;
        }
        drop(passage);
        if let Some(keeper) = KEEPER.get() {
            (keeper.open)();
        }
    }
}

/// Sets the keeper. Only the first call has an effect.
pub fn keep(keeper: Keeper) {
    KEEPER.get_or_init(|| keeper);
    IS_KEPT.store(true, Ordering::SeqCst);
}

pub fn close() {
    IS_CLOSED.store(true, Ordering::SeqCst);
}

pub fn open() {
    IS_CLOSED.store(false, Ordering::SeqCst);
}

/// Returns true if no thread is between the gate, which is closed, and the ring.
pub fn is_quiet() -> bool {
    PASSAGES.load(Ordering::SeqCst) == 0
}

/// Sets whether the program holds pages that work may have changed on the device since.
pub fn set_stale(stale: bool) {
    IS_STALE.store(stale, Ordering::SeqCst);
}

/// Takes stale pages from the program, before it learns that work is complete.
#[inline]
pub fn refresh() {
    if IS_STALE.load(Ordering::Relaxed)
        && let Some(keeper) = KEEPER.get()
    {
        (keeper.refresh)();
    }
}
