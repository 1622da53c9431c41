//! Runs two guest VMs at once through one backend that stays. Backend and guests are in one emulated host, where the
//! supervisor has cgroups and serves tenants that are strangers.

use std::path::Path;
use std::time::Duration;

use wormhole_images::{EmulatedHost, Ending, HostRun, Image, ImageError, Kernel, host_overlay};

use crate::harness::{alone, for_emulation, images, program, stage};

/// Commands of a person in the emulated host. `$1` is the command, `$2` the folder of programs.
const SCRIPT: &str = r#"
set -e
guest() { exec "$command" run --host kvm --kernel 6.1 --backend default --memory 256M --quiet "$programs/$1" 2>&1; }
command=$1 programs=$2
mount -t cgroup2 none /sys/fs/cgroup
ln -s /proc/self/fd /dev/fd
"$command" backend start
exec 3< <(guest spin)
victim=$!
read -r line <&3 && [ "$line" = spinning ]
exec 4< <(guest printf)
survivor=$!
read -r line <&4 && [ "$line" = "host: before" ]
kill -9 $victim
while read -r line <&4; do last=$line; done
wait $survivor
[ "$last" = "PASS printf" ] && echo "the survivor passes"
passed=$(guest vector_add)
[[ $passed == *"PASS vector_add"* ]] && echo "a later guest passes"
"$command" backend list
"$command" backend stop
"#;

#[test]
fn two_guests_share_a_backend_and_one_killed_harms_no_other() {
    let _alone = alone();
    let command = stage().join("bin/wormhole");
    let part = |name: &str| stage().join("lib/wormhole").join(name);
    let parts = [
        "wormhole-fs",
        "wormhole-init",
        "wormhole-supervisor",
        "wormhole-worker",
        "libcuda.so.1",
        "libnvidia-ml.so.1",
    ];
    let programs = ["spin", "printf", "vector_add"].map(|name| program("static", name));
    let folder = programs[0].parent().expect("the folder of programs");
    let overlay = host_overlay(&HostRun {
        init: part("wormhole-init"),
        // The shell is the machine's only program, in place of the command.
        wormhole: Path::new("/bin/bash").into(),
        parts: Vec::new(),
        guest: Image::guest(&images(), Kernel::V6_1).expect("an image"),
        guest_kernel: Kernel::V6_1,
        arguments: [
            "-c".as_ref(),
            SCRIPT.as_ref(),
            "bash".as_ref(),
            command.as_os_str(),
            folder.as_os_str(),
        ]
        .map(Into::into)
        .to_vec(),
        variables: Vec::new(),
        stdin: false,
        programs: [command.clone()]
            .into_iter()
            .chain(parts.map(part))
            .chain(programs.clone())
            .chain(["/usr/bin/ln", "/usr/bin/mount"].map(Into::into))
            .collect(),
        has_files: false,
        taps: 0,
        collect: Vec::new(),
    });
    let overlay = overlay.expect("the files are there");
    let image = Image::emulated_host(&images(), Kernel::V6_1).expect("an image");
    for_emulation(|| {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let report = EmulatedHost {
            image: &image,
            overlay: &overlay,
            memory: 3 << 30,
            processors: 2,
            disks: &[],
            taps: &[],
            timeout: Duration::from_secs(400),
            stdin: None,
            signals: None,
            files: None,
        }
        .run(&mut stdout, &mut stderr);
        let said =
            String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
        match report {
            Err(error @ (ImageError::HostDied { .. } | ImageError::HostTimeout { .. })) => {
                return Err(format!("{error}: {said}"));
            }
            Ok(_) if said.contains("(triple fault)") => return Err(said),
            report => {
                let report = report.expect("the machine runs");
                assert_eq!(report.ending, Ending::Exited(0), "{said}");
            }
        }
        for words in [
            "the survivor passes",
            "a later guest passes",
            "backend default is stopped",
        ] {
            assert!(said.contains(words), "{said}");
        }
        Ok(())
    });
}
