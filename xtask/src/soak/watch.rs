//! Looks at lanes and memory from outside, and takes a dump of a lane that stands.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::family::{Process, SUPERVISOR, Table, executed, locked, own_number};
use super::heartbeat::Heartbeat;
use super::lane::{Lane, Soak};
use super::memory::Memory;
use super::shared::SharedBackend;
use super::{Load, STALL};
use crate::command::step;

/// How often everything is looked at.
pub const INTERVAL: Duration = Duration::from_millis(500);
/// A lane stands that executes less than this part of what an eager thread does. Threads that hand each other one thing
/// after the other get a sixth of it on a machine whose processors are all wanted.
const PART: u32 = 20;
/// A tick of the clock by which `/proc` counts.
const TICK: Duration = Duration::from_millis(10);
/// Between two samples of memory.
const SAMPLE: Duration = Duration::from_secs(10);
/// How long a process may have no parent.
const ORPHANED: Duration = Duration::from_secs(60);

/// When a lane was last seen to execute something, and what had been executed by then.
#[derive(Clone, Debug)]
struct Mark {
    child: i32,
    at: Instant,
    executed: u64,
    eager: Duration,
    /// Its supervisor has been asked once what it waits for, so that the dump can say what has not moved since.
    asked: bool,
    /// Threads that wanted to execute whenever it was looked at.
    starved: Option<BTreeSet<i32>>,
    /// What was said of it when it had stood for too long.
    dumped: Option<String>,
}

/// A lane that stood.
#[derive(Clone, Debug)]
struct Pause {
    begin: Instant,
    length: Duration,
    /// One of its threads wanted to execute all the time, and was not let.
    starved: bool,
    said: Option<String>,
}

impl Pause {
    /// How much of it the heartbeat was missing too.
    fn missing(&self, heartbeat: &Heartbeat) -> Duration {
        heartbeat.missing(self.begin, self.begin + self.length)
    }

    /// Whether it was neither the machine that stood nor its processors that had others to serve.
    fn is_stall(&self, heartbeat: &Heartbeat) -> bool {
        !self.starved && self.length.saturating_sub(self.missing(heartbeat)) > STALL
    }
}

/// Has the supervisors of a family write to their logs what everything waits for.
fn ask(family: &[&Process]) {
    for process in family {
        if process.name.starts_with(SUPERVISOR)
            && let Some(pid) = Pid::from_raw(process.pid)
        {
            let _ = kill_process(pid, Signal::USR1);
        }
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
    marks: Vec<Option<Mark>>,
    pauses: Vec<Pause>,
    memory: Memory,
    next_sample: Instant,
    /// Since when processes have been seen without a parent.
    orphans: BTreeMap<(i32, u64), Instant>,
    gaps_seen: usize,
    dumps: usize,
    wrong: Vec<String>,
}

impl<'a> Watch<'a> {
    pub fn new(
        soak: &'a Soak,
        lanes: &'a [Arc<Lane>],
        backend: &'a SharedBackend,
        heartbeat: &'a Heartbeat,
        load: &'a Load,
    ) -> Self {
        Self {
            soak,
            lanes,
            backend,
            heartbeat,
            load,
            start: Instant::now(),
            marks: vec![None; lanes.len()],
            pauses: Vec::new(),
            memory: Memory::default(),
            next_sample: Instant::now(),
            orphans: BTreeMap::new(),
            gaps_seen: 0,
            dumps: 0,
            wrong: Vec::new(),
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

    /// The processes that work for a lane at the moment.
    fn family<'t>(&self, lane: &Lane, child: i32, table: &'t Table) -> Vec<&'t Process> {
        let mut family = table.family(child);
        if let Some(backend) = &lane.backend {
            family.extend(table.family(backend.launcher));
        }
        family
    }

    fn look_at(&mut self, index: usize, table: &Table) {
        let lane = &self.lanes[index];
        let current = locked(&lane.current).clone();
        let child = current.as_ref().map(|current| current.child);
        if let Some(mark) = self.marks[index].take_if(|mark| Some(mark.child) != child) {
            self.end_pause(index, mark);
        }
        let Some(current) = current else {
            return;
        };
        let family = self.family(lane, current.child, table);
        let (now, eager) = (Instant::now(), self.load.share());
        let fresh = Mark {
            child: current.child,
            at: now,
            executed: executed(&family),
            eager,
            asked: false,
            starved: None,
            dumped: None,
        };
        let Some(mark) = &mut self.marks[index] else {
            self.marks[index] = Some(fresh);
            return;
        };
        // It may fall where a process has ended that nobody waited for.
        let done = TICK * u32::try_from(fresh.executed.abs_diff(mark.executed)).unwrap_or(u32::MAX);
        let length = now.duration_since(mark.at);
        if done >= TICK * 2 && done * PART >= eager.saturating_sub(mark.eager) {
            let mark = std::mem::replace(mark, fresh);
            self.end_pause(index, mark);
            return;
        }
        let runnable: BTreeSet<i32> = family
            .iter()
            .flat_map(|process| process.runnable())
            .collect();
        mark.starved = Some(match mark.starved.take() {
            Some(threads) => &threads & &runnable,
            None => runnable,
        });
        if length > STALL / 2 && !mark.asked {
            mark.asked = true;
            ask(&family);
        }
        if length <= STALL || mark.dumped.is_some() {
            return;
        }
        let eager = eager.saturating_sub(mark.eager);
        let text = format!(
            "lane {index} has stood for {:.1} s in {} (started {:.1} s ago): it executed {} ms, an eager thread {} ms",
            length.as_secs_f64(),
            current.what,
            current.since.elapsed().as_secs_f64(),
            done.as_millis(),
            eager.as_millis(),
        );
        mark.dumped = Some(text.clone());
        step(&text);
        ask(&family);
        // Taken before the supervisors are read: it takes a while.
        let processes: String = family.iter().map(|process| process.describe()).collect();
        let log = match &lane.backend {
            Some(backend) => backend.log().to_owned(),
            None => lane.log(self.soak),
        };
        let log = fs::read(log).unwrap_or_default();
        self.dump(&format!(
            "{text}\n{}\n{processes}",
            String::from_utf8_lossy(&log)
        ));
    }

    /// The lane executes again, or its run is over.
    fn end_pause(&mut self, index: usize, mark: Mark) {
        let length = mark.at.elapsed();
        if mark.dumped.is_some() {
            step(&format!(
                "lane {index} goes on after {:.1} s",
                length.as_secs_f64()
            ));
        }
        if length > 2 * INTERVAL {
            self.pauses.push(Pause {
                begin: mark.at,
                length,
                starved: mark.starved.is_some_and(|threads| !threads.is_empty()),
                said: mark.dumped,
            });
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

    /// Looks for processes of runs that have outlived their run for long.
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

    /// What went wrong, once all lanes have ended.
    pub fn finish(&mut self) -> Vec<String> {
        self.memory.sample(&Table::read(), self.backend.launcher);
        let mut wrong = std::mem::take(&mut self.wrong);
        wrong.extend(self.memory.growth());
        // Not before: a beat that was missing as well may be noted after the lane goes on.
        let stalls = self
            .pauses
            .iter()
            .filter(|pause| pause.is_stall(self.heartbeat));
        wrong.extend(stalls.map(|pause| {
            format!(
                "a lane stood for {:.1} s, of which the heartbeat was missing for {:.1} s: {}",
                pause.length.as_secs_f64(),
                pause.missing(self.heartbeat).as_secs_f64(),
                pause.said.as_deref().unwrap_or("no dump was taken")
            )
        }));
        wrong
    }

    fn longest(&self) -> Option<&Pause> {
        self.pauses.iter().max_by_key(|pause| pause.length)
    }

    /// The longest time that any lane stood and then went on.
    pub fn longest_pause(&self) -> Duration {
        self.longest().map_or(Duration::ZERO, |pause| pause.length)
    }

    /// How much of that the heartbeat was missing too.
    pub fn missing_then(&self) -> Duration {
        self.longest()
            .map_or(Duration::ZERO, |pause| pause.missing(self.heartbeat))
    }

    /// Pauses as long as a stall of lanes that wanted to execute and were not let.
    pub fn starved(&self) -> usize {
        let starved = |pause: &&Pause| pause.starved && pause.length > STALL;
        self.pauses.iter().filter(starved).count()
    }

    /// What became of the memory, for the closing line.
    pub fn memory(&self) -> String {
        self.memory.to_string()
    }
}
