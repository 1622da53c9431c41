//! Operations that are one call of the driver each, generated from the messages that they answer.

use crate::{RawFunction, Result};

include!(concat!(env!("OUT_DIR"), "/driver_calls.rs"));
