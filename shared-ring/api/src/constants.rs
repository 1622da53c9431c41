//! Flags and enumerations of the driver API, from `constants.idl`: a module for each.

include!(concat!(env!("OUT_DIR"), "/constants.rs"));
