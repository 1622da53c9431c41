//! Exports the table of internal functions that `nvidia-smi` requires. The table's size and the functions that are
//! called were observed from outside on the native library of driver 580.

use std::ffi::{c_char, c_void};
use std::ptr;

use nvml_wrapper_sys::bindings::nvmlReturn_t;

use super::devices::pci;
use super::put;
use crate::error::{NvmlError, Result};
use crate::library::library;

const ID: u128 = 0xc4fe_3e6c_c98f_6c4e_a327_ee69_6e12_f7c4;
const WORDS: usize = 270;

/// Table of function addresses; word 0 is the size in bytes.
#[repr(transparent)]
struct Table([*const c_void; WORDS]);

// SAFETY: the words are never written.
unsafe impl Sync for Table {}

static TABLE: Table = {
    let mut words = [unused as *const c_void; WORDS];
    words[0] = ptr::without_provenance(WORDS * size_of::<usize>());
    words[26] = discard_message as *const c_void;
    words[81] = bus_id as *const c_void;
    Table(words)
};

extern "C" fn unused() -> nvmlReturn_t {
    NvmlError::NOT_SUPPORTED.0
}

/// Ignores a `printf`-style message for the native library's log.
extern "C" fn discard_message() -> nvmlReturn_t {
    0
}

/// Writes the PCI bus id of the device with this index, as `0000:00:06.0`.
unsafe extern "C" fn bus_id(index: u32, place: *mut [c_char; 16]) -> nvmlReturn_t {
    let answer = || {
        let pci = pci(library().handle(index)?)?;
        // SAFETY: null, or room for the `busIdLegacy` of `nvmlPciInfo_t`.
        unsafe { put(place, pci.busIdLegacy) }
    };
    let answered: Result = answer();
    answered.err().map_or(0, |error| error.0)
}

pub unsafe fn nvmlInternalGetExportTable(place: *mut *const c_void, id: *const [u8; 16]) -> Result {
    library().check()?;
    // SAFETY: null, or a valid identifier of the caller.
    let id = unsafe { id.as_ref() }.ok_or(NvmlError::INVALID_ARGUMENT)?;
    if u128::from_be_bytes(*id) != ID {
        return Err(NvmlError::NOT_FOUND);
    }
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, (&raw const TABLE.0).cast()) }
}
