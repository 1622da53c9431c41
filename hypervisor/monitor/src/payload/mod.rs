//! Payloads.
/// Why a payload could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {}
