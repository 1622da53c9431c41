//! Processes in one PID namespace have different numbers, and are hidden from each other.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use wormhole_backend_tests::backend::children_of;
use wormhole_link::chain;
use wormhole_sandbox::{
    Child, Command, Confinement, DeviceKind, EXECUTION_LIMIT, Ending, Isolation, Processes, probe,
};

/// Says its number and those that it sees, then waits for a line.
const SCRIPT: &str =
    "echo $$; for at in /proc/[0-9]*; do echo ${at#/proc/}; done; echo end; read line";

/// Limit of a process's threads.
const THREADS: u64 = 16;

fn confinement(processes: Option<Arc<Processes>>) -> Confinement {
    Confinement {
        isolation: Isolation::Namespaces,
        processes,
        kind: DeviceKind::Cuda,
        device_files: Vec::new(),
        memory: 1 << 30,
        threads: THREADS,
        cgroups: None,
        library_directories: Vec::new(),
        execution_limit: EXECUTION_LIMIT,
    }
}

/// Starts a shell. Returns the process, its PID in its own namespace, the PIDs that it sees, and the pipe that it waits
/// for.
fn shell(confinement: &Confinement) -> (Child, u32, Vec<u32>, OwnedFd) {
    let (stdin, line) = std::io::pipe().unwrap();
    let (mut said, output) = std::io::pipe().unwrap();
    let child = confinement
        .spawn(&Command {
            program: Path::new("/bin/sh"),
            arguments: &["-c".into(), SCRIPT.into()],
            environment: &[],
            stdin: stdin.as_fd(),
            output: output.as_fd(),
            descriptors: &[],
            lifeline: false,
        })
        .unwrap();
    drop(output);
    let mut text = String::new();
    while !text.contains("end\n") {
        let mut bytes = [0; 256];
        let count = said.read(&mut bytes).unwrap();
        assert!(count > 0, "{text}");
        text.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
    }
    let numbers = text.lines().take_while(|line| *line != "end");
    let mut numbers = numbers.map(|number| number.parse::<u32>().unwrap());
    let own = numbers.next().unwrap();
    (child, own, numbers.collect(), line.into())
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    let can = root && matches!(probe(DeviceKind::Cuda), Ok(Isolation::Namespaces));
    if !can {
        println!("skipped: only root makes these namespaces");
    }
    can
}

#[test]
fn processes_of_one_namespace_have_numbers_of_their_own_and_see_only_themselves() {
    if !is_root() {
        return;
    }
    let processes = Arc::new(Processes::new().unwrap());
    let confinement = confinement(Some(processes));
    let shells = [(); 3].map(|()| shell(&confinement));
    let mut numbers: Vec<u32> = shells.iter().map(|shell| shell.1).collect();
    assert!(!numbers.contains(&1), "{numbers:?}");
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 3);
    for (child, own, seen, line) in shells {
        assert_eq!(seen, [own]);
        drop(line);
        assert_eq!(
            child.wait(),
            Some(Ending::Exited(1)),
            "at the end of its input"
        );
    }
}

#[test]
fn a_process_without_one_is_the_first_of_its_own() {
    if !is_root() {
        return;
    }
    let (child, own, seen, line) = shell(&confinement(None));
    assert_eq!((own, seen), (1, vec![1]));
    drop(line);
    child.wait();
}

#[test]
fn a_process_may_have_as_many_threads_as_its_confinement_says() {
    if !is_root() {
        return;
    }
    let (child, _, _, line) = shell(&confinement(None));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", child.pid())).unwrap();
    let limit = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max processes"));
    let mut limit = limit.unwrap().split_whitespace();
    let both = [limit.next(), limit.next()];
    assert_eq!(both, [Some(THREADS.to_string().as_str()); 2]);
    drop(line);
    child.wait();
}

#[test]
fn the_thread_that_made_one_makes_others_and_threads_as_before() {
    if !is_root() {
        return;
    }
    let processes = Processes::new().unwrap();
    processes.within(|| ()).unwrap();
    std::thread::spawn(|| ()).join().unwrap();
    let status = std::process::Command::new("/bin/sh")
        .args(["-c", "readlink /proc/self/ns/pid"])
        .output()
        .unwrap();
    let own = std::fs::read_link("/proc/self/ns/pid").unwrap();
    assert_eq!(
        String::from_utf8(status.stdout).unwrap().trim(),
        own.to_str().unwrap()
    );
}

/// The process that a namespace began with: a child of this one that is number 1 in its own.
fn first_process() -> i32 {
    let is_first = |pid: &i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let numbers = status.lines().find(|line| line.starts_with("NSpid:"));
        numbers.is_some_and(|line| {
            line.split_whitespace().skip(1).count() == 2 && line.ends_with("\t1")
        })
    };
    let children = children_of(std::process::id());
    children.into_iter().find(is_first).unwrap()
}

#[test]
fn a_namespace_that_has_ended_has_a_successor() {
    // A process of its own has no children but these.
    const ALONE: &str = "WORMHOLE_TEST_ALONE";
    if !is_root() {
        return;
    }
    if std::env::var_os(ALONE).is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_namespace_that_has_ended_has_a_successor"])
            .env(ALONE, "")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let confinement = confinement(Some(Arc::new(Processes::new().unwrap())));
    let (child, _, _, line) = shell(&confinement);
    let first = rustix::process::Pid::from_raw(first_process()).unwrap();
    rustix::process::kill_process(first, rustix::process::Signal::KILL).unwrap();
    assert_eq!(child.wait(), Some(Ending::Signalled(libc::SIGKILL)));
    drop(line);
    let (child, own, seen, line) = shell(&confinement);
    assert_eq!((own, seen), (2, vec![2]));
    drop(line);
    child.wait();
}

#[test]
fn with_a_namespace_its_processes_end() {
    if !is_root() {
        return;
    }
    let processes = Arc::new(Processes::new().unwrap());
    let confinement = confinement(Some(Arc::clone(&processes)));
    let (child, _, _, line) = shell(&confinement);
    drop((confinement, processes));
    assert_eq!(child.wait(), Some(Ending::Signalled(libc::SIGKILL)));
    assert!(File::from(line).metadata().is_ok(), "its input was open");
}

/// Without its number it would have a user that others have, who could signal and trace it.
#[test]
fn a_worker_that_cannot_read_its_number_is_not_started() {
    const HIDES: &str = "WORMHOLE_TEST_HIDES_PROC";
    const NAME: &str = "a_worker_that_cannot_read_its_number_is_not_started";
    if std::env::var_os(HIDES).is_some() {
        let output = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .unwrap();
        let started = confinement(None).spawn(&Command {
            program: Path::new("/bin/true"),
            arguments: &[],
            environment: &[],
            stdin: output.as_fd(),
            output: output.as_fd(),
            descriptors: &[],
            lifeline: false,
        });
        let error = chain(&started.unwrap_err());
        assert!(error.contains("dropping its privileges"), "{error}");
        return;
    }
    if !is_root() {
        return;
    }
    let hidden = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c"])
        .arg("mount -t tmpfs none /proc && exec \"$0\" \"$@\"")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", NAME])
        .env(HIDES, "")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&hidden.stdout);
    assert!(text.contains("1 passed"), "{text}");
}
