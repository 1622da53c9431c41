//! Saves a Linux guest while it runs, ends it, and lets it go on. Backend and guest are in one emulated host.

use std::path::PathBuf;

use crate::emulated::script;
use crate::harness::{beside_other_guests, program};
use crate::qemu;

/// Commands of a person in the emulated host. `$1` is the command, `$2` an initrd whose guest does what its console says.
const SCRIPT: &str = r#"
set -e
command=$1 initrd=$2
said() {
    for ((looks = 0; looks < 1000; looks++)); do
        [[ $("$command" guest logs one) == *"$1"* ]] && return
        sleep 0.2
    done
    echo "the guest does not say $1:"
    "$command" guest logs one
    exit 1
}
type_in() { coproc console { exec "$command" guest console one 2>&1; }; }
mount -t cgroup2 none /sys/fs/cgroup
"$command" backend start
head -c 1M /dev/zero >/disk
"$command" guest start one --backend default --memory 256M --append quiet --disk /disk \
    --kernel /var/lib/wormhole/images/guest-6.1/vmlinuz --initrd "$initrd"
said "ready for words"
type_in
echo next >&${console[1]}
said "count 1, on the disk 1"
echo spin >&${console[1]}
said "spinning"
refused=$("$command" guest snapshot one /first 2>&1) || echo "$refused, status $?"
[ -e /first ] || echo "nothing is left of a refused snapshot"
echo end >&${console[1]}
until "$command" guest snapshot one /first; do sleep 0.2; done
echo next >&${console[1]}
said "count 2, on the disk 2"
"$command" guest snapshot one /second --stop
[ -z "$("$command" guest list --json | grep pid)" ] && echo "the saved guest has ended"
changed=$("$command" guest start one --restore /first --backend default 2>&1) || echo "$changed, status $?"

"$command" guest start one --restore /second --backend default
type_in
echo next >&${console[1]}
said "count 3, on the disk 3"
echo vector_add >&${console[1]}
said "PASS vector_add"
"$command" guest list
"$command" guest stop one --timeout 1
"$command" backend stop
"#;

/// Command of a guest that does what its console says.
const WORDS: &str = r#"
count=0
echo ready for words
while read -r word; do
    case $word in
    next)
        count=$((count + 1))
        echo $count >/dev/vda
        read -r written </dev/vda
        echo "count $count, on the disk $written"
        ;;
    spin) "$spin" & ;;
    end) kill -9 $! ;;
    vector_add) "$vector_add" ;;
    esac
done </dev/console
"#;

#[test]
fn a_linux_guest_goes_on_where_it_was_saved() {
    let _beside = beside_other_guests();
    let [spin, vector_add] = ["spin", "vector_add"].map(|name| program("static", name));
    let home = tempfile::tempdir().expect("a folder");
    let (spin, vector_add) = (spin.display(), vector_add.display());
    let command = format!("spin={spin} vector_add={vector_add}{WORDS}");
    let programs = ["spin", "vector_add"];
    let initrd = home
        .path()
        .join(qemu::initrd(home.path(), "words.img", &command, &programs));
    let tools = ["grep", "head", "mount", "sleep"].map(|tool| PathBuf::from("/usr/bin").join(tool));
    let files = [std::slice::from_ref(&initrd), &tools].concat();
    let said = script(SCRIPT, &[initrd.into()], &files, &[]);
    for words in [
        "guest one is not saved: a program of it has a CUDA session open, which cannot be saved",
        "nothing is left of a refused snapshot",
        "guest one is saved in /first, and runs on",
        "guest one is saved in /second, and has ended",
        "the saved guest has ended",
        "disk 0 (/dev/vda in the guest) is not the one of the snapshot any more: it was written after the snapshot, status 2",
        "256M default          running",
        "guest one is killed: it did not switch itself off within 1 s of its power button",
        "backend default is stopped",
    ] {
        let lines = said.split_whitespace().collect::<Vec<_>>().join(" ");
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(lines.contains(&words), "{words}: {said}");
    }
}
