//! Finds the device files of a worker's GPUs.
//!
//! A worker sees its GPUs only: the driver passes over GPUs without a device file. GPU number N is the N-th by PCI
//! address, as CUDA counts under `CUDA_DEVICE_ORDER=PCI_BUS_ID`. The supervisor finds it in `/proc/driver/nvidia/gpus`
//! (NVIDIA driver README, "Using the /proc File System Interface"), and needs no library of the driver.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

const CONTROL: &str = "dev/nvidiactl";
const GPUS: &str = "proc/driver/nvidia/gpus";
/// Device files that every user of a GPU needs, besides the GPU's own file.
/// `/dev/nvidia-uvm-tools` is left out: it is for profilers, which see other processes' work.
const SHARED: [&str; 2] = ["/dev/nvidiactl", "/dev/nvidia-uvm"];

/// Reason why a GPU's device file is not known.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    #[error("cuda:{ordinal} cannot be found: {path} cannot be read")]
    Unreadable {
        ordinal: u32,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(
        "cuda:{ordinal} cannot be found: {path} has no line \"{field}\" that can be understood"
    )]
    Field {
        ordinal: u32,
        path: PathBuf,
        field: &'static str,
    },
    #[error("cuda:{ordinal} cannot be found: the name of {path} is no PCI address")]
    Address { ordinal: u32, path: PathBuf },
    #[error("cuda:{ordinal} is not there: {path} lists {count} with a device file")]
    Missing {
        ordinal: u32,
        path: PathBuf,
        count: usize,
    },
}

/// GPU of this system, with its number among device files.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Gpu {
    minor: u32,
    /// UUID, which the driver reports only after it has used the GPU once.
    uuid: Option<String>,
}

/// GPUs of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// Numbers and GPUs, in the order in which programs see them.
    chosen: Vec<(u32, Gpu)>,
}

impl Gpus {
    /// Finds the GPUs with these numbers, counted by PCI address among those that have a device file. Returns `None` on
    /// a system without NVIDIA's driver.
    ///
    /// # Errors
    /// Fails if a file of the driver about its GPUs cannot be read or understood, or if a number is too high.
    pub fn find(ordinals: &[u32]) -> Result<Option<Self>, GpuError> {
        Self::find_below(Path::new("/"), ordinals)
    }

    fn find_below(root: &Path, ordinals: &[u32]) -> Result<Option<Self>, GpuError> {
        let mut chosen = Vec::new();
        for &ordinal in ordinals {
            match Gpu::find_below(root, ordinal)? {
                Some(gpu) => chosen.push((ordinal, gpu)),
                None => return Ok(None),
            }
        }
        Ok(Some(Self { chosen }))
    }

    /// Lists the device files that a worker on these GPUs opens. Some drivers lack some of them.
    pub fn files(&self) -> Vec<PathBuf> {
        let own = self.chosen.iter().map(|(_, gpu)| gpu.file());
        SHARED.iter().map(PathBuf::from).chain(own).collect()
    }

    /// Returns the variables that make the driver number GPUs by PCI address and see these GPUs only.
    pub fn environment(&self) -> Vec<(OsString, OsString)> {
        let mut variables = vec![("CUDA_DEVICE_ORDER".into(), "PCI_BUS_ID".into())];
        if let Some(uuids) = self.uuids() {
            variables.push(("CUDA_VISIBLE_DEVICES".into(), uuids.join(",").into()));
        }
        variables
    }

    /// Returns the worker's numbers of these GPUs, in a driver that sees no others.
    pub fn ordinals(&self) -> Vec<u32> {
        if self.uuids().is_some() {
            return (0..).take(self.chosen.len()).collect();
        }
        let before = |ordinal: u32| {
            let before = self.chosen.iter().filter(|(other, _)| *other < ordinal);
            u32::try_from(before.count()).unwrap_or(u32::MAX)
        };
        self.chosen
            .iter()
            .map(|(ordinal, _)| before(*ordinal))
            .collect()
    }

    /// Returns the UUIDs, if the driver reports all of them.
    fn uuids(&self) -> Option<Vec<&str>> {
        let mut gpus = self.chosen.iter();
        gpus.by_ref().map(|(_, gpu)| gpu.uuid.as_deref()).collect()
    }
}

impl Gpu {
    fn find_below(root: &Path, ordinal: u32) -> Result<Option<Self>, GpuError> {
        if !root.join(CONTROL).exists() {
            return Ok(None);
        }
        let directory = root.join(GPUS);
        let unreadable = |path: &Path| {
            let path = path.to_owned();
            move |cause| GpuError::Unreadable {
                ordinal,
                path,
                cause,
            }
        };
        let mut gpus = Vec::new();
        for entry in std::fs::read_dir(&directory).map_err(unreadable(&directory))? {
            let path = entry.map_err(unreadable(&directory))?.path();
            let address = path
                .file_name()
                .and_then(|name| address(name.to_str()?))
                .ok_or_else(|| GpuError::Address {
                    ordinal,
                    path: path.clone(),
                })?;
            let file = path.join("information");
            let text = std::fs::read_to_string(&file).map_err(unreadable(&file))?;
            if field(&text, "GPU Excluded") == Some("Yes") {
                continue;
            }
            let minor = field(&text, "Device Minor")
                .and_then(|value| value.parse().ok())
                .ok_or(GpuError::Field {
                    ordinal,
                    path: file,
                    field: "Device Minor",
                })?;
            if root.join(format!("dev/nvidia{minor}")).exists() {
                let uuid = field(&text, "GPU UUID").filter(|uuid| is_known(uuid));
                let uuid = uuid.map(str::to_owned);
                gpus.push((address, Self { minor, uuid }));
            }
        }
        gpus.sort_by_key(|(address, _)| *address);
        let count = gpus.len();
        usize::try_from(ordinal)
            .ok()
            .filter(|&index| index < count)
            .map(|index| Some(gpus.swap_remove(index).1))
            .ok_or(GpuError::Missing {
                ordinal,
                path: directory,
                count,
            })
    }

    fn file(&self) -> PathBuf {
        PathBuf::from(format!("/dev/nvidia{}", self.minor))
    }
}

/// Parses a PCI address: `domain:bus:device.function`, in hexadecimal.
fn address(name: &str) -> Option<[u32; 4]> {
    let (bus, function) = name.rsplit_once('.')?;
    let mut parts = bus.split(':').chain([function]);
    let mut address = [0; 4];
    for number in &mut address {
        *number = u32::from_str_radix(parts.next()?, 16).ok()?;
    }
    parts.next().is_none().then_some(address)
}

/// Returns the value behind `name` and a colon.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

/// Returns whether a UUID is known: the driver writes question marks for the digits of others.
fn is_known(uuid: &str) -> bool {
    uuid.strip_prefix("GPU-").is_some_and(|digits| {
        !digits.is_empty()
            && digits
                .bytes()
                .all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn information(minor: &str, uuid: &str, excluded: &str) -> String {
        format!(
            "Model: \t\t NVIDIA H200\nIRQ:   \t\t 173\nGPU UUID: \t {uuid}\n\
             Video BIOS: \t 96.00.99.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\n\
             DMA Mask: \t 0xfffffffffffff\nBus Location: \t 0000:04:00.0\nDevice Minor: \t {minor}\n\
             GPU Firmware: \t 580.65.06\nGPU Excluded:\t {excluded}\n"
        )
    }

    const UUID: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";
    const UNKNOWN: &str = "GPU-????????-????-????-????-????????????";

    /// Makes the files of a system with these GPUs: address and `information`. Minors in `files` have a device file.
    fn system(gpus: &[(&str, String)], files: &[u32]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join(CONTROL), "").unwrap();
        for (address, text) in gpus {
            let place = root.path().join(GPUS).join(address);
            std::fs::create_dir_all(&place).unwrap();
            std::fs::write(place.join("information"), text).unwrap();
        }
        for minor in files {
            std::fs::write(root.path().join(format!("dev/nvidia{minor}")), "").unwrap();
        }
        root
    }

    #[test]
    fn gpus_count_by_pci_address_and_not_by_minor_or_name() {
        let root = system(
            &[
                ("0000:C3:00.0", information("0", UUID, "No")),
                ("0000:04:00.0", information("2", UNKNOWN, "No")),
                ("10000:03:00.0", information("1", UUID, "No")),
            ],
            &[0, 1, 2],
        );
        let minors: Vec<u32> = (0..3)
            .map(|at| Gpu::find_below(root.path(), at).unwrap().unwrap().minor)
            .collect();
        assert_eq!(minors, [2, 0, 1]);
    }

    #[test]
    fn only_the_chosen_gpus_file_is_named() {
        let root = system(
            &[
                ("0000:04:00.0", information("1", UNKNOWN, "No")),
                ("0000:05:00.0", information("0", UUID, "No")),
            ],
            &[0, 1],
        );
        let find = |ordinals: &[u32]| Gpus::find_below(root.path(), ordinals).unwrap().unwrap();
        let first = find(&[0]);
        assert!(first.files().contains(&"/dev/nvidia1".into()));
        assert!(!first.files().contains(&"/dev/nvidia0".into()));
        let order = ("CUDA_DEVICE_ORDER".into(), "PCI_BUS_ID".into());
        assert_eq!(first.environment(), std::slice::from_ref(&order));
        let second = find(&[1]);
        let visible = ("CUDA_VISIBLE_DEVICES".into(), UUID.into());
        assert_eq!(second.environment(), [order, visible]);
        assert_eq!((first.ordinals(), second.ordinals()), (vec![0], vec![0]));
    }

    #[test]
    fn several_gpus_are_seen_in_the_order_in_which_they_were_chosen() {
        const OTHER: &str = "GPU-76543210-89ab-cdef-0123-456789abcdef";
        let at = |bus: u32| format!("0000:{bus:02x}:00.0");
        let system = |uuids: [&str; 3]| {
            let gpus = uuids.map(|uuid| information("0", uuid, "No"));
            let minors = ["0", "1", "2"].map(|minor| format!("Device Minor: \t {minor}\n"));
            let texts = gpus.iter().zip(&minors);
            let texts: Vec<String> = texts
                .map(|(text, minor)| text.replace("Device Minor: \t 0\n", minor))
                .collect();
            let addresses: Vec<String> = (4..7).map(at).collect();
            let gpus: Vec<(&str, String)> =
                addresses.iter().map(String::as_str).zip(texts).collect();
            system(&gpus, &[0, 1, 2])
        };
        let known = system([UUID, UNKNOWN, OTHER]);
        let gpus = Gpus::find_below(known.path(), &[2, 0]).unwrap().unwrap();
        let visible = (
            "CUDA_VISIBLE_DEVICES".into(),
            format!("{OTHER},{UUID}").into(),
        );
        assert!(gpus.environment().contains(&visible));
        assert_eq!(gpus.ordinals(), [0, 1]);
        let files = gpus.files();
        for (file, shown) in [
            ("/dev/nvidia0", true),
            ("/dev/nvidia1", false),
            ("/dev/nvidia2", true),
        ] {
            assert_eq!(files.contains(&file.into()), shown, "{file}");
        }
        // Without all UUIDs the numbers count the GPUs whose device files the worker has.
        let gpus = Gpus::find_below(known.path(), &[2, 1]).unwrap().unwrap();
        assert_eq!((gpus.ordinals(), gpus.environment().len()), (vec![1, 0], 1));
        assert!(Gpus::find_below(known.path(), &[0, 3]).is_err());
    }

    #[test]
    fn gpus_that_cannot_be_used_do_not_count() {
        let root = system(
            &[
                ("0000:04:00.0", information("0", UUID, "Yes")),
                ("0000:05:00.0", information("1", UUID, "No")),
                ("0000:06:00.0", information("2", UUID, "No")),
            ],
            &[0, 2],
        );
        let gpu = Gpu::find_below(root.path(), 0).unwrap().unwrap();
        assert_eq!(gpu.minor, 2);
        let missing = Gpu::find_below(root.path(), 1).unwrap_err();
        assert!(matches!(
            missing,
            GpuError::Missing {
                ordinal: 1,
                count: 1,
                ..
            }
        ));
    }

    #[test]
    fn a_system_without_the_driver_has_none() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Gpu::find_below(root.path(), 0).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_understood_is_an_error_that_names_the_file() {
        let unlisted = system(&[], &[0]);
        let error = Gpu::find_below(unlisted.path(), 0).unwrap_err();
        assert!(error.to_string().contains(GPUS), "{error}");
        for (name, text) in [
            ("0000:04:00.0", "Model: NVIDIA H200\n".to_owned()),
            ("0000:04:00.0", information("many", UUID, "No")),
            ("first", information("0", UUID, "No")),
        ] {
            let root = system(&[(name, text)], &[0]);
            let error = Gpu::find_below(root.path(), 0).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }
}
