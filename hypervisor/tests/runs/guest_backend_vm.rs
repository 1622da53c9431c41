//! Runs programs in a guest VM against a backend in a VM of its own, and cases that this placement must refuse.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use wormhole_images::Image;

use crate::backends::{VM_UNIT, unit_command};
use crate::documents;
use crate::emulated::{CGROUPS, COUNTS, WITHIN, script_with};
use crate::guest_of_qemu;
use crate::harness::{alone, beside_other_guests, finish, finish_at, program, wormhole};

/// Launches of the program `steady`.
const LAUNCHES: u64 = 10_240;

/// Programs that launch, copy, and use memory of the window at one address on both sides.
const PROGRAMS: [&str; 5] = [
    "vector_add",
    "streams_events",
    "managed",
    "registered_load",
    "steady",
];

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
    let page = documents::root().join("docs/backend-vm.md");
    let shown = documents::blocks_of(&page, "json").swap_remove(0);
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("it is JSON");
    assert_has_fields(&summary, &shown);

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

/// Asserts that a value has all fields of one on a page, with values of the same kinds.
fn assert_has_fields(value: &serde_json::Value, shown: &serde_json::Value) {
    use serde_json::Value;
    match (value, shown) {
        (Value::Object(value), Value::Object(shown)) => {
            for (name, shown) in shown {
                let found = value
                    .get(name)
                    .unwrap_or_else(|| panic!("{name} is absent: {value:?}"));
                assert_has_fields(found, shown);
            }
        }
        (Value::Array(value), Value::Array(shown)) => assert_eq!(value.len(), shown.len()),
        _ => assert_eq!(
            std::mem::discriminant(value),
            std::mem::discriminant(shown),
            "{value} is of another kind than {shown}"
        ),
    }
}

/// Commands of a person with a backend VM in the emulated host. `$1` is the command, `$2` the folder of programs, `$3` an
/// initrd whose guest does what its console says, `$4` the commands of [`ZEROS`], `$5` the command of the unit of backend
/// VMs, which starts the second one.
const SHARED: &str = r#"
set -e
command=$1 programs=$2 initrd=$3 zeros=$4 unit=$5
"$command" backend start many --placement vm --slots 3 --slot-size 258M
log=/run/wormhole/many/log
"$command" backend list --json
"$command" run --placement process --backend many "$programs/spin" 2>&1 || echo "status $?"
again=$("$command" backend start many --placement vm 2>&1) || echo "$again, status $?"

# Windows for which the slots are too small, and a device, on this machine without an IOMMU.
refused() { ("$@" 2>&1 || echo "status $?") | while read -r line; do echo "refused: $line"; done; }
refused "$command" attach --backend many --size 512M --window /run/large --vsock /run/large.vsock
refused "$command" run --host kvm --backend many --window 512M "$programs/spin"
refused "$command" guest start large --backend many --window 512M --kernel $initrd
refused "$command" backend start other --placement vm --pci 00:00.0
for left in /run/large /run/large.vsock /run/wormhole/other /run/wormhole/.guests/large; do
    [ ! -e $left ] && [ ! -L $left ] || echo "a refusal leaves $left"
done

stays=/run/wormhole/.guests/stays
# Says what is wrong and what the processes said, and ends the script.
fail() {
    echo "$1"
    for file in /run/hostile /run/victim /run/survivor /run/told /run/unit $stays/console $stays/log $log; do
        [ ! -e $file ] || { echo "$file:"; cat $file; }
    done
    exit 1
}
guest() { exec "$command" run --host kvm --backend many --memory 256M --timeout 3000 --quiet "$programs/"$1; }
# Attaches a window to a slot of the VM.
attach() { exec "$command" attach --backend many --size 64M --window /run/window.$1 --vsock /run/vsock.$1; }
contains() { [ -e "$1" ] && [[ $(<"$1") == *"$2"* ]]; }
# Succeeds if a line is in the file $1, or if none will come since the process $2 has ended.
has_line() { read -r line <"$1" || ! kill -0 $2; }
# Waits until the last process has written its first line to the file $1.
says() {
    within 600 "a line of $1" has_line "$1" $!
    line=
    read -r line <"$1" && [[ $line == $2 ]] || fail "instead of $2, $1 begins with: $line"
}
tenant() {
    attach $1 >/run/$1 2>&1 &
    says /run/$1 "attached: *"
}
show() { while read -r line; do echo "log: $line"; done <"$1"; }

# The VM's supervisor says what this guest does to it.
(guest "hostile streams 3") >/run/hostile 2>&1 || echo "the hostile guest ends with $?"
within 60 "a line of the VM's log" contains $log "the guest broke the protocol: "
guest copying >/run/victim 2>&1 &
victim=$!
says /run/victim copying
within 120 "figures of the victim" counts many $victim
echo "stats of the victim $victim: ${stats//$'\n'/}"
"$command" stats many
guest copying >/run/survivor 2>&1 &
survivor=$!
before=$SECONDS
for ((cycle = 1; cycle <= 50; cycle++)); do
    tenant cycle$cycle
    kill -TERM $!
    wait $!
done
echo "50 windows came and went in $((SECONDS - before)) s"
within 600 "a line of the survivor" has_line /run/survivor $survivor
within 120 "further figures of the victim" counts many $victim
echo "stats before the kill: ${stats//$'\n'/}"
kill -9 $victim || fail "the victim has ended"
counted=()
within 120 "figures of the survivor" counts many $survivor
within 120 "further figures of the survivor" counts many $survivor
kill -TERM $survivor
status=0
wait $survivor || status=$?
echo "the survivor says $(</run/survivor), status $status"

# The victim was copying. The VM reaches nothing of that where the next windows will be, and writes nothing there.
windowless() { [ ! -e /proc/$1 ] || [[ $(</proc/$1/maps) != *memfd:wormhole-window* ]]; }
vm=$(</run/wormhole/many/record.json)
vm=${vm#*\"pid\":} vm=${vm%%,*}
within 180 "the end of the windows in the VM's process" windowless $((vm))
perl -e "$zeros" $((vm))
limits_of many $((vm))
powers_of many $((vm))

# The slot of the killed guest is free again as well.
tenants=
for one in a b c; do
    tenant $one
    tenants="$tenants $!"
done
(attach d 2>&1) || echo "status $?"
kill -9 $tenants

# A guest that outlives its backend.
said() { within 300 "the guest's words: $1" contains $stays/console "$1"; }
tell() {
    exec 4> >(exec "$command" guest console stays >/dev/null 2>/run/told)
    local console=$!
    echo "$1" >&4
    said "$2"
    exec 4>&-
    wait $console || fail "the console ends with $?"
}
"$command" guest start stays --backend many --memory 256M --append quiet \
    --kernel /var/lib/wormhole/images/guest-6.1/vmlinuz --initrd "$initrd"
said "ready for words"
tell vector_add "turn 1: 0"
tell spin spinning
tell hold "one is held"
show $log
kill -9 $((vm))
said "FAIL spin"
tell vector_add "turn 2: 1"
exec 3< <(exec perl -e '$| = 1; socket(S, 1, 2, 0) and bind(S, pack("SZ*", 1, "/run/notify")) or die;
    print "listens\n"; recv(S, $said, 64, 0); print "the unit is $said\n"')
read -r line <&3
NOTIFY_SOCKET=/run/notify $unit 2>/run/unit &
unit=$!
read -t 600 -r line <&3 && echo "$line" || fail "the unit does not serve"
"$command" backend list --json
tell vector_add "turn 3: 1"
tell free "none is held"
tell again "works again"
while read -r line; do echo "console: $line"; done <$stays/console
show $stays/log
"$command" guest stop stays --timeout 1
# Until now the guest's process could hold figures of the first VM, which keep a thread of KVM's there.
within 60 "the end of the VM's cgroup" is_gone $group
show /run/unit
kill -TERM $unit
wait $unit && echo "the unit ends with 0"
"$command" backend stop many 2>&1 || echo "status $?"

# One more, as a person ends it.
"$command" backend start many --placement vm --slots 1 --slot-size 258M
"$command" backend stop many
"#;

/// Commands of the guest that outlives its backend. One of its processes holds memory of the window and cannot notice the
/// backend's end.
const WORDS: &str = r#"
echo ready for words
turn=0
while read -r word; do
    case $word in
    vector_add)
        "$folder/vector_add" 2>&1
        status=$?
        turn=$((turn + 1))
        echo "turn $turn: $status"
        ;;
    spin) "$folder/spin" 2>&1 & ;;
    hold)
        "$folder/spin" >/held 2>&1 &
        held=$!
        until [ -s /held ]; do :; done
        kill -STOP $held
        echo one is held
        ;;
    free)
        kill -KILL $held
        echo none is held
        ;;
    again)
        until "$folder/vector_add" >/dev/null 2>&1; do :; done
        echo works again
        ;;
    esac
done </dev/console
"#;

/// Commands of Perl that look at what is left beneath the aperture of the VM's process `$ARGV[0]`, after the last window. All
/// of the aperture's addresses must be mapped to its own file, so that the VM reaches no byte of a window. The bytes of
/// that file are zero unless the VM wrote to a slot after its window was removed. Holes are zero.
const ZEROS: &str = r#"
my $folder = "/proc/$ARGV[0]/fd";
opendir(my $open, $folder) or die "no process: $!";
my ($path) = grep { (readlink($_) // "") =~ /wormhole-aperture/ } map { "$folder/$_" } readdir($open);
open(my $file, "<", $path) or die "no aperture: $!";
open(my $mappings, "<", "/proc/$ARGV[0]/maps") or die "no mappings: $!";
my ($start, $end) = (0, 0);
while (<$mappings>) {
    my ($from, $to, $offset) = map { hex } /^(\w+)-(\w+) \S+ (\w+) .*wormhole-aperture/ or next;
    $start ||= $from;
    die "not mapped in its place: $_" unless $offset == $end && $from - $start == $end;
    $end = $to - $start;
}
die "$end bytes of the aperture are mapped to its file" unless $end == -s $file;
my ($data, $hole) = (0, 0);
while (defined($data = sysseek($file, $hole, 3))) {
    $hole = sysseek($file, $data, 4);
    sysseek($file, $data, 0);
    while ($data < $hole) {
        my $count = sysread($file, my $bytes, $hole - $data < 1 << 20 ? $hole - $data : 1 << 20);
        die "cannot read: $!" unless $count;
        die "the VM wrote to the byte at $data or one behind it" if $bytes =~ /[^\0]/;
        $data += $count;
    }
}
print "all $end bytes that the VM reaches are zero\n";
"#;

#[test]
fn several_guests_have_windows_in_a_backend_vm_that_come_and_go() {
    let _beside = beside_other_guests();
    let programs = ["spin", "vector_add", "copying", "hostile"].map(|name| program("static", name));
    let folder = programs[0].parent().expect("the folder of programs");
    let home = tempfile::tempdir().expect("a folder");
    let initrd = home.path().join(guest_of_qemu::initrd(
        home.path(),
        "words.img",
        &format!("folder={}{WORDS}", folder.display()),
        &["vector_add", "spin"],
    ));
    let options = home.path().join("many.toml");
    fs::write(&options, "slots = 3\nslot-size = \"258M\"\n").expect("a file");
    let unit = unit_command(VM_UNIT, home.path(), "many").join(" ");
    let tools = [
        "/usr/bin/cat",
        "/usr/bin/mount",
        "/usr/bin/perl",
        "/usr/bin/sleep",
    ]
    .map(PathBuf::from);
    let said = script_with(
        &[Image::guest, Image::backend],
        &[WITHIN, COUNTS, CGROUPS, SHARED].concat(),
        &[
            folder.into(),
            initrd.clone().into(),
            ZEROS.into(),
            unit.into(),
        ],
        &[&programs[..], &tools, &[initrd, options]].concat(),
        &[],
        Duration::from_secs(1800),
    );
    let words_after = |beginning: &str| {
        let words = said.lines().find_map(|line| line.strip_prefix(beginning));
        words.unwrap_or_else(|| panic!("{beginning}\n{said}"))
    };
    println!(
        "50 windows in {}",
        words_after("50 windows came and went in ")
    );
    let tenants = |stats: &str| match serde_json::from_str(stats).expect("stats") {
        serde_json::Value::Object(mut stats) => stats["tenants"].take(),
        other => panic!("no object: {other}"),
    };
    let (victim, stats) = words_after("stats of the victim ")
        .split_once(": ")
        .expect("a process and its stats");
    let of_victim = tenants(stats);
    assert_eq!(of_victim.as_array().map(Vec::len), Some(1), "{stats}");
    assert_eq!(of_victim[0]["process"].to_string(), victim, "{stats}");
    assert_eq!(of_victim[0]["sessions"], 1, "{stats}");
    assert_eq!(of_victim[0]["is_current"], true, "{stats}");
    let counted = [
        "records",
        "bytes_to_device",
        "bytes_from_device",
        "vm_exits",
    ];
    for counted in counted {
        assert!(
            of_victim[0][counted].as_u64() > Some(0),
            "{counted}: {stats}"
        );
    }
    let limits = "limits of many: max bytes, 4096 tasks; in use: ";
    assert!(said.contains(limits), "{limits}\n{said}");
    // It goes on beside the other guest and the windows that come and go, and compares what it copies.
    let later = tenants(words_after("stats before the kill: "));
    let mut later = later.as_array().expect("tenants").iter();
    let later = later.find(|tenant| tenant["process"] == of_victim[0]["process"]);
    let later = later.unwrap_or_else(|| panic!("the victim is gone: {said}"));
    for counted in counted {
        let [before, after] = [&of_victim[0], later].map(|tenant| tenant[counted].as_u64());
        assert!(before < after, "{counted}: {before:?}, {after:?}: {said}");
    }
    for words in [
        "TENANT  USER ",
        "backend many serves: ",
        "\"placement\": \"vm\"",
        "backend many runs in a VM and serves guests alone: choose --placement host",
        "backend many is running already, as process",
        "the survivor says copying, status 143\n",
        "no thread of many has a capability\n",
        // 3 slots of 258 MiB, each at a multiple of 128 MiB.
        "all 1207959552 bytes that the VM reaches are zero\n",
        "all 3 slots of the backend VM have a window\nstatus 2",
        "guest stays runs: ",
        "console: cudaDeviceSynchronize(): cudaErrorSystemNotReady",
        ": the guest broke the protocol: a control message starts with",
        "log: wormhole: the guest's backend has ended: ",
        "log: wormhole: the guest has a backend again",
        "the unit is READY=1\n",
        "the unit ends with 0\n",
        "no backend many is running: `wormhole backend start many` starts one\nstatus 2",
        "\nbackend many is stopped\n",
    ] {
        assert!(said.contains(words), "{words}\n{said}");
    }
    let refusals = said
        .lines()
        .filter_map(|line| line.strip_prefix("refused: "));
    let too_large = "a window of 536870912 bytes is larger than a slot, which has 270532608";
    let no_iommu = "the device 0000:00:00.0 has no IOMMU, which would confine it to the VM's memory: enable the IOMMU in the \
                    firmware and by the kernel parameter intel_iommu=on";
    let expected = [
        format!("wormhole: {too_large}"),
        format!("wormhole: backend: {too_large}"),
        format!("wormhole: guest large does not start: backend: {too_large}"),
        format!("wormhole: {no_iommu}"),
    ];
    let expected = expected.iter().flat_map(|sentence| [sentence, "status 2"]);
    assert_eq!(
        refusals.collect::<Vec<_>>(),
        expected.collect::<Vec<_>>(),
        "{said}"
    );
    for words in ["a refusal leaves", "quarantine", "is lost"] {
        assert!(!said.contains(words), "{words}\n{said}");
    }
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
}
