//! Tests of the server and of its process.

mod driver;
mod process;
mod protocol;
