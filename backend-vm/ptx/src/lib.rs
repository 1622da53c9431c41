//! Runs PTX on the CPU: loader, decoder, interpreter.
//!
//! [`Module::load`] finds the PTX in an image that a program passes to the driver; [`Module::link`]
//! makes a [`Program`] once the module's variables have addresses; [`Program::kernel`] decodes a
//! [`Kernel`]; [`launch`] runs it. Streams, events and allocation are left to the caller.
//!
//! # Invariants
//!
//! - Images come from a hostile guest. Loading and decoding are total: no panic, no unsafe code,
//!   and every size is bounded ([`limits`]).
//! - An unsupported feature fails only the kernels that need it, by name, when such a kernel is
//!   requested.
//! - A launch accesses no memory but the regions that [`GlobalMemory`] grants, and those by atomic
//!   operations only.
//! - Every thread of a block makes progress, regardless of the other threads of its warp.

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
