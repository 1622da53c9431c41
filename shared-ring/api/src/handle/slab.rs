//! Table of the worker's objects, by handle.

use core::fmt;
use core::marker::PhantomData;
use std::vec::Vec;

use super::{Handle, HandleKind, Key};
use crate::result::CuResult;

/// Objects by handle. The guest chooses the index, so the table is bounded.
#[derive(Debug)]
pub struct Slab<K, T> {
    /// Generation and object, by index.
    entries: Vec<Option<(u16, T)>>,
    limit: u32,
    live: usize,
    kind: PhantomData<fn() -> K>,
}

/// Reason why an object could not be inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlabError {
    /// The legacy stream has no entry.
    Legacy,
    /// The index is at or above the table's limit.
    Limit { index: u32, limit: u32 },
    /// The index is in use.
    Occupied { index: u32 },
}

impl fmt::Display for SlabError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Legacy => write!(f, "the legacy stream cannot be created"),
            Self::Limit { index, limit } => {
                write!(f, "a handle has the index {index}, the limit is {limit}")
            }
            Self::Occupied { index } => {
                write!(f, "a handle was minted twice: index {index} is in use")
            }
        }
    }
}

impl core::error::Error for SlabError {}

impl From<SlabError> for CuResult {
    fn from(error: SlabError) -> Self {
        match error {
            SlabError::Limit { .. } => Self::OUT_OF_MEMORY,
            SlabError::Legacy | SlabError::Occupied { .. } => Self::INVALID_HANDLE,
        }
    }
}

impl<K: HandleKind, T> Slab<K, T> {
    /// Makes an empty table for indices below `limit`.
    #[must_use]
    pub const fn new(limit: u32) -> Self {
        Self {
            entries: Vec::new(),
            limit,
            live: 0,
            kind: PhantomData,
        }
    }

    /// Inserts an object.
    ///
    /// # Errors
    /// The index is out of bounds or in use.
    pub fn insert(&mut self, handle: Handle<K>, value: T) -> Result<(), SlabError> {
        let Key { index, generation } = handle.key().ok_or(SlabError::Legacy)?;
        let limit = self.limit;
        let out_of_bounds = SlabError::Limit { index, limit };
        if index >= limit {
            return Err(out_of_bounds);
        }
        let slot = usize::try_from(index).map_err(|_| out_of_bounds)?;
        if slot >= self.entries.len() {
            self.entries.resize_with(slot + 1, || None);
        }
        let entry = self.entries.get_mut(slot).ok_or(out_of_bounds)?;
        if entry.is_some() {
            return Err(SlabError::Occupied { index });
        }
        *entry = Some((generation, value));
        self.live += 1;
        Ok(())
    }

    /// Returns the object of a live handle.
    #[must_use]
    pub fn get(&self, handle: Handle<K>) -> Option<&T> {
        let key = handle.key()?;
        let (generation, value) = self
            .entries
            .get(usize::try_from(key.index).ok()?)?
            .as_ref()?;
        (*generation == key.generation).then_some(value)
    }

    /// Returns the object of a live handle.
    #[must_use]
    pub fn get_mut(&mut self, handle: Handle<K>) -> Option<&mut T> {
        let key = handle.key()?;
        let (generation, value) = self
            .entries
            .get_mut(usize::try_from(key.index).ok()?)?
            .as_mut()?;
        (*generation == key.generation).then_some(value)
    }

    /// Removes and returns the object of a live handle.
    pub fn remove(&mut self, handle: Handle<K>) -> Option<T> {
        let key = handle.key()?;
        let entry = self.entries.get_mut(usize::try_from(key.index).ok()?)?;
        let (_, value) = entry.take_if(|(generation, _)| *generation == key.generation)?;
        self.live -= 1;
        Some(value)
    }

    /// Removes and returns all objects.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.live = 0;
        std::mem::take(&mut self.entries)
            .into_iter()
            .flatten()
            .map(|(_, value)| value)
    }

    /// Returns the objects of live handles.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().flatten().map(|(_, value)| value)
    }

    /// Returns the objects of live handles, mutably.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries.iter_mut().flatten().map(|(_, value)| value)
    }

    #[must_use]
    pub const fn len(&self) -> usize {
        self.live
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.live == 0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::collections::hash_map::Entry;

    use proptest::prelude::*;

    use super::*;
    use crate::handle::Event;

    fn event(index: u32, generation: u16) -> Handle<Event> {
        Handle::new(Key { index, generation }).expect("in range")
    }

    #[test]
    fn an_old_generation_finds_nothing() {
        let mut slab = Slab::new(8);
        slab.insert(event(3, 1), 'a').expect("free");
        assert_eq!(slab.remove(event(3, 0)), None);
        assert_eq!(slab.remove(event(3, 1)), Some('a'));
        slab.insert(event(3, 2), 'b').expect("free again");
        assert_eq!(slab.get(event(3, 1)), None);
        assert_eq!(slab.get(event(3, 2)), Some(&'b'));
        assert_eq!(slab.len(), 1);
    }

    #[test]
    fn a_handle_minted_twice_or_out_of_bounds_is_refused() {
        let mut slab = Slab::new(8);
        slab.insert(event(0, 0), ()).expect("free");
        assert_eq!(
            slab.insert(event(0, 1), ()),
            Err(SlabError::Occupied { index: 0 })
        );
        assert_eq!(
            slab.insert(event(8, 0), ()),
            Err(SlabError::Limit { index: 8, limit: 8 })
        );
    }

    proptest! {
        /// The guest chooses any handle: the table agrees with a map of the live entries.
        #[test]
        fn it_holds_what_was_entered_and_not_removed(
            steps in prop::collection::vec((any::<bool>(), 0_u32..12, 0_u16..3), 0..200),
        ) {
            let mut slab = Slab::new(10);
            let mut model: HashMap<u32, (u16, usize)> = HashMap::new();
            for (value, (enter, index, generation)) in steps.into_iter().enumerate() {
                let handle = event(index, generation);
                if enter {
                    let expected = if index >= 10 {
                        Err(SlabError::Limit { index, limit: 10 })
                    } else if let Entry::Vacant(vacant) = model.entry(index) {
                        vacant.insert((generation, value));
                        Ok(())
                    } else {
                        Err(SlabError::Occupied { index })
                    };
                    prop_assert_eq!(slab.insert(handle, value), expected);
                } else {
                    let live = model.get(&index).is_some_and(|entry| entry.0 == generation);
                    let expected = live.then(|| model.remove(&index).map(|entry| entry.1)).flatten();
                    prop_assert_eq!(slab.remove(handle), expected);
                }
                prop_assert_eq!(slab.len(), model.len());
                for (index, (generation, value)) in &model {
                    prop_assert_eq!(slab.get(event(*index, *generation)), Some(value));
                }
            }
        }
    }

    #[test]
    fn draining_takes_everything_once() {
        let mut slab = Slab::new(8);
        slab.insert(event(1, 0), 1).expect("free");
        slab.insert(event(5, 0), 5).expect("free");
        assert_eq!(slab.drain().collect::<Vec<_>>(), [1, 5]);
        assert!(slab.is_empty());
        assert_eq!(slab.get(event(1, 0)), None);
    }
}
