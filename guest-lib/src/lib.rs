//! The CUDA driver library of guests: `libcuda.so.1` where there is no GPU and no driver.
//!
//! Programs and CUDA's own libraries load it unmodified. A call is answered here where the guest has the answer
//! ([`object`], [`device`], [`memory`]). Other calls are written to the session's ring, and waited for only where
//! CUDA's contract requires it ([`session`]).
//!
//! The C functions are generated from the API table; each calls its namesake in [`calls`].
//!
//! The modules lie in layers, from the top: exports ([`calls`], [`export_tables`], [`exports`], [`logs`], [`runtime`]);
//! [`graph`], with capture; [`work`] of streams; [`object`]s and [`memory`]; the [`session`] and its [`device`]s; and
//! the remaining modules, which all of them use. A module uses its own layer and those below it, which `cargo xtask
//! structure` checks.
//!
//! Without a session `cuInit` logs one line with the cause and the remedy, and returns:
//! - `CUDA_ERROR_NO_DEVICE` where no backend is known (neither `WORMHOLE_CONTROL` nor `/run/wormhole-control` nor `/dev/vsock`) or the
//!   backend has no device;
//! - `CUDA_ERROR_SYSTEM_NOT_READY` where the backend cannot be reached, refuses, or speaks another protocol.
//!
//! After a session has ended without a fault of the program, every call returns one code:
//! `CUDA_ERROR_CONTEXT_IS_DESTROYED` where the worker died, `CUDA_ERROR_SYSTEM_NOT_READY` where the supervisor or the
//! control stream is gone.
//!
//! Environment: `WORMHOLE_CONTROL` (`unix:PATH`, `unix:@NAME`, `vsock:CID:PORT`), `WORMHOLE_WINDOW` (the
//! window's device in a VM; `/dev/wormhole-window` if not set), `WORMHOLE_LOG` (`off`, `error`, `warn`, `info`,
//! `debug`, `trace`), `CUDA_VISIBLE_DEVICES`, `CUDA_LAUNCH_BLOCKING`; other `CUDA_` variables travel to the host's
//! driver. A program with more rights than its caller ignores the first two.
//!
//! Invariants:
//! - The launch path allocates nothing, takes no lock and formats nothing.
//! - A handle is looked up by arithmetic; one that was never minted, or was destroyed, is an error.
//! - A forked child of an initialised process never touches the session of its parent.
//! - Every wait ends when the session does.

mod calls;
mod export_tables;
mod exports;
mod logs;
mod runtime;

mod graph;

mod work;

mod memory;
mod object;

mod device;
mod session;

mod bulk;
mod counts;
mod error;
mod faults;
mod handle;
#[cfg(feature = "mutants")]
mod mutants;
mod pages;
mod parameter;
mod readable;
mod signals;
mod thread;
mod types;

use wormhole_connect::log;
