//! One allocation that changes sides: its places, and the steps between them.

use std::time::{Duration, Instant};

use wormhole_api::{DevicePtr, ManagedFetch, ManagedIdle, ManagedPlace, ManagedPush};

use super::mirror::Mirror;
use super::{FAULTS, PART, PATIENCE, SETTLING};
use crate::error::{CuError, Result};
use crate::log;
use crate::pages::{Pages, Spare};
use crate::session::{OnDevice, gate};

/// Greatest number of parts that one access fetches.
const MOST_FETCHED: usize = 8;
/// Greatest number of an allocation's parts that the program uses between two works: each may be a mapping of its own, and
/// a process has 65,530 mappings (`vm.max_map_count`).
const MOST_USED: usize = 8192;

/// Side of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The home, which the program uses.
    Home,
    /// The home. The program's pages are absent, so that its next access is noticed.
    Watched,
    /// The home, for good.
    Shared,
    /// Memory of the device, except the parts that the program uses, which are in the home.
    Device { parts: Vec<Part> },
}

/// Side of a part of an allocation that is on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The device. The program's pages are absent.
    Absent,
    /// The home, which the program uses.
    Used,
    /// Both sides, which are equal. The program reads the home, and its next write is noticed.
    Shown,
    /// The device. The program's pages are absent, and the home equals the part's mirror.
    Copied,
}

impl Part {
    /// Returns whether the program reaches the home.
    pub fn is_mapped(self) -> bool {
        matches!(self, Self::Used | Self::Shown)
    }
}

#[derive(Debug)]
pub(super) struct Managed {
    pub session: OnDevice,
    pub base: u64,
    pub bytes: u64,
    /// Address of the home.
    pub home: u64,
    pub place: Place,
    /// Whether the device has worked without an access of the program meanwhile.
    pub is_proven: bool,
    /// Part behind the last one fetched, and how many were fetched.
    pub next: (usize, usize),
    pub mirror: Mirror,
}

/// Calls `ready`, once the ring contains all work, until it succeeds, fails or the patience is over.
pub(super) fn wait_until(patience: Duration, mut ready: impl FnMut() -> Result) -> Result {
    let deadline = Instant::now() + patience;
    let mut pause = Duration::from_micros(5);
    loop {
        let asked = if gate::is_quiet() {
            ready()
        } else {
            Err(CuError::NOT_READY)
        };
        if asked != Err(CuError::NOT_READY) || Instant::now() >= deadline {
            return asked;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(1));
    }
}

/// Outcome of an attempt to give the device what the program uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Given {
    /// As far as the device is idle.
    Done,
    /// The device, which is idle, has no room for the allocation, which is [`Place::Watched`].
    NoRoom,
}

/// Outcome of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fetched {
    /// The thread goes on.
    Done,
    /// The device is busy.
    Busy,
}

impl Managed {
    pub fn part(&self, address: u64) -> usize {
        usize::try_from((address - self.base) / PART).unwrap_or(0)
    }

    pub fn parts(&self) -> usize {
        usize::try_from(self.bytes / PART).unwrap_or(0)
    }

    pub fn pages(&self, part: usize, count: usize) -> Pages {
        let start = self.base + part as u64 * PART;
        Pages {
            start,
            end: start + count as u64 * PART,
        }
    }

    /// Gives the device what the program uses.
    pub fn give(&mut self) -> Given {
        match &self.place {
            Place::Shared => Given::Done,
            Place::Home => {
                if !self.withhold(0, self.parts()) {
                    self.come_home(Place::Shared);
                    return Given::Done;
                }
                self.place = Place::Watched;
                self.place_on_device()
            }
            Place::Watched => self.place_on_device(),
            Place::Device { .. } => {
                self.give_parts();
                Given::Done
            }
        }
    }

    /// Takes all parts from the program, and copies those to the device that it may have written.
    fn give_parts(&mut self) {
        for (part, count) in self.runs(Part::is_mapped) {
            if !self.set_aside(part, count) {
                self.take_away(part, count);
            }
        }
        let side = if self.is_mirrored() {
            Part::Copied
        } else {
            Part::Absent
        };
        let used = self.runs(|part| part == Part::Used);
        for (part, count) in self.runs(|part| part == Part::Shown) {
            self.set(part, count, Part::Copied);
        }
        for (part, count) in used {
            self.send(part, count, side);
        }
    }

    /// Returns the parts of an allocation on the device; none of any other.
    pub fn sides(&self) -> &[Part] {
        match &self.place {
            Place::Device { parts } => parts,
            Place::Home | Place::Watched | Place::Shared => &[],
        }
    }

    pub fn set(&mut self, part: usize, count: usize, side: Part) {
        if let Place::Device { parts } = &mut self.place {
            parts[part..part + count].fill(side);
        }
    }

    /// Returns the runs of parts on such a side: first part and number.
    pub fn runs(&self, is: impl Fn(Part) -> bool) -> Vec<(usize, usize)> {
        runs(self.sides(), is)
    }

    /// Puts a watched allocation on the device, if that is known to be right and the device is idle.
    fn place_on_device(&mut self) -> Given {
        if !self.is_proven {
            return Given::Done;
        }
        let message = ManagedPlace {
            address: DevicePtr(self.base),
        };
        // No work may come behind the message before it is answered.
        gate::close();
        let session = self.session;
        match wait_until(SETTLING, || session.request_after_end(&message, |()| ())) {
            Ok(()) => {
                let parts = vec![Part::Absent; self.parts()];
                self.place = Place::Device { parts };
            }
            Err(CuError::NOT_READY) => {}
            Err(CuError::OUT_OF_MEMORY) => return Given::NoRoom,
            Err(error) => {
                log::debug!("managed memory stays on the host: {error}");
                self.come_home(Place::Shared);
            }
        }
        Given::Done
    }

    /// Makes parts absent. Returns false if the system refuses.
    fn withhold(&self, part: usize, count: usize) -> bool {
        let Some(faults) = FAULTS.as_ref() else {
            return false;
        };
        let missing = faults.missing(self.pages(part, count).bytes());
        let withheld = missing.and_then(|missing| self.put(part, missing));
        withheld
            .inspect_err(|error| {
                log::error_once!("managed memory cannot be taken away from the program: {error}");
            })
            .is_ok()
    }

    /// Puts memory in the place of the program's pages.
    pub fn put(&self, part: usize, spare: Spare) -> std::io::Result<()> {
        let start = self.base + part as u64 * PART;
        let end = start + spare.pages().bytes();
        // SAFETY: this library has mapped the home there, or pages whose accesses the service serves. Callers put missing
        // pages there, whose accesses the service serves from now on, or the home.
        unsafe { spare.take_place_of(Pages { start, end }) }
    }

    /// Takes parts from the program, or ends the process.
    fn take_away(&self, part: usize, count: usize) {
        if !self.withhold(part, count) {
            log::error!(
                "managed memory is in use by program and device at once: this process ends"
            );
            std::process::abort();
        }
    }

    /// Takes a part from the program that both sides use, and copies it to the device.
    pub fn push(&mut self, part: usize) {
        self.take_away(part, 1);
        self.send(part, 1, Part::Absent);
    }

    /// Copies parts that were taken from the program to the device, on whose `side` they are then.
    fn send(&mut self, part: usize, count: usize, side: Part) {
        self.set(part, count, side);
        let pages = self.pages(part, count);
        let message = ManagedPush {
            address: DevicePtr(pages.start),
            bytes: pages.bytes(),
        };
        if let Err(error) = self.session.request_after_end(&message, |()| ()) {
            // The session has ended, or its context is dead: every further call returns that error.
            log::debug!("managed memory cannot be copied to the device: {error}");
            self.come_home(Place::Shared);
        }
    }

    /// Serves an access to a watched allocation.
    pub fn watched_access(&mut self) {
        gate::close();
        let session = self.session;
        let idle = wait_until(PATIENCE, || {
            session.request_after_end(&ManagedIdle {}, |()| ())
        });
        let place = match idle {
            Ok(()) => {
                self.is_proven = true;
                Place::Home
            }
            // Also for a session that has ended.
            Err(_) => Place::Shared,
        };
        self.come_home(place);
    }

    /// Maps the whole allocation for the program.
    pub fn come_home(&mut self, place: Place) {
        self.place = place;
        self.forget_asides();
        self.show(0, self.parts());
    }

    /// Maps parts for the program, and wakes the threads that wait for them.
    pub fn show(&self, part: usize, count: usize) {
        let pages = self.pages(part, count);
        let home = self.home + part as u64 * PART;
        let shown = self.session.map_again(pages.start, home, pages.bytes());
        if let Err(error) = shown {
            log::error!("managed memory cannot be mapped: {error}");
            std::process::abort();
        }
        wake(pages.start, pages.bytes());
    }

    /// Returns true if the program uses as many parts as it may.
    pub fn is_full(&self) -> bool {
        let runs = self.runs(Part::is_mapped).into_iter();
        // Mirrored parts come to the program many at once, in one mapping.
        let mappings = runs.map(|(_, count)| if self.is_mirrored() { 1 } else { count });
        mappings.sum::<usize>() > MOST_USED
    }

    /// Serves an access to a part that is absent.
    pub fn absent_access(&mut self, part: usize, writes: bool) -> Fetched {
        let refreshed = match self.sides().get(part) {
            Some(Part::Copied) => self.refresh(part),
            _ => None,
        };
        let fetched = refreshed.unwrap_or_else(|| self.fetch(part));
        if writes && self.sides().get(part) == Some(&Part::Shown) {
            self.let_write(part);
        }
        // Only now: a thread that finds its part protected would be noticed a second time, perhaps when it is away again.
        wake(self.base, self.bytes);
        fetched
    }

    /// Fetches the part of an access, and those behind it if accesses are sequential.
    fn fetch(&mut self, part: usize) -> Fetched {
        if !matches!(self.place, Place::Device { .. }) {
            return Fetched::Done;
        }
        let (expected, before) = self.next;
        let wanted = if part == expected {
            (before * 2).clamp(1, MOST_FETCHED)
        } else {
            1
        };
        let behind = self.sides()[part..].iter().take(wanted).skip(1);
        let count = 1 + behind.take_while(|part| **part == Part::Absent).count();
        gate::close();
        let fetched = wait_until(PATIENCE, || {
            self.renew_mirror()?;
            self.fetch_parts(part, count, false)
        });
        match fetched {
            Ok(()) => {
                self.next = (part + count, count);
                Fetched::Done
            }
            Err(CuError::NOT_READY) => Fetched::Busy,
            Err(_) => {
                // The session has ended, or its context is dead.
                self.come_home(Place::Shared);
                Fetched::Done
            }
        }
    }

    pub fn fetch_parts(&mut self, part: usize, count: usize, concurrent: bool) -> Result {
        let pages = self.pages(part, count);
        let message = ManagedFetch {
            address: DevicePtr(pages.start),
            bytes: pages.bytes(),
            concurrent: concurrent.into(),
        };
        self.session.request_after_end(&message, |()| ())?;
        self.drop_copies(part, count);
        if concurrent || !self.is_mirrored() {
            self.set(part, count, Part::Used);
            self.show(part, count);
        } else {
            self.show_protected(part, count);
        }
        Ok(())
    }
}

/// Returns the runs of parts on such a side: first part and number.
fn runs(parts: &[Part], is: impl Fn(Part) -> bool) -> Vec<(usize, usize)> {
    let mut part = 0;
    let runs = parts
        .chunk_by(|one, next| is(*one) == is(*next))
        .map(|run| {
            let first = part;
            part += run.len();
            (is(run[0]), first, run.len())
        });
    runs.filter(|(wanted, ..)| *wanted)
        .map(|(_, first, count)| (first, count))
        .collect()
}

/// Wakes the threads that wait for pages in a range.
pub(super) fn wake(address: u64, bytes: u64) {
    let woken = FAULTS
        .as_ref()
        .zip(Pages::around(address, bytes))
        .map(|(faults, pages)| faults.wake(pages));
    if let Some(Err(error)) = woken {
        log::error_once!("threads that wait for managed memory cannot be woken: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_the_parts_that_the_program_reaches() {
        use Part::{Absent, Copied, Shown, Used};
        let found = |parts: &[Part]| runs(parts, Part::is_mapped);
        assert_eq!(found(&[]), []);
        assert_eq!(found(&[Absent, Copied]), []);
        assert_eq!(found(&[Used, Shown, Absent, Used]), [(0, 2), (3, 1)]);
        assert_eq!(found(&[Copied, Shown, Shown]), [(1, 2)]);
    }
}
