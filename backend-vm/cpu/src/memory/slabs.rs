//! Slabs: memory that the program divides itself. Each part is accessible as an allocation of its own, and the rest of a
//! slab is not.

use wormhole_device::{CuError, Result};

use super::{ALIGNMENT, AddressMap, Block, Memory, Owner};
use crate::peer_set::Accesses;

impl Memory {
    /// Allocates a slab, which counts as in use as a whole.
    pub fn allocate_slab(&self, bytes: u64) -> Result<u64> {
        let mut map = self.write();
        let (address, bytes) = self.take(&mut map, bytes)?;
        map.slabs.insert(address, bytes);
        Ok(address)
    }

    /// Checks that a slab starts at `address`.
    pub fn is_slab(&self, address: u64) -> Result<()> {
        let known = self.read().slabs.contains_key(&address);
        known.then_some(()).ok_or(CuError::INVALID_VALUE)
    }

    /// Frees a slab and its parts.
    pub fn free_slab(&self, address: u64) -> Result<()> {
        let mut map = self.write();
        let bytes = *map.slabs.get(&address).ok_or(CuError::INVALID_VALUE)?;
        let inside = map.live.range(address..address + bytes);
        let parts: Vec<u64> = inside.map(|(part, _)| *part).collect();
        for part in parts {
            self.release(&mut map, part);
        }
        map.slabs.remove(&address);
        map.used -= bytes;
        map.holes.put(address, bytes);
        Ok(())
    }

    /// Gives all slabs back, whose parts are gone.
    pub(super) fn release_slabs(map: &mut AddressMap) {
        for (address, bytes) in std::mem::take(&mut map.slabs) {
            map.used -= bytes;
            map.holes.put(address, bytes);
        }
    }

    /// Makes a part of a slab accessible.
    pub fn allocate_part(&self, address: u64, bytes: u64) -> Result<()> {
        let end = address.checked_add(bytes).filter(|_| bytes > 0);
        let end = end.and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
        let end = end.ok_or(CuError::INVALID_VALUE)?;
        let mut map = self.write();
        let slab = map.slabs.range(..=address).next_back();
        let inside = slab.is_some_and(|(start, bytes)| end <= start + bytes);
        let before = map.live.range(..end).next_back();
        let free = before.is_none_or(|(start, block)| start + block.bytes <= address);
        if !inside || !free || !address.is_multiple_of(ALIGNMENT) {
            return Err(CuError::INVALID_VALUE);
        }
        let part = Block {
            bytes: end - address,
            owner: Owner::Part,
            accesses: Accesses::default(),
        };
        map.live.insert(address, part);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Use;
    use super::*;

    const SLAB: u64 = 2 << 20;
    const INVALID: Result<()> = Err(CuError::INVALID_VALUE);

    #[test]
    fn a_slab_is_accessible_in_its_parts_alone_and_counts_as_a_whole() {
        let memory = Memory::new(64 << 20).expect("an aperture");
        let slab = memory.allocate_slab(SLAB).expect("allocate");
        assert_eq!(memory.info().0, (64 << 20) - SLAB);
        assert_eq!(memory.check(slab, 1, Use::Read), INVALID);
        assert_eq!(memory.allocate_part(slab + 512, 100), Ok(()));
        assert_eq!(memory.check(slab + 512, 512, Use::Write), Ok(()));
        for (address, bytes) in [(slab, 1), (slab + 512, 513), (slab + 1024, 1)] {
            assert_eq!(memory.check(address, bytes, Use::Read), INVALID);
        }
        for (address, bytes) in [
            (slab + 512, 1),
            (slab, 513),
            (slab + 1024, 0),
            (slab + 1025, 1),
            (slab + SLAB - 512, 513),
            (slab + SLAB, 1),
            (slab - 512, 1),
            (slab + 1024, u64::MAX),
        ] {
            assert_eq!(
                memory.allocate_part(address, bytes),
                INVALID,
                "{address:#x}"
            );
        }
        assert_eq!(memory.allocate_part(slab, 512), Ok(()));
        assert_eq!(memory.free(slab, Owner::Program), INVALID);
        assert_eq!(memory.free(slab, Owner::Part), Ok(()));
        assert_eq!(memory.check(slab, 1, Use::Read), INVALID);
        assert_eq!(memory.info().0, (64 << 20) - SLAB);
        assert_eq!(memory.free_slab(slab + 512), INVALID);
        assert_eq!(memory.free_slab(slab), Ok(()));
        assert_eq!(memory.check(slab + 512, 1, Use::Read), INVALID);
        assert_eq!(memory.info().0, 64 << 20);
    }

    #[test]
    fn a_reset_frees_slabs_with_their_parts() {
        let memory = Memory::new(64 << 20).expect("an aperture");
        let slab = memory.allocate_slab(SLAB).expect("allocate");
        memory.allocate_part(slab, 4096).expect("a part");
        memory.clear();
        assert_eq!(memory.info().0, 64 << 20);
        assert_eq!(memory.allocate_part(slab, 4096), INVALID);
        assert_eq!(memory.read().holes.all().len(), 1, "holes were merged");
    }
}
