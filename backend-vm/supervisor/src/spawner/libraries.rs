//! Folders of LD_LIBRARY_PATH that workers get: those whose libraries only root or the supervisor's user can change, since a
//! worker executes them.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

/// Bits of a mode that let the group, and all others, write.
const GROUP: u32 = 0o020;
const OTHERS: u32 = 0o002;
/// Bit of a folder in which users cannot rename or remove each other's entries.
const STICKY: u32 = 0o1000;

/// Reason why a folder is left out.
#[derive(Debug, thiserror::Error)]
pub enum LeftOut {
    #[error("it is no absolute path")]
    Relative,
    #[error("it cannot be opened")]
    Missing(#[source] std::io::Error),
    #[error("it is no folder")]
    NoFolder,
    #[error("{0} belongs to user {1}, who is neither root nor this user")]
    Foreign(PathBuf, u32),
    #[error("other users can write {0}: take that right from its group and from others")]
    Writable(PathBuf),
}

/// Returns the folders of a search path that are safe, without links on their ways. Warns of each other one.
pub fn folders(search: &OsStr) -> Vec<PathBuf> {
    let mut safe = Vec::new();
    for folder in std::env::split_paths(search) {
        match checked(&folder) {
            Ok(folder) => safe.push(folder),
            // An empty entry is the working folder to the loader, and no folder to whoever wrote it.
            Err(LeftOut::Relative) if folder.as_os_str().is_empty() => {}
            Err(error) => tracing::warn!(
                "workers do not get the folder {} of LD_LIBRARY_PATH: {}",
                folder.display(),
                wormhole_link::chain(&error)
            ),
        }
    }
    safe
}

/// Returns a search path of these folders; `None` if there is none.
pub fn search_path(folders: &[PathBuf]) -> Option<OsString> {
    // The folders are parts of a search path, so that they contain no separator.
    std::env::join_paths(folders)
        .ok()
        .filter(|path| !path.is_empty())
}

fn checked(folder: &Path) -> Result<PathBuf, LeftOut> {
    if !folder.is_absolute() {
        return Err(LeftOut::Relative);
    }
    let folder = folder.canonicalize().map_err(LeftOut::Missing)?;
    if !folder.is_dir() {
        return Err(LeftOut::NoFolder);
    }
    for (depth, above) in folder.ancestors().enumerate() {
        let data = above.symlink_metadata().map_err(LeftOut::Missing)?;
        if data.uid() != 0 && data.uid() != geteuid().as_raw() {
            return Err(LeftOut::Foreign(above.to_owned(), data.uid()));
        }
        // In a sticky folder above, the next one on the way stays where it is.
        let is_kept = depth > 0 && data.mode() & STICKY != 0;
        // A group of the owner's number is the owner's alone, as useradd(8) makes it.
        let of_others = if data.gid() == data.uid() {
            OTHERS
        } else {
            GROUP | OTHERS
        };
        if data.mode() & of_others != 0 && !is_kept {
            return Err(LeftOut::Writable(above.to_owned()));
        }
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    #[test]
    fn workers_get_folders_that_no_other_user_can_write() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let at = |name: &str| folder.join(name);
        for name in ["good", "above", "above/below", "shared"] {
            fs::create_dir(at(name)).unwrap();
            fs::set_permissions(at(name), Permissions::from_mode(0o755)).unwrap();
        }
        for (name, mode) in [("above", 0o757), ("shared", 0o1777)] {
            fs::set_permissions(at(name), Permissions::from_mode(mode)).unwrap();
        }
        fs::create_dir(at("shared/own")).unwrap();
        fs::set_permissions(at("shared/own"), Permissions::from_mode(0o755)).unwrap();
        fs::write(at("file"), "").unwrap();
        symlink(at("good"), at("link")).unwrap();
        symlink(at("above/below"), at("bad_link")).unwrap();
        let names = [
            "good",
            "link",
            "shared/own",
            "above",
            "above/below",
            "bad_link",
            "shared",
            "file",
            "missing",
        ];
        let paths = names.map(at).into_iter();
        let relative = ["".into(), ".".into(), "good".into()];
        let search = std::env::join_paths(paths.chain(relative)).unwrap();
        let safe = folders(&search);
        assert_eq!(safe, [at("good"), at("good"), at("shared/own")]);
        assert_eq!(folders(&search_path(&safe).unwrap()), safe);
        assert_eq!(search_path(&[]), None);
    }

    #[test]
    fn workers_get_no_folder_of_another_user() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root gives folders to another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o775)).unwrap();
        assert!(checked(&path).is_ok(), "the group is root's");
        chown(&path, None, Some(65534)).unwrap();
        assert!(matches!(checked(&path), Err(LeftOut::Writable(_))));
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        assert!(checked(&path).is_ok());
        chown(&path, Some(65534), None).unwrap();
        assert!(matches!(checked(&path), Err(LeftOut::Foreign(_, 65534))));
    }
}
