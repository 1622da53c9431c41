//! Runs a person's shell script in one emulated host, where the supervisor has cgroups and guests have KVM.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wormhole_images::{
    DiskFile, EmulatedHost, Ending, HostScript, Image, ImageError, Kernel, NvmeDisk,
    is_emulation_failure, script_host, script_overlay,
};

use crate::harness::{for_emulation, images, stage};

/// Runs a bash script, which must succeed, and returns its output. `$1` is the command, and
/// `arguments` follow. The machine has these files under their own names, and these disks.
pub fn script(
    script: &str,
    arguments: &[OsString],
    files: &[PathBuf],
    disks: &[DiskFile<'_>],
) -> String {
    let limit = Duration::from_secs(900);
    script_with(&[Image::guest], script, arguments, files, disks, limit)
}

/// Returns the shell function `shown GUEST TEXT`. It looks at the log of the guest's console with a pause of so many
/// seconds after each look, until it shows the text, for twice as long as `looks` pauses take. It starts no programs,
/// which would take the processor from the guest. A script has the command in `$command`.
pub fn shown(looks: u32, pause: f32) -> String {
    format!(
        r#"
exec {{never}}<> <(:)
shown() {{
    local log=/run/wormhole/.guests/$1/console file text parts end=$((SECONDS + {limit}))
    while ((SECONDS < end)); do
        text=
        for file in "$log.earlier" "$log"; do
            # A log that is not there yet, or no more, has no text.
            {{ mapfile -d '' -t parts <"$file" || parts=(); }} 2>/dev/null
            text+=${{parts[*]}}
        done
        [[ $text == *"$2"* ]] && return
        read -r -t {pause} -u "$never" || :
    done
    echo "guest $1 does not say $2:"
    "$command" guest logs "$1"
    exit 1
}}
"#,
        limit = (2.0 * f64::from(looks) * f64::from(pause)).ceil()
    )
}

/// The shell function `within SECONDS WHAT COMMAND...`. It waits until the command succeeds. When that takes too long, it calls
/// the script's `fail` with a line that names what was awaited.
pub const WITHIN: &str = r#"
within() {
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" 2>/dev/null; do
        ((SECONDS <= end)) || fail "not in time: $what"
        sleep 0.05
    done
}
"#;

/// The shell function `counts BACKEND PROCESS`, for `within`. It gets the backend's current stats into `$stats`. It succeeds if all
/// figures of the guest of this process are above those of the last time, which `counted=()` forgets.
pub const COUNTS: &str = r#"
declare -A counted now
counts() {
    local own figure value
    stats=$("$command" stats $1 --json)
    own=${stats#*\"process\": $2,}
    own=${own%%\}*}
    [[ $own == *'"is_current": true'* ]] || return 1
    for figure in records bytes_to_device bytes_from_device vm_exits; do
        value=${own#*\"$figure\": }
        value=${value%%[!0-9]*}
        ((${value:-0} > ${counted[$figure]:-0})) || return 1
        now[$figure]=$value
    done
    for figure in "${!now[@]}"; do counted[$figure]=${now[$figure]}; done
}
"#;

/// Mounts the hierarchy of cgroups, and makes the shell function `limits_of NAME PID`. It says which limits the cgroup of a VM's
/// monitor has, and leaves its folder in `$group`. It calls the script's `fail` if the monitor has none of its own, as does
/// `powers_of NAME PID` if one of its threads has a capability.
/// `is_gone PATH` is for `within`.
pub const CGROUPS: &str = r#"
mount -t cgroup2 none /sys/fs/cgroup
limits_of() {
    local line
    read -r line </proc/$2/cgroup
    group=/sys/fs/cgroup${line#0::}
    [[ $group == */vm-$2.* ]] || fail "the monitor of $1 is in the cgroup $line"
    echo "limits of $1: $(<$group/memory.max) bytes, $(<$group/pids.max) tasks; in use: $(<$group/memory.current)"
}
is_gone() { [ ! -e "$1" ]; }
# Says whether no thread of the process $2 has a capability.
powers_of() {
    local task key value threads=0
    for task in /proc/$2/task/*; do
        threads=$((threads + 1))
        while read -r key value; do
            [[ $key != CapPrm: || $value == 0000000000000000 ]] || fail "the thread $(<$task/comm) of $1 may do $value"
        done <$task/status
    done
    ((threads > 3)) || fail "$1 has $threads threads"
    echo "no thread of $1 has a capability"
}
"#;

/// Returns what `limits_of` says of a VM with so many MiB of memory and windows, up to the memory in use.
pub fn limits_of(name: &str, mebibytes: u64) -> String {
    let bytes = mebibytes << 20;
    // The kernel's tables, and what the monitor has beside the VM.
    let most = bytes + bytes / 64 + (192 << 20);
    format!("limits of {name}: {most} bytes, 4096 tasks; in use: ")
}

/// Finds an image for a kernel in a folder.
pub type FindImage = fn(&Path, Kernel) -> Result<Image, ImageError>;

/// Runs a bash script as [`script`] does, in a machine that has these images and counts as hung after `limit`.
pub fn script_with(
    of_vms: &[FindImage],
    script: &str,
    arguments: &[OsString],
    files: &[PathBuf],
    disks: &[DiskFile<'_>],
    limit: Duration,
) -> String {
    script_on(of_vms, script, arguments, files, (disks, &[]), limit)
}

/// Runs a bash script as [`script_with`] does, in a machine that has these NVMe disks as well.
pub fn script_on(
    of_vms: &[FindImage],
    script: &str,
    arguments: &[OsString],
    files: &[PathBuf],
    (disks, nvme_disks): (&[DiskFile<'_>], &[NvmeDisk<'_>]),
    limit: Duration,
) -> String {
    let find = |image: &FindImage| image(&images(), Kernel::V6_1).expect("an image");
    let overlay = script_overlay(&HostScript {
        stage: &stage(),
        images: of_vms.iter().map(find).collect(),
        script,
        arguments: arguments.to_vec(),
        files: files.to_vec(),
        collect: Vec::new(),
    });
    let overlay = overlay.expect("the files are there");
    let image = Image::emulated_host(&images(), Kernel::V6_1).expect("an image");
    for_emulation(|| {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let host = EmulatedHost {
            nvme_disks,
            ..script_host(&image, &overlay, disks, limit)
        };
        let report = host.run(&mut stdout, &mut stderr);
        let said =
            String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
        if is_emulation_failure(&report, &said) {
            return Err(match report {
                Ok(_) => said,
                Err(error) => format!("{error}: {said}"),
            });
        }
        let report = report.expect("the machine runs");
        assert_eq!(report.ending, Ending::Exited(0), "{said}");
        Ok(said)
    })
}
