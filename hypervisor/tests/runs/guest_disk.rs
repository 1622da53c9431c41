//! Works on the disk image of Debian as its users do.
//!
//! One test boots it by Wormhole's own monitor, with a backend and a tap interface, one as a tenant of a backend VM, and one its
//! kernel alone. One boots it in a guest of QEMU as docs/qemu.md describes it, with a backend outside. Its systemd starts a guest and a backend VM there.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use wormhole_images::{DiskFile, Image, Kernel};

use crate::documents::{blocks_of, commands_of, root};
use crate::emulated::{FindImage, script_with, shown};
use crate::guest::PROGRAMS;
use crate::guest_network::{GUEST, HOST, PORT};
use crate::guest_of_qemu;
use crate::harness::{
    DISK_PACKAGES, Ended, Underway, beside_other_guests, finish, for_emulation, images, program,
    stage, wormhole,
};

/// Time after which a step of the guest counts as hung.
const PATIENCE: Duration = Duration::from_secs(400);

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

    /// Runs commands of debugfs(8).
    fn edit(&self, commands: &str) {
        let mut debugfs = Command::new("/usr/sbin/debugfs");
        debugfs.args(["-w", "-f", "-"]).arg(&self.copy);
        debugfs.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut debugfs = debugfs.spawn().expect("it starts");
        let mut input = debugfs.stdin.take().expect("it is piped");
        input.write_all(commands.as_bytes()).expect("it reads");
        drop(input);
        assert!(debugfs.wait().expect("it ends").success());
    }
}

/// Returns the commands of debugfs(8) that copy files to a folder of a disk.
fn copies(files: &[PathBuf], folder: &str) -> String {
    let copies = files.iter().map(|file| {
        let name = file.file_name().expect("a file").display();
        format!("write {} {folder}/{name}\n", file.display())
    });
    copies.collect()
}

/// Commands of the disk's ordinary user. `HELLO` and `STRACE` stand for the programs of the packages that the disk was
/// built with, and `PROGRAMS` for those of the demo.
const TRY: &str = r#"#!/bin/bash
echo "user $(id -u), library path [$LD_LIBRARY_PATH]"
wormhole-guest check
STRACE -o /tmp/calls HELLO
grep ^exit_group /tmp/calls
for program in PROGRAMS; do $program || echo "FAILED $program $?"; done
echo "shared memory is $(stat --file-system --format %T /dev/shm), its keeper $(systemctl is-active wormhole-guest-keeper)"
head -n 1 </dev/tcp/HOST/PORT
ls /sys/bus/platform/drivers/pvpanic-mmio
echo "failed units [$(systemctl --failed --no-legend --plain)]"
echo "system $(systemctl is-system-running --wait)"
"#;

/// Commands of a person who boots the disk in a guest with a tap interface, logs in as an ordinary user, runs [`TRY`], and a
/// program with shared files again after the backend has ended and another one has its name, and switches the guest off by its
/// power button. Another guest of the backend runs programs at the same time as [`TRY`]. START, CONSOLE and STOP are those of docs/guests.md. `$2` is the folder of the disk's image, `$3` that of
/// programs. systemd would give the console up if this machine were so slow that its device did not appear within 90 s.
const LOGIN: &str = r#"
set -e
command=$1 image=$2 programs=$3
said() { shown debian "$1"; }
mount -t cgroup2 none /sys/fs/cgroup
ip tuntap add dev wh0 mode tap
ip address add HOST/24 dev wh0
ip link set wh0 up
exec 3< <(exec perl -e 'socket(S, 2, 1, 0) and bind(S, pack("SnC4x8", 2, PORT, split(/\./, "HOST"))) and listen(S, 1) or die;
    $| = 1; print "listens\n"; accept(C, S) and syswrite(C, "GREETING\n")')
read -r line <&3
"$command" backend start
network="net.ifnames=0 ip=GUEST:::255.255.255.0::eth0:off"
patience="systemd.default_device_timeout_sec=900 systemd.default_timeout_start_sec=900"
cd "$image"
ln -s /dev/vda disk.raw
START --backend default --memory 512M --network tap=wh0
# It boots while Debian does.
exec 5> >(exec "$command" run --host kvm --backend default --memory 256M --interactive --quiet -- /usr/bin/sh -c \
    "echo ready; read -r _; $programs/vector_add; $programs/reduction; $programs/streams_events" >/run/beside 2>&1)
beside=$!
said "guest login: "
coproc console { exec CONSOLE 2>&1; }
echo user >&${console[1]}
said "user@guest:"
until [ -s /run/beside ] || ! kill -0 $beside; do sleep 0.5; done
[[ $(</run/beside) == ready ]] || { echo "the guest beside Debian: $(</run/beside)"; exit 1; }
echo >&5
echo try >&${console[1]}
said "system running"
wait $beside || echo "the guest beside Debian ends with $?"
while read -r line; do echo "beside Debian: $line"; done </run/beside
"$command" backend stop
"$command" backend start
# The echo of this line has the marks with quotes in them.
echo 'until vector_add >/dev/null 2>&1; do sleep 1; done; shared_files && echo by the next back""end' >&${console[1]}
said "by the next backend"
"$command" guest logs debian
STOP --timeout 300
[ -e /run/wormhole/.guests/debian ] || echo "Debian leaves nothing"
"$command" backend stop
"#;

/// Commands of the disk's ordinary user in a tenant of a backend VM, which reaches no memory for shared files.
const TRY_AS_TENANT: &str = r#"#!/bin/bash
wormhole-guest check
for program in PROGRAMS; do $program || echo "FAILED $program $?"; done
echo "shared memory is $(stat --file-system --format %T /dev/shm), its keeper $(systemctl is-active wormhole-guest-keeper)"
echo "failed units [$(systemctl --failed --no-legend --plain)]"
echo "system $(systemctl is-system-running --wait)"
"#;

/// Commands of a person who boots the disk in a guest with a backend VM, logs in as an ordinary user, runs [`TRY_AS_TENANT`], and
/// switches the guest off by its power button. `$2` is the folder of the disk's image.
const TENANT: &str = r#"
set -e
command=$1 image=$2
said() { shown debian "$1"; }
mount -t cgroup2 none /sys/fs/cgroup
"$command" backend start --placement vm --slots 1 --slot-size 514M
network="net.ifnames=0"
patience="systemd.default_device_timeout_sec=900 systemd.default_timeout_start_sec=900"
cd "$image"
ln -s /dev/vda disk.raw
START --backend default --memory 512M
said "guest login: "
coproc console { exec CONSOLE 2>&1; }
echo user >&${console[1]}
said "user@guest:"
echo try >&${console[1]}
said "system running"
"$command" ps
"$command" guest logs debian
STOP --timeout 300
"$command" backend stop
"#;

/// Programs of that tenant, and of the guest beside Debian.
const BESIDE: [&str; 3] = ["vector_add", "reduction", "streams_events"];

/// Returns the commands with the addresses and the line of the network's test.
fn with_network(commands: &str) -> String {
    commands
        .replace("HOST", HOST)
        .replace("PORT", &PORT.to_string())
        .replace("GUEST", GUEST)
        .replace("GREETING", GREETING)
}

/// Returns commands with those of the page. The guest's kernel has more parameters than the page says, since this machine is slow.
fn by_the_page(commands: &str) -> String {
    const PARAMETERS: &str = "root=/dev/vda rw";
    let page = commands_of(&root().join("docs/guests.md"));
    let [start, console, stop, ..] = &page[..] else {
        panic!("docs/guests.md has other commands: {page:?}");
    };
    assert!(start.contains(PARAMETERS), "{start}");
    let more = format!("{PARAMETERS} quiet $network $patience");
    let own = |line: &str| line.replace("target/wormhole/bin/wormhole", "\"$command\"");
    with_network(commands)
        .replace("START", &own(start).replace(PARAMETERS, &more))
        .replace("CONSOLE", &own(console))
        .replace("STOP", &own(stop))
}

/// Commands of a person who boots the disk by the file of options of docs/guests.md, with a shell as its first process, and uses
/// the virtio console. `$2` is the folder of the disk's image.
const VIRTIO_CONSOLE: &str = r#"
set -e
command=$1 image=$2
said() { shown debian "$1"; }
mount -t cgroup2 none /sys/fs/cgroup
cd "$image"
ln -s /dev/vda disk.raw
echo 'OPTIONS' >debian.toml
"$command" guest start --config debian.toml --memory 256M --append "root=/dev/vda ro init=/bin/bash"
said "root@"
for task in /proc/[0-9]*/task/*; do
    case $(< $task/comm) in
    vcpu0 | disk-0) [[ $task/ns/net -ef /proc/self/ns/net ]] || echo "$(< $task/comm) has no network" ;;
    esac
done
coproc console { exec "$command" guest console debian 2>&1; }
# The echo of a line has the marks with quotes in them.
echo 'mount -t proc proc /proc; modprobe virtio_console; exec 3<>/dev/hvc0; echo by the serial po""rt' >&${console[1]}
said "by the serial port"
echo 'echo by vir""tio >&3; read -r line <&3; echo the guest re""ad $line >&3' >&${console[1]}
said "by virtio"
echo "what is typed" >&${console[1]}
said "the guest read what is typed"
echo "the person typed on both consoles"
"#;

#[test]
fn input_of_the_console_reaches_the_virtio_console_once_the_guest_speaks_there() {
    let _beside = beside_other_guests();
    let disk = match Disk::new() {
        Ok(disk) => disk,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let options = blocks_of(&root().join("docs/guests.md"), "toml").swap_remove(0);
    let commands = VIRTIO_CONSOLE.replace("OPTIONS", &options);
    let said = boot(&[Image::guest], &commands, &disk, &[]);
    for words in [
        "vcpu0 has no network",
        "disk-0 has no network",
        "the person typed on both consoles",
    ] {
        assert!(said.contains(words), "{said}");
    }
}

/// Runs a script in an emulated host that has images, the disk, its image's files and programs. `$2` is the folder of the image, `$3`
/// that of the programs.
fn boot(images: &[FindImage], commands: &str, disk: &Disk, programs: &[PathBuf]) -> String {
    let copy = File::options().read(true).write(true).open(&disk.copy);
    let copy = copy.expect("it is ours");
    let device = DiskFile {
        file: copy.as_fd(),
        writable: true,
    };
    let parts = ["vmlinuz", "initrd"].map(|name| disk.image.join(name));
    let tools = [
        "bin/ln",
        "bin/mount",
        "bin/perl",
        "bin/sh",
        "bin/sleep",
        "sbin/ip",
    ];
    let tools = tools.map(|tool| Path::new("/usr").join(tool));
    // Now and then the guest stands in its boot with its processor halted. QEMU's emulation is known to lose timer
    // interrupts; another attempt passes.
    let limit = Duration::from_secs(600);
    let folder = programs.first().and_then(|program| program.parent());
    let folder = folder.map(Path::as_os_str).unwrap_or_default();
    script_with(
        images,
        &(shown(800, 1.0) + commands),
        &[disk.image.clone().into(), folder.into()],
        &[&parts[..], &tools, programs].concat(),
        &[device],
        limit,
    )
}

#[test]
fn debian_boots_in_a_guest_and_its_user_runs_the_demo() {
    let _beside = beside_other_guests();
    let disk = match Disk::new() {
        Ok(disk) => disk,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let [hello, strace] = DISK_PACKAGES;
    let programs = [PROGRAMS, &["shared_files"]].concat();
    let commands = with_network(TRY)
        .replace("HELLO", hello)
        .replace("STRACE", strace)
        .replace("PROGRAMS", &programs.join(" "));
    let folder = tempfile::tempdir().expect("a folder");
    let attempt = folder.path().join("try");
    fs::write(&attempt, commands).expect("room");
    fs::set_permissions(&attempt, Permissions::from_mode(0o755)).expect("it is ours");
    let built = programs.iter().map(|name| program("static", name));
    let files: Vec<PathBuf> = built.chain([attempt]).collect();
    disk.edit(&copies(&files, "/usr/local/bin"));
    let beside = BESIDE.map(|name| program("static", name));
    let said = boot(&[Image::guest], &by_the_page(LOGIN), &disk, &beside);
    let passes = programs.iter().map(|name| format!("PASS {name}"));
    let others = [
        "user 1000, library path []",
        "ok    device     ",
        "All is well",
        "Hello, world!",
        "exit_group(0)",
        GREETING,
        "QEMU0001:00",
        "shared memory is ext2/ext3, its keeper active",
        "failed units []",
        "system running",
        "guest debian switched itself off",
        "Debian leaves nothing",
        "backend default is stopped",
    ];
    let beside = BESIDE.map(|name| format!("beside Debian: PASS {name}"));
    for words in passes.chain(beside).chain(others.map(str::to_owned)) {
        assert!(said.contains(&words), "{words}: {said}");
    }
    assert!(!said.contains("FAILED"), "{said}");
    assert!(
        !said.contains("the guest beside Debian ends with"),
        "{said}"
    );
}

#[test]
fn debian_is_a_tenant_of_a_backend_vm() {
    let _beside = beside_other_guests();
    let disk = match Disk::new() {
        Ok(disk) => disk,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = tempfile::tempdir().expect("a folder");
    let attempt = folder.path().join("try");
    let commands = TRY_AS_TENANT.replace("PROGRAMS", &BESIDE.join(" "));
    fs::write(&attempt, commands).expect("room");
    fs::set_permissions(&attempt, Permissions::from_mode(0o755)).expect("it is ours");
    let built = BESIDE.iter().map(|name| program("static", name));
    let files: Vec<PathBuf> = built.chain([attempt]).collect();
    disk.edit(&copies(&files, "/usr/local/bin"));
    let images: [FindImage; 2] = [Image::guest, Image::backend];
    let said = boot(&images, &by_the_page(TENANT), &disk, &[]);
    let passes = BESIDE.map(|name| format!("PASS {name}"));
    let others = [
        "All is well",
        "shared memory is tmpfs, its keeper inactive",
        "failed units []",
        "system running",
        "guest debian switched itself off",
        "backend default is stopped",
    ];
    for words in passes.into_iter().chain(others.map(str::to_owned)) {
        assert!(said.contains(&words), "{words}: {said}");
    }
    assert!(!said.contains("FAILED"), "{said}");
}

/// Options of the guest that systemd starts.
const ONE: &str = r#"
kernel = "/srv/guest/vmlinuz"
initrd = "/srv/guest/guest.img"
append = "quiet"
memory = "256M"
disk = ["/srv/guest/state"]
"#;

/// Commands of that guest, which resets itself when it boots first. POWER_BUTTON and VECTOR_ADD are programs.
const RESETS: &str = r#"
read -r state </dev/vda
if [ "$state" = new ]; then
    echo reset >/dev/vda
    echo b >/proc/sysrq-trigger
fi
VECTOR_ADD && echo "waits for its power button" && POWER_BUTTON
"#;

/// A program that waits until the status register of the power button is set, and switches the machine off, by the ports
/// of the monitor's FADT. Drivers do so in other guests: this one's image has none.
const POWER_BUTTON: &str = r#"
#include <sys/io.h>
#include <unistd.h>
int main(void) {
    if (ioperm(0x600, 6, 1) != 0) return 1;
    while (!(inw(0x600) & 1 << 8)) usleep(10000);
    outw(1 << 13 | 5 << 10, 0x604);
    return 2;
}
"#;

/// Options of the backend VM that systemd starts.
const TWO: &str = r#"
slots = 1
slot-size = "258M"
memory = "384M"
"#;

/// Puts an installation on the disk, the units of guests and of backend VMs, and the files of a guest.
fn install(disk: &Disk) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("room");
        path
    };
    let source = file("power_button.c", POWER_BUTTON);
    let button = folder.path().join("power_button");
    let mut compiler = Command::new("cc");
    compiler.arg("-static").arg(source).arg("-o").arg(&button);
    assert!(compiler.status().expect("a compiler").success());
    let vector_add = program("static", "vector_add");
    let commands = RESETS
        .replace("POWER_BUTTON", &button.display().to_string())
        .replace("VECTOR_ADD", &vector_add.display().to_string());
    guest_of_qemu::initrd_with(
        folder.path(),
        "guest.img",
        &commands,
        vec![vector_add.clone(), button],
    );
    let kernel = Image::guest(&images(), Kernel::V6_1)
        .expect("an image")
        .kernel;
    // The rest of a sector, and more.
    let state = file("state", &format!("new\n{:1020}", ""));
    let parts = ["init", "supervisor", "worker"];
    let parts = parts.map(|part| stage().join(format!("lib/wormhole/wormhole-{part}")));
    let units = ["wormhole-guest@.service", "wormhole-backend-vm@.service"];
    let units = units.map(|unit| root().join("images/units").join(unit));
    let image = fs::read_dir(images().join("backend-6.1")).expect("an image");
    let image: Vec<PathBuf> = image.map(|file| file.expect("a file").path()).collect();
    let [spin, load] = ["spin", "registered_load"].map(|name| program("static", name));
    let files = [
        kernel,
        folder.path().join("guest.img"),
        state,
        vector_add,
        spin,
        load,
    ];
    let all = [
        "mkdir /srv/guest\nmkdir /etc/wormhole\nmkdir /etc/wormhole/guests\n",
        "mkdir /var/lib/wormhole\nmkdir /var/lib/wormhole/images\nmkdir /var/lib/wormhole/images/backend-6.1\n",
        &copies(&files, "/srv/guest"),
        &copies(&[file("one.toml", ONE)], "/etc/wormhole/guests"),
        &copies(&[file("two.toml", TWO)], "/etc/wormhole"),
        &copies(&units, "/etc/systemd/system"),
        &copies(&image, "/var/lib/wormhole/images/backend-6.1"),
        &copies(&[stage().join("bin/wormhole")], "/usr/bin"),
        &copies(&parts, "/usr/lib/wormhole"),
    ];
    disk.edit(&all.concat());
}

/// Has systemd start the guest, which resets itself, and stop the one that it starts in its place. Returns the journal of the
/// unit if QEMU's emulation of virtualization failed.
fn start_and_stop_by_unit(console: &mut Console) -> Result<(), String> {
    const UNIT: &str = "wormhole-guest@one";
    let (said, status) = console.run(&format!("systemctl start {UNIT}"));
    assert_eq!(status, 0, "{said}");
    let waits = "wormhole guest logs one | grep 'waits for its power button'";
    console.run(&format!(
        "until {waits} || systemctl --quiet is-failed {UNIT}; do sleep 1; done"
    ));
    let (journal, _) = console.run(&format!("journalctl --no-pager --unit {UNIT}"));
    if journal.contains("(triple fault)") {
        return Err(journal);
    }
    assert!(journal.contains("code=exited, status=3"), "{journal}");
    let (said, _) = console.run("wormhole guest logs one; wormhole guest list");
    for words in ["PASS vector_add", "its own (cpu)"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let shown = format!("systemctl show -P NRestarts {UNIT}; systemctl is-active {UNIT}");
    let (said, _) = console.run(&shown);
    let restarts: Vec<&str> = said.split_whitespace().collect();
    assert_eq!(restarts, ["1", "active"]);
    stop_unit(console, UNIT, "ls -A /run/wormhole/.guests");
    Ok(())
}

/// Has systemd stop a unit, which must end well. `left` is a command that lists nothing afterwards.
fn stop_unit(console: &mut Console, unit: &str, left: &str) {
    let (said, status) = console.run(&format!("systemctl stop {unit}"));
    assert_eq!(status, 0, "{said}");
    let shown = format!("systemctl show -P Result -P ExecMainStatus {unit}");
    let (said, _) = console.run(&format!("{shown}; systemctl is-active {unit}; {left}"));
    let ends: Vec<&str> = said.split_whitespace().collect();
    assert_eq!(ends, ["success", "0", "inactive"]);
}

/// Has systemd start a backend VM, starts a guest against it, and kills its process. systemd starts another one, and stops it.
/// Returns the journal of the unit if QEMU's emulation of virtualization failed.
fn serve_by_unit(console: &mut Console) -> Result<(), String> {
    const UNIT: &str = "wormhole-backend-vm@two";
    let mut start = |command: &str| match console.run(command) {
        (_, 0) => Ok(()),
        _ => {
            let (journal, _) = console.run(&format!("journalctl --no-pager --unit {UNIT}"));
            assert!(journal.contains("(triple fault)"), "{command}: {journal}");
            Err(journal)
        }
    };
    start(&format!("systemctl start {UNIT}"))?;
    start("wormhole guest start two --backend two --config /etc/wormhole/guests/one.toml")?;
    let waits = "wormhole guest logs two | grep 'waits for its power button'";
    start(&format!(
        "until {waits}; do wormhole guest list | grep two || break; sleep 1; done; {waits}"
    ))?;
    let (said, _) = console.run("wormhole guest logs two; wormhole backend list --json");
    for words in ["PASS vector_add", "\"placement\": \"vm\""] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let (said, status) = console.run("wormhole guest stop two");
    assert_eq!(status, 0, "{said}");
    let restarts = format!("$(systemctl show -P NRestarts {UNIT})");
    let (said, status) = console.run(&format!(
        "systemctl kill --kill-whom=main --signal=KILL {UNIT} && \
         until [ {restarts} = 1 ] && systemctl is-active {UNIT}; do sleep 1; done"
    ));
    assert_eq!(status, 0, "{said}");
    let (said, _) = console.run("wormhole backend list");
    assert!(said.contains("two"), "{said}");
    stop_unit(console, UNIT, "ls /run/wormhole");
    Ok(())
}

#[test]
fn debian_boots_from_its_disk_and_its_systemd_starts_a_guest_and_a_backend_vm() {
    let _beside = beside_other_guests();
    for_emulation(|| {
        let disk = match Disk::new() {
            Ok(disk) => disk,
            Err(reason) => {
                println!("skipped: {reason}");
                return Ok(());
            }
        };
        install(&disk);
        works_as_a_guest_and_as_a_host_of_guests(&disk)
    });
}

/// Boots the disk, on which [`install`] has put a guest, as a tenant of a backend, and works there as its users do.
fn works_as_a_guest_and_as_a_host_of_guests(disk: &Disk) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a folder");
    let home = |arguments: &[&str]| {
        let mut command = wormhole(arguments);
        command.current_dir(folder.path());
        command.env("WORMHOLE_RUNTIME", folder.path().join("backends"));
        command
    };
    let started = finish(&mut home(&["backend", "start", "--trusted-tenants"]));
    assert!(started.status.success(), "{}", started.stderr);
    let attach = || {
        let options = ["attach", "--window", "window", "--serial", "serial"];
        let attached = Underway::start(&mut home(&options));
        attached.working();
        attached
    };
    let ended = |attached: Underway| {
        let attached = attached.finish();
        assert!(attached.status.success(), "{}", attached.stderr);
    };
    let attached = attach();
    let mut console = Console::start(&mut machine(disk, folder.path()));
    let done = works(&mut console);
    if done.is_ok() {
        // Facts need no window: QEMU has that of the first attach.
        let detached = finish(&mut home(&["detach", "--serial", "serial"]));
        assert!(detached.status.success(), "{}", detached.stderr);
        ended(attached);
        let (said, _) = console.run("wormhole-guest check");
        assert!(said.contains("FAIL  backend "), "{said}");
        let attached = attach();
        let (said, _) =
            console.run("until wormhole-guest check | grep 'ok    backend'; do sleep 1; done");
        assert!(said.contains("ok    backend"), "{said}");
        switch_off(&mut console);
        ended(attached);
    } else {
        drop(console);
        ended(attached);
    }
    let stopped = finish(&mut home(&["backend", "stop"]));
    assert!(stopped.status.success(), "{}", stopped.stderr);
    done
}

/// Works on the disk by the console of the machine that boots it, as root at the end.
fn works(console: &mut Console) -> Result<(), String> {
    console.log_in("user");
    let (said, status) = console.run("wormhole-guest check");
    for line in [
        "ok    kernel     6.1.",
        "ok    window     dax0.0, 226 MiB and 32 MiB for registered memory",
        "ok    access     this user may use /dev/wormhole-window",
        "ok    control    /run/wormhole-control, which leads to /dev/virtio-ports/org.wormhole.control",
        "ok    libraries  libcuda.so.1 and libnvidia-ml.so.1 in /usr/lib/wormhole",
        "ok    backend ",
        "ok    device ",
        "All is well",
    ] {
        assert!(said.contains(line), "{line}:\n{said}");
    }
    assert_eq!(status, 0, "{said}");
    let (said, status) = console.run("id -u; [ -w /dev/dax0.0 ] && [ -w /dev/dax0.1 ]");
    assert_eq!((said.trim(), status), ("1000", 0));
    for name in ["vector_add", "registered_load"] {
        let (said, status) = console.run(&format!("/srv/guest/{name}"));
        let passed = format!("PASS {name}");
        assert!(status == 0 && said.contains(&passed), "{said}");
    }
    // Root has no password either, and a process becomes root by a login at the console alone.
    let (said, status) = console.run("su --command 'id -u' root </dev/null");
    assert!(status == 1 && !said.contains('0'), "{said}");
    console.write_line("exit");

    console.log_in("root");
    // Another user has no right to the window.
    let (_, status) = console.run("setpriv --reuid=1 --clear-groups test -w /dev/dax0.0");
    assert_eq!(status, 1);
    start_and_stop_by_unit(console)?;
    serve_by_unit(console)?;
    kill_the_agent(console);
    let (said, _) = console.run("systemctl --failed --no-legend --plain");
    assert_eq!(said.trim(), "", "units have failed");
    Ok(())
}

/// Kills the agent of the port, by which a program works. The program gets an error, and the next one works by the next agent.
fn kill_the_agent(console: &mut Console) {
    const UNIT: &str = "wormhole-guest-control";
    let (said, status) = console.run(&format!(
        "/srv/guest/spin >spinning & until grep spinning spinning; do sleep 0.1; done; \
         systemctl kill --kill-whom=main --signal=KILL {UNIT} && wait; cat spinning; \
         until systemctl is-active {UNIT}; do sleep 0.1; done; /srv/guest/vector_add"
    ));
    assert_eq!(status, 0, "{said}");
    for words in ["cudaErrorSystemNotReady", "FAIL spin", "PASS vector_add"] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

/// Ends the machine by its system.
fn switch_off(console: &mut Console) {
    console.write_line("poweroff");
    console.expect("Power down");
    let ended = console.machine.0.wait().expect("it is a child");
    assert!(ended.success(), "{ended}");
}

/// Returns the command of a machine with the disk, emulated virtualization, a port, and the window of the folder, by the options
/// of docs/qemu.md. It has one processor, since QEMU's emulation of virtualization harms the first of several.
fn machine(disk: &Disk, folder: &Path) -> Command {
    let replaced = [
        ("512M", "1536M"),
        ("770M", "1794M"),
        ("-smp 2", "-smp 1"),
        ("path=serial", "path=serial,reconnect-ms=1000"),
    ];
    let mut qemu = guest_of_qemu::by_port(folder, &replaced);
    qemu.args(["-accel", "tcg", "-cpu", "EPYC,+svm,check=off"])
        .args(["-nographic", "-no-reboot", "-vga", "none"])
        .arg("-kernel")
        .arg(disk.image.join("vmlinuz"))
        .arg("-initrd")
        .arg(disk.image.join("initrd"))
        .arg("-append")
        .arg(format!(
            "root=/dev/vda rw console=ttyS0 mitigations=off {}",
            guest_of_qemu::parameters()
        ))
        .arg("-drive")
        .arg(format!("file={},format=raw,if=virtio", disk.copy.display()))
        .args(["-nic", "none"]);
    qemu
}
