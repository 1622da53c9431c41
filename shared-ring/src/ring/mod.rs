//! The command ring of a session: many producers, one consumer.
//!
//! A producer reserves whole units of 64 bytes by moving the tail, copies its record there, and
//! publishes it with the record's first word. Reservation order is the order of execution: what
//! happened before in the program lies before in the ring. A record never wraps; the units left at
//! the end are filled with a pad.
//!
//! Cursors count bytes since the session began and never wrap.

mod consumer;
mod cursors;
mod producer;
mod record;

pub use consumer::{Consumer, Violation};
pub use cursors::Cursors;
pub use producer::{Producer, PushError};
pub use record::{RecordBuf, RecordHead};
