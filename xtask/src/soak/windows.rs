//! Windows that attach to a backend VM and detach from it, beside a guest that works.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::command::Failure;
use crate::machine::{Ran, Script};
use crate::programs;
use crate::stage::Stage;

/// Commands of the soak. `$4` is the number of windows, `$5` a program that verifies its results. Each line `window` has the
/// microseconds of attaching, and of detaching or the word `killed`: every eighth window's process is killed. The line
/// `lines` has the number of lines that the guest had written when the last window was gone.
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
    start=${EPOCHREALTIME/[.,]/}
    exec 3< <(exec "$command" attach --backend soak --size 64M --window "$folder/window" --vsock "$folder/vsock" 2>&1)
    process=$!
    read -r line <&3
    [[ $line == "attached: "* ]] || { echo "window $window: $line"; exit 1; }
    attached=${EPOCHREALTIME/[.,]/}
    if ((window % 8)); then
        kill -TERM $process
        wait $process
        detached=$((${EPOCHREALTIME/[.,]/} - attached))
    else
        kill -KILL $process
        wait $process || :
        detached=killed
    fi
    echo "window $((attached - start)) $detached"
done
mapfile -t before <"$folder/guest"
echo "lines ${#before[@]}"
limit=$((SECONDS + 600))
until mapfile -t -s ${#before[@]} after <"$folder/guest"; [[ ${after[*]} == *"PASS "* ]] || ((SECONDS > limit)); do
    kill -0 $guest
    sleep 0.1
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

/// Times of the windows in microseconds.
#[derive(Debug, Default, PartialEq, Eq)]
struct Times {
    attach: Vec<u64>,
    detach: Vec<u64>,
    /// Times of attaching after a window's process was killed, which include waiting for its slot.
    killed: Vec<u64>,
    /// Number of windows.
    count: u32,
}

impl Times {
    /// Reads the lines `window`.
    fn of(output: &str) -> Self {
        let mut times = Self::default();
        let mut follows_kill = false;
        let windows = output
            .lines()
            .filter_map(|line| line.strip_prefix("window ")?.split_once(' '));
        for (attach, detach) in windows {
            let Ok(attach) = attach.parse() else { continue };
            match follows_kill {
                true => times.killed.push(attach),
                false => times.attach.push(attach),
            }
            let detach: Option<u64> = detach.parse().ok();
            follows_kill = detach.is_none();
            times.detach.extend(detach);
            times.count += 1;
        }
        times
    }
}

/// Prints the closing line.
fn judge(ran: &Ran, count: u32) -> bool {
    let times = Times::of(&ran.output);
    let said = ran
        .results
        .first()
        .map(|said| String::from_utf8_lossy(said));
    let said = said.unwrap_or_default();
    let lines_before = ran
        .output
        .lines()
        .find_map(|line| line.strip_prefix("lines ")?.parse().ok());
    let passes_after = |start: usize| {
        let lines = said.lines().skip(start);
        lines.filter(|line| line.starts_with("PASS ")).count()
    };
    let passes = passes_after(0);
    let late_passes = lines_before.map_or(0, passes_after);
    // The last program is ended with the guest.
    let has_failed = said.lines().any(|line| line.starts_with("FAIL "));
    if !ran.is_success || times.count != count || late_passes == 0 || has_failed {
        println!(
            "soak: FAIL {} of {count} windows, {passes} passes of the guest's program, {late_passes} of them after the last window",
            times.count
        );
        print!("{said}");
        return false;
    }
    println!(
        "soak: PASS windows={count} guest={} passes={passes} attach_ms={} detach_ms={} killed_ms={} (p50/p99/most)",
        ran.guest,
        distribution(times.attach),
        distribution(times.detach),
        distribution(times.killed),
    );
    true
}

/// Formats the median, the 99th percentile and the largest of microseconds, as milliseconds; `none` if there are no times.
fn distribution(mut times: Vec<u64>) -> String {
    if times.is_empty() {
        return "none".to_owned();
    }
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
        let windows = "backend soak serves\nwindow 20 30\nwindow 10 40\nlines 2\n";
        let right = "PASS vector_add\nPASS vector_add\nPASS vector_add\n";
        assert!(judge(&ran(windows, right), 2));
        assert!(!judge(&ran(windows, right), 3));
        assert!(!judge(&ran(windows, ""), 2));
        let wrong = format!("{right}FAIL vector_add\n");
        assert!(!judge(&ran(windows, &wrong), 2));
        let ended = Ran {
            is_success: false,
            ..ran(windows, right)
        };
        assert!(!judge(&ended, 2));
    }

    #[test]
    fn a_soak_fails_where_the_guest_works_no_more_after_the_last_window() {
        let windows = "window 20 30\nlines 1\n";
        let (once, twice) = ("PASS vector_add\n", "PASS vector_add\nPASS vector_add\n");
        assert!(!judge(&ran(windows, once), 1));
        assert!(judge(&ran(windows, twice), 1));
        assert!(!judge(&ran("window 20 30\n", twice), 1));
    }

    #[test]
    fn a_killed_window_and_the_next_one_are_counted_apart() {
        let times = Times::of("window 1 2\nwindow 3 killed\nwindow 400 5\nwindow 6 7\nlines 0\n");
        let expected = Times {
            attach: vec![1, 3, 6],
            detach: vec![2, 5, 7],
            killed: vec![400],
            count: 4,
        };
        assert_eq!(times, expected);
    }

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let times = (1..=200).rev().map(|time| time * 1000).collect();
        assert_eq!(distribution(times), "100.0/198.0/200.0");
        assert_eq!(distribution(vec![1550]), "1.5/1.5/1.5");
        assert_eq!(distribution(Vec::new()), "none");
    }
}
