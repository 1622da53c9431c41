//! Allocations that the program advises to be read mostly, which stay on both sides.
//!
//! The worker has a mirror of such an allocation on the device: the contents of each part when home and device were last
//! equal. So nothing need be copied for a part that the program has read and that no work has changed:
//!
//! - A part that the program reads is mapped write-protected ([`Part::Shown`]). Its first write is noticed, and makes it one
//!   that the program uses, as a part of any other allocation.
//! - Before the next work the gate takes the pages away, and sets them [aside](Mirror::Made) with their page tables. Only
//!   parts that the program has written are copied to the device. After that home, device and mirror are equal
//!   ([`Part::Copied`]).
//! - The next access waits until the device is idle. The worker then compares device and mirror, and brings home and mirror
//!   up to date, where work has changed the device's memory ([`ManagedRefresh`]). The pages come back in one step, again
//!   write-protected.
//!
//! If so much has changed that the program may not want all of it, parts are fetched one by one as they are accessed, and
//! if that happens twice in a row, the mirror ends. An access during work is served as for other allocations.
//!
//! The driver frees memory only when the work before has ended, and that work may wait for the program. So nothing is asked
//! of the worker about mirrors by a thread that holds the lock unless the device is idle.

use wormhole_api::{DevicePtr, ManagedIdle, ManagedMirror, ManagedRefresh};

use super::allocation::{Fetched, Managed, Part, wait_until};
use super::{FAULTS, PART, PATIENCE};
use crate::error::{CuError, Result};
use crate::log;
use crate::pages::Spare;
use crate::session::{OnDevice, gate};

/// Greatest number of bytes that a refresh copies.
const MOST_REFRESHED: u64 = 16 * PART;

/// Mirror of an allocation.
#[derive(Debug, Default)]
pub(super) enum Mirror {
    /// The program has not advised one, or there cannot be one.
    #[default]
    None,
    /// The next fetch makes it.
    Wanted,
    /// The worker has it. The pages of some copied parts are aside.
    Made {
        asides: Vec<Aside>,
        /// Whether the last refresh would have copied too much.
        was_behind: bool,
    },
    /// The worker has it, and no part is known to equal it. It is freed once the device is idle.
    Ended,
}

/// Mirror that is to be freed. If another is made first and freed in its place, the next refresh notices.
#[derive(Debug)]
pub(super) struct Unused {
    session: OnDevice,
    base: u64,
}

impl Unused {
    /// Has the worker free the mirror. May wait for the device.
    pub fn free(&self) {
        if let Err(error) = ask_for_mirror(self.session, self.base, false) {
            log::debug!("the mirror of managed memory cannot be freed: {error}");
        }
    }
}

fn ask_for_mirror(session: OnDevice, base: u64, wanted: bool) -> Result {
    let message = ManagedMirror {
        address: DevicePtr(base),
        wanted: wanted.into(),
    };
    session.request_after_end(&message, |()| ())
}

/// Pages of copied parts.
#[derive(Debug)]
pub(super) struct Aside {
    first: usize,
    count: usize,
    spare: Spare,
}

impl Aside {
    fn overlaps(&self, part: usize, count: usize) -> bool {
        self.first < part + count && part < self.first + self.count
    }
}

impl Mirror {
    /// Mirror that no part is known to equal.
    const NEW: Self = Self::Made {
        asides: Vec::new(),
        was_behind: false,
    };
}

impl Managed {
    pub fn is_mirrored(&self) -> bool {
        matches!(self.mirror, Mirror::Made { .. })
    }

    /// Notes whether the program has advised that the allocation is mostly read.
    pub fn advise_read_mostly(&mut self, advised: bool) {
        match (&self.mirror, advised) {
            (Mirror::None, true) => self.mirror = Mirror::Wanted,
            (Mirror::Ended, true) => self.mirror = Mirror::NEW,
            (Mirror::Wanted | Mirror::Made { .. }, false) => self.end_mirror(),
            _ => {}
        }
    }

    /// Has the worker make the mirror, if one is wanted, or free it, if it has ended. The gate is closed and the ring
    /// contains all work.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_READY`: the device is busy. Nothing has changed.
    pub fn renew_mirror(&mut self) -> Result {
        match &self.mirror {
            Mirror::None | Mirror::Made { .. } => return Ok(()),
            // The home's pages cannot be protected.
            Mirror::Wanted if !self.is_in_one_file() => {
                self.mirror = Mirror::None;
                return Ok(());
            }
            Mirror::Wanted | Mirror::Ended => {}
        }
        self.session.request_after_end(&ManagedIdle {}, |()| ())?;
        if let Some(unused) = self.take_ended() {
            unused.free();
            return Ok(());
        }
        // Otherwise the device has no memory for it.
        let is_made = ask_for_mirror(self.session, self.base, true).is_ok();
        self.mirror = if is_made { Mirror::NEW } else { Mirror::None };
        Ok(())
    }

    /// Returns whether the home is a part of a file that can be mapped in pages.
    fn is_in_one_file(&self) -> bool {
        let at = |offset| self.session.arena_file(self.home + offset);
        let ends = at(0).zip(at(self.bytes - PART));
        ends.is_some_and(|((first, start), (last, end))| {
            std::ptr::eq(first, last) && end - start == self.bytes - PART
        })
    }

    /// Makes the allocation one that changes sides as any other.
    pub fn end_mirror(&mut self) {
        self.mirror = match std::mem::take(&mut self.mirror) {
            Mirror::None | Mirror::Wanted => Mirror::None,
            Mirror::Made { .. } | Mirror::Ended => Mirror::Ended,
        };
        for (part, count) in self.runs(|part| part == Part::Shown) {
            self.set(part, count, Part::Used);
            self.show(part, count);
        }
        for (part, count) in self.runs(|part| part == Part::Copied) {
            self.set(part, count, Part::Absent);
        }
    }

    /// Forgets a mirror that has ended, and returns it.
    pub fn take_ended(&mut self) -> Option<Unused> {
        let (session, base) = (self.session, self.base);
        let has_ended = matches!(self.mirror, Mirror::Ended);
        has_ended.then(|| {
            self.mirror = Mirror::None;
            Unused { session, base }
        })
    }

    /// Takes the pages of a run of mapped parts out of the way. Returns false if they are still there.
    pub fn set_aside(&mut self, part: usize, count: usize) -> bool {
        let written: Vec<usize> = (part..part + count)
            .filter(|part| self.sides().get(*part) == Some(&Part::Used))
            .collect();
        let pages = self.pages(part, count);
        let (Mirror::Made { asides, .. }, Some(faults)) = (&mut self.mirror, FAULTS.as_ref())
        else {
            return false;
        };
        // SAFETY: this library has mapped the home there, and the service serves accesses from now on.
        let aside = unsafe { Spare::aside(faults.descriptor(), pages) };
        let Ok(spare) = aside else {
            // The run consists of several mappings, or this kernel has no such mode.
            return false;
        };
        let protected = written.iter().try_for_each(|used| {
            let offset = (used - part) as u64 * PART;
            faults.protect(&spare, offset, PART)
        });
        if protected.is_ok() {
            let first = part;
            asides.push(Aside {
                first,
                count,
                spare,
            });
        }
        true
    }

    /// Forgets the pages of all parts that are aside.
    pub fn forget_asides(&mut self) {
        if let Mirror::Made { asides, .. } = &mut self.mirror {
            asides.clear();
        }
    }

    /// Makes copied parts absent, whose home need not equal their mirror any more.
    pub fn drop_copies(&mut self, part: usize, count: usize) {
        if let Mirror::Made { asides, .. } = &mut self.mirror {
            asides.retain(|aside| !aside.overlaps(part, count));
        }
        for part in part..part + count {
            if self.sides().get(part) == Some(&Part::Copied) {
                self.set(part, 1, Part::Absent);
            }
        }
    }

    /// Brings the copied parts around one up to date, and shows them to the program. Returns nothing if the part must be
    /// fetched.
    pub fn refresh(&mut self, part: usize) -> Option<Fetched> {
        let runs = self.runs(|part| part == Part::Copied);
        let mut around = runs.into_iter();
        let (first, count) =
            around.find(|(first, count)| (*first..first + count).contains(&part))?;
        let pages = self.pages(first, count);
        let message = ManagedRefresh {
            address: DevicePtr(pages.start),
            bytes: pages.bytes(),
            most: MOST_REFRESHED,
        };
        gate::close();
        let session = self.session;
        let mut is_current = false;
        let refreshed = wait_until(PATIENCE, || {
            session.request_after_end(&message, |reply| is_current = reply.current != 0)
        });
        match refreshed {
            Ok(()) if is_current => {
                self.note_behind(false);
                self.show_copies(first, count);
                Some(Fetched::Done)
            }
            Ok(()) => {
                self.drop_copies(first, count);
                // Work changes much of it again and again: the advice was wrong.
                if self.note_behind(true) {
                    self.end_mirror();
                }
                None
            }
            Err(CuError::NOT_READY) => Some(Fetched::Busy),
            Err(error) => {
                // A reset has freed it. If the session has ended, the fetch notices.
                log::debug!("managed memory cannot be compared with its mirror: {error}");
                self.end_mirror();
                None
            }
        }
    }

    /// Notes whether a refresh would have copied too much, and returns what was noted before.
    fn note_behind(&mut self, behind: bool) -> bool {
        match &mut self.mirror {
            Mirror::Made { was_behind, .. } => std::mem::replace(was_behind, behind),
            Mirror::None | Mirror::Wanted | Mirror::Ended => false,
        }
    }

    /// Shows parts to the program that were brought up to date. The caller wakes the threads that wait for them.
    fn show_copies(&mut self, first: usize, count: usize) {
        let Mirror::Made { asides, .. } = &mut self.mirror else {
            return;
        };
        let mut back: Vec<Aside> = asides
            .extract_if(.., |aside| aside.overlaps(first, count))
            .collect();
        back.sort_by_key(|aside| aside.first);
        let mut part = first;
        for aside in back {
            self.show_protected(part, aside.first - part);
            match self.put(aside.first, aside.spare) {
                Ok(()) => self.set(aside.first, aside.count, Part::Shown),
                Err(_) => self.show_protected(aside.first, aside.count),
            }
            part = aside.first + aside.count;
        }
        self.show_protected(part, first + count - part);
        if !self.is_mirrored() {
            // It has ended on the way: also parts that were shown after that are plain ones.
            self.end_mirror();
        }
    }

    /// Maps parts for the program, which are equal on both sides. The caller wakes the threads that wait for them. If their
    /// pages cannot be protected, the program uses them from now on.
    pub fn show_protected(&mut self, part: usize, count: usize) {
        if count == 0 {
            return;
        }
        let pages = self.pages(part, count);
        let home = self.home + part as u64 * PART;
        let file = self.session.arena_file(home).zip(FAULTS.as_ref());
        let shown = file.is_some_and(|((file, offset), faults)| {
            let spare = faults.protected(file, offset, pages.bytes());
            let put = spare.and_then(|spare| self.put(part, spare));
            put.inspect_err(|error| log::debug!("managed memory cannot be protected: {error}"))
                .is_ok()
        });
        if shown {
            self.set(part, count, Part::Shown);
        } else {
            self.set(part, count, Part::Used);
            self.show(part, count);
            self.end_mirror();
        }
    }

    /// Lets the program write to a part that it reads.
    pub fn let_write(&mut self, part: usize) {
        self.set(part, 1, Part::Used);
        let pages = self.pages(part, 1);
        let may = FAULTS
            .as_ref()
            .is_some_and(|faults| faults.let_write(pages).is_ok());
        if !may {
            self.show(part, 1);
        }
    }
}
