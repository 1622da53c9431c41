//! PTX on the CPU: loader, decoder, interpreter.
//!
//! [`Module::load`] takes what a program hands to the driver and finds the PTX in
//! it; [`Module::link`] makes a [`Program`] once the module's variables have
//! addresses; [`Program::kernel`] decodes a [`Kernel`]; [`launch`] runs it.
//! Streams, events and allocation are the caller's.
//!
//! # Invariants
//!
//! - Images come from a guest that means harm. Loading and decoding are total:
//!   no panic, no unsafe code, and every size is bounded ([`limits`]).
//! - What is not supported fails the one kernel that needs it, by name, when the
//!   kernel is asked for.
//! - A launch touches no memory but the regions that [`GlobalMemory`] grants, and
//!   those by atomic operations only.
//! - Every thread of a block makes progress, whatever the others of its warp do.

mod alu;
mod decode;
mod error;
mod exec;
pub mod image;
pub mod limits;
pub mod link;
mod module;
pub mod parse;

pub use decode::ParamLayout;
pub use error::{Fault, FaultKind, KernelError, LoadError};
pub use exec::{
    AddressMode, CLOCK_HZ, ChannelType, DeviceHeap, GlobalMemory, Image, LOCAL_WINDOW,
    LOWEST_GLOBAL, LaunchConfig, Level, Milestones, Objects, Output, PARAM_WINDOW, Region,
    SHARED_WINDOW, Texture, launch,
};
pub use module::{Kernel, Module, ModuleVariable, Program};
pub use parse::ast::Reference;
