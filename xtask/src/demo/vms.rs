//! The demo against a backend VM: two guests at once, and one backend VM that serves both.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{ATTEMPTS, MOST_EXITS, PATIENCE, Summary, commands, exits_per_call, launching};
use crate::command::{Failure, step};
use crate::machine::{Ran, Script};
use crate::stage::Stage;

/// Commands of the demo. `$4` and `$5` are the shell commands of the guests. A guest writes `ready` when its programs have
/// ended. Only the first one works on then, so that all processors of a small machine serve its launches.
const SCRIPT: &str = r#"
set -eo pipefail
command=$1 folder=$2 patience=$3
export WORMHOLE_RUNTIME=$folder/backends

guest() {
    "$command" run --host kvm --backend demo --memory 256M --interactive --timeout "$patience" \
        --json "$folder/$1.json" -- /bin/sh -c "$2" <"$folder/$1.in" | while read -r line; do
        case $line in
        ready) : >"$folder/$1.ready" ;;
        *) echo "$1: $line" ;;
        esac
    done
}

"$command" backend start demo --placement vm --slots 2 --slot-size 258M
trap '"$command" backend stop demo' EXIT
mkfifo "$folder/first.in" "$folder/second.in"
guest first "$4" &
first=$!
guest second "$5" &
second=$!
exec 3>"$folder/first.in" 4>"$folder/second.in"
for one in first second; do
    until [ -e "$folder/$one.ready" ]; do
        kill -0 ${!one}
        sleep 0.1
    done
done
echo >&3
wait $first
echo >&4
wait $second
"#;

/// Programs that the script and the guests' shells use.
const TOOLS: [&str; 3] = ["/bin/sh", "/usr/bin/mkfifo", "/usr/bin/sleep"];

/// Names of the guests in the script.
const GUESTS: [&str; 2] = ["first", "second"];

/// Time after which the emulated host counts as hung.
const HOST_PATIENCE: Duration = Duration::from_secs(900);

/// Returns the programs of each guest: half of them, or the only one in both, since both guests must work.
fn parts(programs: &[PathBuf]) -> [&[PathBuf]; 2] {
    let (first, second) = programs.split_at(programs.len().div_ceil(2));
    [first, if second.is_empty() { first } else { second }]
}

/// Runs the programs, half of them in each guest. Returns whether all passed.
pub fn run(
    root: &Path,
    stage: &Stage,
    programs: &[PathBuf],
    steady: &Path,
) -> Result<bool, Failure> {
    let [first, second] = parts(programs);
    let count = first.len() + second.len();
    let launching = launching(steady);
    let guests = [(first, launching.as_str()), (second, "")]
        .map(|(part, last)| commands(part, &format!("echo ready\nread -r _\n{last}")));
    let tools = TOOLS.map(PathBuf::from).into_iter();
    let script = Script {
        text: SCRIPT,
        arguments: guests.map(Into::into).to_vec(),
        programs: tools
            .chain(programs.to_vec())
            .chain([steady.to_owned()])
            .collect(),
        results: GUESTS.map(|guest| format!("{guest}.json")).to_vec(),
        patience: PATIENCE,
        host_patience: HOST_PATIENCE,
    };
    let mut ran = script.run(root, stage, "demo")?;
    // An emulated host fails a guest now and then, as in the demo with one guest.
    for _ in 1..ATTEMPTS {
        if ran.is_success || of_guests(&ran, "FAIL").next().is_some() {
            break;
        }
        step("a VM failed, and no program did: once more");
        ran = script.run(root, stage, "demo")?;
    }
    judge(&ran, count)
}

/// Returns the ends of the guests' lines that begin so.
fn of_guests<'a>(ran: &'a Ran, beginning: &'a str) -> impl Iterator<Item = &'a str> {
    GUESTS
        .iter()
        .flat_map(move |guest| of(ran, guest, beginning))
}

/// Returns the ends of a guest's lines that begin so.
fn of<'a>(ran: &'a Ran, guest: &str, beginning: &'a str) -> impl Iterator<Item = &'a str> {
    let guest = format!("{guest}: ");
    let lines = ran.output.lines();
    lines.filter_map(move |line| line.strip_prefix(&guest)?.strip_prefix(beginning))
}

/// Prints the demo's line. Returns whether the programs passed in three VMs that differ.
fn judge(ran: &Ran, count: usize) -> Result<bool, Failure> {
    let passed = of_guests(ran, "PASS ")
        .filter(|name| *name != "steady")
        .count();
    if !ran.is_success || passed != count || ran.results.len() != GUESTS.len() {
        println!(
            "demo: FAIL {passed} of {count} runs of programs passed; {}",
            match ran.is_success {
                true => "the runs themselves ended well",
                false => "a run ended with an error",
            }
        );
        return Ok(false);
    }
    let summaries = ran.results.iter().map(|text| {
        serde_json::from_slice(text)
            .map_err(|error| Failure::new(format!("a guest's summary is none: {error}")))
    });
    let summaries: Vec<Summary> = summaries.collect::<Result<_, _>>()?;
    let [Some(backend), Some(same)] = [&summaries[0].backend_vm, &summaries[1].backend_vm] else {
        println!("demo: FAIL a guest had no backend VM");
        return Ok(false);
    };
    let mut vms = vec![(backend.boot_id.clone(), backend.vm.clone())];
    for (guest, summary) in GUESTS.iter().zip(&summaries) {
        let boot = of(ran, guest, "boot ").last();
        vms.push((
            boot.unwrap_or_default().to_owned(),
            summary.vm.clone().unwrap_or_default(),
        ));
    }
    for (name, (boot, vm)) in ["backend VM", "first guest", "second guest"]
        .iter()
        .zip(&vms)
    {
        println!("{name}: {vm}, boot {boot}");
    }
    let differ = |of: fn(&(String, String)) -> &String| {
        let mut values: Vec<&String> = vms.iter().map(of).collect();
        values.sort_unstable();
        values.dedup();
        values.len() == vms.len() && values.iter().all(|value| !value.is_empty())
    };
    if !differ(|(boot, _)| boot) || !differ(|(_, vm)| vm) || backend.boot_id != same.boot_id {
        println!("demo: FAIL the guests and their backend VM are not known to be three VMs");
        return Ok(false);
    }
    if summaries
        .iter()
        .any(|summary| summary.requests == 0 || summary.records == 0)
    {
        println!("demo: FAIL the programs passed, but no worker executed anything for a guest");
        return Ok(false);
    }
    let accounts = summaries[0].exit_accounts.as_deref().unwrap_or_default();
    let exits = exits_per_call(accounts, "the first guest")?;
    let backend_exits = exits_per_call(&backend.exit_accounts, "the backend VM")?;
    let most = exits.max(backend_exits);
    if most > MOST_EXITS {
        println!("demo: FAIL launching adds {most:.5} VM exits to each launch");
        return Ok(false);
    }
    let sum = |of: fn(&Summary) -> u64| summaries.iter().map(of).sum::<u64>();
    println!(
        "demo: PASS programs={passed} guest={} backend=vm vms={} requests={} records={} \
         exits_per_call={exits:.5} backend_exits_per_call={backend_exits:.5}",
        ran.guest,
        vms.len(),
        sum(|summary| summary.requests),
        sum(|summary| summary.records),
    );
    Ok(true)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::LAUNCHES;
    use super::*;

    fn summary(vm: &str, backend: &str, exits: u64) -> Value {
        json!({
            "guest": "kvm", "vm": vm, "records": 1, "requests": 1, "exit_accounts": [0, exits, 9, 0],
            "backend_vm": { "vm": "kvm-1", "boot_id": backend, "exit_accounts": [0, 9, 9, 0] },
        })
    }

    /// Returns the outcome of a script whose two guests have these summaries. One program passes in each guest.
    fn ran(summaries: [Value; 2]) -> Ran {
        Ran {
            is_success: true,
            output: "first: boot a\nsecond: boot b\nfirst: PASS one\nsecond: PASS other\nfirst: PASS steady\n"
                .to_owned(),
            results: summaries.map(|summary| summary.to_string().into_bytes()).to_vec(),
            guest: "kvm",
        }
    }

    fn passes(ran: &Ran) -> bool {
        judge(ran, 2).expect("summaries")
    }

    #[test]
    fn the_demo_passes_with_three_vms_that_differ_alone() {
        let second = || summary("kvm-3", "c", 9);
        let of = |first| ran([first, second()]);
        assert!(passes(&of(summary("kvm-2", "c", 9))));
        assert!(!passes(&of(summary("kvm-1", "c", 9))), "one VM");
        assert!(!passes(&of(summary("kvm-3", "c", 9))), "one guest");
        assert!(!passes(&of(summary("kvm-2", "d", 9))), "two backend VMs");
        let same_boot = |boot| ran([summary("kvm-2", boot, 9), summary("kvm-3", boot, 9)]);
        assert!(!passes(&same_boot("a")), "one boot");
        assert!(!passes(&same_boot("")), "no boot");
        let mut alone = summary("kvm-2", "c", 9);
        alone["backend_vm"] = Value::Null;
        assert!(!passes(&of(alone)), "no backend VM");
    }

    #[test]
    fn the_demo_fails_where_a_run_a_program_or_a_worker_does() {
        let right = || ran([summary("kvm-2", "c", 9), summary("kvm-3", "c", 9)]);
        let mut ended = right();
        ended.is_success = false;
        assert!(!passes(&ended));
        let mut lost = right();
        lost.results.truncate(1);
        assert!(!passes(&lost));
        let mut wrong = right();
        wrong.output = wrong.output.replace("PASS other", "FAIL other");
        assert!(!passes(&wrong));
        let mut idle = summary("kvm-3", "c", 9);
        idle["requests"] = json!(0);
        assert!(!passes(&ran([summary("kvm-2", "c", 9), idle])));
    }

    #[test]
    fn the_demo_fails_where_launches_make_exits() {
        let with = |exits| ran([summary("kvm-2", "c", exits), summary("kvm-3", "c", 9)]);
        assert!(passes(&with(u64::from(LAUNCHES) / 100)));
        assert!(!passes(&with(u64::from(LAUNCHES))));
        let mut none = summary("kvm-2", "c", 9);
        none["exit_accounts"] = Value::Null;
        assert!(judge(&ran([none, summary("kvm-3", "c", 9)]), 2).is_err());
    }

    #[test]
    fn each_guest_has_a_program() {
        let programs = ["one", "two", "three"].map(PathBuf::from);
        assert_eq!(parts(&programs), [&programs[..2], &programs[2..]]);
        assert_eq!(parts(&programs[..1]), [&programs[..1]; 2]);
    }
}
