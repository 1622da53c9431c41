//! Finds the PTX in an image that a program passes to the driver to load.
//!
//! An image is PTX text, a fatbin (several may follow one another) or an ELF file of machine code.
//! A guest supplies the image: every length is checked, and the size of decompressed data is
//! bounded.

mod elf;
mod fatbin;
mod object;

pub use object::{Member, members, of_object};

use std::borrow::Cow;

use crate::error::LoadError;
use crate::limits::MAX_PTX_BYTES;

/// Newest architecture whose PTX is chosen from a fatbin: compute capability 9.0.
pub const ARCHITECTURE: u32 = 90;

/// Content of an image for this device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found<'a> {
    /// PTX text.
    Ptx(Cow<'a, str>),
    /// No kernels: every executable carries such a fatbin beside its own.
    Empty,
}

/// Finds the PTX in `image`.
pub fn find_ptx(image: &[u8]) -> Result<Found<'_>, LoadError> {
    if wormhole_fatbin::is_fatbin(image) {
        return fatbin::find(image);
    }
    if elf::is_elf(image) {
        return match elf::has_kernels(image) {
            Some(false) => Ok(Found::Empty),
            Some(true) => Err(LoadError::NoKernelImage {
                arch: "an unnamed architecture".to_owned(),
            }),
            None => Err(LoadError::InvalidImage(
                "its ELF headers are damaged".to_owned(),
            )),
        };
    }
    text(image).map(|text| Found::Ptx(Cow::Borrowed(text)))
}

/// Checks that bytes are PTX text, up to a NUL if there is one.
fn text(bytes: &[u8]) -> Result<&str, LoadError> {
    let length = bytes
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(bytes.len());
    let bytes = &bytes[..length];
    if length > MAX_PTX_BYTES {
        let limit = MAX_PTX_BYTES as u64;
        return Err(LoadError::TooLarge {
            what: "the PTX",
            found: length as u64,
            limit,
        });
    }
    let invalid = |reason: &str| LoadError::InvalidImage(reason.to_owned());
    let text = std::str::from_utf8(bytes).map_err(|_| invalid("it is not text"))?;
    if text.contains(".version") {
        Ok(text)
    } else {
        Err(invalid("it has no `.version`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_ends_at_its_nul() {
        let found = find_ptx(b".version 8.0\n\0garbage").unwrap();
        assert_eq!(found, Found::Ptx(Cow::Borrowed(".version 8.0\n")));
    }

    #[test]
    fn garbage_is_an_invalid_image() {
        for image in [
            &b""[..],
            b"hello",
            &[0xff; 64],
            b"\x7fELF",
            &[0x50, 0xed, 0x55, 0xba],
        ] {
            let error = find_ptx(image).unwrap_err();
            assert!(
                matches!(error, LoadError::InvalidImage(_)),
                "{image:?}: {error}"
            );
        }
    }
}
