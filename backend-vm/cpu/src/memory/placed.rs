//! Memory at addresses of the caller's choice. It belongs to no context.

use wormhole_device::{CuError, Result, file};
use wormhole_ring::band;

use super::Memory;

impl Memory {
    /// Maps memory that reads as zeros at a range of whole pages, where nothing is mapped.
    pub fn place(&self, address: u64, bytes: u64) -> Result<()> {
        let mut map = self.write();
        if bytes > self.limit.saturating_sub(map.used) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let file = file::anonymous(bytes).map_err(|error| refused(&error))?;
        band::reserve(address, bytes).map_err(|error| refused(&error))?;
        // SAFETY: reserved above.
        unsafe { band::map(address, bytes, &file, 0) }.map_err(|error| refused(&error))?;
        map.used += bytes;
        map.placed.insert(address, bytes);
        Ok(())
    }

    /// Makes a range that was placed inaccessible to work that looks it up from now on.
    pub fn withdraw(&self, address: u64, bytes: u64) -> Result<()> {
        let mut map = self.write();
        if map.placed.get(&address) != Some(&bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        map.placed.remove(&address);
        map.used -= bytes;
        Ok(())
    }
}

fn refused(error: &std::io::Error) -> CuError {
    tracing::warn!(%error, "the system gives no memory at an address of the caller's");
    CuError::OUT_OF_MEMORY
}
