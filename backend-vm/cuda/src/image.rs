//! Images: what is loaded, and whether its kernels can print.

use std::borrow::Cow;
use std::collections::HashMap;

use cudarc::driver::sys::{CUlibrary, CUmodule};
use memchr::memmem;
use wormhole_device::{CuError, RawModule, Result};
use wormhole_fatbin::is_fatbin;

use crate::fatbin;
use crate::managed::{self, Globals};

const ELF: &[u8] = b"\x7fELF";
/// Nothing larger is decompressed.
const MAX_BYTES: usize = 1 << 30;

/// A loaded image.
#[derive(Clone, Copy, Debug)]
pub enum Loaded {
    Module(CUmodule),
    Library(CUlibrary),
}

// SAFETY: the driver's handles may be used by any thread.
unsafe impl Send for Loaded {}

/// The images of a context. The numbers given out are never used again.
#[derive(Debug, Default)]
pub struct Images {
    loaded: HashMap<u64, Loaded>,
    /// Managed variables.
    managed: HashMap<u64, Globals>,
    next: u64,
}

impl Images {
    /// Keeps an image.
    pub fn insert(&mut self, image: Loaded) -> RawModule {
        self.next += 1;
        self.loaded.insert(self.next, image);
        RawModule(self.next)
    }

    /// Keeps where the managed variables of an image are.
    pub fn set_managed(&mut self, module: RawModule, variables: Globals) {
        self.managed.insert(module.0, variables);
    }

    /// Address and size of a managed variable.
    pub fn managed(&self, module: RawModule, name: &str) -> Option<(u64, u64)> {
        let variables = self.managed.get(&module.0)?;
        let (_, found) = variables.iter().find(|(known, _)| known == name)?;
        Some(*found)
    }

    /// Finds an image.
    pub fn get(&self, module: RawModule) -> Result<Loaded> {
        self.loaded
            .get(&module.0)
            .copied()
            .ok_or(CuError::INVALID_HANDLE)
    }

    /// Forgets an image.
    pub fn remove(&mut self, module: RawModule) -> Result<Loaded> {
        self.managed.remove(&module.0);
        self.loaded.remove(&module.0).ok_or(CuError::INVALID_HANDLE)
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.managed.clear();
        self.loaded.clear();
    }
}

/// The image as the driver wants it: PTX text ends in a zero byte.
pub fn terminated(image: &[u8]) -> Cow<'_, [u8]> {
    if image.starts_with(ELF) || is_fatbin(image) || image.contains(&0) {
        Cow::Borrowed(image)
    } else {
        Cow::Owned([image, &[0]].concat())
    }
}

/// Refuses an image whose headers promise more than there is: the driver believes them.
pub fn check(image: &[u8]) -> Result<()> {
    let whole = if is_fatbin(image) {
        wormhole_fatbin::extent(image).is_ok()
    } else if image.starts_with(ELF) {
        elf_extent(image).is_some_and(|end| end <= image.len() as u64)
    } else {
        !image.is_empty()
    };
    if whole {
        Ok(())
    } else {
        Err(CuError::INVALID_IMAGE)
    }
}

/// Where the tables of a 64-bit ELF image end (ELF-64 object file format, "File Header").
fn elf_extent(image: &[u8]) -> Option<u64> {
    let field = |at: usize, bytes: usize| {
        let field = image.get(at..at + bytes)?;
        Some(
            field
                .iter()
                .rev()
                .fold(0, |value, byte| value << 8 | u64::from(*byte)),
        )
    };
    let table = |offset: u64, size: u64, count: u64| offset.checked_add(size * count);
    let programs = table(field(32, 8)?, field(54, 2)?, field(56, 2)?)?;
    let sections = table(field(40, 8)?, field(58, 2)?, field(60, 2)?)?;
    Some(programs.max(sections))
}

/// What must be known of an image before it is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// It imports `vprintf` or `__assertfail`. Errs on the side of yes.
    pub uses_output: bool,
    /// It has managed variables.
    pub is_managed: bool,
}

impl Facts {
    const UNKNOWN: Self = Self {
        uses_output: true,
        is_managed: false,
    };

    fn of_code(code: &[u8]) -> Self {
        Self {
            uses_output: imports_output(code),
            is_managed: if code.starts_with(ELF) {
                managed::are_in(code)
            } else {
                memmem::find(code, b".managed").is_some()
            },
        }
    }

    /// What holds of an image that is loaded on a device of compute capability `arch` (90 for 9.0).
    pub fn of(image: &[u8], arch: u32) -> Self {
        if !is_fatbin(image) {
            return Self::of_code(image);
        }
        let Some(entries) = fatbin::chosen(image, arch) else {
            return Self::UNKNOWN;
        };
        let facts = entries.iter().map(|entry| match entry.unpack(MAX_BYTES) {
            Ok(code) => Self::of_code(&code),
            Err(_) => Self::UNKNOWN,
        });
        facts.fold(Self::default(), |all, one| Self {
            uses_output: all.uses_output || one.uses_output,
            is_managed: all.is_managed || one.is_managed,
        })
    }
}

/// The code of an image that a device of compute capability `arch` runs: machine code, or PTX.
pub fn best_code(image: &[u8], arch: u32) -> Option<Cow<'_, [u8]>> {
    if !is_fatbin(image) {
        return Some(Cow::Borrowed(image));
    }
    // The first is linked of all that follow it.
    let linked = *wormhole_fatbin::fatbins(image).ok()?.first()?;
    let entries = fatbin::chosen(linked, arch)?;
    let best = entries
        .iter()
        .filter(|entry| entry.architecture() <= arch)
        .max_by_key(|entry| entry.architecture())?;
    best.unpack(MAX_BYTES).ok()
}

/// Whether code is machine code.
pub fn is_machine_code(code: &[u8]) -> bool {
    code.starts_with(ELF)
}

/// PTX names what it calls; an ELF image has it in its string table.
fn imports_output(code: &[u8]) -> bool {
    memmem::find(code, b"vprintf").is_some() || memmem::find(code, b"__assertfail").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_gets_an_end() {
        assert_eq!(*terminated(b".version 7.0"), *b".version 7.0\0");
        assert_eq!(*terminated(b".version 7.0\0"), *b".version 7.0\0");
        assert_eq!(*terminated(b"\x7fELF"), *b"\x7fELF");
    }

    #[test]
    fn a_cut_image_is_refused() {
        let mut elf = vec![0; 64];
        elf[..4].copy_from_slice(ELF);
        elf[40] = 64;
        (elf[58], elf[60]) = (64, 2);
        assert_eq!(
            check(&elf),
            Err(CuError::INVALID_IMAGE),
            "two section headers are missing"
        );
        elf.resize(64 + 128, 0);
        assert_eq!(check(&elf), Ok(()));
        elf[47] = 0xff;
        assert_eq!(
            check(&elf),
            Err(CuError::INVALID_IMAGE),
            "they are said to lie far away"
        );
        assert_eq!(check(&elf[..40]), Err(CuError::INVALID_IMAGE));
        assert_eq!(
            check(b"\x50\xed\x55\xba\x01\0\x10\0\x08\0\0\0\0\0\0\0"),
            Err(CuError::INVALID_IMAGE)
        );
        assert_eq!(check(b""), Err(CuError::INVALID_IMAGE));
        assert_eq!(check(b".version 8.0"), Ok(()));
    }

    #[test]
    fn plain_images_are_searched() {
        let uses_output = |image: &[u8]| Facts::of(image, 90).uses_output;
        assert!(uses_output(b"call (r), vprintf, (a, b);"));
        assert!(uses_output(b"\x7fELF...\0__assertfail\0"));
        assert!(!uses_output(b"\x7fELF...\0printer\0"));
        assert!(!Facts::of(b"\x7fELF...\0printer\0", 90).is_managed);
        assert!(Facts::of(b".global .attribute(.managed) .b32 x;", 90).is_managed);
    }

    #[test]
    fn images_are_found_until_they_are_forgotten() {
        let mut images = Images::default();
        let first = images.insert(Loaded::Module(std::ptr::null_mut()));
        let second = images.insert(Loaded::Library(std::ptr::null_mut()));
        assert_ne!(first, second);
        assert!(matches!(images.get(second), Ok(Loaded::Library(_))));
        assert!(matches!(images.remove(first), Ok(Loaded::Module(_))));
        assert_eq!(images.get(first).err(), Some(CuError::INVALID_HANDLE));
        assert_eq!(images.remove(first).err(), Some(CuError::INVALID_HANDLE));
    }
}
