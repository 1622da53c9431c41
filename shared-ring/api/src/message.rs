//! The messages, generated from the table.

use zerocopy::IntoBytes as _;

use crate::handle::{
    Array, Event, Function, Graph, Handle, Library, Memory, Mipmap, Module, Pool, Stream,
};
use crate::result::CuResult;
use crate::wire::{
    self, Decode, DecodeError, DevicePtr, Dispatched, Encode, EncodeError, Fence, Items, Kind,
    Message, MessageInfo, Serve, Server, deliver,
};

include!(concat!(env!("OUT_DIR"), "/messages.rs"));
