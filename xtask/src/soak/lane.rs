//! Lane: runs one program after the other and checks how each ended.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use wormhole_lock::Mutex;

use rustix::process::{Pid, Signal, kill_process};

use super::family::{SUPERVISOR, Spawned, Table, number};
use super::shared::SharedBackend;
use crate::command::Failure;

/// Name of the program that runs until it is killed.
pub const ENDLESS: &str = "spin";
/// One of this many runs is killed from outside.
const ENDED: u64 = 5;
/// Time limit of a run. A longer run is killed and counts as failed.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// Time within which all processes of a run must have ended after it.
const LEAVING: Duration = Duration::from_secs(30);
/// Time for which a run may survive the kill of its victim before its program is killed as well.
const SURVIVING: Duration = Duration::from_secs(2);

/// A program that verifies its own results.
#[derive(Clone, Debug)]
pub struct Program {
    pub path: PathBuf,
    pub name: String,
}

/// Process whose kill ends a run.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Program(Signal),
    Worker,
    Supervisor,
    Launcher,
}

impl Victim {
    const ALL: [Self; 5] = [
        Self::Program(Signal::KILL),
        Self::Program(Signal::ABORT),
        Self::Worker,
        Self::Supervisor,
        Self::Launcher,
    ];

    fn signal(self) -> Signal {
        match self {
            Self::Program(signal) => signal,
            _ => Signal::KILL,
        }
    }
}

/// The current run of a lane.
#[derive(Clone, Debug)]
pub struct Current {
    /// Process id of the child that the lane waits for.
    pub child: i32,
    pub what: String,
    /// Whether the program ends by itself and verifies its results.
    pub verifies: bool,
    pub since: Instant,
}

/// Result of a run.
struct Ended {
    /// Exit status, unless a signal ended the process.
    status: Option<i32>,
    /// Processes of the run when its victim was killed, by process id and start time.
    members: Vec<(i32, u64)>,
}

/// Results of a lane.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub verified: u64,
    pub ended: u64,
    pub wrong: Vec<String>,
    pub longest: Duration,
}

/// State that all lanes share.
#[derive(Debug)]
pub struct Soak {
    pub wormhole: PathBuf,
    pub folder: PathBuf,
    pub temporary: PathBuf,
    pub programs: Vec<Program>,
    pub endless: PathBuf,
    pub spawned: Arc<Spawned>,
    pub end: Instant,
}

#[derive(Debug)]
pub struct Lane {
    pub number: usize,
    /// Shared backend of the lane's programs; `None` if each run has its own.
    pub backend: Option<Arc<SharedBackend>>,
    pub current: Mutex<Option<Current>>,
    pub tally: Mutex<Tally>,
}

impl Lane {
    pub fn new(number: usize, backend: Option<Arc<SharedBackend>>) -> Self {
        Self {
            number,
            backend,
            current: Mutex::default(),
            tally: Mutex::default(),
        }
    }

    /// Returns the path of the output of the lane's runs.
    pub fn log(&self, soak: &Soak) -> PathBuf {
        soak.folder.join(format!("lane-{}.log", self.number))
    }

    /// Runs programs until the soak's end.
    pub fn serve(&self, soak: &Soak) {
        // Seeded by the lane's number, so that each soak runs the same programs in the same order.
        let mut dice = Dice(self.number as u64);
        while Instant::now() < soak.end {
            let outcome = if dice.below(ENDED) == 0 {
                self.end_one(soak, &mut dice)
            } else {
                let program = &soak.programs[dice.index(soak.programs.len())];
                self.verify_one(soak, program)
            };
            if let Err(failure) = outcome {
                eprintln!("xtask: lane {}: {failure}", self.number);
                self.tally.lock().wrong.push(failure.to_string());
                let kept = format!(
                    "failure-{}-{}.log",
                    self.number,
                    self.tally.lock().wrong.len()
                );
                let _ = fs::copy(self.log(soak), soak.folder.join(kept));
                // A program that cannot be started fails at once, so the loop waits.
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }

    fn verify_one(&self, soak: &Soak, program: &Program) -> Result<(), Failure> {
        let what = program.path.display().to_string();
        let Ended { status, members } = self.run(soak, &program.path, &what, None)?;
        let output = fs::read(self.log(soak)).unwrap_or_default();
        let passed = format!("PASS {}", program.name);
        if status != Some(0) || !String::from_utf8_lossy(&output).contains(&passed) {
            let status = status.map_or("a signal".to_owned(), |status| status.to_string());
            return Err(Failure::new(format!("{what} ended with {status}")));
        }
        self.leaves(members, &what)?;
        self.tally.lock().verified += 1;
        Ok(())
    }

    fn end_one(&self, soak: &Soak, dice: &mut Dice) -> Result<(), Failure> {
        // A shared backend must survive, so only the program is killed.
        let choice = if self.backend.is_some() {
            2
        } else {
            Victim::ALL.len()
        };
        let victim = Victim::ALL[dice.index(choice)];
        let after = Duration::from_millis(dice.below(1500));
        let what = format!(
            "{} until {victim:?} ends after {after:?}",
            soak.endless.display()
        );
        let Ended { members, .. } = self.run(soak, &soak.endless, &what, Some((victim, after)))?;
        self.leaves(members, &what)?;
        self.tally.lock().ended += 1;
        Ok(())
    }

    /// Runs a program to its end, and kills `victim` on the way if there is one.
    fn run(
        &self,
        soak: &Soak,
        program: &Path,
        what: &str,
        mut victim: Option<(Victim, Duration)>,
    ) -> Result<Ended, Failure> {
        let log = self.log(soak);
        let output = File::create(&log)
            .and_then(|file| Ok((file.try_clone()?, file)))
            .map_err(|error| Failure::new(format!("cannot write {}: {error}", log.display())))?;
        let mut command = match &self.backend {
            Some(backend) => {
                let mut command = Command::new(program);
                command.envs(backend.environment());
                command
            }
            None => {
                let mut command = Command::new(&soak.wormhole);
                command
                    .args(["run", "--placement", "process", "--"])
                    .arg(program);
                command
            }
        };
        command
            .env("TMPDIR", &soak.temporary)
            .stdin(Stdio::null())
            .stdout(output.0)
            .stderr(output.1);
        let since = Instant::now();
        let mut child = soak
            .spawned
            .spawn(&mut command)
            .map_err(|error| Failure::new(format!("cannot start {what}: {error}")))?;
        let root = number(&child);
        *self.current.lock() = Some(Current {
            child: root,
            what: what.to_owned(),
            verifies: victim.is_none(),
            since,
        });
        let mut members = Vec::new();
        let mut late = false;
        loop {
            match child.try_wait() {
                Ok(Some(_)) => break,
                Ok(None) => {}
                Err(error) => return Err(Failure::new(format!("{what} was lost: {error}"))),
            }
            std::thread::sleep(Duration::from_millis(50));
            if since.elapsed() > PATIENCE && !late {
                late = true;
                self.kill(root, &Victim::ALL);
            }
            if let Some((who, after)) = victim
                && since.elapsed() > after
            {
                members = self.members(root);
                self.kill(root, &[who]);
                // The victim may not have existed yet, or may have been another program's worker;
                // then the program is killed later.
                let again = after.max(since.elapsed()) + SURVIVING;
                victim = Some((Victim::Program(Signal::KILL), again));
            }
        }
        let status = soak.spawned.wait(&mut child).ok();
        *self.current.lock() = None;
        let took = since.elapsed();
        let mut tally = self.tally.lock();
        tally.longest = tally.longest.max(took);
        drop(tally);
        if late {
            return Err(Failure::new(format!(
                "{what} had not ended after {PATIENCE:?}"
            )));
        }
        Ok(Ended {
            status: status.and_then(|status| status.code()),
            members,
        })
    }

    fn members(&self, root: i32) -> Vec<(i32, u64)> {
        let table = Table::read();
        let family = table.family(root);
        family
            .iter()
            .map(|process| (process.pid, process.started))
            .collect()
    }

    fn kill(&self, root: i32, victims: &[Victim]) {
        let table = Table::read();
        for process in table.family(root) {
            let is = |victim: &&Victim| match victim {
                Victim::Program(_) => ENDLESS == process.name || self.backend.is_some(),
                Victim::Worker => process.name == "worker",
                Victim::Supervisor => process.name.starts_with(SUPERVISOR),
                Victim::Launcher => process.pid == root,
            };
            if let (Some(victim), Some(pid)) = (victims.iter().find(is), Pid::from_raw(process.pid))
            {
                let _ = kill_process(pid, victim.signal());
            }
        }
    }

    /// Waits until all processes of a killed run have ended.
    fn leaves(&self, mut seen: Vec<(i32, u64)>, what: &str) -> Result<(), Failure> {
        let since = Instant::now();
        while !seen.is_empty() {
            let table = Table::read();
            seen.retain(|(pid, started)| {
                let process = table.get(*pid);
                process.is_some_and(|process| process.started == *started && process.state != 'Z')
            });
            if since.elapsed() > LEAVING {
                return Err(Failure::new(format!(
                    "of {what} the processes {seen:?} are left"
                )));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Pseudo-random numbers (splitmix64).
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or(0)
    }
}
