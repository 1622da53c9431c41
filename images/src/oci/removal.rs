//! Removes an unpacked image, however deep its folders lie in each other.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, renameat, rmdir, unlinkat};
use rustix::io::Errno;

const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Removes a folder with everything in it. Folders below others are moved up first, so the depth takes neither memory nor
/// descriptors. By links an image nests folders deeper than any of its paths.
///
/// # Errors
/// Something cannot be removed, or appears meanwhile: then the kind is [`io::ErrorKind::DirectoryNotEmpty`].
pub fn remove_unpacked(folder: &Path) -> io::Result<()> {
    let root = openat(CWD, folder, FOLDER, Mode::empty())?;
    let mut moved = 0;
    loop {
        let mut is_empty = true;
        for entry in Dir::read_from(&root)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            is_empty = false;
            match unlinkat(&root, name, AtFlags::empty()) {
                Err(Errno::ISDIR) => {
                    let inner = openat(&root, name, FOLDER, Mode::empty())?;
                    lift(&inner, &root, &mut moved)?;
                    match unlinkat(&root, name, AtFlags::REMOVEDIR) {
                        // The next turn removes it.
                        Err(Errno::NOTEMPTY | Errno::NOENT) => {}
                        removed => removed?,
                    }
                }
                Err(Errno::NOENT) => {}
                removed => removed?,
            }
        }
        if is_empty {
            return Ok(rmdir(folder)?);
        }
    }
}

/// Removes the files of a folder, and moves its folders to `root` under numbers that count up.
fn lift(folder: &OwnedFd, root: &OwnedFd, moved: &mut u64) -> Result<(), Errno> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        match unlinkat(folder, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => loop {
                *moved += 1;
                match renameat(folder, name, root, moved.to_string()) {
                    Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                    Err(Errno::NOENT) => break,
                    renamed => {
                        renamed?;
                        break;
                    }
                }
            },
            Err(Errno::NOENT) => {}
            removed => removed?,
        }
    }
    Ok(())
}
