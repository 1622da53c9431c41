//! Fatbins: headers, entries and their compression.
//!
//! A fatbin is a header of 16 bytes (magic, version, its own size, the size of
//! what follows) and entries, each with a header and a payload. Kind 1 is PTX,
//! kind 2 an ELF file. Flag 0x2000 says LZ4, flag 0x8000 zstd.

use std::borrow::Cow;
use std::io::Read;

use super::{ARCHITECTURE, Found, elf, text, u16_at, u32_at, u64_at, usize_at};
use crate::error::LoadError;
use crate::limits::MAX_PTX_BYTES;

const MAGIC: u32 = 0xba55_ed50;
const KIND_PTX: u16 = 1;
const KIND_ELF: u16 = 2;
const FLAG_LZ4: u64 = 0x2000;
const FLAG_ZSTD: u64 = 0x8000;

/// Most entries that are looked at.
const MAX_ENTRIES: usize = 4096;

/// One entry of a fatbin.
struct Entry<'a> {
    kind: u16,
    architecture: u32,
    flags: u64,
    payload: &'a [u8],
    /// Size after decompression.
    bytes: u64,
}

/// Whether the bytes begin like a fatbin.
pub(super) fn is_fatbin(bytes: &[u8]) -> bool {
    u32_at(bytes, 0) == Some(MAGIC)
}

/// Finds the PTX for the newest architecture that this device counts as.
pub(super) fn find(image: &[u8]) -> Result<Found<'_>, LoadError> {
    let entries = entries(image)?;
    let ptx = entries.iter().filter(|entry| entry.kind == KIND_PTX);
    let best = ptx
        .clone()
        .filter(|entry| entry.architecture <= ARCHITECTURE)
        .max_by_key(|entry| entry.architecture);
    if let Some(best) = best {
        return match unpack(best)? {
            Cow::Borrowed(bytes) => text(bytes).map(|text| Found::Ptx(Cow::Borrowed(text))),
            Cow::Owned(bytes) => text(&bytes).map(|text| Found::Ptx(Cow::Owned(text.to_owned()))),
        };
    }
    let mut machine = Vec::new();
    for entry in entries.iter().filter(|entry| entry.kind == KIND_ELF) {
        let bytes = unpack(entry)?;
        match elf::has_kernels(&bytes).filter(|_| elf::is_elf(&bytes)) {
            Some(true) => machine.push(format!("sm_{}", entry.architecture)),
            Some(false) => {}
            None => {
                return Err(LoadError::InvalidImage(
                    "an ELF entry of the fatbin is damaged".to_owned(),
                ));
            }
        }
    }
    machine.extend(ptx.map(|entry| format!("compute_{}", entry.architecture)));
    machine.dedup();
    if machine.is_empty() {
        Ok(Found::Empty)
    } else {
        Err(LoadError::NoKernelImage {
            arch: machine.join(", "),
        })
    }
}

fn entries(image: &[u8]) -> Result<Vec<Entry<'_>>, LoadError> {
    let damaged = || LoadError::InvalidImage("the fatbin's headers are damaged".to_owned());
    let mut list = Vec::new();
    let mut at = 0;
    while is_fatbin(image.get(at..).unwrap_or(&[])) {
        let header = &image[at..];
        let (start, end) = body(header).ok_or_else(damaged)?;
        let mut rest = header.get(start..end).ok_or_else(damaged)?;
        while !rest.is_empty() {
            let (entry, length) = entry(rest).ok_or_else(damaged)?;
            list.push(entry);
            if list.len() > MAX_ENTRIES {
                let (found, limit) = (list.len() as u64, MAX_ENTRIES as u64);
                return Err(LoadError::TooLarge {
                    what: "the fatbin's list of entries",
                    found,
                    limit,
                });
            }
            rest = rest.get(length..).ok_or_else(damaged)?;
        }
        // The next one begins at an aligned offset.
        at = at.saturating_add(end);
        let padding = image
            .get(at..)
            .unwrap_or(&[])
            .iter()
            .take(16)
            .take_while(|&&byte| byte == 0)
            .count();
        at = at.saturating_add(padding);
    }
    Ok(list)
}

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
    if header < 64 {
        return None;
    }
    let payload = bytes.get(header..header.checked_add(padded)?)?;
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
    };
    Some((entry, header.checked_add(padded)?))
}

fn unpack<'a>(entry: &Entry<'a>) -> Result<Cow<'a, [u8]>, LoadError> {
    let limit = MAX_PTX_BYTES as u64;
    let size = match usize::try_from(entry.bytes) {
        Ok(size) if size <= MAX_PTX_BYTES => size,
        _ => {
            return Err(LoadError::TooLarge {
                what: "an entry of the fatbin",
                found: entry.bytes,
                limit,
            });
        }
    };
    let damaged = |how: &str| {
        LoadError::InvalidImage(format!("a {how} entry of the fatbin does not decompress"))
    };
    if entry.flags & FLAG_ZSTD != 0 {
        let decoder =
            ruzstd::decoding::StreamingDecoder::new(entry.payload).map_err(|_| damaged("zstd"))?;
        let mut bytes = Vec::new();
        decoder
            .take(entry.bytes)
            .read_to_end(&mut bytes)
            .map_err(|_| damaged("zstd"))?;
        return if bytes.len() == size {
            Ok(Cow::Owned(bytes))
        } else {
            Err(damaged("zstd"))
        };
    }
    if entry.flags & FLAG_LZ4 != 0 {
        // No LZ4 block expands more than 255 times.
        if size / 255 > entry.payload.len() {
            return Err(damaged("LZ4"));
        }
        let bytes = lz4_flex::block::decompress(entry.payload, size).map_err(|_| damaged("LZ4"))?;
        return if bytes.len() == size {
            Ok(Cow::Owned(bytes))
        } else {
            Err(damaged("LZ4"))
        };
    }
    Ok(Cow::Borrowed(entry.payload))
}
