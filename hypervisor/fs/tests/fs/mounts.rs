//! File systems that the host mounts while a guest knows the folder. The tests run in a mount namespace.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;
use wormhole_fs::abi::ROOT;

use crate::protocol::driver_of;

/// Arguments of unshare(1) that let a user mount.
const NAMESPACES: [&str; 3] = ["--user", "--map-root-user", "--mount"];
/// Environment variable of a test in its namespaces.
const INSIDE: &str = "WORMHOLE_MOUNTS";

/// Returns true in namespaces of its own. Otherwise it runs the test there, where the system has them.
fn is_inside(test: &str) -> bool {
    if env::var_os(INSIDE).is_some() {
        return true;
    }
    let probe = Command::new("unshare")
        .args(NAMESPACES)
        .arg("true")
        .output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        println!("skipped: a user may not mount here");
        return false;
    }
    let ended = Command::new("unshare")
        .args(NAMESPACES)
        .arg(env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output();
    let ended = ended.expect("it runs");
    let said = [ended.stdout, ended.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert!(ended.status.success(), "{said:?}");
    assert!(said[0].contains("1 passed"), "{said:?}");
    false
}

fn run(program: &str, arguments: &[&str], place: &Path) {
    let ended = Command::new(program).args(arguments).arg(place).status();
    assert!(ended.expect("it runs").success(), "{program}");
}

#[test]
fn a_file_system_of_the_kernel_is_absent_though_its_device_number_was_anothers() {
    let test =
        "mounts::a_file_system_of_the_kernel_is_absent_though_its_device_number_was_anothers";
    if !is_inside(test) {
        return;
    }
    let root = tempfile::tempdir().expect("a folder");
    let place = root.path().join("place");
    fs::create_dir(&place).expect("a folder");
    let device = || fs::metadata(&place).expect("metadata").dev();
    // Linux gives the lowest number that is free. Another process may take that first.
    for _ in 0..100 {
        let mut driver = driver_of(root.path(), 100);
        run("mount", &["-t", "tmpfs", "none"], &place);
        let before = device();
        let folder = driver.look_up(ROOT, "place").expect("it is there").node;
        run("umount", &[], &place);
        run("mount", &["-t", "devpts", "none"], &place);
        let is_reused = device() == before;
        if is_reused {
            let found = driver.look_up(ROOT, "place").err();
            assert_eq!(found, Some(Errno::NOENT));
            assert!(driver.look_up(folder, "ptmx").is_err());
            assert!(driver.list(folder, true, 4096).is_err());
            assert!(driver.metadata(folder).is_err());
        }
        run("umount", &[], &place);
        if is_reused {
            return;
        }
    }
    panic!("no device number was used again");
}

#[test]
fn a_namespace_is_absent_where_it_is_mounted() {
    if !is_inside("mounts::a_namespace_is_absent_where_it_is_mounted") {
        return;
    }
    let root = tempfile::tempdir().expect("a folder");
    let place = root.path().join("place");
    fs::write(&place, "").expect("a file");
    let mut driver = driver_of(root.path(), 100);
    let node = driver.look_up(ROOT, "place").expect("it is there").node;
    run("mount", &["--bind", "/proc/self/ns/net"], &place);
    assert_eq!(driver.look_up(ROOT, "place").err(), Some(Errno::NOENT));
    assert!(driver.read(node, 0, 9).is_err());
    run("umount", &[], &place);
    assert!(driver.look_up(ROOT, "place").is_ok());
}
