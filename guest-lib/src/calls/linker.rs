//! The linker. What a program adds is kept here; completing the link sends it all.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::modules::{Logs, file};
use super::{body, put};
use crate::context;
use crate::error::{CuError, Result};
use crate::link::{Input, link};
use crate::types::{CUjit_option, CUjitInputType, CUlinkState, CUresult};

/// `CU_JIT_INPUT_*` up to `CU_JIT_INPUT_NVVM`.
const INPUT_TYPES: u32 = 6;
/// `CU_JIT_INPUT_PTX`.
const PTX: CUjitInputType = 1;

#[derive(Debug)]
struct Link {
    logs: Logs,
    inputs: Vec<Input>,
    /// What the link gave; it is the linker's own until it is destroyed.
    image: Option<Vec<u8>>,
}

/// Links by the address that the program knows them by: that of the box.
static LINKS: Mutex<Option<HashMap<usize, Box<Link>>>> = Mutex::new(None);

fn links() -> MutexGuard<'static, Option<HashMap<usize, Box<Link>>>> {
    LINKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `use_link` with a live link that is not complete.
fn pending<R>(state: CUlinkState, use_link: impl FnOnce(&mut Link) -> Result<R>) -> Result<R> {
    let mut links = links();
    let link = links
        .as_mut()
        .and_then(|links| links.get_mut(&state.addr()))
        .ok_or(CuError::INVALID_HANDLE)?;
    if link.image.is_some() {
        return Err(CuError::INVALID_VALUE);
    }
    use_link(link)
}

fn add(state: CUlinkState, kind: CUjitInputType, data: Vec<u8>) -> Result {
    if kind >= INPUT_TYPES || data.is_empty() {
        return Err(CuError::INVALID_VALUE);
    }
    pending(state, |link| {
        link.inputs.push(Input { kind, data });
        Ok(())
    })
}

pub unsafe fn cuLinkCreate_v2(
    numOptions: u32,
    options: *const CUjit_option,
    optionValues: *mut *mut c_void,
    stateOut: *mut CUlinkState,
) -> CUresult {
    body! {
        context::scope()?;
        // SAFETY: as the caller promises, until the link is destroyed.
        let logs = unsafe { Logs::read(numOptions, options, optionValues) }?;
        let link = Box::new(Link {
            logs,
            inputs: Vec::new(),
            image: None,
        });
        let address = std::ptr::from_ref(&*link).addr();
        // SAFETY: as the caller promises.
        unsafe { put(stateOut, std::ptr::without_provenance_mut(address)) }?;
        links().get_or_insert_default().insert(address, link);
        Ok(())
    }
}

pub unsafe fn cuLinkAddData_v2(
    state: CUlinkState,
    inputType: CUjitInputType,
    data: *const c_void,
    size: usize,
    _name: *const c_char,
    _numOptions: u32,
    _options: *const CUjit_option,
    _optionValues: *mut *mut c_void,
) -> CUresult {
    body! {
        if data.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: the program vouches for `size` bytes.
        let data = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), size) };
        add(state, inputType, data.to_vec())
    }
}

pub unsafe fn cuLinkAddFile_v2(
    state: CUlinkState,
    inputType: CUjitInputType,
    path: *const c_char,
    _numOptions: u32,
    _options: *const CUjit_option,
    _optionValues: *mut *mut c_void,
) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        let mut data = unsafe { file(path) }?;
        if inputType != PTX {
            data.pop();
        }
        add(state, inputType, data)
    }
}

pub unsafe fn cuLinkComplete(
    state: CUlinkState,
    cubinOut: *mut *mut c_void,
    sizeOut: *mut usize,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if cubinOut.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        pending(state, |pending| {
            let image = link(scope, &pending.inputs)?;
            pending.logs.clear();
            let image = pending.image.insert(image);
            // SAFETY: not null; the caller of the export promises that both places are writable.
            unsafe {
                put(cubinOut, image.as_mut_ptr().cast())?;
                if !sizeOut.is_null() {
                    sizeOut.write(image.len());
                }
            }
            Ok(())
        })
    }
}

pub unsafe fn cuLinkDestroy(state: CUlinkState) -> CUresult {
    body! {
        let link = links().as_mut().and_then(|links| links.remove(&state.addr()));
        link.map(drop).ok_or(CuError::INVALID_HANDLE)
    }
}
