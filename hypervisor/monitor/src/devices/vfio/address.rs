//! Addresses of the host's devices, and whether one can be passed through.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::error::PassthroughError;

/// Drivers of other devices of a group that do not use the group: the kernel lets VFIO have it all the same.
const HARMLESS: [&str; 2] = ["pci-stub", "pcieport"];

/// A device of the host that can be passed through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceAddress {
    /// A PCI function, by its address.
    Pci(Box<str>),
    /// A mediated device, by its UUID.
    Mediated(Box<str>),
}

/// The text is no address of a device.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} is neither the address of a PCI device, such as 0000:01:00.0, nor the UUID of a mediated device"
)]
pub struct AddressError(String);

impl FromStr for DeviceAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_hex = |part: &str, digits: usize| {
            part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        let failed = || AddressError(text.to_owned());
        let lower = text.to_ascii_lowercase();
        let parts: Vec<&str> = lower.split('-').collect();
        if parts.iter().map(|part| part.len()).eq([8, 4, 4, 4, 12])
            && parts.iter().all(|part| is_hex(part, part.len()))
        {
            return Ok(Self::Mediated(lower.into()));
        }
        let whole = match lower.matches(':').count() {
            1 => format!("0000:{lower}"),
            _ => lower,
        };
        let (rest, function) = whole.rsplit_once('.').ok_or_else(failed)?;
        let [domain, bus, device] = rest.split(':').collect::<Vec<_>>()[..] else {
            return Err(failed());
        };
        let is_device = is_hex(device, 2) && u8::from_str_radix(device, 16).is_ok_and(|at| at < 32);
        let is_function = matches!(function.as_bytes(), [b'0'..=b'7']);
        match is_hex(domain, 4) && is_hex(bus, 2) && is_device && is_function {
            true => Ok(Self::Pci(whole.into())),
            false => Err(failed()),
        }
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Pci(text) | Self::Mediated(text)) = self;
        f.write_str(text)
    }
}

impl DeviceAddress {
    /// Returns the device's folder in sysfs.
    pub(super) fn folder(&self) -> PathBuf {
        match self {
            Self::Pci(address) => Path::new("/sys/bus/pci/devices").join(&**address),
            Self::Mediated(uuid) => Path::new("/sys/bus/mdev/devices").join(&**uuid),
        }
    }

    /// Checks that the device is there, and that it and its IOMMU group are free of drivers of the host.
    ///
    /// # Errors
    /// The reason why it cannot be passed through.
    pub fn check(&self) -> Result<(), PassthroughError> {
        self.check_at(&self.folder())
    }

    fn check_at(&self, folder: &Path) -> Result<(), PassthroughError> {
        if !folder.exists() {
            return Err(PassthroughError::NoDevice(self.clone()));
        }
        let group = fs::read_link(folder.join("iommu_group"));
        let group = group
            .ok()
            .and_then(|path| path.file_name().map(OsString::from));
        let group = group.ok_or_else(|| PassthroughError::NoIommu(self.clone()))?;
        // The drivers of mediated devices have names of their own, and are VFIO's all.
        if matches!(self, Self::Pci(_)) && !is_of_vfio(folder) {
            return Err(PassthroughError::Driver {
                address: self.clone(),
                driver: driver(folder),
            });
        }
        if matches!(self, Self::Pci(_)) && !can_be_reset(folder) {
            return Err(PassthroughError::NoReset(self.clone()));
        }
        let others = fs::read_dir(folder.join("iommu_group/devices"));
        for other in others.into_iter().flatten().flatten() {
            let folder = other.path();
            if let Some(driver) = driver(&folder)
                && !is_of_vfio(&folder)
                && !HARMLESS.contains(&&*driver)
                && other.file_name().to_str() != Some(&self.to_string())
            {
                return Err(PassthroughError::Shared {
                    address: self.clone(),
                    group: group.to_string_lossy().into(),
                    other: other.file_name().to_string_lossy().into(),
                    driver,
                });
            }
        }
        Ok(())
    }
}

/// Returns whether the kernel can reset a device. Before Linux 5.15 the file `reset` shows it.
fn can_be_reset(folder: &Path) -> bool {
    match fs::read_to_string(folder.join("reset_method")) {
        Ok(methods) => !methods.trim().is_empty(),
        Err(_) => folder.join("reset").exists(),
    }
}

fn driver(folder: &Path) -> Option<Box<str>> {
    let driver = fs::read_link(folder.join("driver")).ok()?;
    Some(driver.file_name()?.to_string_lossy().into())
}

/// Returns whether VFIO has a device. Some drivers of virtual functions register their devices with VFIO under a name of
/// their own (Linux 6.0).
fn is_of_vfio(folder: &Path) -> bool {
    driver(folder).as_deref() == Some("vfio-pci") || folder.join("vfio-dev").exists()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn addresses_are_of_pci_functions_and_of_mediated_devices() {
        for (text, address) in [
            ("0000:01:00.0", DeviceAddress::Pci("0000:01:00.0".into())),
            ("af:1F.7", DeviceAddress::Pci("0000:af:1f.7".into())),
            (
                "C0FFEE00-0000-4000-8000-000000000001",
                DeviceAddress::Mediated("c0ffee00-0000-4000-8000-000000000001".into()),
            ),
        ] {
            assert_eq!(text.parse(), Ok(address));
        }
        for text in [
            "",
            ".",
            "0",
            "01:00",
            "01:00.8",
            "01:20.0",
            "1:00.0",
            "0000:01:00.0.0",
            "0:01:00.0",
            "..:../00.0",
            "0000:01:00.",
            "0000:01:00.00",
            "g000:01:00.0",
            "c0ffee00-0000-4000-8000-00000000000",
            "0000/:01:00.0",
        ] {
            assert!(text.parse::<DeviceAddress>().is_err(), "{text}");
        }
    }

    /// A folder like sysfs, with devices by their drivers in one group.
    fn devices(drivers: &[(&str, Option<&str>)], has_group: bool) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        let group = root.path().join("groups/7/devices");
        fs::create_dir_all(&group).expect("a folder");
        for (address, driver) in drivers {
            let folder = root.path().join(address);
            fs::create_dir(&folder).expect("a folder");
            if let Some(driver) = driver {
                symlink(format!("/drivers/{driver}"), folder.join("driver")).expect("a link");
            }
            fs::write(folder.join("reset_method"), "flr bus\n").expect("a file");
            if has_group {
                symlink("../groups/7", folder.join("iommu_group")).expect("a link");
                symlink(format!("../../../{address}"), group.join(address)).expect("a link");
            }
        }
        root
    }

    fn checked(drivers: &[(&str, Option<&str>)], has_group: bool) -> Result<(), String> {
        let root = devices(drivers, has_group);
        let address: DeviceAddress = "01:00.0".parse().expect("an address");
        let checked = address.check_at(&root.path().join(address.to_string()));
        checked.map_err(|error| error.to_string())
    }

    #[test]
    fn a_device_that_cannot_be_passed_through_is_refused_with_its_reason() {
        const OWN: &str = "0000:01:00.0";
        const OTHER: &str = "0000:01:00.1";
        let of_vfio = (OWN, Some("vfio-pci"));
        let refused = |drivers: &[(&str, Option<&str>)], has_group, words: &str| {
            let said = checked(drivers, has_group).expect_err(words);
            assert!(said.contains(words), "{said}");
            assert!(!said.contains('\n'), "{said}");
        };
        refused(&[], true, "there is no device 0000:01:00.0");
        refused(&[of_vfio], false, "has no IOMMU");
        refused(
            &[(OWN, Some("nvme"))],
            true,
            "has the driver nvme, not vfio-pci",
        );
        refused(&[(OWN, None)], true, "has no driver, not vfio-pci");
        let words = "shares IOMMU group 7 with 0000:01:00.1, which has the driver snd";
        refused(&[of_vfio, (OTHER, Some("snd"))], true, words);
        let root = devices(&[of_vfio], true);
        let folder = root.path().join(OWN);
        let address: DeviceAddress = OWN.parse().expect("an address");
        fs::write(folder.join("reset_method"), "\n").expect("a file");
        let said = address.check_at(&folder).expect_err("no reset").to_string();
        assert!(said.contains("cannot be reset"), "{said}");
        for harmless in [None, Some("vfio-pci"), Some("pcieport")] {
            assert_eq!(checked(&[of_vfio, (OTHER, harmless)], true), Ok(()));
        }
    }

    #[test]
    fn a_driver_that_registers_its_devices_with_vfio_need_not_be_vfio_pci() {
        let root = devices(&[("0000:01:00.0", Some("nvidia"))], true);
        let folder = root.path().join("0000:01:00.0");
        fs::create_dir_all(folder.join("vfio-dev/vfio0")).expect("a folder");
        let address: DeviceAddress = "01:00.0".parse().expect("an address");
        assert!(address.check_at(&folder).is_ok());
    }
}
