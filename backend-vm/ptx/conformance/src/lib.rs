//! Conformance of PTX instructions: compares devices on every form with generated operands.
//!
//! [`table::groups`] lists the instruction forms. Each becomes a kernel whose threads read one row of operands each
//! ([`operands`]) and store one row of results; [`run::Runner`] runs it on any [`wormhole_device::Device`], with a
//! texture or a surface where the form has one ([`object`]). The answers of a GPU are recorded as text ([`answers`]),
//! and [`compare`] compares another device's answers with them.
//!
//! A machine with a GPU records the answers in `answers/` anew, all of them or those of some groups:
//!
//! ```text
//! cargo run --release -p wormhole-ptx-conformance --example answers -- --device cuda --out FOLDER [GROUP]
//! ```
//!
//! Invariants:
//! - A form's kernel, operands and image depend on nothing but the form. Recorded answers carry their digest: if the
//!   form changes, its answers are stale and count as missing.
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
