//! GPUs of a backend VM, for which its image needs NVIDIA's driver.

use std::path::{Path, PathBuf};

use wormhole_images::{Driver, Image};
use wormhole_link::device::{DeviceChoice, DeviceKind};

use super::{BackendVmError, KERNEL, LEAST, Unserved, VmOptions};
use crate::device::DeviceOption;
use crate::installation::Installation;

/// Returns whether devices are GPUs.
pub fn has_gpu(device: &DeviceOption) -> bool {
    let choice = device.device.parse::<DeviceChoice>();
    choice.is_ok_and(|choice| choice.kind() == DeviceKind::Cuda)
}

/// Returns the driver of an image and its archive, for a VM with GPUs.
pub fn driver(
    image: &Image,
    device: &DeviceOption,
) -> Result<Option<(Driver, PathBuf)>, BackendVmError> {
    if !has_gpu(device) {
        return Ok(None);
    }
    match (image.driver.clone(), image.driver_archive()?) {
        (Some(driver), Some(archive)) => Ok(Some((driver, archive))),
        _ => Err(BackendVmError::NoDriver(device.device.clone())),
    }
}

impl VmOptions {
    /// Refuses GPUs that a backend VM does not have, or for which its image has no driver.
    ///
    /// # Errors
    /// The VM has no device of the host, or its image no driver.
    pub fn check_device(&self, device: &DeviceOption) -> Result<(), Unserved> {
        if !has_gpu(device) {
            return Ok(());
        }
        let device = device.device.clone();
        if self.pci.is_empty() {
            return Err(Unserved::NoGpu(device));
        }
        // NVIDIA's driver pins a window's pages, and a worker of another tenant can hold such a pin. No tenant gets an address that
        // another one can still reach.
        if self.slots().count > 1 {
            return Err(Unserved::SharedGpu(device));
        }
        let images = Installation::locate()?.images().unwrap_or_default();
        match Image::backend_driver(&images, KERNEL)? {
            (Some(_), _) => Ok(()),
            (None, place) => Err(Unserved::NoDriver { device, place }),
        }
    }

    /// Returns the memory beside [`Self::memory`] for the archive of a driver, and for its files while the archive is unpacked;
    /// none if the user has chosen the VM's memory.
    pub(super) fn memory_of_driver(&self, archive: Option<&Path>) -> Result<u64, BackendVmError> {
        let Some(archive) = archive else {
            return Ok(0);
        };
        let data = std::fs::metadata(archive).map_err(|source| BackendVmError::Driver {
            path: archive.to_owned(),
            source,
        })?;
        let bytes = (2 * data.len()).next_multiple_of(2 << 20);
        let least = LEAST + bytes;
        match self.memory {
            None => Ok(bytes),
            Some(memory) if memory.0 < least => Err(BackendVmError::LittleMemory { least }),
            Some(_) => Ok(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Size;

    #[test]
    fn a_driver_has_memory_of_its_own_unless_the_memory_is_chosen() {
        let archive = tempfile::NamedTempFile::new().unwrap();
        archive.as_file().set_len((300 << 20) + 1).unwrap();
        let vm = |memory| VmOptions {
            memory,
            ..VmOptions::default()
        };
        let extra = |memory: Option<u64>| {
            let vm = vm(memory.map(Size));
            vm.memory_of_driver(Some(archive.path()))
        };
        assert_eq!(extra(None).unwrap(), 602 << 20);
        assert_eq!(extra(Some(858 << 20)).unwrap(), 0);
        let error = extra(Some(857 << 20)).unwrap_err().to_string();
        assert!(error.contains("--memory 858M"), "{error}");
        assert_eq!(vm(Some(Size(LEAST))).memory_of_driver(None).unwrap(), 0);
    }
}
