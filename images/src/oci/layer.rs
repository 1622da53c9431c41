//! Unpacks layers of an image, one over the other (layer.md of the OCI's image specification, 1.1).
//!
//! The kernel resolves each path with the folder as its root, so that no link and no `..` leads out. Files belong to the caller, or if that is root to whom the image says. Devices, sockets and pipes are left out, since a guest has its own `/dev`, and so are
//! the set-user-ID and set-group-ID bits and extended attributes.

mod made;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Timespec, Timestamps, chownat, fchmod, fstat,
    fstatvfs, futimens, linkat, mkdirat, openat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use tar::{Archive, Entry, EntryType, PaxExtensions};

use self::made::{Made, Place};
use super::OciError;
use super::rooted::open_in;

/// Most files and folders of an image, in all layers.
const MOST_FILES: u64 = 4 << 20;
/// Most bytes of an image, in all layers.
const MOST_BYTES: u64 = 256 << 30;
/// Most bytes of a file's long name or extended header.
const MOST_HEADER: u64 = 1 << 20;
/// Most parts of a path, and most folders in each other that are removed at once. Each of these takes a descriptor.
const MOST_DEPTH: usize = 256;

/// Prefix of the name of a file that removes another one.
const WHITEOUT: &[u8] = b".wh.";
/// Name of a file that removes all that lower layers have in its folder.
const OPAQUE: &[u8] = b".wh..wh..opq";

const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// A folder into which layers are unpacked.
pub struct Unpacking {
    root: OwnedFd,
    /// Whether files have the owners that the image names, as only root can give them.
    has_owners: bool,
    files: u64,
    bytes: u64,
    /// Most bytes, also for the other users of the file system: half of what was free at the beginning.
    most_bytes: u64,
    /// Bytes of layers that may still be read. Skipped ones take time as well.
    unread: u64,
}

/// Names from the headers before a file.
#[derive(Default)]
struct Extended {
    path: Option<PathBuf>,
    target: Option<PathBuf>,
}

impl Unpacking {
    /// Begins with an empty folder.
    pub fn new(folder: &Path) -> Result<Self, OciError> {
        let root = openat(CWD, folder, FOLDER, Mode::empty());
        let root = root.map_err(|error| failed(folder, error))?;
        let system = fstatvfs(&root).map_err(|error| failed(folder, error))?;
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        Ok(Self {
            root,
            has_owners: geteuid().is_root(),
            files: 0,
            bytes: 0,
            most_bytes: MOST_BYTES.min(free / 2),
            unread: MOST_BYTES,
        })
    }

    /// Unpacks a layer over those before it.
    pub fn layer(&mut self, path: &Path, content: impl Read) -> Result<(), OciError> {
        let mut content = content.take(self.unread);
        let unpacked = self.entries(path, &mut content);
        self.unread = content.limit();
        match self.unread {
            0 => Err(OciError::Bytes(MOST_BYTES)),
            _ => unpacked,
        }
    }

    fn entries(&mut self, path: &Path, content: impl Read) -> Result<(), OciError> {
        let broken = |source| OciError::Layer {
            path: path.to_owned(),
            source,
        };
        let mut made = Made::default();
        let mut archive = Archive::new(content);
        let mut extended = Extended::default();
        for entry in archive.entries().map_err(broken)?.raw(true) {
            let mut entry = entry.map_err(broken)?;
            if !extended.read(&mut entry).map_err(broken)? {
                let name = extended.path.take();
                let name = name.map_or_else(|| entry.path().map(|path| path.into_owned()), Ok);
                let name = name.map_err(broken)?;
                let target = extended.target.take();
                let target = target.or_else(|| Some(entry.link_name().ok()??.into_owned()));
                self.entry(&mut entry, &name, target.as_deref(), &mut made)?;
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        entry: &mut Entry<'_, impl Read>,
        path: &Path,
        target: Option<&Path>,
        made: &mut Made,
    ) -> Result<(), OciError> {
        self.count()?;
        let wrong = |error| failed(path, error);
        let path = inside(path)?;
        let Some(name) = path.file_name() else {
            // The folder itself.
            return Ok(());
        };
        let parent = path.parent().unwrap_or(Path::new(""));
        let folder = self.folder(parent)?;
        if name.as_bytes() == OPAQUE {
            let place = made.place(parent);
            return clear(&folder, place, made, 0).map_err(wrong);
        }
        if let Some(name) = name.as_bytes().strip_prefix(WHITEOUT) {
            let name = OsStr::from_bytes(name);
            if Path::new(name).file_name() != Some(name) {
                return Err(OciError::Outside(path));
            }
            let place = made.place(parent);
            return remove_lower(&folder, name, place, made, 0).map_err(wrong);
        }
        let header = entry.header();
        let mode = header.mode().unwrap_or(0o644) & 0o1777;
        match header.entry_type() {
            EntryType::Directory => {
                make_folder(&folder, name).map_err(wrong)?;
                let made = openat(&folder, name, FOLDER, Mode::empty()).map_err(wrong)?;
                // The caller unpacks into it, and removes it.
                fchmod(made, Mode::from_raw_mode(mode | 0o700)).map_err(wrong)?;
            }
            EntryType::Regular | EntryType::Continuous => {
                let seconds = header.mtime().unwrap_or(0);
                remove(&folder, name, 0).map_err(wrong)?;
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                let file = openat(&folder, name, flags, Mode::RUSR | Mode::WUSR).map_err(wrong)?;
                let mut file = File::from(file);
                let left = self.most_bytes - self.bytes;
                let copied = io::copy(&mut entry.take(left + 1), &mut file);
                let copied = copied.map_err(|source| OciError::Entry {
                    path: path.clone(),
                    source,
                })?;
                if copied > left {
                    return Err(OciError::Bytes(self.most_bytes));
                }
                self.bytes += copied;
                // The caller can read it, as the server of the guest's files does.
                fchmod(&file, Mode::from_raw_mode(mode | 0o400)).map_err(wrong)?;
                let time = Timespec {
                    tv_sec: seconds.cast_signed(),
                    tv_nsec: 0,
                };
                let times = Timestamps {
                    last_access: time,
                    last_modification: time,
                };
                futimens(&file, &times).map_err(wrong)?;
            }
            EntryType::Symlink => {
                remove(&folder, name, 0).map_err(wrong)?;
                symlinkat(target.unwrap_or(Path::new("")), &folder, name).map_err(wrong)?;
            }
            EntryType::Link => {
                let old = inside(target.unwrap_or(Path::new("")))?;
                let old_name = old
                    .file_name()
                    .ok_or_else(|| OciError::Outside(old.clone()))?;
                let from = self.folder(old.parent().unwrap_or(Path::new("")))?;
                if old != path {
                    remove(&folder, name, 0).map_err(wrong)?;
                    linkat(&from, old_name, &folder, name, AtFlags::empty()).map_err(wrong)?;
                }
            }
            EntryType::Char | EntryType::Block | EntryType::Fifo => return Ok(()),
            _ => return Err(wrong(Errno::OPNOTSUPP)),
        }
        let header = entry.header();
        if self.has_owners
            && header.entry_type() != EntryType::Link
            && let (Ok(uid), Ok(gid)) = (header.uid(), header.gid())
            && let (Ok(uid), Ok(gid)) = (u32::try_from(uid), u32::try_from(gid))
            && uid != u32::MAX
            && gid != u32::MAX
        {
            let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            chownat(&folder, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(wrong)?;
        }
        made.add(&path)
    }

    /// Counts a file or folder.
    fn count(&mut self) -> Result<(), OciError> {
        self.files += 1;
        if self.files > MOST_FILES {
            return Err(OciError::Files(MOST_FILES));
        }
        Ok(())
    }

    /// Opens a folder of the image, and makes it where it is missing.
    fn folder(&mut self, path: &Path) -> Result<OwnedFd, OciError> {
        let wrong = |error| failed(path, error);
        match self.open(path) {
            Err(Errno::NOENT) => {}
            opened => return opened.map_err(wrong),
        }
        let mut at = PathBuf::new();
        let mut folder = self.open(&at).map_err(wrong)?;
        for name in path {
            at.push(name);
            folder = match self.open(&at) {
                Err(Errno::NOENT) => {
                    self.count()?;
                    mkdirat(&folder, name, Mode::from_raw_mode(0o755)).map_err(wrong)?;
                    self.open(&at).map_err(wrong)?
                }
                opened => opened.map_err(wrong)?,
            };
        }
        Ok(folder)
    }

    /// Opens a folder of the image.
    fn open(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let path = if path == Path::new("") {
            Path::new(".")
        } else {
            path
        };
        let flags = FOLDER.difference(OFlags::NOFOLLOW);
        open_in(&self.root, path, flags)
    }
}

impl Extended {
    /// Reads a header that describes the next file. Returns whether the entry was one.
    fn read(&mut self, entry: &mut Entry<'_, impl Read>) -> io::Result<bool> {
        let kind = entry.header().entry_type();
        let is_one = matches!(
            kind,
            EntryType::XHeader
                | EntryType::XGlobalHeader
                | EntryType::GNULongName
                | EntryType::GNULongLink
        );
        if !is_one {
            return Ok(false);
        }
        if entry.size() > MOST_HEADER {
            return Err(io::Error::other("a file's header is too long"));
        }
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        let whole = |bytes: &[u8]| {
            let end = bytes.iter().position(|&byte| byte == 0);
            let name = bytes[..end.unwrap_or(bytes.len())].to_vec();
            PathBuf::from(OsString::from_vec(name))
        };
        match kind {
            EntryType::GNULongName => self.path = Some(whole(&bytes)),
            EntryType::GNULongLink => self.target = Some(whole(&bytes)),
            EntryType::XHeader => {
                for extension in PaxExtensions::new(&bytes) {
                    let extension = extension?;
                    match extension.key_bytes() {
                        b"path" => self.path = Some(whole(extension.value_bytes())),
                        b"linkpath" => self.target = Some(whole(extension.value_bytes())),
                        b"size" => {
                            return Err(io::Error::other(
                                "a file of 8 GiB or more is not possible",
                            ));
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
        Ok(true)
    }
}

fn failed(path: &Path, error: Errno) -> OciError {
    OciError::Entry {
        path: path.to_owned(),
        source: error.into(),
    }
}

/// Returns a path without `.` and a slash at the front, and refuses one with `..` or too many parts.
fn inside(path: &Path) -> Result<PathBuf, OciError> {
    let (mut names, mut depth) = (PathBuf::new(), 0);
    for part in path.components() {
        match part {
            Component::Normal(_) if depth == MOST_DEPTH => return Err(OciError::Depth(MOST_DEPTH)),
            Component::Normal(name) => {
                depth += 1;
                names.push(name);
            }
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(OciError::Outside(path.to_owned()));
            }
        }
    }
    Ok(names)
}

/// Makes a folder, in place of a file of another kind.
fn make_folder(folder: &OwnedFd, name: &OsStr) -> Result<(), Errno> {
    let kind = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        .map(|stat| FileType::from_raw_mode(stat.st_mode));
    match kind {
        Ok(FileType::Directory) => return Ok(()),
        Ok(_) => unlinkat(folder, name, AtFlags::empty())?,
        Err(Errno::NOENT) => {}
        Err(error) => return Err(error),
    }
    mkdirat(folder, name, Mode::RWXU)
}

/// Removes the entry of a folder with this name, and everything below it. An absent entry is no error.
fn remove(folder: &OwnedFd, name: &OsStr, depth: usize) -> Result<(), Errno> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        Err(Errno::NOENT) => return Ok(()),
        removed => return removed,
    }
    let inner = openat(folder, name, FOLDER, Mode::empty())?;
    clear(&inner, None, &mut Made::default(), depth + 1)?;
    unlinkat(folder, name, AtFlags::REMOVEDIR)
}

/// Removes what lower layers have by a name in a folder at `place`, and keeps what is of this layer.
fn remove_lower(
    folder: &OwnedFd,
    name: &OsStr,
    place: Option<Place>,
    made: &mut Made,
    depth: usize,
) -> Result<(), Errno> {
    let Some(place) = made.below(place, name) else {
        return remove(folder, name, depth);
    };
    match openat(folder, name, FOLDER, Mode::empty()) {
        Ok(inner) => clear(&inner, Some(place), made, depth + 1),
        Err(Errno::NOTDIR | Errno::LOOP) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes all that lower layers have in a folder at `place`.
fn clear(
    folder: &OwnedFd,
    place: Option<Place>,
    made: &mut Made,
    depth: usize,
) -> Result<(), Errno> {
    if depth > MOST_DEPTH {
        return Err(Errno::NAMETOOLONG);
    }
    let stat = fstat(folder)?;
    if !made.clear(stat.st_dev, stat.st_ino) {
        return Ok(());
    }
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name));
        }
    }
    for name in names {
        remove_lower(folder, &name, place, made, depth)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tar::{Builder, Header};

    use super::*;

    fn layer(names: &[&str]) -> Vec<u8> {
        let mut layer = Builder::new(Vec::new());
        for name in names {
            let mut header = Header::new_gnu();
            header.set_size(0);
            let file = layer.append_data(&mut header, name, io::empty());
            file.expect("added");
        }
        layer.into_inner().expect("a layer")
    }

    #[test]
    fn folders_that_no_entry_names_count_as_files() {
        let unpacked = |left: u64| {
            let folder = tempfile::tempdir().expect("a folder");
            let mut unpacking = Unpacking::new(folder.path()).expect("a folder");
            unpacking.files = MOST_FILES - left;
            let layer = layer(&["a/b/c/file", "a/b/other"]);
            unpacking.layer(Path::new("layer"), &layer[..])
        };
        assert!(unpacked(5).is_ok());
        assert!(matches!(unpacked(4), Err(OciError::Files(MOST_FILES))));
    }

    fn unpacked_files(folder: &Path) -> Vec<OsString> {
        let files = std::fs::read_dir(folder).expect("a folder");
        let mut names: Vec<_> = files
            .map(|file| file.expect("a file").file_name())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_is_cleared_once_however_often_a_layer_says_so() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut unpacking = Unpacking::new(folder.path()).expect("a folder");
        let mut unpack = |names: &[&str]| {
            let layer = layer(names);
            unpacking.layer(Path::new("layer"), &layer[..])
        };
        unpack(&["a/lower", "a/b/lower"]).expect("unpacked");
        let marks = ["a/.wh..wh..opq", ".wh.a", "a/b/.wh..wh..opq", "a/.wh.b"];
        let before = ["a/first", "a/b/first"];
        let after = ["a/second", "a/b/second", "a/.wh..wh..opq"];
        unpack(&[&before[..], &marks, &after, &marks].concat()).expect("unpacked");
        let at = |path: &str| unpacked_files(&folder.path().join(path));
        assert_eq!(at("a"), ["b", "first", "second"]);
        assert_eq!(at("a/b"), ["first", "second"]);
        // The next layer sees all of it as lower.
        unpack(&["a/third", "a/.wh..wh..opq"]).expect("unpacked");
        assert_eq!(at("a"), ["third"]);
    }

    #[test]
    fn an_image_takes_half_of_the_free_space_at_most() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut unpacking = Unpacking::new(folder.path()).expect("a folder");
        let system = rustix::fs::statvfs(folder.path()).expect("a file system");
        let whole = system.f_blocks * system.f_frsize;
        assert!(unpacking.most_bytes <= whole / 2);
        unpacking.most_bytes = 10;
        let mut file = |name: &str, bytes: &[u8]| {
            let mut layer = Builder::new(Vec::new());
            let mut header = Header::new_gnu();
            header.set_size(bytes.len() as u64);
            let added = layer.append_data(&mut header, name, bytes);
            added.expect("added");
            let layer = layer.into_inner().expect("a layer");
            unpacking.layer(Path::new("layer"), &layer[..])
        };
        assert!(file("first", &[0; 8]).is_ok());
        assert!(matches!(file("second", &[0; 3]), Err(OciError::Bytes(10))));
    }

    #[test]
    fn all_layers_together_are_read_up_to_a_limit() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut unpacking = Unpacking::new(folder.path()).expect("a folder");
        // Nothing of it becomes a file.
        let mut layer = Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Char);
        header.set_size(4096);
        let added = layer.append_data(&mut header, "device", &[0; 4096][..]);
        added.expect("added");
        let layer = layer.into_inner().expect("a layer");
        // Not the whole end of a layer is read.
        unpacking.unread = 2 * layer.len() as u64 + 1024;
        let mut read = || unpacking.layer(Path::new("layer"), &layer[..]);
        assert!(read().is_ok() && read().is_ok());
        assert!(matches!(read(), Err(OciError::Bytes(MOST_BYTES))));
    }
}
