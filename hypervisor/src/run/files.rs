//! `--rootfs`: processes that show a folder of this machine to a guest.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Gid, Uid, geteuid};
use rustix::process::{Signal, set_parent_process_death_signal, setsid};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};
use wormhole_images::{SocketServer, User};
use wormhole_link::tasks;

use super::Options;
use super::volumes::Volume;
use crate::confinement;
use crate::private;
use crate::say;
use crate::signals::{PASSED, Set};

/// A folder of this machine that a guest sees.
#[derive(Clone, Debug)]
pub struct Export {
    folder: PathBuf,
    /// Whether the guest may change the folder.
    is_writable: bool,
    /// The user with whose rights it does, if the command line names one; the caller otherwise.
    writer: Option<User>,
}

impl Export {
    /// Describes the folder that is a guest's root.
    pub fn of_root(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            is_writable: false,
            writer: None,
        }
    }

    /// Describes a volume.
    pub fn of(volume: &Volume, options: &Options) -> Self {
        Self {
            folder: volume.source.clone(),
            is_writable: volume.is_writable,
            // An image names users of its own, not of this machine.
            writer: options.user.clone().filter(|_| volume.is_writable),
        }
    }

    /// Returns the user of a server that is another than the caller's.
    pub fn writer(&self) -> Option<&User> {
        self.writer.as_ref()
    }

    /// Starts a server with this standard input.
    fn serve(&self, mut command: Command, input: OwnedFd) -> io::Result<Child> {
        if self.is_writable {
            command.arg("--writable");
        }
        command.arg(&self.folder).stdin(Stdio::from(input));
        // Others than root are themselves.
        let other = self
            .writer()
            .filter(|user| geteuid().is_root() && user.uid != 0);
        spawn(&mut command, other.map(identity))
    }
}

/// Another user: its number, its group and its supplementary groups.
type Identity = (Uid, Gid, Vec<Gid>);

fn identity(user: &User) -> Identity {
    let groups = user.groups.iter().copied().map(Gid::from_raw);
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    (uid, gid, groups.collect())
}

/// Starts a server of a folder, and returns its socket.
pub fn start(program: &Path, export: &Export) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
    export.serve(Command::new(program), theirs)?;
    Ok(ours)
}

/// Servers of the emulated host, which each end with a machine.
#[derive(Debug)]
pub struct HostFiles {
    program: PathBuf,
    export: Export,
}

impl HostFiles {
    /// Prepares servers of a folder.
    pub fn new(program: PathBuf, export: Export) -> Self {
        Self { program, export }
    }
}

impl SocketServer for HostFiles {
    fn start(&self) -> io::Result<OwnedFd> {
        // No one else can connect: the name lies in a folder of this user's, and not for long.
        let place = private::folder("wormhole-files-")?;
        let name = place.path().join("files");
        let listener = UnixListener::bind(&name)?;
        let socket = UnixStream::connect(&name)?;
        place.close()?;
        let mut command = Command::new(&self.program);
        command.arg("--vhost-user");
        self.export.serve(command, listener.into())?;
        Ok(socket.into())
    }
}

/// Starts a server in a session of its own, since signals of the terminal are for the program. A server of another user has no
/// descriptor of the terminal either: that user could take it, read what the caller types, and type commands. Its messages
/// come by a pipe.
///
/// A server ends when the monitor, ours or QEMU, closes its socket. One that sleeps in a file, as of a server on the
/// network that does not answer, cannot. So no launcher waits for its server: the kernel kills that once this thread
/// has ended, whatever it does.
pub fn spawn(command: &mut Command, other: Option<Identity>) -> io::Result<Child> {
    Set::of(&PASSED).unblock_in(command);
    let is_of_other = other.is_some();
    if is_of_other {
        command.stderr(Stdio::piped());
    }
    // SAFETY: between fork and exec this makes system calls and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            setsid()?;
            if let Some((uid, gid, groups)) = &other {
                set_thread_groups(groups)?;
                set_thread_gid(*gid)?;
                set_thread_uid(*uid)?;
            }
            // The kernel forgets the signal when the user changes.
            Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
        });
    }
    let mut server = command
        .stdout(Stdio::null())
        .spawn()
        .map_err(tasks::named)?;
    if is_of_other && let Some(mut said) = server.stderr.take() {
        confinement::spawn("files", move || _ = io::copy(&mut said, &mut say::Foreign))?;
    }
    Ok(server)
}

/// Returns the path in a guest of the program `name`, which may be a name in one of the `folders` of the file system
/// below `root`. Links are the guest's to follow.
pub fn find_below(root: &Path, name: &Path, folders: &[PathBuf]) -> Option<PathBuf> {
    let below = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    let is_there = |path: &PathBuf| below(path).symlink_metadata().is_ok();
    if name.as_os_str().as_encoded_bytes().contains(&b'/') {
        return Some(Path::new("/").join(name));
    }
    folders
        .iter()
        .map(|folder| folder.join(name))
        .find(is_there)
}

/// Folders that a guest has of its own, whatever `root` has there.
const OWN: [&str; 4] = ["proc", "sys", "dev", "run"];

/// Returns whether a guest with the file system below `root` lacks a folder for certain. Links are the guest's to
/// follow.
pub fn lacks_folder(root: &Path, folder: &Path) -> bool {
    let mut path = root.to_owned();
    for part in folder.components() {
        match part {
            Component::RootDir | Component::CurDir => continue,
            Component::Normal(name) => path.push(name),
            _ => return false,
        }
        if OWN.iter().any(|own| path == root.join(own)) {
            return false;
        }
        match path.symlink_metadata() {
            Ok(data) if data.is_symlink() => return false,
            Ok(data) if data.is_dir() => {}
            Ok(_) => return true,
            Err(error) => return error.kind() == io::ErrorKind::NotFound,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_server_that_does_not_end_is_killed_with_its_launcher() {
        let launcher = std::thread::spawn(|| {
            let mut command = Command::new("sleep");
            spawn(command.arg("20"), None).expect("it starts")
        });
        let mut server = launcher.join().expect("a server");
        let status = server.wait().expect("it ends");
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
    }

    #[test]
    fn a_server_of_another_user_has_nothing_of_the_terminal() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root starts servers of other users");
            return;
        }
        let nobody = (Uid::from_raw(65534), Gid::from_raw(65534), Vec::new());
        let mut command = Command::new("sleep");
        let mut server = spawn(command.arg("20"), Some(nobody)).expect("it starts");
        let of_server = |name: &str| PathBuf::from(format!("/proc/{}/{name}", server.id()));
        let stat = std::fs::read_to_string(of_server("stat")).expect("it runs");
        let (_, fields) = stat.rsplit_once(')').expect("a name");
        let session = fields.split_whitespace().nth(3).expect("its session");
        assert_eq!(session, server.id().to_string());
        let messages = std::fs::read_link(of_server("fd/2")).expect("standard error");
        let messages = messages.display().to_string();
        assert!(messages.starts_with("pipe:"), "{messages}");
        server.kill().expect("it can be killed");
        server.wait().expect("it ends");
    }

    #[test]
    fn a_folder_that_a_guest_lacks_is_distinguished_from_one_that_it_may_have() {
        let root = tempfile::tempdir().expect("a folder");
        let below = |name: &str| root.path().join(name);
        std::fs::create_dir(below("work")).expect("a folder");
        std::fs::write(below("file"), "").expect("room");
        symlink("/no/such/folder", below("link")).expect("a link");
        let lacks = |folder: &str| lacks_folder(root.path(), folder.as_ref());
        for there in [
            "/",
            "/work",
            "/./work/",
            "/link",
            "/link/any",
            "/work/../any",
            "/run/any",
        ] {
            assert!(!lacks(there), "{there}");
        }
        for missing in ["/none", "/work/none", "/file"] {
            assert!(lacks(missing), "{missing}");
        }
    }

    #[test]
    fn programs_are_found_in_the_guests_file_system() {
        let root = tempfile::tempdir().expect("a folder");
        std::fs::create_dir_all(root.path().join("opt/bin")).expect("a folder");
        // A link that leads nowhere on this machine.
        symlink("/opt/no/such/program", root.path().join("opt/bin/tool")).expect("a link");
        let folders = ["/usr/bin", "/opt/bin"].map(PathBuf::from);
        let find = |name: &str| find_below(root.path(), name.as_ref(), &folders);
        assert_eq!(find("tool"), Some("/opt/bin/tool".into()));
        assert_eq!(find("sh"), None);
        assert_eq!(find("./tool"), Some("/./tool".into()));
        assert_eq!(find("/bin/any"), Some("/bin/any".into()));
    }
}
