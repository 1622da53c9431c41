//! What is said of a device in a text: one fact a line, `name=value`.
//!
//! Who reads passes over names that it does not know, and does without those that are missing, so that either side
//! may be older than the other.

use core::fmt;

#[cfg(feature = "alloc")]
use alloc::{
    borrow::ToOwned,
    format,
    string::{String, ToString},
    vec::Vec,
};

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
/// The device's number and its subsystem's in the PCI configuration space, as the host's NVML says.
pub const PCI_ID: &str = "pci.id";
pub const PCI_SUBSYSTEM: &str = "pci.subsystem";
/// A process of the tenant: its number in the guest and the bytes of device memory that it holds.
pub const PROCESS: &str = "process";
/// The devices of the tenant whose memory this one reaches: their numbers, with spaces between them.
pub const PEERS: &str = "peers";
/// The device's NVLinks, in their order with spaces between them: see [`Link`].
pub const LINKS: &str = "links";
/// Before the number of a `nvmlGpuP2PCapsIndex_t`: what the host's NVML says of the device and each of the tenant's, call
/// by call with spaces between them.
pub const P2P: &str = "p2p.";
/// Before the number of a `CUdevice_attribute`.
pub const ATTRIBUTE: &str = "attribute.";
/// Before the name of a function of NVML: what the host's answers, call by call with spaces between them.
pub const HOST: &str = "host.";
/// Before the number of a field of NVML: the type and the bits of its value, link by link with spaces between them if
/// the field is told of links.
pub const FIELD: &str = "field.";

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

/// The UUID of a device as programs know it, from its 32 hexadecimal digits.
///
/// ```
/// use wormhole_ring::control::facts;
/// let digits = "00112233445566778899aabbccddeeff";
/// let name = facts::uuid_name(digits).unwrap();
/// assert_eq!(name, "GPU-00112233-4455-6677-8899-aabbccddeeff");
/// assert_eq!(facts::uuid_name("0011"), None);
/// ```
#[cfg(feature = "alloc")]
#[must_use]
pub fn uuid_name(digits: &str) -> Option<String> {
    if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &digits[range]);
    Some(format!("GPU-{a}-{b}-{c}-{d}-{e}"))
}

/// An NVLink of a device, as a tenant knows it.
///
/// ```
/// use wormhole_ring::control::facts::Link;
/// for link in [Link::Switch, Link::Device(7), Link::Inactive, Link::Failed(3)] {
///     assert_eq!(Link::parse(&link.to_string()), Some(link));
/// }
/// assert_eq!(Link::parse("!"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// It leads to a switch.
    Switch,
    /// It leads to the tenant's device with this number.
    Device(u32),
    /// It leads nowhere, or to what is not the tenant's.
    Inactive,
    /// The host's NVML does not tell of it, but gives this error.
    Failed(u32),
}

impl Link {
    /// Reads what `Display` wrote.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "switch" => Some(Self::Switch),
            "-" => Some(Self::Inactive),
            text => match text.strip_prefix('!') {
                Some(code) => code.parse().ok().map(Self::Failed),
                None => text.parse().ok().map(Self::Device),
            },
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch => f.write_str("switch"),
            Self::Device(number) => write!(f, "{number}"),
            Self::Inactive => f.write_str("-"),
            Self::Failed(code) => write!(f, "!{code}"),
        }
    }
}

/// What a call of the host's NVML gave: its integers. One that gives none is a 0.
#[cfg(feature = "alloc")]
#[must_use]
pub fn answer(numbers: &[u64]) -> String {
    let texts: Vec<String> = numbers.iter().map(u64::to_string).collect();
    if texts.is_empty() {
        "0".to_owned()
    } else {
        texts.join(",")
    }
}

/// What a call of the host's NVML gave: its error.
#[cfg(feature = "alloc")]
#[must_use]
pub fn failed(code: u32) -> String {
    format!("!{code}")
}

/// Reads what [`answer`] or [`failed`] wrote into `numbers`. None if that is neither, or not as many integers.
///
/// ```
/// use wormhole_ring::control::facts;
/// let mut numbers = [0; 2];
/// assert_eq!(facts::read_answer(&facts::answer(&[7, 9]), &mut numbers), Some(Ok(())));
/// assert_eq!(numbers, [7, 9]);
/// assert_eq!(facts::read_answer(&facts::failed(3), &mut numbers), Some(Err(3)));
/// assert_eq!(facts::read_answer("7", &mut numbers), None);
/// assert_eq!(facts::read_answer(&facts::answer(&[]), &mut []), Some(Ok(())));
/// ```
pub fn read_answer(text: &str, numbers: &mut [u64]) -> Option<Result<(), u32>> {
    if let Some(code) = text.strip_prefix('!') {
        return code.parse().ok().filter(|code| *code != 0).map(Err);
    }
    if numbers.is_empty() {
        return (text == "0").then_some(Ok(()));
    }
    let mut texts = text.split(',');
    for number in numbers {
        *number = texts.next()?.parse().ok()?;
    }
    texts.next().is_none().then_some(Ok(()))
}
