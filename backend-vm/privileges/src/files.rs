//! Drops access to the file system with Landlock (landlock(7)).

use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError,
};

/// Error of [`leave_file_system`], [`only_read_below`] and [`only_change_below`].
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

/// Reading files and listing folders.
fn reads() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

/// Denies this thread and the threads that it starts all files but reading files and listing folders below a folder.
///
/// # Errors
/// As [`leave_file_system`].
pub fn only_read_below(folder: BorrowedFd<'_>) -> Result<(), FilesError> {
    restrict(Some((folder, reads())))
}

/// Denies this thread and the threads that it starts all files but reading and changing files and folders below a
/// folder. Devices, sockets and pipes cannot be made there, and programs cannot be executed.
///
/// # Errors
/// As [`leave_file_system`].
pub fn only_change_below(folder: BorrowedFd<'_>) -> Result<(), FilesError> {
    let changes = AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::MakeSym
        | AccessFs::Refer;
    restrict(Some((folder, reads() | changes)))
}

fn restrict(allowed: Option<(BorrowedFd<'_>, BitFlags<AccessFs>)>) -> Result<(), FilesError> {
    // Without rules all handled accesses are denied. Accesses that the kernel cannot handle stay allowed.
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .handle_access(AccessNet::from_all(ABI::V5))?
        .create()?
        .add_rules(
            allowed.map(|(folder, accesses)| {
                Ok::<_, RulesetError>(PathBeneath::new(folder, accesses))
            }),
        )?
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

    #[test]
    fn a_thread_that_changes_a_folder_changes_nothing_else_and_makes_files_and_folders_alone() {
        if !kernel_has_landlock() {
            println!("skipped: the kernel has no Landlock");
            return;
        }
        let [inside, outside] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let at = |name: &str| inside.path().join(name);
        let other = outside.path().join("text");
        for path in [&at("text"), &at("old"), &other] {
            fs::write(path, "there").unwrap();
        }
        fs::copy("/bin/true", at("true")).unwrap();
        std::thread::scope(|scope| {
            let confined = scope.spawn(|| {
                let folder = fs::File::open(inside.path()).unwrap();
                only_change_below(folder.as_fd()).unwrap();
                fs::write(at("text"), "changed").unwrap();
                fs::write(at("new"), "new").unwrap();
                fs::create_dir(at("folder")).unwrap();
                std::os::unix::fs::symlink(&other, at("link")).unwrap();
                fs::rename(at("new"), at("folder/new")).unwrap();
                fs::hard_link(at("text"), at("folder/text")).unwrap();
                fs::remove_file(at("old")).unwrap();
                let refused = [
                    fs::read(&other).map(drop),
                    fs::write(&other, "changed"),
                    fs::write(at("link"), "changed"),
                    fs::write(outside.path().join("new"), ""),
                    fs::create_dir(outside.path().join("folder")),
                    fs::remove_file(&other),
                    fs::rename(at("text"), outside.path().join("moved")),
                    fs::rename(&other, at("moved")),
                    fs::hard_link(&other, at("moved")),
                    std::os::unix::net::UnixListener::bind(at("socket")).map(drop),
                    std::process::Command::new(at("true")).status().map(drop),
                ];
                for (number, outcome) in refused.iter().enumerate() {
                    let error = outcome.as_ref().expect_err(&number.to_string());
                    // Of a move to where more or less is allowed Landlock says EXDEV.
                    let is_denied =
                        matches!(error.raw_os_error(), Some(libc::EACCES | libc::EXDEV));
                    assert!(is_denied, "{number}: {error}");
                }
            });
            confined.join().unwrap();
        });
        assert_eq!(fs::read(at("text")).unwrap(), b"changed");
        assert_eq!(fs::read(at("folder/new")).unwrap(), b"new");
        assert_eq!(fs::read(&other).unwrap(), b"there");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
    }
}
