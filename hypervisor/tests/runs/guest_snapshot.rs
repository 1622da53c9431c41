//! Saves a Linux guest while it runs, ends it, and lets it go on. Backend and guest are in one emulated host.

use std::path::PathBuf;

use crate::documents::{commands_of, root};
use crate::emulated::{script, shown};
use crate::guest_of_qemu;
use crate::harness::{beside_other_guests, program};

/// Functions for commands of a person in the emulated host. `$1` is the command, `$2` an initrd whose guest does what its
/// console says.
const PERSON: &str = r#"
set -e
command=$1 initrd=$2
said() { shown debian "$1"; }
type_in() { coproc console { exec "$command" guest console debian 2>&1; }; }
mount -t cgroup2 none /sys/fs/cgroup
mkdir /srv
"$command" backend start
head -c 1M /dev/zero >/disk
start() {
    "$command" guest start debian --backend default --memory 256M --append quiet --disk /disk \
        --kernel /var/lib/wormhole/images/guest-6.1/vmlinuz --initrd "$initrd" "$@"
    said "ready for words"
    type_in
}
"#;

/// Saves a guest with and without a session, and lets it go on from two snapshots. SAVE and RESTORE are the commands of
/// docs/guests.md.
const SCRIPT: &str = r#"
start
echo next >&${console[1]}
said "count 1, on the disk 1, before 0 in shared memory, ext4"
echo spin >&${console[1]}
said "spinning"
refused=$("$command" guest snapshot debian /first 2>&1) || echo "$refused, status $?"
[ -e /first ] || echo "nothing is left of a refused snapshot"
echo end >&${console[1]}
until "$command" guest snapshot debian /first; do sleep 0.2; done
echo next >&${console[1]}
said "count 2, on the disk 2, before 1 in shared memory, ext4"
SAVE
[ -z "$("$command" guest list --json | grep pid)" ] && echo "the saved guest has ended"
changed=$("$command" guest start debian --restore /first --backend default 2>&1) || echo "$changed, status $?"

RESTORE --backend default
type_in
echo next >&${console[1]}
said "count 3, on the disk 3, before 2 in shared memory, ext4"
echo vector_add >&${console[1]}
said "PASS vector_add"
echo shared_files >&${console[1]}
said "PASS shared_files"
"$command" guest list
"$command" guest stop debian --timeout 1
"$command" backend stop
"#;

/// Saves a guest of two processors while both work. One processor writes to the disk without pause, the other counts.
const BUSY: &str = r#"
mkdir /small
mount -t tmpfs -o size=4M none /small
start --cpus 2
echo work >&${console[1]}
said "at work on 2 processors"
for ((looks = 1; looks <= 6; looks++)); do
    case $looks in
    2 | 4)
        full=$("$command" guest snapshot debian /small/saved 2>&1) || echo "$full, status $?"
        [ -e /small/saved ] || echo "nothing is left on the full disk"
        ;;
    3) "$command" guest snapshot debian /busy ;;
    5 | 6)
        "$command" guest snapshot debian /stopped-$looks --stop
        "$command" guest start debian --restore /stopped-$looks --backend default
        type_in
        ;;
    esac
    echo look >&${console[1]}
    said "look $looks: both go on"
    if "$command" guest logs debian | grep "in the place of"; then exit 1; fi
done
"$command" guest stop debian --timeout 1
"$command" backend stop
"#;

/// Command of a guest that does what its console says.
const WORDS: &str = r#"
count=0
echo 0 >/dev/shm/count
while read -r _ place type _; do
    [ "$place" = /dev/shm ] && shared=$type
done </proc/mounts
echo ready for words
while read -r word; do
    case $word in
    next)
        count=$((count + 1))
        echo $count >/dev/vda
        read -r written </dev/vda
        read -r before </dev/shm/count
        echo $count >/dev/shm/count
        echo "count $count, on the disk $written, before $before in shared memory, $shared"
        ;;
    spin) "$spin" & ;;
    end) kill -9 $! ;;
    vector_add) "$vector_add" ;;
    shared_files) "$shared_files" ;;
    work)
        processors=0
        while read -r key rest; do
            [ "$key" = processor ] && processors=$((processors + 1))
        done </proc/cpuinfo
        (
            while :; do
                written=$((written + 1))
                echo $written >/dev/vda
                read -r found </dev/vda
                [ "$found" = $written ] || echo "the disk has $found in the place of $written"
                echo $written >/written
            done
        ) &
        (
            while :; do
                counted=$((counted + 1))
                echo $counted >/counted
            done
        ) &
        while ! [ -s /written ] || ! [ -s /counted ]; do :; done
        echo "at work on $processors processors"
        ;;
    look)
        looks=$((looks + 1))
        for name in written counted; do
            read -r before </$name
            after=$before
            while [ "$after" = "$before" ]; do read -r after </$name; done
        done
        echo "look $looks: both go on"
        ;;
    esac
done </dev/console
"#;

/// Runs a script that follows [`PERSON`], and returns its output, in which each run of spaces is one.
fn said(commands: &str) -> String {
    let programs = ["spin", "vector_add", "shared_files"];
    let home = tempfile::tempdir().expect("a folder");
    let paths = programs.map(|name| format!("{name}={} ", program("static", name).display()));
    let command = format!("{}{WORDS}", paths.concat());
    let initrd = home.path().join(guest_of_qemu::initrd(
        home.path(),
        "words.img",
        &command,
        &programs,
    ));
    let tools = ["grep", "head", "mkdir", "mount", "sleep"];
    let tools = tools.map(|tool| PathBuf::from("/usr/bin").join(tool));
    let files = [std::slice::from_ref(&initrd), &tools].concat();
    let commands = [&shown(1000, 0.2), PERSON, commands].concat();
    let said = script(&commands, &[initrd.into()], &files, &[]);
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_linux_guest_goes_on_where_it_was_saved() {
    let _beside = beside_other_guests();
    let page = commands_of(&root().join("docs/guests.md"));
    let line = |word: &str| {
        let line = page.iter().find(|line| line.contains(word)).expect(word);
        line.replace("target/wormhole/bin/wormhole", "\"$command\"")
    };
    let save = line(" guest snapshot ");
    let restore = line(" --restore ");
    let said = said(&SCRIPT.replace("SAVE", &save).replace("RESTORE", &restore));
    for words in [
        "guest debian is not saved: a program of it has a CUDA session open, which cannot be saved",
        "nothing is left of a refused snapshot",
        "guest debian is saved in /first, and runs on",
        "guest debian is saved in /srv/debian-1, and has ended",
        "the saved guest has ended",
        "disk 0 (/dev/vda in the guest) is not the one of the snapshot any more: it was written after the snapshot, status 2",
        "256M default running",
        "guest debian is killed: it did not switch itself off within 1 s of its power button",
        "backend default is stopped",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn a_guest_is_saved_at_work_and_goes_on_with_its_disk_on_two_processors() {
    let _beside = beside_other_guests();
    let said = said(BUSY);
    let full = "guest debian is not saved: the guest's memory cannot be written: No space left on device (os error 28), status 2 \
                nothing is left on the full disk";
    assert_eq!(said.matches(full).count(), 2, "{said}");
    for words in [
        "guest debian is saved in /busy, and runs on",
        "guest debian is saved in /stopped-5, and has ended",
        "guest debian is saved in /stopped-6, and has ended",
        "backend default is stopped",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}
