//! Context-local storage: values that runtimes store with a context, by key.
//!
//! Values are read several hundred times per training step, so a look-up takes no lock: once a key has an entry in the
//! array, the entry belongs to the key for ever, and only its value changes. Keys are addresses of variables of the
//! runtimes, a handful per process.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use wormhole_lock::Mutex;

use crate::types::CUcontext;

/// Destructor of a value, called with context, key and value when the context is destroyed.
pub type Destructor = unsafe extern "C" fn(CUcontext, *mut c_void, *mut c_void);

const PLACES: usize = 128;
/// Key of a free entry; no address has this value.
const FREE: usize = 0;
/// Value of an entry without a value. Runtimes store aligned pointers or null, never this.
const ABSENT: usize = usize::MAX;

#[derive(Debug)]
struct Place {
    key: AtomicUsize,
    value: AtomicUsize,
}

impl Default for Place {
    fn default() -> Self {
        Self {
            key: AtomicUsize::new(FREE),
            value: AtomicUsize::new(ABSENT),
        }
    }
}

#[derive(Debug, Default)]
struct Rest {
    destructors: HashMap<usize, Destructor>,
    /// Values whose keys found no free entry.
    overflow: HashMap<usize, usize>,
}

/// Storage of one context.
#[derive(Debug)]
pub struct Storage {
    places: [Place; PLACES],
    rest: Mutex<Rest>,
}

impl Default for Storage {
    fn default() -> Self {
        Self {
            places: std::array::from_fn(|_| Place::default()),
            rest: Mutex::default(),
        }
    }
}

fn start(key: usize) -> usize {
    (key ^ (key >> 12)) >> 3
}

impl Storage {
    fn probe(&self, key: usize) -> impl Iterator<Item = &Place> {
        (0..PLACES).map(move |step| &self.places[start(key).wrapping_add(step) % PLACES])
    }

    /// Returns the value of a key.
    #[inline]
    pub fn get(&self, key: usize) -> Option<usize> {
        for place in self.probe(key) {
            match place.key.load(Ordering::Acquire) {
                found if found == key => {
                    let value = place.value.load(Ordering::Acquire);
                    return (value != ABSENT).then_some(value);
                }
                FREE => return None,
                _ => {}
            }
        }
        self.rest.lock().overflow.get(&key).copied()
    }

    /// Stores a value and its destructor, which is called when the context is destroyed.
    pub fn put(&self, key: usize, value: usize, destructor: Option<Destructor>) {
        let mut rest = self.rest.lock();
        match destructor {
            Some(destructor) => rest.destructors.insert(key, destructor),
            None => rest.destructors.remove(&key),
        };
        for place in self.probe(key) {
            let found = place.key.load(Ordering::Relaxed);
            if found == key || found == FREE {
                // The lock is held, so no other thread takes the entry.
                place.value.store(value, Ordering::Release);
                place.key.store(key, Ordering::Release);
                return;
            }
        }
        rest.overflow.insert(key, value);
    }

    /// Removes a value without calling its destructor. Returns whether there was one.
    pub fn delete(&self, key: usize) -> bool {
        let mut rest = self.rest.lock();
        rest.destructors.remove(&key);
        for place in self.probe(key) {
            match place.key.load(Ordering::Relaxed) {
                found if found == key => {
                    return place.value.swap(ABSENT, Ordering::AcqRel) != ABSENT;
                }
                FREE => return false,
                _ => {}
            }
        }
        rest.overflow.remove(&key).is_some()
    }

    /// Removes and returns all entries, for the end of the context: key, value and destructor.
    pub fn drain(&self) -> Vec<(usize, usize, Option<Destructor>)> {
        let mut rest = self.rest.lock();
        let mut values: Vec<_> = rest.overflow.drain().collect();
        values.extend(self.places.iter().filter_map(|place| {
            let value = place.value.swap(ABSENT, Ordering::AcqRel);
            (value != ABSENT).then(|| (place.key.load(Ordering::Relaxed), value))
        }));
        values
            .into_iter()
            .map(|(key, value)| (key, value, rest.destructors.remove(&key)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn destructor(_: CUcontext, _: *mut c_void, _: *mut c_void) {}

    #[test]
    fn a_null_value_is_a_value() {
        let storage = Storage::default();
        assert_eq!(storage.get(0x1000), None);
        storage.put(0x1000, 0, None);
        assert_eq!(storage.get(0x1000), Some(0));
        assert!(storage.delete(0x1000));
        assert!(!storage.delete(0x1000));
        assert_eq!(storage.get(0x1000), None);
    }

    #[test]
    fn more_keys_than_places_are_kept() {
        let storage = Storage::default();
        let keys: Vec<usize> = (1..=3 * PLACES).map(|index| index * 8).collect();
        for key in &keys {
            storage.put(*key, key + 1, None);
        }
        for key in &keys {
            assert_eq!(storage.get(*key), Some(key + 1));
        }
        assert!(storage.delete(keys[2 * PLACES]));
        assert_eq!(storage.get(keys[2 * PLACES]), None);
        assert_eq!(
            storage.get(keys[2 * PLACES + 1]),
            Some(keys[2 * PLACES + 1] + 1)
        );
    }

    #[test]
    fn draining_gives_each_value_once_with_its_destructor() {
        let storage = Storage::default();
        storage.put(8, 80, Some(destructor));
        storage.put(16, 160, None);
        storage.put(24, 240, Some(destructor));
        storage.delete(24);
        let mut drained: Vec<_> = storage
            .drain()
            .into_iter()
            .map(|(key, value, destructor)| (key, value, destructor.is_some()))
            .collect();
        drained.sort_unstable();
        assert_eq!(drained, [(8, 80, true), (16, 160, false)]);
        assert!(storage.drain().is_empty());
        assert_eq!(storage.get(8), None);
    }
}
