//! Messages that one call of the driver answers, with nothing to check: generated from the table.

use wormhole_api::{Outcome, Serve};

use super::{Answer, Call, Session};

include!(concat!(env!("OUT_DIR"), "/driver_calls.rs"));
