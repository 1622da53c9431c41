//! Finds and prepares the window: the range of soft-reserved memory that the kernel exposes as a DAX device.
//!
//! A guest's window is divided: its last eighth is a device of its own that is mapped in single pages, for registered
//! memory. The rest is mapped in pieces of 2 MiB, because page structures for single pages take five times as much of the
//! guest's memory. A backend VM's windows are not divided.
//!
//! Linux 6.1 binds the device when its drivers are loaded. Linux 6.12 leaves an idle region with a device of
//! size zero (`dax_hmem region_idle=1`), which is resized and bound here. If the kernel's `kmem` driver has bound
//! the device before, the range is system RAM and contains kernel data: such a window is refused.

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

const DEVICES: &str = "/sys/bus/dax/devices";
const DRIVER: &str = "/sys/bus/dax/drivers/device_dax";

/// Name of soft-reserved memory in `/proc/iomem`.
const RESERVED: &str = "Soft Reserved";

/// Alignment of the window's mappings.
const ALIGNMENT: u64 = 2 << 20;
/// Alignment of mappings of the part for single pages.
const PAGE: u64 = 4096;
/// Part of a window that is mapped in single pages: the whole divided by this.
const PAGES_OF_WINDOW: u64 = 8;

/// Reason why there is no usable window.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    #[error(
        "this machine has no window: the kernel found no soft-reserved memory, which the firmware's memory \
         map marks with type 0xefffffff"
    )]
    Missing,
    #[error("the window of {bytes} bytes is too small for a part of single pages")]
    Small { bytes: u64 },
    #[error("process {process} uses the window")]
    InUse { process: String },
    #[error("the driver {driver} has taken {device}")]
    Taken { device: String, driver: String },
    #[error("the kernel made no device for the part of single pages")]
    NotMade,
    #[error("the kernel put the part of single pages at {found:#x}, not at {wanted:#x}")]
    Place { found: u64, wanted: u64 },
    #[error("the window has {found} bytes instead of {wanted}")]
    Size { found: u64, wanted: u64 },
    #[error(
        "the window has {found} bytes instead of {wanted}: its end could neither become a device of its own \
         ({cause}) nor be joined to it again. Restart the guest, with more memory or a smaller window"
    )]
    Apart {
        found: u64,
        wanted: u64,
        cause: Box<WindowError>,
    },
    #[error("mappings of {device} are aligned to {found} bytes, not to {wanted}")]
    Alignment {
        device: String,
        found: u64,
        wanted: u64,
    },
    #[error(
        "the kernel uses the window {start:#x}-{end:#x} as ordinary memory (\"{name}\" in /proc/iomem): keep \
         the module kmem from being loaded"
    )]
    SystemRam { start: u64, end: u64, name: String },
    #[error(
        "{device} is at {start:#x}-{end:#x}, but soft-reserved memory (/proc/iomem) has the window of its place at \
         {wanted_start:#x}-{wanted_end:#x}"
    )]
    Elsewhere {
        device: String,
        start: u64,
        end: u64,
        wanted_start: u64,
        wanted_end: u64,
    },
    #[error("{device} is at {start:#x}-{end:#x}, which is no soft-reserved memory (/proc/iomem)")]
    NotReserved {
        device: String,
        start: u64,
        end: u64,
    },
    #[error("the window at {start:#x}-{end:#x} (/proc/iomem) has no device")]
    NoDevice { start: u64, end: u64 },
    #[error("the driver device_dax does not take {device}: {source}")]
    Bind { device: String, source: io::Error },
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {value} to {path}: {source}")]
    Write {
        path: PathBuf,
        value: String,
        source: io::Error,
    },
    #[error("{path} holds {text:?} instead of a number")]
    Number { path: PathBuf, text: String },
    #[error("the window's device {0} is missing")]
    Node(PathBuf),
}

/// A DAX device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaxDevice {
    /// Name, such as `dax0.0`, of the device and of its node.
    pub name: String,
    /// Size in bytes; 0 if its region is idle.
    pub bytes: u64,
    /// Driver that is bound to the device.
    pub driver: Option<String>,
}

impl DaxDevice {
    /// Finds the window.
    ///
    /// # Errors
    /// There is no DAX device.
    pub fn find() -> Result<Self, WindowError> {
        let name = names(Path::new(DEVICES)).into_iter().next();
        Self::named(name.ok_or(WindowError::Missing)?)
    }

    /// Finds the part of the window that is mapped in single pages.
    ///
    /// # Errors
    /// Its size cannot be read.
    pub fn pages(&self) -> Result<Option<Self>, WindowError> {
        page_device(&self.name).map(Self::named).transpose()
    }

    fn named(name: String) -> Result<Self, WindowError> {
        let device = Path::new(DEVICES).join(&name);
        let driver = fs::read_link(device.join("driver")).ok();
        let driver = driver.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        Ok(Self {
            bytes: number(&device.join("size"))?,
            name,
            driver,
        })
    }
}

/// Returns the names of the DAX devices, in the order of their numbers, which is that of their addresses.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.collect();
    names.sort_by_key(|name| (name.len(), name.clone()));
    names
}

/// A guest's window that programs can map.
#[derive(Debug)]
pub struct Window {
    /// Device node.
    pub node: PathBuf,
    /// Cause why no part of it is mapped in single pages.
    pub undivided: Option<WindowError>,
}

/// Prepares the window of a guest and checks its size if one is `wanted`.
///
/// # Errors
/// There is no window, it has another size or alignment, the kernel uses it, or no driver takes it. A window that cannot
/// be divided is no error, unless a part of it is lost.
pub fn prepare(wanted: Option<u64>) -> Result<Window, WindowError> {
    let DaxDevice { name, .. } = DaxDevice::find()?;
    let whole = number(&region(&name)?.join("size"))?;
    if let Some(wanted) = wanted {
        check_size(whole, wanted)?;
    }
    let cause = match prepare_parts(&name, whole) {
        Ok(node) => {
            return Ok(Window {
                node,
                undivided: None,
            });
        }
        Err(cause) => cause,
    };
    match prepare_device(DaxDevice::named(name)?, Some(whole), ALIGNMENT) {
        Ok((node, _)) => Ok(Window {
            node,
            undivided: Some(cause),
        }),
        Err(WindowError::Size { found, wanted }) => Err(WindowError::Apart {
            found,
            wanted,
            cause: Box::new(cause),
        }),
        Err(error) => Err(error),
    }
}

/// Divides a window and prepares both parts. Returns the window's node. If the driver does not take a part, it may lack
/// memory for page structures, and the window becomes whole again: that takes less.
fn prepare_parts(name: &str, whole: u64) -> Result<PathBuf, WindowError> {
    let pages = divide(name)?;
    let bytes = number(&folder(&pages).join("size"))?;
    let prepared = prepare_device(DaxDevice::named(pages.clone())?, None, PAGE).and_then(|_| {
        let rest = whole.saturating_sub(bytes);
        prepare_device(DaxDevice::named(name.to_owned())?, Some(rest), ALIGNMENT)
    });
    if let Err(WindowError::Bind { .. }) = prepared {
        // A failure shows when the window's size is checked.
        let _ = join(name, &pages, whole);
    }
    prepared.map(|(node, _)| node)
}

/// Removes the part of single pages and gives its memory to the window.
fn join(window: &str, pages: &str, whole: u64) -> Result<(), WindowError> {
    release(window)?;
    release(pages)?;
    remove(pages, &region(window)?)?;
    write(&folder(window).join("size"), &whole.to_string())
}

/// Removes a device from its region.
fn remove(name: &str, region: &Path) -> Result<(), WindowError> {
    write(&folder(name).join("size"), "0")?;
    write(&region.join("delete"), name)
}

/// Unbinds a device that no process has mapped, if it is bound.
fn release(name: &str) -> Result<(), WindowError> {
    match DaxDevice::named(name.to_owned())?.driver.as_deref() {
        Some("device_dax") => {
            if let Some(process) = user_of(&Path::new("/dev").join(name)) {
                return Err(WindowError::InUse { process });
            }
            write(&Path::new(DRIVER).join("unbind"), name)
        }
        Some(driver) => Err(WindowError::Taken {
            device: name.to_owned(),
            driver: driver.to_owned(),
        }),
        None => Ok(()),
    }
}

/// Makes the end of a window a device of its own, unless that is done. Returns the device's name. On failure the window
/// stays whole.
fn divide(name: &str) -> Result<String, WindowError> {
    if let Some(pages) = page_device(name) {
        return Ok(pages);
    }
    let region = region(name)?;
    let whole = number(&region.join("size"))?;
    let pages = bytes_of_pages(whole);
    if pages == 0 {
        return Err(WindowError::Small { bytes: whole });
    }
    release(name)?;
    let size = folder(name).join("size");
    let made = write(&size, &(whole - pages).to_string()).and_then(|()| {
        if other_device(name, 0..=0).is_none() {
            write(&region.join("create"), "1")?;
        }
        make_page_device(name, &region, pages)
    });
    if made.is_err() {
        // A failure shows when the window's size is checked.
        let _ = write(&size, &whole.to_string());
    }
    made
}

/// Returns the number of a process that has mapped a device: it would end without that.
fn user_of(node: &Path) -> Option<String> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let uses = |folder: &fs::DirEntry| {
        let maps = fs::read_to_string(folder.path().join("maps")).unwrap_or_default();
        maps.lines()
            .any(|line| Path::new(line.split_whitespace().next_back().unwrap_or_default()) == node)
    };
    let mut users = processes.filter(uses);
    users
        .next()
        .map(|folder| folder.file_name().to_string_lossy().into_owned())
}

/// Gives the device without a size the rest of the region. Removes it on failure.
fn make_page_device(name: &str, region: &Path, bytes: u64) -> Result<String, WindowError> {
    let made = other_device(name, 0..=0).ok_or(WindowError::NotMade)?;
    let own = folder(&made);
    let wanted = range(&folder(name))?.end() + 1;
    let sized = write(&own.join("align"), &PAGE.to_string())
        .and_then(|()| write(&own.join("size"), &bytes.to_string()))
        .and_then(|()| number(&own.join("resource")))
        .and_then(|found| match found == wanted {
            true => Ok(()),
            false => Err(WindowError::Place { found, wanted }),
        });
    if sized.is_err() {
        // A device that stays has no size, and is no device of pages.
        let _ = remove(&made, region);
    }
    sized.map(|()| made)
}

/// Returns the bytes of a window that are mapped in single pages.
fn bytes_of_pages(whole: u64) -> u64 {
    whole / PAGES_OF_WINDOW / ALIGNMENT * ALIGNMENT
}

/// Returns the device behind a window in the same region.
fn page_device(window: &str) -> Option<String> {
    other_device(window, 1..=u64::MAX)
}

/// Returns a device of a window's region other than the window, of such a size.
fn other_device(window: &str, sizes: RangeInclusive<u64>) -> Option<String> {
    let (region, _) = window.split_once('.')?;
    let is_other = |name: &String| {
        name.split_once('.').is_some_and(|(own, _)| own == region) && name != window
    };
    let has_size =
        |name: &String| number(&folder(name).join("size")).is_ok_and(|size| sizes.contains(&size));
    let mut others = names(Path::new(DEVICES)).into_iter().filter(is_other);
    others.find(has_size)
}

/// Returns the folder of a device.
fn folder(name: &str) -> PathBuf {
    Path::new(DEVICES).join(name)
}

/// Returns the folder of the region in which a device lies.
fn region(name: &str) -> Result<PathBuf, WindowError> {
    let path = folder(name);
    match fs::canonicalize(&path) {
        Ok(device) => Ok(device.with_file_name("dax_region")),
        Err(source) => Err(WindowError::Read { path, source }),
    }
}

/// Prepares all windows of a backend VM. Each must have this size. Returns their device nodes in the order of their
/// addresses, which is that of the slots outside.
///
/// # Errors
/// As for [`prepare`]. Soft-reserved memory has no device, or a device of another place: its tenant's processes would get
/// the window of another tenant.
pub fn prepare_all(wanted: u64) -> Result<Vec<PathBuf>, WindowError> {
    let names = names(Path::new(DEVICES));
    if names.is_empty() {
        return Err(WindowError::Missing);
    }
    let (mut nodes, mut found) = (Vec::new(), Vec::new());
    for name in names {
        let (node, range) =
            prepare_device(DaxDevice::named(name.clone())?, Some(wanted), ALIGNMENT)?;
        nodes.push(node);
        found.push((name, range));
    }
    check_places(&memory_map()?, &found)?;
    Ok(nodes)
}

/// Checks that devices cover the soft-reserved ranges of a map with the format of `/proc/iomem`, one each, in order.
fn check_places(map: &str, found: &[(String, RangeInclusive<u64>)]) -> Result<(), WindowError> {
    let mut reserved = ranges(map)
        .filter(|(_, name)| *name == RESERVED)
        .map(|(range, _)| range);
    for (device, range) in found {
        let (device, start, end) = (device.clone(), *range.start(), *range.end());
        match reserved.next() {
            Some(wanted) if wanted == *range => {}
            Some(wanted) => {
                return Err(WindowError::Elsewhere {
                    device,
                    start,
                    end,
                    wanted_start: *wanted.start(),
                    wanted_end: *wanted.end(),
                });
            }
            None => return Err(WindowError::NotReserved { device, start, end }),
        }
    }
    match reserved.next() {
        Some(range) => Err(WindowError::NoDevice {
            start: *range.start(),
            end: *range.end(),
        }),
        None => Ok(()),
    }
}

fn check_size(found: u64, wanted: u64) -> Result<(), WindowError> {
    if found == wanted {
        Ok(())
    } else {
        Err(WindowError::Size { found, wanted })
    }
}

/// Prepares a device whose mappings must have this alignment. Returns its node and its physical addresses.
fn prepare_device(
    device: DaxDevice,
    wanted: Option<u64>,
    alignment: u64,
) -> Result<(PathBuf, RangeInclusive<u64>), WindowError> {
    let DaxDevice {
        name,
        bytes,
        driver,
        ..
    } = device;
    let device = folder(&name);
    if bytes == 0 {
        let size = number(&region(&name)?.join("available_size"))?;
        write(&device.join("size"), &size.to_string())?;
    }
    let range = range(&device)?;
    refuse_ordinary_memory(&range)?;
    if let Some(wanted) = wanted {
        check_size(number(&device.join("size"))?, wanted)?;
    }
    let found = number(&device.join("align"))?;
    if found != alignment {
        return Err(WindowError::Alignment {
            device: name,
            found,
            wanted: alignment,
        });
    }
    if driver.is_none() {
        bind(&name)?;
    }
    // Checks again, since binding may have given the range to kmem.
    refuse_ordinary_memory(&range)?;
    let node = Path::new("/dev").join(&name);
    if node.exists() {
        Ok((node, range))
    } else {
        Err(WindowError::Node(node))
    }
}

/// Binds the device to `device_dax` with `bind`, or with `new_id` if the driver does not match it yet.
fn bind(name: &str) -> Result<(), WindowError> {
    let driver = Path::new(DRIVER);
    let bound = fs::write(driver.join("bind"), name).or_else(|cause| {
        fs::write(driver.join("new_id"), name)?;
        // This write also succeeds if the driver knows the device and lacks memory for it.
        match folder(name).join("driver").exists() {
            true => Ok(()),
            false => Err(cause),
        }
    });
    bound.map_err(|source| WindowError::Bind {
        device: name.to_owned(),
        source,
    })
}

/// Returns the physical address range of a DAX device.
fn range(device: &Path) -> Result<RangeInclusive<u64>, WindowError> {
    let start = number(&device.join("resource"))?;
    let size = number(&device.join("size"))?;
    Ok(start..=start.saturating_add(size.saturating_sub(1)))
}

/// Reads the kernel's map of memory.
fn memory_map() -> Result<String, WindowError> {
    let path = Path::new("/proc/iomem");
    fs::read_to_string(path).map_err(|source| WindowError::Read {
        path: path.to_owned(),
        source,
    })
}

fn refuse_ordinary_memory(range: &RangeInclusive<u64>) -> Result<(), WindowError> {
    match ordinary_memory(&memory_map()?, range) {
        Some(name) => Err(WindowError::SystemRam {
            start: *range.start(),
            end: *range.end(),
            name,
        }),
        None => Ok(()),
    }
}

/// Returns the name of the first system RAM that overlaps the range in a map with the format of `/proc/iomem`.
fn ordinary_memory(map: &str, range: &RangeInclusive<u64>) -> Option<String> {
    let mut ranges = ranges(map);
    ranges.find_map(|(other, name)| {
        let meets = other.start() <= range.end() && range.start() <= other.end();
        (meets && name.starts_with("System RAM")).then(|| name.to_owned())
    })
}

/// Returns the ranges of a map with the format of `/proc/iomem`, with their names.
fn ranges(map: &str) -> impl Iterator<Item = (RangeInclusive<u64>, &str)> {
    map.lines().filter_map(|line| {
        let (addresses, name) = line.trim_start().split_once(" : ")?;
        let (start, end) = addresses.split_once('-')?;
        let start = u64::from_str_radix(start, 16).ok()?;
        let end = u64::from_str_radix(end, 16).ok()?;
        Some((start..=end, name))
    })
}

/// Reads a number from sysfs, decimal or with `0x`.
fn number(path: &Path) -> Result<u64, WindowError> {
    let text = fs::read_to_string(path).map_err(|source| WindowError::Read {
        path: path.to_owned(),
        source,
    })?;
    let text = text.trim();
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| WindowError::Number {
        path: path.to_owned(),
        text: text.to_owned(),
    })
}

fn write(path: &Path, value: &str) -> Result<(), WindowError> {
    fs::write(path, value).map_err(|source| WindowError::Write {
        path: path.to_owned(),
        value: value.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::{bytes_of_pages, check_places, names, ordinary_memory};

    const MAP: &str = "00001000-0009fbff : System RAM\n\
        00100000-1fffffff : System RAM\n  \
          01000000-01ffffff : Kernel code\n\
        100000000-10fffffff : Soft Reserved\n  \
          100000000-10fffffff : dax0.0\n\
        140000000-14fffffff : dax1.0\n  \
          140000000-14fffffff : System RAM (kmem)\n";

    #[test]
    fn devices_are_in_the_order_of_their_addresses() {
        let folder = tempfile::tempdir().unwrap();
        for number in [10, 0, 2, 63] {
            std::fs::create_dir(folder.path().join(format!("dax{number}.0"))).unwrap();
        }
        let found = names(folder.path());
        assert_eq!(found, ["dax0.0", "dax2.0", "dax10.0", "dax63.0"]);
        assert!(names(&folder.path().join("none")).is_empty());
    }

    #[test]
    fn an_eighth_of_a_window_is_mapped_in_pages() {
        const MIB: u64 = 1 << 20;
        for (whole, pages) in [(8, 0), (14, 0), (16, 2), (250, 30), (1 << 16, 8 << 10)] {
            assert_eq!(bytes_of_pages(whole * MIB), pages * MIB, "{whole}");
        }
    }

    #[test]
    fn a_window_whose_device_is_that_of_another_slot_is_refused_by_name() {
        const MAP: &str = "00100000-1fffffff : System RAM\n\
            100000000-10fffffff : Soft Reserved\n  \
              100000000-10fffffff : dax0.0\n\
            118000000-127ffffff : Soft Reserved\n\
            130000000-13fffffff : Soft Reserved\n";
        let check = |devices: &[(&str, u64)]| {
            let range = |start: u64| start..=start + 0xfff_ffff;
            let found = devices
                .iter()
                .map(|(name, start)| ((*name).to_owned(), range(*start)));
            let checked = check_places(MAP, &found.collect::<Vec<_>>());
            checked.err().map(|error| error.to_string())
        };
        let (first, second, third) = (
            ("dax0.0", 0x1_0000_0000),
            ("dax1.0", 0x1_1800_0000),
            ("dax2.0", 0x1_3000_0000),
        );
        assert_eq!(check(&[first, second, third]), None);
        for (devices, named) in [
            // The kernel gave numbers in another order.
            (
                &[("dax0.0", second.1), ("dax1.0", first.1), third][..],
                "dax0.0 is at 0x118000000-",
            ),
            (
                &[first, ("dax1.0", third.1), ("dax2.0", second.1)],
                "dax1.0 is at 0x130000000-",
            ),
            // It made no device of a range.
            (&[first, third], "dax2.0 is at 0x130000000-"),
            (&[first, second], "the window at 0x130000000-0x13fffffff"),
            // A device is no window, or not all of one.
            (
                &[first, second, third, ("dax3.0", 0x2_0000_0000)],
                "dax3.0 is at 0x200000000-",
            ),
            (
                &[("dax0.0", 0x1_0000_1000), second, third],
                "dax0.0 is at 0x100001000-",
            ),
        ] {
            let error = check(devices).expect("refused");
            assert!(error.starts_with(named), "{error}");
        }
    }

    #[test]
    fn a_range_of_its_own_is_no_ordinary_memory() {
        assert_eq!(ordinary_memory(MAP, &(0x1_0000_0000..=0x1_0fff_ffff)), None);
    }

    #[test]
    fn a_range_that_the_kernel_took_is_found_at_any_depth_and_overlap() {
        assert_eq!(
            ordinary_memory(MAP, &(0x1_4000_0000..=0x1_4fff_ffff)).as_deref(),
            Some("System RAM (kmem)")
        );
        assert_eq!(
            ordinary_memory(MAP, &(0x1fff_ffff..=0x2fff_ffff)).as_deref(),
            Some("System RAM")
        );
    }
}
