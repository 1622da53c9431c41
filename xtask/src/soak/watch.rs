//! Watches lanes and memory from outside, and takes a dump of a lane that stands.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::family::{Process, Table, own_number};
use super::heartbeat::Heartbeat;
use super::judge::{Judge, Pause};
use super::lane::{Lane, Soak};
use super::members::Members;
use super::memory::Memory;
use super::shared::SharedBackend;
use super::stop::Stop;
use super::{Load, STALL};
use crate::command::step;

/// Interval between two looks.
pub const INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two samples of memory.
const SAMPLE: Duration = Duration::from_secs(10);
/// Time for which a process may be an orphan.
const ORPHANED: Duration = Duration::from_secs(60);
/// Time within which a supervisor and its workers must write a dump.
const ANSWER: Duration = Duration::from_secs(1);

/// Observations of a lane's current run.
#[derive(Clone, Debug)]
struct Seen {
    child: i32,
    judge: Judge,
    /// Length of the supervisor's log at the first request for a dump during the pause. A second dump shows what has
    /// not moved since.
    asked: Option<usize>,
    /// Line about a pause that is too long.
    dumped: Option<String>,
}

/// A pause of a lane that has ended.
#[derive(Clone, Debug)]
struct Ended {
    pause: Pause,
    dumped: Option<String>,
}

impl Ended {
    /// Returns for how long the lane stood while the machine did not.
    fn stood(&self, heartbeat: &Heartbeat) -> Duration {
        self.pause.stood(|begin, end| heartbeat.missing(begin, end))
    }
}

/// Sends SIGUSR1 to the supervisors of a lane, which makes them dump all waits to their logs.
fn ask(members: &Members<'_>) {
    for process in members.supervisors() {
        if let Some(pid) = Pid::from_raw(process.pid) {
            let _ = kill_process(pid, Signal::USR1);
        }
    }
}

/// Returns the end of a log from byte `from`, once the log has stopped growing or [`ANSWER`] has passed.
fn read_stable(log: &Path, from: usize) -> String {
    let deadline = Instant::now() + ANSWER;
    let mut length = 0;
    loop {
        std::thread::sleep(ANSWER / 5);
        let text = fs::read(log).unwrap_or_default();
        if Instant::now() > deadline || (text.len() > from && text.len() == length) {
            let text = text.get(from..).unwrap_or_default();
            return String::from_utf8_lossy(text).into_owned();
        }
        length = text.len();
    }
}

#[derive(Debug)]
pub struct Watch<'a> {
    soak: &'a Soak,
    lanes: &'a [Arc<Lane>],
    backend: &'a SharedBackend,
    heartbeat: &'a Heartbeat,
    load: &'a Load,
    start: Instant,
    seen: Vec<Option<Seen>>,
    pauses: Vec<Ended>,
    memory: Memory,
    next_sample: Instant,
    /// Orphans by process id and start time, each with the time of its first sighting.
    orphans: BTreeMap<(i32, u64), Instant>,
    gaps_seen: usize,
    dumps: usize,
    wrong: Vec<String>,
    /// The process to stop, if this is a test of the judge.
    stop: Option<Stop>,
}

impl<'a> Watch<'a> {
    pub fn new(
        soak: &'a Soak,
        lanes: &'a [Arc<Lane>],
        backend: &'a SharedBackend,
        heartbeat: &'a Heartbeat,
        load: &'a Load,
        stop: Option<Stop>,
    ) -> Self {
        Self {
            soak,
            lanes,
            backend,
            heartbeat,
            load,
            start: Instant::now(),
            seen: vec![None; lanes.len()],
            pauses: Vec::new(),
            memory: Memory::default(),
            next_sample: Instant::now(),
            orphans: BTreeMap::new(),
            gaps_seen: 0,
            dumps: 0,
            wrong: Vec::new(),
            stop,
        }
    }

    pub fn look(&mut self) {
        let table = Table::read();
        self.soak.spawned.reap_orphans(&table);
        for index in 0..self.lanes.len() {
            self.look_at(index, &table);
        }
        self.look_for_orphans(&table);
        for gap in self.heartbeat.since(&mut self.gaps_seen) {
            step(&format!(
                "{:7.1} s: the beat of {} was missing for {:.1} s ({:.1} s with suspension, {:.1} s stolen)",
                gap.begin.duration_since(self.start).as_secs_f64(),
                gap.kind,
                gap.length.as_secs_f64(),
                gap.with_suspension.as_secs_f64(),
                gap.stolen.as_secs_f64(),
            ));
        }
        if Instant::now() >= self.next_sample {
            self.next_sample = Instant::now() + SAMPLE;
            self.memory.sample(&table, self.backend.launcher);
        }
    }

    fn look_at(&mut self, index: usize, table: &Table) {
        let lane = &self.lanes[index];
        let current = lane.current.lock().clone();
        let child = current.as_ref().map(|current| current.child);
        if let Some(seen) = self.seen[index].take_if(|seen| Some(seen.child) != child) {
            let pause = seen.judge.end(Instant::now());
            self.end_pause(index, pause, seen.dumped);
        }
        let Some(current) = current else {
            return;
        };
        let launcher = lane.backend.as_ref().map(|backend| backend.launcher);
        let members = Members::of(table, current.child, launcher);
        if let Some(stop) = &mut self.stop {
            stop.look(index, &current, &members);
        }
        let look = members.look(self.load.share());
        let Some(seen) = &mut self.seen[index] else {
            self.seen[index] = Some(Seen {
                child: current.child,
                judge: Judge::new(look),
                asked: None,
                dumped: None,
            });
            return;
        };
        if let Some(pause) = seen.judge.look(look) {
            seen.asked = None;
            let dumped = seen.dumped.take();
            self.end_pause(index, pause, dumped);
            return;
        }
        let stood = seen.judge.pause().stood(|_, _| Duration::ZERO);
        let log = match &lane.backend {
            Some(backend) => backend.log().to_owned(),
            None => lane.log(self.soak),
        };
        if stood > STALL / 2 && seen.asked.is_none() {
            let length = fs::metadata(&log).map_or(0, |log| log.len());
            seen.asked = Some(usize::try_from(length).unwrap_or(usize::MAX));
            ask(&members);
        }
        if stood <= STALL || seen.dumped.is_some() {
            return;
        }
        let (executed, eager) = seen.judge.executed();
        let text = format!(
            "lane {index} has stood for {:.1} s of {:.1} s in {} (started {:.1} s ago): it executed {} ms, an eager \
             thread {} ms{}",
            stood.as_secs_f64(),
            seen.judge.pause().length().as_secs_f64(),
            current.what,
            current.since.elapsed().as_secs_f64(),
            executed.as_millis(),
            eager.as_millis(),
            members.stopped(),
        );
        seen.dumped = Some(text.clone());
        let from = seen.asked.unwrap_or(0);
        step(&text);
        ask(&members);
        // Described before the supervisors' logs are read, because those take a while.
        let processes: String = members.all().map(Process::describe).collect();
        let said = read_stable(&log, from);
        self.dump(&format!("{text}\n{said}\n{processes}"));
    }

    /// Records the end of a pause: the lane moves again, or its run has ended.
    fn end_pause(&mut self, index: usize, pause: Pause, dumped: Option<String>) {
        if dumped.is_some() {
            let length = pause.length().as_secs_f64();
            step(&format!("lane {index} goes on after {length:.1} s"));
        }
        if pause.length() > 2 * INTERVAL {
            self.pauses.push(Ended { pause, dumped });
        }
    }

    fn dump(&mut self, text: &str) {
        self.dumps += 1;
        let path = self.soak.folder.join(format!("dump-{}.txt", self.dumps));
        match fs::write(&path, text) {
            Ok(()) => step(&format!("dump in {}", path.display())),
            Err(error) => step(&format!("no dump in {}: {error}", path.display())),
        }
    }

    /// Looks for processes that have long outlived their run.
    fn look_for_orphans(&mut self, table: &Table) {
        let now = Instant::now();
        let orphans: Vec<&Process> = table
            .children(own_number())
            .filter(|process| process.state != 'Z' && !self.soak.spawned.contains(process.pid))
            .collect();
        let names: BTreeMap<(i32, u64), &Process> = orphans
            .into_iter()
            .map(|process| ((process.pid, process.started), process))
            .collect();
        self.orphans.retain(|key, _| names.contains_key(key));
        for (key, process) in names {
            let since = *self.orphans.entry(key).or_insert(now);
            if since < self.start + ORPHANED || now.duration_since(since) < ORPHANED {
                continue;
            }
            self.orphans.insert(key, now + ORPHANED * 1000);
            let text = format!(
                "process {} ({}) has outlived its run",
                process.pid, process.name
            );
            self.dump(&format!("{text}\n{}", process.describe()));
            self.wrong.push(text);
        }
    }

    /// Returns all errors, after all lanes have ended.
    pub fn finish(&mut self) -> Vec<String> {
        self.memory.sample(&Table::read(), self.backend.launcher);
        let mut wrong = std::mem::take(&mut self.wrong);
        wrong.extend(self.memory.growth());
        // Computed only here, because a missing beat may be recorded after the lane continues.
        let stalls: Vec<String> = self
            .pauses
            .iter()
            .filter(|ended| ended.stood(self.heartbeat) > STALL)
            .map(|ended| {
                format!(
                    "a lane stood for {:.1} s, beside the time in which the heartbeat was missing: {}",
                    ended.stood(self.heartbeat).as_secs_f64(),
                    ended.dumped.as_deref().unwrap_or("no dump was taken")
                )
            })
            .collect();
        match self.stop.take() {
            None => wrong.extend(stalls),
            Some(stop) => wrong.extend(stop.missed(&stalls)),
        }
        wrong
    }

    /// Returns the longest time for which any lane stood while the machine did not.
    pub fn longest_stand(&self) -> Duration {
        let stood = self.pauses.iter().map(|ended| ended.stood(self.heartbeat));
        stood.max().unwrap_or_default()
    }

    /// Returns the longest pause of any lane, whatever its cause.
    pub fn longest_pause(&self) -> Duration {
        let lengths = self.pauses.iter().map(|ended| ended.pause.length());
        lengths.max().unwrap_or_default()
    }

    /// Counts the pauses longer than [`STALL`] in which the lane stood for less: it was starved, or the machine paused.
    pub fn starved(&self) -> usize {
        let starved =
            |ended: &&Ended| ended.pause.length() > STALL && ended.stood(self.heartbeat) <= STALL;
        self.pauses.iter().filter(starved).count()
    }

    /// Formats the growth of memory, for the closing line.
    pub fn memory(&self) -> String {
        self.memory.to_string()
    }
}
