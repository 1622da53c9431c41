//! The server's answers to orderly and to hostile requests.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use crate::driver::{Driver, read};
use proptest::prelude::*;
use rustix::io::Errno;
use tempfile::TempDir;
use wormhole_fs::abi::{Dirent, EntryOut, OutHeader, ROOT, StatfsOut, opcode};
use wormhole_fs::server::Server;
use wormhole_fs::tree::{MOST_NODES, Tree};
use zerocopy::IntoBytes;

pub fn driver_of(folder: &Path, nodes: usize) -> Driver<'static> {
    drive(Server::new(Tree::open(folder, nodes).expect("a folder")))
}

pub fn drive(mut server: Server) -> Driver<'static> {
    Driver::new(move |request: &[u8]| server.serve(request).map(<[u8]>::to_vec))
}

/// An exported folder with some files, and a file outside of it.
fn fixture() -> (TempDir, Driver<'static>) {
    let outer = tempfile::tempdir().expect("a folder");
    let root = outer.path().join("root");
    fs::create_dir_all(root.join("folder/inner")).expect("folders");
    fs::write(outer.path().join("secret"), "outside").expect("a file");
    fs::write(root.join("text"), "hello").expect("a file");
    fs::write(root.join("folder/inner/deep"), "deep").expect("a file");
    symlink("text", root.join("link")).expect("a link");
    symlink(outer.path(), root.join("out")).expect("a link");
    let driver = driver_of(&root, MOST_NODES);
    (outer, driver)
}

pub fn changed(outer: &Path) -> Vec<(String, u64, i64, Vec<u8>)> {
    let mut all = Vec::new();
    let mut folders = vec![outer.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let data = fs::symlink_metadata(&path).expect("metadata");
            if data.is_dir() {
                folders.push(path.clone());
            }
            let content = data.is_file().then(|| fs::read(&path).expect("a file"));
            let name = path.display().to_string();
            all.push((
                name,
                data.ino(),
                data.ctime_nsec(),
                content.unwrap_or_default(),
            ));
        }
    }
    all.sort();
    all
}

#[test]
fn files_are_found_and_read() {
    let (outer, mut driver) = fixture();
    let text = driver.look_up(ROOT, "text").expect("it is there");
    let host = fs::metadata(outer.path().join("root/text")).expect("metadata");
    assert_eq!((text.attr.size, text.attr.mode), (5, host.mode()));
    assert_eq!((text.attr.ino, text.attr.uid), (host.ino(), host.uid()));
    assert_eq!(
        driver.read(text.node, 0, 4096).as_deref(),
        Ok(&b"hello"[..])
    );
    assert_eq!(driver.read(text.node, 3, 1).as_deref(), Ok(&b"l"[..]));
    assert_eq!(driver.read(text.node, 5, 4096).as_deref(), Ok(&b""[..]));
    let deep = driver.walk("folder/inner/deep").expect("it is there");
    let attributes = driver.metadata(deep.node).expect("metadata").attr;
    assert_eq!(attributes.as_bytes(), deep.attr.as_bytes());
    assert_eq!(driver.read(deep.node, 0, 4096).as_deref(), Ok(&b"deep"[..]));
    assert!(driver.metadata(ROOT).is_ok());
    assert_eq!(driver.look_up(ROOT, "none").err(), Some(Errno::NOENT));
    let space: StatfsOut = read(&driver.ask(opcode::STATFS, ROOT, &[]).expect("an answer"));
    assert!(space.blocks > 0 && space.namelen >= 255);
}

#[test]
fn links_are_read_and_never_followed() {
    let (_outer, mut driver) = fixture();
    let link = driver.look_up(ROOT, "link").expect("it is there");
    let target = driver.ask(opcode::READLINK, link.node, &[]);
    assert_eq!(target.as_deref(), Ok(&b"text"[..]));
    assert_eq!(driver.read(link.node, 0, 9), Err(Errno::ACCESS));
    let out = driver.look_up(ROOT, "out").expect("it is there");
    assert_eq!(
        driver.look_up(out.node, "secret").err(),
        Some(Errno::NOTDIR)
    );
    assert_eq!(driver.list(out.node, true, 4096), Err(Errno::NOTDIR));
}

#[test]
fn a_folder_is_listed_whole_in_replies_of_any_size() {
    let (_outer, mut driver) = fixture();
    let kinds = [("folder", 4), ("link", 10), ("out", 10), ("text", 8)];
    let wanted = kinds.map(|(name, kind)| (name.to_owned(), kind)).to_vec();
    for (plus, size) in [(false, 64), (false, 4096), (true, 192), (true, 4096)] {
        let listed = driver.list(ROOT, plus, size).expect("a listing");
        for (name, node, _) in &listed {
            assert_eq!(*node != 0, plus);
            if plus {
                assert_eq!(driver.look_up(ROOT, name).expect("there").node, *node);
            }
        }
        let found: Vec<_> = listed
            .into_iter()
            .map(|(name, _, kind)| (name, kind))
            .collect();
        assert_eq!(found, wanted);
    }
    let text = driver.look_up(ROOT, "text").expect("it is there");
    assert_eq!(driver.list(text.node, false, 4096), Err(Errno::NOTDIR));
    assert_eq!(driver.read(ROOT, 0, 4096), Err(Errno::ISDIR));
}

#[test]
fn a_listing_tells_nothing_of_the_folder_outside() {
    let (outer, mut driver) = fixture();
    let inode = |path: &Path| fs::metadata(path).expect("metadata").ino();
    let (inside, outside) = (inode(&outer.path().join("root")), inode(outer.path()));
    for (opcode, start) in [
        (opcode::READDIR, 0),
        (opcode::READDIRPLUS, size_of::<EntryOut>()),
    ] {
        let whole = driver.at(opcode, ROOT, 0, 4096).expect("a listing");
        let (mut rest, mut parents) = (&whole[..], 0);
        while !rest.is_empty() {
            let entry: Dirent = read(&rest[start..]);
            let len = entry.namelen as usize;
            let name = start + size_of::<Dirent>();
            if &rest[name..][..len] == b".." {
                assert_eq!(entry.ino, inside);
                parents += 1;
            }
            assert_ne!(entry.ino, outside);
            rest = &rest[name + len.next_multiple_of(8)..];
        }
        assert_eq!(parents, 1);
    }
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    let (_outer, mut driver) = fixture();
    let folder = driver.look_up(ROOT, "folder").expect("it is there").node;
    for name in [
        "",
        ".",
        "..",
        "/",
        "../secret",
        "inner/deep",
        "inner/",
        "/etc",
        "inner\0",
    ] {
        for parent in [ROOT, folder] {
            let found = driver.look_up(parent, name).err();
            assert_eq!(found, Some(Errno::INVAL), "{name:?}");
        }
    }
    let unterminated = driver.ask(opcode::LOOKUP, ROOT, b"text");
    assert_eq!(unterminated, Err(Errno::INVAL));
}

#[test]
fn a_folder_that_becomes_a_link_leads_nowhere() {
    let (outer, mut driver) = fixture();
    let folder = driver.look_up(ROOT, "folder").expect("it is there").node;
    let inner = driver.look_up(folder, "inner").expect("it is there").node;
    let root = outer.path().join("root");
    fs::rename(root.join("folder/inner"), root.join("moved")).expect("renamed");
    symlink(outer.path(), root.join("folder/inner")).expect("a link");
    assert_eq!(driver.look_up(inner, "secret").err(), Some(Errno::STALE));
    assert_eq!(driver.list(inner, true, 4096), Err(Errno::STALE));
    assert_eq!(driver.metadata(inner).err(), Some(Errno::STALE));
}

#[test]
fn a_replaced_file_has_another_node() {
    let (outer, mut driver) = fixture();
    let old = driver.look_up(ROOT, "text").expect("it is there").node;
    let root = outer.path().join("root");
    fs::write(root.join("new"), "changed").expect("a file");
    fs::rename(root.join("new"), root.join("text")).expect("renamed");
    assert_eq!(driver.read(old, 0, 9), Err(Errno::STALE));
    assert_eq!(driver.metadata(old).err(), Some(Errno::STALE));
    let new = driver.look_up(ROOT, "text").expect("it is there").node;
    assert_ne!(new, old);
    assert_eq!(driver.read(new, 0, 9).as_deref(), Ok(&b"changed"[..]));
    // The old node does not take the new one's place with it.
    assert_eq!(driver.send(opcode::FORGET, old, &1u64.to_ne_bytes()), None);
    assert_eq!(driver.look_up(ROOT, "text").expect("there").node, new);
}

#[test]
fn nothing_is_changed() {
    let (outer, mut driver) = fixture();
    let text = driver.look_up(ROOT, "text").expect("it is there").node;
    let before = changed(outer.path());
    for change in opcode::CHANGES {
        for node in [ROOT, text] {
            let mut body = [1; 128];
            body[127] = 0;
            assert_eq!(
                driver.ask(change, node, &body),
                Err(Errno::ROFS),
                "{change}"
            );
        }
    }
    assert_eq!(changed(outer.path()), before);
}

#[test]
fn opens_and_unknown_requests_are_left_to_the_driver() {
    let (_outer, mut driver) = fixture();
    // OPEN, GETXATTR, OPENDIR, ACCESS, IOCTL, LSEEK, SETUPMAPPING, STATX, and none.
    for unknown in [14, 22, 27, 34, 39, 46, 48, 52, 0, u32::MAX] {
        assert_eq!(driver.ask(unknown, ROOT, &[0; 64]), Err(Errno::NOSYS));
    }
}

#[test]
fn special_files_are_seen_and_not_opened() {
    let (outer, mut driver) = fixture();
    let pipe = outer.path().join("root/pipe");
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).expect("made");
    let node = driver.look_up(ROOT, "pipe").expect("it is there").node;
    assert_eq!(driver.read(node, 0, 9), Err(Errno::ACCESS));
}

#[test]
fn file_systems_of_the_kernel_are_absent() {
    let mut driver = driver_of(Path::new("/"), MOST_NODES);
    for name in ["proc", "sys"] {
        assert_eq!(
            driver.look_up(ROOT, name).err(),
            Some(Errno::NOENT),
            "{name}"
        );
    }
    let listed = driver.list(ROOT, true, 4096).expect("a listing");
    let (_, node, _) = listed
        .iter()
        .find(|(name, ..)| name == "proc")
        .expect("it is listed");
    assert_eq!(*node, 0);
}

#[test]
fn a_node_is_stale_once_it_is_forgotten_as_often_as_it_was_found() {
    let (_outer, mut driver) = fixture();
    let [first, second] = [0; 2].map(|_| driver.look_up(ROOT, "text").expect("there").node);
    assert_eq!(first, second);
    driver.send(opcode::FORGET, first, &1u64.to_ne_bytes());
    assert!(driver.read(first, 0, 9).is_ok());
    let batch = [1u64, first, 1];
    assert_eq!(driver.send(opcode::BATCH_FORGET, 0, batch.as_bytes()), None);
    assert_eq!(driver.read(first, 0, 9), Err(Errno::STALE));
    assert_ne!(driver.look_up(ROOT, "text").expect("there").node, first);
    // The root is not forgotten, and more nodes than there are do no harm.
    for node in [ROOT, 0, first, 77, u64::MAX] {
        driver.send(opcode::FORGET, node, &u64::MAX.to_ne_bytes());
    }
    let batch = [u64::from(u32::MAX), ROOT, 1];
    driver.send(opcode::BATCH_FORGET, 0, batch.as_bytes());
    assert!(driver.look_up(ROOT, "text").is_ok());
}

#[test]
fn forged_nodes_are_stale() {
    let (_outer, mut driver) = fixture();
    for node in [0, 2, 1 << 40, u64::MAX] {
        assert_eq!(driver.look_up(node, "text").err(), Some(Errno::STALE));
        assert_eq!(driver.metadata(node).err(), Some(Errno::STALE));
        assert_eq!(driver.read(node, 0, 9), Err(Errno::STALE));
        assert_eq!(driver.list(node, true, 4096), Err(Errno::STALE));
        assert_eq!(driver.ask(opcode::READLINK, node, &[]), Err(Errno::STALE));
    }
    assert!(driver.ask(opcode::READLINK, ROOT, &[]).is_err());
}

#[test]
fn a_guest_knows_a_bounded_number_of_nodes() {
    let outer = tempfile::tempdir().expect("a folder");
    for number in 0..20 {
        fs::write(outer.path().join(number.to_string()), "").expect("a file");
    }
    let mut driver = driver_of(outer.path(), 10);
    let found: Vec<Result<EntryOut, Errno>> = (0..20)
        .map(|number| driver.look_up(ROOT, &number.to_string()))
        .collect();
    assert!(found[..10].iter().all(Result::is_ok));
    assert!(
        found[10..]
            .iter()
            .all(|found| found.as_ref().err() == Some(&Errno::NFILE))
    );
    // A listing has all names, and no more nodes.
    assert_eq!(driver.list(ROOT, true, 4096).expect("a listing").len(), 20);
    let node = found[0].as_ref().expect("found").node;
    driver.send(opcode::FORGET, node, &9u64.to_ne_bytes());
    assert!(driver.look_up(ROOT, "19").is_ok());
}

#[test]
fn another_driver_starts_anew() {
    let (_outer, mut driver) = fixture();
    let text = driver.look_up(ROOT, "text").expect("it is there").node;
    let init = [7u32, 31, 0, 0];
    driver
        .ask(opcode::INIT, 0, init.as_bytes())
        .expect("an answer");
    assert_eq!(driver.read(text, 0, 9), Err(Errno::STALE));
    for old in [[7u32, 30, 0, 0], [6, 99, 0, 0]] {
        assert_eq!(
            driver.ask(opcode::INIT, 0, old.as_bytes()),
            Err(Errno::PROTO)
        );
    }
}

#[test]
fn offsets_and_sizes_out_of_range_are_survived() {
    let (_outer, mut driver) = fixture();
    let text = driver.look_up(ROOT, "text").expect("it is there").node;
    assert_eq!(driver.read(text, u64::MAX, u32::MAX), Err(Errno::INVAL));
    assert_eq!(driver.read(text, 0, u32::MAX).as_deref(), Ok(&b"hello"[..]));
    assert_eq!(driver.read(text, 0, 0).as_deref(), Ok(&b""[..]));
    let whole = driver.at(opcode::READDIR, ROOT, 0, u32::MAX);
    assert!(!whole.expect("a listing").is_empty());
    assert!(driver.at(opcode::READDIR, ROOT, u64::MAX, 4096).is_err());
}

proptest! {
    /// Requests of any opcode, node and body: an orderly reply or none, and no change of the host.
    #[test]
    fn hostile_requests_are_survived(
        requests in proptest::collection::vec(
            (0u32..55, prop_oneof![0u64..8, any::<u64>()], proptest::collection::vec(any::<u8>(), 0..200), any::<bool>()),
            1..60,
        ),
    ) {
        let (outer, mut driver) = fixture();
        for name in ["text", "folder", "link", "out"] {
            let _ = driver.look_up(ROOT, name);
        }
        let before = changed(outer.path());
        for (opcode, node, mut body, terminated) in requests {
            if terminated {
                body.retain(|byte| *byte != 0);
                body.push(0);
            }
            if let Some(reply) = driver.send(opcode, node, &body) {
                let header: OutHeader = read(&reply);
                prop_assert_eq!(header.len as usize, reply.len());
                prop_assert!((-200..=0).contains(&header.error));
            }
        }
        prop_assert_eq!(changed(outer.path()), before);
    }

    #[test]
    fn bytes_that_are_no_request_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let (outer, _) = fixture();
        let mut server = Server::new(Tree::open(outer.path(), 9).expect("a folder"));
        let reply = server.serve(&bytes).map(<[u8]>::to_vec);
        prop_assert_eq!(reply.is_none(), bytes.len() < 40);
    }
}
