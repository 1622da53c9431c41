//! The guest's side of the arena: maps the runs of segments that the supervisor grants, and allocates memory in them.
//!
//! The first run of one segment is the session's reserve. It holds staging buffers and images on their way to the
//! device, and never memory of the program, so that copies and loads work when page-locked memory has filled the
//! window. The supervisor holds one segment back for each session that has no arena yet.
//!
//! In a VM, a part of the window can be mapped in single pages, and registered memory is allocated there. Other arena is
//! granted in that part once there is no room before it.
//!
//! An extent without allocations is returned to the supervisor. The largest one is kept, so that a program that
//! allocates and frees in a loop does not have it registered again and again.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use wormhole_lock::{Mutex, MutexGuard};
use wormhole_ring::arena::{Arena, ArenaError, Block};
use wormhole_ring::control::{ArenaRun, Message};
use wormhole_ring::layout::SEGMENT_BYTES;

use super::Session;
use super::control::ChannelError;
use super::mapping::Window;
use crate::error::{CuError, Result};
use crate::log;
use crate::pages::PAGE;

/// Greatest number of segments requested beyond an allocation's need. The arena grows by its own size up to this limit:
/// small allocations do not each cross the control stream, and a small program leaves the window to others.
const MOST_GROWTH: u64 = 8;
/// Bytes of a staging buffer.
pub const STAGING_BYTES: usize = 512 << 10;
// One message of a stream carries a whole buffer.
const _: () = assert!(STAGING_BYTES <= wormhole_ring::stream::MOST);
/// Staging buffers in the reserve. The rest of it is for images.
pub const RESERVED_BUFFERS: usize = 2;
/// Time that returned arena may take to become free again: during it a denial is not final.
const SETTLING: Duration = Duration::from_secs(2);
/// Pause between two requests within [`SETTLING`].
const PAUSE: Duration = Duration::from_millis(1);

/// Behaviour of a call without the arena it requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// The call fails, which is logged.
    Required,
    /// The call goes on with the arena it has.
    Optional,
    /// As `Optional`, but the call does not wait for returned arena to become free.
    Immediate,
}

/// The window and the arena of this process.
#[derive(Debug)]
pub struct Extents {
    window: Window,
    divided: Mutex<Divided>,
}

#[derive(Debug, Default)]
struct Divided {
    arena: Store,
    /// Memory that can be mapped in single pages, if `arena` cannot.
    pages: Store,
    /// Address of the reserve; `images` allocates its second part.
    reserve: Option<u64>,
    images: Arena,
    /// Time when an extent was last returned.
    returned: Option<Instant>,
}

/// Extents for one kind of memory.
#[derive(Debug, Default)]
struct Store {
    arena: Arena,
    /// Extent that was empty when it was kept; it may be in use again.
    spare: Option<Block>,
}

/// Kind of memory by what maps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Any,
    /// Memory that can be mapped in single pages.
    Pages,
}

impl Divided {
    fn store(&mut self, kind: Kind) -> &mut Store {
        match kind {
            Kind::Any => &mut self.arena,
            Kind::Pages => &mut self.pages,
        }
    }

    /// Frees an allocation. Returns the extent to return.
    fn free(&mut self, address: u64) -> std::result::Result<Option<Block>, ArenaError> {
        if self.images.free(address).is_ok() {
            return Ok(None);
        }
        let freed = self.pages.free(address);
        let surplus = freed.or_else(|_| self.arena.free(address))?;
        if surplus.is_some() {
            self.returned = Some(Instant::now());
        }
        Ok(surplus)
    }
}

impl Store {
    fn free(&mut self, address: u64) -> std::result::Result<Option<Block>, ArenaError> {
        let empty = self.arena.free(address)?.empty_extent;
        Ok(empty.and_then(|empty| self.surplus(empty)))
    }

    /// Chooses the extent to return when `empty` has no allocations any more, and removes it from the arena.
    fn surplus(&mut self, empty: Block) -> Option<Block> {
        let spare = self
            .spare
            .filter(|spare| spare.address != empty.address && self.arena.is_unused(spare.address));
        let (kept, surplus) = match spare {
            None => (empty, None),
            Some(spare) if spare.bytes > empty.bytes => (spare, Some(empty)),
            Some(spare) => (empty, Some(spare)),
        };
        self.spare = Some(kept);
        self.arena.remove_extent(surplus?.address).ok()
    }
}

impl Extents {
    pub fn new(window: Window) -> Self {
        Self {
            window,
            divided: Mutex::default(),
        }
    }

    fn divided(&self) -> MutexGuard<'_, Divided> {
        self.divided.lock()
    }

    /// Maps a granted run and adds it as one extent: no allocation spans two.
    fn add(&self, kind: Kind, first: u32, count: u32) -> io::Result<()> {
        let bytes = u64::from(count) * SEGMENT_BYTES as u64;
        let address = self.map(first, count)?;
        let added = self.divided().store(kind).arena.add_extent(address, bytes);
        added.map_err(io::Error::other)
    }

    /// Maps a granted segment and makes it the reserve.
    pub fn add_reserve(&self, segment: u32) -> io::Result<()> {
        let buffers = (RESERVED_BUFFERS * STAGING_BYTES) as u64;
        let address = self.map(segment, 1)?;
        let mut divided = self.divided();
        divided.reserve = Some(address);
        let images = SEGMENT_BYTES as u64 - buffers;
        let added = divided.images.add_extent(address + buffers, images);
        added.map_err(io::Error::other)
    }

    fn map(&self, first: u32, count: u32) -> io::Result<u64> {
        self.window.map(first, count, false)?;
        Ok(self.window.address(first))
    }

    /// Returns the number of segments to request if at least `needed` must be added.
    fn growth(&self, kind: Kind, needed: u64) -> u64 {
        let held = self.divided().store(kind).arena.capacity() / SEGMENT_BYTES as u64;
        let growth = held.clamp(1, MOST_GROWTH).min(self.segments(kind));
        needed.max(growth)
    }

    /// Returns the number of segments in which memory of a kind can lie.
    fn segments(&self, kind: Kind) -> u64 {
        match (kind, self.window.page_segments()) {
            (Kind::Pages, Some(pages)) => pages.len() as u64,
            _ => self.window.segments(),
        }
    }

    /// Returns the parts of the window in which memory of a kind is requested, the first one first. A part of nothing is
    /// anywhere.
    fn parts(&self, kind: Kind) -> impl Iterator<Item = Option<Range<u32>>> {
        let pages = self.window.page_segments();
        let (first, second) = match (kind, pages) {
            (_, None) => (None, None),
            (Kind::Pages, Some(pages)) => (Some(pages), None),
            (Kind::Any, Some(pages)) if self.window.lacks_pages() => (Some(0..pages.start), None),
            (Kind::Any, Some(pages)) => (Some(0..pages.start), Some(None)),
        };
        std::iter::once(first).chain(second)
    }

    /// Returns the kind of memory that can be mapped in single pages.
    fn kind_of_pages(&self) -> Kind {
        match self.window.is_shared() {
            true => Kind::Pages,
            false => Kind::Any,
        }
    }

    /// Returns the option that raises the limit which denied a request for arena: the window's own size, or the
    /// operator's limit below it.
    fn raised_by(&self, error: &ChannelError) -> Option<&'static str> {
        let window = self.window.segments() * SEGMENT_BYTES as u64;
        match error {
            ChannelError::ArenaDenied { limit, .. } if *limit < window => {
                Some("wormhole backend start --window-limit")
            }
            ChannelError::ArenaDenied { .. } => Some("wormhole run --window"),
            _ => None,
        }
    }

    /// Returns true if arena that was returned may not be free yet.
    fn is_settling(&self) -> bool {
        let returned = self.divided().returned;
        returned.is_some_and(|moment| moment.elapsed() < SETTLING)
    }
}

impl Session {
    /// Allocates memory that the device reaches at the same address. Requests more arena if none is free.
    pub fn allocate_arena(&self, bytes: u64, align: u64) -> Result<u64> {
        self.allocate(Kind::Any, bytes, align, Need::Required)
    }

    /// Allocates arena that can be mapped in single pages, if it is free now. A denial is no error that is logged.
    pub fn allocate_pages(&self, bytes: u64) -> Result<u64> {
        if !self.has_pages() {
            return Err(CuError::NOT_SUPPORTED);
        }
        let kind = self.extents.kind_of_pages();
        self.allocate(kind, bytes, PAGE, Need::Immediate)
    }

    /// Returns the bytes of the part of the window in which [`Session::allocate_pages`] allocates.
    pub fn page_bytes(&self) -> u64 {
        self.extents.segments(self.extents.kind_of_pages()) * SEGMENT_BYTES as u64
    }

    fn allocate(&self, kind: Kind, bytes: u64, align: u64, need: Need) -> Result<u64> {
        loop {
            let mut divided = self.extents.divided();
            let allocated = divided.store(kind).arena.allocate(bytes, align);
            drop(divided);
            match room(allocated)? {
                Some(address) => return Ok(address),
                None => self.grow_arena(kind, bytes, need)?,
            }
        }
    }

    /// Allocates memory for an image on its way to the device, in the reserve if it fits there.
    pub fn allocate_for_image(&self, bytes: u64, align: u64) -> Result<u64> {
        self.reserve(Need::Required)?;
        let allocated = self.extents.divided().images.allocate(bytes, align);
        match room(allocated)? {
            Some(address) => Ok(address),
            None => self.allocate_arena(bytes, align),
        }
    }

    /// Returns the address of staging buffer `number`, of [`STAGING_BYTES`] bytes. The first ones lie in the reserve; a
    /// copy goes on without the others if the window is full.
    pub fn staging_buffer(&self, number: usize) -> Result<u64> {
        match number {
            0..RESERVED_BUFFERS => {
                Ok(self.reserve(Need::Required)? + (number * STAGING_BYTES) as u64)
            }
            _ => self.allocate(Kind::Any, STAGING_BYTES as u64, PAGE, Need::Optional),
        }
    }

    /// Returns the address of the reserve. Requests it first, if the session began without one.
    fn reserve(&self, need: Need) -> Result<u64> {
        if let Some(address) = self.extents.divided().reserve {
            return Ok(address);
        }
        let run = self.ask_for_arena(Kind::Any, 1, 1, need)?;
        // Another thread may have added the reserve meanwhile: then this segment joins the arena.
        let reserve = self.extents.divided().reserve;
        let added = match reserve {
            Some(_) => self.extents.add(Kind::Any, run.first, run.count),
            None => self.extents.add_reserve(run.first),
        };
        added.map_err(|error| unusable(&error))?;
        let reserve = self.extents.divided().reserve;
        reserve.ok_or(CuError::UNKNOWN)
    }

    fn grow_arena(&self, kind: Kind, bytes: u64, need: Need) -> Result {
        let needed = bytes.div_ceil(SEGMENT_BYTES as u64);
        if needed > self.extents.segments(kind) {
            if need == Need::Required {
                log::error_once!(
                    "{bytes} bytes of arena are more than the window has; wormhole run --window sets its size"
                );
            }
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.reserve(need)?;
        let wanted = self.extents.growth(kind, needed);
        let run = self.ask_for_arena(kind, needed, wanted, need)?;
        let added = self.extents.add(kind, run.first, run.count);
        added.map_err(|error| unusable(&error))
    }

    /// Requests `wanted` segments, or the `needed` ones if those are denied.
    fn ask_for_arena(&self, kind: Kind, needed: u64, wanted: u64, need: Need) -> Result<ArenaRun> {
        loop {
            self.alive()?;
            match self.request_arena(kind, needed, wanted) {
                Ok(run) => return Ok(run),
                Err(ChannelError::Stream(_)) => {
                    self.end_of_stream();
                    return Err(self.alive().err().unwrap_or(CuError::OUT_OF_MEMORY));
                }
                Err(ChannelError::ArenaDenied { .. })
                    if need != Need::Immediate && self.extents.is_settling() =>
                {
                    std::thread::sleep(PAUSE);
                }
                Err(ChannelError::ArenaDenied { .. }) if need != Need::Required => {
                    return Err(CuError::OUT_OF_MEMORY);
                }
                Err(error) => {
                    // The end of the session is logged elsewhere.
                    self.alive()?;
                    match self.extents.raised_by(&error) {
                        Some(option) => log::error_once!("{error}, and {option} allows more"),
                        None => log::error_once!("{error}"),
                    }
                    return Err(CuError::OUT_OF_MEMORY);
                }
            }
        }
    }

    fn request_arena(
        &self,
        kind: Kind,
        needed: u64,
        wanted: u64,
    ) -> std::result::Result<ArenaRun, ChannelError> {
        let request = |segments: u64, part: &Option<Range<u32>>| {
            let segments = u32::try_from(segments).unwrap_or(u32::MAX);
            self.control
                .request_arena(segments, part.clone(), || self.alive().is_err())
        };
        // A large step may exceed a quota that the bare need does not.
        let steps = [wanted, needed]
            .into_iter()
            .skip(usize::from(needed >= wanted));
        let parts: Vec<_> = self.extents.parts(kind).collect();
        let mut tries = parts
            .iter()
            .flat_map(|part| steps.clone().map(move |step| (step, part)));
        let (step, part) = tries.next().unwrap_or((needed, &None));
        let first = request(step, part);
        tries.fold(first, |answered, (step, part)| match answered {
            Err(ChannelError::ArenaDenied { .. }) => request(step, part),
            answered => answered,
        })
    }

    /// Maps a part of the arena a second time at an address, in place of what this library has mapped there.
    pub fn map_again(&self, address: u64, home: u64, bytes: u64) -> io::Result<()> {
        self.extents.window.map_again(address, home, bytes)
    }

    /// Returns the file and the offset behind an address of the arena, if the file can be mapped in pages.
    pub fn arena_file(&self, address: u64) -> Option<(&File, u64)> {
        self.extents.window.file_range(address)
    }

    /// Returns true if single pages of the arena can be mapped a second time.
    pub fn has_pages(&self) -> bool {
        self.extents.window.has_pages()
    }

    /// Frees arena memory that the device has finished with.
    pub fn free_arena(&self, address: u64) {
        let freed = self.extents.divided().free(address);
        match freed {
            Ok(surplus) => surplus
                .into_iter()
                .for_each(|extent| self.return_extent(extent)),
            Err(error) => log::error_once!("{error}"),
        }
    }

    /// Unmaps an extent and returns it to the supervisor, which may grant it to another session.
    fn return_extent(&self, extent: Block) {
        let window = &self.extents.window;
        let Some((first, count)) = window.run(extent.address, extent.bytes) else {
            return;
        };
        // SAFETY: an extent is mapped; this one has no allocations and was removed from the arena.
        if let Err(error) = unsafe { window.unmap(extent.address, extent.bytes) } {
            log::error_once!("arena that is not needed cannot be unmapped: {error}");
            return;
        }
        let run = ArenaRun {
            id: 0,
            first,
            count,
        };
        if let Err(error) = self.control.send(&Message::ArenaReturn(run)) {
            log::debug!("arena could not be given back: {error}");
            self.end_of_stream();
        }
    }
}

/// Returns the address of an allocation, or nothing if another extent would help.
fn room(allocated: std::result::Result<Block, ArenaError>) -> Result<Option<u64>> {
    match allocated {
        Ok(block) => Ok(Some(block.address)),
        Err(ArenaError::NoRoom { .. }) => Ok(None),
        Err(error) => {
            log::error_once!("{error}");
            Err(CuError::INVALID_VALUE)
        }
    }
}

fn unusable(error: &io::Error) -> CuError {
    log::error_once!("granted arena cannot be used: {error}");
    CuError::OUT_OF_MEMORY
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::page_range::PageRange;

    const SEGMENT: u64 = SEGMENT_BYTES as u64;

    fn store(extents: &[u64]) -> Store {
        let mut store = Store::default();
        let mut address = SEGMENT;
        for segments in extents {
            store.arena.add_extent(address, segments * SEGMENT).unwrap();
            address += (segments + 1) * SEGMENT;
        }
        store
    }

    /// Fills an extent; returns its first address.
    fn fill(store: &mut Store, segments: u64) -> u64 {
        let block = store.arena.allocate(segments * SEGMENT, 1).unwrap();
        block.address
    }

    fn free(store: &mut Store, address: u64) -> Option<u64> {
        let surplus = store.free(address).unwrap()?;
        Some(surplus.bytes / SEGMENT)
    }

    #[test]
    fn registered_memory_has_the_segments_of_pages_alone() {
        let file = || tempfile::tempfile().unwrap();
        let pages = PageRange {
            first: 14,
            file: Ok(file()),
        };
        let window = Window::new(0x4b40_0000_0000, 16 * SEGMENT, file(), true);
        let extents = Extents::new(window.with_pages(Some(pages), true));
        assert_eq!(extents.segments(extents.kind_of_pages()), 2);
        assert_eq!(extents.segments(Kind::Any), 16);
        let mut divided = extents.divided();
        for kind in [Kind::Any, Kind::Pages] {
            let arena = &mut divided.store(kind).arena;
            arena.add_extent(SEGMENT, 4 * SEGMENT).unwrap();
        }
        drop(divided);
        assert_eq!(extents.growth(Kind::Any, 1), 4);
        assert_eq!(extents.growth(Kind::Pages, 1), 2);
    }

    #[test]
    fn the_largest_empty_extent_stays() {
        let mut store = store(&[2, 4, 3]);
        let [two, four, three] = [2, 4, 3].map(|segments| fill(&mut store, segments));
        assert_eq!(free(&mut store, two), None);
        assert_eq!(free(&mut store, four), Some(2));
        assert_eq!(free(&mut store, three), Some(3));
        assert_eq!(store.arena.capacity(), 4 * SEGMENT);
    }

    #[test]
    fn a_loop_keeps_its_extent_and_one_that_is_in_use_again_is_no_spare() {
        let mut store = store(&[4, 2]);
        for _ in 0..10 {
            let four = fill(&mut store, 4);
            assert_eq!(free(&mut store, four), None);
        }
        let (four, two) = (fill(&mut store, 4), fill(&mut store, 2));
        assert_eq!(free(&mut store, two), None, "the other is in use");
        assert_eq!(free(&mut store, four), Some(2));
        assert_eq!(store.arena.capacity(), 4 * SEGMENT);
    }
}
