//! Images: what is loaded, and whether its kernels can print.

use std::borrow::Cow;
use std::collections::HashMap;

use cudarc::driver::sys::{CUlibrary, CUmodule};
use memchr::memmem;
use wormhole_device::{CuError, RawModule, Result};

use crate::fatbin;

const ELF: &[u8] = b"\x7fELF";
const FATBIN: &[u8] = b"\x50\xed\x55\xba";

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
    next: u64,
}

impl Images {
    /// Keeps an image.
    pub fn insert(&mut self, image: Loaded) -> RawModule {
        self.next += 1;
        self.loaded.insert(self.next, image);
        RawModule(self.next)
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
        self.loaded.remove(&module.0).ok_or(CuError::INVALID_HANDLE)
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.loaded.clear();
    }
}

/// The image as the driver wants it: PTX text ends in a zero byte.
pub fn terminated(image: &[u8]) -> Cow<'_, [u8]> {
    if image.starts_with(ELF) || image.starts_with(FATBIN) || image.contains(&0) {
        Cow::Borrowed(image)
    } else {
        Cow::Owned([image, &[0]].concat())
    }
}

/// Whether what the driver would load from an image, on a device of compute capability `arch` (90 for
/// 9.0), imports `vprintf` or `__assertfail`. Errs on the side of yes.
pub fn uses_output(image: &[u8], arch: u32) -> bool {
    if image.starts_with(FATBIN) {
        fatbin::chosen(image, arch).is_none_or(|parts| {
            parts
                .iter()
                .any(|part| part.text().is_none_or(|text| imports_output(&text)))
        })
    } else {
        imports_output(image)
    }
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
    fn plain_images_are_searched() {
        assert!(uses_output(b"call (r), vprintf, (a, b);", 90));
        assert!(uses_output(b"\x7fELF...\0__assertfail\0", 90));
        assert!(!uses_output(b"\x7fELF...\0printer\0", 90));
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
