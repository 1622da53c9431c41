//! The form of an ELF file's tables.
//!
//! The format has extensions that one reader follows and another does not: counts in the first section instead of the
//! header, further symbol tables, entries of other sizes. Compilers write none of these (found in files of `nvcc` 11 to
//! 13, and in object files of hosts' compilers). A file that has any is refused, so that the driver finds the tables
//! that were checked. No table shares its bytes with another section, so that relocations, which change sections, leave
//! the tables as they were.

use object::LittleEndian;
use object::elf::{
    PN_XNUM, SHN_LORESERVE, SHT_DYNSYM, SHT_NOBITS, SHT_REL, SHT_RELA, SHT_STRTAB, SHT_SYMTAB,
    SHT_SYMTAB_SHNDX,
};
use object::read::elf::{FileHeader, SectionHeader};

use super::{Header, Section, Sections, WITHOUT_BYTES};

const ENDIAN: LittleEndian = LittleEndian;

const HEADER_BYTES: u16 = 64;
const SECTION_BYTES: u16 = 64;
const SEGMENT_BYTES: u16 = 56;

/// Returns whether a header says by itself where the tables of sections and segments are.
pub fn is_literal(header: &Header) -> bool {
    let (sections, segments) = (header.e_shnum(ENDIAN), header.e_phnum(ENDIAN));
    let behind_header = |offset: u64| offset >= u64::from(HEADER_BYTES);
    let has_sections = header.e_shentsize(ENDIAN) == SECTION_BYTES
        && behind_header(header.e_shoff(ENDIAN))
        && sections < SHN_LORESERVE
        // The section of names is not the first one, so there are two at least.
        && (1..sections).contains(&header.e_shstrndx(ENDIAN));
    let has_segments = header.e_phentsize(ENDIAN) == SEGMENT_BYTES
        && behind_header(header.e_phoff(ENDIAN))
        && segments < PN_XNUM;
    header.e_ehsize(ENDIAN) == HEADER_BYTES && has_sections && (segments == 0 || has_segments)
}

/// Returns the size of an entry of a section that is a table of symbols or relocations.
fn entry_bytes(kind: u32) -> Option<u64> {
    match kind {
        SHT_SYMTAB | SHT_DYNSYM | SHT_RELA => Some(24),
        SHT_REL => Some(16),
        _ => None,
    }
}

/// Returns whether sections of a type are read by the driver as a table.
pub fn is_table(kind: u32) -> bool {
    kind == SHT_STRTAB || entry_bytes(kind).is_some()
}

/// Returns whether a file has one symbol table at most, tables have entries of their usual sizes, and tables and headers
/// have their bytes for themselves. All sections lie within the file.
pub fn has_usual_tables(header: &Header, sections: &Sections<'_>) -> bool {
    let kinds = || sections.iter().map(|section| section.sh_type(ENDIAN));
    let symbol_tables = kinds().filter(|kind| [SHT_SYMTAB, SHT_DYNSYM].contains(kind));
    symbol_tables.count() <= 1
        && !kinds().any(|kind| kind == SHT_SYMTAB_SHNDX)
        && sections.iter().all(has_usual_entries)
        && are_apart(ranges(header, sections))
}

fn has_usual_entries(section: &Section) -> bool {
    entry_bytes(section.sh_type(ENDIAN)).is_none_or(|bytes| {
        section.sh_entsize(ENDIAN) == bytes && section.sh_size(ENDIAN).is_multiple_of(bytes)
    })
}

/// Bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    start: u64,
    end: u64,
    is_table: bool,
}

/// Returns the parts of a file: its headers, and its sections that have bytes.
fn ranges(header: &Header, sections: &Sections<'_>) -> Vec<Part> {
    let part = |start: u64, bytes: u64, is_table| Part {
        start,
        end: start.saturating_add(bytes),
        is_table,
    };
    let table =
        |start, count: u16, bytes: u16| part(start, u64::from(count) * u64::from(bytes), true);
    let headers = [
        part(0, u64::from(HEADER_BYTES), true),
        table(
            header.e_shoff(ENDIAN),
            header.e_shnum(ENDIAN),
            SECTION_BYTES,
        ),
        table(
            header.e_phoff(ENDIAN),
            header.e_phnum(ENDIAN),
            SEGMENT_BYTES,
        ),
    ];
    let others = sections.iter().filter_map(|section| {
        let kind = section.sh_type(ENDIAN);
        let has_bytes = kind != SHT_NOBITS && !WITHOUT_BYTES.contains(&kind);
        let (start, bytes) = (section.sh_offset(ENDIAN), section.sh_size(ENDIAN));
        has_bytes.then(|| part(start, bytes, is_table(kind)))
    });
    let all = headers.into_iter().chain(others);
    all.filter(|part| part.start < part.end).collect()
}

/// Returns whether no table shares bytes with another part.
fn are_apart(mut parts: Vec<Part>) -> bool {
    parts.sort_unstable();
    let (mut end, mut end_of_tables) = (0, 0);
    parts.into_iter().all(|part| {
        let is_apart = part.start >= if part.is_table { end } else { end_of_tables };
        end = end.max(part.end);
        if part.is_table {
            end_of_tables = end_of_tables.max(part.end);
        }
        is_apart
    })
}
