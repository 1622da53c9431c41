//! Changes of the exported folder, for guests that may write, and the files that such a guest has open.
//!
//! A change names one entry of one folder, as each access does, and begins with the check that the folder is below the
//! exported one. A folder that the host moves out after the check may get this one change. A change of contents, mode
//! or times goes to a descriptor, which was opened by a name that no link can stand for.
//!
//! The guest makes regular files, folders and links; no devices, sockets and pipes, and no file that gets the rights of
//! its owner. Files belong to this process's user, whoever made them in the guest.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, Stat, Timestamps, fchmod, fdatasync, fstat,
    fsync, ftruncate, futimens, linkat, mkdirat, openat, renameat_with, statat, symlinkat,
    unlinkat,
};
use rustix::io::{Errno, pwrite};

use super::{CONTENT, LISTING, Metadata, Tree, is_one_name, number, read_at};
use crate::abi::ROOT;

/// Most files that a guest has open at a time.
pub const MOST_HANDLES: usize = 1024;

/// Flags of an open that makes a file.
const NEW: OFlags = OFlags::CREATE.union(OFlags::EXCL);

/// Flags with which files are opened for a guest that may write, beside [`super::OPEN_FLAGS`], for the filter.
pub const CHANGE_FLAGS: OFlags = NEW.union(OFlags::WRONLY).union(OFlags::RDWR);

/// Bits of a mode that let a program have the rights of its file's owner or group.
pub const PRIVILEGES: u32 = 0o6000;

/// A file that the guest has open.
#[derive(Debug)]
pub(super) struct Handle {
    node: u64,
    file: Arc<OwnedFd>,
    /// Whether the guest has removed the last name of the file, so that no one else can reach it.
    is_nameless: bool,
}

/// A file that was made or opened: its node, its metadata and its handle.
pub type Handled = (u64, Metadata, u64);

/// Attributes to change.
#[derive(Clone, Debug, Default)]
pub struct Attributes {
    pub size: Option<u64>,
    pub mode: Option<u32>,
    pub user: Option<u32>,
    pub group: Option<u32>,
    pub times: Option<Timestamps>,
}

impl Tree {
    /// Opens a regular file with the access mode among `flags`.
    pub fn open_handle(&mut self, id: u64, flags: OFlags) -> Result<u64, Errno> {
        self.check_room()?;
        let file = self.open_file(id, CONTENT.union(access(flags)?))?;
        Ok(self.hold(id, file))
    }

    /// Closes a file.
    pub fn close_handle(&mut self, handle: u64) {
        self.handles.remove(&handle);
    }

    /// Reads from an open file, up to the end of the buffer or of the file.
    pub fn read_handle(
        &mut self,
        handle: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, Errno> {
        let (node, file) = self.held(handle)?;
        let filled = read_at(&file, offset, buffer);
        self.still_there(node)?;
        filled
    }

    /// Writes to an open file, and returns how much was written.
    pub fn write(&mut self, handle: u64, offset: u64, content: &[u8]) -> Result<usize, Errno> {
        let (node, file) = self.held(handle)?;
        self.still_there(node)?;
        write_at(&file, offset, content)
    }

    /// Waits until an open file's contents are on the host's disk, with its metadata or without.
    pub fn sync(&mut self, handle: u64, contents_only: bool) -> Result<(), Errno> {
        let (_, file) = self.held(handle)?;
        match contents_only {
            true => fdatasync(file),
            false => fsync(file),
        }
    }

    /// Waits until a folder's entries are on the host's disk.
    pub fn sync_folder(&mut self, id: u64) -> Result<(), Errno> {
        let listing = self.listing(id)?;
        self.still_there(id)?;
        fsync(listing)
    }

    /// Makes a regular file and opens it. One that the host has made meanwhile is opened, unless `flags` exclude that.
    pub fn create(
        &mut self,
        parent: u64,
        name: &CStr,
        flags: OFlags,
        mode: u32,
    ) -> Result<Handled, Errno> {
        self.check_room()?;
        let (access, mode) = (access(flags)?, permissions(mode)?);
        let made = self.change(parent, name, |folder| {
            openat(folder, name, NEW | CONTENT | access, mode)
        });
        let made = match made {
            Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => None,
            made => Some(made?),
        };
        let (id, metadata) = self.look_up(parent, name)?;
        let opened = match made {
            Some(file) => fstat(&file).and_then(|stat| {
                self.check(id, &stat)?;
                Ok(self.hold(id, file))
            }),
            None => self.open_handle(id, access),
        };
        let emptied = opened.and_then(|handle| {
            if flags.contains(OFlags::TRUNC) {
                ftruncate(self.held(handle)?.1, 0)?;
            }
            Ok(handle)
        });
        match emptied {
            Ok(handle) => Ok((id, metadata, handle)),
            Err(error) => {
                // The reply does not name the node, so the guest will send no FORGET for it.
                self.forget(id, 1);
                Err(error)
            }
        }
    }

    /// Makes a regular file. Other kinds are refused.
    pub fn make_file(
        &mut self,
        parent: u64,
        name: &CStr,
        mode: u32,
    ) -> Result<(u64, Metadata), Errno> {
        if FileType::from_raw_mode(mode) != FileType::RegularFile {
            return Err(Errno::PERM);
        }
        let mode = permissions(mode)?;
        let made = self.change(parent, name, |folder| {
            openat(folder, name, NEW | CONTENT | OFlags::WRONLY, mode)
        });
        made?;
        self.look_up(parent, name)
    }

    /// Makes a folder.
    pub fn make_folder(
        &mut self,
        parent: u64,
        name: &CStr,
        mode: u32,
    ) -> Result<(u64, Metadata), Errno> {
        let mode = permissions(mode)?;
        self.change(parent, name, |folder| mkdirat(folder, name, mode))?;
        self.look_up(parent, name)
    }

    /// Makes a symbolic link to any target. The server never follows it.
    pub fn make_link(
        &mut self,
        parent: u64,
        name: &CStr,
        target: &CStr,
    ) -> Result<(u64, Metadata), Errno> {
        self.change(parent, name, |folder| symlinkat(target, folder, name))?;
        self.look_up(parent, name)
    }

    /// Gives a file one more name.
    pub fn add_name(
        &mut self,
        id: u64,
        parent: u64,
        name: &CStr,
    ) -> Result<(u64, Metadata), Errno> {
        self.still_there(id)?;
        let (from, old) = self.place(id)?;
        let source = self.folder_to_change(from, &old)?;
        self.change(parent, name, |folder| {
            linkat(&source, &*old, folder, name, AtFlags::empty())
        })?;
        self.look_up(parent, name)
    }

    /// Removes a file, or an empty folder with `AtFlags::REMOVEDIR`.
    pub fn remove(&mut self, parent: u64, name: &CStr, kind: AtFlags) -> Result<(), Errno> {
        let removed = self.change(parent, name, |folder| {
            let removed = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
            unlinkat(folder, name, kind)?;
            Ok(removed.ok())
        })?;
        self.lose(&(parent, Arc::from(name)), removed);
        Ok(())
    }

    /// Renames a file or a folder, with the flag RENAME_NOREPLACE or with none.
    pub fn rename(
        &mut self,
        (parent, name): (u64, &CStr),
        (new_parent, new_name): (u64, &CStr),
        flags: u32,
    ) -> Result<(), Errno> {
        let flags = RenameFlags::from_bits_retain(flags);
        if !RenameFlags::NOREPLACE.contains(flags) {
            return Err(Errno::INVAL);
        }
        let old = (parent, Arc::from(name));
        let new = (new_parent, Arc::from(new_name));
        let moved = self.places.get(&old).copied();
        // The host may have moved folders, so that the kernel sees no cycle where the nodes would have one.
        if moved.is_some_and(|moved| self.leads_through(new_parent, moved)) {
            return Err(Errno::INVAL);
        }
        let source = self.folder_to_change(parent, name)?;
        let replaced = self.change(new_parent, new_name, |target| {
            let replaced = statat(target, new_name, AtFlags::SYMLINK_NOFOLLOW);
            renameat_with(&source, name, target, new_name, flags)?;
            Ok(replaced.ok())
        })?;
        if old == new {
            return Ok(());
        }
        self.lose(&new, replaced);
        if let Some(id) = self.places.remove(&old)
            && let Some(node) = self.nodes.get_mut(&id)
        {
            node.place = new.clone();
            self.places.insert(new, id);
        }
        Ok(())
    }

    /// Changes attributes of a regular file or a folder, and returns all of them. Owner and group cannot change.
    pub fn set(
        &mut self,
        id: u64,
        handle: Option<u64>,
        new: &Attributes,
    ) -> Result<Metadata, Errno> {
        let now = self.metadata(id)?;
        let is_other = |new: Option<u32>, now| new.is_some_and(|new| new != now);
        if is_other(new.user, now.stat.st_uid) || is_other(new.group, now.stat.st_gid) {
            return Err(Errno::PERM);
        }
        let mode = new.mode.map(permissions).transpose()?;
        if let Some(size) = new.size {
            let file = match handle {
                Some(handle) => self.held_by(handle, id)?,
                None => self.reach(id, OFlags::WRONLY)?,
            };
            self.still_there(id)?;
            ftruncate(file, size)?;
        }
        if mode.is_some() || new.times.is_some() {
            let file = match self.reach(id, OFlags::RDONLY) {
                // A file may be for writing only.
                Err(Errno::ACCESS) => self.reach(id, OFlags::WRONLY)?,
                file => file?,
            };
            self.still_there(id)?;
            if let Some(mode) = mode {
                fchmod(&file, mode)?;
            }
            if let Some(times) = &new.times {
                futimens(&file, times)?;
            }
        }
        self.metadata(id)
    }

    /// Returns a descriptor of a regular file or a folder, for a change of its own.
    fn reach(&mut self, id: u64, access: OFlags) -> Result<Arc<OwnedFd>, Errno> {
        if self.is_removed(id) {
            let handle = self.handle_of(id).ok_or(Errno::STALE)?;
            return Ok(Arc::clone(&handle.file));
        }
        let kind = self.nodes.get(&id).map(|node| node.kind);
        match kind {
            _ if id == ROOT => self.listing(id),
            Some(FileType::Directory) => {
                let (parent, _) = self.place(id)?;
                let folder = self.inside(parent, |tree, folder| tree.open_in(folder, id, LISTING));
                folder.map(Arc::new)
            }
            Some(FileType::RegularFile) => self.open_file(id, CONTENT | access).map(Arc::new),
            // There is no descriptor of a link.
            Some(_) => Err(Errno::OPNOTSUPP),
            None => Err(Errno::STALE),
        }
    }

    /// Returns whether the guest has removed the name of a node.
    pub(super) fn is_removed(&self, id: u64) -> bool {
        self.nodes.get(&id).is_some_and(|node| node.is_removed)
    }

    /// Returns the metadata of a file that the guest has open by a name which it has removed. The file has no name left,
    /// or another one that leads to it from the exported folder.
    pub(super) fn metadata_of_removed(&mut self, id: u64) -> Result<Metadata, Errno> {
        let handle = self.handle_of(id).ok_or(Errno::STALE)?;
        if !handle.is_nameless {
            return self.metadata_by_another_name(id);
        }
        let stat = fstat(&handle.file)?;
        let ino = number(stat.st_ino, self.system(stat.st_dev));
        Ok(Metadata { stat, ino })
    }

    fn metadata_by_another_name(&mut self, id: u64) -> Result<Metadata, Errno> {
        let node = self.nodes.get(&id).ok_or(Errno::STALE)?;
        let others = self.nodes.iter().filter(|(_, other)| {
            !other.is_removed && (other.device, other.inode) == (node.device, node.inode)
        });
        let others: Vec<u64> = others.map(|(&other, _)| other).collect();
        let mut found = others
            .into_iter()
            .filter_map(|other| self.metadata(other).ok());
        found.next().ok_or(Errno::STALE)
    }

    /// Returns a file that the guest has open by its node.
    fn handle_of(&self, id: u64) -> Option<&Handle> {
        self.handles.values().find(|handle| handle.node == id)
    }

    /// Returns the open file of a handle, if it is this node's.
    fn held_by(&self, handle: u64, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        let (node, file) = self.held(handle)?;
        match node == id {
            true => Ok(file),
            false => Err(Errno::BADF),
        }
    }

    fn held(&self, handle: u64) -> Result<(u64, Arc<OwnedFd>), Errno> {
        let handle = self.handles.get(&handle).ok_or(Errno::BADF)?;
        Ok((handle.node, Arc::clone(&handle.file)))
    }

    fn hold(&mut self, node: u64, file: OwnedFd) -> u64 {
        self.last_handle += 1;
        let file = Arc::new(file);
        let handle = Handle {
            node,
            file,
            is_nameless: false,
        };
        self.handles.insert(self.last_handle, handle);
        self.last_handle
    }

    /// Refuses one more open file than a guest can have.
    fn check_room(&self) -> Result<(), Errno> {
        match self.handles.len() < MOST_HANDLES {
            true => Ok(()),
            false => Err(Errno::NFILE),
        }
    }

    /// Changes an entry of a folder.
    fn change<T>(
        &mut self,
        parent: u64,
        name: &CStr,
        change: impl FnOnce(&OwnedFd) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let folder = self.folder_to_change(parent, name)?;
        change(&folder)
    }

    /// Opens a folder that is below the exported one, to change an entry of this name.
    fn folder_to_change(&mut self, id: u64, name: &CStr) -> Result<Arc<OwnedFd>, Errno> {
        if !is_one_name(name) {
            return Err(Errno::INVAL);
        }
        let folder = self.folder(id)?;
        self.check_below(id, &folder)?;
        Ok(folder)
    }

    /// Takes the name away from the node at a place, which the guest has just removed, and which led to `removed` before.
    /// If that was the last name of the node's file, the file is the guest's alone from now on.
    fn lose(&mut self, place: &super::Place, removed: Option<Stat>) {
        let Some(id) = self.places.remove(place) else {
            return;
        };
        self.folders.0.remove(&id);
        self.files.0.remove(&id);
        // The host may have moved the node's file out before, and have removed it there.
        let was_there = removed.is_some_and(|stat| self.check(id, &stat).is_ok());
        let Some(node) = self.nodes.get_mut(&id) else {
            return;
        };
        node.is_removed = true;
        let lost = (node.device, node.inode);
        for handle in self.handles.values_mut().filter(|_| was_there) {
            let node = self.nodes.get(&handle.node);
            if node.is_some_and(|node| (node.device, node.inode) == lost) {
                handle.is_nameless = fstat(&handle.file).is_ok_and(|stat| stat.st_nlink == 0);
            }
        }
    }

    /// Returns whether the names to a node lead through another one, or are too many.
    fn leads_through(&self, id: u64, other: u64) -> bool {
        let mut at = id;
        for _ in 0..=super::MOST_DEPTH {
            match self.nodes.get(&at) {
                _ if at == other => return true,
                Some(node) => at = node.place.0,
                None => return false,
            }
        }
        true
    }
}

/// Returns the access mode among the flags of an open.
fn access(flags: OFlags) -> Result<OFlags, Errno> {
    let access = flags & OFlags::RWMODE;
    match access == OFlags::RWMODE {
        true => Err(Errno::INVAL),
        false => Ok(access),
    }
}

/// Returns the permissions of a mode, and refuses those that give the owner's rights to others.
fn permissions(mode: u32) -> Result<Mode, Errno> {
    match mode & PRIVILEGES {
        0 => Ok(Mode::from_raw_mode(mode & 0o1777)),
        _ => Err(Errno::PERM),
    }
}

/// Writes all of the contents, or what is possible before an error.
fn write_at(file: &OwnedFd, mut offset: u64, content: &[u8]) -> Result<usize, Errno> {
    let mut rest = content;
    while !rest.is_empty() {
        match pwrite(file, rest, offset) {
            Ok(0) => break,
            Ok(count) => {
                rest = &rest[count..];
                offset = offset.checked_add(count as u64).ok_or(Errno::INVAL)?;
            }
            Err(Errno::INTR) => {}
            Err(_) if rest.len() < content.len() => break,
            Err(error) => return Err(error),
        }
    }
    Ok(content.len() - rest.len())
}
