//! Runs of guests that end badly, one after another in one emulated host. `guest.rs` has ends that the command for that
//! host reports itself.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use crate::emulated::script;
use crate::harness::{beside_other_guests, images};

/// Runs guests, each under a heading. `$1` is the command, `$2` a folder of images with another image in place of the
/// guest's, `$3` an executable file without an interpreter, `$4` another root.
const SCRIPT: &str = r#"
command=$1 taken=$2 script=$3 root=$4
guest() {
    local heading=$1
    shift
    echo "== $heading"
    "$command" run --host kvm --quiet "$@" 2>/run/err
    echo "status $?"
    echo "$(</run/err)"
}
# tail(1) buffers its input up to the end of a line, which never comes.
memory=(--kernel 6.1 --memory 256M --window 32M)
guest "program out of memory" "${memory[@]}" -- /bin/bash -c "exec tail /dev/zero"
# Without this setting the kernel kills the program, and panics only if that does not help.
guest "guest out of memory" "${memory[@]}" -- /bin/bash -c "echo 1 >/proc/sys/vm/panic_on_oom; exec tail /dev/zero"
guest "no executable" --kernel 6.1 -- "$script"
guest "no program" --kernel 6.1 --rootfs "$root" -- tool
WORMHOLE_IMAGES=$taken guest "window taken" --kernel 6.12 -- /bin/true
# A guest that booted too slowly to reach its program within the short limit gets a longer one.
for limit in 25 90; do
    hung=$(guest "hung guest" --kernel 6.1 --timeout $limit -- /bin/bash -c "echo loops; while :; do :; done")
    [[ $hung == *loops* ]] && break
done
echo "$hung"
"#;

#[test]
fn guests_that_end_badly_say_why() {
    let _beside = beside_other_guests();
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let taken = images().join(format!("{}-6.12", wormhole_images::TAKEN));
    fs::create_dir(at("taken")).expect("a folder");
    symlink(&taken, at("taken/guest-6.12")).expect("a link");
    fs::write(at("script"), "echo it ran\n").expect("it is written");
    fs::set_permissions(at("script"), Permissions::from_mode(0o755)).expect("it is ours");
    fs::create_dir_all(at("root/bin")).expect("a folder");
    // The link is the guest's to follow: the host has such a program, and the guest has none.
    symlink("/usr/bin/env", at("root/bin/tool")).expect("a link");
    let ours = ["taken", "script", "root"].map(at);
    let tools = ["bash", "env", "tail", "true"].map(|tool| PathBuf::from("/usr/bin").join(tool));
    let files = [&ours[..], &tools, &[taken]].concat();
    let said = script(SCRIPT, &ours.map(Into::into), &files, &[]);
    let assert_says = |heading: &str, words: &[&str]| {
        let parts = said.split("== ");
        let part = parts.filter_map(|part| part.strip_prefix(heading)).next();
        let part = part.unwrap_or_else(|| panic!("{heading} is missing: {said}"));
        for words in words {
            assert!(part.contains(words), "{heading}, {words}: {said}");
        }
        part
    };

    assert_says(
        "program out of memory\n",
        &[
            "status 137\n",
            "the guest ran out of memory",
            "Killed process",
            "(tail)",
            "give it more with --memory",
        ],
    );
    let words = ["status 2\n", "the guest ran out of memory: "];
    let part = assert_says("guest out of memory\n", &words);
    assert!(!part.contains("kernel panicked"), "{said}");
    // Nothing precedes the status: the program has not run.
    assert_says("no executable\nstatus 126\n", &["Exec format error"]);
    assert_says("no program\nstatus 127\n", &["cannot run /bin/tool"]);
    let words = [
        "the guest could not run the program: the kernel uses the window 0x100000000-",
        "(\"System RAM (kmem)\" in /proc/iomem)",
        "keep the module kmem from being loaded",
    ];
    let part = assert_says("window taken\nstatus 2\n", &[]);
    let sentence = part
        .lines()
        .find(|line| line.contains("as ordinary memory"));
    let sentence = sentence.unwrap_or_else(|| panic!("no word of the window: {said}"));
    for words in words {
        assert!(sentence.contains(words), "{words}: {sentence}");
    }
    let words = ["loops\n", "status 2\n", "did not end within "];
    assert_says("hung guest\n", &words);
}
