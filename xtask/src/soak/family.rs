//! Process tree of a run, read from `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use rustix::process::{Pid, WaitOptions, waitpid};
use wormhole_lock::Mutex;

use super::judge::Thread;

/// Start of the name of a supervisor's process.
pub const SUPERVISOR: &str = "wormhole-super";

/// Children of this process that a thread waits for. Other children of this process are orphans: their parent has
/// ended.
#[derive(Debug, Default)]
pub struct Spawned(Mutex<BTreeSet<i32>>);

impl Spawned {
    /// Starts a child. The caller waits for it with [`Spawned::wait`].
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let mut own = self.0.lock();
        let child = command.spawn()?;
        own.insert(number(&child));
        Ok(child)
    }

    pub fn wait(&self, child: &mut Child) -> io::Result<ExitStatus> {
        let status = child.wait();
        self.0.lock().remove(&number(child));
        status
    }

    pub fn run(&self, command: &mut Command) -> io::Result<ExitStatus> {
        let mut child = self.spawn(command)?;
        self.wait(&mut child)
    }

    /// Reaps orphans that have ended.
    pub fn reap_orphans(&self, table: &Table) {
        let own = self.0.lock();
        for process in table.children(own_number()) {
            if process.state == 'Z'
                && !own.contains(&process.pid)
                && let Some(pid) = Pid::from_raw(process.pid)
            {
                let _ = waitpid(Some(pid), WaitOptions::NOHANG);
            }
        }
    }

    pub fn contains(&self, pid: i32) -> bool {
        self.0.lock().contains(&pid)
    }
}

/// Returns a child's process id.
pub fn number(child: &Child) -> i32 {
    child.id().cast_signed()
}

/// Returns this process's id.
pub fn own_number() -> i32 {
    std::process::id().cast_signed()
}

/// Snapshot of a process.
#[derive(Clone, Debug)]
pub struct Process {
    pub pid: i32,
    pub parent: i32,
    pub name: String,
    pub state: char,
    /// Start time in clock ticks since boot. Together with the process id it identifies a process uniquely.
    pub started: u64,
    /// Resident pages.
    pages: u64,
}

impl Process {
    /// Parses `/proc/PID/stat` (proc_pid_stat(5)).
    fn parse(stat: &str) -> Option<Self> {
        let (head, tail) = stat.rsplit_once(") ")?;
        let (pid, name) = head.split_once(" (")?;
        let fields: Vec<&str> = tail.split_whitespace().collect();
        // `fields` begins with the third field of the file.
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            pid: pid.parse().ok()?,
            parent: fields.get(1)?.parse().ok()?,
            name: name.to_owned(),
            state: fields.first()?.chars().next()?,
            started: field(22)?,
            pages: field(24)?,
        })
    }

    /// Returns the resident memory in KiB.
    pub fn resident(&self) -> u64 {
        self.pages * 4
    }

    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, Iterator::count)
    }

    /// Returns the process's threads by thread id.
    pub fn threads(&self) -> impl Iterator<Item = (i32, Thread)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid));
        tasks.into_iter().flatten().flatten().filter_map(|task| {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).ok();
            let stat = Self::parse(&read("stat")?)?;
            let schedstat = read("schedstat")?;
            let mut numbers = schedstat.split_whitespace().map(str::parse);
            let mut next = || numbers.next()?.ok();
            let thread = Thread {
                state: stat.state,
                executed: Duration::from_nanos(next()?),
                waited: Duration::from_nanos(next()?),
                turns: next()?,
            };
            Some((stat.pid, thread))
        })
    }

    /// Returns the inodes of the memfds with this name that the process has mapped.
    pub fn mapped(&self, name: &str) -> BTreeSet<u64> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
        let suffix = format!("/memfd:{name} (deleted)");
        let lines = maps.lines().filter(|line| line.ends_with(&suffix));
        lines
            .filter_map(|line| line.split_whitespace().nth(4)?.parse().ok())
            .collect()
    }

    /// Returns the paths of the memfds with this name that the process has open, by inode.
    pub fn open(&self, name: &str) -> BTreeMap<u64, PathBuf> {
        let target = format!("/memfd:{name} (deleted)");
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid));
        let entries = entries.into_iter().flatten().flatten();
        let files = entries.map(|entry| entry.path()).filter(|path| {
            fs::read_link(path).is_ok_and(|link| link.as_os_str() == target.as_str())
        });
        files
            .filter_map(|path| Some((fs::metadata(&path).ok()?.ino(), path)))
            .collect()
    }

    /// Describes the state of each of the process's threads, for people to read.
    pub fn describe(&self) -> String {
        let mut text = format!("{} {} ({})\n", self.pid, self.name, self.state);
        let tasks = format!("/proc/{}/task", self.pid);
        for task in fs::read_dir(&tasks).into_iter().flatten().flatten() {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let status = read("status");
            let state = status.lines().find(|line| line.starts_with("State:"));
            text.push_str(&format!(
                "  {} {:<16} {} in {} {}\n    {}\n",
                task.file_name().display(),
                read("comm").trim_end(),
                state.unwrap_or_default(),
                read("wchan"),
                read("syscall").trim_end(),
                read("stack").trim_end().replace('\n', "\n    ")
            ));
        }
        text
    }
}

/// Snapshot of all processes.
#[derive(Debug)]
pub struct Table(BTreeMap<i32, Process>);

impl Table {
    pub fn read() -> Self {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let processes = entries.filter_map(|entry| {
            let _: i32 = entry.file_name().to_str()?.parse().ok()?;
            Process::parse(&fs::read_to_string(entry.path().join("stat")).ok()?)
        });
        Self(processes.map(|process| (process.pid, process)).collect())
    }

    pub fn get(&self, pid: i32) -> Option<&Process> {
        self.0.get(&pid)
    }

    pub fn children(&self, parent: i32) -> impl Iterator<Item = &Process> {
        self.0
            .values()
            .filter(move |process| process.parent == parent)
    }

    /// Returns a process and all its descendants.
    pub fn family(&self, root: i32) -> Vec<&Process> {
        let mut family: Vec<&Process> = self.get(root).into_iter().collect();
        let mut next = 0;
        while let Some(process) = family.get(next) {
            let children: Vec<&Process> = self.children(process.pid).collect();
            family.extend(children);
            next += 1;
        }
        family
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_whatever_its_name() {
        let stat = "17 (a) (b) S 3 1 1 0 -1 4 9 9 9 9 5 6 7 8 20 0 1 0 1234 4096 77 1";
        let process = Process::parse(stat).unwrap();
        assert_eq!((process.pid, process.parent, process.state), (17, 3, 'S'));
        assert_eq!(process.name, "a) (b");
        assert_eq!((process.started, process.pages), (1234, 77));
    }

    #[test]
    fn the_threads_of_this_process_have_executed() {
        let table = Table::read();
        let own = table.get(own_number()).unwrap();
        let executed: Duration = own.threads().map(|(_, thread)| thread.executed).sum();
        assert!(executed > Duration::ZERO);
    }

    #[test]
    fn this_process_is_in_its_own_family() {
        let table = Table::read();
        let family = table.family(own_number());
        assert_eq!(
            family.first().map(|process| process.pid),
            Some(own_number())
        );
    }
}
