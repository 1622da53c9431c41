//! Checkpoints of processes. A process shares its memory with a worker that a checkpoint does not include, so no
//! process can be locked for one.

use std::ffi::c_void;

use wormhole_api::constants::process_state::RUNNING;

use rustix::process::{Pid, test_kill_process};

use crate::error::{CuError, Result};
use crate::parameter::{Out, Pointer};

/// Checks that a process is the calling one. The CUDA state of other processes is not known here.
fn this(pid: i32) -> Result {
    if u32::try_from(pid).is_ok_and(|pid| pid == std::process::id()) {
        return Ok(());
    }
    let process = (pid > 0).then(|| Pid::from_raw(pid)).flatten();
    Err(
        if process.is_some_and(|process| test_kill_process(process).is_ok()) {
            CuError::NOT_SUPPORTED
        } else {
            CuError::OPERATING_SYSTEM
        },
    )
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
