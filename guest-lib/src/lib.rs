//! The CUDA driver library of guests: `libcuda.so.1` where there is no GPU and no driver.
//!
//! Programs and CUDA's own libraries load it unmodified. A call is answered here where the guest can know
//! the answer ([`context`], [`device`], [`memory_map`]), written to the session's ring where CUDA's
//! contract does not ask for more, and waited for where it does ([`session`]).
//!
//! The C functions are generated from the API table; each calls its namesake in [`calls`].
//!
//! Invariants:
//! - The launch path allocates nothing, takes no lock and formats nothing.
//! - A handle is looked up by arithmetic; one that was never minted, or was destroyed, is an error.
//! - A forked child of an initialised process never touches the session of its parent.
//! - Every wait ends when the session does.

mod calls;
mod context;
mod copy;
mod counts;
mod device;
mod error;
mod event;
mod export_tables;
mod exports;
mod function;
mod handle;
mod image;
mod launch;
mod log;
mod memory;
mod memory_map;
mod module;
mod output;
mod runtime;
mod session;
mod stream;
mod types;
