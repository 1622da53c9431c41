//! Copies memory, and large memory by several threads: one processor copies far more slowly than the device does, and than
//! memory allows.
//!
//! The program's threads may write to the memory meanwhile. So it is copied by the C library's function and by instructions
//! that the compiler does not know.
//!
//! A caller may hold writers of some pages (`pages.rs`), which may be any memory of the program, this library's own data and
//! stacks too. Nothing that takes part in its copy may wait for these pages. So a copy is shared without an allocation or a
//! lock: the threads meet in one static variable, and a thread that helps writes to nothing but that, the destination, its
//! stack and its thread data. The caller compares the held pages with all of these first.
//!
//! A thread helps only a caller that has the same rights to memory with protection keys, so that it meets no fault that the
//! caller would not.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
use std::ptr::null_mut;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::thread::futex;

use crate::log;
use crate::pages::{self, Pages};
use crate::signals::spawn_quiet;

/// Bytes from which memory is large: waking a thread costs as much as copying some hundred KiB.
pub const LARGE: usize = 4 << 20;
/// Bytes from which a part of large memory is shared.
const SHARED: usize = 128 << 10;
/// Most bytes that a thread takes at once. A thread that the kernel has stopped keeps the caller waiting for no more.
const MOST_TAKEN: usize = 1 << 20;
/// Threads that help.
const HELPERS: usize = 3;
/// Looks of a helping thread for work before it sleeps, some 200 µs.
const LOOKS: u32 = 4000;
/// Looks of the caller for the end of a helping thread's work, before it leaves the processor to threads of less priority.
const YIELDS: u32 = 1000;
const PAUSE: Duration = Duration::from_micros(50);
/// Stack bytes, with room for a handler of the program for faults in its own memory.
const STACK: usize = 256 << 10;

/// Number of threads that may help, which depends on the processors: the program and the backend need some themselves.
static MAY_HELP: LazyLock<usize> = LazyLock::new(|| {
    if cfg!(test) {
        return HELPERS;
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / 2).saturating_sub(1).min(HELPERS)
});

/// Manner in which the processor stores memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// In the caches: for a staging buffer, and for memory of the program that they can hold.
    Cached,
    /// Past the caches, so that the processor does not first read what it overwrites (an H200's host: 15 against 8 GB/s).
    Streaming,
}

/// Memory that is to be copied, and the place of the copy.
#[derive(Clone, Copy, Debug)]
pub struct Bulk {
    to: *mut u8,
    from: *const u8,
    bytes: usize,
    stores: Stores,
}

impl Bulk {
    /// # Safety
    /// `bytes` at `from` are readable and `bytes` at `to` are writable until they are copied, and do not overlap.
    pub const unsafe fn new(to: *mut u8, from: *const u8, bytes: usize, stores: Stores) -> Self {
        Self {
            to,
            from,
            bytes,
            stores,
        }
    }

    /// Copies the memory, which is a part of large memory, with the help of other threads. Returns when all is copied.
    ///
    /// `held` are pages whose writers may wait for the caller, none of them its own ([`pages::are_own`]). With them no thread is
    /// started: the caller has called [`start`] before.
    pub fn copy_shared(self, held: Option<Pages>) {
        if held.is_none() {
            start(self.bytes);
        }
        TEAM.copy(self, held);
    }

    /// Copies the memory on the calling thread.
    pub fn copy_alone(self) {
        const BLOCK: usize = 64;
        let Self {
            to, from, bytes, ..
        } = self;
        let (head, body) = match self.stores {
            Stores::Cached => (bytes, 0),
            Stores::Streaming => {
                let head = to.align_offset(BLOCK).min(bytes);
                (head, (bytes - head) / BLOCK * BLOCK)
            }
        };
        let done = head + body;
        // SAFETY: both ranges are valid for the copy and apart (`Bulk::new`). `head` aligns the destination, `body` is whole
        // blocks, at least one where the loop starts. Only a fence orders the loop's stores.
        unsafe {
            libc::memcpy(to.cast(), from.cast(), head);
            if body > 0 {
                asm!(
                    "2:",
                    "movdqu {a}, [{from}]",
                    "movdqu {b}, [{from} + 16]",
                    "movdqu {c}, [{from} + 32]",
                    "movdqu {d}, [{from} + 48]",
                    "movntdq [{to}], {a}",
                    "movntdq [{to} + 16], {b}",
                    "movntdq [{to} + 32], {c}",
                    "movntdq [{to} + 48], {d}",
                    "add {from}, 64",
                    "add {to}, 64",
                    "sub {left}, 64",
                    "jnz 2b",
                    "sfence",
                    from = inout(reg) from.add(head) => _,
                    to = inout(reg) to.add(head) => _,
                    left = inout(reg) body => _,
                    a = out(xmm_reg) _,
                    b = out(xmm_reg) _,
                    c = out(xmm_reg) _,
                    d = out(xmm_reg) _,
                    options(nostack),
                );
            }
            libc::memcpy(to.add(done).cast(), from.add(done).cast(), bytes - done);
        }
    }

    /// Returns the part of at most `most` bytes at an offset; `None` behind the end.
    fn part(self, offset: usize, most: usize) -> Option<Self> {
        let left = self.bytes.checked_sub(offset).filter(|left| *left > 0)?;
        Some(Self {
            to: self.to.wrapping_add(offset),
            from: self.from.wrapping_add(offset),
            bytes: left.min(most),
            ..self
        })
    }

    /// Returns the number of threads that help.
    const fn helpers(self) -> usize {
        helpers(self.bytes)
    }
}

const fn helpers(bytes: usize) -> usize {
    match bytes {
        ..SHARED => 0,
        SHARED..LARGE => 1,
        LARGE.. => HELPERS,
    }
}

/// Starts the threads that help to copy so much, unless they run or the processors are too few.
pub fn start(bytes: usize) {
    TEAM.start(helpers(bytes).min(*MAY_HELP));
}

static TEAM: Team = Team::new();

/// Threads that share one copy at a time.
struct Team {
    /// Whether a caller shares a copy now. Other callers copy alone.
    in_use: AtomicBool,
    to: AtomicPtr<u8>,
    from: AtomicPtr<u8>,
    bytes: AtomicUsize,
    streaming: AtomicBool,
    /// Offset of the part that no thread has taken yet.
    next: AtomicUsize,
    helpers: [Helper; HELPERS],
}

impl Team {
    const fn new() -> Self {
        Self {
            in_use: AtomicBool::new(false),
            to: AtomicPtr::new(null_mut()),
            from: AtomicPtr::new(null_mut()),
            bytes: AtomicUsize::new(0),
            streaming: AtomicBool::new(false),
            next: AtomicUsize::new(0),
            helpers: [const { Helper::new() }; HELPERS],
        }
    }

    fn start(&'static self, count: usize) {
        for helper in self.helpers.iter().take(count) {
            helper.start(self);
        }
    }

    /// Copies with the help of the threads that are not too late.
    fn copy(&self, bulk: Bulk, held: Option<Pages>) {
        let own = Pages::around((&raw const *self).addr() as u64, size_of::<Self>() as u64);
        let is_apart = |own: Pages| held.is_none_or(|held| !held.overlap(own));
        let is_shared = bulk.helpers() > 0 && own.is_some_and(is_apart);
        if !is_shared || self.in_use.swap(true, Ordering::Acquire) {
            return bulk.copy_alone();
        }
        self.enter(bulk);
        let helpers = &self.helpers[..bulk.helpers()];
        for helper in helpers {
            if helper.own().is_some_and(is_apart) && helper.has_rights_of_caller() {
                helper.invite();
            }
        }
        self.work();
        helpers.iter().for_each(Helper::dismiss);
        self.in_use.store(false, Ordering::Release);
    }

    /// Sets what is copied next. An invitation publishes it.
    fn enter(&self, bulk: Bulk) {
        self.to.store(bulk.to, Ordering::Relaxed);
        self.from.store(bulk.from.cast_mut(), Ordering::Relaxed);
        self.bytes.store(bulk.bytes, Ordering::Relaxed);
        let streaming = bulk.stores == Stores::Streaming;
        self.streaming.store(streaming, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
    }

    fn entered(&self) -> Bulk {
        Bulk {
            to: self.to.load(Ordering::Relaxed),
            from: self.from.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            stores: match self.streaming.load(Ordering::Relaxed) {
                true => Stores::Streaming,
                false => Stores::Cached,
            },
        }
    }

    /// Copies parts until all are taken.
    fn work(&self) {
        let bulk = self.entered();
        // Parts end between two pages of whole pages.
        let part = (bulk.bytes / (bulk.helpers() + 1)).next_multiple_of(4096);
        let part = part.min(MOST_TAKEN);
        while let Some(part) = bulk.part(self.next.fetch_add(part, Ordering::Relaxed), part) {
            part.copy_alone();
        }
    }
}

/// A thread that helps. Each has cache lines of its own.
#[repr(align(128))]
struct Helper {
    is_started: AtomicBool,
    /// One of the states below.
    state: AtomicU32,
    /// Start and end of the memory of [`Helper::own`].
    own: [AtomicU64; 2],
    key_rights: AtomicU32,
}

/// The thread is not ready, or cannot be started.
const ABSENT: u32 = 0;
/// The thread looks for an invitation.
const AWAKE: u32 = 1;
/// The thread sleeps until an invitation, or is about to.
const ASLEEP: u32 = 2;
const INVITED: u32 = 3;
/// The thread uses what its team has entered.
const AT_WORK: u32 = 4;

impl Helper {
    const fn new() -> Self {
        Self {
            is_started: AtomicBool::new(false),
            state: AtomicU32::new(ABSENT),
            own: [const { AtomicU64::new(0) }; 2],
            key_rights: AtomicU32::new(0),
        }
    }

    /// Starts the thread, if nothing has tried yet.
    fn start(&'static self, team: &'static Team) {
        if self.is_started.load(Ordering::Relaxed) || self.is_started.swap(true, Ordering::Relaxed)
        {
            return;
        }
        if let Err(error) = spawn_quiet("wormhole-copy", STACK, || self.serve(team)) {
            log::debug!("large copies have a thread less: {error}");
        }
    }

    /// Returns the memory that the thread and the kernel for it write at any time, once it is ready.
    fn own(&self) -> Option<Pages> {
        let is_ready = self.state.load(Ordering::Acquire) != ABSENT;
        let [start, end] = [0, 1].map(|n| self.own[n].load(Ordering::Relaxed));
        is_ready.then_some(Pages { start, end })
    }

    /// Returns true if a thread that is ready can access the memory that the calling thread can access.
    fn has_rights_of_caller(&self) -> bool {
        self.key_rights.load(Ordering::Relaxed) == key_rights()
    }

    /// Changes the state, if it is the first one.
    fn moves(&self, from: u32, to: u32) -> bool {
        let order = Ordering::AcqRel;
        let moved = self
            .state
            .compare_exchange(from, to, order, Ordering::Relaxed);
        moved.is_ok()
    }

    fn invite(&self) {
        if !self.moves(AWAKE, INVITED) && self.moves(ASLEEP, INVITED) {
            let _ = futex::wake(&self.state, futex::Flags::PRIVATE, 1);
        }
    }

    /// Takes an invitation back, or waits until the thread has copied its last part.
    fn dismiss(&self) {
        if self.moves(INVITED, AWAKE) {
            return;
        }
        let mut looks = 0;
        while self.state.load(Ordering::Acquire) == AT_WORK {
            if looks < YIELDS {
                looks += 1;
                std::thread::yield_now();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn serve(&self, team: &Team) {
        let own = match pages::own() {
            Ok(own) => own,
            Err(error) => return log::debug!("large copies have a thread less: {error}"),
        };
        let (start, end) = (own.map(|own| own.start), own.map(|own| own.end));
        let places = [start.into_iter().min(), end.into_iter().max()];
        for (place, address) in self.own.iter().zip(places) {
            place.store(address.unwrap_or(0), Ordering::Relaxed);
        }
        self.key_rights.store(key_rights(), Ordering::Relaxed);
        self.state.store(AWAKE, Ordering::Release);
        let mut looks = 0;
        loop {
            if self.state.load(Ordering::Relaxed) == INVITED && self.moves(INVITED, AT_WORK) {
                team.work();
                self.state.store(AWAKE, Ordering::Release);
                looks = 0;
            } else if looks < LOOKS {
                looks += 1;
                std::hint::spin_loop();
            } else if self.moves(AWAKE, ASLEEP) {
                while self.state.load(Ordering::Relaxed) == ASLEEP {
                    let _ = futex::wait(&self.state, futex::Flags::PRIVATE, ASLEEP, None);
                }
                looks = 0;
            }
        }
    }
}

/// Returns the calling thread's rights to memory with protection keys (pkeys(7)). Threads of a program that uses none have the
/// same. Only the first call may write to a static variable.
fn key_rights() -> u32 {
    static HAS_KEYS: LazyLock<bool> = LazyLock::new(|| {
        /// Leaf of features, and the bit of a system that has enabled the keys (`OSPKE`).
        const FEATURES: u32 = 7;
        const ENABLED: u32 = 1 << 4;
        __get_cpuid_max(0).0 >= FEATURES && __cpuid_count(FEATURES, 0).ecx & ENABLED != 0
    });
    let mut rights = 0;
    if *HAS_KEYS {
        // SAFETY: the instruction exists, and reads a register of the thread.
        unsafe {
            asm!(
                "rdpkru",
                in("ecx") 0,
                out("eax") rights,
                out("edx") _,
                options(nomem, nostack, preserves_flags),
            );
        }
    }
    rights
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(seed: usize, length: usize) -> Vec<u8> {
        let byte = |n: usize| u8::try_from((n * 31 + n / 251 + seed) % 256).unwrap();
        (0..length).map(byte).collect()
    }

    /// Copies between vectors at some offset each, and compares.
    fn check(seed: usize, offsets: [usize; 2], length: usize, stores: Stores, copy: impl Fn(Bulk)) {
        let source = bytes(seed, offsets[1] + length);
        let mut destination = vec![0xee; offsets[0] + length + 64];
        let (to, from) = (
            destination.as_mut_ptr().wrapping_add(offsets[0]),
            source.as_ptr().wrapping_add(offsets[1]),
        );
        copy(Bulk {
            to,
            from,
            bytes: length,
            stores,
        });
        let destination = std::hint::black_box(destination);
        let (before, rest) = destination.split_at(offsets[0]);
        let (copied, after) = rest.split_at(length);
        assert!(before.iter().chain(after).all(|byte| *byte == 0xee));
        assert!(copied == &source[offsets[1]..], "{offsets:?} {length}");
    }

    /// Starts the threads of a team, and waits until they are ready.
    fn started(team: &'static Team) {
        team.start(HELPERS);
        for helper in &team.helpers {
            while helper.own().is_none() {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn memory_of_any_length_and_alignment_is_copied_and_nothing_beside_it() {
        for (seed, length) in [0, 1, 15, 16, 17, 63, 64, 65, 128, 4095, 4097, 70_001]
            .into_iter()
            .enumerate()
        {
            for offsets in [[0, 0], [1, 0], [7, 13], [16, 3], [63, 15], [64, 1]] {
                for stores in [Stores::Cached, Stores::Streaming] {
                    check(seed, offsets, length, stores, Bulk::copy_alone);
                }
            }
        }
    }

    #[test]
    fn memory_of_many_callers_is_whole_whoever_copies_its_parts() {
        static OWN: Team = Team::new();
        started(&OWN);
        std::thread::scope(|scope| {
            for caller in 0..3 {
                scope.spawn(move || {
                    for round in 0..100 {
                        let length = match round % 10 {
                            9 => LARGE - 4096 + 977 * round,
                            _ => SHARED - 4096 + 977 * round,
                        };
                        let stores = [Stores::Cached, Stores::Streaming][round % 2];
                        check(caller + round, [round, 5], length, stores, |bulk| {
                            OWN.copy(bulk, None);
                        });
                    }
                });
            }
        });
    }

    #[test]
    fn threads_that_help_copy_all_that_the_caller_leaves_to_them() {
        static OWN: Team = Team::new();
        started(&OWN);
        for round in 0..20 {
            // They have to be woken, each alone in some rounds.
            let helpers = match round % 4 {
                HELPERS => &OWN.helpers[..],
                one => &OWN.helpers[one..=one],
            };
            for helper in &OWN.helpers {
                while helper.state.load(Ordering::Relaxed) != ASLEEP {
                    std::thread::yield_now();
                }
            }
            let length = [SHARED, LARGE][round % 2] + 977 * round;
            check(round, [1, 5], length, Stores::Streaming, |bulk| {
                OWN.enter(bulk);
                helpers.iter().for_each(Helper::invite);
                while OWN.next.load(Ordering::Relaxed) < length {
                    std::thread::yield_now();
                }
                helpers.iter().for_each(Helper::dismiss);
            });
        }
    }

    #[test]
    fn no_thread_helps_whose_memory_is_held() {
        static OWN: Team = Team::new();
        started(&OWN);
        let all = || OWN.helpers.iter().map(|helper| helper.own().unwrap());
        let team = (&raw const OWN).addr() as u64;
        let team = Pages::around(team, 1).unwrap();
        let asleep = |helper: &Helper| helper.state.load(Ordering::Relaxed) == ASLEEP;
        for (held, helping) in all().map(|own| (own, HELPERS - 1)).chain([
            (team, 0),
            (
                Pages {
                    start: 0,
                    end: u64::MAX,
                },
                0,
            ),
        ]) {
            while !OWN.helpers.iter().all(asleep) {
                std::thread::yield_now();
            }
            let is_held = |helper: &&Helper| held.overlap(helper.own().unwrap());
            check(3, [0, 0], LARGE, Stores::Cached, |bulk| {
                OWN.copy(bulk, Some(held));
                assert!(OWN.helpers.iter().filter(is_held).all(asleep), "{held:?}");
                // A thread that was invited looks for more work for some time.
                let awake = OWN.helpers.iter().filter(|helper| !asleep(helper));
                assert!(awake.count() <= helping, "{held:?}");
            });
        }
    }

    #[test]
    fn no_thread_helps_that_has_other_rights_to_memory() {
        static OWN: Team = Team::new();
        started(&OWN);
        assert!(OWN.helpers.iter().all(Helper::has_rights_of_caller));
        for helper in &OWN.helpers {
            helper.key_rights.store(!key_rights(), Ordering::Relaxed);
            while helper.state.load(Ordering::Relaxed) != ASLEEP {
                std::thread::yield_now();
            }
        }
        check(3, [0, 0], LARGE, Stores::Cached, |bulk| {
            OWN.copy(bulk, None);
            let states = OWN.helpers.iter().map(|helper| &helper.state);
            assert!(
                states
                    .map(|state| state.load(Ordering::Relaxed))
                    .all(|state| state == ASLEEP)
            );
        });
    }
}
