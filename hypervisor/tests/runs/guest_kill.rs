//! Kills the monitor, the supervisor, the worker and the backend VM with SIGKILL while a program runs in a guest VM on the emulated
//! host. The run must not hang or leave processes behind, and surviving parties get an error.

use std::path::PathBuf;
use std::time::Duration;

use wormhole_images::{EmulatedHost, Ending, HostRun, Image, Kernel, host_overlay};

use crate::harness::{
    FAILED_EMULATION, beside_other_guests, for_emulation, images, program, stage,
};

/// Tools that the script uses beside the shell.
const TOOLS: [&str; 6] = [
    "/bin/cat",
    "/bin/grep",
    "/bin/ln",
    "/bin/mkdir",
    "/bin/sleep",
    "/usr/bin/tr",
];

/// Script that starts an endless program in a guest, kills a party once the program runs, and prints the run's status
/// and output.
const SCRIPT: &str = r#"
mkdir -p /usr/lib/lib
ln -s /usr/lib/wormhole /usr/lib/lib/wormhole
# Processes whose command line, run together, holds this.
named() {
    for process in /proc/[0-9]*; do
        case "$(cat "$process/cmdline" 2>/dev/null | tr -d '\0')" in
            *"/$1"*) echo "${process#/proc/}" ;;
        esac
    done
}
# The guest's processor failed: emulation does that.
end_if_broken() {
    if grep -q 'triple fault' /run/err; then exit 75; fi
}
/usr/lib/wormhole/wormhole run --placement "$PLACEMENT" --host kvm --quiet --timeout 400 -- "$PROGRAM" > /run/out 2> /run/err &
run=$!
until grep -q spinning /run/out; do
    end_if_broken
    test -d /proc/$run || { cat /run/out /run/err; exit 9; }
    sleep 0.2
done
victims=
for attempt in 1 2 3 4 5; do
    victims=$(named "$PARTY")
    test -z "$victims" || break
    sleep 0.2
done
end_if_broken
test -n "$victims" || {
    echo "no $PARTY runs; what runs:"
    for process in /proc/[0-9]*; do echo "${process#/proc/} $(cat "$process/cmdline" | tr '\0' ' ')"; done
    cat /run/out /run/err
    exit 8
}
echo "$PARTY runs"
kill -9 $victims
wait $run
echo "status $?"
end_if_broken
cat /run/out /run/err
for party in wormhole-worker--device wormhole-supervisor--fd wormholebackend-vm; do
    until test -z "$(named $party)"; do sleep 0.2; done
done
echo "nothing is left"
"#;

/// Runs the script for `party` of a run at this placement and returns its output.
fn kill(placement: &str, party: &str) -> String {
    let _beside = beside_other_guests();
    let images = images();
    let parts = stage().join("lib/wormhole");
    let spin = program("static", "spin");
    let mut programs: Vec<PathBuf> = TOOLS.iter().map(PathBuf::from).collect();
    programs.push(spin.clone());
    let overlay = host_overlay(&HostRun {
        init: parts.join("wormhole-init"),
        wormhole: "/bin/sh".into(),
        parts: [
            "wormhole-fs",
            "wormhole-supervisor",
            "wormhole-worker",
            "libcuda.so.1",
            "libnvidia-ml.so.1",
            "wormhole-init",
        ]
        .map(|part| parts.join(part))
        .into_iter()
        .chain([stage().join("bin/wormhole")])
        .collect(),
        images: [Image::guest, Image::backend]
            .map(|image| image(&images, Kernel::V6_1).expect("it was built"))
            .to_vec(),
        arguments: vec!["-c".into(), SCRIPT.into()],
        stdin: false,
        terminal: None,
        variables: vec![
            ("PLACEMENT".into(), placement.into()),
            ("PARTY".into(), party.into()),
            ("PROGRAM".into(), spin.into()),
        ],
        programs,
        has_files: false,
        volumes: Vec::new(),
        taps: 0,
        collect: Vec::new(),
    })
    .expect("every part is there");
    let image = Image::emulated_host(&images, Kernel::V6_1).expect("it was built");
    let host = EmulatedHost {
        image: &image,
        overlay: &overlay,
        memory: 2560 << 20,
        processors: 2,
        disks: &[],
        nvme_disks: &[],
        networks: &[],
        files: &[],
        timeout: Some(Duration::from_secs(300)),
        stdin: None,
        signals: None,
    };
    let said = for_emulation(|| {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let report = host.run(&mut stdout, &mut stderr);
        let said = String::from_utf8_lossy(&stdout).into_owned();
        match report {
            Err(error) => Err(format!("{error}; it said:\n{said}")),
            Ok(report) if report.ending == Ending::Exited(FAILED_EMULATION) => Err(said),
            Ok(report) => {
                let errors = String::from_utf8_lossy(&stderr).into_owned();
                assert_eq!(report.ending, Ending::Exited(0), "{said}\n{errors}");
                Ok(said)
            }
        }
    });
    assert!(said.ends_with("nothing is left\n"), "{said}");
    said
}

#[test]
fn a_killed_worker_is_an_error_in_the_guest() {
    let said = kill("host", "wormhole-worker--device");
    assert!(
        said.contains("cudaDeviceSynchronize(): cudaErrorContextIsDestroyed"),
        "{said}"
    );
    assert!(said.contains("status 1\n"), "{said}");
}

#[test]
fn a_killed_supervisor_is_an_error_in_the_guest() {
    let said = kill("host", "wormhole-supervisor--fd");
    assert!(
        said.contains("cudaDeviceSynchronize(): cudaErrorSystemNotReady"),
        "{said}"
    );
}

#[test]
fn a_killed_monitor_takes_its_guest_and_its_backend_along() {
    let said = kill("host", "wormholerun");
    assert!(said.contains("status 137\n"), "{said}");
}

#[test]
fn a_killed_backend_vm_is_an_error_in_the_guest() {
    let said = kill("vm", "wormholebackend-vm");
    assert!(
        said.contains("cudaDeviceSynchronize(): cudaErrorSystemNotReady"),
        "{said}"
    );
    assert!(said.contains("status 1\n"), "{said}");
}
