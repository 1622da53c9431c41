//! Runs two guest VMs at once through one backend that stays, and guests without a program. Backend and guests are in
//! one emulated host, where the supervisor has cgroups and serves tenants that are strangers.

use std::path::PathBuf;

use crate::emulated::{CGROUPS, COUNTS, WITHIN, limits_of, script, shown};
use crate::guest_of_qemu;
use crate::harness::{beside_other_guests, program};

/// Commands of a person in the emulated host. `$1` is the command, `$2` the folder of programs, `$3` an initrd
/// that runs one of them.
const START: &str = r#"
set -e
command=$1 programs=$2 initrd=$3
fail() { echo "$1"; exit 1; }
"$command" backend start
"#;

/// Commands of a person who runs programs in guests.
const SCRIPT: &str = r#"
guest() { exec "$command" run --host kvm --kernel 6.1 --backend default --memory 256M --quiet "$programs/$1" 2>&1; }
exec 3< <(guest spin)
victim=$!
read -r line <&3 && [ "$line" = spinning ]
exec 4< <(guest copying)
survivor=$!
read -r line <&4 && [ "$line" = copying ]
limits_of victim $victim
powers_of victim $victim
kill -9 $victim
within 60 "the end of the victim's cgroup" is_gone $group
within 120 "figures of the survivor" counts default $survivor
within 120 "further figures of the survivor" counts default $survivor
kill -TERM $survivor
while read -r line <&4; do echo "the survivor says $line"; done
wait $survivor || echo "the survivor ends with $?"
passed=$(guest vector_add)
[[ $passed == *"PASS vector_add"* ]] && echo "a later guest passes"
exec 5< <(exec perl -e '$| = 1; socket(S, 1, 2, 0) and bind(S, pack("SZ*", 1, "/run/notify")) or die;
    print "listens\n"; recv(S, $said, 64, 0); print "bare is $said\n"')
read -r line <&5
# In this cgroup, which is not delegated, a guest has none of its own.
mkdir /sys/fs/cgroup/other
bare=$(echo $BASHPID >/sys/fs/cgroup/other/cgroup.procs
    NOTIFY_SOCKET=/run/notify exec "$command" guest start bare --foreground --backend default --memory 256M \
    --kernel /var/lib/wormhole/images/guest-6.1/vmlinuz --initrd "$initrd" --append quiet 2>&1) || ended=$?
[[ $bare == *"PASS vector_add"*"exited 0"* ]] && echo "a guest without a program passes, and ends with ${ended:-0}"
read -r line <&5 && echo "$line"
subfolders() { for each in "$1"/*/; do echo "$1 has ${each#"$1"/}"; done; }
shopt -s nullglob
subfolders /sys/fs/cgroup/other
"#;

/// Commands of a person who has guests in the background. `$4` is an initrd whose guest does what its console says.
const GUESTS: &str = r#"
start() {
    "$command" guest start "$1" --backend default --memory 256M --append quiet \
        --kernel /var/lib/wormhole/images/guest-6.1/vmlinuz --initrd "$4" "${@:5}" 2>&1
}
shopt -s nullglob dotglob
left() { left=(/run/wormhole/.guests/*); echo "left $1: ${left[*]}"; }

start one "${@:2}"
start two "${@:2}"
again=$(start two "${@:2}") || echo "$again, status $?"
shown one "ready for words"
shown two "ready for words"
"$command" guest list
exits() { "$command" stats | while read -r _ _ _ guest rest; do [ "$guest" = two ] && echo "${rest##* }"; done; }
before=$(exits)
sleep 5
echo "idle $(($(exits) - before))"
monitor=$("$command" guest list --json)
monitor=${monitor#*\"pid\": } monitor=${monitor%%,*}
perl -ne '/^Size: +(\d+)/ and $size = $1; /^Pss: +(\d+)/ and $size < 250 << 10 and $beside += $1;
    /^AnonHugePages: +(\d+)/ and $size >= 250 << 10 and $huge += $1;
    END { print "monitor $beside $huge\n" }' "/proc/$monitor/smaps"
limits_of one $monitor
powers_of one $monitor
line=
coproc console { exec "$command" guest console one 2>&1; }
echo vector_add >&${console[1]}
until [[ $line == *"PASS vector_add"* ]]; do read -r line <&${console[0]} || exit 1; done
echo "the console shows the program"
"$command" ps
"$command" stats
busy=$("$command" guest console one 2>&1) || echo "$busy, status $?"
echo crash >&${console[1]}
until [[ $("$command" guest list) == *panicked* ]]; do sleep 0.2; done
shown one "Kernel panic"
"$command" guest stop one
within 60 "the end of the cgroup of guest one" is_gone $group

victim=$("$command" guest list --json)
victim=${victim#*\"pid\": } victim=${victim%%,*}
{ echo vector_add; shown two "PASS vector_add"; } | "$command" guest console two >/dev/null 2>&1
limits_of two $victim
kill -9 $victim
until [ -z "$(echo /run/wormhole/.guests/*)" ]; do sleep 0.2; done
left "after the kill"
within 60 "the end of the cgroup of guest two" is_gone $group
delegated=/sys/fs/cgroup/delegated
mkdir $delegated $delegated/vm-1.7
perl -e 'my ($name, $mark) = ("trusted.delegate", "1");
    syscall(188, $ARGV[0], $name, $mark, 1, 0) == 0 or die "no mark as of systemd: $!"' $delegated
(echo $BASHPID >$delegated/cgroup.procs && start three "${@:2}" --pin 1 --dedicated --prefault)
three=$("$command" guest list --json)
three=${three#*\"pid\": } three=${three%%,*}
shown three "ready for words"
for task in /proc/$three/task/*; do
    [ "$(<$task/comm)" != vcpu0 ] || while read -r key value; do
        [ $key != Cpus_allowed_list: ] || echo "three runs on $value"
    done <$task/status
done
{ echo spin; shown three spinning; } | "$command" guest console three >/dev/null 2>&1
# Memory of the guest that is not there, and huge pages of its window, in KiB.
perl -ne '/^[0-9a-f]+-/ and $window = /wormhole-window/; /^Size: +(\d+)/ and $size = $1;
    /^Rss: +(\d+)/ and !$window and $size >= 250 << 10 and $absent += $size - $1;
    /^ShmemPmdMapped: +(\d+)/ and $huge += $1;
    END { print "three: $absent absent, huge $huge\n" }' "/proc/$three/smaps"
limits_of three $three
echo "cgroup of three: $group"
is_gone $delegated/vm-1.7 && echo "no cgroup of an earlier guest is left"
"$command" guest stop three --timeout 1
within 60 "the end of the cgroup of guest three" is_gone $group
left "after the stop"
failed=$("$command" guest start four --backend default --kernel "$3" 2>&1) || echo "$failed, status $?"
left "after a failure"
"$command" guest stop three 2>&1 || echo "status $?"
"#;

/// The person's last commands.
const END: &str = r#"
"$command" backend list
"$command" backend stop
"#;

/// Command of a guest that does what its console says.
const WORDS: &str = r#"
echo ready for words
while read -r word; do
    case $word in
    vector_add) "$folder/vector_add" ;;
    spin) "$folder/spin" & ;;
    crash) echo c >/proc/sysrq-trigger ;;
    esac
done </dev/console
"#;

#[test]
fn two_guests_share_a_backend_and_one_killed_harms_no_other() {
    let _beside = beside_other_guests();
    let programs = ["spin", "copying", "vector_add"].map(|name| program("static", name));
    let folder = programs[0].parent().expect("the folder of programs");
    let home = tempfile::tempdir().expect("a folder");
    let vector_add = programs[2].display().to_string();
    let initrd = home.path().join(guest_of_qemu::initrd(
        home.path(),
        "bare.img",
        &vector_add,
        &["vector_add"],
    ));
    let obedient = home.path().join(guest_of_qemu::initrd(
        home.path(),
        "words.img",
        &format!("folder={}{WORDS}", folder.display()),
        &["spin", "vector_add"],
    ));
    let arguments = [
        folder.into(),
        initrd.clone().into(),
        obedient.clone().into(),
    ];
    let tools = [
        "/usr/bin/mkdir",
        "/usr/bin/mount",
        "/usr/bin/perl",
        "/usr/bin/sleep",
    ]
    .map(PathBuf::from);
    let files = [&programs[..], &[initrd, obedient], &tools].concat();
    let all = [
        WITHIN,
        COUNTS,
        CGROUPS,
        &shown(1000, 0.2),
        START,
        SCRIPT,
        GUESTS,
        END,
    ]
    .concat();
    let said = script(&all, &arguments, &files, &[]);
    // Each guest has a tenant of its own, and its monitor tells of its exits.
    for guest in ["one", "two"] {
        let lines = said.lines().map(|line| line.split_whitespace().collect());
        let lines: Vec<Vec<&str>> = lines.collect();
        let has = |cells: &&Vec<&str>| cells.len() == 16 && cells[3] == guest;
        let stats = lines.iter().find(has).expect(&said);
        let exits: Result<u64, _> = stats[15].parse();
        assert!(exits.is_ok_and(|exits| exits > 0), "{said}");
        let listed = [guest, "1", "256M", "default", "running"];
        let of_ps =
            |cells: &Vec<&str>| cells.len() == 7 && [&cells[..1], &cells[3..]].concat() == listed;
        assert!(lines.iter().any(of_ps), "{said}");
    }
    // A timer that goes on ticking would make more than a thousand, and polling many more. The commands that ask for the
    // figures make the five seconds longer on a busy machine.
    let idle = said.lines().find_map(|line| line.strip_prefix("idle "));
    let idle: Result<u64, _> = idle.expect(&said).parse();
    assert!(idle.is_ok_and(|exits| (1..600).contains(&exits)), "{said}");
    // Memory of the monitor beside that of its guest, and the huge pages of the latter.
    let kilobytes = said.lines().find_map(|line| line.strip_prefix("monitor "));
    let kilobytes = kilobytes.expect(&said).split(' ').map(str::parse);
    let kilobytes: Result<Vec<u64>, _> = kilobytes.collect();
    assert!(
        kilobytes.is_ok_and(|kilobytes| kilobytes[0] <= 8 << 10 && kilobytes[1] >= 2 << 10),
        "{said}"
    );
    // It is pinned, and has all of its memory, and huge pages of the window.
    let huge = said
        .lines()
        .find_map(|line| line.strip_prefix("three: 0 absent, huge "));
    let huge: Result<u64, _> = huge.expect(&said).parse();
    assert!(huge.is_ok_and(|huge| huge >= 2 << 10), "{said}");
    // A guest of 256 MiB has a window of 258 MiB, and 128 MiB for files. All of it counts in the cgroup of its monitor.
    for guest in ["victim", "one", "two", "three"] {
        let limits = limits_of(guest, 256 + 258 + 128);
        let used = said.lines().find_map(|line| line.strip_prefix(&*limits));
        let used: Result<u64, _> = used.expect(&said).parse();
        assert!(used.is_ok_and(|used| used > 16 << 20), "{said}");
    }
    for words in [
        "no thread of victim has a capability",
        "no thread of one has a capability",
        "cgroup of three: /sys/fs/cgroup/delegated/vm-",
        "no cgroup of an earlier guest is left",
        "bare is READY=1",
        "the survivor ends with 143\n",
        "a later guest passes",
        "a guest without a program passes, and ends with 0",
        "guest one runs: `wormhole guest console one` attaches to its console",
        "guest two is running already, as process",
        "the console shows the program",
        "is attached to the console of guest one: detach it with Ctrl-], or end it, status 2",
        "guest one had ended: the guest's kernel panicked: ",
        "left after the kill: \n",
        "three runs on 1\n",
        "guest three is killed: it did not switch itself off within 1 s of its power button",
        "left after the stop: \n",
        "guest four does not start: ",
        "left after a failure: \n",
        "no guest three is running: `wormhole guest start three` starts one\nstatus 2",
        "backend default is stopped",
    ] {
        assert!(said.contains(words), "{said}");
    }
    for words in ["/sys/fs/cgroup/other has ", "the survivor says "] {
        assert!(!said.contains(words), "{said}");
    }
}
