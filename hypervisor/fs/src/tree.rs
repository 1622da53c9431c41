//! The exported folder: nodes that the guest knows, and accesses to the host's files behind them.
//!
//! Every access names one entry of one folder (`openat`, `fstatat`, `readlinkat` with O_NOFOLLOW). A folder is reached
//! from the exported one in the same way, name by name, so that no link and no `..` ever leads out. A node stands for
//! the file that its lookup found: if its name leads to another file by now, the node is stale.
//!
//! A guest holds no descriptors. The tree keeps some open, at most [`MOST_OPEN`], and opens the others again. The host
//! may move an open folder out of the exported one, and the descriptor goes with it. So each access ends with a check
//! that the folder is still below the exported one, by the way up from it (`../..`), and that a file that was open still
//! has its name there. An access that began in a folder outside has no answer. One race remains: a folder that the host
//! moves out and back again during one access counts as inside.
//!
//! A guest that may write opens files and holds descriptors, and [`changes`] has what it changes.

mod changes;

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RawDir, SeekFrom, Stat, StatVfs, fstat, fstatfs,
    fstatvfs, openat, readlinkat, seek, statat,
};
use rustix::io::{Errno, pread};

use self::changes::Handle;
pub use self::changes::{Attributes, CHANGE_FLAGS, Handled, MOST_HANDLES, PRIVILEGES};
use crate::abi::ROOT;

/// Most nodes of a guest: about 150 MB with names of usual length, and 280 MB with names of 255 bytes.
pub const MOST_NODES: usize = 1 << 19;

/// Most descriptors that stay open for folders that lead to others, and as many for files and listings.
pub const MOST_OPEN: usize = 256;

/// Most names from the exported folder to a file. The way up from it is a path of less than 4,096 bytes.
const MOST_DEPTH: usize = 1024;

/// `../../..` and a zero: the way up from a folder of the greatest depth.
static UP: [u8; 3 * MOST_DEPTH] = {
    let mut all = [0; 3 * MOST_DEPTH];
    let mut at = 0;
    while at < all.len() - 1 {
        all[at] = b"../"[at % 3];
        at += 1;
    }
    all
};

/// Flags of every open.
const COMMON: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC);
const FOLDER: OFlags = COMMON.union(OFlags::PATH).union(OFlags::DIRECTORY);
const LISTING: OFlags = COMMON.union(OFlags::DIRECTORY);
/// A regular file. If its name has become a pipe's meanwhile, the open does not wait for the other end.
const CONTENT: OFlags = COMMON.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);
/// A file of any kind, to ask for its file system.
const PLACE: OFlags = COMMON.union(OFlags::PATH);

/// All flags with which files are opened, for the filter. rustix adds O_LARGEFILE.
pub const OPEN_FLAGS: OFlags = FOLDER.union(CONTENT).union(OFlags::LARGEFILE);

/// File systems that have no place in a guest: the kernel makes their files, and reading these has effects or tells
/// of this host's processes. Magic numbers of statfs(2). An access asks for them each time that it enters another file
/// system: a device number, once unmounted, may be another file system's.
const PSEUDO: [u64; 24] = [
    0x0187,      // autofs, where a name that is looked up makes the host mount something
    0x6759_6969, // rpc_pipefs
    0x6e66_7364, // nfsd
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0xcafe_4a11, // bpf
    0x1cd1,      // devpts
    0x1980_0202, // mqueue
    0x6165_676c, // pstore
    0x6265_6570, // configfs
    0xde5e_81e4, // efivarfs
    0x4249_4e4d, // binfmt_misc
    0xf97c_ff8c, // selinux
    0x6573_5543, // fusectl
    0x6e73_6673, // nsfs
    0x0765_5821, // resctrl
    0x4341_5d53, // smackfs
    0xabba_1974, // xenfs
    0x6c6f_6f70, // binderfs
];

/// Largest number of file systems with distinct inode numbers.
const MOST_SYSTEMS: u64 = 0xffff;

/// Name of a node in its parent.
type Place = (u64, Arc<CStr>);

#[derive(Debug)]
struct Node {
    place: Place,
    device: u64,
    inode: u64,
    kind: FileType,
    /// Number of times that the guest was told of the node and has not forgotten.
    lookups: u64,
    /// Whether the guest has removed the name. The file is there while the guest has it open and it has another name inside,
    /// or none at all.
    is_removed: bool,
}

/// Descriptors that stay open, by node.
#[derive(Debug, Default)]
struct Open(HashMap<u64, Arc<OwnedFd>>);

impl Open {
    fn get(&self, node: u64) -> Option<Arc<OwnedFd>> {
        self.0.get(&node).map(Arc::clone)
    }

    fn keep(&mut self, node: u64, file: OwnedFd) -> Arc<OwnedFd> {
        if self.0.len() >= MOST_OPEN {
            self.0.clear();
        }
        let file = Arc::new(file);
        self.0.insert(node, Arc::clone(&file));
        file
    }
}

/// Metadata of a file. Its inode number differs from those of other file systems' files.
#[derive(Clone, Copy, Debug)]
pub struct Metadata {
    pub stat: Stat,
    pub ino: u64,
}

/// An entry of a listing.
#[derive(Debug)]
pub struct Entry<'a> {
    pub name: &'a CStr,
    pub ino: u64,
    /// `DT_*`.
    pub kind: u32,
    /// Offset of the next entry.
    pub next: u64,
}

/// The exported folder and the nodes of one guest.
#[derive(Debug)]
pub struct Tree {
    root: Arc<OwnedFd>,
    device: u64,
    inode: u64,
    nodes: HashMap<u64, Node>,
    places: HashMap<Place, u64>,
    last: u64,
    most_nodes: usize,
    folders: Open,
    files: Open,
    /// Files that a guest has opened which may write.
    handles: HashMap<u64, Handle>,
    last_handle: u64,
    /// Numbers of file systems by device, for inode numbers.
    systems: HashMap<u64, u64>,
}

impl Tree {
    /// Opens the folder to export, to a guest that can know `most_nodes` nodes.
    pub fn open(folder: &Path, most_nodes: usize) -> Result<Self, Errno> {
        // The caller may name it by a link.
        let flags = FOLDER.difference(OFlags::NOFOLLOW);
        let root = openat(CWD, folder, flags, Mode::empty())?;
        let stat = fstat(&root)?;
        Ok(Self {
            root: Arc::new(root),
            device: stat.st_dev,
            inode: stat.st_ino,
            nodes: HashMap::new(),
            places: HashMap::new(),
            last: ROOT,
            most_nodes,
            folders: Open::default(),
            files: Open::default(),
            handles: HashMap::new(),
            last_handle: 0,
            systems: HashMap::from([(stat.st_dev, 0)]),
        })
    }

    /// Returns the exported folder.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Forgets all nodes, for another driver.
    pub fn reset(&mut self) {
        self.nodes.clear();
        self.places.clear();
        self.folders = Open::default();
        self.files = Open::default();
        self.handles.clear();
    }

    /// Finds a name in a folder, and counts the lookup.
    pub fn look_up(&mut self, parent: u64, name: &CStr) -> Result<(u64, Metadata), Errno> {
        if !is_one_name(name) {
            return Err(Errno::INVAL);
        }
        let found = self.inside(parent, |tree, folder| tree.entry(parent, folder, name))?;
        let id = self.count(parent, name, &found.stat)?;
        Ok((id, found))
    }

    /// Takes back lookups of a node, which is forgotten with the last one.
    pub fn forget(&mut self, id: u64, lookups: u64) {
        let Some(node) = self.nodes.get_mut(&id) else {
            return;
        };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups > 0 {
            return;
        }
        if let Some(node) = self.nodes.remove(&id)
            && self.places.get(&node.place) == Some(&id)
        {
            self.places.remove(&node.place);
        }
        self.folders.0.remove(&id);
        self.files.0.remove(&id);
    }

    /// Returns a node's metadata.
    pub fn metadata(&mut self, id: u64) -> Result<Metadata, Errno> {
        if id == ROOT {
            let stat = statat(&self.root, c"", AtFlags::EMPTY_PATH)?;
            return Ok(Metadata {
                ino: stat.st_ino,
                stat,
            });
        }
        if self.is_removed(id) {
            return self.metadata_of_removed(id);
        }
        let (parent, name) = self.place(id)?;
        let found = self.inside(parent, |tree, folder| tree.entry(parent, folder, &name))?;
        self.check(id, &found.stat)?;
        Ok(found)
    }

    /// Returns the target of a link.
    pub fn link(&mut self, id: u64) -> Result<CString, Errno> {
        let (parent, name) = self.place(id)?;
        self.inside(parent, |tree, folder| {
            let found = tree.entry(parent, folder, &name)?;
            tree.check(id, &found.stat)?;
            readlinkat(folder, &*name, Vec::new())
        })
    }

    /// Reads from a regular file, up to the end of the buffer or of the file.
    pub fn read(&mut self, id: u64, offset: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
        let file = self.file(id)?;
        let filled = read_at(&file, offset, buffer);
        self.still_there(id)?;
        filled
    }

    /// Lists a folder from an offset on, until `take` breaks. `take` gets the tree, for lookups. After an error the guest
    /// must learn nothing of the entries.
    pub fn list(
        &mut self,
        id: u64,
        offset: u64,
        mut take: impl FnMut(&mut Self, &Entry<'_>) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        let listing = self.listing(id)?;
        let listed = self.list_open(&listing, id, offset, &mut take);
        self.still_there(id)?;
        listed
    }

    fn list_open(
        &mut self,
        listing: &OwnedFd,
        id: u64,
        offset: u64,
        take: &mut impl FnMut(&mut Self, &Entry<'_>) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        seek(listing, SeekFrom::Start(offset))?;
        let system = self.system(self.device(id)?);
        let mut buffer = [const { MaybeUninit::uninit() }; 16 << 10];
        let mut entries = RawDir::new(listing, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let kind = match entry.file_type() {
                FileType::Unknown => 0,
                // `DT_*` are the type bits of the mode.
                kind => kind.as_raw_mode() >> 12,
            };
            let ino = match id {
                // Its `..` is a folder outside.
                ROOT if entry.file_name() == c".." => self.inode,
                _ => number(entry.ino(), system),
            };
            let entry = Entry {
                name: entry.file_name(),
                ino,
                kind,
                next: entry.next_entry_cookie(),
            };
            if take(self, &entry).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Returns the size and the free space of the exported folder's file system.
    pub fn space(&self) -> Result<StatVfs, Errno> {
        fstatvfs(&self.root)
    }

    /// Returns the node at a place, with one more lookup. A place that has another file by now has a new node.
    fn count(&mut self, parent: u64, name: &CStr, stat: &Stat) -> Result<u64, Errno> {
        let place = (parent, Arc::from(name));
        if self.depth(parent)? >= MOST_DEPTH {
            return Err(Errno::NAMETOOLONG);
        }
        let kind = FileType::from_raw_mode(stat.st_mode);
        if let Some(&id) = self.places.get(&place)
            && let Some(node) = self.nodes.get_mut(&id)
            && (node.device, node.inode, node.kind) == (stat.st_dev, stat.st_ino, kind)
        {
            node.lookups = node.lookups.saturating_add(1);
            return Ok(id);
        }
        if self.nodes.len() >= self.most_nodes {
            return Err(Errno::NFILE);
        }
        self.last += 1;
        let node = Node {
            place: place.clone(),
            device: stat.st_dev,
            inode: stat.st_ino,
            kind,
            lookups: 1,
            is_removed: false,
        };
        self.nodes.insert(self.last, node);
        self.places.insert(place, self.last);
        Ok(self.last)
    }

    /// Checks that a node's name still leads to its file.
    fn check(&self, id: u64, stat: &Stat) -> Result<(), Errno> {
        let node = self.nodes.get(&id).ok_or(Errno::STALE)?;
        let now = FileType::from_raw_mode(stat.st_mode);
        match (node.device, node.inode, node.kind) == (stat.st_dev, stat.st_ino, now) {
            true => Ok(()),
            false => Err(Errno::STALE),
        }
    }

    /// Returns the parent and the name of a node, which is not the root.
    fn place(&self, id: u64) -> Result<Place, Errno> {
        Ok(self.named(id)?.place.clone())
    }

    /// Returns a node that has a name.
    fn named(&self, id: u64) -> Result<&Node, Errno> {
        let node = self.nodes.get(&id).filter(|node| !node.is_removed);
        node.ok_or(Errno::STALE)
    }

    /// Returns the number of names that lead to a node from the exported folder.
    fn depth(&self, id: u64) -> Result<usize, Errno> {
        let (mut at, mut depth) = (id, 0);
        while at != ROOT {
            at = self.named(at)?.place.0;
            depth += 1;
            if depth > MOST_DEPTH {
                return Err(Errno::NAMETOOLONG);
            }
        }
        Ok(depth)
    }

    /// Accesses an entry of a folder. Fails if the folder is not below the exported one after the access.
    fn inside<T>(
        &mut self,
        id: u64,
        access: impl FnOnce(&mut Self, &OwnedFd) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let folder = self.folder(id)?;
        let answer = access(self, &folder);
        self.check_below(id, &folder)?;
        answer
    }

    /// Checks that an open folder is below the exported one, as many names deep as its node is. Closes it if it is not.
    fn check_below(&mut self, id: u64, folder: &OwnedFd) -> Result<(), Errno> {
        let depth = self.depth(id)?;
        if depth == 0 {
            return Ok(());
        }
        let up = UP.get(3 * MOST_DEPTH.saturating_sub(depth)..);
        let up = up.and_then(|up| CStr::from_bytes_with_nul(up).ok());
        let top = statat(folder, up.ok_or(Errno::NAMETOOLONG)?, AtFlags::empty())?;
        if (top.st_dev, top.st_ino) == (self.device, self.inode) {
            return Ok(());
        }
        self.folders.0.remove(&id);
        Err(Errno::STALE)
    }

    /// Checks that the name of a node, which is open, still leads to its file. Closes the file if it does not.
    fn still_there(&mut self, id: u64) -> Result<(), Errno> {
        if id == ROOT {
            return Ok(());
        }
        let there = self.metadata(id);
        if there.is_err() {
            self.files.0.remove(&id);
        }
        there.map(drop)
    }

    /// Opens a folder to reach what is in it.
    fn folder(&mut self, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        // Names from the folder up to one that is open. Renaming makes no cycle.
        let mut way = Vec::new();
        let mut at = id;
        let mut folder = loop {
            if at == ROOT {
                break Arc::clone(&self.root);
            }
            if let Some(folder) = self.folders.get(at) {
                break folder;
            }
            let node = self.named(at)?;
            if node.kind != FileType::Directory {
                return Err(Errno::NOTDIR);
            }
            way.push(at);
            at = node.place.0;
        };
        for id in way.into_iter().rev() {
            let opened = self.open_in(&folder, id, FOLDER);
            self.check_below(self.place(id)?.0, &folder)?;
            folder = self.folders.keep(id, opened?);
        }
        Ok(folder)
    }

    fn open_in(&self, folder: &OwnedFd, id: u64, flags: OFlags) -> Result<OwnedFd, Errno> {
        let node = self.named(id)?;
        let opened = openat(folder, &*node.place.1, flags, Mode::empty());
        let opened = opened.map_err(|error| match error {
            // The name has become another kind of file's.
            Errno::LOOP | Errno::NOTDIR | Errno::NXIO => Errno::STALE,
            error => error,
        })?;
        let stat = fstat(&opened)?;
        self.check(id, &stat)?;
        if stat.st_dev != self.device {
            check_visible(&opened)?;
        }
        Ok(opened)
    }

    fn file(&mut self, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(file) = self.files.get(id) {
            return Ok(file);
        }
        let file = self.open_file(id, CONTENT)?;
        Ok(self.files.keep(id, file))
    }

    /// Opens a regular file.
    fn open_file(&mut self, id: u64, flags: OFlags) -> Result<OwnedFd, Errno> {
        match self.nodes.get(&id).map(|node| node.kind) {
            Some(FileType::RegularFile) => {}
            Some(FileType::Directory) => return Err(Errno::ISDIR),
            Some(_) => return Err(Errno::ACCESS),
            None if id == ROOT => return Err(Errno::ISDIR),
            None => return Err(Errno::STALE),
        }
        let (parent, _) = self.place(id)?;
        self.inside(parent, |tree, folder| tree.open_in(folder, id, flags))
    }

    fn listing(&mut self, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(listing) = self.files.get(id) {
            // A file's descriptor is not a folder's: getdents64 says ENOTDIR.
            return Ok(listing);
        }
        let listing = if id == ROOT {
            openat(&self.root, c".", LISTING, Mode::empty())?
        } else {
            if self.named(id)?.kind != FileType::Directory {
                return Err(Errno::NOTDIR);
            }
            let (parent, _) = self.place(id)?;
            self.inside(parent, |tree, folder| tree.open_in(folder, id, LISTING))?
        };
        Ok(self.files.keep(id, listing))
    }

    /// Returns the metadata of a name in a folder.
    fn entry(&mut self, parent: u64, folder: &OwnedFd, name: &CStr) -> Result<Metadata, Errno> {
        let mut stat = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        // The folder, which is open and was checked, keeps its file system's device number from being used again.
        if stat.st_dev != self.device(parent)? {
            let place = openat(folder, name, PLACE, Mode::empty())?;
            stat = fstat(&place)?;
            check_visible(&place)?;
        }
        let ino = number(stat.st_ino, self.system(stat.st_dev));
        Ok(Metadata { stat, ino })
    }

    /// Returns the device number of a folder.
    fn device(&self, id: u64) -> Result<u64, Errno> {
        if id == ROOT {
            return Ok(self.device);
        }
        Ok(self.nodes.get(&id).ok_or(Errno::STALE)?.device)
    }

    /// Returns the number of a file system, which has 16 bits.
    fn system(&mut self, device: u64) -> u64 {
        let next = self.systems.len() as u64;
        match self.systems.get(&device) {
            Some(number) => *number,
            None if next > MOST_SYSTEMS => 0,
            None => *self.systems.entry(device).or_insert(next),
        }
    }
}

/// Returns whether a name is one that a folder can have.
fn is_one_name(name: &CStr) -> bool {
    let bytes = name.to_bytes();
    !matches!(bytes, b"" | b"." | b"..") && !bytes.contains(&b'/')
}

/// Reads up to the end of the buffer or of the file.
fn read_at(file: &OwnedFd, mut offset: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
    let mut filled = 0;
    while filled < buffer.len() {
        match pread(file, &mut buffer[filled..], offset) {
            Ok(0) => break,
            Ok(count) => {
                filled += count;
                offset = offset.checked_add(count as u64).ok_or(Errno::INVAL)?;
            }
            Err(Errno::INTR) => {}
            Err(_) if filled > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Refuses a file of a file system that has no place in a guest.
fn check_visible(file: impl AsFd) -> Result<(), Errno> {
    let magic = fstatfs(file)?.f_type;
    match PSEUDO.contains(&magic.cast_unsigned()) {
        true => Err(Errno::NOENT),
        false => Ok(()),
    }
}

/// Makes an inode number that is different for each file system: programs take files of the same number for one.
fn number(ino: u64, system: u64) -> u64 {
    ino ^ system << 48
}
