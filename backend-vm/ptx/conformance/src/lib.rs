//! Conformance of PTX instructions: every form on generated operands, device against device.
//!
//! [`table::groups`] lists the instruction forms. Each becomes a kernel whose threads take one row of
//! operands each ([`operands`]) and store one row of results; [`run::Runner`] runs it on any
//! [`wormhole_device::Device`], with a texture or a surface where the form has one ([`object`]). What a GPU answered is kept as text ([`answers`]), and [`compare`] says
//! how another device's answers relate to it.
//!
//! The answers in `answers/` are renewed on a machine with a GPU, all of them or those of some groups:
//!
//! ```text
//! cargo run --release -p wormhole-ptx-conformance --example answers -- --device cuda --out FOLDER [GROUP]
//! ```
//!
//! Invariants:
//! - A form's kernel, operands and image depend on nothing but the form. Kept answers carry their digest: if
//!   the form changes, its answers are stale and count as missing.
//! - Results are the same in every run on one device: no row depends on the order of threads.

pub mod answers;
pub mod compare;
pub mod form;
mod kernel;
pub mod latitude;
pub mod object;
pub mod operands;
mod place;
pub mod run;
pub mod table;
