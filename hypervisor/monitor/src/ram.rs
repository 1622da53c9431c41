//! Allocates guest RAM: anonymous memory aligned to 2 MiB, so that the host can back it with huge
//! pages and KVM can map it with 2 MiB pages. With 4 KiB pages, a booting guest exits once per page. A window's mapping
//! is aligned and advised in the same way.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use vm_memory::bitmap::BS;
use vm_memory::guest_memory::Result as MemoryResult;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, GuestRegionMmap, GuestUsize, MemoryRegionAddress, MmapRegion,
    VolatileSlice,
};
use wormhole_ring::band;

/// RAM of a guest.
pub type GuestRam = GuestRegionCollection<RamRegion>;

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;
const HUGE_PAGE: usize = 2 << 20;
const PROTECTION: i32 = libc::PROT_READ | libc::PROT_WRITE;
const FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// One range of RAM.
#[derive(Debug)]
pub struct RamRegion {
    // Dropped before the mapping that it refers to.
    region: GuestRegionMmap<()>,
    _mapping: AlignedMapping,
}

impl RamRegion {
    /// Maps `len` bytes for guest physical address `start` without committing a page.
    pub(crate) fn new(start: GuestAddress, len: usize) -> io::Result<Self> {
        let mapping = AlignedMapping::new(len, PROTECTION)?;
        // SAFETY: the mapping has these bounds and attributes, and lives as long as the region.
        let region = unsafe { MmapRegion::build_raw(mapping.start, len, PROTECTION, FLAGS) }
            .map_err(io::Error::other)?;
        let region = GuestRegionMmap::new(region, start)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(Self {
            region,
            _mapping: mapping,
        })
    }

    /// Returns the range's address in this process.
    pub(crate) fn host_address(&self) -> u64 {
        self.region.as_ptr() as u64
    }
}

impl GuestMemoryRegion for RamRegion {
    type B = ();

    fn len(&self) -> GuestUsize {
        self.region.len()
    }

    fn start_addr(&self) -> GuestAddress {
        self.region.start_addr()
    }

    fn bitmap(&self) -> BS<'_, Self::B> {
        self.region.bitmap()
    }

    fn get_host_address(&self, address: MemoryRegionAddress) -> MemoryResult<*mut u8> {
        self.region.get_host_address(address)
    }

    fn file_offset(&self) -> Option<&FileOffset> {
        None
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> MemoryResult<VolatileSlice<'_, BS<'_, Self::B>>> {
        self.region.get_slice(offset, count)
    }
}

impl GuestMemoryRegionBytes for RamRegion {}

/// Advice to the kernel on mapped memory. None changes what the memory contains.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Advice {
    /// Back the memory with huge pages, where the host has them.
    Huge = libc::MADV_HUGEPAGE as isize,
    /// Allocate the memory now, and map it for writing.
    Populate = libc::MADV_POPULATE_WRITE as isize,
    /// Replace the memory by huge pages now, whatever the administrator has chosen for later accesses.
    Collapse = libc::MADV_COLLAPSE as isize,
}

/// Bytes that one call collapses at most. The kernel looks through a longer range although a thread has been killed, and on some
/// kernels without a schedule.
pub(crate) const COLLAPSED: usize = 1 << 30;

/// Gives advice on a range of mapped memory.
pub(crate) fn advise(start: *mut u8, len: usize, advice: Advice) -> io::Result<()> {
    // SAFETY: no advice of the enumeration changes contents or mappings, so the range may be any.
    match unsafe { libc::madvise(start.cast(), len, advice as libc::c_int) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A mapping that starts at a multiple of 2 MiB, anonymous at first.
#[derive(Debug)]
pub(crate) struct AlignedMapping {
    start: *mut u8,
    len: usize,
}

// SAFETY: the pointer is only used to build the region, to map files in its place and to unmap the mapping once; the
// memory is accessed by volatile operations only.
unsafe impl Send for AlignedMapping {}
// SAFETY: as above; no method mutates the value.
unsafe impl Sync for AlignedMapping {}

impl AlignedMapping {
    /// Maps `len` bytes without committing a page. Under `vm.overcommit_memory=2` the kernel counts what is writable
    /// against its limit, so a mapping that files replace has no protection (`PROT_NONE`).
    pub(crate) fn new(len: usize, protection: i32) -> io::Result<Self> {
        let whole = len
            .checked_add(HUGE_PAGE)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), whole, protection, FLAGS, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = base.cast::<u8>();
        let before = base.addr().next_multiple_of(HUGE_PAGE) - base.addr();
        let start = base.wrapping_add(before);
        // Unmaps the excess at both ends, which is at most one huge page each.
        for (address, excess) in [
            (base, before),
            (start.wrapping_add(len), HUGE_PAGE - before),
        ] {
            if excess > 0 {
                // SAFETY: an unused part of the mapping made above.
                unsafe { libc::munmap(address.cast(), excess) };
            }
        }
        // A kernel without huge pages refuses.
        drop(advise(start, len, Advice::Huge));
        Ok(Self { start, len })
    }

    /// Maps `size` bytes of `file` from offset `from` on at `place` of this mapping, shared, in the place of what is there.
    ///
    /// # Errors
    /// The range is not inside this mapping, or the kernel refuses. The earlier mapping may be gone then, so that the place
    /// is reserved.
    pub(crate) fn place(
        &self,
        file: &impl AsRawFd,
        from: u64,
        place: usize,
        size: usize,
    ) -> io::Result<*mut u8> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let end = place.checked_add(size).ok_or_else(invalid)?;
        if end > self.len {
            return Err(invalid());
        }
        let offset = libc::off_t::try_from(from).map_err(|_| invalid())?;
        let part = self.start.wrapping_add(place);
        // SAFETY: the range lies inside this mapping, so that no other one is replaced. Its memory is a guest's, to which only
        // KVM, VFIO and volatile accesses refer, and KVM follows the mapping.
        let mapped = unsafe {
            libc::mmap(
                part.cast(),
                size,
                PROTECTION,
                libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED,
                file.as_raw_fd(),
                offset,
            )
        };
        if mapped == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // KVM would let the guest reach whatever this process maps there later.
            band::keep(part.addr() as u64, size as u64);
            return Err(error);
        }
        Ok(part)
    }

    /// Returns the address of the first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Returns the size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for AlignedMapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and the region or the window that referred to it has been dropped.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// Gives the memory of whole pages of one range back to the host. They read as zeros.
///
/// # Errors
/// The range is not made of whole pages of one range of RAM.
pub(crate) fn discard(memory: &GuestRam, start: GuestAddress, bytes: u64) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let whole = start.0.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE) && bytes > 0;
    let region = memory.find_region(start).filter(|_| whole);
    let region = region.ok_or_else(invalid)?;
    let offset = MemoryRegionAddress(start.0 - region.start_addr().0);
    if bytes > region.len() - offset.0 {
        return Err(invalid());
    }
    let address = region.get_host_address(offset).map_err(io::Error::other)?;
    let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: the range lies in the region's mapping, which is private and anonymous: its pages are replaced by zeros.
    // Nothing refers to guest memory but by volatile accesses, since the guest may change it at any time.
    match unsafe { libc::madvise(address.cast(), bytes, libc::MADV_DONTNEED) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Allocates all of a guest's RAM now.
///
/// # Errors
/// The host has not that much memory.
pub(crate) fn populate(memory: &GuestRam) -> io::Result<()> {
    for region in memory.iter() {
        let len = usize::try_from(region.len()).map_err(io::Error::other)?;
        let address = region.region.as_ptr();
        match advise(address, len, Advice::Populate) {
            // Linux 5.13 does not know this advice.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => touch(region)?,
            done => done?,
        }
    }
    Ok(())
}

/// Writes to each page of a region, which contains zeros.
fn touch(region: &RamRegion) -> io::Result<()> {
    (0..region.len() / PAGE).try_for_each(|page| {
        let written = region.write_obj(0u8, MemoryRegionAddress(page * PAGE));
        written.map_err(io::Error::other)
    })
}

/// Returns whether the host has memory for the page at an address, for tests.
#[cfg(test)]
pub(crate) fn is_resident(memory: &GuestRam, page: GuestAddress) -> bool {
    let mut state = 0;
    let address = memory.get_host_address(page).expect("in RAM");
    // SAFETY: one page of the region's mapping, and one byte for its state.
    let result = unsafe { libc::mincore(address.cast(), 4096, &raw mut state) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    state & 1 == 1
}

/// Allocates RAM from address 0, for tests.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn test_ram(len: usize) -> GuestRam {
    let region = RamRegion::new(GuestAddress(0), len).expect("memory");
    GuestRam::from_regions(vec![region]).expect("one region")
}

/// Returns the kernel's flags of the mapping that an address lies in, for tests.
#[cfg(test)]
pub(crate) fn flags_at(address: u64) -> String {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("it is there");
    let holds = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).ok());
        Some((start?..end?).contains(&address))
    };
    let mut lines = maps.lines().skip_while(|line| holds(line) != Some(true));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags: "));
    flags.expect("a mapping with flags").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_ram_is_there_once_it_is_populated() {
        const LEN: usize = 3 * HUGE_PAGE + 4096;
        let pages = || (0..LEN as u64).step_by(4096).map(GuestAddress);
        let fill: [fn(&GuestRam); 2] = [
            |ram| populate(ram).expect("memory"),
            |ram| touch(ram.iter().next().expect("one region")).expect("memory"),
        ];
        for fill in fill {
            let ram = test_ram(LEN);
            assert!(!pages().any(|page| is_resident(&ram, page)));
            fill(&ram);
            assert!(pages().all(|page| is_resident(&ram, page)));
            assert_eq!(ram.read_obj::<u64>(GuestAddress(0)).expect("in ram"), 0);
        }
    }

    #[test]
    fn ram_is_aligned_zero_and_writable_to_its_end() {
        for len in [4096, HUGE_PAGE, 5 * HUGE_PAGE + 4096] {
            let region = RamRegion::new(GuestAddress(1 << 32), len).expect("memory");
            assert!(region.host_address().is_multiple_of(HUGE_PAGE as u64));
            let ram = GuestRam::from_regions(vec![region]).expect("one region");
            let last = GuestAddress((1 << 32) + len as u64 - 1);
            assert_eq!(ram.read_obj::<u8>(last).expect("in ram"), 0);
            ram.write_obj(7u8, last).expect("in ram");
            assert_eq!(ram.read_obj::<u8>(last).expect("in ram"), 7);
            assert!(ram.write_obj(7u16, last).is_err());
        }
    }
}
