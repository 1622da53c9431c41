//! Leaves the namespaces of the system.

use std::io;

use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Moves this thread, and those that it starts from now on, to network, IPC and UTS namespaces of their own. They have no
/// network but a loopback interface that is down, and see no other abstract UNIX sockets. Descriptors that are open stay
/// usable: a socket, and a tap interface, belongs to the namespace in which it was made.
///
/// Other threads of the process stay where they are.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN, ENOSPC beyond the limits of `/proc/sys/user`.
pub fn leave_namespaces() -> io::Result<()> {
    let namespaces = UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    // SAFETY: without FILES the thread shares its descriptors with the others as before.
    Ok(unsafe { unshare_unsafe(namespaces) }?)
}

#[cfg(test)]
mod tests {
    use std::fs::read_link;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::path::PathBuf;
    use std::thread;

    use super::*;

    fn namespaces() -> [PathBuf; 3] {
        ["net", "ipc", "uts"].map(|name| {
            let link = read_link(format!("/proc/thread-self/ns/{name}"));
            link.expect("proc is mounted")
        })
    }

    #[test]
    fn a_thread_that_leaves_keeps_its_sockets_and_gets_no_more_of_the_network() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let before = namespaces();
        let leaving = thread::spawn(move || {
            let mut host = TcpStream::connect(address).expect("it listens");
            let left = leave_namespaces();
            let started = thread::spawn(move || {
                let again = TcpStream::connect(address).map(drop);
                (namespaces(), again)
            });
            host.write_all(b"x").expect("it is open");
            (left, namespaces(), started.join().expect("no panic"))
        });
        let (mut host, _) = listener.accept().expect("a connection");
        let mut byte = [0];
        host.read_exact(&mut byte).expect("it is open");
        let (left, own, (of_started, again)) = leaving.join().expect("no panic");
        assert_eq!((namespaces(), byte), (before.clone(), *b"x"));
        assert_eq!(own, of_started);
        if let Err(error) = left {
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            assert_eq!(own, before);
            return eprintln!("skipped: only root leaves its namespaces");
        }
        let pairs = own.iter().zip(&before);
        assert!(pairs.clone().all(|(own, before)| own != before), "{own:?}");
        again.expect_err("the loopback interface is another one");
    }
}
