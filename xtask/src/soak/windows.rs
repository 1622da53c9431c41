//! Windows that attach to a backend VM and detach from it, beside a guest that works.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::command::Failure;
use crate::machine::{Ran, Script};
use crate::programs;
use crate::stage::Stage;

/// Commands of the soak. `$4` is the number of windows, `$5` a program that verifies its results. Each line `window` has the
/// microseconds of attaching and of detaching. Every eighth window's process is killed.
const SCRIPT: &str = r#"
set -eo pipefail
command=$1 folder=$2 patience=$3 count=$4 program=$5
export WORMHOLE_RUNTIME=$folder/backends

"$command" backend start soak --placement vm --slots 2 --slot-size 258M
trap '"$command" backend stop soak' EXIT
"$command" run --host kvm --backend soak --memory 256M --quiet --timeout "$patience" \
    -- /bin/sh -c 'while "$0"; do :; done' "$program" >"$folder/guest" 2>&1 &
guest=$!
until read -r line <"$folder/guest"; do
    kill -0 $guest
    sleep 0.1
done 2>/dev/null
for ((window = 1; window <= count; window++)); do
    start=${EPOCHREALTIME/./}
    exec 3< <(exec "$command" attach --backend soak --size 64M --window "$folder/window" --vsock "$folder/vsock" 2>&1)
    process=$!
    read -r line <&3
    [[ $line == "attached: "* ]] || { echo "window $window: $line"; exit 1; }
    attached=${EPOCHREALTIME/./}
    signal=TERM
    ((window % 8)) || signal=KILL
    kill -$signal $process
    wait $process || [ $signal = KILL ]
    echo "window $((attached - start)) $((${EPOCHREALTIME/./} - attached))"
done
kill -0 $guest
kill $guest
wait $guest || [ $? = 143 ]
"#;

/// Programs that the script and the guest use.
const TOOLS: [&str; 2] = ["/bin/sh", "/usr/bin/sleep"];

/// Attaches and detaches `count` windows. Returns whether all of them came and went, and the guest's results were right.
pub fn run(root: &Path, stage: &Stage, count: u32) -> Result<bool, Failure> {
    let program = programs::verified(root);
    let script = Script {
        text: SCRIPT,
        arguments: vec![count.to_string().into(), program.clone().into()],
        programs: TOOLS
            .map(PathBuf::from)
            .into_iter()
            .chain([program])
            .collect(),
        results: vec!["guest".to_owned()],
        patience: 60 * 60,
        host_patience: Duration::from_secs(4 * 60 * 60),
    };
    Ok(judge(&script.run(root, stage, "soak-windows")?, count))
}

/// Prints the closing line.
fn judge(ran: &Ran, count: u32) -> bool {
    let mut attach = Vec::new();
    let mut detach = Vec::new();
    for line in ran.output.lines() {
        let mut words = line.strip_prefix("window ").unwrap_or("").split(' ');
        let mut next = || words.next()?.parse::<u64>().ok();
        if let (Some(one), Some(other)) = (next(), next()) {
            attach.push(one);
            detach.push(other);
        }
    }
    let said = ran
        .results
        .first()
        .map(|said| String::from_utf8_lossy(said));
    let said = said.unwrap_or_default();
    let passes = said
        .lines()
        .filter(|line| line.starts_with("PASS "))
        .count();
    // The last program is ended with the guest.
    let has_failed = said.lines().any(|line| line.starts_with("FAIL "));
    if !ran.is_success || attach.len() as u64 != u64::from(count) || passes == 0 || has_failed {
        println!(
            "soak: FAIL {} of {count} windows, {passes} passes of the guest's program",
            attach.len()
        );
        print!("{said}");
        return false;
    }
    println!(
        "soak: PASS windows={count} guest={} passes={passes} attach_ms={} detach_ms={} (p50/p99/most)",
        ran.guest,
        distribution(attach),
        distribution(detach),
    );
    true
}

/// Formats the median, the 99th percentile and the largest of microseconds, as milliseconds.
fn distribution(mut times: Vec<u64>) -> String {
    times.sort_unstable();
    let at = |percent: usize| {
        let index = (times.len() * percent).div_ceil(100).saturating_sub(1);
        times.get(index).copied().unwrap_or(0)
    };
    let milliseconds = |time: u64| format!("{}.{}", time / 1000, time % 1000 / 100);
    [at(50), at(99), at(100)].map(milliseconds).join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(output: &str, said: &str) -> Ran {
        Ran {
            is_success: true,
            output: output.to_owned(),
            results: vec![said.into()],
            guest: "emulated",
        }
    }

    #[test]
    fn a_soak_passes_with_all_windows_and_right_results_alone() {
        let windows = "backend soak serves\nwindow 20 30\nwindow 10 40\n";
        assert!(judge(&ran(windows, "PASS vector_add\n"), 2));
        assert!(!judge(&ran(windows, "PASS vector_add\n"), 3));
        assert!(!judge(&ran(windows, ""), 2));
        assert!(!judge(
            &ran(windows, "PASS vector_add\nFAIL vector_add\n"),
            2
        ));
        let ended = Ran {
            is_success: false,
            ..ran(windows, "PASS vector_add\n")
        };
        assert!(!judge(&ended, 2));
    }

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let times = (1..=200).rev().map(|time| time * 1000).collect();
        assert_eq!(distribution(times), "100.0/198.0/200.0");
        assert_eq!(distribution(vec![1550]), "1.5/1.5/1.5");
    }
}
