//! Drops access to the file system with Landlock (landlock(7)).

use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError,
};

/// Error of [`leave_file_system`] and of [`only_read_below`].
#[derive(Debug, thiserror::Error)]
#[error("the kernel does not take the rules of the file system")]
pub struct FilesError(#[from] RulesetError);

/// Denies this thread, and those that it starts, access to all files that are not open yet and to all TCP ports. Has no
/// effect on a kernel without Landlock: it is a second barrier behind a [`crate::Filter`] that allows no call with a
/// path.
///
/// # Errors
/// The kernel has Landlock but refuses the rules.
pub fn leave_file_system() -> Result<(), FilesError> {
    restrict(None)
}

/// Denies this thread, and those that it starts, the same, but for reading the files and listing the folders below a
/// folder.
///
/// # Errors
/// As [`leave_file_system`].
pub fn only_read_below(folder: BorrowedFd<'_>) -> Result<(), FilesError> {
    restrict(Some(folder))
}

fn restrict(readable: Option<BorrowedFd<'_>>) -> Result<(), FilesError> {
    let reads = AccessFs::ReadFile | AccessFs::ReadDir;
    // Without rules all handled accesses are denied. Accesses that the kernel cannot handle stay allowed.
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .handle_access(AccessNet::from_all(ABI::V5))?
        .create()?
        .add_rules(readable.map(|folder| Ok::<_, RulesetError>(PathBeneath::new(folder, reads))))?
        .restrict_self()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsFd;

    /// Returns true if the kernel has Landlock, by landlock_create_ruleset(2) for its version.
    fn kernel_has_landlock() -> bool {
        const VERSION: libc::c_long = 1;
        // SAFETY: no structure, and a flag.
        let version = unsafe {
            libc::syscall(
                libc::SYS_landlock_create_ruleset,
                std::ptr::null::<u8>(),
                0,
                VERSION,
            )
        };
        version > 0
    }

    #[test]
    fn a_thread_that_left_opens_nothing_and_keeps_what_it_has() {
        if !kernel_has_landlock() {
            println!("skipped: the kernel has no Landlock");
            return;
        }
        let text = tempfile::NamedTempFile::new().unwrap();
        fs::write(&text, "kept").unwrap();
        let open = fs::File::open(&text).unwrap();
        let path = text.path().to_owned();
        let left = std::thread::spawn(move || {
            leave_file_system().unwrap();
            let refused = |error: std::io::Error| error.kind();
            (
                std::io::read_to_string(open).unwrap(),
                fs::read(&path).map_err(refused),
                fs::write(path.with_extension("new"), "").map_err(refused),
                fs::remove_file(&path).map_err(refused),
            )
        });
        let denied = std::io::ErrorKind::PermissionDenied;
        assert_eq!(
            left.join().unwrap(),
            ("kept".to_owned(), Err(denied), Err(denied), Err(denied))
        );
        // Other threads are not restricted.
        assert_eq!(fs::read_to_string(&text).unwrap(), "kept");
    }

    #[test]
    fn a_thread_that_only_reads_a_folder_writes_nothing_and_reads_nothing_else() {
        if !kernel_has_landlock() {
            println!("skipped: the kernel has no Landlock");
            return;
        }
        let [inside, outside] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let text = inside.path().join("text");
        let other = outside.path().join("text");
        for path in [&text, &other] {
            fs::write(path, "there").unwrap();
        }
        let confined = std::thread::spawn(move || {
            let folder = fs::File::open(inside.path()).unwrap();
            only_read_below(folder.as_fd()).unwrap();
            let refused = |error: std::io::Error| error.kind();
            let outcome = (
                fs::read_to_string(&text).map_err(refused),
                fs::read_to_string(&other).map_err(refused),
                fs::write(&text, "changed").map_err(refused),
                fs::File::create(inside.path().join("new")).map_err(refused),
            );
            (outcome.0, outcome.1, outcome.2, outcome.3.map(drop))
        });
        let denied = std::io::ErrorKind::PermissionDenied;
        assert_eq!(
            confined.join().unwrap(),
            (
                Ok("there".to_owned()),
                Err(denied),
                Err(denied),
                Err(denied)
            )
        );
    }
}
