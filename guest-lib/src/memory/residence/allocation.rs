//! One allocation that changes sides: its places, and the steps between them.

use std::time::{Duration, Instant};

use wormhole_api::{DevicePtr, ManagedFetch, ManagedIdle, ManagedPlace, ManagedPush};

use super::{FAULTS, PART, PATIENCE, SETTLING};
use crate::error::{CuError, Result};
use crate::log;
use crate::pages::Pages;
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
    Device { used: Vec<bool> },
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
}

/// Calls `ready`, once the ring contains all work, until it succeeds, fails or the patience is over.
fn wait_until(patience: Duration, mut ready: impl FnMut() -> Result) -> Result {
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

    fn pages(&self, part: usize, count: usize) -> Pages {
        let start = self.base + part as u64 * PART;
        Pages {
            start,
            end: start + count as u64 * PART,
        }
    }

    /// Gives the device what the program uses.
    pub fn give(&mut self) {
        match &self.place {
            Place::Shared => {}
            Place::Home => {
                if !self.withhold(0, self.parts()) {
                    self.come_home(Place::Shared);
                    return;
                }
                self.place = Place::Watched;
                self.place_on_device();
            }
            Place::Watched => self.place_on_device(),
            Place::Device { used } => {
                let runs: Vec<_> = runs(used);
                for (part, count) in runs {
                    self.push(part, count);
                }
            }
        }
    }

    /// Puts a watched allocation on the device, if that is known to be right and the device is idle.
    fn place_on_device(&mut self) {
        if !self.is_proven {
            return;
        }
        let message = ManagedPlace {
            address: DevicePtr(self.base),
        };
        // No work may come behind the message before it is answered.
        gate::close();
        let session = self.session;
        match wait_until(SETTLING, || session.request_after_end(&message, |()| ())) {
            Ok(()) => {
                let used = vec![false; self.parts()];
                self.place = Place::Device { used };
            }
            Err(CuError::NOT_READY) => {}
            Err(error) => {
                log::debug!("managed memory stays on the host: {error}");
                self.come_home(Place::Shared);
            }
        }
    }

    /// Makes parts absent. Returns false if the system refuses.
    fn withhold(&self, part: usize, count: usize) -> bool {
        let Some(faults) = FAULTS.as_ref() else {
            return false;
        };
        // SAFETY: this library has mapped the home there, and the service maps what the program accesses from now on.
        let withheld = unsafe { faults.withhold(self.pages(part, count)) };
        withheld
            .inspect_err(|error| {
                log::error_once!("managed memory cannot be taken away from the program: {error}");
            })
            .is_ok()
    }

    /// Takes parts from the program, and copies them to the device.
    pub fn push(&mut self, part: usize, count: usize) {
        if !self.withhold(part, count) {
            log::error!(
                "managed memory is in use by program and device at once: this process ends"
            );
            std::process::abort();
        }
        if let Place::Device { used } = &mut self.place {
            used[part..part + count].fill(false);
        }
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
        self.show(0, self.parts());
    }

    /// Maps parts for the program, and wakes the threads that wait for them.
    fn show(&self, part: usize, count: usize) {
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
        match &self.place {
            Place::Device { used } => used.iter().filter(|used| **used).count() > MOST_USED,
            Place::Home | Place::Watched | Place::Shared => false,
        }
    }

    /// Fetches the part of an access, and those behind it if accesses are sequential.
    pub fn fetch(&mut self, part: usize) -> Fetched {
        let Place::Device { used } = &self.place else {
            return Fetched::Done;
        };
        let (expected, before) = self.next;
        let wanted = if part == expected {
            (before * 2).clamp(1, MOST_FETCHED)
        } else {
            1
        };
        let absent = used[part..].iter().take(wanted).take_while(|used| !**used);
        let count = absent.count();
        gate::close();
        match wait_until(PATIENCE, || self.fetch_parts(part, count, false)) {
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
        if let Place::Device { used } = &mut self.place {
            used[part..part + count].fill(true);
        }
        self.show(part, count);
        Ok(())
    }
}

/// Returns the runs of parts that are in use: first part and number.
fn runs(used: &[bool]) -> Vec<(usize, usize)> {
    let mut part = 0;
    let runs = used.chunk_by(|one, next| one == next).map(|run| {
        let first = part;
        part += run.len();
        (run[0], first, run.len())
    });
    runs.filter(|(used, ..)| *used)
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
    fn runs_are_the_parts_in_use() {
        let found = |used: &[u8]| {
            let used: Vec<bool> = used.iter().map(|used| *used == 1).collect();
            runs(&used)
        };
        assert_eq!(found(&[]), []);
        assert_eq!(found(&[0, 0]), []);
        assert_eq!(found(&[1, 1, 0, 1]), [(0, 2), (3, 1)]);
        assert_eq!(found(&[0, 1, 1]), [(1, 2)]);
    }
}
