//! Processor time of a process and all below it (proc_pid_stat(5)).

use std::collections::HashMap;
use std::time::Duration;

/// Fields of a process's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fields {
    parent: u32,
    /// Ticks of the process, and of its ended children for which it has waited.
    ticks: u64,
}

/// Returns the processor time so far of a process, of the processes below it, and of those that they have waited for.
pub fn of_family(root: u32) -> Duration {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes: HashMap<u32, Fields> = entries
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            let line = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            Some((number, fields(&line)?))
        })
        .collect();
    let ticks: u64 = processes
        .iter()
        .filter(|(number, _)| is_below(&processes, **number, root))
        .map(|(_, fields)| fields.ticks)
        .sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Parses a line. The name is in parentheses and may contain any bytes.
fn fields(line: &str) -> Option<Fields> {
    let (_, behind_name) = line.rsplit_once(") ")?;
    let words: Vec<&str> = behind_name.split(' ').collect();
    let ticks = words.get(11..15)?.iter().map(|word| word.parse::<u64>());
    Some(Fields {
        parent: words.get(1)?.parse().ok()?,
        ticks: ticks.sum::<Result<u64, _>>().ok()?,
    })
}

fn is_below(processes: &HashMap<u32, Fields>, number: u32, root: u32) -> bool {
    let mut number = number;
    // A number can have been given anew while the lines were read, so that parents form a circle.
    for _ in 0..processes.len() {
        if number == root {
            return true;
        }
        match processes.get(&number) {
            Some(fields) => number = fields.parent,
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn fields_are_found_behind_any_name() {
        let line = "7 (a) b) (c) S 3 7 7 0 -1 4194304 1 2 0 0 10 20 30 40 20 0 1 0 5\n";
        let expected = Fields {
            parent: 3,
            ticks: 100,
        };
        assert_eq!(fields(line), Some(expected));
        assert_eq!(fields("7 (a) S 3 7\n"), None);
        assert_eq!(fields(""), None);
    }

    #[test]
    fn processes_below_others_count() {
        let script =
            "sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done; cat' & wait";
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let before_end = {
            let mut line = [0; 5];
            let output = shell.stdout.as_mut().expect("it is piped");
            std::io::Read::read_exact(output, &mut line).expect("the line");
            of_family(shell.id())
        };
        drop(shell.stdin.take());
        shell.kill().expect("it runs");
        shell.wait().expect("it is a child");
        assert!(before_end >= Duration::from_millis(20), "{before_end:?}");
        assert_eq!(of_family(shell.id()), Duration::ZERO);
    }
}
