//! Users of the host whose files and connections a process believes.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::process::geteuid;

/// Number that the kernel shows for each user without a number in this user namespace (user_namespaces(7)), unless an
/// administrator has changed it. On Debian it is also that of `nobody`.
const OVERFLOW: u32 = 65534;

/// Table of the users of this user namespace.
const MAP: &str = "/proc/self/uid_map";

/// The user of this thread, who believes root and itself.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    user: u32,
    /// Whether no other user has its number.
    is_one: bool,
}

impl Own {
    /// Returns the user, with a system call and, for [`OVERFLOW`], a file that a confined process cannot make or open.
    pub fn get() -> Self {
        let user = geteuid().as_raw();
        Self {
            user,
            // Without /proc nothing shows that the number is one user's.
            is_one: user != OVERFLOW
                || std::fs::read_to_string(MAP).is_ok_and(|map| maps_all(&map)),
        }
    }

    /// Returns whether the user believes another one. [`OVERFLOW`] believes root alone where several users have that number.
    pub fn believes(self, user: u32) -> bool {
        user == 0 || user == self.user && self.is_one
    }
}

/// Returns whether this user believes another one: root, and itself.
pub fn is_believed(user: u32) -> bool {
    Own::get().believes(user)
}

/// Process at the other end of a socket, as it was when it connected or listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub user: u32,
    /// 0 if the process has no number in this PID namespace.
    pub process: i32,
}

/// Returns the process at the other end of a stream.
///
/// # Errors
/// Same as `getsockopt`.
pub fn peer_of(stream: &impl AsFd) -> io::Result<Peer> {
    // By no function of rustix, whose structure has no value for the number 0 of a process outside this PID namespace.
    let mut peer = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut length = libc::socklen_t::try_from(size_of_val(&peer)).unwrap_or(0);
    // SAFETY: an open descriptor, and a local structure of the length given.
    let known = unsafe {
        libc::getsockopt(
            stream.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    match known {
        0 => Ok(Peer {
            user: peer.uid,
            process: peer.pid,
        }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns whether a table has all numbers but the last, which is none.
fn maps_all(map: &str) -> bool {
    let mapped = map.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        numbers.nth(2)?.ok()
    });
    mapped.sum::<u64>() >= u32::MAX.into()
}

#[cfg(test)]
mod tests {
    use rustix::process::Uid;

    use super::*;

    #[test]
    fn the_number_of_all_unmapped_users_is_one_user_where_all_are_mapped() {
        assert!(maps_all("         0          0 4294967295\n"));
        assert!(maps_all("0 0 1000\n1000 100000 4294966295\n"));
        assert!(!maps_all("         0       1000          1\n"));
        assert!(!maps_all("0 1000 1\n1 100000 65536\n"));
        assert!(!maps_all(""));
        let several = Own {
            user: OVERFLOW,
            is_one: false,
        };
        assert_eq!(
            [0, 1, OVERFLOW].map(|user| several.believes(user)),
            [true, false, false]
        );
    }

    #[test]
    fn a_user_believes_root_and_itself() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root can become another user");
            return;
        }
        for own in [0, 1000] {
            let believed = std::thread::spawn(move || {
                rustix::thread::set_thread_uid(Uid::from_raw(own)).unwrap();
                [0, 1000, OVERFLOW].map(is_believed)
            });
            assert_eq!(
                believed.join().unwrap(),
                [true, own == 1000, false],
                "{own}"
            );
        }
    }
}
