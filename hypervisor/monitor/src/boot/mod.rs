//! Loads a Linux kernel and its initramfs for the 64-bit boot protocol
//! (Documentation/arch/x86/boot.rst of the kernel).

pub mod acpi;
pub mod e820;
mod kernel;

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress};

use crate::memory::Layout;
use crate::ram::GuestRam;

/// Guest physical address of the command line.
const COMMAND_LINE: u64 = 0x2_0000;
/// Maximum bytes of the command line, its terminating NUL included (`COMMAND_LINE_SIZE` of x86).
pub const COMMAND_LINE_MAX: usize = 2048;
/// Guest physical address of the boot parameters ("zero page").
pub(crate) const ZERO_PAGE: u64 = 0x7000;

/// Error from loading a guest.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A file could not be read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Underlying error.
        source: std::io::Error,
    },
    /// The kernel is neither a bzImage nor an ELF file for x86-64, or does not fit.
    #[error("{path} is not a kernel that can be booted")]
    Kernel {
        /// Path of the file.
        path: PathBuf,
        /// Error from the loader.
        source: linux_loader::loader::Error,
    },
    /// A bzImage without a 64-bit entry point.
    #[error("{path} has no 64-bit entry point (XLF_KERNEL_64)")]
    No64BitEntry {
        /// Path of the file.
        path: PathBuf,
    },
    /// The command line is too long.
    #[error(
        "the kernel's command line has {len} bytes, more than {} are not possible",
        COMMAND_LINE_MAX - 1
    )]
    CommandLineTooLong {
        /// Length of the command line.
        len: usize,
    },
    /// The kernel does not fit.
    #[error(
        "the kernel needs memory up to {kernel_end:#x}, and the guest's ends at {limit:#x}: give the guest more memory"
    )]
    KernelTooLarge {
        /// End of the memory that the kernel needs.
        kernel_end: u64,
        /// End of low memory.
        limit: u64,
    },
    /// The initramfs does not fit.
    #[error(
        "an initramfs of {bytes} bytes or more does not fit between the kernel (which needs memory up to \
         {kernel_end:#x}) and {limit:#x}: give the guest more memory"
    )]
    InitramfsTooLarge {
        /// Size of all parts, as far as they were read.
        bytes: u64,
        /// End of the memory that the kernel needs.
        kernel_end: u64,
        /// End of low memory.
        limit: u64,
    },
    /// The ACPI tables do not fit into the firmware area.
    #[error("the ACPI tables do not fit below 1 MiB")]
    AcpiTooLarge,
    /// Guest memory could not be written.
    #[error("cannot write {what} to guest memory")]
    Write {
        /// The data that was to be written.
        what: &'static str,
        /// Underlying error.
        source: vm_memory::GuestMemoryError,
    },
}

/// One of the cpio archives that make up the initramfs; later archives override earlier ones.
#[derive(Debug, Clone)]
pub enum InitramfsPart {
    /// A file, compressed or not.
    Path(PathBuf),
    /// An archive in memory.
    Bytes(Vec<u8>),
}

/// Kernel, initramfs and command line to boot.
#[derive(Debug, Clone)]
pub struct BootSource {
    /// A bzImage, or an uncompressed `vmlinux`, which boots without decompression.
    pub kernel: PathBuf,
    /// The initramfs archives, in order.
    pub initramfs: Vec<InitramfsPart>,
    /// The kernel's command line.
    pub command_line: String,
}

/// Loads the kernel, the initramfs, the command line and the boot parameters. Returns the address of the 64-bit entry
/// point.
pub(crate) fn load(
    ram: &GuestRam,
    layout: &Layout,
    vcpus: u8,
    source: &BootSource,
) -> Result<u64, BootError> {
    let kernel = kernel::load(ram, &source.kernel)?;
    let initramfs = load_initramfs(ram, layout, kernel.end, &source.initramfs)?;
    let command_line = source.command_line.as_bytes();
    if command_line.len() >= COMMAND_LINE_MAX {
        return Err(BootError::CommandLineTooLong {
            len: command_line.len(),
        });
    }
    let write = |what, bytes: &[u8], address| {
        ram.write_slice(bytes, GuestAddress(address))
            .map_err(|source| BootError::Write { what, source })
    };
    write("the command line", command_line, COMMAND_LINE)?;
    write(
        "the command line",
        &[0],
        COMMAND_LINE + command_line.len() as u64,
    )?;

    let mut params = boot_params {
        hdr: kernel.header,
        acpi_rsdp_addr: acpi::write(ram, vcpus, layout.wide_bars)?,
        ..Default::default()
    };
    params.hdr.type_of_loader = 0xff;
    params.hdr.cmd_line_ptr = u32::try_from(COMMAND_LINE).unwrap_or(0);
    // Both below 3 GiB: the loader puts them into low memory.
    params.hdr.ramdisk_image = u32::try_from(initramfs.start).unwrap_or(0);
    params.hdr.ramdisk_size = u32::try_from(initramfs.len).unwrap_or(0);
    let map = e820::map(layout);
    for (slot, entry) in params.e820_table.iter_mut().zip(&map) {
        *slot = boot_e820_entry {
            addr: entry.start,
            size: entry.len,
            r#type: entry.kind,
        };
        params.e820_entries += 1;
    }
    ram.write_obj(params, GuestAddress(ZERO_PAGE))
        .map_err(|source| BootError::Write {
            what: "the boot parameters",
            source,
        })?;
    Ok(kernel.entry)
}

/// Writes the archives one after the other to the top of low memory.
fn load_initramfs(
    ram: &GuestRam,
    layout: &Layout,
    kernel_end: u64,
    parts: &[InitramfsPart],
) -> Result<crate::memory::Range, BootError> {
    let limit = layout.low_ram().end();
    let room = limit
        .checked_sub(kernel_end)
        .ok_or(BootError::KernelTooLarge { kernel_end, limit })?;
    // A file may be larger than this machine's memory, and grow while it is read.
    let read = |path: &Path| {
        let mut bytes = Vec::new();
        File::open(path)?.take(room + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let parts = parts
        .iter()
        .map(|part| match part {
            InitramfsPart::Bytes(bytes) => Ok(Cow::Borrowed(bytes.as_slice())),
            InitramfsPart::Path(path) => {
                read(path)
                    .map(Cow::Owned)
                    .map_err(|source| BootError::Read {
                        path: path.clone(),
                        source,
                    })
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    // The kernel skips zeros between archives and expects each archive at a multiple of four.
    let size = |part: &[u8]| (part.len() as u64).next_multiple_of(4);
    let bytes: u64 = parts.iter().map(|part| size(part)).sum();
    let start = limit
        .checked_sub(bytes)
        .map(|start| start & !0xfff)
        .filter(|start| *start >= kernel_end)
        .ok_or(BootError::InitramfsTooLarge {
            bytes,
            kernel_end,
            limit,
        })?;
    let mut at = start;
    for part in &parts {
        ram.write_slice(part, GuestAddress(at))
            .map_err(|source| BootError::Write {
                what: "the initramfs",
                source,
            })?;
        at += size(part);
    }
    Ok(crate::memory::Range { start, len: bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_follow_each_other_at_multiples_of_four() {
        let layout = Layout::new(16, None).expect("layout");
        let ram = crate::memory::map_ram(&layout.ram).expect("ram");
        let parts = [
            InitramfsPart::Bytes(b"first".to_vec()),
            InitramfsPart::Bytes(b"second".to_vec()),
        ];
        let range = load_initramfs(&ram, &layout, 0, &parts).expect("fits");
        let mut bytes = vec![0; usize::try_from(range.len).expect("small")];
        ram.read_slice(&mut bytes, GuestAddress(range.start))
            .expect("in ram");
        assert_eq!(bytes, b"first\0\0\0second\0\0");
        assert!(range.end() <= layout.low_ram().end());
    }

    #[test]
    fn an_initramfs_that_would_hit_the_kernel_is_refused() {
        let layout = Layout::new(16, None).expect("layout");
        let ram = crate::memory::map_ram(&layout.ram).expect("ram");
        let parts = [InitramfsPart::Bytes(vec![0; 8 << 20])];
        assert!(matches!(
            load_initramfs(&ram, &layout, 10 << 20, &parts),
            Err(BootError::InitramfsTooLarge { .. })
        ));
    }

    #[test]
    fn a_kernel_that_needs_more_memory_is_refused_with_an_initramfs_and_without() {
        let layout = Layout::new(16, None).expect("layout");
        let ram = crate::memory::map_ram(&layout.ram).expect("ram");
        let parts = [InitramfsPart::Bytes(vec![0; 512])];
        for parts in [&parts[..], &[]] {
            let refused = load_initramfs(&ram, &layout, 17 << 20, parts);
            assert_eq!(
                refused.expect_err("too large").to_string(),
                "the kernel needs memory up to 0x1100000, and the guest's ends at 0x1000000: give the guest more memory"
            );
        }
        let whole = load_initramfs(&ram, &layout, 16 << 20, &[]);
        assert_eq!(whole.expect("it fits").len, 0);
    }

    #[test]
    fn no_more_of_a_file_is_read_than_the_guest_has_room_for() {
        let layout = Layout::new(16, None).expect("layout");
        let ram = crate::memory::map_ram(&layout.ram).expect("ram");
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 40).expect("a sparse file");
        let parts = [InitramfsPart::Path(file.path().to_owned())];
        let room = layout.low_ram().end() - (10 << 20);
        match load_initramfs(&ram, &layout, 10 << 20, &parts) {
            Err(BootError::InitramfsTooLarge { bytes, .. }) => assert!(bytes <= room + 4),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_file_that_is_no_kernel_is_named() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let layout = Layout::new(16, None).expect("layout");
        let ram = crate::memory::map_ram(&layout.ram).expect("ram");
        let source = BootSource {
            kernel: file.path().to_owned(),
            initramfs: Vec::new(),
            command_line: String::new(),
        };
        let error = load(&ram, &layout, 1, &source).expect_err("no kernel");
        assert!(error.to_string().contains(&*file.path().to_string_lossy()));
    }
}
