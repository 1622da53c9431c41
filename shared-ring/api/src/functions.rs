//! The functions of the driver API: what they are, which one `cuGetProcAddress` means; device attributes.

use crate::message::*;
use crate::wire::Message;

/// An exported function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Stable, never reused.
    pub id: u16,
    pub name: &'static str,
    pub class: Class,
    /// Ids of the messages it may send.
    pub messages: &'static [u16],
}

/// How a function is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Answered in the guest.
    Local,
    /// Written and forgotten.
    Record,
    /// Answered by the worker.
    Request,
    /// Waits on a word.
    Fence,
    /// Returns `CUDA_ERROR_NOT_SUPPORTED`, for this reason.
    Unsupported(&'static str),
}

/// One row of what `cuGetProcAddress` answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    pub symbol: &'static str,
    /// For programs compiled for per-thread default streams.
    pub per_thread: bool,
    /// The first CUDA version it answers for, as `cuGetProcAddress` takes it (12080 is 12.8).
    pub since: u32,
    /// Index in [`FUNCTIONS`].
    pub function: usize,
}

/// A `CUdevice_attribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeInfo {
    pub id: i32,
    /// Without `CU_DEVICE_ATTRIBUTE_`.
    pub name: &'static str,
    /// What a guest is told whatever the device says: attributes are promises, and a guest lacks things.
    pub answer: Option<i32>,
}

/// Why there is no entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoEntryPoint {
    /// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`.
    Symbol,
    /// `CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT`: the symbol is younger than the version asked for.
    Version,
}

/// The function that a program compiled for CUDA `version` means by `symbol`, as an index in [`FUNCTIONS`]:
/// the youngest that is not younger than that version. Symbols without a per-thread variant are the same for
/// both.
///
/// # Errors
/// There is none.
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
