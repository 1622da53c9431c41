//! Table of loaded images.

use std::collections::{HashMap, HashSet};

use wormhole_api::ctypes::{CUlibrary, CUmodule};
use wormhole_device::{CuError, RawModule, Result};

use crate::managed::Globals;
use crate::printing::Printing;

/// Loaded image.
#[derive(Clone, Copy, Debug)]
pub enum Loaded {
    Module(CUmodule),
    Library(CUlibrary),
}

// SAFETY: the driver's handles may be used by any thread.
unsafe impl Send for Loaded {}

/// Images of a context. Their numbers are never reused.
#[derive(Debug, Default)]
pub struct Images {
    /// Loaded images. A library that cannot be loaded has the error of its first use instead of a handle.
    loaded: HashMap<u64, Result<Loaded>>,
    /// Names of the kernels that may print, of the images that have any.
    printing: HashMap<u64, HashSet<String>>,
    /// Managed variables of the images.
    managed: HashMap<u64, Globals>,
    next: u64,
}

impl Images {
    /// Adds an image.
    pub fn insert(&mut self, image: Result<Loaded>, printing: Printing) -> RawModule {
        self.next += 1;
        if let Printing::Kernels(kernels) = printing
            && !kernels.is_empty()
        {
            self.printing.insert(self.next, kernels);
        }
        self.loaded.insert(self.next, image);
        RawModule(self.next)
    }

    /// Returns whether a kernel may print.
    pub fn prints(&self, module: RawModule, kernel: &str) -> bool {
        let kernels = self.printing.get(&module.0);
        kernels.is_some_and(|kernels| kernels.contains(kernel))
    }

    /// Sets the addresses of the managed variables of an image.
    pub fn set_managed(&mut self, module: RawModule, variables: Globals) {
        self.managed.insert(module.0, variables);
    }

    /// Returns the address and size of a managed variable.
    pub fn managed(&self, module: RawModule, name: &str) -> Option<(u64, u64)> {
        let variables = self.managed.get(&module.0)?;
        let (_, found) = variables.iter().find(|(known, _)| known == name)?;
        Some(*found)
    }

    /// Finds an image.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`: there is no such image. Another error: the reason why it cannot be loaded.
    pub fn get(&self, module: RawModule) -> Result<Loaded> {
        self.loaded
            .get(&module.0)
            .copied()
            .unwrap_or(Err(CuError::INVALID_HANDLE))
    }

    /// Removes an image. Returns `None` if it could not be loaded, so that there is nothing to unload.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`: there is no such image.
    pub fn remove(&mut self, module: RawModule) -> Result<Option<Loaded>> {
        self.managed.remove(&module.0);
        self.printing.remove(&module.0);
        let removed = self.loaded.remove(&module.0);
        removed.map(Result::ok).ok_or(CuError::INVALID_HANDLE)
    }

    /// Removes all images.
    pub fn clear(&mut self) {
        self.managed.clear();
        self.printing.clear();
        self.loaded.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_found_until_they_are_removed() {
        let mut images = Images::default();
        let kernels = HashSet::from(["talk".to_owned()]);
        let printing = Printing::Kernels(kernels);
        let first = images.insert(Ok(Loaded::Module(std::ptr::null_mut())), printing);
        let second = Ok(Loaded::Library(std::ptr::null_mut()));
        let second = images.insert(second, Printing::None);
        let third = images.insert(Err(CuError::NO_BINARY_FOR_GPU), Printing::None);
        assert!(images.prints(first, "talk") && !images.prints(first, "listen"));
        assert!(!images.prints(second, "talk"));
        assert!(first != second && second != third);
        assert!(matches!(images.get(second), Ok(Loaded::Library(_))));
        assert_eq!(images.get(third).err(), Some(CuError::NO_BINARY_FOR_GPU));
        assert!(matches!(images.remove(first), Ok(Some(Loaded::Module(_)))));
        assert!(matches!(images.remove(third), Ok(None)));
        for gone in [first, third] {
            assert_eq!(images.get(gone).err(), Some(CuError::INVALID_HANDLE));
            assert_eq!(images.remove(gone).err(), Some(CuError::INVALID_HANDLE));
        }
    }
}
