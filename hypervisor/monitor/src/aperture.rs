//! An aperture: a window that is divided into slots, each for the memory of one tenant.
//!
//! The aperture's guest physical addresses are fixed before the guest starts, over a file of its own whose pages are zero.
//! A tenant's memory is mapped beneath one of the slots while the guest runs, and the aperture's own file again when the
//! tenant has left: the memslot stays, since KVM drops all translations of a VM when a memslot is removed. The guest sees
//! each slot as soft-reserved memory of its own, so that its kernel makes a device of each.
//!
//! Devices of the host that the VM has reach a tenant's memory from the time at which it is mapped until it is removed, and
//! nothing else of the aperture.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::fstatfs;
use wormhole_lock::Mutex;

use crate::devices::vfio::{Dma, PassthroughError};
use crate::memory::{MemoryError, Range, WINDOW_UNIT, Window, check_seals, sealed_file};

/// Largest number of slots. The E820 map of Linux's boot protocol has 128 entries.
pub const MAX_SLOTS: u32 = 64;

/// Alignment of a slot: Linux keeps the descriptors of pages by sections of this size.
const SLOT_ALIGN: u64 = 128 << 20;

/// Sizes of an aperture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Number of slots, at most [`MAX_SLOTS`].
    pub count: u32,
    /// Size of each in bytes, a multiple of 2 MiB.
    pub bytes: u64,
}

impl Slots {
    /// Returns the distance between the starts of two slots. Memory map entries that touch would become one device.
    fn stride(self) -> u64 {
        self.bytes
            .saturating_add(WINDOW_UNIT)
            .next_multiple_of(SLOT_ALIGN)
    }

    /// Returns the size of the aperture.
    fn total(self) -> Result<u64, MemoryError> {
        let fits = (1..=MAX_SLOTS).contains(&self.count)
            && (1..1 << 46).contains(&self.bytes)
            && self.bytes.is_multiple_of(WINDOW_UNIT);
        let total = self.stride().checked_mul(u64::from(self.count));
        total.filter(|_| fits).ok_or(MemoryError::Slots(self))
    }

    /// Returns the offset of a slot in the aperture.
    fn start(self, slot: u32) -> u64 {
        self.stride() * u64::from(slot)
    }

    /// Returns the parts of the aperture at `start` that are slots.
    pub(crate) fn ranges(self, start: u64) -> impl Iterator<Item = Range> {
        (0..self.count).map(move |slot| Range {
            start: start + self.start(slot),
            len: self.bytes,
        })
    }
}

/// An aperture of a VM. Its slots can be filled and emptied while the guest runs.
#[derive(Clone, Debug)]
pub struct Aperture {
    window: Window,
    slots: Slots,
    reach: Option<Arc<dyn Reach>>,
}

/// Reach of devices into a VM's memory.
pub(crate) trait Reach: std::fmt::Debug + Send + Sync {
    /// Lets devices reach a part of the aperture, which is mapped at an address of this process.
    fn begin(&self, offset: u64, bytes: u64, host: u64) -> Result<(), PassthroughError>;
    /// Ends their reach of each part that was begun at this offset. None of their accesses is under way afterwards.
    fn end(&self, offset: u64) -> Result<(), PassthroughError>;
}

/// Reach of a VM's devices by the IOMMU.
#[derive(Debug)]
struct IommuReach {
    dma: Dma,
    /// Guest physical address of the aperture.
    start: u64,
    /// Offsets and sizes of the parts that devices reach.
    mapped: Mutex<Vec<(u64, u64)>>,
}

impl Reach for IommuReach {
    fn begin(&self, offset: u64, bytes: u64, host: u64) -> Result<(), PassthroughError> {
        self.dma.map(self.start + offset, bytes, host)?;
        self.mapped.lock().push((offset, bytes));
        Ok(())
    }

    fn end(&self, offset: u64) -> Result<(), PassthroughError> {
        let mut mapped = self.mapped.lock();
        while let Some(at) = mapped.iter().position(|(start, _)| *start == offset) {
            self.dma.unmap(self.start + offset, mapped[at].1)?;
            mapped.swap_remove(at);
        }
        Ok(())
    }
}

impl Aperture {
    /// Makes an aperture of empty slots. Commits no memory.
    ///
    /// # Errors
    /// The number or the size of the slots is out of range, or the aperture cannot be mapped.
    pub(crate) fn new(slots: Slots) -> Result<Self, MemoryError> {
        let bytes = slots.total()?;
        let window = Window::new(zero_pages(bytes)?)?;
        Ok(Self {
            window,
            slots,
            reach: None,
        })
    }

    /// Lets devices reach the memory of tenants that come from now on. The aperture is at the guest physical address `start`.
    pub(crate) fn reached_by(self, dma: Dma, start: u64) -> Self {
        self.reached(Arc::new(IommuReach {
            dma,
            start,
            mapped: Mutex::default(),
        }))
    }

    fn reached(self, reach: Arc<dyn Reach>) -> Self {
        Self {
            reach: Some(reach),
            ..self
        }
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    /// Returns the size of all slots together.
    pub(crate) fn most(&self) -> u64 {
        self.slots.bytes.saturating_mul(self.slots.count.into())
    }

    /// Returns the sizes of the slots.
    pub fn slots(&self) -> Slots {
        self.slots
    }

    /// Maps the first `bytes` of `file` at the start of a slot. The rest of the slot has pages of the aperture. Devices reach
    /// the memory afterwards.
    ///
    /// # Errors
    /// There is no such slot, `bytes` is no multiple of 2 MiB, more than a slot or more than the file has, the file can be
    /// resized or has huge pages of a pool, or it cannot be mapped, for devices as well. Call [`Aperture::detach`] then.
    pub fn attach(&self, slot: u32, file: &OwnedFd, bytes: u64) -> Result<(), MemoryError> {
        let start = self.start(slot)?;
        if bytes > self.slots.bytes {
            return Err(MemoryError::Larger {
                bytes,
                slot: self.slots.bytes,
            });
        }
        // A file with seals is in memory, so that the kernel answers for it. One of a file system in user space could let
        // the next call wait for ever.
        check_seals(file)?;
        // A pool of huge pages can be empty when the guest reads one, which would end the whole VM.
        let system = fstatfs(file).map_err(|error| MemoryError::WindowStat(error.into()))?;
        if system.f_type == libc::HUGETLBFS_MAGIC {
            return Err(MemoryError::HugePages);
        }
        self.window.show_from(file, 0, start, bytes)?;
        if let Some(reach) = &self.reach {
            reach.begin(start, bytes, self.window.host_address(start))?;
        }
        Ok(())
    }

    /// Unmaps the memory of a slot: devices no longer reach it, and its pages are zero afterwards.
    ///
    /// # Errors
    /// There is no such slot, the aperture's file cannot be mapped, or devices still reach the memory.
    pub fn detach(&self, slot: u32) -> Result<(), MemoryError> {
        let start = self.start(slot)?;
        let ended = self.reach.as_ref().map_or(Ok(()), |reach| reach.end(start));
        let hidden = self.window.hide(start, self.slots.bytes);
        // The guest may have written to them when the slot was empty.
        let emptied = hidden.and_then(|()| self.window.discard(start, self.slots.bytes));
        // This error comes first: its caller ends the VM.
        ended?;
        emptied
    }

    fn start(&self, slot: u32) -> Result<u64, MemoryError> {
        match slot < self.slots.count {
            true => Ok(self.slots.start(slot)),
            false => Err(MemoryError::NoSlot(slot)),
        }
    }
}

/// Makes a sparse file whose pages are zero.
fn zero_pages(bytes: u64) -> Result<OwnedFd, MemoryError> {
    sealed_file("wormhole-aperture", bytes)
        .map_err(|source| MemoryError::WindowMap { bytes, source })
}

/// Memory of a VM that its guest sees as soft-reserved.
#[derive(Debug)]
pub enum WindowConfig {
    /// A window for all of the VM's time: a memfd, sealed against resizing, a multiple of 2 MiB.
    Whole(OwnedFd),
    /// An aperture for windows that come and go.
    Aperture(Slots),
}

impl From<OwnedFd> for WindowConfig {
    fn from(memfd: OwnedFd) -> Self {
        Self::Whole(memfd)
    }
}

impl From<File> for WindowConfig {
    fn from(memfd: File) -> Self {
        Self::Whole(memfd.into())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn aperture() -> Aperture {
        let slots = Slots {
            count: 3,
            bytes: 4 * MIB,
        };
        Aperture::new(slots).expect("an aperture")
    }

    /// A tenant's memory, with this byte at its start and at its end.
    fn memory(bytes: u64, byte: u8) -> (File, OwnedFd) {
        let file = zero_pages(bytes).expect("a memfd");
        let memory = File::from(file.try_clone().expect("clone"));
        memory.write_all_at(&[byte], 0).expect("written");
        memory.write_all_at(&[byte], bytes - 1).expect("written");
        (memory, file)
    }

    #[test]
    fn a_tenants_memory_is_in_its_slot_alone_and_gone_after_it() {
        let aperture = aperture();
        let at = |slot, offset| {
            let start = aperture.start(slot).expect("a slot");
            aperture.window.byte_at(start + offset)
        };
        let (first, file) = memory(4 * MIB, 1);
        aperture.attach(1, &file, 4 * MIB).expect("attached");
        let (_, file) = memory(2 * MIB, 2);
        aperture.attach(2, &file, 2 * MIB).expect("attached");
        let seen = |slot| [0, 2 * MIB - 1, 2 * MIB, 4 * MIB - 1].map(|offset| at(slot, offset));
        assert_eq!([0, 1, 2].map(seen), [[0; 4], [1, 0, 0, 1], [2, 2, 0, 0]]);
        first.write_all_at(&[3], 0).expect("written");
        assert_eq!(at(1, 0), 3, "the same memory");
        aperture.detach(1).expect("detached");
        assert_eq!([0, 1, 2].map(seen), [[0; 4], [0; 4], [2, 2, 0, 0]]);
        let (_, file) = memory(4 * MIB, 4);
        aperture.attach(1, &file, 4 * MIB).expect("attached again");
        assert_eq!(seen(1), [4, 0, 0, 4]);
    }

    /// Records each begin and end of the devices' reach, with the first byte that is mapped there at that time. An end fails
    /// if `refuses` is set.
    #[derive(Debug)]
    struct Noted {
        window: Window,
        events: Mutex<Vec<(&'static str, u64, u64, u8)>>,
        refuses: bool,
    }

    impl Reach for Noted {
        fn begin(&self, offset: u64, bytes: u64, host: u64) -> Result<(), PassthroughError> {
            assert_eq!(host, self.window.host_address(offset));
            let byte = self.window.byte_at(offset);
            self.events.lock().push(("begin", offset, bytes, byte));
            Ok(())
        }

        fn end(&self, offset: u64) -> Result<(), PassthroughError> {
            let byte = self.window.byte_at(offset);
            self.events.lock().push(("end", offset, 0, byte));
            match self.refuses {
                true => Err(PassthroughError::NoVfio),
                false => Ok(()),
            }
        }
    }

    #[test]
    fn devices_reach_a_tenants_memory_while_it_is_mapped_and_nothing_else() {
        for refuses in [false, true] {
            let aperture = aperture();
            let noted = Arc::new(Noted {
                window: aperture.window().clone(),
                events: Mutex::default(),
                refuses,
            });
            let aperture = aperture.reached(Arc::clone(&noted) as Arc<dyn Reach>);
            let start = aperture.start(1).expect("a slot");
            let (_, file) = memory(2 * MIB, 7);
            aperture.attach(1, &file, 2 * MIB).expect("attached");
            assert!(aperture.attach(1, &file, 6 * MIB).is_err());
            let detached = aperture.detach(1);
            // The tenant's memory was there at both times, and is out of the guest's reach whatever the devices do.
            let events = [("begin", start, 2 * MIB, 7), ("end", start, 0, 7)];
            assert_eq!(*noted.events.lock(), events);
            assert_eq!(
                (detached.is_err(), aperture.window.byte_at(start)),
                (refuses, 0)
            );
        }
    }

    #[test]
    fn what_a_guest_writes_to_an_empty_slot_is_gone_with_the_next_tenant() {
        let aperture = aperture();
        let start = aperture.start(0).expect("a slot");
        aperture.window.write_byte_at(start + 2 * MIB, 9);
        let (_, file) = memory(2 * MIB, 1);
        aperture.attach(0, &file, 2 * MIB).expect("attached");
        aperture.detach(0).expect("detached");
        assert_eq!(aperture.window.byte_at(start + 2 * MIB), 0);
    }

    #[test]
    fn memory_that_does_not_fit_a_slot_is_refused() {
        let aperture = aperture();
        let (_, file) = memory(6 * MIB, 1);
        let larger = aperture.attach(0, &file, 6 * MIB).unwrap_err();
        assert!(matches!(larger, MemoryError::Larger { .. }), "{larger}");
        let none = aperture.attach(3, &file, 2 * MIB).unwrap_err();
        assert!(matches!(none, MemoryError::NoSlot(3)), "{none}");
        assert!(aperture.detach(3).is_err());
        let (_, file) = memory(2 * MIB, 1);
        let more = aperture.attach(0, &file, 4 * MIB).unwrap_err();
        assert!(matches!(more, MemoryError::Shown { .. }), "{more}");
        assert_eq!(aperture.window.byte_at(0), 0);
    }

    #[test]
    fn memory_that_could_end_the_vm_is_refused() {
        let aperture = aperture();
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        for (flags, seals, word) in [
            (MemfdFlags::ALLOW_SEALING, SealFlags::GROW, "sealed"),
            (
                MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB,
                seals,
                "huge",
            ),
            // The seals come first: no file system is asked about a file without them.
            (
                MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB,
                SealFlags::GROW,
                "sealed",
            ),
        ] {
            let Ok(file) = memfd_create("test", flags) else {
                eprintln!("skipped: this kernel has no huge pages (CONFIG_HUGETLBFS)");
                continue;
            };
            ftruncate(&file, 2 * MIB).expect("sized");
            fcntl_add_seals(&file, seals).expect("sealed");
            let error = aperture.attach(0, &file, 2 * MIB).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }

    #[test]
    fn an_aperture_has_slots_of_whole_pages_with_gaps_between_them() {
        for (count, bytes) in [(0, 2 * MIB), (65, 2 * MIB), (1, 0), (1, 4096), (1, 1 << 60)] {
            let error = Aperture::new(Slots { count, bytes }).unwrap_err();
            assert!(matches!(error, MemoryError::Slots(_)), "{error}");
        }
        for bytes in [2 * MIB, 126 * MIB, 128 * MIB, 258 * MIB] {
            let slots = Slots { count: 4, bytes };
            let ranges: Vec<Range> = slots.ranges(4 << 30).collect();
            assert!(ranges.iter().all(|range| range.start % SLOT_ALIGN == 0));
            for pair in ranges.windows(2) {
                assert!(pair[0].end() < pair[1].start, "{pair:?}");
            }
        }
    }
}
