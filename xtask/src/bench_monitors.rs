//! `cargo xtask bench monitors`: Wormhole's monitor beside QEMU's machines `microvm` and `q35`, on the same machine, with
//! the same kernel and initial RAM disk.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use wormhole_figures::{Quantiles, Report, Unit};
use wormhole_images::{ConsoleRun, Image, Kernel, console_overlay};

use crate::command::{Failure, step};
use crate::machine::Script;
use crate::{setup, stage};

#[derive(Debug, Args)]
pub struct Options {
    /// Number of boots of each monitor, by turns. Only the default measures.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Write the figures as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Commands of the benchmark. `$4` is an initial RAM disk, `$5` the number of rounds, `$6` the folder of images of a machine
/// that does not name its own. Each line `figure` has a monitor, a quantity and a number. The quantity
/// `run` is the time until Python's first line: for Wormhole by `wormhole run`, whose guest has the host's files by virtiofs,
/// and for the other monitors from the initial RAM disk.
const SCRIPT: &str = r#"
set -eo pipefail
command=$1 folder=$2 initrd=$4 rounds=$5 kernel=${WORMHOLE_IMAGES:-$6}/guest-6.1/vmlinuz
export WORMHOLE_RUNTIME=$folder/guests
ip tuntap add dev wh-bench mode tap
trap 'ip link delete wh-bench' EXIT
ip address add 10.77.0.1/24 dev wh-bench
ip link set wh-bench up
# A server on port 7001 that takes what a client sends, or gives 32 MiB.
perl -e '
    socket(S, 2, 1, 0) and bind(S, pack("SnC4x8", 2, 7001, 10, 77, 0, 1)) and listen(S, 8) or die $!;
    $| = 1; print "listens\n";
    while (accept(my $client, S)) {
        sysread $client, my $word, 5;
        my $left = 32 << 20;
        if ($word eq "take\n") { while ($left > 0) { $left -= sysread $client, my $bytes, 1 << 16 or last } syswrite $client, "taken\n" }
        else { my $bytes = "x" x (1 << 16); for (1 .. 512) { syswrite $client, $bytes or last } }
    }' >"$folder/listens" &
server=$!
trap 'kill $server; ip link delete wh-bench' EXIT
until [ -s "$folder/listens" ]; do kill -0 $server; sleep 0.1; done
head -c 64M /dev/zero >"$folder/disk"

qemu() {
    local machine=$1
    shift
    exec qemu-system-x86_64 -M "$machine,accel=kvm" -cpu host -m 256M -smp 1 -nodefaults -no-user-config \
        -display none -no-reboot -serial stdio -device isa-debug-exit,iobase=0xf4,iosize=1 \
        -kernel "$kernel" -initrd "$initrd" -append "console=ttyS0 panic=-1 reboot=k tsc=reliable quiet" "$@"
}
disk="-drive file=$folder/disk,format=raw,if=none,id=disk -device virtio-blk-pci,drive=disk"
network="-netdev tap,ifname=wh-bench,script=no,downscript=no,id=network -device virtio-net-pci,netdev=network,romfile="
monitor() {
    case $1 in
    wormhole) exec "$command" guest start bench --foreground --memory 256M \
        --kernel "$kernel" --initrd "$initrd" --append quiet ;;
    wormhole-devices) exec "$command" guest start bench --foreground --memory 256M --disk "$folder/disk" \
        --network tap=wh-bench --kernel "$kernel" --initrd "$initrd" --append quiet ;;
    wormhole-run) exec "$command" run --host kvm --quiet --memory 256M -- /usr/bin/python3 -I -S -c \
        'print("line of Python", flush=True); print("last line")' ;;
    microvm) qemu microvm ;;
    q35) qemu q35 ;;
    q35-devices) qemu q35 $disk $network ;;
    esac
}
# Memory of a process beside its mappings as large as the guest's memory, in KiB.
beside_guest() {
    perl -ne '/^Size: +(\d+)/ and $size = $1; /^Pss: +(\d+)/ and $size < 250 << 10 and $sum += $1;
        END { print $sum }' "/proc/$1/smaps"
}
measure() {
    local name=${1%-*} line start=${EPOCHREALTIME/[.,]/}
    exec 3< <(monitor "$1" </dev/null 2>&1)
    local process=$! said=
    while read -r line <&3; do
        line=${line%$'\r'}
        said+=$line$'\n'
        case $line in
        "first line")
            [[ $1 == *-* ]] || echo "figure $name boot $((${EPOCHREALTIME/[.,]/} - start))" ;;
        "line of Python")
            local python=$((${EPOCHREALTIME/[.,]/} - start))
            [[ $1 == *-* ]] || echo "figure $name python $python"
            [[ $1 == wormhole ]] || echo "figure $name run $python" ;;
        "last line") [[ $1 == *-* ]] || echo "figure $name memory $(beside_guest $process)" ;;
        "took "*) set -- "$1" $line; echo "figure $name $3 $4" ;;
        esac
    done
    wait $process || :
    [[ $said == *"last line"* ]] || { echo "the guest of $1 said: $said"; exit 1; }
}
for ((round = 0; round < rounds; round++)); do
    for name in wormhole wormhole-run microvm q35 wormhole-devices q35-devices; do measure $name; done
done
"#;

/// Commands of the guest. Each line `took` has a quantity and the microseconds that it took. The first `dd` is not timed:
/// its start takes a quarter of the time in which 64 MiB are written.
const GUEST: &str = r#"
echo "first line"
timed() {
    local name=$1 start=${EPOCHREALTIME/[.,]/}
    shift
    "$@" || exit 1
    echo "took $name $((${EPOCHREALTIME/[.,]/} - start))"
}
dd() { command dd "$@" status=none; }
to_host() { exec 5<>/dev/tcp/10.77.0.1/7001; echo take >&5; dd if=/dev/zero bs=64k count=512 >&5; read -r taken <&5; }
to_guest() { exec 5<>/dev/tcp/10.77.0.1/7001; echo give >&5; dd of=/dev/null bs=64k count=512 iflag=fullblock <&5; }
if [ -b /dev/vda ]; then
    dd if=/dev/zero of=/dev/null bs=1M count=1
    timed write dd if=/dev/zero of=/dev/vda bs=1M count=64 oflag=direct conv=fsync
    timed read dd if=/dev/vda of=/dev/null bs=1M iflag=direct
    timed small-reads dd if=/dev/vda of=/dev/null bs=4k count=2000 iflag=direct
    ip address add 10.77.0.2/24 dev eth0
    ip link set eth0 up
    timed to-host to_host
    timed to-guest to_guest
else
    python3 -I -S -c 'print("line of Python")'
fi
echo "last line"
sleep 2
"#;

/// Programs of the guest beside its shell.
const TOOLS: [&str; 3] = ["/bin/dd", "/sbin/ip", "/bin/sleep"];

/// Python, and the folder of its versions' libraries.
const PYTHON: &str = "/usr/bin/python3";
const LIBRARIES: &str = "/usr/lib";
/// Package of the library that Python loads before any program, beside modules that are part of itself.
const ENCODINGS: &str = "encodings";

/// Files that the script uses: the other monitor with its firmware, and the tools.
const FILES: [&str; 11] = [
    "/usr/bin/qemu-system-x86_64",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/pvh.bin",
    "/usr/share/qemu/qboot.rom",
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/seabios/bios-microvm.bin",
    "/sbin/ip",
    "/usr/bin/head",
    "/usr/bin/perl",
    "/usr/bin/sleep",
];

/// Quantities, with their names, units and factors of the script's numbers. Throughputs are times for the same work.
const QUANTITIES: [(&str, &str, Unit, f64); 9] = {
    const TIME: Unit = Unit::Nanoseconds;
    [
        ("boot", "until the first program's first line", TIME, 1e3),
        ("python", "until a Python program's first line", TIME, 1e3),
        ("run", "that line by `wormhole run`", TIME, 1e3),
        (
            "memory",
            "memory beside the guest's",
            Unit::Mebibytes,
            1.0 / 1024.0,
        ),
        ("write", "64 MiB written to the disk", TIME, 1e3),
        ("read", "64 MiB read from the disk", TIME, 1e3),
        (
            "small-reads",
            "2,000 reads of 4 KiB from the disk",
            TIME,
            1e3,
        ),
        ("to-host", "32 MiB of TCP to the host", TIME, 1e3),
        ("to-guest", "32 MiB of TCP to the guest", TIME, 1e3),
    ]
};

/// Monitors, Wormhole's first.
const MONITORS: [&str; 3] = ["wormhole", "microvm", "q35"];

/// Boots guests by turns, prints the medians, and writes them to a file if one is given. Uses the installation in
/// `WORMHOLE_STAGE`, if it is set.
pub fn measure(root: &Path, options: &Options) -> Result<(), Failure> {
    let stage = stage::given_or_built(root)?;
    let folder = root.join("target/bench-monitors");
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let initrd = folder.join("initrd");
    fs::write(&initrd, initial_disk(root, &stage.prefix)?).map_err(failed)?;
    let script = Script {
        text: SCRIPT,
        arguments: vec![
            initrd.clone().into(),
            options.rounds.to_string().into(),
            setup::images(root).into(),
        ],
        programs: FILES
            .map(PathBuf::from)
            .into_iter()
            .chain(python()?)
            .chain([initrd])
            .collect(),
        results: Vec::new(),
        patience: 60,
        host_patience: Duration::from_secs(60 * 60),
    };
    step("boots of guests by turns");
    let mut report = new_report(options.rounds);
    let ran = script.run(root, &stage, "bench-monitors-run")?;
    add_rows(&mut report, &ran.output);
    if !ran.is_success || report.rows.len() != QUANTITIES.len() {
        return Err(Failure::new("not every monitor ended every round"));
    }
    report.conditions.device = format!("guests: {}", ran.guest);
    report
        .finish(options.json.as_deref())
        .map_err(|error| Failure::new(error.to_string()))
}

/// Returns the files of Python, with the modules that it loads before a program.
fn python() -> Result<[PathBuf; 3], Failure> {
    let program = fs::canonicalize(PYTHON)
        .map_err(|error| Failure::new(format!("cannot find {PYTHON}: {error}")))?;
    let version = program.file_name().unwrap_or_default();
    let library = Path::new(LIBRARIES).join(version).join(ENCODINGS);
    Ok([PYTHON.into(), program, library])
}

/// Builds the initial RAM disk of the guests.
fn initial_disk(root: &Path, prefix: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error: wormhole_images::ImageError| Failure::new(error.to_string());
    let image = Image::guest(&setup::images(root), Kernel::V6_1).map_err(failed)?;
    let overlay = console_overlay(&ConsoleRun {
        init: prefix.join("lib/wormhole/wormhole-init"),
        frontends: Vec::new(),
        program: "/bin/bash".into(),
        arguments: ["-c", GUEST].map(Into::into).to_vec(),
        take: TOOLS
            .into_iter()
            .map(PathBuf::from)
            .chain(python()?)
            .collect(),
        window: 0,
    });
    let mut bytes = fs::read(&image.modules)
        .map_err(|error| Failure::new(format!("{}: {error}", image.modules.display())))?;
    bytes.extend(overlay.map_err(failed)?);
    Ok(bytes)
}

fn new_report(rounds: u32) -> Report {
    Report::new("monitors", &MONITORS, &MONITORS[1..], rounds as usize)
}

/// Adds the quantities for which the output has figures of Wormhole and of another monitor.
fn add_rows(report: &mut Report, output: &str) {
    let mut figures: BTreeMap<(&str, &str), BTreeMap<usize, Quantiles>> = BTreeMap::new();
    for line in output.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let ["figure", monitor, quantity, number] = words[..]
            && let Ok(number) = number.parse()
        {
            let turns = figures.entry((monitor, quantity)).or_default();
            turns.extend(Quantiles::of(vec![number]).map(|it| (turns.len(), it)));
        }
    }
    for (quantity, name, unit, factor) in QUANTITIES {
        let of = |monitor| figures.get(&(monitor, quantity)).cloned();
        let mut measured = MONITORS.map(|monitor| of(monitor).unwrap_or_default());
        let [own, others @ ..] = &measured;
        if own.is_empty() || others.iter().all(BTreeMap::is_empty) {
            continue;
        }
        for quantiles in measured.iter_mut().flat_map(BTreeMap::values_mut) {
            quantiles.median *= factor;
        }
        report.add(name, "", unit, &measured);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_compares_with_the_best_of_the_others() {
        let output = "figure wormhole boot 30000\nfigure microvm boot 60000\nfigure q35 boot 90000\n\
            figure wormhole boot 10000\nfigure wormhole boot 20000\nfigure q35 read 1500\nfigure wormhole read 3000\n\
            figure wormhole write 3\nfigure microvm boot slow\n";
        let mut report = new_report(3);
        add_rows(&mut report, output);
        let [boot, read] = &report.rows[..] else {
            panic!("{:?}", report.rows);
        };
        assert_eq!(boot.ways["wormhole"].median, 2e7);
        assert_eq!(boot.ratio, Some(0.5));
        assert_eq!(
            (&*read.name, read.ratio),
            ("64 MiB read from the disk", Some(2.0))
        );
    }
}
