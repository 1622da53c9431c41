//! Answers the guest's requests.

mod changes;

use std::ffi::CStr;
use std::ops::ControlFlow;

use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::abi::{
    self, Attr, AttrOut, BatchForgetIn, Dirent, EntryOut, ForgetOne, InHeader, InitIn, InitOut,
    OutHeader, ReadIn, StatfsOut, WriteIn, flag, opcode,
};
use crate::tree::{Entry, Metadata, Tree};

/// Most bytes of contents in a reply. Kernels request no more if the server does not offer more pages.
const MOST_CONTENT: usize = 128 << 10;
/// Most bytes of a reply.
pub const MOST_REPLY: usize = size_of::<OutHeader>() + MOST_CONTENT;
/// Most bytes of a request: a WRITE of as many contents.
pub const MOST_REQUEST: usize = size_of::<InHeader>() + size_of::<WriteIn>() + MOST_CONTENT;

/// Validity in seconds of attributes and entries that a guest caches.
const VALID: u64 = 5;

/// Serves one guest.
#[derive(Debug)]
pub struct Server {
    tree: Tree,
    reply: Vec<u8>,
    is_writable: bool,
}

/// Bytes of a reply behind its header, or the error number.
type Answer = Result<usize, Errno>;

impl Server {
    /// Creates a server of a folder that the guest can only read.
    pub fn new(tree: Tree) -> Self {
        Self {
            tree,
            reply: vec![0; MOST_REPLY],
            is_writable: false,
        }
    }

    /// Creates a server of a folder that the guest can change.
    pub fn writable(tree: Tree) -> Self {
        Self {
            is_writable: true,
            ..Self::new(tree)
        }
    }

    /// Serves a request of any bytes, and returns the reply; `None` if the request has none.
    pub fn serve(&mut self, request: &[u8]) -> Option<&[u8]> {
        let (header, body) = InHeader::read_from_prefix(request).ok()?;
        let len = usize::try_from(header.len).ok();
        let answer = match len == Some(request.len()) {
            true => self.answer(header, body)?,
            false => Err(Errno::INVAL),
        };
        let start = size_of::<OutHeader>();
        let (error, len) = match answer {
            Ok(bytes) => (0, start + bytes),
            Err(error) => (-error.raw_os_error(), start),
        };
        let header = OutHeader {
            len: u32::try_from(len).unwrap_or(0),
            error,
            unique: header.unique,
        };
        let reply = self.reply.get_mut(..len)?;
        header.write_to_prefix(reply).ok()?;
        Some(reply)
    }

    /// Serves a request. Writes the reply's body, and returns its length; `None` if the request has no reply.
    fn answer(&mut self, header: InHeader, body: &[u8]) -> Option<Answer> {
        let node = header.node;
        Some(match header.opcode {
            opcode::FORGET => {
                let (lookups, _) = u64::read_from_prefix(body).ok()?;
                self.tree.forget(node, lookups);
                return None;
            }
            opcode::BATCH_FORGET => {
                self.forget_batch(body);
                return None;
            }
            opcode::INIT => self.init(body),
            opcode::DESTROY => {
                self.tree.reset();
                Ok(0)
            }
            opcode::LOOKUP => self.look_up(node, body),
            opcode::GETATTR => self.metadata(node),
            opcode::READLINK => self.link(node),
            opcode::READ => self.read(node, body),
            opcode::READDIR => self.list(node, body, false),
            opcode::READDIRPLUS => self.list(node, body, true),
            opcode::STATFS => self.space(),
            other if self.is_writable => self.change(other, node, body),
            change if opcode::CHANGES.contains(&change) => Err(Errno::ROFS),
            // The driver then does without, as with OPEN and OPENDIR, which the answer to INIT announces.
            _ => Err(Errno::NOSYS),
        })
    }

    fn init(&mut self, body: &[u8]) -> Answer {
        let (asked, _) = InitIn::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        if (asked.major, asked.minor) < (abi::MAJOR, abi::MINOR) {
            return Err(Errno::PROTO);
        }
        self.tree.reset();
        let opens = match self.is_writable {
            // A file is there while it is open, also without a name.
            true => flag::BIG_WRITES,
            false => flag::NO_OPEN_SUPPORT,
        };
        let wanted = opens
            | flag::ASYNC_READ
            | flag::AUTO_INVAL_DATA
            | flag::DO_READDIRPLUS
            | flag::READDIRPLUS_AUTO
            | flag::PARALLEL_DIROPS
            | flag::CACHE_SYMLINKS
            | flag::NO_OPENDIR_SUPPORT;
        self.put(&InitOut {
            major: abi::MAJOR,
            minor: abi::MINOR,
            max_readahead: asked.max_readahead,
            flags: asked.flags & wanted,
            max_background: 64,
            congestion_threshold: 48,
            max_write: u32::try_from(MOST_CONTENT).unwrap_or(u32::MAX),
            time_gran: 1,
            ..InitOut::default()
        })
    }

    fn look_up(&mut self, parent: u64, body: &[u8]) -> Answer {
        let name = CStr::from_bytes_with_nul(body).map_err(|_| Errno::INVAL)?;
        let found = self.tree.look_up(parent, name)?;
        self.put(&entry(found))
    }

    fn metadata(&mut self, node: u64) -> Answer {
        let metadata = self.tree.metadata(node)?;
        self.put(&AttrOut {
            attr_valid: VALID,
            attr: attr(&metadata),
            ..AttrOut::default()
        })
    }

    fn link(&mut self, node: u64) -> Answer {
        let target = self.tree.link(node)?;
        let target = target.as_bytes();
        let to = self.body().get_mut(..target.len());
        to.ok_or(Errno::NAMETOOLONG)?.copy_from_slice(target);
        Ok(target.len())
    }

    fn read(&mut self, node: u64, body: &[u8]) -> Answer {
        let (asked, _) = ReadIn::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        let room = room(&mut self.reply, asked.size);
        match self.is_writable {
            true => self.tree.read_handle(asked.fh, asked.offset, room),
            false => self.tree.read(node, asked.offset, room),
        }
    }

    fn list(&mut self, node: u64, body: &[u8], plus: bool) -> Answer {
        let (asked, _) = ReadIn::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        let room = room(&mut self.reply, asked.size);
        let (mut filled, mut found) = (0, Vec::new());
        let listed = self.tree.list(node, asked.offset, |tree, entry| {
            match put_entry(&mut room[filled..], tree, node, entry, plus) {
                Some((bytes, node)) => {
                    filled += bytes;
                    found.extend(node);
                    ControlFlow::Continue(())
                }
                None => ControlFlow::Break(()),
            }
        });
        if let Err(error) = listed {
            // The reply names none of them, so the guest will send no FORGET for them.
            for node in found {
                self.tree.forget(node, 1);
            }
            return Err(error);
        }
        Ok(filled)
    }

    fn space(&mut self) -> Answer {
        let space = self.tree.space()?;
        let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        self.put(&StatfsOut {
            blocks: space.f_blocks,
            bfree: space.f_bfree,
            bavail: space.f_bavail,
            files: space.f_files,
            ffree: space.f_ffree,
            bsize: small(space.f_bsize),
            namelen: small(space.f_namemax),
            frsize: small(space.f_frsize),
            ..StatfsOut::default()
        })
    }

    fn forget_batch(&mut self, body: &[u8]) {
        let Ok((batch, mut rest)) = BatchForgetIn::read_from_prefix(body) else {
            return;
        };
        for _ in 0..batch.count {
            let Ok((one, after)) = ForgetOne::read_from_prefix(rest) else {
                return;
            };
            self.tree.forget(one.node, one.lookups);
            rest = after;
        }
    }

    fn body(&mut self) -> &mut [u8] {
        &mut self.reply[size_of::<OutHeader>()..]
    }

    fn put(&mut self, message: &(impl IntoBytes + zerocopy::Immutable)) -> Answer {
        message
            .write_to_prefix(self.body())
            .map_err(|_| Errno::INVAL)?;
        Ok(size_of_val(message))
    }
}

/// Returns the part of a reply for contents of this size.
fn room(reply: &mut [u8], size: u32) -> &mut [u8] {
    let size = usize::try_from(size).map_or(MOST_CONTENT, |size| size.min(MOST_CONTENT));
    &mut reply[size_of::<OutHeader>()..][..size]
}

/// Writes an entry of a listing, and looks it up if the listing has nodes. Returns its length and its node, or `None` if
/// it does not fit.
fn put_entry(
    room: &mut [u8],
    tree: &mut Tree,
    parent: u64,
    from: &Entry<'_>,
    plus: bool,
) -> Option<(usize, Option<u64>)> {
    let name = from.name.to_bytes();
    let start = if plus { size_of::<EntryOut>() } else { 0 };
    let named = start + size_of::<Dirent>();
    let len = (named + name.len()).next_multiple_of(8);
    let room = room.get_mut(..len)?;
    room.zero();
    let mut node = None;
    if plus {
        // `.` and `..` have no node here, and neither has a file that cannot be looked up.
        let found = tree.look_up(parent, from.name).ok();
        node = found.map(|(node, _)| node);
        found
            .map(entry)
            .unwrap_or_default()
            .write_to_prefix(room)
            .ok()?;
    }
    let dirent = Dirent {
        ino: from.ino,
        off: from.next,
        namelen: u32::try_from(name.len()).ok()?,
        kind: from.kind,
    };
    dirent.write_to_prefix(&mut room[start..]).ok()?;
    room[named..named + name.len()].copy_from_slice(name);
    Some((len, node))
}

fn entry((node, metadata): (u64, Metadata)) -> EntryOut {
    EntryOut {
        node,
        entry_valid: VALID,
        attr_valid: VALID,
        attr: attr(&metadata),
        ..EntryOut::default()
    }
}

fn attr(metadata: &Metadata) -> Attr {
    let stat = &metadata.stat;
    let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    Attr {
        ino: metadata.ino,
        size: stat.st_size.cast_unsigned(),
        blocks: stat.st_blocks.cast_unsigned(),
        atime: stat.st_atime.cast_unsigned(),
        mtime: stat.st_mtime.cast_unsigned(),
        ctime: stat.st_ctime.cast_unsigned(),
        atimensec: small(stat.st_atime_nsec),
        mtimensec: small(stat.st_mtime_nsec),
        ctimensec: small(stat.st_ctime_nsec),
        mode: stat.st_mode,
        nlink: small(stat.st_nlink),
        uid: stat.st_uid,
        gid: stat.st_gid,
        // The guest opens no devices of this file system.
        rdev: 0,
        blksize: small(stat.st_blksize.cast_unsigned()),
        flags: 0,
    }
}
