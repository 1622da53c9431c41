//! Parses payloads: static ELF files for x86-64, linked at fixed addresses.

use zerocopy::byteorder::{LE, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::PayloadError;

const MAGIC: [u8; 6] = [0x7f, b'E', b'L', b'F', 2, 1]; // 64 bits, little-endian
const TYPE_EXEC: u16 = 2;
const MACHINE_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_INTERPRETER: u32 = 3;
const FLAG_EXECUTE: u32 = 1;
const FLAG_WRITE: u32 = 2;

#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct FileHeader {
    magic: [u8; 6],
    ident: [u8; 10],
    kind: U16<LE>,
    machine: U16<LE>,
    version: U32<LE>,
    entry: U64<LE>,
    segments_offset: U64<LE>,
    sections_offset: U64<LE>,
    flags: U32<LE>,
    header_size: U16<LE>,
    segment_size: U16<LE>,
    segments: U16<LE>,
    section_size: U16<LE>,
    sections: U16<LE>,
    names: U16<LE>,
}

#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SegmentHeader {
    kind: U32<LE>,
    flags: U32<LE>,
    offset: U64<LE>,
    address: U64<LE>,
    physical: U64<LE>,
    file_size: U64<LE>,
    memory_size: U64<LE>,
    align: U64<LE>,
}

/// A segment to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment<'a> {
    pub address: u64,
    pub memory_size: u64,
    pub bytes: &'a [u8],
    pub writable: bool,
    pub executable: bool,
}

/// A parsed payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Program<'a> {
    pub entry: u64,
    pub segments: Vec<Segment<'a>>,
}

/// Parses `file`. Total: any bytes yield a program or an error. Segments must lie between `low` and `high`.
pub(super) fn parse(file: &[u8], low: u64, high: u64) -> Result<Program<'_>, PayloadError> {
    let broken = |what| PayloadError::NotAProgram { what };
    let (header, _) = FileHeader::ref_from_prefix(file).map_err(|_| broken("it is too short"))?;
    if header.magic != MAGIC {
        return Err(broken("it is no little-endian 64-bit ELF file"));
    }
    if header.machine.get() != MACHINE_X86_64 {
        return Err(broken("it is not for x86-64"));
    }
    if header.kind.get() != TYPE_EXEC {
        return Err(broken(
            "it is not linked at fixed addresses (-static -no-pie)",
        ));
    }
    if usize::from(header.segment_size.get()) != size_of::<SegmentHeader>() {
        return Err(broken("its segment headers have an unknown size"));
    }
    let headers = usize::try_from(header.segments_offset.get())
        .ok()
        .and_then(|offset| file.get(offset..))
        .ok_or_else(|| broken("its segment headers lie past its end"))?;
    let (headers, _) =
        <[SegmentHeader]>::ref_from_prefix_with_elems(headers, usize::from(header.segments.get()))
            .map_err(|_| broken("its segment headers lie past its end"))?;
    let mut segments = Vec::new();
    for segment in headers {
        match segment.kind.get() {
            SEGMENT_INTERPRETER => return Err(broken("it wants a dynamic linker")),
            SEGMENT_LOAD if segment.memory_size.get() > 0 => {
                segments.push(load(file, segment, low, high)?);
            }
            _ => {}
        }
    }
    Ok(Program {
        entry: header.entry.get(),
        segments,
    })
}

fn load<'a>(
    file: &'a [u8],
    segment: &SegmentHeader,
    low: u64,
    high: u64,
) -> Result<Segment<'a>, PayloadError> {
    let (address, memory_size) = (segment.address.get(), segment.memory_size.get());
    let outside = || PayloadError::Segment {
        address,
        bytes: memory_size,
        low,
        high,
    };
    let end = address.checked_add(memory_size).ok_or_else(outside)?;
    if address < low || end > high || segment.file_size.get() > memory_size {
        return Err(outside());
    }
    let start = usize::try_from(segment.offset.get()).ok();
    let len = usize::try_from(segment.file_size.get()).ok();
    let bytes = start
        .zip(len)
        .and_then(|(start, len)| file.get(start..start.checked_add(len)?))
        .ok_or(PayloadError::NotAProgram {
            what: "a segment lies past its end",
        })?;
    Ok(Segment {
        address,
        memory_size,
        bytes,
        writable: segment.flags.get() & FLAG_WRITE != 0,
        executable: segment.flags.get() & FLAG_EXECUTE != 0,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOW: u64 = 2 << 20;
    const HIGH: u64 = 16 << 20;

    /// Returns an executable with one segment, whose code is `ret`.
    fn executable(address: u64, memory_size: u64) -> Vec<u8> {
        program([0xc3; 8], address, memory_size)
    }

    /// Returns an executable with one segment of code.
    pub(crate) fn program<const N: usize>(
        code: [u8; N],
        address: u64,
        memory_size: u64,
    ) -> Vec<u8> {
        let mut file = Vec::new();
        file.extend(MAGIC);
        file.extend([1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        file.extend(TYPE_EXEC.to_le_bytes());
        file.extend(MACHINE_X86_64.to_le_bytes());
        file.extend(1u32.to_le_bytes());
        file.extend(address.to_le_bytes());
        file.extend(64u64.to_le_bytes());
        file.extend(0u64.to_le_bytes());
        file.extend(0u32.to_le_bytes());
        for half in [64u16, 56, 1, 0, 0, 0] {
            file.extend(half.to_le_bytes());
        }
        file.extend(SEGMENT_LOAD.to_le_bytes());
        file.extend((FLAG_EXECUTE | 4).to_le_bytes());
        for word in [120, address, address, N as u64, memory_size, 0x1000] {
            file.extend(u64::to_le_bytes(word));
        }
        file.extend(code);
        file
    }

    #[test]
    fn a_static_executable_is_taken() {
        let file = executable(LOW, 4096);
        let program = parse(&file, LOW, HIGH).expect("program");
        assert_eq!(program.entry, LOW);
        assert_eq!(program.segments[0].bytes, [0xc3; 8]);
        assert!(program.segments[0].executable && !program.segments[0].writable);
    }

    #[test]
    fn segments_outside_private_memory_are_refused() {
        for (address, size) in [(0, 4096), (HIGH - 8, 4096), (u64::MAX - 8, 4096), (LOW, 4)] {
            let file = executable(address, size);
            assert!(
                matches!(parse(&file, LOW, HIGH), Err(PayloadError::Segment { .. })),
                "{address:#x}"
            );
        }
    }

    proptest! {
        #[test]
        fn no_file_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut file = MAGIC.to_vec();
            file.extend(bytes);
            // A program and an error are both valid results.
            let _ = parse(&file, LOW, HIGH).is_ok();
        }

        #[test]
        fn no_changed_byte_panics(index in 0usize..184, value: u8) {
            let mut file = executable(LOW, 4096);
            let index = index % file.len();
            file[index] = value;
            if let Ok(program) = parse(&file, LOW, HIGH) {
                for segment in program.segments {
                    prop_assert!(segment.address >= LOW);
                    prop_assert!(segment.address + segment.memory_size <= HIGH);
                }
            }
        }
    }
}
