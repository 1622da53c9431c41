//! Tables of the guest's handles and the facts behind each.
//!
//! A handle is a number inside a reserved band of addresses. Its validity is arithmetic, so a forged handle is an error
//! and is never dereferenced. Entries are never freed: a reader that races with a destroy sees an old entry, not freed
//! memory. Reading takes no lock.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use wormhole_api::handle::{ALIGNMENT, BAND_SIZE, GENERATIONS, Handle, HandleKind, INDICES, Key};
use wormhole_lock::Mutex;
use wormhole_ring::layout::HANDLE_BASE;

use crate::error::{CuError, Result};

const SEGMENT: usize = 1024;
const SEGMENTS: usize = INDICES as usize / SEGMENT;
/// Set in an entry's generation word while it is live.
const LIVE: u32 = 1 << 31;

/// Map by handles, by other numbers that this library makes, or by names in the program's own code. A program that chose
/// keys to collide would only slow itself down, so their hash need not prevent it.
pub type HandleMap<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

pub type HandleSet<K> = HashSet<K, BuildHasherDefault<Mix>>;

/// Hash of [`HandleMap`]. The multiplication carries all bits of a number upwards. The map uses both ends of the result, so
/// it is turned until the highest bits are at the lower end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.write_u64(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.write_u64(u64::from_le_bytes(last));
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        /// 2⁶⁴ divided by the golden ratio, odd.
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        self.0 = (self.0 ^ number).wrapping_mul(GOLDEN);
    }

    #[inline]
    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0.rotate_left(26)
    }
}

/// Returns the pointer that a program has for a handle.
pub fn to_pointer<K: HandleKind>(handle: Handle<K>) -> *mut std::ffi::c_void {
    std::ptr::without_provenance_mut(usize::try_from(handle.to_pointer(HANDLE_BASE)).unwrap_or(0))
}

/// Returns the handle of a pointer that a program passed, if the pointer can be one.
#[inline]
pub fn from_pointer<K: HandleKind>(pointer: *mut std::ffi::c_void) -> Option<Handle<K>> {
    Handle::from_pointer(HANDLE_BASE, pointer.addr() as u64)
}

/// Returns the error for a pointer that is no live stream, event or array where one is due. Natively each of these
/// objects stores its context; another kind of object has no live context at that place.
#[cold]
pub fn refusal(pointer: *mut std::ffi::c_void) -> CuError {
    let offset = (pointer.addr() as u64).wrapping_sub(HANDLE_BASE);
    if offset < BAND_SIZE && offset.is_multiple_of(ALIGNMENT) {
        CuError::CONTEXT_IS_DESTROYED
    } else {
        CuError::INVALID_HANDLE
    }
}

/// One entry: its generation, with [`LIVE`], and the facts of its handle.
#[derive(Debug, Default)]
struct Entry<T> {
    generation: AtomicU32,
    facts: T,
}

/// All handles of one type.
#[derive(Debug)]
pub struct Table<K, T: 'static> {
    segments: [AtomicPtr<[Entry<T>; SEGMENT]>; SEGMENTS],
    growth: Mutex<Growth>,
    kind: PhantomData<fn() -> K>,
}

#[derive(Debug)]
struct Growth {
    /// Freed entries, oldest first, so that a generation comes back late.
    free: VecDeque<usize>,
    used: usize,
}

impl<K: HandleKind, T: Default + Sync + 'static> Table<K, T> {
    pub const fn new() -> Self {
        Self {
            segments: [const { AtomicPtr::new(std::ptr::null_mut()) }; SEGMENTS],
            growth: Mutex::new(Growth {
                free: VecDeque::new(),
                used: 0,
            }),
            kind: PhantomData,
        }
    }

    /// Mints a handle. `prepare` sets the entry's facts before anyone can find it; they may still hold the values of a
    /// destroyed handle.
    pub fn mint(&'static self, prepare: impl FnOnce(&'static T)) -> Result<Handle<K>> {
        let index = self.take_index()?;
        let entry = self.entry(index).ok_or(CuError::UNKNOWN)?;
        let generation = (entry.generation.load(Ordering::Relaxed) + 1) % u32::from(GENERATIONS);
        prepare(&entry.facts);
        entry.generation.store(generation | LIVE, Ordering::Release);
        handle(index, generation).ok_or(CuError::UNKNOWN)
    }

    fn take_index(&'static self) -> Result<usize> {
        let mut growth = self.growth.lock();
        if let Some(index) = growth.free.pop_front() {
            return Ok(index);
        }
        let index = growth.used;
        let place = self
            .segments
            .get(index / SEGMENT)
            .ok_or(CuError::OUT_OF_MEMORY)?;
        if index.is_multiple_of(SEGMENT) {
            let entries: Vec<Entry<T>> = (0..SEGMENT).map(|_| Entry::default()).collect();
            let segment = entries
                .into_boxed_slice()
                .try_into()
                .map_err(|_| CuError::UNKNOWN)?;
            place.store(Box::leak(segment), Ordering::Release);
        }
        growth.used += 1;
        Ok(index)
    }

    fn entry(&'static self, index: usize) -> Option<&'static Entry<T>> {
        let segment = self.segments.get(index / SEGMENT)?.load(Ordering::Acquire);
        // SAFETY: a segment that is not null was leaked by `take_index` and lives as long as the process.
        unsafe { segment.as_ref() }.map(|entries| &entries[index % SEGMENT])
    }

    fn find(&'static self, handle: Handle<K>) -> Option<(Key, &'static Entry<T>)> {
        let key = handle.key()?;
        Some((key, self.entry(key.index as usize)?))
    }

    /// Returns the facts behind a live handle.
    #[inline]
    pub fn get(&'static self, handle: Handle<K>) -> Option<&'static T> {
        let (key, entry) = self.find(handle)?;
        let wanted = u32::from(key.generation) | LIVE;
        (entry.generation.load(Ordering::Acquire) == wanted).then_some(&entry.facts)
    }

    /// Ends a live handle; exactly one of several callers succeeds. The entry is used again after [`Table::recycle`].
    pub fn retire(&'static self, handle: Handle<K>) -> Option<&'static T> {
        let (key, entry) = self.find(handle)?;
        let generation = u32::from(key.generation);
        entry
            .generation
            .compare_exchange(
                generation | LIVE,
                generation,
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .ok()
            .map(|_| &entry.facts)
    }

    /// Lets the entry of a retired handle be minted again.
    pub fn recycle(&'static self, handle: Handle<K>) {
        if let Some(key) = handle.key() {
            let mut growth = self.growth.lock();
            growth.free.push_back(key.index as usize);
        }
    }

    /// Ends a handle, if it is live, and lets its entry be minted again.
    pub fn forget(&'static self, handle: Handle<K>) {
        if self.retire(handle).is_some() {
            self.recycle(handle);
        }
    }

    /// Returns every live handle with its facts.
    pub fn live(&'static self) -> impl Iterator<Item = (Handle<K>, &'static T)> {
        let used = self.growth.lock().used;
        (0..used).filter_map(|index| {
            let entry = self.entry(index)?;
            let word = entry.generation.load(Ordering::Acquire);
            let handle = handle(index, word & !LIVE)?;
            (word & LIVE != 0).then_some((handle, &entry.facts))
        })
    }
}

fn handle<K: HandleKind>(index: usize, generation: u32) -> Option<Handle<K>> {
    let index = u32::try_from(index).ok()?;
    let generation = u16::try_from(generation).ok()?;
    Handle::new(Key { index, generation })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use proptest::prelude::*;
    use wormhole_api::handle::{Event, Function, Module, Stream};

    use super::*;

    #[test]
    fn a_destroyed_handle_is_unknown_even_when_its_entry_is_used_again() {
        static TABLE: Table<Event, AtomicU64> = Table::new();
        let first = TABLE
            .mint(|value| value.store(1, Ordering::Relaxed))
            .unwrap();
        assert_eq!(TABLE.get(first).unwrap().load(Ordering::Relaxed), 1);
        assert!(TABLE.retire(first).is_some());
        assert!(TABLE.retire(first).is_none());
        TABLE.recycle(first);
        let second = TABLE
            .mint(|value| value.store(2, Ordering::Relaxed))
            .unwrap();
        assert_ne!(first, second);
        assert!(TABLE.get(first).is_none());
        assert_eq!(
            TABLE.live().map(|(handle, _)| handle).collect::<Vec<_>>(),
            [second]
        );
    }

    #[test]
    fn a_table_grows_past_one_segment() {
        static TABLE: Table<Stream, AtomicU64> = Table::new();
        let handles: Vec<_> = (0..SEGMENT as u64 + 5)
            .map(|value| {
                TABLE
                    .mint(|facts| facts.store(value, Ordering::Relaxed))
                    .unwrap()
            })
            .collect();
        for (value, handle) in handles.iter().enumerate() {
            assert_eq!(
                TABLE.get(*handle).unwrap().load(Ordering::Relaxed),
                value as u64
            );
        }
    }

    #[test]
    fn what_a_program_holds_leads_back_to_the_handle() {
        static TABLE: Table<Module, AtomicU64> = Table::new();
        let handle = TABLE.mint(|_| {}).unwrap();
        assert_eq!(from_pointer::<Module>(to_pointer(handle)), Some(handle));
        assert_eq!(from_pointer::<Event>(to_pointer(handle)), None);
    }

    #[test]
    fn keys_of_a_map_are_spread_over_both_ends_of_their_hashes() {
        use std::hash::{BuildHasher, BuildHasherDefault};
        let state = BuildHasherDefault::<Mix>::default();
        let handles = (0..1 << 10).map(|index| {
            let generation = 1;
            state.hash_one(Handle::<Event>::new(Key { index, generation }).unwrap())
        });
        let names = (0..1 << 10).map(|index| state.hash_one(format!("_Z{index}kernelPfi")));
        for hashes in [handles.collect::<Vec<_>>(), names.collect()] {
            let ends = [0, 57].map(|shift| {
                let ends = hashes.iter().map(|hash| hash >> shift & 0x7f);
                ends.collect::<HashSet<u64>>().len()
            });
            assert!(ends.iter().all(|different| *different > 100), "{ends:?}");
        }
    }

    proptest! {
        #[test]
        fn any_number_is_no_handle_of_an_empty_table(number: usize) {
            static TABLE: Table<Function, AtomicU64> = Table::new();
            let pointer = std::ptr::without_provenance_mut(number);
            prop_assert!(from_pointer(pointer).and_then(|handle| TABLE.get(handle)).is_none());
        }
    }
}
