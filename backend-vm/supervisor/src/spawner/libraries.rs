//! Folders of LD_LIBRARY_PATH that workers get: those whose libraries only root or the supervisor's user can change, since a
//! worker executes them.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use wormhole_link::users;

use crate::access_list;

/// Bits of a mode that let the group, and all others, write.
const GROUP: u32 = 0o020;
const OTHERS: u32 = 0o002;
/// Bit of a folder in which users cannot rename or remove each other's entries.
const STICKY: u32 = 0o1000;

/// Folder in which the loader looks for libraries of the processor's kind, each in a folder of its own (ld.so(8)).
const OF_PROCESSORS: &str = "glibc-hwcaps";
/// Folders in which loaders before glibc 2.37 look as well, also in one below the other (`ld.so --help`).
const OF_OLD_LOADERS: [&str; 5] = ["tls", "haswell", "avx512_1", "xeon_phi", "x86_64"];
/// Most of them on one way.
const DEPTH: usize = OF_OLD_LOADERS.len();

/// Most links on a way, as the kernel has it (path_resolution(7)).
const LINKS: usize = 40;

/// Reason why a folder is left out.
#[derive(Debug, thiserror::Error)]
pub enum LeftOut {
    #[error("it is no absolute path")]
    Relative,
    #[error("it cannot be opened")]
    Missing(#[source] io::Error),
    #[error("it cannot be read")]
    Unreadable(#[source] io::Error),
    #[error("it is no folder")]
    NoFolder,
    #[error("{0} belongs to user {1}, who is neither root nor this user")]
    Foreign(PathBuf, u32),
    #[error("other users can write {0}: take that right from its group and from others")]
    Writable(PathBuf),
    #[error(
        "an access control list lets other users or groups write {0}: `setfacl --remove-all` removes the list"
    )]
    Listed(PathBuf),
    #[error("the access control list of {0} cannot be read")]
    List(PathBuf, #[source] io::Error),
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
    let folder = follow(folder)?;
    if !folder.is_dir() {
        return Err(LeftOut::NoFolder);
    }
    check_libraries(&folder, DEPTH)?;
    Ok(folder)
}

/// Follows an absolute path from the root folder on, and returns it without links. Checks each folder, link and file on the
/// way: a user who can change one of them chooses the end.
fn follow(path: &Path) -> Result<PathBuf, LeftOut> {
    let (mut at, mut links) = (PathBuf::new(), 0);
    let mut rest: Vec<OsString> = parts(path).collect();
    while let Some(part) = rest.pop() {
        if part == ".." {
            at.pop();
            continue;
        }
        let next = at.join(part);
        let data = next.symlink_metadata().map_err(LeftOut::Missing)?;
        if !data.is_symlink() {
            // In a sticky folder above, the next one on the way stays where it is.
            check(&next, &data, !rest.is_empty() && data.mode() & STICKY != 0)?;
            at = next;
            continue;
        }
        links += 1;
        if links > LINKS {
            return Err(LeftOut::Missing(io::Error::from_raw_os_error(libc::ELOOP)));
        }
        if !users::is_believed(data.uid()) {
            return Err(LeftOut::Foreign(next, data.uid()));
        }
        rest.extend(parts(&fs::read_link(&next).map_err(LeftOut::Missing)?));
    }
    Ok(at)
}

/// Returns the parts of a path, the last one first. A root folder is one, which replaces what a path joins before it.
fn parts(path: &Path) -> impl Iterator<Item = OsString> {
    path.iter().rev().map(OsStr::to_owned)
}

/// Checks that only root and this user can change a file, or a folder's entries unless they are `kept`.
fn check(path: &Path, data: &Metadata, kept: bool) -> Result<(), LeftOut> {
    if !users::is_believed(data.uid()) {
        return Err(LeftOut::Foreign(path.to_owned(), data.uid()));
    }
    // A group of the owner's number is the owner's alone, as useradd(8) makes it.
    let of_others = match data.gid() == data.uid() {
        true => OTHERS,
        false => GROUP | OTHERS,
    };
    if kept {
        return Ok(());
    }
    if data.mode() & of_others != 0 {
        return Err(LeftOut::Writable(path.to_owned()));
    }
    // The group's bits of a file with a list are the most that the list gives to anyone named in it.
    let is_listed = match data.mode() & GROUP != 0 {
        true => access_list::names_a_writer(path),
        false => Ok(false),
    };
    match is_listed {
        Ok(false) => Ok(()),
        Ok(true) => Err(LeftOut::Listed(path.to_owned())),
        Err(error) => Err(LeftOut::List(path.to_owned(), error.into())),
    }
}

/// Checks each library of a folder whose way is checked, and of the folders in it where the loader looks: the file may be
/// open to other users all the same. A link leads to a library that can be anywhere.
fn check_libraries(folder: &Path, depth: usize) -> Result<(), LeftOut> {
    let is_of_processors = folder.ends_with(OF_PROCESSORS);
    for path in entries(folder)? {
        let name = path.file_name().unwrap_or_default();
        let bytes = name.as_encoded_bytes();
        // An entry that is gone, or leads nowhere, is no library.
        let Ok(data) = path.metadata() else {
            continue;
        };
        if data.is_dir() {
            let is_searched = is_of_processors
                || name == OF_PROCESSORS
                || OF_OLD_LOADERS.iter().any(|of| name == *of);
            if is_searched && let Some(depth) = depth.checked_sub(1) {
                check_libraries(&follow(&path)?, depth)?;
            }
        } else if bytes.windows(3).any(|part| part == b".so") {
            follow(&path)?;
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, LeftOut> {
    let entries = fs::read_dir(folder).map_err(LeftOut::Unreadable)?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    paths.collect::<Result<_, _>>().map_err(LeftOut::Unreadable)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use rustix::process::geteuid;

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
    fn workers_get_no_folder_with_a_library_that_others_can_write() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let at = |name: &str| folder.join(name);
        let own = at("own/glibc-hwcaps/x86-64-v3");
        for name in [
            "own",
            "own/glibc-hwcaps",
            "own/glibc-hwcaps/x86-64-v3",
            "open",
        ] {
            fs::create_dir(at(name)).unwrap();
            fs::set_permissions(at(name), Permissions::from_mode(0o755)).unwrap();
        }
        let write = |path: &Path, mode| {
            fs::write(path, "").unwrap();
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        write(&at("own/libgood.so"), 0o755);
        write(&at("own/notes"), 0o666);
        symlink("missing.so", at("own/libnone.so")).unwrap();
        assert!(checked(&at("own")).is_ok());
        for path in [at("own/libbad.so.1"), own.join("libgood.so")] {
            write(&path, 0o666);
            let left_out = checked(&at("own"));
            assert!(matches!(&left_out, Err(LeftOut::Writable(bad)) if *bad == path));
            fs::remove_file(&path).unwrap();
        }
        // The target of a link has folders of its own.
        write(&at("open/lib.so"), 0o644);
        symlink(at("open/lib.so"), at("own/lib.so")).unwrap();
        assert!(checked(&at("own")).is_ok());
        fs::set_permissions(at("open"), Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(checked(&at("own")), Err(LeftOut::Writable(bad)) if bad == at("open")));
        fs::remove_file(at("own/lib.so")).unwrap();
        // A link on the way to another one, in a folder that others can write.
        symlink(at("own/libgood.so"), at("open/libmiddle.so")).unwrap();
        symlink(at("open/libmiddle.so"), at("own/lib.so")).unwrap();
        assert!(matches!(checked(&at("own")), Err(LeftOut::Writable(bad)) if bad == at("open")));
        fs::remove_file(at("own/lib.so")).unwrap();
        // Folders where a library would be found that is not there yet.
        for name in ["own/glibc-hwcaps", "own/tls", "own/tls/x86_64"] {
            fs::create_dir_all(at(name)).unwrap();
            fs::set_permissions(at(name), Permissions::from_mode(0o777)).unwrap();
            let left_out = checked(&at("own"));
            assert!(matches!(&left_out, Err(LeftOut::Writable(bad)) if *bad == at(name)));
            fs::set_permissions(at(name), Permissions::from_mode(0o755)).unwrap();
        }
        symlink(".", at("own/tls/tls")).unwrap();
        symlink("libloop.so", at("own/libloop.so")).unwrap();
        assert!(checked(&at("own")).is_ok(), "it ends");
        if geteuid().is_root() {
            chown(at("own/libgood.so"), Some(1000), None).unwrap();
            assert!(matches!(
                checked(&at("own")),
                Err(LeftOut::Foreign(_, 1000))
            ));
        }
    }

    #[test]
    fn workers_get_no_folder_that_a_list_lets_others_write() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let data = folder.metadata().unwrap();
        if data.gid() != data.uid() {
            eprintln!("skipped: the folder's group is not its owner's alone");
            return;
        }
        let library = folder.join("lib.so");
        fs::write(&library, "").unwrap();
        for path in [&folder, &library] {
            if access_list::open_to(path, &[65534]) == Err(rustix::io::Errno::OPNOTSUPP) {
                eprintln!("skipped: the folder's file system has no access control lists");
                return;
            }
            // Gives the owner the folder again, and the mask what it has.
            fs::set_permissions(path, Permissions::from_mode(0o770)).unwrap();
            assert!(matches!(checked(&folder), Err(LeftOut::Listed(bad)) if bad == *path));
            fs::set_permissions(path, Permissions::from_mode(0o750)).unwrap();
            assert!(checked(&folder).is_ok(), "the mask lets nobody write");
        }
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
