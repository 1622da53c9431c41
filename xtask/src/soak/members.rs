//! Finds the processes of a lane and takes snapshots of them for the judge.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::Hasher;
use std::time::{Duration, Instant};

use super::family::{Process, SUPERVISOR, Table};
use super::judge::{Look, Thread};

/// Name of the memfd of a session's memory, which its program and its worker map.
const SESSION_FILE: &str = "wormhole-session";
/// Name of the memfd of a worker's counters, which the supervisor has open.
const COUNTERS_FILE: &str = "wormhole-counters";
/// Name of a worker's process.
pub const WORKER: &str = "worker";

/// The processes that currently work for a lane.
#[derive(Debug)]
pub struct Members<'t> {
    /// Processes that work for no other lane.
    pub own: Vec<&'t Process>,
    /// Processes that work for other lanes as well.
    pub serving: Vec<&'t Process>,
}

impl<'t> Members<'t> {
    /// Finds the members of a lane that waits for `child`, with the shared backend of `launcher` or with its own
    /// backend.
    pub fn of(table: &'t Table, child: i32, launcher: Option<i32>) -> Self {
        let mut own = table.family(child);
        let Some(launcher) = launcher else {
            let serving = Vec::new();
            return Self { own, serving };
        };
        let programs = own.iter().map(|process| process.mapped(SESSION_FILE));
        let sessions: std::collections::BTreeSet<u64> = programs.flatten().collect();
        let mut serving = Vec::new();
        for process in table.family(launcher) {
            let theirs = match process.name.as_str() {
                WORKER => process.mapped(SESSION_FILE),
                _ => Default::default(),
            };
            if !theirs.is_disjoint(&sessions) {
                own.push(process);
            } else if theirs.is_empty() {
                serving.push(process);
            }
        }
        Self { own, serving }
    }

    /// Returns all members.
    pub fn all(&self) -> impl Iterator<Item = &'t Process> {
        self.own.iter().chain(&self.serving).copied()
    }

    /// Returns the supervisors. A spawner, which is a supervisor's child with the same name, is none.
    pub fn supervisors(&self) -> impl Iterator<Item = &'t Process> {
        let named = |process: &&Process| process.name.starts_with(SUPERVISOR);
        let all: Vec<i32> = self
            .all()
            .filter(named)
            .map(|process| process.pid)
            .collect();
        self.all()
            .filter(named)
            .filter(move |process| !all.contains(&process.parent))
    }

    pub fn look(&self, eager: Duration) -> Look {
        let threads = |members: &[&Process]| -> BTreeMap<i32, Thread> {
            members
                .iter()
                .flat_map(|process| process.threads())
                .collect()
        };
        Look {
            at: Instant::now(),
            own: threads(&self.own),
            serving: threads(&self.serving),
            counters: self.counters(),
            eager,
        }
    }

    /// Returns a digest of the counter pages of the lane's workers.
    fn counters(&self) -> u64 {
        let workers = self.own.iter().filter(|process| process.name == WORKER);
        let own: std::collections::BTreeSet<u64> = workers
            .flat_map(|process| process.mapped(COUNTERS_FILE))
            .collect();
        let files: BTreeMap<_, _> = self
            .supervisors()
            .flat_map(|process| process.open(COUNTERS_FILE))
            .filter(|(inode, _)| own.contains(inode))
            .collect();
        let mut digest = DefaultHasher::new();
        for (inode, path) in files {
            digest.write_u64(inode);
            digest.write(&fs::read(path).unwrap_or_default());
        }
        digest.finish()
    }

    /// Describes the stopped processes, for people to read.
    pub fn stopped(&self) -> String {
        let stopped = self.all().filter(|process| process.state == 'T');
        stopped
            .map(|process| format!("; {} {} is stopped", process.name, process.pid))
            .collect()
    }
}
