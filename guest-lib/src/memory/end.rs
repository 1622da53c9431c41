//! Kinds of memory by address, for copies and fills.

use wormhole_api::constants::memory_type::{DEVICE, HOST, UNIFIED};
use wormhole_ring::layout::{APERTURE_HIGH, MANAGED, WINDOW_BASE, WINDOW_MAX_BYTES};

use crate::error::{CuError, Result};
use crate::memory::{memory_map, residence};
use crate::parameter::{In, Out, UnifiedPtr};
use crate::session::{Session, session};

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
            Some(allocation) if allocation.is_managed() && residence::is_placed(address) => {
                Ok((Self::Device, address))
            }
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

/// One end of a copy, as a program names it. The program's own memory is valid for the copy, when it is handed to its
/// stream.
#[derive(Clone, Copy, Debug)]
pub struct CopyEnd {
    /// `CUmemorytype`: `DEVICE`, `HOST`, or `UNIFIED` for an address that determines its kind itself.
    kind: u32,
    address: u64,
}

impl CopyEnd {
    /// Returns an end on the device, which cannot be pageable memory.
    pub const fn device(address: u64) -> Self {
        Self {
            kind: DEVICE,
            address,
        }
    }

    /// Returns an end of any kind.
    ///
    /// # Safety
    /// If the address is the program's own memory, this memory is valid for the copy when the stream gets it.
    pub const unsafe fn unified(address: u64) -> Self {
        Self {
            kind: UNIFIED,
            address,
        }
    }

    pub const fn kind(self) -> u32 {
        self.kind
    }

    pub const fn address(self) -> u64 {
        self.address
    }

    /// Returns whether this is page-locked memory whose data go into messages.
    fn is_carried(self) -> bool {
        session().is_ok_and(Session::carries_data)
            && memory_map()
                .find(self.address)
                .is_some_and(|allocation| allocation.is_host())
    }

    /// Returns the kind of memory, and its address for the side that reaches it.
    pub fn find(self, bytes: usize) -> Result<(End, u64)> {
        match End::of(self.address, bytes as u64)? {
            (End::Pageable, _) if self.kind == DEVICE => Err(CuError::INVALID_VALUE),
            (End::Pinned, _) if self.is_carried() => Ok((End::Pageable, self.address)),
            found => Ok(found),
        }
    }
}

impl From<UnifiedPtr<'_>> for CopyEnd {
    fn from(place: UnifiedPtr<'_>) -> Self {
        Self {
            kind: UNIFIED,
            address: place.address(),
        }
    }
}

impl From<In<'_, [u8]>> for CopyEnd {
    fn from(source: In<'_, [u8]>) -> Self {
        Self {
            kind: HOST,
            address: source.address(),
        }
    }
}

impl From<Out<'_, [u8]>> for CopyEnd {
    fn from(destination: Out<'_, [u8]>) -> Self {
        Self {
            kind: HOST,
            address: destination.address(),
        }
    }
}

/// Returns true if no mapping of the program can lie at the address.
fn is_reserved(address: u64) -> bool {
    session().is_ok_and(|session| session.is_reserved(address, 1))
        || [APERTURE_HIGH, (WINDOW_BASE, WINDOW_MAX_BYTES), MANAGED]
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
