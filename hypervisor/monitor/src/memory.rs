//! Lays out and maps the guest's physical address space: RAM, the PCI hole, the window, and memory for files.
//!
//! ```text
//! 0            .. 3 GiB        RAM (as much as fits)
//! 3 GiB        .. 4 GiB        PCI memory, IOAPIC, local APICs
//! 4 GiB        .. ram_end      the rest of RAM
//! align(1 GiB) .. + size       the window, or the aperture of several (soft-reserved memory)
//! align(1 GiB) .. + size       memory for files (persistent memory)
//! align(BAR)   .. + size       BARs with addresses of 64 bits, of devices of the host
//! ```

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::aperture::{MAX_SLOTS, Slots};
use crate::devices::vfio::PassthroughError;
use crate::ram::{self, Advice, AlignedMapping, COLLAPSED, GuestRam, RamRegion};

/// End of RAM below 4 GiB, and start of PCI memory.
pub const PCI_HOLE_START: u64 = 0xc000_0000;
/// First address after the PCI memory range; the IOAPIC and the local APICs follow.
pub const PCI_HOLE_END: u64 = 0xfec0_0000;
/// Start of RAM above the PCI hole.
pub const HIGH_RAM_START: u64 = 1 << 32;
/// Granularity of the window's size, so that it can be mapped with 2 MiB pages.
pub const WINDOW_UNIT: u64 = 2 << 20;
/// Alignment of the window's guest physical address, which permits 1 GiB pages.
pub const WINDOW_ALIGN: u64 = 1 << 30;

/// Memslot of memory for files; RAM uses the slots below it.
const FILE_MEMORY_SLOT: u32 = 7;
/// Memslot of the window.
const WINDOW_SLOT: u32 = 8;
/// First memslot of devices' BARs.
pub(crate) const FIRST_BAR_SLOT: u32 = WINDOW_SLOT + 1;

/// Error from setting up guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size of RAM is out of range.
    #[error("a guest cannot have {mib} MiB of memory: give it between 16 MiB and 1 TiB")]
    RamSize {
        /// Requested size in MiB.
        mib: u64,
    },
    /// The processor's physical addresses do not reach the end of RAM, of the window or of the devices' BARs.
    #[error(
        "{ram} MiB of memory and a window of {window} MiB end at {end:#x}, beyond this processor's physical addresses of \
         {bits} bits: give the guest less of one"
    )]
    AddressBits {
        /// RAM in MiB.
        ram: u64,
        /// The window in MiB; 0 if there is none.
        window: u64,
        /// First address after them.
        end: u64,
        /// Number of bits of an address.
        bits: u32,
    },
    /// RAM could not be mapped.
    #[error("cannot map {mib} MiB of guest memory")]
    Ram {
        /// Requested size in MiB.
        mib: u64,
        /// Underlying error.
        source: std::io::Error,
    },
    /// RAM could not be allocated in advance.
    #[error("cannot allocate {mib} MiB of guest memory in advance")]
    Populate {
        /// Requested size in MiB.
        mib: u64,
        /// Underlying error.
        source: std::io::Error,
    },
    /// A memfd cannot be examined: fstat or dup failed.
    #[error("cannot look at the window's memfd")]
    WindowStat(#[source] std::io::Error),
    /// The window's size is 0 or not a multiple of 2 MiB.
    #[error("the window's memfd has {bytes} bytes; its size must be a multiple of 2 MiB and not 0")]
    WindowSize {
        /// The memfd's size.
        bytes: u64,
    },
    /// A memfd is not sealed against resizing. If it shrank, accesses through the monitor's mapping would raise SIGBUS.
    #[error(
        "the window's memfd is not sealed against resizing for good: its seals are {seals:#x}, \
         F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL are needed"
    )]
    WindowSeals {
        /// Seals of the file; -1 if it is not a memfd.
        seals: i32,
    },
    /// A memfd is sealed against writing.
    #[error(
        "the window's memfd can no longer be written: it is sealed with F_SEAL_WRITE or F_SEAL_FUTURE_WRITE"
    )]
    ReadOnly,
    /// An aperture cannot have these slots.
    #[error("a VM cannot have {} slots of {} bytes for windows: at most {MAX_SLOTS} of a multiple of 2 MiB", .0.count, .0.bytes)]
    Slots(Slots),
    /// An aperture has no slot of this number.
    #[error("there is no slot {0} for a window")]
    NoSlot(u32),
    /// A window is larger than the slots of an aperture.
    #[error("a window of {bytes} bytes is larger than a slot, which has {slot}")]
    Larger {
        /// Size of the window.
        bytes: u64,
        /// Size of a slot.
        slot: u64,
    },
    /// A window for an aperture is a file of huge pages.
    #[error("the window is a file of huge pages (MFD_HUGETLB): make it of ordinary pages")]
    HugePages,
    /// Devices of the VM do not reach a window, or still do.
    #[error(transparent)]
    Reach(#[from] PassthroughError),
    /// The window could not be mapped.
    #[error("cannot map the window of {bytes} bytes")]
    WindowMap {
        /// The memfd's size.
        bytes: u64,
        /// Underlying error.
        source: std::io::Error,
    },
    /// The range to be shown is empty, not aligned to 2 MiB, or outside the window or the file.
    #[error(
        "bytes {start:#x}..{end:#x} are no whole pages of a window of {window} bytes and of a file of {file}"
    )]
    Shown {
        /// Offset of the first byte.
        start: u64,
        /// Offset of the first byte after the range.
        end: u64,
        /// Size of the window.
        window: u64,
        /// Size of the file.
        file: u64,
    },
    /// A part of the window could not be mapped.
    #[error("cannot map {bytes} bytes at {start:#x} of the window")]
    Show {
        /// Offset of the first byte.
        start: u64,
        /// Number of bytes.
        bytes: u64,
        /// Underlying error.
        source: std::io::Error,
    },
    /// KVM refused a memslot.
    #[error("KVM refuses memory slot {slot} at {start:#x} with {bytes} bytes")]
    Memslot {
        /// Number of the slot.
        slot: u32,
        /// Guest physical address of the slot.
        start: u64,
        /// Size of the slot.
        bytes: u64,
        /// Error from KVM.
        source: kvm_ioctls::Error,
    },
}

/// A range of guest physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// Size in bytes.
    pub len: u64,
}

impl Range {
    /// Returns the first address after the range.
    pub fn end(self) -> u64 {
        self.start + self.len
    }
}

/// Guest physical ranges of RAM and the window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// RAM, ascending; the first range starts at 0.
    pub ram: Vec<Range>,
    /// The window, if there is one, or the aperture of several.
    pub window: Option<Range>,
    /// The parts of it that the guest sees as soft-reserved memory, each for itself.
    pub soft_reserved: Vec<Range>,
    /// Memory for files, if there is any, which the guest sees as persistent memory.
    pub file_memory: Option<Range>,
    /// BARs with addresses of 64 bits, if there are any.
    pub wide_bars: Option<Range>,
}

impl Layout {
    /// Lays out `ram_mib` of RAM and a window of `window_bytes`.
    pub fn new(ram_mib: u64, window_bytes: Option<u64>) -> Result<Self, MemoryError> {
        if !(16..=1 << 20).contains(&ram_mib) {
            return Err(MemoryError::RamSize { mib: ram_mib });
        }
        let bytes = ram_mib << 20;
        let low = bytes.min(PCI_HOLE_START);
        let mut ram = vec![Range { start: 0, len: low }];
        if bytes > low {
            ram.push(Range {
                start: HIGH_RAM_START,
                len: bytes - low,
            });
        }
        let ram_end = ram.last().map_or(0, |range| range.end());
        let window = window_bytes.map(|len| Range {
            start: ram_end.max(HIGH_RAM_START).next_multiple_of(WINDOW_ALIGN),
            len,
        });
        Ok(Self {
            ram,
            window,
            soft_reserved: window.into_iter().collect(),
            file_memory: None,
            wide_bars: None,
        })
    }

    /// Adds `bytes` of memory for files behind the window.
    #[must_use]
    pub fn with_file_memory(self, bytes: Option<u64>) -> Self {
        let start = self.end().max(HIGH_RAM_START);
        let file_memory = bytes.map(|len| Range {
            start: start.next_multiple_of(WINDOW_ALIGN),
            len,
        });
        Self {
            file_memory,
            ..self
        }
    }

    /// Adds a range of `bytes` for BARs, at a multiple of `align` behind everything else.
    #[must_use]
    pub fn with_wide_bars(self, align: u64, bytes: u64) -> Self {
        let end = self.end().max(HIGH_RAM_START);
        let range = Range {
            start: end.next_multiple_of(align),
            len: bytes,
        };
        Self {
            wide_bars: (bytes > 0).then_some(range),
            ..self
        }
    }

    /// Returns the first address behind everything.
    fn end(&self) -> u64 {
        let last = self.ram.last().copied();
        let last = (self.wide_bars)
            .or(self.file_memory)
            .or(self.window)
            .or(last);
        last.map_or(0, Range::end)
    }

    /// Checks that a processor whose physical addresses have `bits` bits reaches all of the layout.
    pub fn check_address_bits(&self, bits: u32) -> Result<(), MemoryError> {
        let end = self.end();
        // Nothing lies at or above 2^64.
        if 1u64.checked_shl(bits).is_none_or(|limit| end <= limit) {
            return Ok(());
        }
        Err(MemoryError::AddressBits {
            ram: self.ram.iter().map(|range| range.len).sum::<u64>() >> 20,
            window: self.window.map_or(0, |window| window.len >> 20),
            end,
            bits,
        })
    }

    /// Divides the window into slots.
    #[must_use]
    pub fn divided(self, slots: Slots) -> Self {
        let soft_reserved = self
            .window
            .into_iter()
            .flat_map(|window| slots.ranges(window.start))
            .collect();
        Self {
            soft_reserved,
            ..self
        }
    }

    /// Returns the range of RAM below 4 GiB.
    pub fn low_ram(&self) -> Range {
        self.ram[0]
    }
}

/// The window: the sealed memfd and one shared mapping of all of it.
///
/// The mapping starts at a multiple of 2 MiB, as its guest physical address does: otherwise neither the host nor KVM
/// could map a huge page of a file.
///
/// Parts of the mapping can be replaced by other files while the guest runs: KVM follows the host mapping
/// at the memslot's addresses.
#[derive(Debug, Clone)]
pub struct Window {
    file: Arc<File>,
    mapping: Arc<AlignedMapping>,
    /// Whether the memory of each part of another file is allocated when it is mapped.
    prefault: bool,
}

impl Window {
    /// Maps a window. The memfd must be sealed against resizing, and its size a multiple of 2 MiB.
    ///
    /// Commits no memory: a page is allocated on first access.
    pub fn new(memfd: OwnedFd) -> Result<Self, MemoryError> {
        let file = Arc::new(File::from(memfd));
        let bytes = file.metadata().map_err(MemoryError::WindowStat)?.len();
        if bytes == 0 || !bytes.is_multiple_of(WINDOW_UNIT) {
            return Err(MemoryError::WindowSize { bytes });
        }
        check_seals(&file)?;
        let size = usize::try_from(bytes).map_err(|_| MemoryError::WindowSize { bytes })?;
        let mapping = AlignedMapping::new(size, libc::PROT_NONE)
            .map_err(|source| MemoryError::WindowMap { bytes, source })?;
        let window = Self {
            file,
            mapping: Arc::new(mapping),
            prefault: false,
        };
        window.replace(&window.file, 0, 0, bytes)?;
        Ok(window)
    }

    /// Allocates the memory of parts that [`Window::show`] maps from now on, in huge pages where the host has them.
    #[must_use]
    pub fn prefaulted(self, prefault: bool) -> Self {
        Self { prefault, ..self }
    }

    /// Maps `bytes` of `file` from `start` on at the same offset of the window.
    ///
    /// # Errors
    /// The range does not consist of whole 2 MiB pages inside the window and the file, the file can be
    /// resized, or the range cannot be mapped.
    pub fn show(&self, file: &OwnedFd, start: u64, bytes: u64) -> Result<(), MemoryError> {
        self.show_from(file, start, start, bytes)
    }

    /// Maps `bytes` of `file`, which begin at `from`, at offset `start` of the window.
    ///
    /// # Errors
    /// As [`Window::show`].
    pub(crate) fn show_from(
        &self,
        file: &OwnedFd,
        from: u64,
        start: u64,
        bytes: u64,
    ) -> Result<(), MemoryError> {
        let file = file
            .try_clone()
            .map(File::from)
            .map_err(MemoryError::WindowStat)?;
        check_seals(&file)?;
        let part = self.replace(&file, from, start, bytes)?;
        if self.prefault {
            part.allocate();
        }
        // Frees the covered pages of the window's own file, which are no longer reachable.
        self.discard(start, bytes)
    }

    /// Undoes [`Window::show`]: maps the window's own file again.
    ///
    /// # Errors
    /// As [`Window::show`].
    pub fn hide(&self, start: u64, bytes: u64) -> Result<(), MemoryError> {
        self.replace(&self.file, start, start, bytes).map(drop)
    }

    /// Undoes each [`Window::show`], and frees the pages of the window's own file. All pages are zero afterwards.
    ///
    /// # Errors
    /// The window's file cannot be mapped, or its pages cannot be freed.
    pub fn clear(&self) -> Result<(), MemoryError> {
        self.hide(0, self.len())?;
        self.discard(0, self.len())
    }

    /// Frees pages of the window's own file, which are zero afterwards.
    pub(crate) fn discard(&self, start: u64, bytes: u64) -> Result<(), MemoryError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&*self.file, flags, start, bytes).map_err(|error| MemoryError::Show {
            start,
            bytes,
            source: error.into(),
        })
    }

    fn replace(&self, file: &File, from: u64, start: u64, bytes: u64) -> Result<Part, MemoryError> {
        let length = file.metadata().map_err(MemoryError::WindowStat)?.len();
        let end = start.saturating_add(bytes);
        let within = bytes != 0 && end <= self.len() && from.saturating_add(bytes) <= length;
        let failed = |source| MemoryError::Show {
            start,
            bytes,
            source,
        };
        if !within
            || [from, start, bytes]
                .iter()
                .any(|number| !number.is_multiple_of(WINDOW_UNIT))
        {
            return Err(MemoryError::Shown {
                start,
                end,
                window: self.len(),
                file: length,
            });
        }
        let invalid = |_| failed(std::io::Error::from_raw_os_error(libc::EINVAL));
        let size = usize::try_from(bytes).map_err(invalid)?;
        let place = usize::try_from(start).map_err(invalid)?;
        let start = self
            .mapping
            .place(file, from, place, size)
            .map_err(failed)?;
        // A kernel without huge pages refuses.
        drop(ram::advise(start, size, Advice::Huge));
        Ok(Part { start, size })
    }

    /// Returns this process's address of a part of the window.
    pub(crate) fn host_address(&self, offset: u64) -> u64 {
        self.mapping.start() as u64 + offset
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Returns false: a window is never empty.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Adds the window to `vm` as a memslot at guest physical address `start`.
    pub(crate) fn add_memslot(&self, vm: &VmFd, start: u64) -> Result<(), MemoryError> {
        self.add(vm, WINDOW_SLOT, start)
    }

    fn add(&self, vm: &VmFd, slot: u32, start: u64) -> Result<(), MemoryError> {
        set_memslot(vm, slot, start, self.len(), self.mapping.start() as u64)
    }
}

/// Memory of the guest's file system for shared memory: a file that stays mapped as it is.
#[derive(Debug, Clone)]
pub(crate) struct FileMemory(Window);

impl FileMemory {
    /// Maps a memfd, which must be as one of a [`Window`].
    pub(crate) fn new(memfd: OwnedFd) -> Result<Self, MemoryError> {
        Window::new(memfd).map(Self)
    }

    /// Returns the size in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.0.len()
    }

    /// Returns the file.
    pub(crate) fn file(&self) -> &File {
        &self.0.file
    }

    /// Adds it to `vm` as a memslot at guest physical address `start`.
    pub(crate) fn add_memslot(&self, vm: &VmFd, start: u64) -> Result<(), MemoryError> {
        self.0.add(vm, FILE_MEMORY_SLOT, start)
    }
}

#[cfg(test)]
impl Window {
    /// Returns a byte of the mapping, as a guest reads it.
    pub(crate) fn byte_at(&self, offset: u64) -> u8 {
        use std::os::unix::fs::FileExt;
        let own = File::open("/proc/self/mem").expect("proc is mounted");
        let mut byte = [0];
        let address = self.mapping.start() as u64 + offset;
        own.read_exact_at(&mut byte, address).expect("mapped");
        byte[0]
    }

    /// Writes a byte of the mapping, as a guest does.
    pub(crate) fn write_byte_at(&self, offset: u64, byte: u8) {
        use std::os::unix::fs::FileExt;
        let own = File::options().write(true).open("/proc/self/mem");
        let address = self.mapping.start() as u64 + offset;
        own.and_then(|own| own.write_all_at(&[byte], address))
            .expect("mapped");
    }
}

/// A part of a window that has just been mapped.
struct Part {
    start: *mut u8,
    size: usize,
}

impl Part {
    /// Allocates the part's memory. Other pages come at the first access.
    fn allocate(&self) {
        let pieces = (0..self.size).step_by(COLLAPSED).map(|at| {
            let bytes = COLLAPSED.min(self.size - at);
            (Advice::Collapse, at, bytes)
        });
        // The kernel collapses no range that has no page yet.
        for (advice, at, bytes) in std::iter::once((Advice::Populate, 0, self.size)).chain(pieces) {
            if let Err(error) = ram::advise(self.start.wrapping_add(at), bytes, advice) {
                tracing::debug!(?advice, %error, "a part of the window is not allocated in advance");
            }
        }
    }
}

/// Makes a sparse memfd, sealed against changes of its size.
///
/// # Errors
/// The file cannot be made.
pub fn sealed_file(name: &str, bytes: u64) -> std::io::Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file)
}

/// Checks that a file is sealed against resizing: if it shrank, accesses through the monitor's mapping would raise
/// SIGBUS. No further seal can be set: one against writing would let a mapping fail that has been checked.
pub(crate) fn check_seals(file: impl AsFd) -> Result<(), MemoryError> {
    let seals = rustix::fs::fcntl_get_seals(file).map_or(-1, |seals| seals.bits().cast_signed());
    let needed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    if seals < 0 || seals & needed != needed {
        return Err(MemoryError::WindowSeals { seals });
    }
    // A kernel before 6.14 unmaps a part of the window before it refuses such a file for it.
    if seals & (libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE) != 0 {
        return Err(MemoryError::ReadOnly);
    }
    Ok(())
}

/// Maps the RAM of a layout. A page is committed on first access.
pub(crate) fn map_ram(ranges: &[Range]) -> Result<GuestRam, MemoryError> {
    let mib = ranges.iter().map(|range| range.len).sum::<u64>() >> 20;
    let failed = |source| MemoryError::Ram { mib, source };
    let regions = ranges
        .iter()
        .map(|range| {
            let len = usize::try_from(range.len).map_err(std::io::Error::other)?;
            RamRegion::new(GuestAddress(range.start), len)
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    GuestRam::from_regions(regions).map_err(|error| failed(std::io::Error::other(error)))
}

/// Allocates all of a guest's RAM now.
pub(crate) fn populate(ram: &GuestRam) -> Result<(), MemoryError> {
    let mib = ram.iter().map(GuestMemoryRegion::len).sum::<u64>() >> 20;
    ram::populate(ram).map_err(|source| MemoryError::Populate { mib, source })
}

/// Adds every region of `ram` to `vm` as a memslot.
pub(crate) fn add_ram_memslots(vm: &VmFd, ram: &GuestRam) -> Result<(), MemoryError> {
    for (slot, region) in (0..FILE_MEMORY_SLOT).zip(ram.iter()) {
        set_memslot(
            vm,
            slot,
            region.start_addr().0,
            region.len(),
            region.host_address(),
        )?;
    }
    Ok(())
}

/// Makes memory of this process a memory slot.
pub(crate) fn set_memslot(
    vm: &VmFd,
    slot: u32,
    start: u64,
    bytes: u64,
    userspace_addr: u64,
) -> Result<(), MemoryError> {
    let region = kvm_userspace_memory_region {
        slot,
        guest_phys_addr: start,
        memory_size: bytes,
        userspace_addr,
        flags: 0,
    };
    // SAFETY: the mapping behind the slot belongs to a `GuestRam`, a `Window` or a function of the PCI bus, which the owner
    // of `vm` keeps for as long as vCPUs exist; parts of a window are replaced in one step, never unmapped.
    unsafe { vm.set_user_memory_region(region) }.map_err(|source| MemoryError::Memslot {
        slot,
        start,
        bytes,
        source,
    })
}

#[cfg(test)]
mod tests {
    use wormhole_ring::band;

    use super::*;

    const SEALED: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

    fn memfd(bytes: u64, seals: i32) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("a memfd");
        ftruncate(&file, bytes).expect("room");
        let seals = SealFlags::from_bits_retain(seals.cast_unsigned());
        fcntl_add_seals(&file, seals).expect("it has no seals");
        file
    }

    #[test]
    fn a_cleared_window_is_its_own_file_with_zero_pages() {
        const PART: u64 = 2 << 20;
        let window = Window::new(memfd(4 << 20, SEALED)).expect("a window");
        window.write_byte_at(0, 1);
        let other = memfd(4 << 20, SEALED);
        window.show(&other, PART, PART).expect("shown");
        window.write_byte_at(PART, 2);
        assert_eq!((window.byte_at(0), window.byte_at(PART)), (1, 2));
        window.clear().expect("cleared");
        assert_eq!((window.byte_at(0), window.byte_at(PART)), (0, 0));
        window.write_byte_at(PART, 3);
        let other = Window::new(other).expect("a window");
        assert_eq!(other.byte_at(PART), 2, "it is mapped no longer");
    }

    #[test]
    fn small_ram_puts_the_window_at_4_gib() {
        let layout = Layout::new(512, Some(64 << 20)).expect("layout");
        assert_eq!(
            layout.ram,
            [Range {
                start: 0,
                len: 512 << 20
            }]
        );
        assert_eq!(layout.window.expect("window").start, 4 << 30);
    }

    #[test]
    fn large_ram_goes_round_the_pci_hole_and_the_window_stays_aligned() {
        let layout = Layout::new(3500, Some(2 << 20)).expect("layout");
        assert_eq!(layout.ram[0].end(), PCI_HOLE_START);
        assert_eq!(layout.ram[1].start, 4 << 30);
        assert_eq!(layout.ram.iter().map(|r| r.len).sum::<u64>(), 3500 << 20);
        assert_eq!(layout.window.expect("window").start, 5 << 30);
    }

    #[test]
    fn memory_for_files_lies_between_window_and_bars() {
        let layout = Layout::new(512, Some(64 << 20)).expect("layout");
        let layout = layout.with_file_memory(Some(256 << 20));
        let files = layout.file_memory.expect("memory for files");
        assert_eq!((files.start, files.len), (5 << 30, 256 << 20));
        let bars = layout.with_wide_bars(1 << 30, 1 << 30).wide_bars;
        assert_eq!(bars.expect("bars").start, 6 << 30);
        let none = Layout::new(512, None).expect("layout");
        assert_eq!(none.with_file_memory(None).file_memory, None);
    }

    #[test]
    fn a_layout_beyond_the_processors_addresses_is_refused_with_both_sizes() {
        let layout = |mib, gib: Option<u64>| Layout::new(mib, gib.map(|gib| gib << 30));
        let check = |mib, gib, bits| layout(mib, gib).expect("a layout").check_address_bits(bits);
        let refused = check(512, Some(512), 39).expect_err("beyond the addresses");
        assert_eq!(
            refused.to_string(),
            "512 MiB of memory and a window of 524288 MiB end at 0x8100000000, beyond this processor's physical \
             addresses of 39 bits: give the guest less of one"
        );
        // The window begins at 4 GiB, and may end where the addresses do.
        check(512, Some(508), 39).expect("it is reached");
        check(512, Some(512), 40).expect("it is reached");
        check(512, None, 36).expect("it is reached");
        check(64 << 10, None, 36).expect_err("a part of it lies above the hole");
        check(1 << 20, Some(1 << 20), 64).expect("all is reached");
    }

    #[test]
    fn bars_lie_behind_everything_else_and_count_as_addresses() {
        let layout = |window| Layout::new(512, window).expect("a layout");
        let bars = |layout: Layout| layout.with_wide_bars(16 << 30, 17 << 30).wide_bars;
        let range = |start: u64| Range {
            start: start << 30,
            len: 17 << 30,
        };
        assert_eq!(bars(layout(None)), Some(range(16)));
        assert_eq!(bars(layout(Some(15 << 30))), Some(range(32)));
        assert_eq!(layout(None).with_wide_bars(4096, 0).wide_bars, None);
        let reached = |bits| {
            let layout = layout(None).with_wide_bars(16 << 30, 17 << 30);
            layout.check_address_bits(bits).is_ok()
        };
        assert!(reached(36) && !reached(35));
    }

    #[test]
    fn absurd_ram_is_refused() {
        assert!(Layout::new(0, None).is_err());
        assert!(Layout::new(u64::MAX >> 20, None).is_err());
    }

    #[test]
    fn a_window_must_be_sealed_and_whole() {
        assert_eq!(
            Window::new(memfd(4 << 20, SEALED))
                .expect("good window")
                .len(),
            4 << 20
        );
        for seal in [libc::F_SEAL_SHRINK, libc::F_SEAL_GROW, libc::F_SEAL_SEAL] {
            let refused = Window::new(memfd(4 << 20, SEALED & !seal));
            let Err(MemoryError::WindowSeals { seals }) = refused else {
                panic!("{refused:?}");
            };
            assert_eq!(seals & SEALED, SEALED & !seal);
        }
        assert!(matches!(
            Window::new(memfd(4096, SEALED)),
            Err(MemoryError::WindowSize { bytes: 4096 })
        ));
        assert!(matches!(
            Window::new(memfd(0, SEALED)),
            Err(MemoryError::WindowSize { bytes: 0 })
        ));
    }

    #[test]
    fn ram_and_window_ask_for_huge_pages_where_both_can_map_them() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            eprintln!("skipped: this kernel has no huge pages");
            return;
        }
        let is_huge = |address: u64| {
            let asked = ram::flags_at(address).split(' ').any(|flag| flag == "hg");
            asked && address.is_multiple_of(2 << 20)
        };
        let memory = ram::test_ram(4 << 20);
        let region = memory.iter().next().expect("one region");
        assert!(is_huge(region.host_address()));

        let window = Window::new(memfd(6 << 20, SEALED)).expect("window");
        let start = window.mapping.start() as u64;
        assert!(is_huge(start));
        let file = memfd(6 << 20, SEALED);
        window.show(&file, 2 << 20, 2 << 20).expect("shown");
        assert!(is_huge(start + (2 << 20)), "the part of another file");
        assert!(is_huge(start + (4 << 20)), "the part behind it");
    }

    #[test]
    fn only_whole_parts_of_fixed_files_are_shown() {
        let window = Window::new(memfd(4 << 20, SEALED)).expect("window");
        let file = memfd(2 << 20, SEALED);
        window.show(&file, 0, 2 << 20).expect("shown");
        window.hide(0, 2 << 20).expect("hidden");
        assert!(matches!(
            window.show(&memfd(2 << 20, 0), 0, 2 << 20),
            Err(MemoryError::WindowSeals { seals: 0 })
        ));
        for (start, bytes) in [
            (0, 0),
            (4096, 2 << 20),
            (0, 4096),
            (2 << 20, 2 << 20),
            (0u64.wrapping_sub(2 << 20), 2 << 20),
        ] {
            assert!(
                matches!(
                    window.show(&file, start, bytes),
                    Err(MemoryError::Shown { .. })
                ),
                "{bytes} at {start:#x}"
            );
        }
    }

    #[test]
    fn a_part_that_cannot_be_mapped_stays_reserved() {
        const PART: u64 = 2 << 20;
        let window = Window::new(memfd(2 * PART, SEALED)).expect("window");
        // The check of the seals comes before: this is a file that passes it, and is refused by the kernel all the same.
        let file = File::from(memfd(
            PART,
            SEALED & !libc::F_SEAL_SEAL | libc::F_SEAL_FUTURE_WRITE,
        ));
        let failed = window.replace(&file, 0, PART, PART).err();
        assert!(
            matches!(failed, Some(MemoryError::Show { .. })),
            "{failed:?}"
        );
        for start in [0, PART] {
            let place = window.mapping.start() as u64 + start;
            let taken = band::reserve(place, PART).expect_err("it is mapped");
            assert_eq!(taken.raw_os_error(), Some(libc::EEXIST));
        }
        let other = memfd(2 * PART, SEALED);
        window.show(&other, PART, PART).expect("shown");
        window.write_byte_at(PART, 7);
        assert_eq!(window.byte_at(PART), 7);
    }

    #[test]
    fn what_is_covered_costs_no_memory() {
        use std::os::unix::fs::{FileExt, MetadataExt};
        let own = memfd(4 << 20, SEALED);
        let file = File::from(own.try_clone().expect("clone"));
        let window = Window::new(own).expect("window");
        file.write_all_at(&[7; 4 << 20], 0).expect("written");
        let held = || file.metadata().expect("a file").blocks() * 512;
        assert_eq!(held(), 4 << 20);
        window
            .show(&memfd(4 << 20, SEALED), 2 << 20, 2 << 20)
            .expect("shown");
        assert_eq!(held(), 2 << 20);
    }

    #[test]
    fn parts_of_a_prefaulted_window_are_allocated_when_they_are_shown() {
        use std::os::unix::fs::{FileExt, MetadataExt};
        for (prefault, allocated) in [(false, 4096), (true, 2 << 20)] {
            let window = Window::new(memfd(4 << 20, SEALED)).expect("window");
            let window = window.prefaulted(prefault);
            let shown = memfd(4 << 20, SEALED);
            let file = File::from(shown.try_clone().expect("clone"));
            file.write_all_at(&[7], 2 << 20).expect("written");
            window.show(&shown, 2 << 20, 2 << 20).expect("shown");
            let held = file.metadata().expect("a file").blocks() * 512;
            assert_eq!(held, allocated, "prefault: {prefault}");
            let mut byte = [0];
            file.read_exact_at(&mut byte, 2 << 20).expect("read");
            assert_eq!(byte, [7], "its contents stay");
        }
    }
}
