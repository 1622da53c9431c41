//! Requests of a guest that may write.

use std::ffi::CStr;

use rustix::fs::{AtFlags, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Answer, Server, VALID, attr, entry};
use crate::abi::{
    AttrOut, HandleIn, OpenIn, OpenOut, RenameIn, SetattrIn, WriteIn, WriteOut, opcode, valid,
};
use crate::tree::Attributes;

/// Flag of FSYNC: the contents alone.
const CONTENTS_ONLY: u32 = 1;

/// `struct fuse_mkdir_in`, and the first fields of `struct fuse_mknod_in`.
type ModeIn = [u32; 2];
/// Bytes of `struct fuse_mknod_in` and `struct fuse_create_in` behind the first fields.
const MORE: usize = 8;

impl Server {
    /// Serves a request that changes the file system, or opens a file for that.
    pub(super) fn change(&mut self, opcode: u32, node: u64, body: &[u8]) -> Answer {
        match opcode {
            opcode::OPEN => {
                let (asked, _) = message::<OpenIn>(body)?;
                let handle = self.tree.open_handle(node, flags(asked.flags))?;
                self.put_handle(handle)
            }
            opcode::RELEASE => {
                let (closed, _) = message::<HandleIn>(body)?;
                self.tree.close_handle(closed.fh);
                Ok(0)
            }
            opcode::WRITE => self.write(body),
            opcode::FSYNC => {
                let (asked, _) = message::<HandleIn>(body)?;
                let contents_only = asked.flags & CONTENTS_ONLY != 0;
                self.tree.sync(asked.fh, contents_only).map(|()| 0)
            }
            opcode::FSYNCDIR => self.tree.sync_folder(node).map(|()| 0),
            opcode::SETATTR => self.set(node, body),
            opcode::CREATE => self.create(node, body),
            opcode::MKNOD => {
                let ([mode, _], rest) = message::<ModeIn>(body)?;
                let name = name(rest.get(MORE..).unwrap_or_default())?;
                let made = self.tree.make_file(node, name, mode)?;
                self.put(&entry(made))
            }
            opcode::MKDIR => {
                let ([mode, _], rest) = message::<ModeIn>(body)?;
                let made = self.tree.make_folder(node, name(rest)?, mode)?;
                self.put(&entry(made))
            }
            opcode::SYMLINK => {
                let (name, target) = names(body)?;
                let made = self.tree.make_link(node, name, target)?;
                self.put(&entry(made))
            }
            opcode::LINK => {
                let (old, rest) = message::<u64>(body)?;
                let made = self.tree.add_name(old, node, name(rest)?)?;
                self.put(&entry(made))
            }
            opcode::UNLINK => self.remove(node, body, AtFlags::empty()),
            opcode::RMDIR => self.remove(node, body, AtFlags::REMOVEDIR),
            opcode::RENAME => {
                let (folder, rest) = message::<u64>(body)?;
                self.rename(node, folder, 0, rest)
            }
            opcode::RENAME2 => {
                let (asked, rest) = message::<RenameIn>(body)?;
                self.rename(node, asked.folder, asked.flags, rest)
            }
            _ => Err(Errno::NOSYS),
        }
    }

    fn write(&mut self, body: &[u8]) -> Answer {
        let (asked, content) = message::<WriteIn>(body)?;
        if usize::try_from(asked.size) != Ok(content.len()) {
            return Err(Errno::INVAL);
        }
        let written = self.tree.write(asked.fh, asked.offset, content)?;
        self.put(&WriteOut {
            size: u32::try_from(written).unwrap_or(0),
            padding: 0,
        })
    }

    fn create(&mut self, parent: u64, body: &[u8]) -> Answer {
        let (asked, rest) = message::<OpenIn>(body)?;
        let name = name(rest.get(MORE..).unwrap_or_default())?;
        let made = self
            .tree
            .create(parent, name, flags(asked.flags), asked.mode);
        let (node, metadata, handle) = made?;
        let start = self.put(&entry((node, metadata)))?;
        let opened = OpenOut {
            fh: handle,
            ..OpenOut::default()
        };
        opened
            .write_to_prefix(&mut self.body()[start..])
            .map_err(|_| Errno::INVAL)?;
        Ok(start + size_of_val(&opened))
    }

    fn put_handle(&mut self, handle: u64) -> Answer {
        self.put(&OpenOut {
            fh: handle,
            ..OpenOut::default()
        })
    }

    fn remove(&mut self, parent: u64, body: &[u8], kind: AtFlags) -> Answer {
        self.tree.remove(parent, name(body)?, kind).map(|()| 0)
    }

    fn rename(&mut self, parent: u64, new_parent: u64, flags: u32, body: &[u8]) -> Answer {
        let (old, new) = names(body)?;
        let renamed = self.tree.rename((parent, old), (new_parent, new), flags);
        renamed.map(|()| 0)
    }

    fn set(&mut self, node: u64, body: &[u8]) -> Answer {
        let (asked, _) = message::<SetattrIn>(body)?;
        let given = |bit| asked.valid & bit != 0;
        let time = |given_bit, now_bit, seconds: u64, nanoseconds: u32| Timespec {
            tv_sec: seconds.cast_signed(),
            tv_nsec: match (given(now_bit), given(given_bit)) {
                (true, _) => UTIME_NOW,
                (false, true) => nanoseconds.into(),
                (false, false) => UTIME_OMIT,
            },
        };
        let times = Timestamps {
            last_access: time(valid::ATIME, valid::ATIME_NOW, asked.atime, asked.atimensec),
            last_modification: time(valid::MTIME, valid::MTIME_NOW, asked.mtime, asked.mtimensec),
        };
        let has_times = given(valid::ATIME | valid::ATIME_NOW | valid::MTIME | valid::MTIME_NOW);
        let new = Attributes {
            size: given(valid::SIZE).then_some(asked.size),
            mode: given(valid::MODE).then_some(asked.mode),
            user: given(valid::UID).then_some(asked.uid),
            group: given(valid::GID).then_some(asked.gid),
            times: has_times.then_some(times),
        };
        let handle = given(valid::FH).then_some(asked.fh);
        let metadata = self.tree.set(node, handle, &new)?;
        self.put(&AttrOut {
            attr_valid: VALID,
            attr: attr(&metadata),
            ..AttrOut::default()
        })
    }
}

/// Reads a message, and returns the bytes behind it.
fn message<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(body).map_err(|_| Errno::INVAL)
}

fn flags(flags: u32) -> OFlags {
    OFlags::from_bits_retain(flags)
}

/// Returns the name that a request ends with.
fn name(bytes: &[u8]) -> Result<&CStr, Errno> {
    CStr::from_bytes_with_nul(bytes).map_err(|_| Errno::INVAL)
}

/// Returns both names that a request ends with.
fn names(bytes: &[u8]) -> Result<(&CStr, &CStr), Errno> {
    let first = CStr::from_bytes_until_nul(bytes).map_err(|_| Errno::INVAL)?;
    let rest = &bytes[first.count_bytes() + 1..];
    Ok((first, name(rest)?))
}
