//! Checker: finds races between threads of a block in shared memory, and reads of unwritten shared memory.
//!
//! Two accesses of a byte by different threads are a race if one of them writes, they are not both atomic, and no
//! synchronization orders them. These order accesses: barriers of the block, with and without counts, among the
//! threads that arrive at them; collective operations of a warp, among the member lanes; `mbarrier`s and atomic
//! operations, from one on an address to a later one on the same, in shared memory or any other; volatile and other
//! strong loads and stores, which count as atomic. An asynchronous copy is an access by a separate actor, which the
//! thread that started the copy joins when it waits for it. Two writes of the same value are no race.
//!
//! Vector clocks track the order between threads. When all threads of a block have arrived at a barrier, all
//! accesses before it are ordered before all accesses after it, and the check of the block starts anew.

mod clock;
mod watch;

use std::collections::{HashMap, HashSet};
use std::fmt;

use clock::Clock;
pub(super) use watch::Watch;
use wormhole_lock::Mutex;

use super::barrier::{Barriers, COUNT};
use super::launch::Launch;
use super::memory::Lanes;
use crate::alu::LANES;
use crate::decode::insn::Pc;

/// Maximum number of findings reported for one launch.
const MOST_FINDINGS: usize = 32;
/// Bytes of the unit in which memory is tracked.
const WORD: usize = 4;
/// Maximum number of addresses of atomic operations that the checker tells apart in a block. All others share one
/// clock, which may hide a race but never reports a false one.
const MOST_OBJECTS: usize = 1 << 14;
/// Maximum number of copy groups tracked separately for one thread; the oldest ones beyond it are merged.
const MOST_GROUPS: usize = 256;

/// Kind of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    Read,
    Write,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "reads",
            Self::Write => "writes",
        })
    }
}

/// Location of an access: instruction and thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Site {
    pub pc: Pc,
    pub thread: u32,
}

/// Recorded access, with which later ones are compared.
#[derive(Debug, Clone, Copy)]
struct Access {
    site: Site,
    /// Actor in the clocks: the thread's own number, or that of its asynchronous copies.
    actor: u32,
    time: u32,
    /// Mask of the bytes of the word.
    bytes: u8,
    atomic: bool,
    /// Value written.
    value: u32,
}

#[derive(Debug, Default)]
struct Word {
    /// Number of the stretch between barriers of the whole block in which the accesses were made.
    stretch: u32,
    /// Mask of the bytes written since the block began.
    written: u8,
    writes: Vec<Access>,
    reads: Vec<Access>,
}

/// Clocks at a barrier of the block.
#[derive(Debug, Default)]
struct Meeting {
    /// Generation in progress.
    generation: u32,
    /// Joined clocks of the threads that have arrived.
    coming: Clock,
    waiting: u32,
    /// Clock that waiting threads join when they continue.
    known: Clock,
}

/// Access to be checked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub site: Site,
    pub kind: Kind,
    pub atomic: bool,
    /// Whether the thread's asynchronous copies make the access.
    pub asynchronous: bool,
}

/// State of the checker for one block.
#[derive(Debug)]
pub(super) struct Checker {
    threads: u32,
    stretch: u32,
    words: Vec<Word>,
    /// Clock of each thread, with entries for all threads and, after them, for all threads' copies.
    clocks: Vec<Clock>,
    /// Current time of each thread, then of each thread's copies.
    times: Vec<u32>,
    /// Times of each thread's copies that it has not waited for, by group; the last group is open.
    copies: Vec<Vec<u32>>,
    meetings: Vec<Meeting>,
    /// Clock of each address at its last atomic operation.
    objects: HashMap<u64, Clock>,
    /// Clock that all other addresses share.
    others: Clock,
}

/// Findings reported in a launch, so that each is reported once.
#[derive(Debug, Default)]
pub(super) struct Findings(Mutex<HashSet<[(Pc, Kind); 2]>>);

impl Findings {
    /// Records a race between two accesses, in any order. Returns whether it is new and to be reported.
    fn is_new(&self, a: (Pc, Kind), b: (Pc, Kind)) -> bool {
        let found = [a.min(b), a.max(b)];
        let mut all = self.0.lock();
        all.len() < MOST_FINDINGS && all.insert(found)
    }
}

/// Program counter that stands for no access.
const NOWHERE: Pc = Pc::MAX;

impl Checker {
    pub fn new(launch: &Launch<'_>) -> Self {
        // Products of matrices access memory for all lanes, including those without a thread.
        let threads = launch.warps() * 32;
        let mut checker = Self {
            threads,
            stretch: 0,
            words: Vec::new(),
            clocks: Vec::new(),
            times: vec![0; 2 * threads as usize],
            copies: vec![vec![0]; threads as usize],
            meetings: Vec::new(),
            objects: HashMap::new(),
            others: Clock::default(),
        };
        checker
            .words
            .resize_with(launch.shared_bytes.div_ceil(WORD), Word::default);
        checker.meetings.resize_with(COUNT, Meeting::default);
        checker.begin_stretch();
        checker
    }

    /// Starts a new stretch, and drops all state that is ordered before it.
    fn begin_stretch(&mut self) {
        self.stretch += 1;
        self.times.fill(1);
        self.clocks = (0..self.threads)
            .map(|thread| {
                let mut clock = Clock::default();
                clock.set(thread, 1);
                clock
            })
            .collect();
        self.objects.clear();
        self.others = Clock::default();
        for meeting in &mut self.meetings {
            meeting.coming = Clock::default();
            meeting.known = Clock::default();
        }
    }

    fn tick(&mut self, thread: u32) {
        let time = &mut self.times[thread as usize];
        *time += 1;
        self.clocks[thread as usize].set(thread, *time);
    }

    /// Checks an access of `value.len()` bytes to shared memory. The values of a load are ignored.
    pub fn access(
        &mut self,
        launch: &Launch<'_>,
        block: [u32; 3],
        step: Step,
        at: usize,
        value: &[u8],
    ) {
        let thread = step.site.thread;
        let (actor, time) = if step.asynchronous {
            let actor = self.threads + thread;
            self.times[actor as usize] += 1;
            let time = self.times[actor as usize];
            if let Some(open) = self.copies[thread as usize].last_mut() {
                *open = time;
            }
            (actor, time)
        } else {
            (thread, self.times[thread as usize])
        };
        let mut done = 0;
        while done < value.len() {
            let (index, first) = ((at + done) / WORD, (at + done) % WORD);
            let count = (WORD - first).min(value.len() - done);
            let mut bits = [0; WORD];
            bits[first..first + count].copy_from_slice(&value[done..done + count]);
            let access = Access {
                site: step.site,
                actor,
                time,
                bytes: 0xf >> (WORD - count) << first,
                atomic: step.atomic,
                value: u32::from_le_bytes(bits),
            };
            self.word(launch, block, step.kind, index, access);
            done += count;
        }
    }

    fn word(
        &mut self,
        launch: &Launch<'_>,
        block: [u32; 3],
        kind: Kind,
        index: usize,
        access: Access,
    ) {
        let Some(word) = self.words.get_mut(index) else {
            return;
        };
        if word.stretch != self.stretch {
            word.stretch = self.stretch;
            word.writes.clear();
            word.reads.clear();
        }
        let clock = &self.clocks[access.site.thread as usize];
        let apart = |other: &Access| {
            other.bytes & access.bytes != 0
                && other.actor != access.actor
                && !(other.atomic && access.atomic)
                && clock.get(other.actor) < other.time
        };
        let same = |other: &Access| {
            let both = other.bytes & access.bytes;
            (0..WORD).all(|byte| {
                both >> byte & 1 == 0 || (other.value ^ access.value) >> (8 * byte) & 0xff == 0
            })
        };
        let mut found = None;
        if kind == Kind::Read {
            if let Some(write) = word.writes.iter().find(|other| apart(other)) {
                found = Some((Kind::Write, *write));
            }
        } else if let Some(read) = word.reads.iter().find(|other| apart(other)) {
            found = Some((Kind::Read, *read));
        } else if let Some(write) = word
            .writes
            .iter()
            .find(|other| apart(other) && (other.atomic || access.atomic || !same(other)))
        {
            found = Some((Kind::Write, *write));
        }
        let unwritten = match kind {
            Kind::Read => access.bytes & !word.written,
            Kind::Write => 0,
        };
        if kind == Kind::Write {
            // A later access that races with an earlier one also races with this one, unless only this one is
            // atomic.
            let stays = |other: &Access| {
                other.bytes & !access.bytes != 0 || (access.atomic && !other.atomic)
            };
            word.writes.retain(stays);
            word.reads.retain(stays);
            word.writes.push(access);
        } else {
            let latest = word.reads.iter_mut().rev().take(LANES);
            let own = latest.into_iter().find(|other| {
                other.actor == access.actor
                    && other.bytes == access.bytes
                    && other.atomic == access.atomic
            });
            match own {
                Some(own) => *own = access,
                None => word.reads.push(access),
            }
        }
        if word.reads.len() >= 64.max(2 * self.times.len()) {
            let mut seen = HashSet::new();
            word.reads.reverse();
            word.reads
                .retain(|other| seen.insert((other.actor, other.bytes, other.atomic)));
            word.reads.reverse();
        }
        // Counts the bytes as written, so that a read of unwritten bytes is reported once.
        word.written |= access.bytes;
        if let Some((other_kind, other)) = found {
            race(launch, block, index, (kind, access), (other_kind, other));
        } else if unwritten != 0 {
            unwritten_read(launch, block, index, access, unwritten);
        }
    }

    /// Records an atomic operation on an address: an acquire joins the address's clock, a release joins into it.
    pub fn synchronize(&mut self, thread: u32, address: u64, acquires: bool, releases: bool) {
        let object = object(&mut self.objects, &mut self.others, address);
        let clock = &mut self.clocks[thread as usize];
        if acquires {
            clock.join(object);
        }
        if releases {
            object.join(clock);
            self.tick(thread);
        }
    }

    /// Records that a thread's copies so far are ordered before later operations on an address.
    pub fn copies_arrive(&mut self, thread: u32, address: u64) {
        let actor = self.threads + thread;
        let time = self.times[actor as usize];
        object(&mut self.objects, &mut self.others, address).set(actor, time);
        self.synchronize(thread, address, false, true);
    }

    /// Closes a thread's open group of copies.
    pub fn commit_copies(&mut self, thread: u32) {
        let groups = &mut self.copies[thread as usize];
        groups.push(0);
        if groups.len() > MOST_GROUPS {
            let oldest = groups.remove(0);
            groups[0] = groups[0].max(oldest);
        }
    }

    /// Records that a thread has waited for its copies: all of them, or with `but` all except those of the latest
    /// `but` groups and the open one.
    pub fn wait_for_copies(&mut self, thread: u32, but: Option<u32>) {
        let groups = &mut self.copies[thread as usize];
        let left = but.map_or(0, |but| but as usize + 1);
        let done = groups.len().saturating_sub(left);
        let time = groups.drain(..done).max().unwrap_or(0);
        if groups.is_empty() {
            groups.push(0);
        }
        let actor = self.threads + thread;
        let clock = &mut self.clocks[thread as usize];
        if time > clock.get(actor) {
            clock.set(actor, time);
        }
    }

    /// Joins the clocks of a warp's lanes that have met, each with those of its own set.
    pub fn meet(&mut self, warp: u32, lanes: u32, members: impl Fn(usize) -> u32) {
        let mut left = lanes;
        while left != 0 {
            let set = members(left.trailing_zeros() as usize);
            let together = Lanes(left).filter(|&lane| members(lane) == set);
            let together = together.fold(0, |mask, lane| mask | 1 << lane);
            let mut all = Clock::default();
            let thread = |lane: usize| warp * 32 + u32::try_from(lane).unwrap_or(0);
            for lane in Lanes(together) {
                all.join(&self.clocks[thread(lane) as usize]);
            }
            for lane in Lanes(together) {
                self.clocks[thread(lane) as usize].clone_from(&all);
                self.tick(thread(lane));
            }
            left &= !together;
        }
    }

    /// Records that threads arrive at a barrier, and whether they wait there.
    pub fn arrive(&mut self, id: usize, warp: u32, lanes: u32, waits: bool) {
        for lane in Lanes(lanes) {
            let thread = warp * 32 + u32::try_from(lane).unwrap_or(0);
            self.meetings[id].coming.join(&self.clocks[thread as usize]);
            self.tick(thread);
        }
        if waits {
            self.meetings[id].waiting += lanes.count_ones();
        }
    }

    /// Ends the use of a barrier that has completed.
    pub fn complete_barrier(&mut self, id: usize, barriers: &Barriers) {
        let meeting = &mut self.meetings[id];
        if meeting.generation == barriers.generation(id) {
            return;
        }
        meeting.generation = barriers.generation(id);
        let all = std::mem::take(&mut meeting.waiting) >= barriers.live();
        let coming = std::mem::take(&mut meeting.coming);
        meeting.known.join(&coming);
        let copied = self.copies.iter().all(|groups| groups[..] == [0]);
        if all && copied {
            self.begin_stretch();
        }
    }

    /// Joins a barrier's clock into those of threads that waited there.
    pub fn leave(&mut self, id: usize, warp: u32, lanes: u32) {
        for lane in Lanes(lanes) {
            let thread = warp * 32 + u32::try_from(lane).unwrap_or(0);
            self.clocks[thread as usize].join(&self.meetings[id].known);
        }
    }
}

/// Returns the clock of the last atomic operation on an address.
fn object<'c>(
    objects: &'c mut HashMap<u64, Clock>,
    others: &'c mut Clock,
    address: u64,
) -> &'c mut Clock {
    if objects.len() < MOST_OBJECTS {
        return objects.entry(address).or_default();
    }
    objects.get_mut(&address).unwrap_or(others)
}

fn place(launch: &Launch<'_>, site: Site) -> (u32, [u32; 3]) {
    let line = launch.code.at(site.pc).map_or(0, |insn| insn.line);
    (line, launch.thread_index(site.thread))
}

#[cold]
fn race(
    launch: &Launch<'_>,
    block: [u32; 3],
    word: usize,
    (kind, access): (Kind, Access),
    (other_kind, other): (Kind, Access),
) {
    if !launch
        .findings
        .is_new((access.site.pc, kind), (other.site.pc, other_kind))
    {
        return;
    }
    let at = word * WORD + (access.bytes & other.bytes).trailing_zeros() as usize;
    let ((line, thread), (other_line, other_thread)) =
        (place(launch, access.site), place(launch, other.site));
    let other_did = match other_kind {
        Kind::Read => "read",
        Kind::Write => "wrote",
    };
    print_finding(
        launch,
        &format!(
            "race: kernel `{}`, block {block:?}: thread {thread:?} {kind} byte {at:#x} of shared memory (line {line}), \
             which thread {other_thread:?} {other_did} (line {other_line}); nothing orders the two",
            launch.name,
        ),
    );
}

#[cold]
fn unwritten_read(
    launch: &Launch<'_>,
    block: [u32; 3],
    word: usize,
    access: Access,
    unwritten: u8,
) {
    if !launch
        .findings
        .is_new((access.site.pc, Kind::Read), (NOWHERE, Kind::Read))
    {
        return;
    }
    let at = word * WORD + unwritten.trailing_zeros() as usize;
    let (line, thread) = place(launch, access.site);
    print_finding(
        launch,
        &format!(
            "uninitialised: kernel `{}`, block {block:?}: thread {thread:?} reads byte {at:#x} of shared memory \
             (line {line}), which no thread has written",
            launch.name,
        ),
    );
}

fn print_finding(launch: &Launch<'_>, sentence: &str) {
    launch.output.finding(sentence);
}
