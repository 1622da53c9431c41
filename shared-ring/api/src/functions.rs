//! Tables of the driver API: functions, entry points of `cuGetProcAddress`, device attributes.

use crate::message::*;
use crate::wire::Message;

/// Exported function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Stable id, never reused.
    pub id: u16,
    pub name: &'static str,
    pub class: Class,
    /// Ids of the messages that the function may send.
    pub messages: &'static [u16],
}

/// Way in which a function is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Answered in the guest.
    Local,
    /// Written to the ring without an answer.
    Record,
    /// Answered by the worker.
    Request,
    /// Waits for a fence word.
    Fence,
    /// Returns `CUDA_ERROR_NOT_SUPPORTED`, for the given reason.
    Unsupported(&'static str),
}

/// Entry point that `cuGetProcAddress` can return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    pub symbol: &'static str,
    /// True for programs compiled for per-thread default streams.
    pub per_thread: bool,
    /// First CUDA version of this entry point, encoded as for `cuGetProcAddress` (12080 is 12.8).
    pub since: u32,
    /// Index in [`FUNCTIONS`].
    pub function: usize,
}

/// A `CUdevice_attribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeInfo {
    pub id: i32,
    /// Name without `CU_DEVICE_ATTRIBUTE_`.
    pub name: &'static str,
    /// Value that guests get instead of the device's: an attribute promises features, and guests lack some.
    pub answer: Option<i32>,
}

/// Reason why there is no entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoEntryPoint {
    /// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`.
    Symbol,
    /// `CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT`: the symbol is younger than the version asked for.
    Version,
}

/// Finds the function that a program compiled for CUDA `version` means by `symbol`: the newest one not newer than
/// `version`, as an index in [`FUNCTIONS`]. Symbols without a per-thread variant are the same for both.
///
/// # Errors
/// There is no such entry point.
pub fn entry_point(symbol: &[u8], version: u32, per_thread: bool) -> Result<usize, NoEntryPoint> {
    let start = ENTRY_POINTS.partition_point(|row| row.symbol.as_bytes() < symbol);
    let end = ENTRY_POINTS.partition_point(|row| row.symbol.as_bytes() <= symbol);
    let rows = ENTRY_POINTS.get(start..end).unwrap_or_default();
    if rows.is_empty() {
        return Err(NoEntryPoint::Symbol);
    }
    let youngest = |variant: bool| {
        rows.iter()
            .rev()
            .find(|row| row.per_thread == variant && row.since <= version)
    };
    let found = if per_thread {
        youngest(true).or_else(|| youngest(false))
    } else {
        youngest(false)
    };
    found.map(|row| row.function).ok_or(NoEntryPoint::Version)
}

include!(concat!(env!("OUT_DIR"), "/functions.rs"));
