//! Processing of a guest's image up to the driver, for the fuzz target.

use std::borrow::Cow;

use object::LittleEndian;
use object::elf::{FileHeader64, SHT_SYMTAB, STT_OBJECT};
use object::read::elf::{FileHeader, SectionHeader, Sym};
use wormhole_device::{ManagedPlace, Result};
use wormhole_fatbin::Entry;

use crate::code::{Alternative, Budget, Code, alternatives};
use crate::{elf, managed};

/// Greatest announced size of an entry; larger ones are skipped to save time.
const MOST_BYTES: u64 = 1 << 20;
/// Address of the managed variables.
const START: u64 = 0x7000_0000_0000;

/// Processes an image as a device of compute capability 9.0 does.
///
/// # Panics
/// The driver would get something else than a whole ELF file whose variables lie in their sections, or text with one
/// zero byte, at its end.
pub fn take_apart(image: &[u8], force_ptx: bool) {
    let Ok(ways) = alternatives(image, 90, force_ptx) else {
        return;
    };
    let budget = Budget::default();
    for way in ways {
        match way {
            Alternative::Plain(bytes) => check(Code::new(Cow::Borrowed(bytes))),
            Alternative::Entry(entry) => unpack(&budget, &entry),
            Alternative::Linked(entries) => {
                for entry in entries {
                    unpack(&budget, &entry);
                }
            }
        }
    }
}

fn unpack(budget: &Budget, entry: &Entry<'_>) {
    if entry.unpacked_bytes() <= MOST_BYTES {
        check(budget.unpack(entry));
    }
}

fn check(code: Result<Code<'_>>) {
    let Ok(code) = code else { return };
    _ = (code.output(), code.names_managed());
    if !code.is_machine() {
        let (end, text) = code.bytes().split_last().expect("text has an end");
        assert!(*end == 0 && !text.contains(&0));
        assert!(std::str::from_utf8(text).is_ok());
        return;
    }
    assert!(elf::is_whole(code.bytes()));
    assert_variables_lie_in_sections(code.bytes());
    let Ok(Some(managed)) = managed::Code::read(code.bytes().to_vec()) else {
        return;
    };
    let place = ManagedPlace {
        address: START,
        bytes: managed.bytes(),
    };
    let Ok(Some(placed)) = managed.place(place) else {
        return;
    };
    // The image keeps its length and is whole, and no value lies outside the place.
    assert_eq!(placed.code.bytes().len(), code.bytes().len());
    assert!(elf::is_whole(placed.code.bytes()));
    assert!(!placed.code.names_managed());
    assert_variables_lie_in_sections(placed.code.bytes());
    for (address, values) in placed.initial {
        let end = address.checked_add(values.len() as u64).expect("an end");
        assert!(address >= START && end <= START + place.bytes);
    }
}

/// Panics if a data object of global memory or of a constant bank reaches beyond its section.
fn assert_variables_lie_in_sections(image: &[u8]) {
    let header = FileHeader64::<LittleEndian>::parse(image).expect("a header");
    let endian = header.endian().expect("an order of bytes");
    let sections = header.sections(endian, image).expect("sections");
    let symbols = sections.symbols(endian, image, SHT_SYMTAB);
    for symbol in symbols.expect("symbols").iter() {
        let home = usize::from(symbol.st_shndx(endian));
        let Ok(section) = sections.section(object::SectionIndex(home)) else {
            continue;
        };
        let name = sections.section_name(endian, section).expect("a name");
        let has_variables = name.starts_with(b".nv.global") || name.starts_with(b".nv.constant");
        if home == 0 || !has_variables || symbol.st_type() != STT_OBJECT {
            continue;
        }
        let room = section.sh_size(endian).checked_sub(symbol.st_value(endian));
        assert!(room.is_some_and(|room| symbol.st_size(endian) <= room));
    }
}
