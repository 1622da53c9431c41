//! Kinds of memory by address, for copies and fills.

use wormhole_ring::layout::{APERTURE_HIGH, WINDOW_BASE, WINDOW_MAX_BYTES};

use crate::error::{CuError, Result};
use crate::memory::memory_map;
use crate::session::session;

/// Kind of memory at one end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Device,
    /// Page-locked, managed or registered memory, which the device and the program reach.
    Pinned,
    /// Other memory of the program.
    Pageable,
}

impl End {
    /// Returns the kind of memory of a whole range, and its address for the side that reaches it. `INVALID_VALUE` for a
    /// range that leaves its allocation, and for an unallocated address in a range reserved for the device.
    pub fn of(address: u64, bytes: u64) -> Result<(Self, u64)> {
        match memory_map().find_range(address, bytes)? {
            Some(allocation) => Ok(match allocation.for_device(address) {
                Some(place) => (Self::Pinned, place),
                None if allocation.is_registered() => (Self::Pageable, address),
                None => (Self::Device, address),
            }),
            None if address == 0 || is_reserved(address) => Err(CuError::INVALID_VALUE),
            None => Ok((Self::Pageable, address)),
        }
    }
}

/// Returns true if no mapping of the program can lie at the address.
fn is_reserved(address: u64) -> bool {
    session().is_ok_and(|session| session.keeps(address, 1))
        || [APERTURE_HIGH, (WINDOW_BASE, WINDOW_MAX_BYTES)]
            .iter()
            .any(|(base, bytes)| {
                address
                    .checked_sub(*base)
                    .is_some_and(|offset| offset < *bytes)
            })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_only_a_device_can_have_are_no_host_memory() {
        assert_eq!(
            End::of(APERTURE_HIGH.0 + 4096, 1),
            Err(CuError::INVALID_VALUE)
        );
        assert_eq!(End::of(WINDOW_BASE, 1), Err(CuError::INVALID_VALUE));
        let value = 0_u8;
        let address = std::ptr::from_ref(&value).addr() as u64;
        assert_eq!(End::of(address, 1), Ok((End::Pageable, address)));
    }
}
