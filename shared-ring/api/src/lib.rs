//! The CUDA driver API and its messages on the ring.
//!
//! `driver.idl` declares the functions. The messages, their encoders, the decoder and the dispatch are generated from
//! the tables beside it. Handles, result codes and the few functions that generated code calls are written by hand.
//!
//! Invariants:
//! - Decoding is total, allocates nothing and has no unsafe code: any bytes decode to a checked message or an error.
//! - A decoded message holds no value that its declaration excludes.
//! - Encoding allocates nothing: it passes the byte slices of a message to a closure.
#![no_std]
#![deny(unsafe_code)]

#[cfg(feature = "std")]
extern crate std;

pub mod array;
pub mod constants;
pub mod ctypes;
mod functions;
pub mod handle;
mod jit;
pub mod limits;
mod message;
pub mod nvml;
pub mod pool;
mod result;
mod shapes;
mod wire;

pub use functions::{
    ATTRIBUTES, AttributeInfo, Class, ENTRY_POINTS, EntryPoint, FUNCTIONS, FunctionInfo,
    NoEntryPoint, entry_point,
};
pub use handle::{
    Array, Event, Function, Graph, Handle, Library, Memory, Mipmap, Module, Pool, Stream,
};
pub use jit::is_plain_jit_option;
pub use message::*;
pub use result::CuResult;
pub use wire::{
    Decode, DecodeError, DevicePtr, Dispatched, Encode, EncodeError, FENCES, Fence, Items, Kind,
    MESSAGE_LIMIT, Message, MessageInfo, Outcome, REPLY_LIMIT, Serve, Served, Server, deliver,
};
