//! Deliberate stall: stops a process of a lane for a while and requires that the judge reports it.

use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::process::{Pid, Signal, kill_process};

use super::lane::Current;
use super::members::{Members, WORKER};

/// Time for which the process is stopped.
const STOPPED: Duration = Duration::from_secs(8);

/// Kind of process to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Worker,
    Supervisor,
}

/// State of a deliberate stall: pending, stopped, or continued.
#[derive(Debug)]
pub struct Stop {
    kind: Kind,
    lane: usize,
    not_before: Instant,
    stopped: Option<(i32, String, Instant)>,
    goes_on: bool,
}

impl Stop {
    /// Plans to stop a process of this lane, not before this time.
    pub fn new(kind: Kind, lane: usize, not_before: Instant) -> Self {
        Self {
            kind,
            lane,
            not_before,
            stopped: None,
            goes_on: false,
        }
    }

    /// Stops or continues the process if it is time. Called at every look at a lane.
    pub fn look(&mut self, lane: usize, current: &Current, members: &Members<'_>) {
        let now = Instant::now();
        if let Some((pid, _, since)) = &self.stopped {
            if !self.goes_on && now.duration_since(*since) > STOPPED {
                self.goes_on = true;
                send(*pid, Signal::CONT);
            }
            return;
        }
        // An endless program may be killed while its worker is stopped.
        if lane != self.lane || now < self.not_before || !current.verifies {
            return;
        }
        // Without a worker of its own the lane has no session that a stopped process could stall.
        if !members.own.iter().any(|process| process.name == WORKER) {
            return;
        }
        let mut workers = members.own.iter().copied();
        let found = match self.kind {
            Kind::Worker => workers.find(|process| process.name == WORKER),
            Kind::Supervisor => members.supervisors().next(),
        };
        if let Some(process) = found {
            send(process.pid, Signal::STOP);
            let said = format!("{} {} is stopped", process.name, process.pid);
            self.stopped = Some((process.pid, said, now));
        }
    }

    /// Returns an error unless a stall was reported whose line names the stopped process.
    pub fn missed(self, stalls: &[String]) -> Option<String> {
        let Some((_, said, _)) = self.stopped else {
            return Some("no process was there to be stopped".to_owned());
        };
        let found = stalls.iter().any(|stall| stall.contains(&said));
        (!found).then(|| format!("no stall was found though {said}; found: {stalls:?}"))
    }
}

fn send(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}
