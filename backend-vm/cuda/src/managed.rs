//! Managed variables of machine code (`__managed__`).
//!
//! The driver allocates such variables where only the host process can access them. An image that has some is
//! therefore loaded with their addresses in it, in memory that the guest and the device share. References to the
//! variables are entries of a constant bank, pointers among other variables, or instructions, each with a relocation
//! (ELF-64 object file format; the flag of managed symbols and the types of relocations as found in files that `nvcc`
//! 13 and the driver's own compiler write; that the driver loads such an image was measured on an H200).
//!
//! The image comes from a guest: every offset is checked, and there is no unsafe code. The result passes the same check
//! as an image of a guest. No relocation changes a table of such a file.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use wormhole_device::{CuError, Layout, ManagedPlace, Result};
use wormhole_fatbin::fields::{u16_at, u32_at, u64_at, usize_at};

use crate::{code, elf};

/// Section types (`sh_type`).
const SYMBOLS: u32 = 2;
const RELOCATIONS: u32 = 4;
const SHORT_RELOCATIONS: u32 = 9;
const NO_BITS: u32 = 8;
/// Symbol type of a data object (`st_info`).
const OBJECT: u8 = 1;
/// Flag of a managed variable in `st_other`.
const MANAGED: u8 = 4;
/// Relocation types: 64 bits of an address in global memory, and of the same as a generic address.
pub const ADDRESS: u32 = 2;
pub const GENERIC_ADDRESS: u32 = 4;
/// Relocation types: low and high 32 bits of an address, in the upper half of an instruction's first eight bytes.
const LOW_HALF: u32 = 0x38;
const HIGH_HALF: u32 = 0x39;

const SECTION_BYTES: usize = 64;
const SYMBOL_BYTES: usize = 24;
const RELOCATION_BYTES: usize = 24;

/// Greatest length of a variable's name.
const MAX_NAME: usize = 4096;
/// Greatest number of managed variables of an image.
const MAX_VARIABLES: usize = 1 << 16;
/// Greatest size of all variables of an image.
const MAX_BYTES: u64 = 1 << 40;

/// Fields of a section header that this module uses.
#[derive(Clone, Copy, Debug)]
struct Section {
    /// Offset of the header itself.
    header: usize,
    kind: u32,
    offset: usize,
    bytes: usize,
    link: u32,
    info: u32,
    alignment: u64,
}

impl Section {
    /// Returns the range in the image of `bytes` bytes at an offset in the section. `None` if the section contains no
    /// code or data there, which relocations are for.
    fn range(&self, offset: usize, bytes: usize) -> Option<std::ops::Range<usize>> {
        let end = offset.checked_add(bytes)?;
        if end > self.bytes || !elf::may_be_relocated(self.kind) {
            return None;
        }
        Some(self.offset.checked_add(offset)?..self.offset.checked_add(end)?)
    }
}

/// Managed variable.
#[derive(Debug)]
struct Variable {
    name: String,
    bytes: u64,
    /// Offset in the place.
    offset: u64,
    /// Offset of the initial values in the image; `None` for zeros.
    values: Option<usize>,
}

/// Machine code with managed variables.
#[derive(Debug)]
pub struct Code {
    image: Vec<u8>,
    sections: Vec<Section>,
    /// Symbol table.
    symbols: Section,
    /// Variables by the indices of their symbols.
    variables: HashMap<usize, Variable>,
    /// Ranges of initial values in the image: ends by starts.
    values: BTreeMap<usize, usize>,
    layout: Layout,
}

/// Returns whether machine code has managed variables, of whatever kind.
pub fn are_in(image: &[u8]) -> bool {
    read(image).is_some_and(|found| found.has_others || !found.managed.is_empty())
}

fn sections(image: &[u8]) -> Option<Vec<Section>> {
    let start = usize_at(image, 40)?;
    let count = usize::from(u16_at(image, 60)?);
    (0..count)
        .map(|index| {
            let header = index
                .checked_mul(SECTION_BYTES)
                .and_then(|offset| offset.checked_add(start))?;
            let at = |offset: usize| header.checked_add(offset);
            Some(Section {
                header,
                kind: u32_at(image, at(4)?)?,
                offset: usize_at(image, at(24)?)?,
                bytes: usize_at(image, at(32)?)?,
                link: u32_at(image, at(40)?)?,
                info: u32_at(image, at(44)?)?,
                alignment: u64_at(image, at(48)?)?,
            })
        })
        .collect()
}

/// Sections and managed symbols of an image.
#[derive(Debug)]
struct Found {
    sections: Vec<Section>,
    /// Symbol table.
    symbols: Section,
    /// Indices of the symbols of managed variables.
    managed: Vec<usize>,
    /// Whether other symbols have the flag, such as those of variables before a link.
    has_others: bool,
}

fn read(image: &[u8]) -> Option<Found> {
    let sections = sections(image)?;
    let symbols = *sections.iter().find(|section| section.kind == SYMBOLS)?;
    let (mut managed, mut has_others) = (Vec::new(), false);
    for symbol in 0..symbols.bytes / SYMBOL_BYTES {
        let at = symbols
            .offset
            .checked_add(symbol.checked_mul(SYMBOL_BYTES)?)?;
        let facts = image.get(at..at.checked_add(SYMBOL_BYTES)?)?;
        let is_defined = u16_at(facts, 6)? != 0;
        if facts[5] & MANAGED == 0 {
            continue;
        }
        if facts[4] & 0xf == OBJECT && is_defined {
            managed.push(symbol);
        } else {
            has_others = true;
        }
    }
    Some(Found {
        sections,
        symbols,
        managed,
        has_others,
    })
}

/// Entry of a relocation table.
#[derive(Clone, Copy, Debug)]
struct Relocation {
    /// Offset in the relocated section.
    offset: usize,
    kind: u32,
    symbol: usize,
    addend: u64,
}

impl Relocation {
    fn read(image: &[u8], at: usize) -> Option<Self> {
        let entry = image.get(at..at.checked_add(RELOCATION_BYTES)?)?;
        Some(Self {
            offset: usize_at(entry, 0)?,
            kind: u32_at(entry, 8)?,
            symbol: usize::try_from(u32_at(entry, 12)?).ok()?,
            addend: u64_at(entry, 16)?,
        })
    }
}

impl Code {
    /// Reads machine code. `None` if the image has no managed variables.
    pub fn read(image: Vec<u8>) -> Result<Option<Self>> {
        let Some(found) = read(&image) else {
            return Ok(None);
        };
        if found.has_others {
            tracing::warn!(
                "an image is refused: it has managed symbols that are no variables of linked code"
            );
            return Err(CuError::NOT_SUPPORTED);
        }
        if found.managed.is_empty() {
            return Ok(None);
        }
        if found.managed.len() > MAX_VARIABLES {
            return Err(CuError::NOT_SUPPORTED);
        }
        let mut code = Self {
            image,
            sections: found.sections,
            symbols: found.symbols,
            variables: HashMap::new(),
            values: BTreeMap::new(),
            layout: Layout::default(),
        };
        for symbol in found.managed {
            let variable = code.variable(symbol).ok_or(CuError::INVALID_IMAGE)?;
            code.variables.insert(symbol, variable);
        }
        if code.layout.bytes() > MAX_BYTES {
            return Err(CuError::OUT_OF_MEMORY);
        }
        Ok(Some(code))
    }

    fn variable(&mut self, symbol: usize) -> Option<Variable> {
        let at = self.symbols.offset + symbol * SYMBOL_BYTES;
        let names = self.section(self.symbols.link)?;
        let name = names
            .offset
            .checked_add(usize::try_from(u32_at(&self.image, at)?).ok()?)?;
        let name = self.image.get(name..)?;
        let length = name.iter().take(MAX_NAME).position(|byte| *byte == 0)?;
        let name = &name[..length];
        let section = self.section(u32::from(u16_at(&self.image, at + 6)?))?;
        let (value, bytes) = (
            usize_at(&self.image, at + 8)?,
            u64_at(&self.image, at + 16)?,
        );
        let values = if section.kind == NO_BITS {
            None
        } else {
            let start = section.offset.checked_add(value)?;
            let end = start.checked_add(usize::try_from(bytes).ok()?)?;
            self.image.get(start..end)?;
            self.values.insert(start, end);
            Some(start)
        };
        Some(Variable {
            name: String::from_utf8(name.to_vec()).ok()?,
            bytes,
            offset: self.layout.add(bytes, section.alignment.max(1))?,
            values,
        })
    }

    fn section(&self, index: u32) -> Option<Section> {
        self.sections.get(usize::try_from(index).ok()?).copied()
    }

    /// Returns the size of the place that the variables need.
    pub fn bytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// Places the variables: returns the checked image with their addresses, the variables by name, address and size,
    /// and their initial values. `None` if the place is too small.
    pub fn place(mut self, place: ManagedPlace) -> Result<Option<Placed>> {
        let Some(start) = self.layout.start_in(place) else {
            return Ok(None);
        };
        // Overlapping tables would be processed repeatedly.
        let entries = self
            .sections
            .iter()
            .filter(|section| section.kind == RELOCATIONS);
        let bytes = entries.fold(0, |sum: usize, table| sum.saturating_add(table.bytes));
        if bytes > self.image.len() {
            return Err(CuError::INVALID_IMAGE);
        }
        for section in self.sections.clone() {
            // The compilers write no other kinds, and their symbols would be in another table.
            let is_usual = self
                .section(section.link)
                .is_some_and(|table| table.kind == SYMBOLS && table.offset == self.symbols.offset);
            if section.kind == SHORT_RELOCATIONS || section.kind == RELOCATIONS && !is_usual {
                tracing::warn!(
                    "an image with managed variables is refused: its relocations are unknown"
                );
                return Err(CuError::NOT_SUPPORTED);
            }
            if section.kind == RELOCATIONS {
                self.relocate(section, start)?;
            }
        }
        let (mut globals, mut initial) = (Vec::new(), Vec::new());
        for (symbol, variable) in self.variables {
            let address = start + variable.offset;
            let bytes = usize::try_from(variable.bytes).map_err(|_| CuError::OUT_OF_MEMORY)?;
            let values = match variable.values {
                Some(start) => self.image.get(start..start + bytes).map(<[u8]>::to_vec),
                None => Some(vec![0; bytes]),
            };
            let values = values.ok_or(CuError::INVALID_IMAGE)?;
            initial.push((address, values));
            globals.push((variable.name, (address, variable.bytes)));
            // Clears MANAGED, so that the driver does not allocate the variable itself.
            self.image[self.symbols.offset + symbol * SYMBOL_BYTES + 5] &= !MANAGED;
        }
        Ok(Some(Placed {
            code: code::Code::machine(Cow::Owned(self.image))?,
            globals,
            initial,
        }))
    }

    /// Writes addresses where relocations demand them, and removes those relocations.
    fn relocate(&mut self, table: Section, start: u64) -> Result<()> {
        let damaged = CuError::INVALID_IMAGE;
        let target = self.section(table.info).ok_or(damaged)?;
        let mut kept = 0;
        for entry in 0..table.bytes / RELOCATION_BYTES {
            let at = table.offset + entry * RELOCATION_BYTES;
            let relocation = Relocation::read(&self.image, at).ok_or(damaged)?;
            let place = target.offset.checked_add(relocation.offset);
            let place = place.ok_or(damaged)?;
            // The initial values of a variable must be known now.
            if target.kind != NO_BITS && self.values_hold(place) {
                tracing::warn!("an image is refused: a managed variable begins with an address");
                return Err(CuError::NOT_SUPPORTED);
            }
            let Some(variable) = self.variables.get(&relocation.symbol) else {
                let to = table.offset + kept * RELOCATION_BYTES;
                self.image.copy_within(at..at + RELOCATION_BYTES, to);
                kept += 1;
                continue;
            };
            let address = (start + variable.offset)
                .wrapping_add(relocation.addend)
                .to_le_bytes();
            let (inside, bytes) = match relocation.kind {
                ADDRESS | GENERIC_ADDRESS => (0, &address[..]),
                LOW_HALF => (4, &address[..4]),
                HIGH_HALF => (4, &address[4..]),
                kind => {
                    let name = &variable.name;
                    tracing::warn!(
                        "an image is refused: it refers to the managed variable {name} by a relocation of kind {kind}"
                    );
                    return Err(CuError::NOT_SUPPORTED);
                }
            };
            let offset = relocation.offset.checked_add(inside).ok_or(damaged)?;
            let range = target.range(offset, bytes.len()).ok_or(damaged)?;
            let place = self.image.get_mut(range).ok_or(damaged)?;
            place.copy_from_slice(bytes);
        }
        let bytes = (kept * RELOCATION_BYTES) as u64;
        let size = self.image.get_mut(table.header + 32..table.header + 40);
        size.ok_or(damaged)?.copy_from_slice(&bytes.to_le_bytes());
        Ok(())
    }

    /// Returns whether an offset of the image is among the initial values of a managed variable.
    fn values_hold(&self, at: usize) -> bool {
        let before = self.values.range(..=at).next_back();
        before.is_some_and(|(_, end)| at < *end)
    }
}

/// Variables by name: address and size.
pub type Globals = Vec<(String, (u64, u64))>;

/// Code that contains the addresses of its managed variables.
#[derive(Debug)]
pub struct Placed {
    pub code: code::Code<'static>,
    pub globals: Globals,
    /// Addresses and initial values.
    pub initial: Vec<(u64, Vec<u8>)>,
}

#[cfg(test)]
pub(crate) mod tests {
    use object::elf::EM_CUDA;

    use super::*;

    const PROGRAM_BITS: u32 = 1;
    const STRINGS: u32 = 3;
    const START: u64 = 0x7000_0000_0000;
    /// Offset among the names of one that a section of shared memory has.
    pub const SHARED_NAME: u8 = 7;

    /// Whole image with a managed variable `x` of 8 bytes with the initial value 5, one `y` of 16 bytes without values, and
    /// a device variable `z`; a constant bank contains the addresses of `x + 4`, `z` and `y`.
    pub fn image(relocation: u32, at_values: bool) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        bytes[16..18].copy_from_slice(&[2, 0]);
        bytes[18..20].copy_from_slice(&EM_CUDA.to_le_bytes());
        bytes[20] = 1;
        bytes[52] = 64;
        bytes[58] = 64;
        bytes[62] = 2;
        let mut headers = vec![vec![0; SECTION_BYTES]];
        let mut section = |kind: u32, content: &[u8], link: u32, info: u32| {
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            let mut header = vec![0; SECTION_BYTES];
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[24..32].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(content.len() as u64).to_le_bytes());
            header[40..44].copy_from_slice(&link.to_le_bytes());
            header[44..48].copy_from_slice(&info.to_le_bytes());
            header[48..56].copy_from_slice(&8_u64.to_le_bytes());
            let entry_bytes = match kind {
                SYMBOLS => SYMBOL_BYTES,
                RELOCATIONS => RELOCATION_BYTES,
                _ => 0,
            };
            header[56..64].copy_from_slice(&(entry_bytes as u64).to_le_bytes());
            headers.push(header);
            if kind != NO_BITS {
                bytes.extend_from_slice(content);
            }
        };
        let symbol = |name: u32, other: u8, section: u16, value: u64, size: u64| {
            let mut symbol = name.to_le_bytes().to_vec();
            symbol.extend_from_slice(&[OBJECT, other]);
            symbol.extend_from_slice(&section.to_le_bytes());
            symbol.extend_from_slice(&value.to_le_bytes());
            symbol.extend_from_slice(&size.to_le_bytes());
            symbol
        };
        let entry = |at: u64, symbol: u32, kind: u32, addend: u64| {
            let info = u64::from(symbol) << 32 | u64::from(kind);
            [at, info, addend].map(u64::to_le_bytes).concat()
        };
        let symbols = [
            vec![0; SYMBOL_BYTES],
            symbol(1, MANAGED, 3, 8, 8),
            symbol(3, MANAGED, 4, 0, 16),
            symbol(5, 0, 3, 0, 8),
        ];
        let entries = [
            entry(0, 1, relocation, 4),
            entry(8, 3, ADDRESS, 0),
            entry(16, 2, GENERIC_ADDRESS, 0),
        ];
        section(SYMBOLS, &symbols.concat(), 2, 0);
        section(STRINGS, b"\0x\0y\0z\0.nv.shared.k\0", 0, 0);
        section(
            PROGRAM_BITS,
            &[7_u64, 5].map(u64::to_le_bytes).concat(),
            0,
            0,
        );
        section(NO_BITS, &[0; 16], 0, 0);
        section(PROGRAM_BITS, &[0xff; 24], 0, 0);
        section(RELOCATIONS, &entries.concat(), 1, 5);
        if at_values {
            section(RELOCATIONS, &entry(12, 3, ADDRESS, 0), 1, 3);
        }
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let start = bytes.len() as u64;
        bytes[40..48].copy_from_slice(&start.to_le_bytes());
        bytes[60..62].copy_from_slice(&u16::try_from(headers.len()).unwrap().to_le_bytes());
        bytes.extend(headers.concat());
        bytes
    }

    fn place(bytes: u64) -> ManagedPlace {
        ManagedPlace {
            address: START,
            bytes,
        }
    }

    #[test]
    fn what_refers_to_managed_variables_gets_their_addresses() {
        let code = Code::read(image(ADDRESS, false)).unwrap().unwrap();
        assert_eq!(code.bytes(), 24);
        let placed = code.place(place(24)).unwrap().unwrap();
        let mut globals = placed.globals.clone();
        globals.sort();
        let (x, y) = (globals[0].1.0, globals[1].1.0);
        assert_eq!(globals[0], ("x".to_owned(), (x, 8)));
        assert_eq!(globals[1], ("y".to_owned(), (y, 16)));
        assert!(
            [x, y]
                .iter()
                .all(|address| (START..START + 24).contains(address))
        );
        let mut initial = placed.initial.clone();
        initial.sort();
        let mut expected = vec![(x, 5_u64.to_le_bytes().to_vec()), (y, vec![0; 16])];
        expected.sort();
        assert_eq!(initial, expected);
        let found = read(placed.code.bytes()).unwrap();
        let sections = found.sections;
        assert_eq!(
            (found.managed, are_in(placed.code.bytes())),
            (vec![], false)
        );
        assert_eq!(found.symbols.offset, sections[1].offset);
        let bank = sections[5].offset;
        assert_eq!(u64_at(placed.code.bytes(), bank), Some(x + 4));
        assert_eq!(u64_at(placed.code.bytes(), bank + 8), Some(u64::MAX));
        assert_eq!(u64_at(placed.code.bytes(), bank + 16), Some(y));
        // References to the device variable are left to the driver.
        assert_eq!(sections[6].bytes, RELOCATION_BYTES);
        let left = sections[6].offset;
        assert_eq!(u64_at(placed.code.bytes(), left), Some(8));
        assert_eq!(u32_at(placed.code.bytes(), left + 12), Some(3));
    }

    #[test]
    fn halves_of_addresses_go_into_instructions() {
        for (kind, shift) in [(LOW_HALF, 0), (HIGH_HALF, 32)] {
            let code = Code::read(image(kind, false)).unwrap().unwrap();
            let placed = code.place(place(24)).unwrap().unwrap();
            let x = placed.globals.iter().find(|(name, _)| name == "x").unwrap();
            let bank = sections(placed.code.bytes()).unwrap()[5].offset;
            let half = u32::try_from((x.1.0 + 4) >> shift & 0xffff_ffff).unwrap();
            assert_eq!(u32_at(placed.code.bytes(), bank), Some(u32::MAX));
            assert_eq!(u32_at(placed.code.bytes(), bank + 4), Some(half));
        }
    }

    /// Image whose first relocation has another offset, symbol `x` and an addend.
    fn relocated(offset: u64, kind: u32, addend: u64) -> Vec<u8> {
        let mut image = image(kind, false);
        let entry = sections(&image).unwrap()[6].offset;
        image[entry..entry + 8].copy_from_slice(&offset.to_le_bytes());
        image[entry + 16..entry + 24].copy_from_slice(&addend.to_le_bytes());
        image
    }

    fn refusal(image: Vec<u8>) -> Option<CuError> {
        let code = Code::read(image).unwrap().unwrap();
        code.place(place(24)).err()
    }

    #[test]
    fn a_relocation_changes_code_and_data_of_its_section_alone() {
        let damaged = Some(CuError::INVALID_IMAGE);
        for kind in [ADDRESS, GENERIC_ADDRESS, LOW_HALF, HIGH_HALF] {
            assert_eq!(refusal(relocated(16, kind, 0)), None);
            for offset in [17, 20, 24, 4096, u64::MAX - 64, u64::MAX] {
                let refused = refusal(relocated(offset, kind, 0));
                assert_eq!(refused, damaged, "kind {kind} at {offset}");
            }
            // The headers' section, symbols, names, a section without bytes, the relocations themselves.
            for target in [0, 1, 2, 4, 6] {
                let mut image = relocated(0, kind, 0);
                let table = sections(&image).unwrap()[6];
                image[table.header + 44] = target;
                assert_eq!(refusal(image), damaged, "kind {kind} in {target}");
            }
        }
        for (section, refused) in [
            (0x7000_0068, None),
            (elf::WITHOUT_BYTES[0], damaged),
            (elf::WITHOUT_BYTES[1], damaged),
        ] {
            let mut image = relocated(0, ADDRESS, 0);
            let bank = sections(&image).unwrap()[5];
            image[bank.header + 4..bank.header + 8].copy_from_slice(&section.to_le_bytes());
            assert_eq!(refusal(image), refused, "{section:#x}");
        }
    }

    /// The driver would allocate such variables itself.
    #[test]
    fn no_managed_symbol_is_left_to_the_driver() {
        const VARIABLE_BEFORE_LINK: u8 = 13;
        let whole = image(ADDRESS, false);
        let symbols = sections(&whole).unwrap()[1].offset;
        // `z`, which is a variable of the device.
        let last = symbols + 3 * SYMBOL_BYTES;
        for (kind, section) in [(VARIABLE_BEFORE_LINK, 3), (OBJECT, 0), (0, 0), (3, 3)] {
            for others in [true, false] {
                let mut image = whole.clone();
                image[last + 4] = kind;
                image[last + 5] = MANAGED | 0x20;
                image[last + 6] = section;
                if !others {
                    image[symbols + SYMBOL_BYTES + 5] = 0;
                    image[symbols + 2 * SYMBOL_BYTES + 5] = 0;
                }
                assert!(are_in(&image), "kind {kind}");
                let refused = Code::read(image).err();
                assert_eq!(refused, Some(CuError::NOT_SUPPORTED), "kind {kind}");
            }
        }
    }

    #[test]
    fn a_place_that_is_too_small_is_none() {
        let code = |bytes| {
            let code = Code::read(image(ADDRESS, false)).unwrap().unwrap();
            code.place(place(bytes)).unwrap().is_some()
        };
        assert!(code(24) && !code(23));
    }

    #[test]
    fn what_cannot_be_known_is_refused() {
        for image in [image(99, false), image(ADDRESS, true)] {
            let code = Code::read(image).unwrap().unwrap();
            let placed = code.place(place(24));
            assert_eq!(placed.err(), Some(CuError::NOT_SUPPORTED));
        }
        assert!(matches!(Code::read(b"\x7fELF".to_vec()), Ok(None)));
    }

    /// A second section header names the same relocation table.
    #[test]
    fn overlapping_tables_of_relocations_are_refused() {
        let mut image = image(ADDRESS, false);
        let table = sections(&image).unwrap()[6];
        let bytes = image.len() as u64;
        image[table.header + 32..table.header + 40].copy_from_slice(&bytes.to_le_bytes());
        let header = image[table.header..table.header + SECTION_BYTES].to_vec();
        image.extend(header);
        image[60] += 1;
        let code = Code::read(image).unwrap().unwrap();
        assert_eq!(code.place(place(24)).err(), Some(CuError::INVALID_IMAGE));
    }

    #[test]
    fn damaged_images_do_no_harm() {
        let whole = image(ADDRESS, true);
        let try_it = |image: Vec<u8>| {
            if let Ok(Some(code)) = Code::read(image) {
                let bytes = code.bytes();
                let _ = code.place(place(bytes));
            }
        };
        for length in 0..whole.len() {
            try_it(whole[..length].to_vec());
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = whole.clone();
                damaged[length] = value;
                try_it(damaged);
            }
        }
    }
}
