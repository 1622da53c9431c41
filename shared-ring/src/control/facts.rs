//! What is said of a device in a text: one fact a line, `name=value`.
//!
//! Who reads passes over names that it does not know, and does without those that are missing, so that either side
//! may be older than the other.

/// The device's name, as `cuDeviceGetName` says.
pub const NAME: &str = "name";
/// Its UUID, 32 hexadecimal digits.
pub const UUID: &str = "uuid";
/// Bytes of its memory.
pub const TOTAL_MEMORY: &str = "memory.total";
/// Bytes that the tenant's processes hold of it.
pub const USED_MEMORY: &str = "memory.used";
/// Bytes of it that the host has left, where that is known.
pub const FREE_MEMORY: &str = "memory.free";
/// What `cuDriverGetVersion` says.
pub const CUDA_VERSION: &str = "cuda.version";
/// The version of the host's driver, as its NVML says.
pub const DRIVER_VERSION: &str = "driver.version";
/// A process of the tenant: its number in the guest and the bytes of device memory that it holds.
pub const PROCESS: &str = "process";
/// Before the number of a `CUdevice_attribute`.
pub const ATTRIBUTE: &str = "attribute.";
/// Before the name of a function of NVML: what the host's answers.
pub const HOST: &str = "host.";

/// The facts of a text, in its order.
pub fn all(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.split_once('='))
}

/// The first fact of this name.
///
/// ```
/// use wormhole_ring::control::facts;
/// let text = "uuid=00\nmemory.total=1024\n";
/// assert_eq!(facts::get(text, facts::UUID), Some("00"));
/// assert_eq!(facts::number(text, facts::TOTAL_MEMORY), Some(1024));
/// assert_eq!(facts::number(text, facts::FREE_MEMORY), None);
/// ```
#[must_use]
pub fn get<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    all(text).find_map(|(key, value)| (key == name).then_some(value))
}

/// The first fact of this name, where it is a number.
#[must_use]
pub fn number(text: &str, name: &str) -> Option<u64> {
    get(text, name)?.parse().ok()
}
