//! The process, with its filter: what it serves, what it holds, how it ends.

use std::fs;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Output, Stdio};

use crate::driver::Driver;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use wormhole_fs::abi::{ROOT, opcode};

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
    for bytes in [vec![1; 3], vec![0x55; 100 << 10]] {
        send(&ours, &bytes, SendFlags::NOSIGNAL).expect("sent");
    }
    let mut refused = [0; 64];
    let (len, _) = recv(&ours, &mut refused, RecvFlags::empty()).expect("received");
    assert_eq!(len, 16);
    driver(&ours).look_up(ROOT, "large").expect("it is there");
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
