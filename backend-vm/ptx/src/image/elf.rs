//! Reads enough of ELF to find whether a cubin holds kernels.

use wormhole_fatbin::fields::{u16_at, u32_at, usize_at};

/// Returns whether the bytes begin with the magic number of ELF.
pub(super) fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Returns whether a 64-bit little-endian ELF file has a section of code, `.text.<kernel>`; `None`
/// if its headers are invalid.
pub(super) fn has_kernels(bytes: &[u8]) -> Option<bool> {
    if bytes.get(4..6)? != [2, 1] {
        return None;
    }
    let table = usize_at(bytes, 0x28)?;
    let entry = usize::from(u16_at(bytes, 0x3a)?);
    let count = usize::from(u16_at(bytes, 0x3c)?);
    let names = usize::from(u16_at(bytes, 0x3e)?);
    if count == 0 {
        return Some(false);
    }
    if entry < 0x40 {
        return None;
    }
    let section = |index: usize| {
        let start = table.checked_add(index.checked_mul(entry)?)?;
        bytes.get(start..start.checked_add(0x40)?)
    };
    let strings = section(names)?;
    let start = usize_at(strings, 0x18)?;
    let strings = bytes.get(start..start.checked_add(usize_at(strings, 0x20)?)?)?;
    for index in 0..count {
        let section = section(index)?;
        let name = usize::try_from(u32_at(section, 0)?).ok()?;
        if strings.get(name..)?.starts_with(b".text.") && usize_at(section, 0x20)? > 0 {
            return Some(true);
        }
    }
    Some(false)
}
