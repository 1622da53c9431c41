//! Messages that one driver call answers, without checks of their own. Generated from the API
//! table.

use wormhole_api::{Outcome, Serve};

use super::{Answer, Call, Session};

include!(concat!(env!("OUT_DIR"), "/driver_calls.rs"));
