//! Works on the disk image of Debian as its users do.
//!
//! One test boots it by Wormhole's own monitor, with a backend. One boots it on a machine that QEMU emulates, whose memory
//! has a soft-reserved range as a window has, without a backend behind it. In the third the disk is part of a guest with a
//! backend.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use wormhole_images::DiskFile;

use crate::documents::{commands_of, root};
use crate::emulated::script;
use crate::guest_network::{GUEST, HOST, PORT, enter_network};
use crate::harness::{Ended, beside_other_guests, finish, images, program, wormhole};

/// Time after which a step of the guest counts as hung.
const PATIENCE: Duration = Duration::from_secs(400);

/// Kernel parameters of the range, which the kernel must not lie in itself.
const WINDOW: &str = "memmap=64M%512M-1+0xefffffff nokaslr";

/// The line that the host sends the guest over the network.
const GREETING: &str = "the host greets the guest";

/// A machine whose console is a pipe.
struct Console {
    machine: Ended,
    input: ChildStdin,
    output: Receiver<Vec<u8>>,
    seen: String,
}

impl Console {
    fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the machine starts");
        let input = child.stdin.take().expect("it is piped");
        let mut from = child.stdout.take().expect("it is piped");
        let (tell, output) = channel();
        std::thread::spawn(move || {
            let mut room = [0; 4096];
            while let Ok(length @ 1..) = from.read(&mut room) {
                if tell.send(room[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            machine: Ended(child),
            input,
            output,
            seen: String::new(),
        }
    }

    /// Waits until the guest has written `text`. Returns what it wrote before, and forgets both.
    fn expect(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            if let Some(at) = self.seen.find(text) {
                let rest = self.seen.split_off(at + text.len());
                let mut before = std::mem::replace(&mut self.seen, rest);
                before.truncate(at);
                return before;
            }
            let left = PATIENCE.saturating_sub(start.elapsed());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.seen.push_str(&String::from_utf8_lossy(&bytes)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("the guest did not write {text:?}: {}", self.seen)
                }
            }
        }
    }

    fn write_line(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("the guest reads it");
    }

    fn log_in(&mut self, user: &str) {
        self.expect("guest login: ");
        self.write_line(user);
        // The shell's prompt may hold anything.
        self.expect(&format!("{user}@guest:"));
    }

    /// Runs a command in the guest's shell. Returns its output and its exit status.
    fn run(&mut self, command: &str) -> (String, i32) {
        // The echo of this line has the marks with quotes in them.
        self.write_line(&format!("echo '<be''gin>'; {command}; echo '<e''nd '$?'>'"));
        self.expect("<begin>\r\n");
        let output = self.expect("<end ");
        let status = self.expect(">");
        (output, status.parse().expect("a status"))
    }
}

/// Answers one connection.
fn greet(listener: TcpListener) {
    std::thread::spawn(move || {
        if let Ok((mut guest, _)) = listener.accept() {
            drop(writeln!(guest, "{GREETING}"));
        }
    });
}

/// A copy of the disk, since the image stays as it was built.
struct Disk {
    image: PathBuf,
    copy: PathBuf,
    _folder: tempfile::TempDir,
}

impl Disk {
    /// Copies the disk. Returns the reason if there is none.
    fn new() -> Result<Self, String> {
        let image = images().join("guest-bookworm");
        if !image.join("disk.raw").is_file() {
            return Err("the disk image is not built, which needs root".to_owned());
        }
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join("disk.raw");
        let status = Command::new("cp")
            .arg("--sparse=always")
            .args([&image.join("disk.raw"), &copy])
            .status();
        assert!(status.expect("cp starts").success());
        Ok(Self {
            image,
            copy,
            _folder: folder,
        })
    }
}

/// Programs of the demo that the guest's user runs.
const PROGRAMS: [&str; 3] = ["matrix_mul", "streams_events", "vector_add"];

#[test]
fn an_ordinary_user_of_the_disk_runs_programs_by_its_libraries() {
    let _beside = beside_other_guests();
    let disk = match Disk::new() {
        Ok(disk) => disk,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let programs = PROGRAMS.map(|name| program("static", name));
    let folder = programs[0].parent().expect("it is in a folder").display();
    let commands = PROGRAMS.map(|name| format!("/mnt/{name}")).join(" && ");
    // The disk's service and udev do the same to the window when they boot.
    let script = format!(
        r#"set -e
        mkdir /disk
        mount /dev/vda /disk
        for shared in dev proc sys; do mount --bind /$shared /disk/$shared; done
        mount --bind {folder} /disk/mnt
        chroot /disk sh -c 'ln -s dax0.0 /dev/wormhole-window
            chgrp wormhole /dev/dax0.0 && chmod 660 /dev/dax0.0
            setpriv --reuid=user --regid=user --init-groups --reset-env sh -c "
                env; wormhole-guest check && {commands}"'"#
    );
    let mut command = wormhole(&["run", "--placement", "host", "--disk"]);
    command.arg(&disk.copy);
    let run = finish(command.args(["--", "/bin/bash", "-c", &script]));
    assert!(run.status.success(), "{}{}", run.stdout, run.stderr);
    assert!(!run.stdout.contains("LD_LIBRARY_PATH"), "{}", run.stdout);
    for line in ["All is well", "ok    device     "] {
        assert!(run.stdout.contains(line), "{line}: {}", run.stdout);
    }
    for name in PROGRAMS {
        let pass = format!("PASS {name}");
        assert!(run.stdout.contains(&pass), "{pass}: {}", run.stdout);
    }
}

/// Commands of a person who boots the disk, logs in as an ordinary user, runs a program, and switches the guest off by its
/// power button. START, CONSOLE and STOP are those of docs/guests.md. `$2` is the folder of the disk's image. systemd would
/// give the console up if this machine were so slow that its device did not appear within 90 s.
const LOGIN: &str = r#"
set -e
command=$1 image=$2
said() {
    for ((looks = 0; looks < 800; looks++)); do
        [[ $("$command" guest logs debian) == *"$1"* ]] && return
        sleep 1
    done
    echo "the guest does not say $1:"
    "$command" guest logs debian
    exit 1
}
mount -t cgroup2 none /sys/fs/cgroup
"$command" backend start
patience="systemd.default_device_timeout_sec=900 systemd.default_timeout_start_sec=900"
cd "$image"
ln -s /dev/vda disk.raw
START --backend default --memory 512M
said "guest login: "
coproc console { exec CONSOLE 2>&1; }
echo user >&${console[1]}
said "user@guest:"
words='vector_add; ls /sys/bus/platform/drivers/pvpanic-mmio; echo sys""tem $(systemctl is-system-running --wait)'
echo "$words" >&${console[1]}
said "PASS vector_add"
said "QEMU0001:00"
said "system running"
STOP --timeout 300
[ -e /run/wormhole/.guests/debian ] || echo "Debian leaves nothing"
"$command" backend stop
"#;

/// Returns [`LOGIN`] with the page's commands. The guest's kernel has more parameters than the page says, since this machine
/// is slow.
fn login() -> String {
    const PARAMETERS: &str = "root=/dev/vda rw";
    let page = commands_of(&root().join("docs/guests.md"));
    let [start, console, stop] = &page[..] else {
        panic!("docs/guests.md has other commands: {page:?}");
    };
    assert!(start.contains(PARAMETERS), "{start}");
    let more = format!("{PARAMETERS} quiet net.ifnames=0 $patience");
    let own = |line: &str| line.replace("target/wormhole/bin/wormhole", "\"$command\"");
    LOGIN
        .replace("START", &own(start).replace(PARAMETERS, &more))
        .replace("CONSOLE", &own(console))
        .replace("STOP", &own(stop))
}

#[test]
fn debian_boots_in_a_guest_and_its_user_runs_a_program() {
    let _beside = beside_other_guests();
    let disk = match Disk::new() {
        Ok(disk) => disk,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let vector_add = program("static", "vector_add");
    let write = format!("write {} /usr/local/bin/vector_add", vector_add.display());
    let mut debugfs = Command::new("/usr/sbin/debugfs");
    let written = debugfs.args(["-w", "-R", &write]).arg(&disk.copy).status();
    assert!(written.expect("debugfs starts").success());
    let copy = File::options().read(true).write(true).open(&disk.copy);
    let copy = copy.expect("it is ours");
    let device = DiskFile {
        file: copy.as_fd(),
        writable: true,
    };
    let parts = ["vmlinuz", "initrd"].map(|name| disk.image.join(name));
    let tools = ["/usr/bin/ln", "/usr/bin/mount", "/usr/bin/sleep"].map(PathBuf::from);
    let files = [&parts[..], &tools].concat();
    let said = script(&login(), &[disk.image.clone().into()], &files, &[device]);
    for words in [
        "guest debian switched itself off",
        "Debian leaves nothing",
        "backend default is stopped",
    ] {
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn debian_boots_from_its_disk_and_is_ready_for_cuda_programs() {
    let _beside = beside_other_guests();
    let disk = match Disk::new() {
        Ok(disk) => disk,
        Err(reason) => return println!("skipped: {reason}"),
    };
    if let Err(reason) = enter_network() {
        println!("skipped: {reason}");
        return;
    }
    greet(TcpListener::bind((HOST, PORT)).expect("the port is free"));
    let mut console = Console::start(&mut machine(&disk));
    console.log_in("user");
    let (said, status) = console.run("wormhole-guest check");
    for line in [
        "ok    kernel     6.1.",
        "ok    window     dax0.0, 64 MiB",
        "ok    access     this user may use /dev/wormhole-window",
        "ok    vsock ",
        "ok    libraries  libcuda.so.1 and libnvidia-ml.so.1 in /usr/lib/wormhole",
        // This machine has no backend.
        "FAIL  backend ",
        "1 check failed.",
    ] {
        assert!(said.contains(line), "{line}:\n{said}");
    }
    assert_eq!(status, 1, "{said}");
    let (said, status) = console.run("id -u; [ -w /dev/dax0.0 ]");
    assert_eq!((said.trim(), status), ("1000", 0));
    let (said, _) = console.run(&format!("head -n 1 < /dev/tcp/{HOST}/{PORT}"));
    assert!(said.contains(GREETING), "{said}");
    console.write_line("exit");

    console.log_in("root");
    let (said, _) = console.run("systemctl --failed --no-legend --plain");
    assert_eq!(said.trim(), "", "units have failed");
    // Another user has no right to the window.
    let (_, status) = console.run("setpriv --reuid=1 --clear-groups test -w /dev/dax0.0");
    assert_eq!(status, 1);
    console.write_line("poweroff");
    console.expect("Power down");
    let ended = console.machine.0.wait().expect("it is a child");
    assert!(ended.success(), "{ended}");
}

/// Returns the command of a machine with the disk and the tap interface.
fn machine(disk: &Disk) -> Command {
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-accel", "tcg", "-cpu", "EPYC,check=off", "-M", "q35"])
        .args(["-m", "768", "-nographic", "-no-reboot", "-vga", "none"])
        .arg("-kernel")
        .arg(disk.image.join("vmlinuz"))
        .arg("-initrd")
        .arg(disk.image.join("initrd"))
        .arg("-append")
        .arg(format!(
            "root=/dev/vda rw console=ttyS0 net.ifnames=0 ip={GUEST}:::255.255.255.0::eth0:off {WINDOW}"
        ))
        .arg("-drive")
        .arg(format!("file={},format=raw,if=virtio", disk.copy.display()))
        .args(["-netdev", "tap,id=net,ifname=wh0,script=no,downscript=no"])
        .args(["-device", "virtio-net-pci,netdev=net"]);
    qemu
}
