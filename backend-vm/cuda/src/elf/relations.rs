//! References of a section of machine code to symbols and other sections: by `sh_info`, and by relocations.

use object::LittleEndian;
use object::elf::{Rel64, Rela64, SHF_EXECINSTR, SHT_PROGBITS, SHT_REL, SHT_RELA, SHT_SYMTAB};
use object::read::elf::SectionHeader;

use super::form::is_table;
use super::{OF_PROCESSOR, Section, Sections, WITHOUT_BYTES};
use crate::managed::{ADDRESS, GENERIC_ADDRESS};

const ENDIAN: LittleEndian = LittleEndian;

/// NVIDIA's section type of facts about kernels. One kernel's section names that of its code.
const FACTS: u32 = 0x7000_0000;

const SYMBOL_BYTES: u64 = 24;
/// Least size of an instruction, and size of an address.
const WORD: u64 = 8;
/// Bits of `sh_info` that are the symbol of a section with code; NVIDIA has the number of registers in the others.
const CODE_SYMBOL: u32 = 0xff_ffff;

/// Returns whether relocations may change a section of this type: code or data that has bytes in the file.
pub fn may_be_relocated(kind: u32) -> bool {
    let is_of_processor = OF_PROCESSOR.contains(&kind) && !WITHOUT_BYTES.contains(&kind);
    kind == SHT_PROGBITS || is_of_processor && !is_table(kind)
}

/// Returns whether all sections refer to symbols and sections that are there. The file has one symbol table at most.
pub fn are_good(sections: &Sections<'_>, image: &[u8]) -> bool {
    // Where a tool has removed sections of a library, as in cuDNN 8, `sh_link` of the others names another section than
    // the symbols.
    let is_table = |section: &&Section| section.sh_type(ENDIAN) == SHT_SYMTAB;
    let table = sections.iter().find(is_table);
    let symbols = table.map_or(0, |table| table.sh_size(ENDIAN) / SYMBOL_BYTES);
    let mut all = sections.iter();
    all.all(|section| is_good(section, sections, symbols, image) == Some(true))
}

/// Returns whether a section refers to symbols and sections that are there. `None` if it names a section that is not, or
/// has no relocations where it should.
fn is_good(section: &Section, sections: &Sections<'_>, symbols: u64, image: &[u8]) -> Option<bool> {
    let info = section.sh_info(ENDIAN);
    let kind = section.sh_type(ENDIAN);
    match kind {
        // The first symbol that is not local, or the end.
        SHT_SYMTAB => return Some(u64::from(info) <= symbols),
        SHT_PROGBITS if is_code(section) => return Some(u64::from(info & CODE_SYMBOL) < symbols),
        FACTS => return find(sections, info).map(|_| true),
        SHT_REL | SHT_RELA => {}
        // Notes and others have facts of their own there.
        _ => return Some(true),
    }
    let named = find(sections, info)?;
    let holds =
        |offset: u64, info: u64| offset < end_of_offsets(named, info) && info >> 32 < symbols;
    let all_hold = if kind == SHT_REL {
        let entries: &[Rel64<LittleEndian>] = section.data_as_array(ENDIAN, image).ok()?;
        let mut entries = entries.iter();
        entries.all(|entry| holds(entry.r_offset.get(ENDIAN), entry.r_info.get(ENDIAN)))
    } else {
        let entries: &[Rela64<LittleEndian>] = section.data_as_array(ENDIAN, image).ok()?;
        let mut entries = entries.iter();
        entries.all(|entry| holds(entry.r_offset.get(ENDIAN), entry.r_info.get(ENDIAN)))
    };
    Some(may_be_relocated(named.sh_type(ENDIAN)) && all_hold)
}

fn find<'a>(sections: &Sections<'a>, index: u32) -> Option<&'a Section> {
    let index = usize::try_from(index).ok()?;
    sections.iter().nth(index)
}

fn is_code(section: &Section) -> bool {
    section.sh_flags(ENDIAN) & u64::from(SHF_EXECINSTR) != 0
}

/// Returns the end of the offsets in a section at which a relocation with this `r_info` may be.
fn end_of_offsets(target: &Section, info: u64) -> u64 {
    let kind = info & u64::from(u32::MAX);
    let is_word = is_code(target) || [ADDRESS, GENERIC_ADDRESS].map(u64::from).contains(&kind);
    // Relocations of other types can be of one byte.
    let bytes = if is_word { WORD } else { 1 };
    target.sh_size(ENDIAN).saturating_sub(bytes - 1)
}
