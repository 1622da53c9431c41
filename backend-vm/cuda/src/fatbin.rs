//! Fat binaries: which of their parts the driver would load.
//!
//! The layout is what `nvcc` 11 to 13 write, found by looking at their output: a header (magic, version,
//! header size, size of the rest), then parts, each a header and a payload.

use std::borrow::Cow;
use std::io::Read;

/// PTX text.
const PTX: u16 = 1;
/// An ELF image of machine code.
const ELF: u16 = 2;
/// The payload is an LZ4 block.
const LZ4: u64 = 0x2000;
/// The payload is a Zstandard frame.
const ZSTD: u64 = 0x8000;
/// Nothing larger is decompressed.
const MOST: u64 = 1 << 30;

/// One part.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    kind: u16,
    arch: u32,
    flags: u64,
    compressed: usize,
    decompressed: u64,
    payload: &'a [u8],
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes: [u8; N] = bytes.get(at..at.checked_add(N)?)?.try_into().ok()?;
    Some(
        bytes
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte)),
    )
}

fn length<const N: usize>(bytes: &[u8], at: usize) -> Option<usize> {
    number::<N>(bytes, at)?.try_into().ok()
}

/// What begins a fat binary.
pub const MAGIC: &[u8] = b"\x50\xed\x55\xba";

/// The parts' bytes, and what follows the fat binary; `None` if it is cut off.
pub fn split(image: &[u8]) -> Option<(&[u8], &[u8])> {
    let start = length::<2>(image, 6)?;
    let end = start.checked_add(length::<8>(image, 8)?)?;
    Some((image.get(start..end)?, &image[end..]))
}

/// All parts; `None` if the image is not laid out as expected. Linked images may hold several fat
/// binaries, one after another.
fn parts(image: &[u8]) -> Option<Vec<Part<'_>>> {
    let mut parts = Vec::new();
    let mut image = image;
    while image.starts_with(MAGIC) {
        let (body, after) = split(image)?;
        read(body, &mut parts)?;
        image = after;
    }
    Some(parts)
}

fn read<'a>(mut rest: &'a [u8], parts: &mut Vec<Part<'a>>) -> Option<()> {
    while !rest.is_empty() {
        let header = length::<4>(rest, 4)?;
        let size = length::<8>(rest, 8)?;
        let end = header.checked_add(size).filter(|end| *end > 0)?;
        parts.push(Part {
            kind: number::<2>(rest, 0)?.try_into().ok()?,
            arch: number::<4>(rest, 28)?.try_into().ok()?,
            flags: number::<8>(rest, 40)?,
            compressed: length::<4>(rest, 16)?,
            decompressed: number::<8>(rest, 56)?,
            payload: rest.get(header..end)?,
        });
        rest = &rest[end..];
    }
    Some(())
}

/// The parts that the driver chooses among on a device of compute capability `arch`: machine code of
/// the same major version, else PTX. `None` if that cannot be told.
pub fn chosen(image: &[u8], arch: u32) -> Option<Vec<Part<'_>>> {
    let parts = parts(image)?;
    let runs =
        |part: &&Part<'_>| part.kind == ELF && part.arch / 10 == arch / 10 && part.arch <= arch;
    let mut found: Vec<_> = parts.iter().filter(runs).copied().collect();
    if found.is_empty() {
        found = parts
            .iter()
            .filter(|part| part.kind == PTX)
            .copied()
            .collect();
    }
    (!found.is_empty()).then_some(found)
}

impl<'a> Part<'a> {
    /// The payload, decompressed; `None` if it cannot be.
    pub fn text(&self) -> Option<Cow<'a, [u8]>> {
        if self.flags & (LZ4 | ZSTD) == 0 {
            return Some(Cow::Borrowed(self.payload));
        }
        let payload = self.payload.get(..self.compressed)?;
        let bytes = usize::try_from(self.decompressed.min(MOST)).ok()?;
        if self.flags & LZ4 != 0 {
            return lz4_flex::block::decompress(payload, bytes)
                .ok()
                .map(Cow::Owned);
        }
        let mut text = Vec::new();
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(payload).ok()?;
        decoder.by_ref().take(MOST).read_to_end(&mut text).ok()?;
        Some(Cow::Owned(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::uses_output;

    fn part(kind: u16, arch: u32, flags: u64, payload: &[u8], decompressed: usize) -> Vec<u8> {
        let padded = payload.len().next_multiple_of(8);
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&0x101_u16.to_le_bytes());
        bytes.extend_from_slice(&64_u32.to_le_bytes());
        bytes.extend_from_slice(&(padded as u64).to_le_bytes());
        bytes.extend_from_slice(&u32::try_from(payload.len()).expect("small").to_le_bytes());
        bytes.resize(28, 0);
        bytes.extend_from_slice(&arch.to_le_bytes());
        bytes.resize(40, 0);
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.resize(56, 0);
        bytes.extend_from_slice(&(decompressed as u64).to_le_bytes());
        bytes.extend_from_slice(payload);
        bytes.resize(64 + padded, 0);
        bytes
    }

    fn fatbin(parts: &[Vec<u8>]) -> Vec<u8> {
        let body = parts.concat();
        let mut bytes = b"\x50\xed\x55\xba\x01\x00\x10\x00".to_vec();
        bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    const LOUD: &[u8] = b"calls vprintf somewhere, calls it again: vprintf vprintf vprintf";
    const QUIET: &[u8] = b"calls nothing at all";

    #[test]
    fn only_the_part_that_the_driver_would_load_counts() {
        let image = fatbin(&[
            part(ELF, 80, 0, LOUD, 0),
            part(ELF, 90, 0, QUIET, 0),
            part(ELF, 100, 0, LOUD, 0),
            part(PTX, 90, 0, LOUD, 0),
        ]);
        assert!(!uses_output(&image, 90));
        assert!(uses_output(&image, 86), "8.0 runs on 8.6");
        assert!(uses_output(&image, 120), "PTX, since no machine code fits");
        let second = fatbin(&[part(ELF, 90, 0, LOUD, 0)]);
        assert!(
            uses_output(&[image, second].concat(), 90),
            "a second one follows"
        );
    }

    #[test]
    fn compressed_parts_are_read() {
        let lz4 = |text: &[u8]| lz4_flex::block::compress(text);
        let zstd = |text: &[u8]| {
            ruzstd::encoding::compress_to_vec(text, ruzstd::encoding::CompressionLevel::Fastest)
        };
        for (text, loud) in [(LOUD, true), (QUIET, false)] {
            let image = fatbin(&[part(PTX, 75, LZ4, &lz4(text), text.len())]);
            assert_eq!(uses_output(&image, 90), loud);
            let image = fatbin(&[part(ELF, 90, ZSTD | 0x11, &zstd(text), text.len())]);
            assert_eq!(uses_output(&image, 90), loud);
        }
    }

    #[test]
    fn what_cannot_be_read_may_print() {
        let image = fatbin(&[part(ELF, 90, ZSTD, QUIET, QUIET.len())]);
        assert!(uses_output(&image, 90), "not compressed after all");
        let image = fatbin(&[part(ELF, 90, 0, QUIET, 0)]);
        assert!(!uses_output(&image, 90));
        for end in 4..image.len() {
            assert!(uses_output(&image[..end], 90), "cut at {end}");
        }
        assert!(uses_output(&fatbin(&[]), 90));
    }
}
