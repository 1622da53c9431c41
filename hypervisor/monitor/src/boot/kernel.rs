//! Loads the kernel image: a bzImage or an ELF file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, Elf, KernelLoader, KernelLoaderResult};
use vm_memory::GuestAddress;

use super::BootError;
use super::e820::HIGH_MEMORY_START;
use crate::ram::GuestRam;

/// Offset of a bzImage's 64-bit entry point in the protected-mode kernel.
const BZIMAGE_ENTRY: u64 = 0x200;
/// Bit of `xloadflags`: the kernel has the 64-bit entry point.
const XLF_KERNEL_64: u16 = 1;
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;
/// `kernel_alignment` of stock kernels, used for a vmlinux, which has no setup header.
const KERNEL_ALIGNMENT: u32 = 0x20_0000;

/// A kernel in guest memory.
pub(super) struct Kernel {
    pub entry: u64,
    /// End of the memory that the kernel needs while it starts.
    pub end: u64,
    pub header: setup_header,
}

pub(super) fn load(ram: &GuestRam, path: &Path) -> Result<Kernel, BootError> {
    let read = |source| BootError::Read {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(read)?;
    let mut magic = Vec::new();
    file.by_ref()
        .take(4)
        .read_to_end(&mut magic)
        .map_err(read)?;
    let high = Some(GuestAddress(HIGH_MEMORY_START));
    let loaded = if magic == b"\x7fELF" {
        Elf::load(ram, None, &mut file, high)
    } else {
        BzImage::load(ram, None, &mut file, high)
    }
    .map_err(|source| BootError::Kernel {
        path: path.to_owned(),
        source,
    })?;
    match loaded.setup_header {
        Some(header) => bzimage(path, &loaded, header),
        None => Ok(Kernel {
            entry: loaded.kernel_load.0,
            end: loaded.kernel_end,
            header: setup_header {
                boot_flag: BOOT_FLAG,
                header: HEADER_MAGIC,
                kernel_alignment: KERNEL_ALIGNMENT,
                ..Default::default()
            },
        }),
    }
}

fn bzimage(
    path: &Path,
    loaded: &KernelLoaderResult,
    header: setup_header,
) -> Result<Kernel, BootError> {
    if header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(BootError::No64BitEntry {
            path: path.to_owned(),
        });
    }
    // The image decompresses itself to its preferred address and needs `init_size` bytes there.
    let unpacked_end = header
        .pref_address
        .saturating_add(u64::from(header.init_size));
    Ok(Kernel {
        entry: loaded.kernel_load.0 + BZIMAGE_ENTRY,
        end: loaded.kernel_end.max(unpacked_end),
        header,
    })
}
