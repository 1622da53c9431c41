//! Drops Linux capabilities.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// Reading files and folders whatever their modes say.
pub const READ_ANY_FILE: CapabilitySet = CapabilitySet::DAC_READ_SEARCH;

/// Drops all capabilities of this thread and of those that it starts, irreversibly: programs that they execute have
/// none either.
///
/// # Errors
/// As prctl(2) and capset(2).
pub fn drop_capabilities() -> io::Result<()> {
    keep_capabilities(CapabilitySet::empty())
}

/// Drops all capabilities but these, and keeps them only if this thread has them. Programs that it executes have none.
///
/// # Errors
/// As prctl(2), capget(2) and capset(2).
pub fn keep_capabilities(kept: CapabilitySet) -> io::Result<()> {
    // Errors are ignored: without CAP_SETPCAP the call fails, and numbers beyond the last capability are invalid.
    for number in 0..u64::BITS {
        let _ = remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number));
    }
    clear_ambient_capability_set()?;
    let kept = match kept.is_empty() {
        true => kept,
        false => kept & capabilities(None)?.permitted,
    };
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    Ok(set_no_new_privs(true)?)
}
