//! Registered memory (`cuMemHostRegister`): a program's own pages, which the device is to reach.
//!
//! Where the program's pages are private memory of no file, they become arena in place: the program keeps its
//! addresses, and the device reaches the same pages at their address in the arena. A page that other processes
//! share is never moved, since they would stay behind: where it is of a file of shared memory and the worker is a
//! process of the same system, that maps the file too (`files`). Otherwise copies of it are staged, as of any memory,
//! and the device cannot reach it. So it is too with pages of a program in a VM, whose window can be mapped in pieces
//! of 2 MiB only, and where writers cannot be held off (`pages`).
//!
//! A forked child has copies of its own of what was registered, as of all private memory. Handlers of `fork` put
//! them there: a child that is made without them (`_Fork`, the system calls) has nothing at these pages, nor has it
//! in time if the forking thread's own stack is among them.
//!
//! Nothing can hold off who has pinned the pages: what is written to them by I/O that began before they were moved,
//! or for buffers that were registered with io_uring or RDMA, is lost.

mod files;
mod maps;

use std::cell::RefCell;
use std::io;
use std::os::linux::fs::MetadataExt;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use self::maps::Mapping;
use crate::log;
use crate::pages::{self, PAGE, Pages, Spare};
use crate::session::{OnDevice, Session};

/// Pages that are arena now.
#[derive(Debug)]
struct Run {
    pages: Pages,
    /// Where they lie in the arena.
    block: u64,
    /// What is mapped at their first page: the file by device and inode, and the place in it.
    device: (u32, u32),
    inode: u64,
    offset: u64,
    /// Registrations of memory in them; none where the pages could not be moved back.
    users: usize,
    /// What a child that is being forked gets.
    snapshots: Vec<(Pages, Spare)>,
}

impl Run {
    fn holds(&self, pages: Pages) -> bool {
        self.pages.start <= pages.start && pages.end <= self.pages.end
    }

    fn overlaps(&self, pages: Pages) -> bool {
        self.pages.overlap(pages)
    }

    /// Whether a mapping is what was put at its pages: the program may have mapped something else there.
    fn is_at(&self, mapping: &Mapping) -> bool {
        mapping.inode == self.inode
            && mapping.device == self.device
            && mapping.offset.wrapping_sub(mapping.start)
                == self.offset.wrapping_sub(self.pages.start)
    }

    /// Those of its pages that are still where they were put.
    fn pieces(&self) -> io::Result<Vec<Pages>> {
        let here = |mapping: &Mapping| {
            let start = mapping.start.max(self.pages.start);
            let end = mapping.end.min(self.pages.end);
            (start < end && self.is_at(mapping)).then_some(Pages { start, end })
        };
        Ok(maps::read()?.iter().filter_map(here).collect())
    }
}

static RUNS: Mutex<Vec<Run>> = Mutex::new(Vec::new());

fn runs() -> MutexGuard<'static, Vec<Run>> {
    RUNS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why the device cannot reach memory where it is.
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
    #[error("there is no arena for it")]
    Arena,
    #[error("its pages cannot be moved: {0}")]
    Move(#[from] io::Error),
}

/// What is wrong with a range that is to be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotMapped;

/// Lets the device reach a range of the program's memory: its address for the device, `None` where it cannot be.
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
    let mappings = maps::read().map_err(|_| NotMapped)?;
    maps::parts(&mappings, pages.start, pages.end).ok_or(NotMapped)
}

/// Tries again to move back what stayed arena when its last use ended: whether any of it is arena no more.
fn drop_unused(session: &Session, runs: &mut Vec<Run>) -> bool {
    let before = runs.len();
    runs.retain(|run| {
        let goes = run.users == 0 && move_back(run).is_ok();
        if goes {
            session.free_arena(run.block);
        }
        !goes
    });
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
    let block = session
        .allocate_arena(pages.bytes(), PAGE)
        .map_err(|_| Refusal::Arena)?;
    let moved = session
        .arena_file(block)
        .ok_or(Refusal::Window)
        .and_then(|(file, offset)| {
            let status = file.metadata()?;
            let spare = Spare::shared(file, offset, pages.bytes())?;
            // SAFETY: the pages are plain memory of the program, readable and writable, and not this thread's own.
            unsafe { pages::replace(pages, spare) }?;
            Ok(Run {
                pages,
                block,
                device: (libc::major(status.st_dev()), libc::minor(status.st_dev())),
                inode: status.st_ino(),
                offset,
                users: 1,
                snapshots: Vec::new(),
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

/// Ends one use of memory that [`place`] let the device reach, at `device`. The device has finished with it.
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
    match move_back(run) {
        Ok(()) => {
            let run = runs.swap_remove(index);
            session.free_arena(run.block);
        }
        // They stay arena, which the program does not notice, until the next registration.
        Err(error) => log::debug!("registered pages cannot be moved back: {error}"),
    }
}

/// Gives the program memory of its own again, wherever its registered pages are still mapped.
fn move_back(run: &Run) -> io::Result<()> {
    for pages in run.pieces()? {
        // Another thread may have registered what this one runs on.
        if pages::are_own(pages)? {
            return Err(io::Error::other("the calling thread runs on them"));
        }
        let spare = Spare::private(pages.bytes())?;
        // SAFETY: this library put these pages there, readable and writable, and they are not this thread's own.
        unsafe { pages::replace(pages, spare) }?;
    }
    Ok(())
}

/// A fork that is under way.
struct Fork {
    runs: MutexGuard<'static, Vec<Run>>,
    /// Why the child has not all of them.
    failure: Option<io::Error>,
}

thread_local! {
    /// Held while this thread forks.
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
            // SAFETY: the child has nothing at these pages, which are not forked, and has mapped nothing yet.
            let _ = unsafe { snapshot.take_place_of(pages) };
        }
    }
}
