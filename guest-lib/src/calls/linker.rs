//! Linker calls. Inputs are collected here; completing the link sends all of them.

use std::collections::HashMap;
use std::ffi::c_void;
use std::time::{Duration, Instant};

use wormhole_api::constants::jit_input::{CUBIN, NVVM, PTX};
use wormhole_lock::{Mutex, MutexGuard};

use super::modules::file;
use crate::error::{CuError, Result};
use crate::object::context;
use crate::object::jit::{Jit, Logs};
use crate::object::link::{Goal, Input, link};
use crate::parameter::{In, InOut, Out, Text};
use crate::types::{CUjit_option, CUjitInputType, CUlinkState};

#[derive(Debug)]
struct Link {
    jit: Jit,
    inputs: Vec<Input>,
    state: State,
    /// Log of the inputs that were rejected.
    errors: Vec<u8>,
    /// Time that the linker spent on this link so far.
    time: Duration,
}

#[derive(Debug)]
enum State {
    Pending,
    /// Linked image, owned by the link until `cuLinkDestroy`.
    Complete(#[expect(dead_code, reason = "the program has its address")] Vec<u8>),
    Failed(CuError),
}

/// Links by their `CUlinkState`, the address of the box.
static LINKS: Mutex<Option<HashMap<usize, Box<Link>>>> = Mutex::new(None);

fn links() -> MutexGuard<'static, Option<HashMap<usize, Box<Link>>>> {
    LINKS.lock()
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

/// Returns whether a rejected input leaves the link usable.
fn is_input_left_out(error: CuError, kind: CUjitInputType) -> bool {
    match error {
        CuError::INVALID_PTX | CuError::UNSUPPORTED_PTX_VERSION | CuError::UNKNOWN => true,
        CuError::INVALID_IMAGE => kind != CUBIN,
        _ => false,
    }
}

impl Link {
    /// Runs the linker, and writes its logs to the program's buffers.
    fn run(&mut self, goal: Goal) -> Result<Vec<u8>> {
        let scope = context::scope()?;
        let (mut logs, start) = (Logs::default(), Instant::now());
        let linked = link(scope, &self.inputs, goal, &self.jit, &mut logs);
        self.time += start.elapsed();
        logs.errors.splice(..0, self.errors.iter().copied());
        self.jit.write_logs(&logs, self.time);
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
        if kind > NVVM || data.is_empty() {
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

pub fn cuLinkCreate_v2(
    _numOptions: u32,
    options: In<'_, [CUjit_option]>,
    optionValues: InOut<'_, [*mut c_void]>,
    stateOut: Out<'_, CUlinkState>,
) -> Result {
    context::scope()?;
    let jit = Jit::read(options, optionValues)?;
    let link = Box::new(Link {
        jit,
        inputs: Vec::new(),
        state: State::Pending,
        errors: Vec::new(),
        time: Duration::ZERO,
    });
    link.jit.write_logs(&Logs::default(), Duration::ZERO);
    let address = std::ptr::from_ref(&*link).addr();
    stateOut.put(std::ptr::without_provenance_mut(address))?;
    links().get_or_insert_default().insert(address, link);
    Ok(())
}

pub fn cuLinkAddData_v2(
    state: CUlinkState,
    inputType: CUjitInputType,
    data: In<'_, [u8]>,
    _size: usize,
    name: Text<'_>,
    _numOptions: u32,
    _options: In<'_, [CUjit_option]>,
    _optionValues: InOut<'_, [*mut c_void]>,
) -> Result {
    data.not_null()?;
    let name = if name.is_null() { c"" } else { name.get()? };
    with_link(state, |link| {
        link.add(inputType, name.to_bytes(), data.to_vec()?)
    })
}

pub fn cuLinkAddFile_v2(
    state: CUlinkState,
    inputType: CUjitInputType,
    path: Text<'_>,
    _numOptions: u32,
    _options: In<'_, [CUjit_option]>,
    _optionValues: InOut<'_, [*mut c_void]>,
) -> Result {
    let (mut data, name) = (file(path)?, path.get()?);
    if inputType != PTX {
        data.pop();
    }
    with_link(state, |link| link.add(inputType, name.to_bytes(), data))
}

pub fn cuLinkComplete(
    state: CUlinkState,
    cubinOut: Out<'_, *mut c_void>,
    sizeOut: Out<'_, usize>,
) -> Result {
    cubinOut.not_null()?;
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
        // The image's address does not change when the vector is moved.
        cubinOut.put(image.as_mut_ptr().cast())?;
        sizeOut.put_if_wanted(image.len());
        link.state = State::Complete(image);
        Ok(())
    })
}

pub fn cuLinkDestroy(state: CUlinkState) -> Result {
    let link = links()
        .as_mut()
        .and_then(|links| links.remove(&state.addr()));
    link.map(drop).ok_or(CuError::INVALID_HANDLE)
}
