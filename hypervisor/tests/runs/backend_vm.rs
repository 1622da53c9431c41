//! Runs programs in a guest VM against a backend in a VM of its own, and cases that this placement must refuse.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use wormhole_images::Image;

use crate::emulated::script_with;
use crate::harness::{alone, beside_other_guests, finish, finish_at, program, wormhole};

/// Launches of the program `steady`.
const LAUNCHES: u64 = 10_240;

/// Programs that launch, copy, and use memory of the window at one address on both sides.
const PROGRAMS: [&str; 4] = ["vector_add", "streams_events", "managed", "steady"];

/// Each round trip of a program shows that the window of the guest and that of the backend VM are the same memory, since the
/// VMs share nothing else.
#[test]
fn programs_of_a_guest_are_served_by_another_vm_without_exits() {
    let _alone = alone();
    let json = tempfile::NamedTempFile::new().expect("a file");
    let mut script = "cat /proc/sys/kernel/random/boot_id\n".to_owned();
    for name in PROGRAMS {
        script.push_str(&format!("{} || exit\n", program("static", name).display()));
    }
    let mut command = wormhole(&["run", "--placement", "vm", "--memory", "256M", "--json"]);
    command.arg(json.path()).args(["--", "/bin/sh", "-c"]);
    let run = finish_at(command.arg(script), true);
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    for name in PROGRAMS {
        let passed = format!("PASS {name}");
        assert!(run.stdout.contains(&passed), "{passed}\n{}", run.stdout);
    }
    let text = fs::read(json.path()).expect("the summary is there");
    let summary: serde_json::Value = serde_json::from_slice(&text).expect("it is JSON");
    assert_eq!(summary["session_count"], PROGRAMS.len(), "{summary}");

    let own = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("proc is mounted");
    let guest = run.stdout.lines().next().expect("a line");
    let backend = summary["backend_vm"]["boot_id"].as_str().expect("an id");
    let boots = [own.trim(), guest, backend];
    for (at, boot) in boots.iter().enumerate() {
        let parts = boot.split('-').map(str::len);
        assert_eq!(parts.collect::<Vec<_>>(), [8, 4, 4, 4, 12], "{boots:?}");
        assert!(!boots[..at].contains(boot), "{boots:?}");
    }

    // A call that trapped would add one. A worker that waits for a guest without a processor sleeps, and its timer exits.
    for (accounts, most) in [
        (&summary["exit_accounts"], LAUNCHES / 20),
        (&summary["backend_vm"]["exit_accounts"], LAUNCHES / 2),
    ] {
        let exits = |account: usize| accounts[account].as_u64().expect("a number");
        let (launching, spinning) = (exits(1), exits(2));
        assert!(spinning > 0, "no timer made an exit: {summary}");
        assert!(
            launching.saturating_sub(spinning) < most,
            "{launching} exits while launching, {spinning} while spinning: {summary}"
        );
    }
    let exits = |of: &serde_json::Value| of["vm_exits"].as_u64().expect("a number");
    let said = format!(
        "{} VM exits, {} of the backend VM",
        exits(&summary),
        exits(&summary["backend_vm"])
    );
    assert!(run.stderr.contains(&said), "{said}\n{}", run.stderr);
}

/// Commands of a person with a backend VM in the emulated host. `$1` is the command, `$2` the folder of programs.
const SHARED: &str = r#"
set -e
command=$1 programs=$2
"$command" backend start many --placement vm --slots 3 --slot-size 258M
log=/run/wormhole/many/log
"$command" backend list --json
"$command" run --placement process --backend many "$programs/spin" 2>&1 || echo "status $?"
again=$("$command" backend start many --placement vm 2>&1) || echo "$again, status $?"

guest() { "$command" run --host kvm --backend many --memory 256M --quiet "$programs/$1"; }
# Attaches a window to a slot of the VM.
attach() { exec "$command" attach --backend many --size 64M --window /run/window.$1 --vsock /run/vsock.$1; }
# Waits until the last process has written its first line to the file $1.
says() {
    line=
    until { read -r line <"$1"; } 2>/dev/null && [[ $line == $2 ]]; do
        kill -0 $! && [ -z "$line" ] || { echo "instead of $2:"; cat "$1" $log; exit 9; }
        sleep 0.1
    done
}
tenant() {
    attach $1 >/run/$1 2>&1 &
    says /run/$1 "attached: *"
}

"$command" run --host kvm --backend many --memory 256M --quiet "$programs/spin" >/run/spin 2>&1 &
victim=$!
says /run/spin spinning
guest printf >/run/printf 2>&1 &
survivor=$!
for cycle in 1 2 3 4 5 6 7 8 9 10 11 12; do
    tenant cycle$cycle
    kill -TERM $!
    wait $!
done
echo "windows came and went $cycle times"
until read -r line </run/printf; do kill -0 $survivor; sleep 0.1; done 2>/dev/null
kill -9 $victim
wait $survivor && [[ $(cat /run/printf) == *"PASS printf" ]] && echo "the survivor passes"

# The slot of the killed guest is free again as well.
tenants=
for one in a b c; do
    tenant $one
    tenants="$tenants $!"
done
(attach d 2>&1) || echo "status $?"
kill -9 $tenants
guest vector_add 2>&1
while read -r line; do echo "log: $line"; done <$log
"$command" backend stop many
"#;

#[test]
fn several_guests_have_windows_in_a_backend_vm_that_come_and_go() {
    let _beside = beside_other_guests();
    let programs = ["spin", "printf", "vector_add"].map(|name| program("static", name));
    let folder = programs[0].parent().expect("the folder of programs");
    let tools = ["/usr/bin/cat", "/usr/bin/sleep"].map(PathBuf::from);
    let said = script_with(
        &[Image::guest, Image::backend],
        SHARED,
        &[folder.into()],
        &[&programs[..], &tools].concat(),
        &[],
    );
    for words in [
        "backend many serves: ",
        "\"placement\": \"vm\"",
        "backend many runs in a VM and serves guests alone: choose --placement host",
        "backend many is running already, as process",
        "windows came and went 12 times\n",
        "the survivor passes\n",
        "all 3 slots of the backend VM have a window\nstatus 2",
        "PASS vector_add",
        "backend many is stopped\n",
    ] {
        assert!(said.contains(words), "{words}\n{said}");
    }
    assert!(
        !said.contains("quarantine") && !said.contains("is lost"),
        "{said}"
    );
}

/// Asserts that a run ends with status 2 and says a line with these words.
fn refused(command: &mut Command, words: &[&str]) {
    let run = finish(command.args(["--", "/bin/true"]));
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    for word in words {
        assert!(run.stderr.contains(word), "{word}\n{}", run.stderr);
    }
}

#[test]
fn a_backend_vm_that_cannot_be_is_refused_in_a_sentence() {
    let vm = |more: &[&str]| {
        let mut command = wormhole(&["run", "--placement", "vm"]);
        command.args(more);
        command
    };
    refused(
        &mut vm(&["--device", "cuda:0"]),
        &["--placement host", "cuda:0"],
    );
    refused(
        &mut vm(&["--backend", "unix:/none"]),
        &["--backend", "leave one"],
    );
    refused(
        &mut vm(&["--window", "3M"]),
        &["3145728 bytes", "multiple of 2 MiB"],
    );
    refused(&mut vm(&["--window", "8T"]), &["at most"]);
    let start = |more: &[&str]| {
        let places = tempfile::tempdir().expect("a folder");
        let mut command = wormhole(&["backend", "start", "one"]);
        let run = finish(command.args(more).env("WORMHOLE_RUNTIME", places.path()));
        assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
        let left = fs::read_dir(places.path()).expect("a folder").count();
        assert_eq!(left, 0, "{}", run.stderr);
        run.stderr
    };
    for (more, words) in [
        (&["--slots", "3", "--memory", "1G"][..], "--slots, --memory"),
        (&["--placement", "vm", "--slot-size", "3M"], "3145728 bytes"),
        (&["--placement", "vm", "--memory", "16M"], "16777216 bytes"),
        (&["--placement", "vm", "--device", "cuda:0"], "cuda:0"),
        (
            &["--placement", "vm", "--tenant-user", "7"],
            "--tenant-user",
        ),
    ] {
        let said = start(more);
        assert!(said.contains(words), "{words}\n{said}");
    }
    let nothing = tempfile::tempdir().expect("a folder");
    refused(
        vm(&["--host", "emulated"]).env("WORMHOLE_IMAGES", nothing.path()),
        &["wormhole image build"],
    );
}
