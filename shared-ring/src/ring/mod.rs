//! Command ring of a session, with many producers and one consumer.
//!
//! A producer reserves whole units of 64 bytes by moving the tail, copies its record there, and
//! publishes it with the record's first word. Records execute in the order of reservation; if one
//! push happens before another in the program, its record lies before the other in the ring. A
//! record never wraps: a pad fills the units left at the ring's end.
//!
//! Cursors count bytes since the session began and never wrap.

mod consumer;
mod cursors;
mod producer;
mod record;

pub use consumer::{Consumer, Doorbell, Violation};
pub use cursors::Cursors;
pub use producer::{Producer, PushError, Sleep};
pub use record::{RecordBuf, RecordHead};
