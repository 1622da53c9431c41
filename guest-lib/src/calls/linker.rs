//! The linker. What a program adds is kept here; completing the link sends it all.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::modules::file;
use super::{body, put, string};
use crate::context;
use crate::error::{CuError, Result};
use crate::jit::{Jit, Logs};
use crate::link::{Goal, Input, link};
use crate::types::{CUjit_option, CUjitInputType, CUlinkState, CUresult};

/// `CU_JIT_INPUT_*` up to `CU_JIT_INPUT_NVVM`.
const INPUT_TYPES: u32 = 6;
/// `CU_JIT_INPUT_CUBIN` and `CU_JIT_INPUT_PTX`.
const CUBIN: CUjitInputType = 0;
const PTX: CUjitInputType = 1;

#[derive(Debug)]
struct Link {
    jit: Jit,
    inputs: Vec<Input>,
    state: State,
    /// What was wrong with inputs that were not taken.
    errors: Vec<u8>,
    /// How long the linker has worked for it.
    time: Duration,
}

#[derive(Debug)]
enum State {
    Pending,
    /// What the link gave; it is the linker's own until it is destroyed.
    Complete(#[expect(dead_code, reason = "the program has its address")] Vec<u8>),
    Failed(CuError),
}

/// Links by the address that the program knows them by: that of the box.
static LINKS: Mutex<Option<HashMap<usize, Box<Link>>>> = Mutex::new(None);

fn links() -> MutexGuard<'static, Option<HashMap<usize, Box<Link>>>> {
    LINKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `use_link` with a live link.
fn with_link<R>(state: CUlinkState, use_link: impl FnOnce(&mut Link) -> Result<R>) -> Result<R> {
    let mut links = links();
    let link = links
        .as_mut()
        .and_then(|links| links.get_mut(&state.addr()))
        .ok_or(CuError::INVALID_HANDLE)?;
    use_link(link)
}

/// Whether an error of an input leaves the link as it was before.
fn is_input_left_out(error: CuError, kind: CUjitInputType) -> bool {
    match error {
        CuError::INVALID_PTX | CuError::UNSUPPORTED_PTX_VERSION | CuError::UNKNOWN => true,
        CuError::INVALID_IMAGE => kind != CUBIN,
        _ => false,
    }
}

impl Link {
    /// Asks the linker, and tells the program what it said.
    fn run(&mut self, goal: Goal) -> Result<Vec<u8>> {
        let scope = context::scope()?;
        let (mut logs, start) = (Logs::default(), Instant::now());
        let linked = link(scope, &self.inputs, goal, &self.jit, &mut logs);
        self.time += start.elapsed();
        logs.errors.splice(..0, self.errors.iter().copied());
        self.jit.tell(&logs, self.time);
        if goal == Goal::Inputs && linked.is_err() {
            self.errors = logs.errors;
        }
        linked
    }

    fn add(&mut self, kind: CUjitInputType, name: &[u8], data: Vec<u8>) -> Result {
        match &self.state {
            State::Pending => {}
            State::Complete(_) => return Err(CuError::INVALID_VALUE),
            State::Failed(error) => return Err(*error),
        }
        if kind >= INPUT_TYPES || data.is_empty() {
            return Err(CuError::INVALID_VALUE);
        }
        let name = match name {
            [] => format!("<input {}>", self.inputs.len()).into_bytes(),
            name => name.to_vec(),
        };
        self.inputs.push(Input { kind, name, data });
        let taken = self.run(Goal::Inputs);
        if let Err(error) = taken {
            self.inputs.pop();
            if !is_input_left_out(error, kind) {
                self.state = State::Failed(error);
            }
            return Err(error);
        }
        Ok(())
    }
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
        let jit = unsafe { Jit::read(numOptions, options, optionValues) }?;
        let link = Box::new(Link {
            jit,
            inputs: Vec::new(),
            state: State::Pending,
            errors: Vec::new(),
            time: Duration::ZERO,
        });
        link.jit.tell(&Logs::default(), Duration::ZERO);
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
    name: *const c_char,
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
        let name = if name.is_null() {
            c""
        } else {
            // SAFETY: as the caller promises.
            unsafe { string(name) }?
        };
        with_link(state, |link| link.add(inputType, name.to_bytes(), data.to_vec()))
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
        let (mut data, name) = unsafe { (file(path)?, string(path)?) };
        if inputType != PTX {
            data.pop();
        }
        with_link(state, |link| link.add(inputType, name.to_bytes(), data))
    }
}

pub unsafe fn cuLinkComplete(
    state: CUlinkState,
    cubinOut: *mut *mut c_void,
    sizeOut: *mut usize,
) -> CUresult {
    body! {
        if cubinOut.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        with_link(state, |link| {
            match &link.state {
                State::Pending => {}
                State::Complete(_) => return Err(CuError::INVALID_HANDLE),
                State::Failed(error) => return Err(*error),
            }
            let mut image = match link.run(Goal::Image) {
                Ok(image) => image,
                Err(error) => {
                    link.state = State::Failed(error);
                    return Err(error);
                }
            };
            // SAFETY: not null; the caller of the export promises that both places are writable. The image
            // stays where it is when the vector moves.
            unsafe {
                put(cubinOut, image.as_mut_ptr().cast())?;
                if !sizeOut.is_null() {
                    sizeOut.write(image.len());
                }
            }
            link.state = State::Complete(image);
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
