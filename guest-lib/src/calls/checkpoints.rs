//! Checkpoints of processes. A process shares its memory with a worker that a checkpoint does not include, so no
//! process can be locked for one.

use std::ffi::c_void;

use rustix::process::{Pid, test_kill_process};
use wormhole_api::constants::process_state::RUNNING;

use crate::error::{CuError, Result};
use crate::parameter::{Out, Pointer};

/// Checks that a process is the calling one. The CUDA state of other processes is not known here.
fn this(pid: i32) -> Result {
    if u32::try_from(pid).is_ok_and(|pid| pid == std::process::id()) {
        return Ok(());
    }
    let process = Pid::from_raw(pid.max(0));
    Err(match process.map(test_kill_process) {
        Some(Ok(())) => CuError::NOT_SUPPORTED,
        Some(Err(_)) | None => CuError::OPERATING_SYSTEM,
    })
}

pub fn cuCheckpointProcessGetState(pid: i32, state: Out<'_, u32>) -> Result {
    state.not_null()?;
    this(pid)?;
    state.put(RUNNING)
}

/// Fails, because only a locked process can be unlocked, and no process is ever locked.
pub fn cuCheckpointProcessUnlock(pid: i32, _args: Pointer<'_, c_void>) -> Result {
    this(pid)?;
    Err(CuError::ILLEGAL_STATE)
}
