//! Files and folders that the host moves while the server has them open.

use std::fs;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, mkdirat, openat, unlinkat};
use rustix::io::Errno;
use tempfile::TempDir;
use wormhole_fs::abi::{ROOT, SetattrIn, opcode, valid};

use crate::changes::{self, RDWR, REGULAR};
use crate::driver::Driver;
use crate::protocol::{changed, driver_of};

/// Creates `root/a/b/c`, with a file and a link in each folder, and a driver of `root`.
fn fixture() -> (TempDir, Driver<'static>) {
    let outer = tempfile::tempdir().expect("a folder");
    let root = outer.path().join("root");
    fs::create_dir_all(root.join("a/b/c")).expect("folders");
    for folder in ["", "a", "a/b", "a/b/c"] {
        let folder = root.join(folder);
        fs::write(folder.join("file"), "inside").expect("a file");
        std::os::unix::fs::symlink("target", folder.join("link")).expect("a link");
    }
    let driver = driver_of(&root, 1000);
    (outer, driver)
}

fn move_to(outer: &TempDir, from: &str, to: &str) {
    let path = |name: &str| outer.path().join(name);
    fs::rename(path(from), path(to)).expect("moved");
}

/// Makes the server open a folder, its listing and its file. Returns the nodes of folder, file and link.
fn open(driver: &mut Driver<'_>, path: &str) -> [u64; 3] {
    let folder = driver.walk(path).expect("it is there").node;
    let file = driver.look_up(folder, "file").expect("it is there").node;
    let link = driver.look_up(folder, "link").expect("it is there").node;
    assert_eq!(driver.read(file, 0, 9).as_deref(), Ok(&b"inside"[..]));
    assert!(driver.list(folder, false, 4096).is_ok());
    [folder, file, link]
}

/// Asserts that no request about these nodes has an answer.
fn lead_nowhere(driver: &mut Driver<'_>, [folder, file, link]: [u64; 3]) {
    for name in ["file", "new", "none"] {
        let found = driver.look_up(folder, name);
        // The name of the folder leads to nothing any more, once its descriptor is closed.
        let is_gone = matches!(found, Err(Errno::STALE | Errno::NOENT));
        assert!(is_gone, "{name}: {found:?}");
    }
    assert!(driver.read(file, 0, 9).is_err());
    assert!(driver.at(opcode::READDIR, folder, 0, 4096).is_err());
    assert!(driver.at(opcode::READDIRPLUS, folder, 0, 4096).is_err());
    assert!(driver.ask(opcode::READLINK, link, &[]).is_err());
    for node in [folder, file, link] {
        assert!(driver.metadata(node).is_err());
    }
}

fn write(outer: &TempDir, name: impl AsRef<Path>) {
    fs::write(outer.path().join(name), "outside").expect("written");
}

#[test]
fn a_folder_that_is_moved_out_leads_nowhere() {
    for (path, depth) in [("a", 1), ("a/b", 2), ("a/b/c", 3)] {
        let (outer, mut driver) = fixture();
        let nodes = open(&mut driver, path);
        // A name that the server has not opened.
        let unopened = driver.walk(&format!("{path}/link")).expect("there").node;
        move_to(&outer, &format!("root/{path}"), "moved");
        write(&outer, "moved/new");
        write(&outer, "moved/file");
        lead_nowhere(&mut driver, nodes);
        assert!(driver.metadata(unopened).is_err(), "{depth}");
        // It has lost its nodes and no others.
        assert!(driver.walk("file").is_ok());
        move_to(&outer, "moved", &format!("root/{path}"));
        let node = driver.walk(&format!("{path}/file")).expect("there").node;
        assert_eq!(driver.read(node, 0, 9).as_deref(), Ok(&b"outside"[..]));
    }
}

#[test]
fn a_folder_below_one_that_is_moved_out_leads_nowhere() {
    for from in ["root/a", "root/a/b"] {
        let (outer, mut driver) = fixture();
        let nodes = open(&mut driver, "a/b/c");
        let parent = driver.walk("a/b").expect("it is there").node;
        move_to(&outer, from, "moved");
        let inner = outer.path().join("moved");
        let inner = inner.join(if from == "root/a" { "b/c" } else { "c" });
        write(&outer, inner.join("new"));
        lead_nowhere(&mut driver, nodes);
        // Neither does a folder that has been forgotten, through one that is open.
        driver.send(opcode::FORGET, nodes[0], &9u64.to_ne_bytes());
        assert!(driver.look_up(parent, "c").is_err(), "{from}");
    }
}

#[test]
fn a_folder_whose_place_outside_is_as_deep_leads_nowhere() {
    let (outer, mut driver) = fixture();
    let nodes = open(&mut driver, "a/b/c");
    fs::create_dir_all(outer.path().join("other/a/b")).expect("folders");
    move_to(&outer, "root/a/b/c", "other/a/b/c");
    lead_nowhere(&mut driver, nodes);
}

#[test]
fn a_folder_that_is_moved_inside_is_found_at_its_new_place() {
    let (outer, mut driver) = fixture();
    open(&mut driver, "a/b/c");
    move_to(&outer, "root/a/b/c", "root/c");
    assert_eq!(driver.walk("a/b/c").err(), Some(Errno::NOENT));
    open(&mut driver, "c");
    move_to(&outer, "root/a", "root/c/a");
    open(&mut driver, "c/a/b");
}

#[test]
fn a_file_that_is_moved_or_replaced_is_not_read_while_it_is_open() {
    for depth in ["", "a/b/"] {
        let (outer, mut driver) = fixture();
        let name = format!("{depth}file");
        let file = driver.walk(&name).expect("it is there").node;
        assert_eq!(driver.read(file, 0, 9).as_deref(), Ok(&b"inside"[..]));
        move_to(&outer, &format!("root/{name}"), "moved");
        write(&outer, "moved");
        assert_eq!(driver.read(file, 0, 9), Err(Errno::NOENT));
        write(&outer, format!("root/{name}"));
        assert_eq!(driver.read(file, 0, 9), Err(Errno::STALE));
    }
}

#[test]
fn files_are_found_to_a_bounded_depth() {
    let outer = tempfile::tempdir().expect("a folder");
    // Folders deeper than a path can name.
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let mut at = openat(CWD, outer.path(), flags, Mode::empty()).expect("opened");
    let deep = 1030;
    for _ in 0..deep {
        mkdirat(&at, "d", Mode::RWXU).expect("a folder");
        at = openat(&at, "d", flags, Mode::empty()).expect("opened");
    }
    let mut driver = driver_of(outer.path(), 2000);
    let mut folder = ROOT;
    for _ in 0..1024 {
        folder = driver.look_up(folder, "d").expect("it is there").node;
    }
    let deeper = driver.look_up(folder, "d").err();
    assert_eq!(deeper, Some(Errno::NAMETOOLONG));
    assert_eq!(driver.list(folder, true, 4096).expect("listed").len(), 1);
    for _ in 0..deep {
        at = openat(&at, "..", flags, Mode::empty()).expect("opened");
        unlinkat(&at, "d", AtFlags::REMOVEDIR).expect("removed");
    }
}

#[test]
fn a_listing_that_fails_leaves_no_nodes() {
    let outer = tempfile::tempdir().expect("a folder");
    for name in ["a", "z"] {
        fs::create_dir_all(outer.path().join(name)).expect("a folder");
        for number in 0..5 {
            fs::write(outer.path().join(format!("{name}/{number}")), "").expect("a file");
        }
    }
    let mut driver = driver_of(outer.path(), 7);
    let folder = driver.look_up(ROOT, "a").expect("it is there").node;
    let file = driver.look_up(folder, "0").expect("it is there").node;
    driver.send(opcode::FORGET, file, &1u64.to_ne_bytes());
    assert_eq!(driver.list(folder, false, 4096).expect("listed").len(), 5);
    move_to(&outer, "a", "b");
    // The folder is still open, so that its files can be listed, but its name is gone.
    let listed = driver.at(opcode::READDIRPLUS, folder, 0, 4096);
    assert_eq!(listed, Err(Errno::NOENT));
    for number in 0..5 {
        driver.walk(&format!("z/{number}")).expect("a free node");
    }
}

/// A file that the guest has open, and how the guest tries to keep it when the host moves it out.
#[derive(Debug)]
enum Keeping {
    Handle,
    LostName,
    FileInItsPlace,
}

#[test]
fn a_file_that_is_moved_out_is_out_of_reach_of_who_has_it_open() {
    for keeping in [Keeping::Handle, Keeping::LostName, Keeping::FileInItsPlace] {
        let (outer, root, mut driver) = changes::fixture();
        let trusted = outer.path().join("trusted");
        let (node, handle) = driver
            .create(ROOT, "file", RDWR, REGULAR | 0o600)
            .expect("made");
        match keeping {
            Keeping::Handle => {
                fs::rename(root.join("file"), &trusted).expect("moved");
            }
            Keeping::LostName => {
                driver.add_name(node, ROOT, "second").expect("made");
                driver
                    .remove(opcode::UNLINK, ROOT, "file")
                    .expect("removed");
                fs::rename(root.join("second"), &trusted).expect("moved");
            }
            Keeping::FileInItsPlace => {
                fs::rename(root.join("file"), &trusted).expect("moved");
                replace(&mut driver, "file");
            }
        }
        fs::write(&trusted, "the host's").expect("written");
        let before = changed(outer.path());
        refuse_all(&mut driver, node, handle, &keeping);
        assert_eq!(fs::read(&trusted).expect("a file"), b"the host's");
        assert_eq!(changed(outer.path()), before, "{keeping:?}");
        // Neither is it the guest's when the host removes it.
        fs::remove_file(&trusted).expect("removed");
        refuse_all(&mut driver, node, handle, &keeping);
        replace(&mut driver, "file");
        refuse_all(&mut driver, node, handle, &keeping);
    }
}

/// Renames another file to this name.
fn replace(driver: &mut Driver<'_>, name: &str) {
    driver
        .make(opcode::MKNOD, ROOT, "other", REGULAR | 0o600)
        .expect("made");
    driver
        .rename((ROOT, "other"), (ROOT, name), 0)
        .expect("renamed");
}

/// Asserts that a file can be neither read nor changed.
fn refuse_all(driver: &mut Driver<'_>, node: u64, handle: u64, keeping: &Keeping) {
    let through_the_handle = SetattrIn {
        valid: valid::SIZE | valid::FH,
        fh: handle,
        ..SetattrIn::default()
    };
    let mode = SetattrIn {
        valid: valid::MODE,
        mode: 0o666,
        ..SetattrIn::default()
    };
    let refused = [
        driver.write(handle, 0, b"changed").map(drop),
        driver.read_open(handle).map(drop),
        driver.set(ROOT, through_the_handle).map(drop),
        driver.set(node, through_the_handle).map(drop),
        driver.set(node, mode).map(drop),
        driver.metadata(node).map(drop),
    ];
    for (number, answer) in refused.iter().enumerate() {
        let is_gone = matches!(answer, Err(Errno::STALE | Errno::NOENT | Errno::BADF));
        assert!(is_gone, "{keeping:?}, {number}: {answer:?}");
    }
}

#[test]
fn an_open_file_keeps_while_it_has_a_name_inside_or_has_lost_its_last_one_there() {
    let (_outer, root, mut driver) = changes::fixture();
    let (node, handle) = driver
        .create(ROOT, "file", RDWR, REGULAR | 0o600)
        .expect("made");
    driver.add_name(node, ROOT, "second").expect("made");
    driver
        .remove(opcode::UNLINK, ROOT, "file")
        .expect("removed");
    assert_eq!(driver.write(handle, 0, b"kept"), Ok(4));
    assert_eq!(fs::read(root.join("second")).expect("a file"), b"kept");
    assert_eq!(driver.metadata(node).expect("metadata").attr.nlink, 1);
    // Its name at another place is a name as well.
    driver
        .rename((ROOT, "second"), (ROOT, "third"), 0)
        .expect("renamed");
    assert_eq!(driver.write(handle, 0, b"K"), Ok(1));
    driver
        .remove(opcode::UNLINK, ROOT, "third")
        .expect("removed");
    assert_eq!(driver.read_open(handle).as_deref(), Ok(&b"Kept"[..]));
    assert_eq!(driver.metadata(node).expect("metadata").attr.nlink, 0);
}
