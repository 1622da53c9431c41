//! The thread that gives memory back: freeing gigabytes takes long, and the event loop waits for nobody. Tenants
//! take turns, so that what one gives back holds up no other's.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::mpsc::{self, Receiver, Sender};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wormhole_link::tasks;
use wormhole_ring::session::Run;

use super::{Id, session_file};

/// Segments that are given back in one turn: 64 MiB.
const SLICE: u32 = 32;

/// Memory to give back.
#[derive(Debug)]
struct Order {
    tenant: Id,
    file: OwnedFd,
    left: VecDeque<Run>,
    told: Option<Told>,
}

/// What the event loop is told when an order is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The run of a session that goes on may be granted again, unless it cannot be scrubbed.
    Scrubbed { session: Id, run: Run },
    /// The file that a session asked to let go of, by this number, is closed.
    Forgotten { session: Id, request: u32 },
}

/// An order is finished.
#[derive(Debug)]
struct Outcome {
    tenant: Id,
    told: Option<Told>,
    result: io::Result<()>,
}

/// The event loop's handle on the thread. It is readable when something is scrubbed.
#[derive(Debug)]
pub struct Scrubber {
    orders: Sender<Order>,
    outcomes: Receiver<Outcome>,
    bell: EventFd,
    /// Files that the thread holds.
    held: BTreeMap<Id, usize>,
}

impl Scrubber {
    /// Starts the thread, with the calling thread's signal mask. It ends with this value.
    ///
    /// # Errors
    /// No descriptor or no thread can be had.
    pub fn new() -> io::Result<Self> {
        let bell = EventFd::new(EFD_NONBLOCK)?;
        let theirs = bell.try_clone()?;
        let (orders, inbox) = mpsc::channel();
        let (outbox, outcomes) = mpsc::channel();
        tasks::spawn("scrubber", move || serve(&inbox, &outbox, &theirs))?;
        Ok(Self {
            orders,
            outcomes,
            bell,
            held: BTreeMap::new(),
        })
    }

    /// Has a run of a session that goes on scrubbed; [`Scrubber::finished`] tells when that is done.
    pub fn scrub(&mut self, tenant: Id, session: Id, file: OwnedFd, run: Run) {
        self.order(Order {
            tenant,
            file,
            left: VecDeque::from([run]),
            told: Some(Told::Scrubbed { session, run }),
        });
    }

    /// Has the runs of a session that has ended scrubbed.
    pub fn discard(&mut self, tenant: Id, file: OwnedFd, runs: Vec<Run>) {
        if runs.is_empty() {
            return;
        }
        self.order(Order {
            tenant,
            file,
            left: runs.into(),
            told: None,
        });
    }

    /// Lets go of a file, which may be the last hold on its memory.
    pub fn forget(&mut self, tenant: Id, file: OwnedFd) {
        self.let_go(tenant, file, None);
    }

    /// The same for a session that waits for it; [`Scrubber::finished`] tells when that is done. False if it is done
    /// already.
    pub fn forget_for(&mut self, tenant: Id, file: OwnedFd, session: Id, request: u32) -> bool {
        self.let_go(tenant, file, Some(Told::Forgotten { session, request }))
    }

    fn let_go(&mut self, tenant: Id, file: OwnedFd, told: Option<Told>) -> bool {
        self.order(Order {
            tenant,
            file,
            left: VecDeque::new(),
            told,
        })
    }

    /// False if there is no thread any more.
    fn order(&mut self, order: Order) -> bool {
        let tenant = order.tenant;
        let taken = self.orders.send(order).is_ok();
        if taken {
            *self.held.entry(tenant).or_default() += 1;
        } else {
            tracing::error!("the thread that gives memory back has ended");
        }
        taken
    }

    /// What was finished since the last call, and whether it could be done.
    pub fn finished(&mut self) -> Vec<(Told, io::Result<()>)> {
        // Empty when nothing was.
        let _ = self.bell.read();
        let mut finished = Vec::new();
        for Outcome {
            tenant,
            told,
            result,
        } in self.outcomes.try_iter()
        {
            if let Some(held) = self.held.get_mut(&tenant) {
                *held -= 1;
                if *held == 0 {
                    self.held.remove(&tenant);
                }
            }
            finished.extend(told.map(|told| (told, result)));
        }
        finished
    }

    /// Files of a tenant that are held until their memory is given back.
    pub fn held_for(&self, tenant: Id) -> usize {
        self.held.get(&tenant).copied().unwrap_or(0)
    }

    /// Files that are held for all of them.
    pub fn held(&self) -> usize {
        self.held.values().sum()
    }
}

impl fmt::Display for Scrubber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} files are being given back", self.held())
    }
}

impl AsRawFd for Scrubber {
    fn as_raw_fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }
}

/// The orders, by tenant: the one whose turn it is comes first.
#[derive(Debug, Default)]
struct Queue {
    tenants: VecDeque<(Id, VecDeque<Order>)>,
}

impl Queue {
    fn add(&mut self, order: Order) {
        let mine = self
            .tenants
            .iter_mut()
            .find(|(tenant, _)| *tenant == order.tenant);
        match mine {
            // Somebody may wait for it, and it is done at once.
            Some((_, orders)) if order.left.is_empty() => orders.push_front(order),
            Some((_, orders)) => orders.push_back(order),
            None => self
                .tenants
                .push_back((order.tenant, VecDeque::from([order]))),
        }
    }

    /// Has `scrub` give back the next slice; what became of its order if it was the last.
    fn turn(&mut self, scrub: impl FnOnce(&OwnedFd, Run) -> io::Result<()>) -> Option<Outcome> {
        let (tenant, mut orders) = self.tenants.pop_front()?;
        let outcome = orders
            .pop_front()
            .and_then(|order| match order.turn(scrub) {
                Ok(outcome) => Some(outcome),
                Err(order) => {
                    orders.push_front(order);
                    None
                }
            });
        if !orders.is_empty() {
            self.tenants.push_back((tenant, orders));
        }
        outcome
    }
}

impl Order {
    /// Gives back a slice: what became of the order, or what is left of it.
    fn turn(
        mut self,
        scrub: impl FnOnce(&OwnedFd, Run) -> io::Result<()>,
    ) -> Result<Outcome, Self> {
        let mut result = Ok(());
        if let Some(run) = self.left.front_mut() {
            let slice = Run {
                first: run.first,
                count: run.count.min(SLICE),
            };
            run.first += slice.count;
            run.count -= slice.count;
            if run.count == 0 {
                self.left.pop_front();
            }
            result = scrub(&self.file, slice);
            match (&result, self.told) {
                (Err(error), None) => {
                    tracing::error!("{slice} of an ended session cannot be scrubbed: {error}");
                }
                // It is not granted again, and the rest goes with the session.
                (Err(_), Some(_)) => self.left.clear(),
                (Ok(()), _) => {}
            }
        }
        if !self.left.is_empty() {
            return Err(self);
        }
        // Closed before anybody is told.
        drop(self.file);
        Ok(Outcome {
            tenant: self.tenant,
            told: self.told,
            result,
        })
    }
}

fn serve(orders: &Receiver<Order>, outcomes: &Sender<Outcome>, bell: &EventFd) {
    let mut queue = Queue::default();
    while let Ok(order) = orders.recv() {
        queue.add(order);
        while !queue.tenants.is_empty() {
            for order in orders.try_iter() {
                queue.add(order);
            }
            let Some(outcome) = queue.turn(session_file::scrub) else {
                continue;
            };
            if outcomes.send(outcome).is_err() {
                return;
            }
            if let Err(error) = bell.write(1) {
                tracing::error!("scrubbed memory cannot be announced: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wormhole_ring::layout::SEGMENT_BYTES;

    fn order(tenant: Id, session: Option<Id>, runs: &[Run]) -> Order {
        Order {
            tenant,
            file: std::fs::File::open("/dev/null").unwrap().into(),
            left: runs.iter().copied().collect(),
            told: session.map(|session| Told::Scrubbed {
                session,
                run: runs[0],
            }),
        }
    }

    fn run(first: u32, count: u32) -> Run {
        Run { first, count }
    }

    #[test]
    fn a_neighbours_run_waits_for_one_slice_and_not_for_gigabytes() {
        let mut queue = Queue::default();
        queue.add(order(1, None, &[run(1, 1000 * SLICE)]));
        queue.add(order(1, Some(10), &[run(1, 1000 * SLICE)]));
        assert!(queue.turn(|_, _| Ok(())).is_none());
        queue.add(order(2, Some(20), &[run(7, SLICE)]));
        let outcome = (0..2).find_map(|_| queue.turn(|_, _| Ok(()))).unwrap();
        let scrubbed = Told::Scrubbed {
            session: 20,
            run: run(7, SLICE),
        };
        assert_eq!(outcome.told, Some(scrubbed));
    }

    #[test]
    fn a_file_to_close_does_not_wait_for_its_tenants_gigabytes() {
        let mut queue = Queue::default();
        queue.add(order(1, None, &[run(1, 1000 * SLICE)]));
        assert!(queue.turn(|_, _| Ok(())).is_none());
        let told = Some(Told::Forgotten {
            session: 10,
            request: 7,
        });
        queue.add(Order {
            told,
            ..order(1, None, &[])
        });
        let outcome = queue.turn(|_, _| Ok(())).unwrap();
        assert_eq!(outcome.told, told);
        assert!(!queue.tenants.is_empty());
    }

    #[test]
    fn every_segment_is_scrubbed_once_and_the_order_then_finished() {
        let runs = [run(3, 2 * SLICE + 1), run(5 * SLICE, 1)];
        let mut queue = Queue::default();
        queue.add(order(1, None, &runs));
        let mut scrubbed = Vec::new();
        while queue
            .turn(|_, slice| {
                assert!(slice.count <= SLICE);
                scrubbed.extend(slice.first..slice.first + slice.count);
                Ok(())
            })
            .is_none()
        {}
        let wanted: Vec<u32> = runs
            .iter()
            .flat_map(|run| run.first..run.first + run.count)
            .collect();
        assert_eq!(scrubbed, wanted);
        assert!(queue.tenants.is_empty());
    }

    #[test]
    fn what_cannot_be_scrubbed_is_told_of_a_session_that_goes_on() {
        let mut queue = Queue::default();
        queue.add(order(1, Some(10), &[run(1, 3 * SLICE)]));
        let failed = |_: &OwnedFd, _| Err(io::Error::from_raw_os_error(libc::EPERM));
        let outcome = queue.turn(failed).unwrap();
        assert!(outcome.result.is_err());
        let scrubbed = Told::Scrubbed {
            session: 10,
            run: run(1, 3 * SLICE),
        };
        assert_eq!(outcome.told, Some(scrubbed));
        assert!(queue.tenants.is_empty());
    }

    #[test]
    fn files_are_counted_until_their_memory_is_given_back() {
        let mut scrubber = Scrubber::new().unwrap();
        let file =
            || OwnedFd::from(session_file::SessionFile::new(4 * SEGMENT_BYTES as u64).unwrap());
        scrubber.discard(1, file(), vec![run(1, 1), run(3, 1)]);
        scrubber.scrub(2, 20, file(), run(2, 1));
        assert_eq!((scrubber.held(), scrubber.held_for(1)), (2, 1));
        let finished = all_finished(&mut scrubber);
        assert!(
            matches!(
                &finished[..],
                [(Told::Scrubbed { session: 20, .. }, Ok(()))]
            ),
            "{finished:?}"
        );
    }

    fn all_finished(scrubber: &mut Scrubber) -> Vec<(Told, io::Result<()>)> {
        let mut finished = Vec::new();
        while scrubber.held() > 0 {
            finished.extend(scrubber.finished());
            std::thread::yield_now();
        }
        finished
    }

    /// How many descriptors of this process name a pipe. Another process, which a test beside this one forked, may have
    /// copies for a while.
    fn descriptors_of(pipe: &io::PipeReader) -> usize {
        let folder = std::path::Path::new("/proc/self/fd");
        let name = |entry: &std::path::Path| std::fs::read_link(entry).ok();
        let wanted = name(&folder.join(pipe.as_raw_fd().to_string())).unwrap();
        std::fs::read_dir(folder)
            .unwrap()
            .flatten()
            .filter(|entry| name(&entry.path()).as_ref() == Some(&wanted))
            .count()
    }

    #[test]
    fn a_file_is_closed_when_its_session_is_told() {
        let mut scrubber = Scrubber::new().unwrap();
        for request in 0..100 {
            let (reader, writer) = io::pipe().unwrap();
            scrubber.forget_for(1, writer.into(), 10, request);
            let finished = all_finished(&mut scrubber);
            let [
                (
                    Told::Forgotten {
                        session,
                        request: told,
                    },
                    Ok(()),
                ),
            ] = finished[..]
            else {
                panic!("{finished:?}");
            };
            assert_eq!((session, told), (10, request));
            assert_eq!(descriptors_of(&reader), 1, "the reader's own");
        }
    }
}
