//! Opens paths of an image.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

/// Most attempts to open a path.
const ATTEMPTS: usize = 10_000;

/// Opens a path with a folder as its root, so that no link and no `..` leads out of it (openat2(2), RESOLVE_IN_ROOT).
///
/// The kernel refuses to resolve `..` while anything on the system is renamed or mounted, and asks for another attempt.
pub fn open_in(root: impl AsFd, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let open = || openat2(&root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT);
    (1..ATTEMPTS)
        .map(|_| open())
        .find(|opened| !matches!(opened, Err(Errno::AGAIN)))
        .unwrap_or_else(open)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{CWD, openat};

    use super::*;

    #[test]
    fn renames_elsewhere_do_not_fail_a_path_with_links() {
        let folder = tempfile::tempdir().expect("a folder");
        let elsewhere = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(folder.path().join("var")).expect("a folder");
        fs::create_dir(folder.path().join("run")).expect("a folder");
        symlink("../run", folder.path().join("var/run")).expect("a link");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, folder.path(), flags, Mode::empty()).expect("a folder");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (old, new) = (elsewhere.path().join("old"), elsewhere.path().join("new"));
                fs::write(&old, "").expect("a file");
                while !done.load(Ordering::Relaxed) {
                    fs::rename(&old, &new).expect("it is there");
                    fs::rename(&new, &old).expect("it is there");
                }
            });
            let opened = (0..20_000).all(|_| open_in(&root, Path::new("var/run"), flags).is_ok());
            done.store(true, Ordering::Relaxed);
            assert!(opened);
        });
    }
}
