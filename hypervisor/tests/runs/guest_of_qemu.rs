//! Runs CUDA programs in guests of QEMU, which is no part of Wormhole, by the options that docs/qemu.md names.

use std::fs;
use std::io::Read as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use wormhole_images::{ConsoleRun, Image, Kernel, console_overlay};

use crate::documents::{blocks_of, commands_of, root};
use crate::emulated::script_with;
use crate::harness::{
    PATIENCE, Underway, alone, beside_other_guests, eventually, finish, images, nothing_is_left,
    program, stage, wormhole,
};

/// Size of the window that `wormhole attach` makes.
const WINDOW: u64 = 258 << 20;

/// Writes an initial RAM disk that runs a shell command with these programs of ours.
pub fn initrd(folder: &Path, name: &str, command: &str, programs: &[&str]) -> String {
    let programs = programs.iter().map(|name| program("static", name));
    initrd_with(folder, name, command, programs.collect())
}

/// Writes an initial RAM disk that runs a shell command, with these files.
pub fn initrd_with(folder: &Path, name: &str, command: &str, files: Vec<PathBuf>) -> String {
    let part = |name: &str| stage().join("lib/wormhole").join(name);
    let overlay = console_overlay(&ConsoleRun {
        init: part("wormhole-init"),
        frontends: ["libcuda.so.1", "libnvidia-ml.so.1"].map(part).to_vec(),
        program: "/bin/sh".into(),
        arguments: ["-c", command].map(Into::into).to_vec(),
        take: files,
        window: WINDOW,
    });
    let modules = Image::guest(&images(), Kernel::V6_1)
        .expect("an image")
        .modules;
    let mut bytes = fs::read(modules).expect("the image's modules");
    bytes.extend(overlay.expect("the files are there"));
    fs::write(folder.join(name), bytes).expect("a file");
    name.to_owned()
}

/// Returns the first block of the page in a language, on one line.
fn block(language: &str) -> String {
    blocks(language).swap_remove(0)
}

/// Returns the blocks of the page in a language, each on one line.
fn blocks(language: &str) -> Vec<String> {
    let blocks = blocks_of(&root().join("docs/qemu.md"), language);
    let line = |block: String| {
        let block = block.replace('\\', "");
        block.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    blocks.into_iter().map(line).collect()
}

/// Returns the kernel parameters that the page names.
pub fn parameters() -> String {
    block("kernel")
}

/// Returns QEMU with the page's options, after the replacements. It starts in the folder that has the files of these options.
pub fn by_page(folder: &Path, replaced: &[(&str, &str)]) -> Command {
    let mut options = block("qemu");
    for (option, by) in replaced {
        assert!(options.contains(option), "{option} is none of {options}");
        options = options.replace(option, by);
    }
    let mut words = options.split(' ');
    let mut command = Command::new(words.next().expect("a command"));
    command.args(words).current_dir(folder).stdin(Stdio::null());
    command
}

/// Returns QEMU as [`by_page`] does, with a port in the place of vsock.
pub fn by_port(folder: &Path, replaced: &[(&str, &str)]) -> Command {
    let port = &blocks("qemu")[1];
    let vsock =
        "-chardev socket,id=wormhole,path=vsock -device vhost-user-vsock-pci,chardev=wormhole";
    by_page(folder, &[&[(vsock, port.as_str())], replaced].concat())
}

/// Returns QEMU with the page's options and an initial RAM disk of the folder.
fn qemu(folder: &Path, initrd: &str) -> Command {
    let kernel = Image::guest(&images(), Kernel::V6_1)
        .expect("an image")
        .kernel;
    let parameters = parameters();
    let mut command = by_page(folder, &[]);
    command
        .args(["-accel", "tcg", "-cpu", "EPYC,check=off", "-nodefaults"])
        .args(["-display", "none", "-no-reboot", "-serial", "stdio"])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=1"])
        .args(["-initrd", initrd, "-append"])
        .arg(format!("console=ttyS0 loglevel=1 panic=-1 {parameters}"))
        .arg("-kernel")
        .arg(kernel);
    command
}

#[test]
fn guests_of_qemu_run_programs_by_the_options_of_the_page() {
    let _beside = beside_other_guests();
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let home = |mut command: Command| {
        command
            .current_dir(folder.path())
            .env("WORMHOLE_RUNTIME", at("backends"));
        command
    };
    let started = finish(&mut home(wormhole(&[
        "backend",
        "start",
        "--trusted-tenants",
    ])));
    assert!(started.status.success(), "{}", started.stderr);
    let attach = || {
        let command = ["attach", "--window", "window", "--vsock", "vsock"];
        let attached = Underway::start(&mut home(wormhole(&command)));
        let line = attached.working();
        assert!(line.starts_with("attached: "), "{line}");
        attached
    };
    let ended = |attached: Underway| {
        let attached = attached.finish();
        assert!(attached.status.success(), "{}", attached.stderr);
        let left = ["window", "vsock"].map(|name| at(name).symlink_metadata().is_ok());
        assert_eq!(left, [false; 2], "{}", attached.stderr);
    };

    let attached = attach();
    let names = [
        "vector_add",
        "reduction",
        "streams_events",
        "registered_load",
        "spin",
    ];
    let paths = names.map(|name| program("static", name).display().to_string());
    let disk = initrd(folder.path(), "programs.img", &paths.join(" && "), &names);
    let killed = Underway::start(&mut qemu(folder.path(), &disk));
    let mut said = String::new();
    while !said.contains("spinning") {
        said += &killed.working();
    }
    for words in names[..4].iter().map(|name| format!("PASS {name}")) {
        assert!(said.contains(&words), "{words}: {said}");
    }
    killed.kill_9("qemu-system-x86_64");
    // A window that contains what a guest wrote ends with it.
    killed.finish();

    ended(attached);
    let attached = attach();
    let commands = commands_of(&root().join("docs/qemu.md"));
    let detach = commands
        .iter()
        .find_map(|line| line.strip_prefix("target/wormhole/bin/wormhole detach "))
        .expect("docs/qemu.md has the command");
    let detach: Vec<&str> = ["detach"].into_iter().chain(detach.split(' ')).collect();
    let detached = finish(&mut home(wormhole(&detach)));
    assert!(detached.status.success(), "{}", detached.stderr);
    assert_eq!(detached.stdout, "detached: vsock vsock\n");
    ended(attached);
    let stopped = finish(&mut home(wormhole(&["backend", "stop"])));
    assert!(stopped.status.success(), "{}", stopped.stderr);
}

/// Commands of a person with a backend VM and a guest of QEMU, by KVM in the emulated host. `$1` is the command, `$2` the
/// guest's initial RAM disk. OPTIONS are those of the page, and PARAMETERS those of the kernel.
const IN_A_VM: &str = r#"
set -e
command=$1 initrd=$2
"$command" backend start many --placement vm --slots 1 --slot-size 258M
cd /run
"$command" attach --backend many --window window --vsock vsock >attached 2>&1 &
attached=$!
until read -r line <attached; do
    kill -0 $attached
    sleep 0.1
done
echo "$line"
OPTIONS -accel kvm -cpu host -nodefaults -display none -no-reboot -serial stdio \
    -device isa-debug-exit,iobase=0xf4,iosize=1 -kernel /var/lib/wormhole/images/guest-6.1/vmlinuz \
    -initrd "$initrd" -append "console=ttyS0 loglevel=1 panic=-1 PARAMETERS" </dev/null || echo "QEMU ends with $?"
wait $attached || echo "attach ends with $?"
"$command" stats many
"$command" backend stop many
"#;

/// QEMU, and its firmware and option ROMs.
const QEMU: [&str; 4] = [
    "/usr/bin/qemu-system-x86_64",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/seabios/bios-256k.bin",
];

#[test]
fn a_guest_of_qemu_is_a_tenant_of_a_backend_vm() {
    let _beside = beside_other_guests();
    let folder = tempfile::tempdir().expect("a folder");
    let vector_add = program("static", "vector_add");
    let command = vector_add.display().to_string();
    let disk = folder.path().join(initrd_with(
        folder.path(),
        "program.img",
        &command,
        vec![vector_add],
    ));
    let text = IN_A_VM
        .replace("OPTIONS", &block("qemu").replace("-smp 2", "-smp 1"))
        .replace("PARAMETERS", &parameters());
    let files = QEMU.iter().copied().chain(["/usr/bin/sleep"]);
    let files: Vec<PathBuf> = files.map(PathBuf::from).chain([disk.clone()]).collect();
    let said = script_with(
        &[Image::guest, Image::backend],
        &text,
        &[disk.into()],
        &files,
        &[],
        Duration::from_secs(600),
    );
    for words in [
        "attached: window window of 258M",
        "PASS vector_add",
        "backend many is stopped",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!said.contains("attach ends with"), "{said}");
}

#[test]
fn a_signal_ends_an_attach_whose_backend_does_not_answer() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("silent");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let backend = format!("unix:{}", socket.display());
    let arguments = ["attach", "--backend", &backend];
    let mut command =
        wormhole(&[&arguments[..], &["--window", "window", "--vsock", "vsock"]].concat());
    let attach = Underway::start(command.current_dir(folder.path()));
    let (mut silent, _) = listener.accept().expect("a connection");
    silent.read_exact(&mut [0]).expect("its message");
    let launcher = Pid::from_raw(attach.id().cast_signed()).expect("a process");
    kill_process(launcher, Signal::TERM).expect("it runs");
    let ended = attach.finish();
    assert_eq!(
        ended.status.signal(),
        Some(libc::SIGTERM),
        "{}",
        ended.stderr
    );
    drop(silent);
}

#[test]
fn attach_leaves_nothing_when_it_refuses_or_is_killed() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("taken"), "").expect("a file");
    let refused = |arguments: &[&str]| {
        let mut command = wormhole(&[&["attach"], arguments].concat());
        command
            .current_dir(folder.path())
            .env("WORMHOLE_RUNTIME", folder.path().join("backends"));
        let run = finish(&mut command);
        assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
        let names = ["window", "vsock"];
        let left = names.map(|name| folder.path().join(name).symlink_metadata().is_ok());
        assert_eq!(left, [false; 2], "{}", run.stderr);
        run.stderr
    };
    let usual = ["--window", "window", "--vsock", "vsock"];
    let said = refused(&usual);
    assert!(said.contains("no backend default is running"), "{said}");

    let _alone = alone();
    let backend = |action: &[&str]| {
        let mut command = wormhole(&[&["backend"], action].concat());
        command.env("WORMHOLE_RUNTIME", folder.path().join("backends"));
        let run = finish(&mut command);
        assert!(run.status.success(), "{}", run.stderr);
    };
    backend(&["start", "--trusted-tenants"]);
    let said = refused(&["--window", "taken", "--vsock", "vsock"]);
    assert!(said.contains("taken is there already"), "{said}");
    let said = refused(&["--window", "window", "--vsock", "taken"]);
    assert!(said.contains("taken is there already"), "{said}");
    let said = refused(&[&usual[..], &["--size", "2M"]].concat());
    assert!(said.contains("too small"), "{said}");

    // Another program's socket ends no process.
    let _other = UnixListener::bind(folder.path().join("other")).expect("a socket");
    let mut command = wormhole(&["detach", "--vsock", "other"]);
    let run = finish(command.current_dir(folder.path()));
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    let words = "another program listens on other: name the socket";
    assert!(run.stderr.contains(words), "{}", run.stderr);

    // A killed process removes no names itself.
    let options = "window = \"window\"\nvsock = \"vsock\"\ncid = 4\n";
    fs::write(folder.path().join("guest.toml"), options).expect("a file");
    let mut command = wormhole(&["attach", "--config", "guest.toml"]);
    command
        .current_dir(folder.path())
        .env("WORMHOLE_RUNTIME", folder.path().join("backends"));
    let killed = Underway::start(&mut command);
    let line = killed.working();
    let words = "attached: window window of 258M, vsock vsock with the context id 4";
    assert!(line.starts_with(words), "{line}");
    let launcher = Pid::from_raw(killed.id().cast_signed()).expect("a process");
    kill_process(launcher, Signal::KILL).expect("it runs");
    killed.finish();
    let is_there = |name: &&str| folder.path().join(name).symlink_metadata().is_ok();
    eventually("the end of the names", PATIENCE, || {
        !["window", "vsock"].iter().any(is_there)
    });
    backend(&["stop"]);
    nothing_is_left();
}
