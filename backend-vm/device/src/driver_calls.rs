//! Operations that are one driver call each, generated from their messages.

use crate::{RawFunction, Result};

include!(concat!(env!("OUT_DIR"), "/driver_calls.rs"));
