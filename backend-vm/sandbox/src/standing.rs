//! Describes a process that makes no progress, by its files in `/proc`.

use std::fs;

/// Describes the state of a process in a sentence: its place in the kernel, the time that it has executed, and the
/// number of processes that want to execute. The sentence distinguishes a process that waits from a system that is too busy.
pub(super) fn of(pid: libc::pid_t) -> String {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let stat = read("stat");
    // The name of the process may hold any byte, and ends with the last parenthesis (proc_pid_stat(5)).
    let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    let state = fields
        .next()
        .filter(|state| !state.is_empty())
        .unwrap_or("?");
    let ticks: u64 = fields
        .skip(10)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    let place = match read("wchan") {
        place if place.is_empty() || place == "0" => "in no wait".to_owned(),
        place => format!("in {place}"),
    };
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("?");
    format!(
        "it is in state {state}, {place}, and has executed for {} ms; the system's load is {load}",
        ticks * 10
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_process_that_sleeps_is_said_to() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = libc::pid_t::try_from(child.id()).unwrap();
        // Between fork and sleeping it is in other states.
        let said = loop {
            let said = super::of(pid);
            if said.starts_with("it is in state S") {
                break said;
            }
            std::thread::yield_now();
        };
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(said.contains(" ms; the system's load is "), "{said}");
        assert!(
            super::of(pid).starts_with("it is in state ?"),
            "{}",
            super::of(pid)
        );
    }
}
