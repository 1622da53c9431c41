//! Reads fat binaries ("fatbins"): headers, entries and their compression.
//!
//! The layout is that of `nvcc` 11 to 13, found by reading their output. A fatbin is a header of 16 bytes (magic,
//! version, size of the header, size of the entries) and entries, each with a header and a payload. Several fatbins
//! may follow one another: in the sections of an object file, and in the image of a relocatable link, which holds
//! the linked fatbin first and the inputs of the link after it.
//!
//! Images come from a guest: every length is checked, and the size of decompressed data is bounded. There is no
//! unsafe code.

pub mod fields;
pub mod host;

use std::borrow::Cow;
use std::io::Read;

use fields::{u16_at, u32_at, u64_at, usize_at};

const MAGIC: &[u8] = b"\x50\xed\x55\xba";
const KIND_PTX: u16 = 1;
const KIND_ELF: u16 = 2;
/// The payload is an LZ4 block.
const FLAG_LZ4: u64 = 0x2000;
/// The payload is a Zstandard frame.
const FLAG_ZSTD: u64 = 0x8000;
/// Entry flag: built for one architecture with its specific features, as `sm_90a`.
const FLAG_SPECIFIC: u64 = 0x10_0000;
/// Entry flag: built for a family of architectures, as `sm_100f`.
const FLAG_FAMILY: u64 = 0x20_0000;

/// All entry flags of fatbins that were read: 64-bit code, code for a debugger, made on Linux, the payload's compression,
/// architectures, and one that newer toolkits set on machine code.
const FLAGS: u64 = 0x100_0013 | FLAG_LZ4 | FLAG_ZSTD | FLAG_SPECIFIC | FLAG_FAMILY;
/// Version and size of a fatbin's header.
const FATBIN_FORM: [u8; 4] = [1, 0, 16, 0];
/// Version of an entry's header.
const ENTRY_VERSION: u16 = 0x101;
/// Size of an entry's header without the parts that its offsets locate.
const ENTRY_BYTES: usize = 64;

/// Maximum number of fatbins in an image, and of entries.
const MAX_ENTRIES: usize = 4096;

/// Error in reading a fatbin or one of its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FatbinError {
    #[error("the fatbin's headers are damaged")]
    Headers,
    #[error("the fatbin has {found} entries, more than the limit of {limit}")]
    Entries { found: u64, limit: u64 },
    #[error("an entry of the fatbin is {found} bytes long, more than the limit of {limit}")]
    Entry { found: u64, limit: u64 },
    #[error("a {0} entry of the fatbin does not decompress")]
    Compression(&'static str),
}

/// Entry of a fatbin.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    kind: u16,
    architecture: u32,
    flags: u64,
    payload: &'a [u8],
    /// Size after decompression.
    bytes: u64,
    is_usual: bool,
}

/// Returns whether the bytes begin with the magic number of a fatbin.
pub fn is_fatbin(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Returns the size in bytes of the fatbin that an image begins with.
///
/// # Errors
/// The fatbin is cut off, or its header is damaged.
pub fn extent(image: &[u8]) -> Result<usize, FatbinError> {
    body(image)
        .map(|(_, end)| end)
        .filter(|end| *end <= image.len())
        .ok_or(FatbinError::Headers)
}

/// Returns the fatbins of an image, which follow one another at aligned offsets.
///
/// # Errors
/// Headers that do not fit the image, or too many fatbins.
pub fn fatbins(image: &[u8]) -> Result<Vec<&[u8]>, FatbinError> {
    split(image).map(|(list, _)| list)
}

/// Returns the fatbins of an image that holds nothing else.
///
/// # Errors
/// As of [`fatbins`], or anything but zeros behind the last one: another reader could find a fatbin there.
pub(crate) fn whole(image: &[u8]) -> Result<Vec<&[u8]>, FatbinError> {
    let (list, rest) = split(image)?;
    match rest.iter().all(|byte| *byte == 0) {
        true => Ok(list),
        false => Err(FatbinError::Headers),
    }
}

/// Returns the fatbins of an image, and the bytes behind them.
fn split(image: &[u8]) -> Result<(Vec<&[u8]>, &[u8]), FatbinError> {
    let mut list = Vec::new();
    let mut rest = image;
    while is_fatbin(rest) {
        let (fatbin, behind) = rest
            .split_at_checked(extent(rest)?)
            .ok_or(FatbinError::Headers)?;
        list.push(fatbin);
        within_limit(list.len())?;
        let padding = behind.iter().take(16).take_while(|&&byte| byte == 0);
        rest = behind.get(padding.count()..).unwrap_or(&[]);
    }
    Ok((list, rest))
}

/// Returns all entries of an image's fatbins.
///
/// # Errors
/// Headers that do not fit the image, or too many entries.
pub fn entries(image: &[u8]) -> Result<Vec<Entry<'_>>, FatbinError> {
    let damaged = FatbinError::Headers;
    let mut list = Vec::new();
    for fatbin in fatbins(image)? {
        let (start, end) = body(fatbin).ok_or(damaged)?;
        let mut rest = fatbin.get(start..end).ok_or(damaged)?;
        let is_usual = fatbin.get(4..8) == Some(&FATBIN_FORM);
        while !rest.is_empty() {
            let (mut entry, length) = entry(rest).ok_or(damaged)?;
            entry.is_usual &= is_usual;
            list.push(entry);
            within_limit(list.len())?;
            rest = rest.get(length..).ok_or(damaged)?;
        }
    }
    Ok(list)
}

fn within_limit(count: usize) -> Result<(), FatbinError> {
    if count <= MAX_ENTRIES {
        return Ok(());
    }
    let (found, limit) = (count as u64, MAX_ENTRIES as u64);
    Err(FatbinError::Entries { found, limit })
}

/// Returns the offsets at which the entries after a header start and end.
fn body(header: &[u8]) -> Option<(usize, usize)> {
    let start = usize::from(u16_at(header, 6)?);
    let end = start.checked_add(usize_at(header, 8)?)?;
    (start >= 16).then_some((start, end))
}

fn entry(bytes: &[u8]) -> Option<(Entry<'_>, usize)> {
    let header = usize::try_from(u32_at(bytes, 4)?).ok()?;
    let padded = usize_at(bytes, 8)?;
    let compressed = usize::try_from(u32_at(bytes, 16)?).ok()?;
    let flags = u64_at(bytes, 40)?;
    let full = u64_at(bytes, 56)?;
    if header < ENTRY_BYTES {
        return None;
    }
    let length = header.checked_add(padded)?;
    let payload = bytes.get(header..length)?;
    let packed = flags & (FLAG_LZ4 | FLAG_ZSTD) != 0;
    let payload = if packed {
        payload.get(..compressed)?
    } else {
        payload
    };
    let entry = Entry {
        kind: u16_at(bytes, 0)?,
        architecture: u32_at(bytes, 28)?,
        flags,
        payload,
        bytes: if packed { full } else { payload.len() as u64 },
        is_usual: is_usual(bytes.get(..header)?, padded, packed) == Some(true),
    };
    Some((entry, length))
}

/// Returns whether a header has the version and flags that are known, and its offsets locate parts of it. `None` if it is
/// too short for what they locate.
fn is_usual(header: &[u8], padded: usize, packed: bool) -> Option<bool> {
    let (version, compressed) = (u16_at(header, 2)?, u32_at(header, 16)?);
    let (flags, full) = (u64_at(header, 40)?, u64_at(header, 56)?);
    // Sizes that one reader uses and another does not.
    let most = if packed { u64::MAX } else { padded as u64 };
    let has_sizes = u64::from(compressed) <= most && full <= most;
    let part = |at: usize| {
        let start = usize::try_from(u32_at(header, at)?).ok()?;
        let bytes = usize::try_from(u32_at(header, at.checked_add(4)?)?).ok()?;
        let is_absent = (start, bytes) == (0, 0);
        let part = header.get(start..start.checked_add(bytes)?);
        Some(is_absent || start >= ENTRY_BYTES && part.is_some())
    };
    let has_name = part(32)?;
    let has_options = match usize::try_from(u32_at(header, 20)?).ok()? {
        0 => true,
        at => at >= ENTRY_BYTES && part(at)?,
    };
    let is_known = version == ENTRY_VERSION && flags & !FLAGS == 0;
    Some(is_known && has_sizes && has_name && has_options)
}

impl<'a> Entry<'a> {
    /// Returns whether another reader understands the headers of entry and fatbin as this one does: their versions and flags
    /// are known, and what they locate lies in them.
    pub fn is_usual(&self) -> bool {
        self.is_usual
    }

    /// Returns whether the entry is PTX text.
    pub fn is_ptx(&self) -> bool {
        self.kind == KIND_PTX
    }

    /// Returns whether the entry is an ELF image of machine code.
    pub fn is_elf(&self) -> bool {
        self.kind == KIND_ELF
    }

    /// Returns the compute capability that the entry was built for: 90 for 9.0.
    pub fn architecture(&self) -> u32 {
        self.architecture
    }

    /// Returns whether a device of compute capability `arch` (90 for 9.0) runs the entry. Machine code runs on later
    /// devices of its major version, PTX on all later ones; code for a family stays in its major version, and code
    /// with architecture-specific features runs on that architecture alone (CUDA C++ Programming Guide, "Compute
    /// Capabilities").
    pub fn runs_on(&self, arch: u32) -> bool {
        let made_for = self.architecture;
        if self.flags & FLAG_SPECIFIC != 0 {
            return made_for == arch;
        }
        let of_major = self.is_elf() || self.flags & FLAG_FAMILY != 0;
        made_for <= arch && (!of_major || made_for / 10 == arch / 10)
    }

    /// Returns the key by which the best of the entries that run is chosen: the architecture, then whether the code
    /// uses features of that architecture, then those of its family.
    pub fn preference(&self) -> impl Ord + use<> {
        let specific = self.flags & FLAG_SPECIFIC != 0;
        let family = self.flags & FLAG_FAMILY != 0;
        (self.architecture, specific, family)
    }

    /// Returns the size in bytes of the decompressed payload, as the entry states it; [`unpack`](Self::unpack)
    /// checks it.
    pub fn unpacked_bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the payload, decompressed.
    ///
    /// # Errors
    /// The payload is larger than `limit`, or does not decompress.
    pub fn unpack(&self, limit: usize) -> Result<Cow<'a, [u8]>, FatbinError> {
        let size = match usize::try_from(self.bytes) {
            Ok(size) if size <= limit => size,
            _ => {
                let (found, limit) = (self.bytes, limit as u64);
                return Err(FatbinError::Entry { found, limit });
            }
        };
        let (name, bytes) = match (self.flags & FLAG_ZSTD != 0, self.flags & FLAG_LZ4 != 0) {
            (false, false) => return Ok(Cow::Borrowed(self.payload)),
            (true, false) => ("zstd", self.unpack_zstd()),
            (false, true) => ("LZ4", self.unpack_lz4(size)),
            // Another reader might choose the other one.
            (true, true) => ("zstd and LZ4", None),
        };
        bytes
            .filter(|bytes| bytes.len() == size)
            .map(Cow::Owned)
            .ok_or(FatbinError::Compression(name))
    }

    fn unpack_zstd(&self) -> Option<Vec<u8>> {
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(self.payload).ok()?;
        let mut bytes = Vec::new();
        // One byte more shows a frame that is longer than the entry says.
        let most = self.bytes.saturating_add(1);
        decoder.by_ref().take(most).read_to_end(&mut bytes).ok()?;
        // Another reader would go on with what follows the frame.
        decoder.into_inner().is_empty().then_some(bytes)
    }

    fn unpack_lz4(&self, size: usize) -> Option<Vec<u8>> {
        // No LZ4 block expands more than 255 times.
        if size / 255 > self.payload.len() {
            return None;
        }
        lz4_flex::block::decompress(self.payload, size).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fatbin of one uncompressed entry of 8 bytes, whose header has 16 bytes more than its fields.
    fn fatbin(fields: &[(usize, u32)]) -> Vec<u8> {
        let (header, payload) = (80, 8);
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, 0, 16, 0]);
        bytes.extend((u64::from(header) + payload).to_le_bytes());
        let plain = [(0, 0x101_0002), (4, header), (8, 8), (28, 90), (40, 0x11)];
        let entry = bytes.len();
        bytes.resize(entry + 88, 0);
        for (at, value) in plain.iter().chain(fields) {
            bytes[entry + at..entry + at + 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    fn is_usual(fields: &[(usize, u32)]) -> bool {
        let image = fatbin(fields);
        let entries = entries(&image).unwrap();
        assert_eq!(entries.len(), 1);
        entries[0].is_usual()
    }

    #[test]
    fn an_entry_is_usual_if_all_of_its_header_is_understood() {
        for fields in [
            &[][..],
            // An identifier.
            &[(32, 64), (36, 16)],
            // Options, none, and some at a place that another place locates.
            &[(20, 64)],
            &[(20, 64), (64, 72), (68, 8)],
            &[(20, 72), (72, 80), (76, 0), (32, 64), (36, 3)],
            &[(40, 0x120_8011)],
            &[(40, 0x2013), (16, 8), (56, 1000)],
            &[(16, 8), (56, 8)],
        ] {
            assert!(is_usual(fields), "{fields:?}");
        }
        for (what, fields) in [
            (
                "the identifier is no part",
                &[(32, 0x7fff_0000), (36, 8)][..],
            ),
            ("its end is behind the header", &[(32, 72), (36, 9)]),
            ("it begins in the fields", &[(32, 56), (36, 8)]),
            ("it has no place", &[(36, 8)]),
            ("it is endless", &[(32, 64), (36, u32::MAX)]),
            ("the place of options is no part", &[(20, 76)]),
            ("it is far away", &[(20, 0x7fff_0000)]),
            ("it lies in the fields", &[(20, 32)]),
            ("options are no part", &[(20, 64), (64, 80), (68, 1)]),
            ("options are endless", &[(20, 64), (64, 72), (68, u32::MAX)]),
            ("a flag is unknown", &[(40, 0x1011)]),
            ("a high flag is unknown", &[(44, 1)]),
            ("the version is unknown", &[(0, 0x102_0002)]),
            ("code without compression has a packed size", &[(16, 9)]),
            ("code without compression has a full size", &[(56, 9)]),
        ] {
            assert!(!is_usual(fields), "{what}");
        }
        // The fatbin's own header has another version, or is longer.
        let mut other = fatbin(&[]);
        other[4] = 2;
        assert!(!entries(&other).unwrap()[0].is_usual());
        let mut longer = fatbin(&[]);
        longer[6] = 24;
        longer.splice(16..16, [0; 8]);
        assert!(!entries(&longer).unwrap()[0].is_usual());
    }
}
