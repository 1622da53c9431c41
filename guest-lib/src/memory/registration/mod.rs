//! Registered memory (`cuMemHostRegister`): makes pages of the program accessible to the device.
//!
//! Private anonymous pages are replaced in place by pages of the arena: the program keeps its addresses, and the device
//! reaches the same pages at their address in the arena. Pages that other processes share are never moved, since those
//! processes would keep the old ones. If they belong to a file of shared memory that the worker reaches, the worker maps
//! the file too (`files`). Otherwise the device cannot reach the memory, and copies of it are staged, as of any
//! memory.
//!
//! In a VM the arena is two DAX devices, and one of them can be mapped in single pages. Userfaultfd cannot block writers
//! to such a device. So pages come back by way of absent pages (`absent`).
//!
//! A forked child has its own copies of registered memory, as of all private memory. Handlers of `fork` map them: in a
//! child that is created without the handlers (`_Fork`, the system calls) these pages are unmapped. They are also
//! unmapped until the handler has run, which fails if the forking thread's own stack is among them.
//!
//! Pinned pages cannot be protected: writes by I/O that began before the pages were moved, or to buffers that were
//! registered with io_uring or RDMA, are lost.

mod absent;
mod files;
mod maps;

use std::cell::RefCell;
use std::io;
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::FileTypeExt;
use std::sync::Once;

use wormhole_lock::{Mutex, MutexGuard};

use self::maps::Mapping;
use crate::faults::BringBackError;
use crate::log;
use crate::pages::{self, Pages, Spare};
use crate::session::{OnDevice, Session};

/// Pages of the program that were replaced by arena.
#[derive(Debug)]
struct Run {
    pages: Pages,
    /// Address of the pages in the arena.
    block: u64,
    /// Mapping at their first page: the file's device and inode, and the offset in the file.
    device: (u32, u32),
    inode: u64,
    offset: u64,
    /// Whether the file is a DAX device.
    is_dax: bool,
    /// Number of registrations in the pages; 0 if the pages could not be moved back.
    users: usize,
    /// Copies of the pages for a child that is being forked.
    snapshots: Vec<(Pages, Spare)>,
    /// The old pages, which take the place of the arena again. Without them new ones are made, which takes longer than to
    /// copy the contents.
    kept: Option<Spare>,
}

/// Most bytes of kept pages, which the program has twice as long as they are registered.
const MOST_KEPT: u64 = 64 << 20;

impl Run {
    fn holds(&self, pages: Pages) -> bool {
        self.pages.start <= pages.start && pages.end <= self.pages.end
    }

    fn overlaps(&self, pages: Pages) -> bool {
        self.pages.overlap(pages)
    }

    /// Returns true if a mapping is the arena at this run's pages: the program may have mapped other memory there.
    fn is_at(&self, mapping: &Mapping) -> bool {
        mapping.inode == self.inode
            && mapping.device == self.device
            && mapping.offset.wrapping_sub(mapping.start)
                == self.offset.wrapping_sub(self.pages.start)
    }

    /// Returns true if a mapping is some of this run's arena at a place of the program's choice, to which it has moved pages
    /// of the run (`mremap`).
    fn is_moved(&self, mapping: &Mapping) -> bool {
        let end = mapping.offset.saturating_add(mapping.end - mapping.start);
        mapping.inode == self.inode
            && mapping.device == self.device
            && mapping.offset < self.offset + self.pages.bytes()
            && self.offset < end
            // This library's own mapping of the arena.
            && mapping.start.wrapping_sub(mapping.offset) != self.block.wrapping_sub(self.offset)
    }

    /// Returns the run's pages that are still mapped to the arena.
    fn pieces(&self) -> io::Result<Vec<Pages>> {
        let here = |mapping: &Mapping| {
            let start = mapping.start.max(self.pages.start);
            let end = mapping.end.min(self.pages.end);
            (start < end && self.is_at(mapping)).then_some(Pages { start, end })
        };
        let found = maps::overlapping(self.pages.start, self.pages.end)?;
        Ok(found.iter().filter_map(here).collect())
    }
}

static RUNS: Mutex<Vec<Run>> = Mutex::new(Vec::new());

fn runs() -> MutexGuard<'static, Vec<Run>> {
    RUNS.lock()
}

/// Cause why the device cannot reach memory in place.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("this session's arena cannot be mapped in single pages")]
    Window,
    #[error("it shares a page with other registered memory")]
    Neighbour,
    #[error("not all of it is private memory of no file, nor of one file of shared memory")]
    Kind,
    #[error("the calling thread runs on it")]
    Own,
    #[error(
        "the {0} MiB of the window in which memory is registered have no room for it; `wormhole run --window` sets the \
         size of the window"
    )]
    Arena(u64),
    #[error("its pages cannot be moved: {0}")]
    Move(#[from] io::Error),
}

/// Error of a range that is not mapped entirely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotMapped;

/// Makes a range of the program's memory accessible to the device. Returns the device's address, or `None` if that is
/// impossible.
pub fn place(session: OnDevice, address: u64, bytes: u64) -> Result<Option<u64>, NotMapped> {
    let pages = Pages::around(address, bytes).ok_or(NotMapped)?;
    let mut runs = runs();
    let mut parts = mapped(pages)?;
    let is_here = |run: &&mut Run| run.holds(pages) && parts.iter().all(|part| run.is_at(part));
    if let Some(run) = runs.iter_mut().find(is_here) {
        run.users += 1;
        return Ok(Some(run.block + (address - run.pages.start)));
    }
    if drop_unused(&session, &mut runs) {
        parts = mapped(pages)?;
    }
    if !runs.iter().any(|run| run.overlaps(pages))
        && let Ok(device) = files::place(session, address, pages, &parts)
    {
        return Ok(Some(device));
    }
    match move_in(&session, &mut runs, pages, &parts) {
        Ok(block) => Ok(Some(block + (address - pages.start))),
        Err(refusal) => {
            log::debug!("{bytes} bytes at {address:#x} are out of the device's reach: {refusal}");
            Ok(None)
        }
    }
}

fn mapped(pages: Pages) -> Result<Vec<Mapping>, NotMapped> {
    let mappings = maps::overlapping(pages.start, pages.end).map_err(|_| NotMapped)?;
    maps::parts(&mappings, pages.start, pages.end).ok_or(NotMapped)
}

/// Tries again to move back pages that could not be moved when their last use ended. Returns true if any were moved.
fn drop_unused(session: &Session, runs: &mut Vec<Run>) -> bool {
    let before = runs.len();
    runs.retain_mut(|run| run.users > 0 || end(session, run).is_err());
    runs.len() < before
}

fn move_in(
    session: &Session,
    runs: &mut Vec<Run>,
    pages: Pages,
    parts: &[Mapping],
) -> Result<u64, Refusal> {
    if runs.iter().any(|run| run.overlaps(pages)) {
        return Err(Refusal::Neighbour);
    }
    if !parts.iter().all(|part| part.is_plain) {
        return Err(Refusal::Kind);
    }
    if pages::are_own(pages)? {
        return Err(Refusal::Own);
    }
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: the handlers are functions of this library, which is never unloaded (it is linked with
        // `nodelete`), and call only what is safe where they run.
        unsafe {
            libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child));
        }
    });
    if !session.has_pages() {
        return Err(Refusal::Window);
    }
    let mappings = parts.iter().map(|part| Pages {
        start: part.start,
        end: part.end,
    });
    let mappings: Vec<Pages> = mappings.collect();
    let block = session
        .allocate_pages(pages.bytes())
        .map_err(|_| Refusal::Arena(session.page_bytes() >> 20))?;
    let moved = session
        .arena_file(block)
        .ok_or(Refusal::Window)
        .and_then(|(file, offset)| {
            let status = file.metadata()?;
            let is_dax = status.file_type().is_char_device();
            if is_dax {
                absent::prepare()?;
            }
            let spare = Spare::shared(file, offset, pages.bytes())?;
            let held = runs.iter().filter(|run| run.kept.is_some());
            let held: u64 = held.map(|run| run.pages.bytes()).sum();
            let keeps = !is_dax && mappings.len() == 1 && held + pages.bytes() <= MOST_KEPT;
            // SAFETY: the pages are plain memory of the program, readable and writable, and not this thread's own.
            let kept = unsafe {
                match keeps {
                    true => Some(pages::exchange(pages, spare)?),
                    false => pages::replace(pages, &mappings, spare).map(|()| None)?,
                }
            };
            Ok(Run {
                pages,
                block,
                device: (libc::major(status.st_dev()), libc::minor(status.st_dev())),
                inode: status.st_ino(),
                offset,
                is_dax,
                users: 1,
                snapshots: Vec::new(),
                kept,
            })
        });
    match moved {
        Ok(run) => {
            runs.push(run);
            Ok(block)
        }
        Err(refusal) => {
            session.free_arena(block);
            Err(refusal)
        }
    }
}

/// Ends one use of memory that [`place`] made accessible at `device`. The device must have finished with it.
pub fn release(session: OnDevice, address: u64, device: u64) {
    if files::release(session, device) {
        return;
    }
    let mut runs = runs();
    let holds = |run: &Run| (run.pages.start..run.pages.end).contains(&address);
    let Some(index) = runs.iter().position(holds) else {
        return;
    };
    let run = &mut runs[index];
    run.users = run.users.saturating_sub(1);
    if run.users > 0 {
        return;
    }
    match end(&session, run) {
        Ok(()) => {
            runs.swap_remove(index);
        }
        // The pages stay arena until the next registration, which the program does not notice.
        Err(error) => log::debug!("registered pages cannot be moved back: {error}"),
    }
}

/// Moves a run's pages back and frees its arena, unless the program still needs that.
fn end(session: &Session, run: &mut Run) -> io::Result<()> {
    if !move_back(run)? {
        return Ok(());
    }
    if !maps::of_files()?
        .iter()
        .any(|mapping| run.is_moved(mapping))
    {
        session.free_arena(run.block);
        return Ok(());
    }
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        log::write(
            log::Level::Warn,
            format_args!(
                "registered memory was moved (mremap) and then unregistered: its {} bytes of the window stay taken until \
                 this process ends",
                run.pages.bytes()
            ),
        );
    });
    Ok(())
}

/// Replaces the arena by private memory wherever the run's pages are still mapped. Returns false if the arena has the only
/// copy of some contents.
fn move_back(run: &mut Run) -> io::Result<bool> {
    let mut is_whole = true;
    for pages in run.pieces()? {
        match move_piece_back(run, pages) {
            Ok(()) => {}
            Err(BringBackError::Unchanged(error)) if is_whole => return Err(error),
            Err(error) => {
                is_whole = false;
                log::error!(
                    "memory at {:#x} is not all moved back after its registration: {error}",
                    pages.start
                );
            }
        }
    }
    if run.is_dax && absent::faults()?.take_strays() {
        log::error!(
            "memory was moved or enlarged (mremap) while its registration ended: parts of it read as zeros"
        );
    }
    Ok(is_whole)
}

fn move_piece_back(run: &mut Run, pages: Pages) -> Result<(), BringBackError> {
    // Another thread may have registered the stack of this one.
    if pages::are_own(pages)? {
        return Err(io::Error::other("the calling thread runs on them").into());
    }
    let source = run.block + (pages.start - run.pages.start);
    // SAFETY: this library put these pages there, readable and writable, and they are not this thread's own. The block is
    // mapped at its address too. It was made once a thread read the descriptor's events.
    unsafe {
        match run.is_dax {
            true => absent::faults()?.bring_back(pages, source),
            false => {
                let kept = run.kept.take().filter(|_| pages == run.pages);
                let spare = kept.map_or_else(|| Spare::private(pages.bytes()), Ok)?;
                Ok(pages::replace(pages, &[pages], spare)?)
            }
        }
    }
}

/// A fork that is under way.
struct Fork {
    runs: MutexGuard<'static, Vec<Run>>,
    /// Cause why the child lacks some of the pages.
    failure: Option<io::Error>,
}

thread_local! {
    /// Fork of this thread that is under way.
    static FORKING: RefCell<Option<Fork>> = const { RefCell::new(None) };
}

extern "C" fn before_fork() {
    let mut fork = Fork {
        runs: runs(),
        failure: None,
    };
    for run in fork.runs.iter_mut() {
        let pieces = run.pieces().unwrap_or_else(|error| {
            fork.failure = Some(error);
            Vec::new()
        });
        for pages in pieces {
            match Spare::private(pages.bytes()) {
                Ok(snapshot) => {
                    // SAFETY: the pages are mapped, and readable as this library mapped them.
                    unsafe { snapshot.copy_from(pages) };
                    run.snapshots.push((pages, snapshot));
                }
                Err(error) => fork.failure = Some(error),
            }
        }
    }
    FORKING.set(Some(fork));
}

extern "C" fn in_parent() {
    let Some(mut fork) = FORKING.take() else {
        return;
    };
    for run in fork.runs.iter_mut() {
        run.snapshots.clear();
    }
    drop(fork.runs);
    if let Some(error) = fork.failure {
        log::error_once!("a forked child lacks memory that is registered: {error}");
    }
}

extern "C" fn in_child() {
    let Some(mut fork) = FORKING.take() else {
        return;
    };
    for run in fork.runs.drain(..) {
        for (pages, snapshot) in run.snapshots {
            // SAFETY: these pages are not inherited, so nothing is mapped there in the child, which has made no
            // mappings yet.
            let _ = unsafe { snapshot.take_place_of(pages) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arena_that_the_program_has_moved_is_not_taken_for_the_librarys_own() {
        const BLOCK: u64 = 0x4b50_0001_0000;
        let run = Run {
            pages: Pages {
                start: 0x7000_0000,
                end: 0x7000_4000,
            },
            block: BLOCK,
            device: (0, 6),
            inode: 88,
            offset: 0x1_0000,
            is_dax: true,
            users: 0,
            snapshots: Vec::new(),
            kept: None,
        };
        let mapping = |start: u64, bytes, offset| Mapping {
            start,
            end: start + bytes,
            is_plain: false,
            is_shared: true,
            offset,
            device: run.device,
            inode: run.inode,
        };
        // The window's own mapping, whole and cut, and other parts of the file.
        for (start, bytes, offset) in [
            (BLOCK - 0x1_0000, 0x20_0000, 0),
            (BLOCK + 0x1000, 0x1000, 0x1_1000),
            (0x6000_0000, 0x1000, 0xf000),
            (0x6000_0000, 0x1000, 0x1_4000),
        ] {
            assert!(!run.is_moved(&mapping(start, bytes, offset)), "{offset:#x}");
        }
        let moved = mapping(0x6000_0000, 0x2000, 0xf000);
        assert!(run.is_moved(&moved));
        assert!(!run.is_moved(&Mapping { inode: 89, ..moved }));
    }
}
