//! The CUDA driver API as it crosses the window.
//!
//! `driver.idl` is the one table; the messages, their encoders, the decoder and the dispatch are generated
//! from it. What is written by hand here: handles, result codes, and the few functions that generated code
//! calls.
//!
//! Invariants:
//! - Decoding is total, allocates nothing and has no unsafe: any bytes give a checked message or an error.
//! - A decoded message holds no value that its declaration excludes.
//! - Encoding allocates nothing: a message becomes a few byte slices, handed to a closure.
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
mod message;
pub mod nvml;
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
