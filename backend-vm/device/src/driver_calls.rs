//! Operations that are one driver call each, generated from their messages.

use crate::{RawArray, RawEvent, RawFunction, RawMemory, RawMipmap, RawPool, RawStream, Result};

include!(concat!(env!("OUT_DIR"), "/driver_calls.rs"));
