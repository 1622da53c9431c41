//! Fat binaries: which of their entries the driver would load.

use wormhole_fatbin::{Entry, entries};

/// The entries that the driver chooses among on a device of compute capability `arch`: machine code of
/// the same major version, else PTX. `None` if that cannot be told.
pub fn chosen(image: &[u8], arch: u32) -> Option<Vec<Entry<'_>>> {
    let runs = |entry: &Entry<'_>| {
        let made_for = entry.architecture();
        entry.is_elf() && made_for / 10 == arch / 10 && made_for <= arch
    };
    let mut entries = entries(image).ok()?;
    if entries.iter().any(runs) {
        entries.retain(runs);
    } else {
        entries.retain(Entry::is_ptx);
    }
    (!entries.is_empty()).then_some(entries)
}

#[cfg(test)]
mod tests {
    use crate::image::Facts;

    fn uses_output(image: &[u8], arch: u32) -> bool {
        Facts::of(image, arch).uses_output
    }

    const PTX: u16 = 1;
    const ELF: u16 = 2;
    const LZ4: u64 = 0x2000;
    const ZSTD: u64 = 0x8000;

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
