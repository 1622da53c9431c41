//! Passes an NVMe disk of the emulated host through to a backend VM, and cases that must be refused.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use wormhole_images::{DiskFile, Image, NvmeDisk};

use crate::documents;
use crate::emulated::{WITHIN, script_on};
use crate::harness::{beside_other_guests, finish, wormhole};

/// Size of a disk.
const DISK: usize = 4 << 20;

/// Commands of Perl that stand before the supervisor in its file, and so execute in the backend VM. A process of them does what
/// the window of a tenant asks for, with the disk and O_DIRECT, so that the disk's data goes to the window by DMA and from it. It
/// looks for requests in the last 2 MiB of the first 64 MiB of each slot: the number of the request, what to do (0 reads the disk,
/// 1 writes to it, 2 reads it without end after the answer), a place on the disk, a number of bytes, a place in the window, and
/// whether that is the other slot's. A request for no bytes sends the signal of the number at the disk's place to the supervisor's
/// processes, or resets the VM without a number. It answers behind that: the number, an errno, the interrupts of the disk so far,
/// and the first bytes at the place in memory. The other process executes the supervisor.
const IN_VM: &str = r#"#!/usr/bin/perl
if (fork) {
    wait;
    binmode DATA;
    open(my $own, ">:raw", "/supervisor") or die $!;
    { local $/; print $own <DATA>; }
    close $own;
    chmod 0755, "/supervisor";
    exec "/supervisor", @ARGV or die $!;
}
exit if fork;
my ($request, $answer) = (62 << 20, (62 << 20) + 4096);
my $name = "/dev/nvme0n1";
select(undef, undef, undef, 0.02) until -e $name;
sysopen(my $disk, $name, 2 | 040000) or die "$name: $!";
my (@windows, @devices);
for my $slot (0, 1) {
    open(my $device, "+<", "/dev/dax$slot.0") or die $!;
    my $address = syscall(9, 0, 64 << 20, 3, 1, fileno $device, 0);
    die $! if $address == -1;
    push @windows, $address;
    push @devices, $device;
}
pipe(my $from, my $to);
sub put {
    my ($address, @numbers) = @_;
    syswrite($to, pack("Q*", @numbers));
    syscall(0, fileno $from, $address, 8 * @numbers);
}
sub interrupts {
    my $sum = 0;
    open(my $file, "<", "/proc/interrupts") or die $!;
    while (<$file>) {
        my ($line, @fields) = split;
        next unless /PCI-MSI.*nvme/;
        for (@fields) { last unless /^\d+$/; $sum += $_; }
    }
    return $sum;
}
# Sends a signal to all processes of the supervisor.
sub send_signal {
    my ($signal) = @_;
    opendir(my $all, "/proc") or die $!;
    my @processes = grep { /^\d+$/ && (readlink("/proc/$_/exe") // "") eq "/supervisor" } readdir($all);
    return kill($signal, @processes) == @processes && @processes > 1 ? 0 : -1;
}
my @done = (0, 0);
while (1) {
    for my $slot (0, 1) {
        my $fields = unpack("P48", pack("Q", $windows[$slot] + $request));
        my ($turn, $what, $from, $bytes, $place, $other) = unpack("Q6", $fields);
        next if $turn == $done[$slot];
        $done[$slot] = $turn;
        next if $turn == 0;
        if ($bytes == 0 && $from == 0) {
            open(my $trigger, ">", "/proc/sysrq-trigger") or die $!;
            syswrite($trigger, "b");
        }
        my $memory = $windows[$other ? 1 - $slot : $slot] + $place;
        my $transfer = sub { syscall($what == 1 ? 18 : 17, fileno $disk, $memory, $bytes, $from) == $bytes };
        my $error = $bytes == 0 ? send_signal($from) : $transfer->() ? 0 : $! + 0 || -1;
        my $first = unpack("Q", unpack("P8", pack("Q", $memory)));
        put($windows[$slot] + $answer + 8, $error, interrupts(), $first);
        put($windows[$slot] + $answer, $turn);
        1 while $what == 2 && $transfer->();
    }
    select(undef, undef, undef, 0.01);
}
__END__
"#;

/// Commands of Perl of the tenant with the window `$ARGV[0]`, or of the host with a disk. They print one word.
const OUTSIDE: &str = r#"
my ($path, $verb, @numbers) = @ARGV;
my ($request, $answer) = (62 << 20, (62 << 20) + 4096);
open(my $file, $verb eq "holds" ? "<" : "+<", $path) or die "$path: $!";
sub get {
    my ($at, $count) = @_;
    my $bytes = "";
    sysseek($file, $at, 0);
    while (length $bytes < $count) {
        sysread($file, $bytes, $count - length $bytes, length $bytes) or die "cannot read: $!";
    }
    return $bytes;
}
sub put {
    my ($at, $bytes) = @_;
    sysseek($file, $at, 0);
    syswrite($file, $bytes) == length $bytes or die "cannot write: $!";
}
# The contents of blocks of a disk, each with its number.
sub blocks { my ($word, $first, $count) = @_; join "", map { sprintf("%-6s %08x|", $word, $_) x 32 } $first .. $first + $count - 1 }
if ($verb eq "holds") {
    my ($at, $word, $first, $count) = @numbers;
    print get($at, 512 * $count) eq blocks($word, $first, $count) ? "yes\n" : "no\n";
} elsif ($verb eq "fill") {
    my ($at, $word, $first, $count) = @numbers;
    put($at, blocks($word, $first, $count));
} else {
    my $turn = unpack("Q", get($request, 8)) + 1;
    put($request + 8, pack("Q5", {write => 1, endless => 2}->{$verb} // 0, @numbers));
    put($request, pack("Q", $turn));
    for (1 .. 6000) {
        my ($done, $error, $interrupts, $first) = unpack("Q3a8", get($answer, 32));
        if ($done == $turn) {
            my %said = (interrupts => $interrupts, first => $first =~ tr/\0/0/r, "" => $error);
            print $said{$numbers[4]}, "\n";
            exit;
        }
        select(undef, undef, undef, 0.01);
    }
    die "no answer";
}
"#;

/// Commands of an operator with an NVMe disk at 10.0, and two that share an IOMMU group at 11.0 and 11.1. `$4` has those of
/// docs/backend-vm.md.
const SCRIPT: &str = r#"
set -e
command=$1 in_vm=$2 outside=$3 page=$4
disk=0000:00:10.0
fail() {
    echo "$1"
    for file in /run/wormhole/*/log /run/a /run/b; do
        [ ! -e $file ] || { echo "$file:"; cat $file; }
    done
    exit 1
}
# Gives the device $1 to the driver $2, or to that of its kind.
give() {
    local device=/sys/bus/pci/devices/$1
    echo $2 >$device/driver_override
    [ ! -e $device/driver ] || echo $1 >$device/driver/unbind
    echo $1 >/sys/bus/pci/drivers_probe
    [ -e /sys/bus/pci/drivers/${2:-nvme}/$1 ] || fail "$1 has not the driver $2"
}
# Finds the disk of the controller $disk, which is named after its subsystem.
find_node() {
    local subsystem controller
    for subsystem in /sys/class/nvme-subsystem/nvme-subsys*; do
        for controller in $subsystem/nvme*; do
            node=/dev/nvme${subsystem##*nvme-subsys}n1
            [ -e $controller/address ] && [[ $(<$controller/address) == $disk ]] && [ -e $node ] && return
        done
    done
    return 1
}
on_host() {
    give $disk
    within 60 "the disk on the host" find_node
}
outside() { perl -e "$outside" "$@"; }
refused() {
    local what=$1
    shift
    "$command" backend start other --placement vm "$@" 2>/run/refused && fail "$what is not refused"
    echo "$what: status $?, $(cat /run/refused)"
    [ ! -e /run/wormhole/other ] || fail "$what leaves a folder"
}
# A VM with the disk.
start() {
    "$command" backend start many --placement vm --slots 2 --slot-size 64M --memory 448M --pci 00:10.0 || fail "no VM"
    echo "a VM after $SECONDS s"
}
tenant() {
    rm -f /run/$1
    "$command" attach --backend many --size 64M --window /run/window.$1 --vsock /run/vsock.$1 >/run/$1 2>&1 &
    eval "$1=$!"
    within 60 "tenant $1" grep -q attached /run/$1
}
ask() { outside /run/window.a "$@"; }
# What descriptor 5 has, also after its name is gone.
left=/proc/self/fd/5
reads_again() { [[ $(outside $left holds $((32 << 20)) disk 0 2048) == yes ]]; }
# Finds the process of the VM.
vm_of_many() {
    vm=$(</run/wormhole/many/record.json)
    vm=${vm#*\"pid\":} vm=${vm%%,*}
    vm=$((vm))
}

# The supervisor's file in the VM has another program in front.
supervisor=${command%/bin/*}/lib/wormhole/wormhole-supervisor
{ echo -n "$in_vm"; cat $supervisor; } >/run/both
cat /run/both >$supervisor
rm /run/both

refused nothing --pci 00:1e.0
refused busy --pci $disk
give 0000:00:11.0 vfio-pci
refused shared --pci 00:11.0
eval "${page/0000:01:00.0/$disk}"
[ -e /sys/bus/pci/drivers/vfio-pci/$disk ] || fail "the page gives the disk to another driver"
refused twice --pci $disk --pci $disk
start
tenant a
refused taken --pci 00:10.0

before=$(ask read 0 512 $((30 << 20)) 0 interrupts)
# Two of the disk's pages at once, and many that lie apart in the window's memory.
echo "reads: $(ask read 0 8192 $((32 << 20)) 0) $(ask read 8192 1048576 $((34 << 20)) 0)"
echo "the window holds the disk's data: $(outside /run/window.a holds $((32 << 20)) disk 0 16) \
$(outside /run/window.a holds $((34 << 20)) disk 16 2048)"
# Behind the blocks that are compared: the machine may be started once more, with the same disk.
outside /run/window.a fill $((40 << 20)) window 64 64
echo "writes: $(ask write 2097152 32768 $((40 << 20)) 0)"
echo "interrupts: $before and $(ask read 0 512 $((30 << 20)) 0 interrupts)"
# The disk cannot write to memory that is out of its reach. QEMU's disk says that it has.
echo "into a slot without a tenant: $(ask read 0 8192 $((32 << 20)) 1 first)"
tenant b
echo "into a slot with one: $(ask read 0 8192 $((32 << 20)) 1 first)"
echo "the other window holds the disk's data: $(outside /run/window.b holds $((32 << 20)) disk 0 16)"
exec 5<>/run/window.b
kill -TERM $b
wait $b
outside $left fill $((32 << 20)) left 0 16
echo "into a slot that its tenant has left: $(ask read 0 8192 $((32 << 20)) 1 first)"
tenant b
echo "into the slot of the next: $(ask read 0 8192 $((32 << 20)) 1 first)"
echo "the tenant that has left has its memory for itself: $(outside $left holds $((32 << 20)) left 0 16)"
log=/run/wormhole/many/log
[ ! -s $log ] || cat $log
"$command" backend stop many
wait $a || echo "the tenant ends with its backend"
on_host
echo "after a stop the disk holds its data: $(outside $node holds 0 disk 0 2048)"
echo "after a stop the disk holds the window's data: $(outside $node holds 2097152 window 64 64)"

give $disk vfio-pci
start
tenant a
echo "reads again: $(ask read 0 8192 $((32 << 20)) 0) $(outside /run/window.a holds $((32 << 20)) disk 0 16)"
# The supervisor cannot end a tenant while all of its processes are stopped.
tenant b
exec 5<>/run/window.b
in_vm() { grep -c memfd:wormhole-window /proc/$vm/maps; }
vm_of_many
echo "windows in the VM's process: $(in_vm)"
echo "the supervisor is stopped: $(ask signal 19 0 0 0)"
kill -9 $b
within 180 "the quarantine" grep -q "is in quarantine: " $log
echo "windows in the VM's process, with one in quarantine: $(in_vm)"
outside $left fill $((32 << 20)) left 0 16
echo "into a slot in quarantine: $(ask read 0 8192 $((32 << 20)) 1 first)"
echo "the tenant of the quarantine has its memory for itself: $(outside $left holds $((32 << 20)) left 0 16)"
"$command" attach --backend many --size 64M --window /run/window.c --vsock /run/vsock.c 2>&1 || echo "status $?"
echo "the supervisor goes on: $(ask signal 18 0 0 0)"
within 60 "the late end of the tenant" grep -q "leaves quarantine: " $log
tenant b
echo "into the slot after its quarantine: $(ask read 0 8192 $((32 << 20)) 1 first) $(outside /run/window.b holds $((32 << 20)) disk 0 16)"
kill -TERM $b
wait $b
ask read 0 0 0 0 2>/dev/null &
wait $a || echo "the tenant ends with its backend"
within 60 "the VM's own end" grep -q "reset itself" $log
on_host
echo "after the VM's own end the disk holds its data: $(outside $node holds 0 disk 0 2048)"

give $disk vfio-pci
# Killed as soon as the driver in the VM has the disk's interrupts enabled.
start 2>/run/starting &
within 60 "interrupts of the disk" grep -q "vfio-msix.*$disk" /proc/interrupts
vm_of_many
kill -9 $vm
wait $! && fail "a VM that was killed serves"
[ ! -e /run/wormhole/many ] || fail "a VM that was killed leaves a folder"
on_host
echo "after kill -9 the disk holds its data: $(outside $node holds 0 disk 0 2048)"
outside $node fill 3145728 host 0 16
echo "after kill -9 the host writes: $(outside $node holds 3145728 host 0 16)"

give $disk vfio-pci
start
tenant a
exec 5<>/run/window.a
echo "reads without end: $(ask endless 0 1048576 $((32 << 20)) 0)"
outside $left fill $((32 << 20)) left 0 16
within 60 "a further read" reads_again
vm_of_many
kill -9 $vm
wait $a || echo "the tenant ends with its backend"
on_host
outside $left fill $((32 << 20)) left 0 2048
echo "after kill -9 in reads the disk holds its data: $(outside $node holds 0 disk 0 2048)"
echo "after kill -9 in reads the tenant has its memory for itself: $(outside $left holds $((32 << 20)) left 0 2048)"
echo "all after $SECONDS s"
"#;

/// Makes a disk whose blocks contain their numbers.
fn disk() -> File {
    let mut file = tempfile::tempfile().expect("a file");
    for block in 0..DISK / 512 {
        let text = format!("{:<6} {block:08x}|", "disk").repeat(32);
        file.write_all(text.as_bytes()).expect("room");
    }
    file
}

#[test]
fn a_backend_vm_has_a_disk_whose_dma_reaches_windows_of_tenants_and_which_comes_back() {
    let _beside = beside_other_guests();
    let disks = [disk(), disk(), disk()];
    let places = [(16, 0), (17, 0), (17, 1)];
    let nvme: Vec<NvmeDisk<'_>> = disks
        .iter()
        .zip(places)
        .map(|(disk, address)| NvmeDisk {
            disk: DiskFile {
                file: disk.as_fd(),
                writable: true,
            },
            address,
        })
        .collect();
    let page = documents::root().join("docs/backend-vm.md");
    let by_page = documents::blocks_of(&page, "text");
    let by_page = &by_page[0];
    let tools = ["cat", "grep", "perl", "rm", "sleep"];
    let tools = tools.map(|tool| PathBuf::from("/usr/bin").join(tool));
    let said = script_on(
        &[Image::backend],
        &[WITHIN, SCRIPT].concat(),
        &[IN_VM.into(), OUTSIDE.into(), by_page.into()],
        &tools,
        (&[], &nvme),
        Duration::from_secs(600),
    );
    for words in [
        "nothing: status 2, wormhole: there is no device 0000:00:1e.0: ",
        "busy: status 2, wormhole: the device 0000:00:10.0 has the driver nvme, not vfio-pci: ",
        "shared: status 2, wormhole: the device 0000:00:11.0 shares IOMMU group ",
        " with 0000:00:11.1, which has the driver nvme: ",
        "twice: status 2, wormhole: backend other does not start: the device 0000:00:10.0 is named twice",
        "taken: status 2, wormhole: backend other does not start: the device 0000:00:10.0 is in use: ",
        "reads: 0 0\n",
        "the window holds the disk's data: yes yes\n",
        "writes: 0\n",
        "into a slot without a tenant: 00000000\n",
        "into a slot with one: disk   0\n",
        "the other window holds the disk's data: yes\n",
        "into a slot that its tenant has left: 00000000\n",
        "into the slot of the next: disk   0\n",
        "the tenant that has left has its memory for itself: yes\n",
        "backend many is stopped\n",
        "after a stop the disk holds its data: yes\n",
        "after a stop the disk holds the window's data: yes\n",
        "reads again: 0 yes\n",
        "windows in the VM's process: 2\n",
        "the supervisor is stopped: 0\n",
        "windows in the VM's process, with one in quarantine: 1\n",
        "into a slot in quarantine: 00000000\n",
        "the tenant of the quarantine has its memory for itself: yes\n",
        "the supervisor goes on: 0\n",
        "into the slot after its quarantine: disk   0 yes\n",
        "after the VM's own end the disk holds its data: yes\n",
        "after kill -9 the disk holds its data: yes\n",
        "after kill -9 the host writes: yes\n",
        "reads without end: 0\n",
        "after kill -9 in reads the disk holds its data: yes\n",
        "after kill -9 in reads the tenant has its memory for itself: yes\n",
    ] {
        assert!(said.contains(words), "{words}\n{said}");
    }
    let full = "all 2 slots of the backend VM have a window or are in quarantine (1) until the VM acknowledges the end of a \
                tenant: try later or start it anew\nstatus 2\n";
    assert!(said.contains(full), "{full}\n{said}");
    let interrupts = said
        .lines()
        .find_map(|line| line.strip_prefix("interrupts: "));
    let (before, after) = interrupts
        .and_then(|words| words.split_once(" and "))
        .expect("two numbers");
    let [before, after] = [before, after].map(|text| text.parse::<u64>().expect("a number"));
    assert!(before > 0 && after >= before + 4, "{before} and {after}");
}

#[test]
fn devices_that_no_backend_vm_can_have_are_refused_before_it_starts() {
    let places = tempfile::tempdir().expect("a folder");
    let config = places.path().join("backend.toml");
    fs::write(&config, "placement = \"vm\"\npci = [\"ffff:ff:1f.7\"]\n").expect("a file");
    let config = config.to_str().expect("text");
    for (arguments, words) in [
        (
            &["--pci", "ffff:ff:1f.7"][..],
            "--pci applies to backend VMs alone",
        ),
        (
            &["--placement", "vm", "--pci", "ffff:ff:1f.7"],
            "there is no device ffff:ff:1f.7",
        ),
        (
            &["--placement", "vm", "--pci", "1f.7"],
            "neither the address of a PCI device",
        ),
        (&["--config", config], "there is no device ffff:ff:1f.7"),
        (&["--config", config], "`pci` in line 2"),
    ] {
        let runtime = places.path().join("runtime");
        let mut command = wormhole(&["backend", "start", "one"]);
        let run = finish(command.args(arguments).env("WORMHOLE_RUNTIME", &runtime));
        assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
        assert!(run.stderr.contains(words), "{words}\n{}", run.stderr);
        assert!(!runtime.exists(), "{}", run.stderr);
    }
}
