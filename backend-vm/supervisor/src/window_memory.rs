//! The memory behind a window's descriptor, which is an anonymous file or a DAX device.
//!
//! A DAX device (`/dev/dax0.0`) is a range of this machine's memory that its kernel does not use. A backend VM has its
//! tenants' windows as such devices: their memory is the host's, and the guests have it mapped too. A device cannot be read,
//! written, sealed or freed in parts. It is mapped, in whole segments. Nothing delays an access to such a mapping, so
//! that the event loop may map a device, and no file.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::{AtFlags, FileType, StatxFlags, fstat, statx};
use wormhole_link::memory::Mapping;
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::memory::WindowMemory;
use wormhole_ring::session::Run;

const SEGMENT: u64 = SEGMENT_BYTES as u64;

/// Folder in which the kernel lists DAX devices.
const DEVICES: &str = "/sys/bus/dax/devices";

/// Major and minor number of a device.
pub type Number = (u32, u32);

/// Sizes of this machine's DAX devices, by the numbers of the devices.
static SIZES: OnceLock<BTreeMap<Number, u64>> = OnceLock::new();

/// Looks for this machine's DAX devices. Call it while the process can still open files, and before it forks others:
/// no other device can be a window.
pub fn find_devices() {
    SIZES.get_or_init(|| sizes(Path::new(DEVICES)));
}

fn sizes(folder: &Path) -> BTreeMap<Number, u64> {
    // Without the folder the machine has no such device.
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let read = |name| fs::read_to_string(entry.path().join(name)).ok();
            let (number, size) = (read("dev")?, read("size")?);
            let (major, minor) = number.trim().split_once(':')?;
            let number = (major.parse().ok()?, minor.parse().ok()?);
            Some((number, size.trim().parse().ok()?))
        })
        .collect()
}

/// Kind of the memory behind a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Device,
}

impl Kind {
    /// # Errors
    /// Same as `fstat`.
    pub fn of(file: &impl AsFd) -> io::Result<Self> {
        let kind = FileType::from_raw_mode(fstat(file)?.st_mode);
        Ok(match kind {
            FileType::CharacterDevice => Self::Device,
            _ => Self::File,
        })
    }
}

/// Returns major and minor number of a character device; none for another file. Uses only what the kernel knows: a file
/// system that is asked may take as long as its owner likes.
///
/// # Errors
/// Same as `statx`.
pub fn device_number(file: &impl AsFd) -> io::Result<Option<Number>> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = statx(file, "", flags, StatxFlags::TYPE)?;
    let kind = FileType::from_raw_mode(found.stx_mode.into());
    let number = (found.stx_rdev_major, found.stx_rdev_minor);
    Ok((kind == FileType::CharacterDevice).then_some(number))
}

/// Returns the size of a DAX device of this machine; none if the descriptor is no such device.
///
/// # Errors
/// Same as `statx`.
pub fn device_size(file: &impl AsFd) -> io::Result<Option<u64>> {
    let Some(sizes) = SIZES.get() else {
        return Ok(None);
    };
    let number = device_number(file)?;
    Ok(number.and_then(|number| sizes.get(&number).copied()))
}

/// A mapped segment.
#[derive(Debug)]
pub struct Segment {
    // Dropped in this order.
    memory: WindowMemory,
    _mapping: Mapping,
}

impl Segment {
    /// Maps a segment of a file or a device.
    ///
    /// # Errors
    /// Same as `mmap`.
    pub fn map(file: &impl AsRawFd, segment: u32) -> io::Result<Self> {
        let mapping = Mapping::new(file, u64::from(segment) * SEGMENT, SEGMENT_BYTES)?;
        // SAFETY: the mapping is stored beside the memory and dropped after it, and users of this module make nothing of
        // the memory that they keep.
        let memory = unsafe { WindowMemory::new(mapping.base(), mapping.bytes()) };
        Ok(Self {
            memory: memory.map_err(io::Error::other)?,
            _mapping: mapping,
        })
    }

    pub fn memory(&self) -> &WindowMemory {
        &self.memory
    }
}

/// Reads from a segment.
///
/// # Errors
/// Same as `pread` or `mmap`.
pub fn read(
    file: &fs::File,
    kind: Kind,
    segment: u32,
    offset: usize,
    to: &mut [u8],
) -> io::Result<()> {
    match kind {
        Kind::File => file.read_exact_at(to, u64::from(segment) * SEGMENT + offset as u64),
        Kind::Device => {
            let mapped = Segment::map(file, segment)?;
            mapped.memory.read(offset, to).map_err(io::Error::other)
        }
    }
}

/// Writes to a segment.
///
/// # Errors
/// Same as `pwrite` or `mmap`.
pub fn write(
    file: &fs::File,
    kind: Kind,
    segment: u32,
    offset: usize,
    from: &[u8],
) -> io::Result<()> {
    match kind {
        Kind::File => file.write_all_at(from, u64::from(segment) * SEGMENT + offset as u64),
        Kind::Device => {
            let mapped = Segment::map(file, segment)?;
            mapped.memory.write(offset, from).map_err(io::Error::other)
        }
    }
}

/// Makes a run of segments read as zero. The memory of a file is freed, that of a device is written.
///
/// # Errors
/// Same as `fallocate` or `mmap`.
pub fn clear(file: &(impl AsFd + AsRawFd), kind: Kind, run: Run) -> io::Result<()> {
    match kind {
        Kind::File => wormhole_device::file::punch_hole(
            file,
            u64::from(run.first) * SEGMENT,
            u64::from(run.count) * SEGMENT,
        ),
        Kind::Device => (0..run.count).try_for_each(|number| {
            let mapped = Segment::map(file, run.first.saturating_add(number))?;
            let zeros = vec![0; SEGMENT_BYTES];
            mapped.memory.write(0, &zeros).map_err(io::Error::other)
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file, which is mapped as a device is. Segments are 1 to 3.
    fn memory() -> fs::File {
        let file = fs::File::from(wormhole_link::memory::anonymous_file(c"window").unwrap());
        file.set_len(4 * SEGMENT).unwrap();
        file
    }

    #[test]
    fn both_kinds_reach_the_same_bytes() {
        for (writer, reader) in [(Kind::File, Kind::Device), (Kind::Device, Kind::File)] {
            let file = memory();
            write(&file, writer, 2, 4095, b"across pages").unwrap();
            let mut bytes = [0; 12];
            read(&file, reader, 2, 4095, &mut bytes).unwrap();
            assert_eq!(&bytes, b"across pages");
            read(&file, reader, 1, 4095, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 12]);
        }
    }

    #[test]
    fn a_run_is_cleared_and_its_neighbours_are_not() {
        for kind in [Kind::File, Kind::Device] {
            let file = memory();
            for segment in 0..4 {
                for offset in [0, SEGMENT_BYTES - 1] {
                    write(&file, Kind::File, segment, offset, &[7]).unwrap();
                }
            }
            clear(&file, kind, Run { first: 1, count: 2 }).unwrap();
            let at = |segment, offset| {
                let mut byte = [9];
                read(&file, Kind::File, segment, offset, &mut byte).unwrap();
                byte[0]
            };
            let found = (0..4).map(|segment| (at(segment, 0), at(segment, SEGMENT_BYTES - 1)));
            assert_eq!(
                found.collect::<Vec<_>>(),
                [(7, 7), (0, 0), (0, 0), (7, 7)],
                "{kind:?}"
            );
        }
    }

    #[test]
    fn an_access_past_a_segment_of_a_device_is_an_error() {
        let file = memory();
        let wrong = write(&file, Kind::Device, 1, SEGMENT_BYTES - 1, &[1, 2]).unwrap_err();
        assert_eq!(wrong.kind(), io::ErrorKind::Other, "{wrong}");
    }

    #[test]
    fn devices_are_found_by_their_numbers_with_their_sizes() {
        let folder = tempfile::tempdir().unwrap();
        for (name, number, size) in [("dax0.0", "251:3\n", "4194304\n"), ("dax1.0", "x", "1")] {
            let device = folder.path().join(name);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("dev"), number).unwrap();
            fs::write(device.join("size"), size).unwrap();
        }
        let found = sizes(folder.path());
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [((251, 3), 4194304)]);
        assert!(sizes(&folder.path().join("none")).is_empty());
    }

    #[test]
    fn another_device_is_no_window() {
        let [zero, null] = ["/dev/zero", "/dev/null"].map(|path| fs::File::open(path).unwrap());
        assert_eq!(Kind::of(&zero).unwrap(), Kind::Device);
        assert_eq!(device_number(&zero).unwrap(), Some((1, 5)));
        assert_eq!(device_number(&null).unwrap(), Some((1, 3)));
        assert_eq!(device_number(&memory()).unwrap(), None);
    }
}
