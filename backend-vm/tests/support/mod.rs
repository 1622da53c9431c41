//! What the tests stand on: a launcher and guests that speak to a real supervisor and its real workers.

#![allow(dead_code, reason = "each test uses its part")]

pub mod backend;
pub mod guest;
