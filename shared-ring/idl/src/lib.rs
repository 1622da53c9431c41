//! Parser of the table of the CUDA driver API, and generators of code from it.
//!
//! `shared-ring/api/driver.idl` declares the functions, the files of `messages/` beside it the messages, and
//! `results.idl` and `constants.idl` the result codes, flags and enumerations; [`load`] reads them all. Build scripts
//! generate Rust from them: [`messages`] and [`functions`] for both ends of the ring, [`exports`] for the guest's
//! library. `nvml.idl` declares the functions of NVML ([`Nvml`]). Generated code goes to `OUT_DIR`.

#![forbid(unsafe_code)]

mod calls;
mod code;
mod constants;
mod coverage;
mod driver_calls;
mod entry_points;
mod examples;
mod exports;
mod functions;
mod load;
mod messages;
mod nvml;
mod parse;
mod round_trips;
mod table;
mod tested;

pub use calls::calls;
pub use constants::{constants, results};
pub use coverage::coverage;
pub use driver_calls::{DriverCallError, cuda_driver_calls, driver_calls, served_driver_calls};
pub use entry_points::{EntryPointError, entry_points, sources};
pub use examples::examples;
pub use exports::exports;
pub use functions::functions;
pub use load::{LoadError, load};
pub use messages::{messages, protocol_hash};
pub use nvml::{Nvml, NvmlError, nvml_coverage, nvml_exports, nvml_tables};
pub use parse::{ParseError, parse};
pub use round_trips::round_trips;
pub use table::*;
pub use tested::Tested;
