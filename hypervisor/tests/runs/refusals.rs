//! Tests runs that cannot start: one sentence with the reason, exit status 2, and no leftovers.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::geteuid;

use crate::harness::{
    PATIENCE, alone, eventually, finish, images, nothing_is_left, published_stage, stage, wormhole,
};

/// User and group id of `nobody`.
const NOBODY: u32 = 65534;

/// Asserts that `wormhole run` with these arguments refuses with a sentence that contains `expected`.
fn refuses(args: &[&str], expected: &str) {
    let mut command = wormhole(&["run"]);
    refused(command.args(args), expected);
}

/// Asserts as [`refuses`] does, for a command that lacks only the program and `--json`.
fn refused(command: &mut Command, expected: &str) {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    // The command may run as another user, which must be able to write the summary.
    fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).expect("it is ours");
    let json = folder.path().join("summary.json");
    let before = shared_memory();
    let run = finish(
        command
            .arg("--json")
            .arg(&json)
            .args(["--", "/bin/echo", "it ran"]),
    );
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert_eq!(run.stdout, "");
    // Lines of the supervisor's log do not count.
    let said: Vec<&str> = run
        .stderr
        .lines()
        .filter(|line| !line.starts_with("ERROR "))
        .collect();
    assert!(
        said.len() == 1 && said[0].starts_with("wormhole: ") && said[0].contains(expected),
        "not one sentence that says {expected}: {}",
        run.stderr
    );
    assert!(!json.exists(), "a summary was left");
    nothing_is_left();
    eventually("the end of shared memory", PATIENCE, || {
        shared_memory().is_subset(&before)
    });
}

fn shared_memory() -> BTreeSet<OsString> {
    fs::read_dir("/dev/shm")
        .expect("it is mounted")
        .flatten()
        .map(|entry| entry.file_name())
        .collect()
}

/// Creates a folder of images with links to these built ones.
fn some_images(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in names {
        symlink(images().join(name), folder.path().join(name)).expect("a link");
    }
    folder
}

/// Removes a file from one of the images of [`some_images`]; the image becomes a folder of links.
fn without(folder: &Path, image: &str, file: &str) {
    let place = folder.join(image);
    fs::remove_file(&place).expect("it is a link");
    fs::create_dir(&place).expect("a folder");
    for entry in fs::read_dir(images().join(image))
        .expect("the image is a folder")
        .flatten()
        .filter(|entry| entry.file_name() != file)
    {
        symlink(entry.path(), place.join(entry.file_name())).expect("a link");
    }
}

/// Creates a command of `wormhole run` as user `nobody`. Returns `None` if the tests do not run as root.
fn as_nobody(args: &[&str]) -> Option<(tempfile::TempDir, Command)> {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return None;
    }
    // Other users may not be able to reach the staged installation.
    let folder = published_stage();
    let mut command = Command::new(folder.path().join("bin/wormhole"));
    command
        .arg("run")
        .args(args)
        .stdin(Stdio::null())
        .uid(NOBODY)
        .gid(NOBODY);
    Some((folder, command))
}

#[test]
fn a_wrong_flag_is_named() {
    refuses(&["--placment", "process"], "--placment");
}

#[test]
fn a_flag_with_a_wrong_value_is_named_with_its_values() {
    refuses(&["--kernel", "5.4"], "[possible values: 6.1, 6.12]");
}

#[test]
fn an_unknown_device_is_refused() {
    refuses(&["--placement", "process", "--device", "tpu"], "cuda:N");
}

#[test]
fn a_machine_without_cuda_says_so() {
    if Path::new("/dev/nvidiactl").exists() {
        eprintln!("skipped: this machine has an NVIDIA driver");
        return;
    }
    refuses(
        &["--placement", "process", "--device", "cuda:0"],
        "libcuda.so.1",
    );
}

#[test]
fn a_window_too_small_is_refused_with_the_least_size() {
    for placement in ["process", "host"] {
        refuses(
            &["--placement", placement, "--window", "2M"],
            "a window of 2097152 bytes does not fit: it must be a multiple of 2 MiB and at least 8388608",
        );
    }
}

/// Runs a command that finds no tool to build an image with, and returns its lines.
fn without_tools(command: &mut Command) -> String {
    let _alone = alone();
    let run = finish(
        command
            .env("PATH", "/nonexistent")
            .args(["--", "/bin/echo"]),
    );
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert_eq!(run.stdout, "");
    run.stderr
}

#[test]
fn a_missing_image_is_built_or_a_line_says_what_that_needs() {
    for (there, missing) in [
        (&[][..], "Debian's kernel 6.1 for the emulated-host image"),
        (
            &["emulated-host-6.1"],
            "Debian's kernel 6.12 for the guest image",
        ),
    ] {
        let folder = some_images(there);
        let said = without_tools(
            wormhole(&["run", "--host", "emulated", "--kernel", "6.12"])
                .env("WORMHOLE_IMAGES", folder.path()),
        );
        let lines = format!(
            "wormhole: fetching {missing}\n\
             wormhole: image: apt-get is not installed: install the Debian package apt\n"
        );
        assert_eq!(said, lines);
        assert!(!folder.path().join("guest-6.12").exists());
    }
}

#[test]
fn images_are_looked_for_in_the_installation_that_runs() {
    let prefix = tempfile::tempdir().expect("a folder");
    let folder = prefix.path().join("share/wormhole/images");
    fs::create_dir_all(&folder).expect("a folder");
    fs::create_dir(prefix.path().join("bin")).expect("a folder");
    symlink(stage().join("lib"), prefix.path().join("lib")).expect("a link");
    let command = prefix.path().join("bin/wormhole");
    fs::copy(stage().join("bin/wormhole"), &command).expect("a copy");
    without_tools(
        Command::new(command)
            .args(["run", "--host", "emulated"])
            .stdin(Stdio::null())
            .env_remove("WORMHOLE_IMAGES"),
    );
    assert!(folder.join("lock").exists(), "it was to be built there");
}

#[test]
fn an_image_without_its_kernel_is_named() {
    for image in ["guest-6.1", "emulated-host-6.1"] {
        let folder = some_images(&["guest-6.1", "emulated-host-6.1"]);
        without(folder.path(), image, "vmlinuz");
        let words = format!(
            "{} is damaged: vmlinuz is missing",
            folder.path().join(image).display()
        );
        // The sentence does not mention a KVM of this machine that cannot run Linux.
        for host in ["emulated", "auto"] {
            refused(
                wormhole(&["run", "--host", host]).env("WORMHOLE_IMAGES", folder.path()),
                &words,
            );
            if image == "guest-6.1" {
                break;
            }
        }
    }
}

#[test]
fn a_truncated_kernel_is_damage_and_no_reason_to_run_again() {
    for image in ["guest-6.1", "emulated-host-6.1"] {
        let folder = some_images(&["guest-6.1", "emulated-host-6.1"]);
        without(folder.path(), image, "vmlinuz");
        let kernel = fs::read(images().join(image).join("vmlinuz")).expect("it is there");
        let place = folder.path().join(image);
        fs::write(place.join("vmlinuz"), &kernel[..kernel.len() / 2]).expect("it is ours");
        refused(
            wormhole(&["run", "--host", "emulated"]).env("WORMHOLE_IMAGES", folder.path()),
            "vmlinuz is not as it was built: make it anew with `wormhole image build",
        );
    }
}

#[test]
fn options_of_guests_are_refused_where_there_is_none() {
    for (option, value) in [
        ("--timeout", "1"),
        ("--cpus", "2"),
        ("--pin", "0"),
        ("--prefault", "--grace=1"),
        ("--memory", "1G"),
        ("--kernel", "6.1"),
        ("--host", "auto"),
        ("--rootfs", "/"),
        ("--workdir", "/"),
        ("--volume", "/:/data:ro"),
        ("--hostname", "node"),
        ("--disk", "/dev/zero"),
        ("--network", "tap=tap0,address=10.0.0.2/24"),
        ("--interactive", "--grace=1"),
        ("--tty", "--grace=1"),
    ] {
        refuses(
            &["--placement", "process", option, value],
            &format!("{option} applies to guests, and --placement process has none"),
        );
    }
}

#[test]
fn guests_that_cannot_be_are_refused_before_anything_starts() {
    // An empty folder of images.
    let nowhere = tempfile::tempdir().expect("a folder");
    for (option, value, words) in [
        ("--cpus", "0", "'--cpus <CPUS>'"),
        ("--cpus", "65", "'--cpus <CPUS>'"),
        ("--timeout", "0", "'--timeout <TIMEOUT>'"),
        (
            "--memory",
            "1M",
            "a guest cannot have 1048576 bytes of memory",
        ),
        ("--memory", "1073741824", "write a size with its unit"),
        ("--window", "0M", "write a size with its unit"),
        ("--env", "=1", "a variable needs a name"),
        ("--env", "NOT_SET_HERE", "write NOT_SET_HERE=VALUE"),
        ("--memory", "2000G", "a guest cannot have"),
        ("--memory", "300000K", "must be a multiple of 1M"),
        (
            "--rootfs",
            "/no/folder",
            "cannot show /no/folder to a guest",
        ),
        ("--pin", "1-", "write processors as numbers and ranges"),
        (
            "--pin",
            "1023",
            "--pin names processor 1023, and this process",
        ),
        ("--pin", "0,0", "--pin names processor 0 twice"),
        ("--dedicated", "--cpus=1", "--pin <CPU"),
        ("--rootfs", "/etc/passwd", "it is no folder"),
        (
            "--workdir",
            "work",
            "--workdir work is no path of the guest",
        ),
    ] {
        refused(
            wormhole(&["run", option, value]).env("WORMHOLE_IMAGES", nowhere.path()),
            words,
        );
    }
}

#[test]
fn memory_that_this_machine_lacks_is_not_taken_in_advance() {
    let info = fs::read_to_string("/proc/meminfo").expect("it is there");
    let total = info.split_whitespace().nth(1).expect("MemTotal is first");
    if total.parse::<u64>().expect("a number") > 1 << 30 {
        eprintln!("skipped: this machine has more than 1 TiB of memory");
        return;
    }
    refuses(
        &["--prefault", "--memory", "1024G"],
        "--prefault needs 1048576 MiB for the guest, and this machine has",
    );
}

#[test]
fn processors_that_cannot_be_the_guests_are_refused() {
    let allowed = rustix::thread::sched_getaffinity(None).expect("the kernel tells");
    let mut all = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&one| allowed.is_set(one));
    let first = all.next().expect("this runs on one").to_string();
    refuses(
        &["--pin", &first, "--cpus", "2"],
        "--pin names 1 processors for a guest with 2",
    );
    refuses(
        &["--host", "emulated", "--pin", &first],
        "--pin needs a guest on this machine's KVM",
    );
    let every: Vec<String> = std::iter::once(first)
        .chain(all.map(|one| one.to_string()))
        .collect();
    let cpus = every.len().to_string();
    if every.len() <= 64 {
        refuses(
            &["--pin", &every.join(","), "--cpus", &cpus, "--dedicated"],
            "--dedicated would leave no processor for the backend",
        );
    }
}

#[test]
fn backends_that_cannot_be_are_refused() {
    let nowhere = tempfile::tempdir().expect("a folder");
    let file = nowhere.path().join("file");
    fs::write(&file, "").expect("room");
    let socket = |path: &Path| format!("unix:{}", path.display());
    let long = format!("unix:/{}", "x".repeat(200));
    for (options, words) in [
        (
            &["--backend", "none"][..],
            "no backend none is running: `wormhole backend start none`",
        ),
        (&["--backend", "../none"], "a name has 1 to 32 letters"),
        (&["--backend", "/run/none"], "a socket is written unix:PATH"),
        (&["--backend", "unix:"], "unix: needs the path of a socket"),
        (
            &["--backend", &socket(&nowhere.path().join("none"))],
            "nothing listens on",
        ),
        (&["--backend", &socket(&file)], "nothing listens on"),
        (&["--backend", &long], "cannot connect to the backend at"),
        (
            &["--backend", "none", "--device", "cpu"],
            "cannot be used with '--device",
        ),
    ] {
        let mut command = wormhole(&["run", "--placement", "process"]);
        refused(
            command
                .args(options)
                .env("WORMHOLE_RUNTIME", nowhere.path()),
            words,
        );
    }
    let guest = ["run", "--host", "emulated", "--backend", "none"];
    refused(
        wormhole(&guest).env("WORMHOLE_RUNTIME", nowhere.path()),
        "--backend needs a guest on this machine's KVM",
    );
}

/// Asserts that a command on backends fails with a sentence that contains `words`.
fn no_backend(command: &mut Command, words: &str) {
    let run = finish(command);
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    let is_sentence = run.stderr.lines().count() == 1 && run.stderr.starts_with("wormhole: ");
    assert!(
        is_sentence && run.stderr.contains(words),
        "{words}: {}",
        run.stderr
    );
    assert_eq!(run.stdout, "");
}

#[test]
fn commands_on_backends_are_refused_and_leave_nothing() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = folder.path().join("backends");
    for (args, words) in [
        (&["start", "a/b"][..], "a name has 1 to 32 letters"),
        (&["start", "-x"], "unexpected argument '-x'"),
        (
            &["start", "--placement", "process"],
            "[possible values: host, vm]",
        ),
        (&["start", "--device", "tpu"], "cuda:N"),
        (
            &["start", "--worker-memory", "1M"],
            "write a size such as 4G, at least 64M",
        ),
        (
            &["start", "--window-limit", "much"],
            "write a size such as 4G, at least 64M",
        ),
        (&["start", "--sessions", "-1"], "'-1'"),
        (&["start", "--tenant-user", "root"], "'--tenant-user <UID>'"),
        (
            &["start", "--trusted-tenants", "--device", "cuda:4000000000"],
            "does not start: ",
        ),
        (&["stop", "none"], "no backend none is running"),
        (&["stop", ".."], "a name has 1 to 32 letters"),
        (&["list", "none"], "unexpected argument 'none'"),
    ] {
        let mut command = wormhole(&["backend"]);
        no_backend(command.args(args).env("WORMHOLE_RUNTIME", &runtime), words);
        let left = fs::read_dir(&runtime).into_iter().flatten().count();
        assert_eq!(left, 0, "{args:?}");
        nothing_is_left();
    }
    fs::create_dir_all(runtime.join("one")).expect("a folder");
    fs::write(runtime.join("one/record.json"), "[]").expect("room");
    for args in [&["start", "one"][..], &["stop", "one"], &["list"]] {
        let mut command = wormhole(&["backend"]);
        let words = "one/record.json is not the record of a backend: remove it";
        no_backend(command.args(args).env("WORMHOLE_RUNTIME", &runtime), words);
    }
    fs::set_permissions(&runtime, Permissions::from_mode(0o777)).expect("it is ours");
    no_backend(
        wormhole(&["backend", "start"]).env("WORMHOLE_RUNTIME", &runtime),
        "is not a folder that only its owner, this user, can write",
    );
    no_backend(
        wormhole(&["backend", "start"]).env("WORMHOLE_RUNTIME", "/proc/none"),
        "/proc/none cannot be used",
    );
}

#[test]
fn without_a_folder_for_backends_the_error_names_the_variable_for_one() {
    let Some((installed, _)) = as_nobody(&[]) else {
        return;
    };
    let mut command = Command::new(installed.path().join("bin/wormhole"));
    command.uid(NOBODY).gid(NOBODY).args(["backend", "start"]);
    command.stdin(Stdio::null()).env_remove("XDG_RUNTIME_DIR");
    no_backend(
        command.env_remove("WORMHOLE_RUNTIME"),
        "set XDG_RUNTIME_DIR",
    );
}

#[test]
fn a_program_that_an_empty_root_lacks_is_refused() {
    let empty = tempfile::tempdir().expect("a folder");
    let mut command = wormhole(&["run", "--rootfs"]);
    let run = finish(command.arg(empty.path()).args(["--", "sh"]));
    assert_eq!(run.status.code(), Some(127), "{}", run.stderr);
    assert!(
        run.stderr.contains("no such program in PATH"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_summary_that_would_overwrite_what_the_run_needs_is_refused() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let [program, link, disk] = ["program", "link", "disk"].map(|name| folder.path().join(name));
    fs::copy("/bin/echo", &program).expect("room");
    symlink(&program, &link).expect("it is ours");
    fs::write(&disk, [0; 512]).expect("room");
    for (json, options) in [
        (&program, &["--placement", "process"][..]),
        (&link, &["--placement", "process"]),
        (&disk, &["--disk"]),
    ] {
        let mut command = wormhole(&["run"]);
        command.args(options);
        command.args((json == &disk).then_some(&disk));
        command.arg("--json").arg(json).arg("--").arg(&program);
        let run = finish(&mut command);
        assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
        assert!(
            run.stderr.contains("--json would overwrite"),
            "{}",
            run.stderr
        );
    }
    let echo = fs::read("/bin/echo").expect("a program");
    assert_eq!(fs::read(&program).expect("the program"), echo);
    assert_eq!(fs::read(&disk).expect("the disk"), [0; 512]);
}

#[test]
fn disks_that_cannot_be_are_refused_before_anything_starts() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("disk.img");
    fs::write(&file, [0; 513]).expect("room");
    let name = |path: &Path| path.display().to_string();
    for (disk, words) in [
        (name(&file), "disk.img has 513 bytes"),
        (name(folder.path()), "cannot be opened"),
        (
            format!("{}:ro", name(folder.path())),
            "is neither a regular file nor",
        ),
        (name(&folder.path().join("none")), "none cannot be opened"),
        ("/dev/zero".to_owned(), "is neither a regular file nor"),
    ] {
        refused(
            wormhole(&["run", "--disk", &disk]).env("WORMHOLE_IMAGES", folder.path()),
            words,
        );
    }
    fs::write(&file, [0; 512]).expect("room");
    let many = vec![["--disk".to_owned(), format!("{}:ro", name(&file))]; 27].concat();
    refused(
        wormhole(&["run"]).args(many),
        "a guest cannot have 27 disks",
    );
}

#[test]
fn networks_that_cannot_be_are_refused_before_anything_starts() {
    let nowhere = tempfile::tempdir().expect("a folder");
    for (networks, words) in [
        (&["address=10.0.0.2/24"][..], "add tap=NAME"),
        (&["tap=none0"], "address is missing"),
        (&["tap=none0,passt"], "tap= or passt"),
        (
            &["passt,gateway=10.0.2.2"],
            "leave \"gateway=10.0.2.2\" out",
        ),
        (&["passt", "passt"], "names passt twice"),
        (
            &["tap=none0,address=10.0.0.2/24,gateway=10.0.0.1", "passt"],
            "one default route",
        ),
        (&["tap=none0,address=10.0.0.2"], "10.0.0.2"),
        (&["tap=none0,address=10.0.0.300/24"], "10.0.0.300/24"),
        (&["tap=none0,address=10.0.0.2/40"], "1 to 30"),
        (&["tap=none0,address=10.0.0.0/24"], "of a whole network"),
        (
            &["tap=none0,address=10.0.0.2/24,gateway=10.0.1.1"],
            "the gateway 10.0.1.1 is no other host",
        ),
        (
            &["tap=none0,address=10.0.0.2/24,dns=localhost"],
            "no IPv4 address for dns",
        ),
        (
            &["tap=none0,address=10.0.0.2/24,mac=03:00:00:00:00:01"],
            "a hardware address has six bytes",
        ),
        (
            &["tap=none0,tap=none1,address=10.0.0.2/24"],
            "tap= or passt, and mac=, can be there once",
        ),
        (&["tap=none0,address=10.0.0.2/24,mtu=9000"], "mtu=9000"),
        (
            &[
                "tap=none0,address=10.0.0.2/24",
                "tap=none0,address=10.0.1.2/24",
            ],
            "names the tap interface none0 twice",
        ),
        (
            &["tap=none0,address=10.0.0.2/24"; 4],
            "a guest cannot have 4 networks",
        ),
        (
            &["tap=none0,address=10.0.0.2/24"],
            "there is no tap interface none0: create it",
        ),
        (
            &["tap=a-name-of-sixteen,address=10.0.0.2/24"],
            "cannot be the name of a network interface",
        ),
        (&["tap=,address=10.0.0.2/24"], "1 to 15 bytes"),
    ] {
        let mut command = wormhole(&["run"]);
        for network in networks {
            command.args(["--network", network]);
        }
        refused(command.env("WORMHOLE_IMAGES", nowhere.path()), words);
    }
}

#[test]
fn an_interface_that_is_no_tap_or_may_not_be_used_is_refused() {
    let Ok(driver) = fs::metadata("/dev/net/tun") else {
        println!("skipped: this machine has no /dev/net/tun");
        return;
    };
    let nowhere = tempfile::tempdir().expect("a folder");
    let options = ["--network", "tap=lo,address=10.0.0.2/24"];
    refused(
        wormhole(&["run"])
            .args(options)
            .env("WORMHOLE_IMAGES", nowhere.path()),
        "cannot attach to the tap interface lo",
    );
    let emulated = [&options[..], &["--host", "emulated"]].concat();
    let Some((_installed, mut command)) = as_nobody(&emulated) else {
        return;
    };
    let words = match driver.permissions().mode() & 0o006 {
        0o006 => "cannot attach to the tap interface lo",
        _ => "cannot open /dev/net/tun: Permission denied",
    };
    refused(command.env("WORMHOLE_IMAGES", nowhere.path()), words);
}

#[test]
fn images_that_may_not_be_read_are_distinguished_from_missing_ones() {
    let Some((_installed, mut command)) = as_nobody(&["--host", "emulated"]) else {
        return;
    };
    let folder = some_images(&["guest-6.1", "emulated-host-6.1"]);
    fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).expect("it is ours");
    refused(
        command.env("WORMHOLE_IMAGES", folder.path()),
        "Permission denied",
    );
}

#[test]
fn a_kvm_that_may_not_be_used_is_named_with_what_mends_it() {
    let Ok(kvm) = fs::metadata("/dev/kvm") else {
        eprintln!("skipped: this machine has no /dev/kvm");
        return;
    };
    if kvm.permissions().mode() & 0o006 == 0o006 {
        eprintln!("skipped: everybody may use this machine's /dev/kvm");
        return;
    }
    // Neither way leads to the emulated host.
    for host in [&["--host", "kvm"][..], &["--host", "auto"], &[]] {
        let Some((_installed, mut command)) = as_nobody(host) else {
            return;
        };
        refused(&mut command, "usermod --append --groups kvm");
    }
}

#[test]
fn a_summary_that_cannot_be_written_is_refused_before_the_run() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    for path in [folder.path().join("no/such/folder"), folder.path().into()] {
        let run = finish(
            wormhole(&["run", "--placement", "process", "--json"])
                .arg(&path)
                .args(["--", "/bin/echo", "it ran"]),
        );
        assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
        assert_eq!(run.stdout, "");
        let named = format!("wormhole: cannot write {}: ", path.display());
        assert!(run.stderr.starts_with(&named), "{}", run.stderr);
    }
}

#[test]
fn a_failed_run_leaves_no_summary_of_another() {
    let _alone = alone();
    let json = tempfile::NamedTempFile::new().expect("a file");
    fs::write(json.path(), "{}").expect("it is ours");
    let run = finish(
        wormhole(&["run", "--placement", "process", "--json"])
            .arg(json.path())
            .args(["--device", "cuda:4000000000", "--", "/bin/true"]),
    );
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(!json.path().exists());
}

#[test]
fn a_summary_goes_into_a_pipe_whose_reader_opened_it_once() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("it is there").success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read_to_string(pipe).expect("it can be read")
    });
    let run = finish(
        wormhole(&["run", "--placement", "process", "--json"])
            .arg(&pipe)
            .args(["--", "/bin/true"]),
    );
    assert!(run.status.success(), "{}", run.stderr);
    let text = reader.join().expect("it was read");
    let summary: serde_json::Value = serde_json::from_str(&text).expect(&text);
    assert_eq!(summary["guest"], "none");
}

/// A guest can have made the link. No folder on the way is the volume, since another mount begins below it.
#[test]
fn a_link_below_another_mount_of_a_volume_is_not_followed() {
    let apart = ["--user", "--map-root-user", "--mount", "--"];
    let probe = Command::new("unshare").args(apart).arg("true").output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        println!("skipped: a user may not mount here");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("volume/out")).expect("a volume");
    fs::create_dir(at("bound")).expect("a folder");
    fs::write(at("file"), "precious").expect("a file");
    symlink(at("file"), at("volume/out/summary.json")).expect("a link");
    let volume = format!("{}:/data", at("volume").display());
    let json = at("bound/summary.json");
    let run = wormhole(&["run", "--volume", &volume, "--json"]);
    let mut command = Command::new("unshare");
    command
        .args(apart)
        .args([
            "sh",
            "-c",
            "mount --bind volume/out bound && exec \"$@\"",
            "sh",
        ])
        .arg(run.get_program())
        .args(run.get_args())
        .arg(json)
        .args(["--", "true"])
        .current_dir(folder.path());
    let run = finish(&mut command);
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(run.stderr.contains("a link in a volume"), "{}", run.stderr);
    assert_eq!(fs::read(at("file")).expect("the file"), b"precious");
}
