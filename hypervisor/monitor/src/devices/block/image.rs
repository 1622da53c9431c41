//! Opens, locks and accesses the image file of a disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use vm_memory::VolatileSlice;

use super::identity::DiskFile;
use crate::devices::virtio::{guards, vector};

/// Bytes of a sector, the unit of all addresses (virtio 1.2, 5.2.2).
pub const SECTOR: u64 = 512;

static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Access of the guest to a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskAccess {
    /// Read-only; any number of guests can share the image.
    ReadOnly,
    /// Read and write; no other guest can use the image.
    ReadWrite,
}

/// Error from opening a disk image.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The file cannot be opened, locked or examined.
    #[error("the disk image {} cannot be opened", path.display())]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// Underlying error.
        source: io::Error,
    },
    /// The file is neither a regular file nor a block device.
    #[error("the disk image {} is neither a regular file nor a block device", .0.display())]
    Kind(PathBuf),
    /// The size is 0 or not a whole number of sectors.
    #[error(
        "the disk image {} has {size} bytes, which is not a whole number of sectors of {SECTOR} bytes: \
         extend it, for example with truncate(1)",
        path.display()
    )]
    Size {
        /// Path of the file.
        path: PathBuf,
        /// Size in bytes.
        size: u64,
    },
    /// Another guest uses the image, or the host uses the block device.
    #[error("the disk image {} is in use by another guest or mounted", .0.display())]
    InUse(PathBuf),
}

/// An open image, locked until it is closed.
#[derive(Debug)]
pub struct DiskImage {
    file: File,
    access: DiskAccess,
    sectors: u64,
}

impl DiskImage {
    /// Opens and locks (flock(2)) the image at `path`.
    ///
    /// # Errors
    ///
    /// The file cannot be opened, is neither a regular file nor a block device, is not a whole number of sectors long, or
    /// is locked by another guest.
    pub fn open(path: &Path, access: DiskAccess) -> Result<Self, DiskError> {
        let failed = |source| DiskError::Open {
            path: path.to_path_buf(),
            source,
        };
        let open = |flags: OFlags| {
            let opened = OpenOptions::new()
                .read(true)
                .write(access == DiskAccess::ReadWrite)
                // Without O_NONBLOCK, opening a pipe would wait for its other end.
                .custom_flags((OFlags::NONBLOCK | flags).bits().cast_signed())
                .open(path);
            opened.map_err(|error| match error.kind() {
                io::ErrorKind::ResourceBusy => DiskError::InUse(path.to_path_buf()),
                _ => failed(error),
            })
        };
        let mut file = open(OFlags::empty())?;
        let mut kind = file.metadata().map_err(failed)?.file_type();
        if kind.is_block_device() && access == DiskAccess::ReadWrite {
            // O_EXCL fails for a device that is mounted or part of another device, which flock does not detect.
            file = open(OFlags::EXCL)?;
            kind = file.metadata().map_err(failed)?.file_type();
        }
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DiskError::Kind(path.to_path_buf()));
        }
        // With O_NONBLOCK, an io_uring of some kernels refuses reads that wait.
        let flags = rustix::fs::fcntl_getfl(&file).map_err(|error| failed(error.into()))?;
        rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)
            .map_err(|error| failed(error.into()))?;
        let lock = match access {
            DiskAccess::ReadOnly => FlockOperation::NonBlockingLockShared,
            DiskAccess::ReadWrite => FlockOperation::NonBlockingLockExclusive,
        };
        rustix::fs::flock(&file, lock).map_err(|error| match error {
            rustix::io::Errno::WOULDBLOCK => DiskError::InUse(path.to_path_buf()),
            error => failed(error.into()),
        })?;
        let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(DiskError::Size {
                path: path.to_path_buf(),
                size,
            });
        }
        Ok(Self {
            file,
            access,
            sectors: size / SECTOR,
        })
    }

    /// Returns the size in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Returns the access of the guest.
    pub fn access(&self) -> DiskAccess {
        self.access
    }

    /// Returns a handle on the file, for a snapshot.
    ///
    /// # Errors
    /// No descriptor is free.
    pub(crate) fn handle(&self) -> io::Result<DiskFile> {
        Ok(DiskFile {
            file: self.file.try_clone()?,
            sectors: self.sectors,
        })
    }

    /// Reads the bytes from `offset` on into `memory`.
    pub(super) fn read(&self, memory: &[VolatileSlice<'_>], offset: u64) -> io::Result<()> {
        transfer(memory, offset, |parts, count, offset| {
            // SAFETY: each part is a range of guest memory that is mapped while its slice is borrowed; guest memory is
            // never the target of a Rust reference, so that the kernel may write to it.
            unsafe { libc::preadv(self.file.as_raw_fd(), parts, count, offset) }
        })
    }

    /// Writes `memory` at `offset`. With `durable`, the data is on stable storage when this returns.
    pub(super) fn write(
        &self,
        memory: &[VolatileSlice<'_>],
        offset: u64,
        durable: bool,
    ) -> io::Result<()> {
        let flags = if durable { libc::RWF_DSYNC } else { 0 };
        transfer(memory, offset, |parts, count, offset| {
            // SAFETY: each part is a range of guest memory that is mapped while its slice is borrowed; the kernel only
            // reads it.
            unsafe { libc::pwritev2(self.file.as_raw_fd(), parts, count, offset, flags) }
        })
    }

    /// Waits until all written data is on stable storage.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Deallocates a range, which reads as zeros afterwards. On a file system without `PUNCH_HOLE`, and on a block device
    /// that discards nothing, the range stays as it is: a discard is a hint, and a guest that needs zeros requests them.
    pub(super) fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.deallocate(offset, len).map(drop)
    }

    /// Zeroes a range, and deallocates it where that is possible. Where it is not, this is [`Self::write_zeroes`].
    pub(super) fn unmap(
        &self,
        offset: u64,
        len: u64,
        is_over: impl Fn() -> bool,
    ) -> io::Result<()> {
        match self.deallocate(offset, len)? {
            true => Ok(()),
            false => self.write_zeroes(offset, len, is_over),
        }
    }

    /// Calls fallocate(2). The work of an io_uring that ends on this thread may interrupt it.
    fn allocate(&self, flags: FallocateFlags, offset: u64, len: u64) -> rustix::io::Result<()> {
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.file, flags, offset, len))
    }

    /// Deallocates a range. Returns whether the storage has an operation for that.
    fn deallocate(&self, offset: u64, len: u64) -> io::Result<bool> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match self.allocate(flags, offset, len) {
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(false),
            done => Ok(done.map(|()| true)?),
        }
    }

    /// Zeroes a range. Its storage stays allocated. On a file system without `ZERO_RANGE` this takes many writes, and
    /// fails with `Interrupted` once `is_over`.
    pub(super) fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        is_over: impl Fn() -> bool,
    ) -> io::Result<()> {
        let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        match self.allocate(flags, offset, len) {
            // Some file systems, for example tmpfs, do not support ZERO_RANGE.
            Err(rustix::io::Errno::OPNOTSUPP) => {
                let mut done = 0;
                while done < len {
                    if is_over() {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                    let now = (len - done).min(ZEROES.len() as u64);
                    let zeroes = &ZEROES[..usize::try_from(now).unwrap_or(ZEROES.len())];
                    self.file.write_all_at(zeroes, offset + done)?;
                    done += now;
                }
                Ok(())
            }
            done => Ok(done?),
        }
    }
}

impl AsFd for DiskImage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Calls `operation` (`preadv` or `pwritev`) until all of `memory` is transferred.
fn transfer(
    memory: &[VolatileSlice<'_>],
    mut offset: u64,
    mut operation: impl FnMut(*const libc::iovec, i32, i64) -> isize,
) -> io::Result<()> {
    // The guards keep the ranges mapped while the vector refers to them.
    let guards = guards(memory);
    let mut parts = vector(&guards);
    let mut left = &mut parts[..];
    while let Some(first) = left.first() {
        if first.iov_len == 0 {
            left = &mut left[1..];
            continue;
        }
        let count = i32::try_from(left.len()).map_err(io::Error::other)?;
        let at = i64::try_from(offset).map_err(io::Error::other)?;
        let moved = match usize::try_from(operation(left.as_ptr(), count, at)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => moved,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error => return Err(error),
            },
        };
        offset += moved as u64;
        left = advance(left, moved);
    }
    Ok(())
}

/// Returns the parts after the first `moved` bytes.
fn advance(mut parts: &mut [libc::iovec], mut moved: usize) -> &mut [libc::iovec] {
    while let Some(first) = parts.first_mut() {
        if moved < first.iov_len {
            first.iov_base = first.iov_base.wrapping_byte_add(moved);
            first.iov_len -= moved;
            break;
        }
        moved -= first.iov_len;
        parts = &mut parts[1..];
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::{thread, time::Duration};

    fn file_of(size: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.as_file().set_len(size).expect("a size");
        file
    }

    #[test]
    fn a_disk_has_as_many_sectors_as_its_file() {
        let file = file_of(10 * SECTOR);
        let image = DiskImage::open(file.path(), DiskAccess::ReadWrite).expect("an image");
        assert_eq!(image.sectors(), 10);
        assert_eq!(image.access(), DiskAccess::ReadWrite);
    }

    #[test]
    fn files_that_cannot_be_disks_are_refused_by_name() {
        for size in [0, SECTOR + 1] {
            let file = file_of(size);
            let error = DiskImage::open(file.path(), DiskAccess::ReadOnly).expect_err("no disk");
            assert!(matches!(&error, DiskError::Size { size: said, .. } if *said == size));
            assert!(error.to_string().contains(&*file.path().to_string_lossy()));
        }
        let folder = tempfile::tempdir().expect("a folder");
        let refused = DiskImage::open(folder.path(), DiskAccess::ReadOnly);
        assert!(matches!(refused, Err(DiskError::Kind(_))));
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .expect("a pipe");
        let refused = DiskImage::open(&pipe, DiskAccess::ReadOnly);
        assert!(matches!(refused, Err(DiskError::Kind(_))));
        let missing = DiskImage::open(&folder.path().join("none"), DiskAccess::ReadOnly);
        assert!(matches!(missing, Err(DiskError::Open { .. })));
    }

    #[test]
    fn one_guest_writes_or_many_read() {
        let file = file_of(SECTOR);
        let open = |access| DiskImage::open(file.path(), access);
        let writer = open(DiskAccess::ReadWrite).expect("the first");
        for access in [DiskAccess::ReadOnly, DiskAccess::ReadWrite] {
            assert!(matches!(open(access), Err(DiskError::InUse(_))));
        }
        drop(writer);
        // A process that another test starts has a copy of the writer's descriptor until it executes its program.
        let first = (0..500).find_map(|_| {
            thread::sleep(Duration::from_millis(10));
            open(DiskAccess::ReadOnly).ok()
        });
        let _readers = [
            first.expect("a reader"),
            open(DiskAccess::ReadOnly).expect("a second one"),
        ];
        assert!(matches!(
            open(DiskAccess::ReadWrite),
            Err(DiskError::InUse(_))
        ));
    }

    #[test]
    fn a_transfer_goes_on_after_it_was_cut_short() {
        let mut file = file_of(SECTOR);
        let bytes: Vec<u8> = (0..SECTOR).map(|byte| byte.to_le_bytes()[0]).collect();
        file.write_all(&bytes).expect("room");
        let mut memory = vec![0u8; 300];
        let (first, second) = memory.split_at_mut(100);
        let slices = [VolatileSlice::from(first), VolatileSlice::from(second)];
        let image = DiskImage::open(file.path(), DiskAccess::ReadOnly).expect("an image");
        let mut calls = 0;
        transfer(&slices, 7, |parts, _, offset| {
            calls += 1;
            // SAFETY: the vector has at least one part.
            let mut part = unsafe { *parts };
            part.iov_len = part.iov_len.min(64);
            // SAFETY: the part names memory of this test.
            unsafe { libc::preadv(image.file.as_raw_fd(), &raw const part, 1, offset) }
        })
        .expect("a transfer");
        assert_eq!(memory, bytes[7..307]);
        assert_eq!(calls, 2 + 4);
    }

    /// A disk on tmpfs of three pieces of `ZEROES`, all ones.
    fn disk_of_ones() -> (File, DiskImage) {
        let memory = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::empty());
        let mut file = File::from(memory.expect("a memfd"));
        file.write_all(&vec![0xff; 3 * ZEROES.len()]).expect("room");
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let image = DiskImage::open(Path::new(&path), DiskAccess::ReadWrite).expect("an image");
        (file, image)
    }

    #[test]
    fn the_end_of_the_vm_ends_the_writing_of_zeroes() {
        let (file, image) = disk_of_ones();
        let asked = std::cell::Cell::new(0);
        let is_over = || asked.replace(asked.get() + 1) == 1;
        let left_off = image.write_zeroes(0, 3 * ZEROES.len() as u64, is_over);
        assert_eq!(
            left_off.expect_err("not all").kind(),
            io::ErrorKind::Interrupted
        );
        let mut bytes = vec![0; 3 * ZEROES.len()];
        file.read_exact_at(&mut bytes, 0).expect("the file");
        let zeroes = bytes.iter().filter(|byte| **byte == 0).count();
        assert_eq!(zeroes, ZEROES.len());
    }

    #[test]
    fn zeroes_are_written_where_the_file_system_has_no_operation_for_them() {
        let (file, image) = disk_of_ones();
        let len = 3 * (ZEROES.len() as u64);
        let allocated = || rustix::fs::fstat(&file).expect("a file").st_blocks;
        let before = allocated();
        image
            .write_zeroes(SECTOR, len - 2 * SECTOR, || false)
            .expect("zeroes");
        let mut bytes = vec![0; 3 * ZEROES.len()];
        file.read_exact_at(&mut bytes, 0).expect("the file");
        let (first, rest) = bytes.split_at(512);
        let (zeroes, last) = rest.split_at(rest.len() - 512);
        assert_eq!([first, last], [[0xff; 512]; 2]);
        assert!(zeroes.iter().all(|byte| *byte == 0));
        assert_eq!(allocated(), before);
    }

    #[test]
    fn a_file_that_was_cut_is_an_error() {
        let file = file_of(4 * SECTOR);
        let image = DiskImage::open(file.path(), DiskAccess::ReadOnly).expect("an image");
        file.as_file().set_len(SECTOR).expect("a size");
        let mut memory = vec![0u8; 1024];
        let read = image.read(&[VolatileSlice::from(&mut memory[..])], SECTOR);
        assert_eq!(
            read.expect_err("nothing there").kind(),
            io::ErrorKind::UnexpectedEof
        );
    }
}
