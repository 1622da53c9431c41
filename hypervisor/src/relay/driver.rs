//! Loads NVIDIA's driver in a backend VM with a GPU, and makes its device files.
//!
//! Other systems have nvidia-modprobe, a program of the driver's, which would have all rights here.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, chmod, makedev, mknodat};
use rustix::io::Errno;
use rustix::system::finit_module;
use wormhole_images::Driver;

/// Release of this VM's kernel.
const RELEASE: &str = "/proc/sys/kernel/osrelease";
/// PCI devices of this VM.
const PCI: &str = "/sys/bus/pci/devices";
/// Vendor of NVIDIA's devices, and the class of those for displays and computing, in its upper byte.
const NVIDIA: &str = "0x10de";
const DISPLAY: &str = "0x03";
/// GPUs that the driver has found.
const GPUS: &str = "/proc/driver/nvidia/gpus";
/// Drivers and their numbers.
const DEVICES: &str = "/proc/devices";
/// The driver's part for unified memory.
const UVM: &str = "nvidia-uvm";
/// The kernel's log, and the starts of the lines in it that are NVIDIA's.
const LOG: &str = "/dev/kmsg";
const OF_DRIVER: [&str; 2] = ["NVRM: ", "nvidia-uvm: "];
/// Number of the devices of the driver, and that of the device that is for all GPUs (`nv-chardev-numbers.h`, open kernel
/// modules).
const MAJOR: u32 = 195;
const CONTROL: u32 = 255;

/// Reason why the driver is not loaded.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("this VM has no driver for GPUs: cannot read {}", Driver::FILE)]
    Absent(#[source] io::Error),
    #[error("{} does not describe a driver", Driver::FILE)]
    Description,
    #[error("cannot read {path}")]
    Read {
        path: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(
        "driver {version} was built for kernel {built}, and this VM has {running}: build the image again"
    )]
    Kernel {
        version: String,
        built: String,
        running: String,
    },
    #[error(
        "driver {version} finds no GPU that it drives among the VM's PCI devices ({}){}",
        listed(.gpus),
        quoted(.said)
    )]
    NoGpu {
        version: String,
        gpus: Vec<String>,
        said: Option<String>,
    },
    #[error("the kernel does not take the driver's module {}{}", .path.display(), quoted(.said))]
    Module {
        path: PathBuf,
        said: Option<String>,
        #[source]
        source: io::Error,
    },
    #[error(
        "driver {version} has no device {UVM} in this VM, which CUDA needs{}: build the image again, or with another driver",
        quoted(.said)
    )]
    NoUvm {
        version: String,
        said: Option<String>,
    },
    #[error("cannot make {path}")]
    Device {
        path: String,
        #[source]
        source: io::Error,
    },
}

fn listed(gpus: &[String]) -> String {
    match gpus {
        [] => "none of them is NVIDIA's GPU: name one with --pci".to_owned(),
        gpus => format!("NVIDIA's are {}", gpus.join(", ")),
    }
}

fn quoted(line: &Option<String>) -> String {
    let line = line.as_ref();
    line.map_or_else(String::new, |line| format!("; it says \"{line}\""))
}

/// Loads the driver, and makes the files of its devices.
pub fn load() -> Result<Driver, DriverError> {
    let text = fs::read_to_string(Driver::FILE).map_err(DriverError::Absent)?;
    let driver = Driver::parse(&text).ok_or(DriverError::Description)?;
    let read = |path| fs::read_to_string(path).map_err(|source| DriverError::Read { path, source });
    let running = read(RELEASE)?.trim().to_owned();
    if driver.release != running {
        return Err(DriverError::Kernel {
            version: driver.version,
            built: driver.release,
            running,
        });
    }
    for (path, parameters) in &driver.modules {
        let inserted = insert(path, parameters);
        let Err(source) = inserted else { continue };
        return Err(match source.raw_os_error() {
            Some(libc::ENODEV) => DriverError::NoGpu {
                version: driver.version,
                gpus: gpus(Path::new(PCI)),
                said: last_words(),
            },
            _ => DriverError::Module {
                path: path.clone(),
                said: last_words(),
                source,
            },
        });
    }
    make_files(uvm(&read(DEVICES)?, &driver.version)?)?;
    Ok(driver)
}

fn insert(path: &Path, parameters: &str) -> io::Result<()> {
    let parameters = CString::new(parameters)?;
    match finit_module(File::open(path)?, &parameters, 0) {
        // Another module needed it.
        Err(Errno::EXIST) => Ok(()),
        inserted => Ok(inserted?),
    }
}

/// Returns vendor and number of NVIDIA's GPUs among the PCI devices below a folder.
fn gpus(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let gpu = |place: PathBuf| {
        let read = |name| fs::read_to_string(place.join(name)).unwrap_or_default();
        let (vendor, class) = (read("vendor"), read("class"));
        let is_one = vendor.trim() == NVIDIA && class.starts_with(DISPLAY);
        let name = || {
            let digits = |text: &str| text.trim().trim_start_matches("0x").to_owned();
            format!("{}:{}", digits(&vendor), digits(&read("device")))
        };
        is_one.then(name)
    };
    let mut found: Vec<String> = entries.filter_map(|entry| gpu(entry.path())).collect();
    found.sort();
    found
}

/// Returns the last line of the driver in the kernel's log.
fn last_words() -> Option<String> {
    let mut log = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(LOG)
        .ok()?;
    let mut record = vec![0; 8192];
    let mut last = None;
    loop {
        match log.read(&mut record) {
            Ok(length) => {
                let text = String::from_utf8_lossy(&record[..length]);
                last = words(&text).or(last);
            }
            // Older records were overwritten.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(_) => return last,
        }
    }
}

/// Returns the driver's words in a record of the kernel's log.
fn words(record: &str) -> Option<String> {
    let line = record.lines().next()?;
    let (_, text) = line.split_once(';')?;
    let words = OF_DRIVER
        .iter()
        .find_map(|start| text.strip_prefix(start))?
        .trim();
    (!words.is_empty()).then(|| words.to_owned())
}

/// Returns the number of the driver's device for unified memory, without which CUDA does not start.
fn uvm(devices: &str, version: &str) -> Result<u32, DriverError> {
    major(devices, UVM).ok_or_else(|| DriverError::NoUvm {
        version: version.to_owned(),
        said: last_words(),
    })
}

/// Makes the device files of the driver: for all GPUs, for unified memory, and one for each GPU.
fn make_files(uvm: u32) -> Result<(), DriverError> {
    make_file("/dev/nvidiactl", MAJOR, CONTROL)?;
    make_file("/dev/nvidia-uvm", uvm, 0)?;
    let gpus = fs::read_dir(GPUS).map_err(|source| DriverError::Read { path: GPUS, source })?;
    for gpu in gpus.flatten() {
        let text = fs::read_to_string(gpu.path().join("information")).unwrap_or_default();
        if let Some(minor) = minor(&text) {
            make_file(&format!("/dev/nvidia{minor}"), MAJOR, minor)?;
        }
    }
    Ok(())
}

/// Makes a device file for all users: the supervisor decides what each worker sees.
fn make_file(path: &str, major: u32, minor: u32) -> Result<(), DriverError> {
    let mode = Mode::from_raw_mode(0o666);
    let kind = FileType::CharacterDevice;
    let made = match mknodat(CWD, path, kind, mode, makedev(major, minor)) {
        Err(Errno::EXIST) => Ok(()),
        made => made,
    };
    made.and_then(|()| chmod(path, mode))
        .map_err(|error| DriverError::Device {
            path: path.to_owned(),
            source: error.into(),
        })
}

/// Returns the number of a driver of character devices.
fn major(devices: &str, name: &str) -> Option<u32> {
    let characters = devices
        .lines()
        .take_while(|line| !line.starts_with("Block"));
    let mut pairs = characters.filter_map(|line| line.trim().split_once(' '));
    let (number, _) = pairs.find(|(_, driver)| *driver == name)?;
    number.parse().ok()
}

/// Returns the number of a GPU's device file from what the driver says about it.
fn minor(text: &str) -> Option<u32> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = fields.find(|(name, _)| name.trim() == "Device Minor")?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_files_have_the_numbers_that_the_kernel_names() {
        let devices = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n505 nvidia-uvm\n\n\
                       Block devices:\n  7 nvidia-none\n";
        assert_eq!(uvm(devices, "580.95.05").ok(), Some(505));
        assert_eq!(major(devices, "nvidia-none"), None);
        let error =
            uvm("Character devices:\n195 nvidia\n", "580.95.05").expect_err("it is missing");
        let said = error.to_string();
        let start = "driver 580.95.05 has no device nvidia-uvm in this VM";
        assert!(said.starts_with(start), "{said}");
        let text = "Model: \t\t NVIDIA H200\nDevice Minor: \t 2\nGPU Excluded:\t No\n";
        assert_eq!(minor(text), Some(2));
        assert_eq!(minor("Device Minor: \t many\n"), None);
    }

    #[test]
    fn a_driver_without_a_gpu_names_those_that_it_does_not_drive() {
        let folder = tempfile::tempdir().expect("a folder");
        let device = |address: &str, vendor: &str, class: &str, device: &str| {
            let place = folder.path().join(address);
            fs::create_dir(&place).expect("a folder");
            for (name, value) in [("vendor", vendor), ("class", class), ("device", device)] {
                fs::write(place.join(name), format!("{value}\n")).expect("room");
            }
        };
        let error = |gpus| {
            let said = words("3,600,70,-;NVRM: No NVIDIA GPU found.\n SUBSYSTEM=pci\n");
            let version = "580.95.05".to_owned();
            DriverError::NoGpu {
                version,
                gpus,
                said,
            }
            .to_string()
        };
        device("0000:00:03.0", "0x1b36", "0x010802", "0x0010");
        let none = error(gpus(folder.path()));
        assert!(none.contains("none of them is NVIDIA's GPU"), "{none}");
        assert!(none.contains("\"No NVIDIA GPU found.\""), "{none}");
        device("0000:00:04.0", "0x10de", "0x030200", "0x2335");
        // The sound of a GPU is none.
        device("0000:00:04.1", "0x10de", "0x040300", "0x10f0");
        let old = error(gpus(folder.path()));
        assert!(old.contains("NVIDIA's are 10de:2335)"), "{old}");
    }

    #[test]
    fn other_lines_of_the_kernels_log_are_not_the_drivers() {
        let failed = words("3,600,70,-;nvidia-uvm: Failed to load.\n");
        assert_eq!(failed.as_deref(), Some("Failed to load."));
        for record in [
            "",
            "6,1,2,-;pci 0000: enabled\n",
            "6,1,2,-;NVRM: \n",
            "NVRM: none",
        ] {
            assert_eq!(words(record), None, "{record}");
        }
    }
}
