//! The one table of the CUDA driver API, and what is generated from it.
//!
//! `shared-ring/api/driver.idl` declares messages and functions; [`parse`] reads it. Build scripts turn the
//! result into Rust: [`messages`] for both ends of the ring. Generated code goes to `OUT_DIR`.

mod messages;
mod parse;
mod table;

pub use messages::{messages, protocol_hash};
pub use parse::{ParseError, parse};
pub use table::{Body, Enum, Field, FieldType, Handle, Kind, Message, Scalar, Struct, Table, Tail};
