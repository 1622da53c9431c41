//! The process under its filter: its requests, its descriptors, its end.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};

use crate::changes::{RDWR, REGULAR, WRONLY, exercise};
use crate::driver::Driver;
use crate::protocol::changed;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use wormhole_fs::abi::{ROOT, SetattrIn, opcode, valid};

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_wormhole-fs"))
}

fn sockets() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets")
}

/// Sends packets and receives the replies. A request that has no reply is followed by one that has.
fn driver(socket: &OwnedFd) -> Driver<'_> {
    Driver::new(move |request: &[u8]| {
        send(socket, request, SendFlags::NOSIGNAL).expect("sent");
        let opcode = u32::from_ne_bytes(request[4..8].try_into().expect("four bytes"));
        if matches!(opcode, opcode::FORGET | opcode::BATCH_FORGET) {
            return None;
        }
        let mut reply = vec![0; 256 << 10];
        let (len, _) = recv(socket, &mut reply[..], RecvFlags::empty()).expect("received");
        reply.truncate(len);
        Some(reply)
    })
}

fn open_files(process: &Child) -> usize {
    let folder = format!("/proc/{}/fd", process.id());
    fs::read_dir(folder).expect("a process").count()
}

#[test]
fn the_process_serves_packets_with_few_open_files_and_ends_with_its_socket() {
    let root = tempfile::tempdir().expect("a folder");
    for number in 0..700 {
        let folder = root.path().join(number.to_string());
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("text"), number.to_string()).expect("a file");
    }
    let large = vec![7; 300 << 10];
    fs::write(root.path().join("large"), &large).expect("a file");
    let (ours, theirs) = sockets();
    let child = program()
        .arg(root.path())
        .stdin(Stdio::from(theirs))
        .spawn();
    let mut child = child.expect("it starts");
    {
        let mut driver = driver(&ours);
        for number in 0..700 {
            let text = driver.walk(&format!("{number}/text")).expect("it is there");
            let content = driver.read(text.node, 0, 4096).expect("it is read");
            assert_eq!(content, number.to_string().into_bytes());
        }
        assert_eq!(driver.list(ROOT, true, 4096).expect("a listing").len(), 701);
        assert!(open_files(&child) < 2 * 256 + 16, "{}", open_files(&child));
        let node = driver.look_up(ROOT, "large").expect("it is there").node;
        let content = driver.read(node, 0, u32::MAX).expect("it is read");
        assert_eq!(content, large[..128 << 10]);
    }
    // A packet of no request, and one that is cut, do not end the process.
    for bytes in [vec![1; 3], vec![0x55; 150 << 10]] {
        send(&ours, &bytes, SendFlags::NOSIGNAL).expect("sent");
    }
    let mut refused = [0; 64];
    let (len, _) = recv(&ours, &mut refused, RecvFlags::empty()).expect("received");
    assert_eq!(len, 16);
    driver(&ours).look_up(ROOT, "large").expect("it is there");
    drop(ours);
    assert!(child.wait().expect("it ends").success());
}

/// Each change passes the process's own filter.
#[test]
fn the_process_makes_the_changes_that_its_guest_asks_for() {
    let outer = tempfile::tempdir().expect("a folder");
    let root = outer.path().join("root");
    fs::create_dir(&root).expect("a folder");
    let (ours, theirs) = sockets();
    let child = program()
        .arg("--writable")
        .arg(&root)
        .stdin(Stdio::from(theirs))
        .spawn();
    let mut child = child.expect("it starts");
    let mut driver = driver(&ours);
    exercise(&mut driver, &root);
    // The mask of the process is not the guest's.
    let mode = libc::S_IFREG | 0o666;
    driver.create(ROOT, "open", 2, mode).expect("made");
    let made = fs::metadata(root.join("open")).expect("metadata");
    assert_eq!(made.permissions().mode() & 0o7777, 0o666);
    drop(driver);
    drop(ours);
    assert!(child.wait().expect("it ends").success());
}

/// Root's server has no capability to write: it changes what root owns or others may write.
#[test]
fn a_server_of_roots_leaves_the_files_of_other_users() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: this needs root");
        return;
    }
    let root = tempfile::tempdir().expect("a folder");
    let folder = root.path().join("folder");
    fs::create_dir(&folder).expect("a folder");
    let files = [
        (root.path().join("file"), 0o600),
        (folder.join("file"), 0o644),
    ];
    for (path, mode) in &files {
        fs::write(path, "another's").expect("a file");
        fs::set_permissions(path, fs::Permissions::from_mode(*mode)).expect("a mode");
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).expect("this is root");
    }
    std::os::unix::fs::chown(&folder, Some(65534), Some(65534)).expect("this is root");
    let (ours, theirs) = sockets();
    let child = program()
        .arg("--writable")
        .arg(root.path())
        .stdin(Stdio::from(theirs))
        .spawn();
    let mut child = child.expect("it starts");
    {
        let before = changed(root.path());
        let mut driver = driver(&ours);
        let mode = SetattrIn {
            valid: valid::MODE,
            mode: 0o666,
            ..SetattrIn::default()
        };
        let size = SetattrIn {
            valid: valid::SIZE,
            ..SetattrIn::default()
        };
        let folder = driver.look_up(ROOT, "folder").expect("there").node;
        for path in ["file", "folder/file"] {
            let node = driver.walk(path).expect("there").node;
            for flags in [WRONLY, RDWR] {
                assert_eq!(driver.open(node, flags), Err(Errno::ACCESS), "{path}");
            }
            assert_eq!(driver.set(node, size).err(), Some(Errno::ACCESS));
            assert_eq!(driver.set(node, mode).err(), Some(Errno::PERM));
        }
        let refused = [
            driver
                .create(folder, "new", RDWR, REGULAR | 0o600)
                .map(drop),
            driver.make(opcode::MKDIR, folder, "new", 0o700).map(drop),
            driver.remove(opcode::UNLINK, folder, "file"),
            driver.rename((folder, "file"), (ROOT, "new"), 0),
        ];
        assert_eq!(refused, [Err(Errno::ACCESS); 4]);
        assert_eq!(changed(root.path()), before);
        // Root's own folder is root's to change.
        driver
            .create(ROOT, "new", RDWR, REGULAR | 0o600)
            .expect("made");
    }
    drop(ours);
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn the_process_holds_nothing_that_its_starter_had_open() {
    let root = tempfile::tempdir().expect("a folder");
    let (ours, theirs) = sockets();
    let text = root.path().join("text");
    fs::write(&text, "open").expect("a file");
    let child = Command::new("sh")
        .args(["-c", r#"exec 3<"$2" 9<"$2" "$0" "$1""#])
        .arg(env!("CARGO_BIN_EXE_wormhole-fs"))
        .args([root.path(), &text])
        .stdin(Stdio::from(theirs))
        .spawn();
    let mut child = child.expect("it starts");
    driver(&ours).metadata(ROOT).expect("an answer");
    let folder = format!("/proc/{}/fd", child.id());
    let open = fs::read_dir(folder).expect("a process");
    let open = open.map(|file| fs::read_link(file.expect("an entry").path()).expect("a link"));
    let open: Vec<_> = open.collect();
    assert!(open.iter().any(|path| path == root.path()), "{open:?}");
    assert!(!open.contains(&text), "{open:?}");
    drop(ours);
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn mistakes_are_named() {
    let refused = |output: Output, words: &str| {
        let said = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(
            said.starts_with("wormhole-fs: ") && said.contains(words),
            "{said}"
        );
    };
    let no_socket = program().arg("/").stdin(Stdio::null()).output();
    refused(no_socket.expect("it runs"), "no socket of packets");
    let (_ours, theirs) = sockets();
    let no_folder = program()
        .arg("/no/folder")
        .stdin(Stdio::from(theirs))
        .output();
    refused(no_folder.expect("it runs"), "cannot open /no/folder");
    refused(program().output().expect("it runs"), "FOLDER");
}
