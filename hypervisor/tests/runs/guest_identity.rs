//! Identity of a program in a guest, and its machine.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use crate::harness::{beside_other_guests, finish_at, images, program, published_stage};

/// Prints a line for each property, and fills a volume that it may change. The second argument is a folder that only the
/// caller may read, and which is a volume as well. The third is a temporary file's path that the host does not use.
const SCRIPT: &str = r#"
echo "user $(id -u) $(id -g) $(id -G)"
echo "machine $(uname -n)"
getent hosts "$(uname -n)" | grep -c 127.0.1.1
echo "zone $(date +%Z)"
echo "descriptors $(readlink /dev/fd) $(readlink /dev/stdin)"
test -c /dev/pts/ptmx && test -d /proc/self && test -d /sys/devices && echo file systems
test "$(stat -c %a /tmp)" = 1777 && echo mine > "$3" && test "$(stat -c %u "$3")" = 65534 && echo temporary
cat "$2/secret"
cat /data/set/secret
echo other > /data/set/secret || echo read only
test -r /etc/shadow || echo no shadow
cd /data/results && umask 027
echo first > text && echo second >> text && mkdir -p a/b && mv text a/b/ && ln a/b/text twin && ln -s a/b/text link
head -c 300000 /dev/zero > large && cmp -n 300000 large /dev/zero && truncate -s 5 large
(umask 333; cat twin > frozen) && touch -d @1000 large
(exec 3<> gone && rm gone && echo text >&3 && test -s /proc/self/fd/3 && echo open)
mkfifo pipe || chmod u+s twin || chgrp 4 twin || echo only files
rm -r a && cat twin | tail -n 1
"$1"
kill -TERM 0
"#;

/// The caller is no member of root's groups, so the program reaches the window only as a device of its own.
#[test]
fn a_guests_program_has_its_callers_identity() {
    let _beside = beside_other_guests();
    let stage = published_stage();
    let private = tempfile::tempdir().expect("a folder");
    let secret = private.path().join("secret");
    fs::write(&secret, "a secret\n").expect("room");
    for path in [private.path(), &secret] {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).expect("this is root");
    }
    let name = private.path().file_name().expect("a name");
    let temporary = Path::new("/tmp").join([name, OsStr::new("-guest")].join(OsStr::new("")));
    let volume = [private.path().as_os_str(), "/data/set:ro".as_ref()].join(OsStr::new(":"));
    let results = tempfile::tempdir().expect("a folder");
    std::os::unix::fs::chown(results.path(), Some(65534), Some(65534)).expect("this is root");
    let writable = [results.path().as_os_str(), "/data/results".as_ref()].join(OsStr::new(":"));
    let mut command = Command::new("setpriv");
    command
        .args([
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--groups",
            "65534,4,27",
        ])
        .arg(stage.path().join("bin/wormhole"))
        .args(["run", "--placement", "host", "--host", "emulated"])
        .args(["--hostname", "node-7.example", "--quiet"])
        .args(["--volume".as_ref(), volume.as_os_str()])
        .args(["--volume".as_ref(), writable.as_os_str(), "--".as_ref()])
        .args(["/bin/bash", "-c", SCRIPT, "bash"])
        .args([
            program("static", "vector_add").as_os_str(),
            private.path().as_ref(),
            temporary.as_ref(),
        ])
        .current_dir("/")
        .envs([
            ("TZ", "XYZ-3".as_ref()),
            ("WORMHOLE_IMAGES", images().as_os_str()),
        ])
        .env_remove("XDG_RUNTIME_DIR");
    let run = finish_at(&mut command, true);
    let lines: Vec<&str> = run.stdout.lines().collect();
    let wanted = [
        "user 65534 65534 65534 4 27",
        "machine node-7.example",
        "1",
        "zone XYZ",
        "descriptors /proc/self/fd /proc/self/fd/0",
        "file systems",
        "temporary",
        "a secret",
        "a secret",
        "read only",
        "no shadow",
        "open",
        "only files",
        "second",
        "PASS vector_add 50000 elements",
    ];
    assert_eq!(lines, wanted, "{}", run.stderr);
    // The program's last command reaches its own group alone, not the first process of the guest.
    assert_eq!(
        run.status.code(),
        Some(128 + libc::SIGTERM),
        "{}",
        run.stderr
    );
    assert_eq!(
        fs::read_dir(private.path()).expect("it is there").count(),
        1
    );
    assert!(!temporary.exists());
    let mut left = Vec::new();
    for entry in fs::read_dir(results.path()).expect("it is there") {
        let entry = entry.expect("an entry");
        let data = entry.metadata().expect("metadata");
        assert_eq!((data.uid(), data.gid()), (65534, 65534), "{entry:?}");
        left.push((
            entry.file_name().into_string().expect("text"),
            data.mode() & 0o7777,
            data.len(),
            if data.mtime() == 1000 { "old" } else { "new" },
        ));
    }
    left.sort();
    let wanted = [
        ("frozen", 0o444, 13, "new"),
        ("large", 0o640, 5, "old"),
        ("link", 0o777, 8, "new"),
        ("twin", 0o640, 13, "new"),
    ];
    let wanted = wanted.map(|(name, mode, len, age)| (name.to_owned(), mode, len, age));
    assert_eq!(left, wanted);
    let text = fs::read_to_string(results.path().join("twin"));
    assert_eq!(text.expect("a file"), "first\nsecond\n");
}
