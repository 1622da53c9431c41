//! Images: what is loaded, and whether its kernels can print.

use std::borrow::Cow;
use std::collections::HashMap;

use cudarc::driver::sys::{CUlibrary, CUmodule};
use memchr::memmem;
use wormhole_device::{CuError, RawModule, Result};

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

/// Whether an image imports `vprintf` or `__assertfail`. Errs on the side of yes: what is inside a
/// compressed part of a fat binary is not looked at.
pub fn uses_output(image: &[u8]) -> bool {
    let names = |bytes: &[u8]| {
        memmem::find(bytes, b"vprintf").is_some() || memmem::find(bytes, b"__assertfail").is_some()
    };
    names(image) || (image.starts_with(FATBIN) && !names_are_readable(image))
}

/// Whether no entry of a fat binary is compressed.
fn names_are_readable(_image: &[u8]) -> bool {
    false
}
