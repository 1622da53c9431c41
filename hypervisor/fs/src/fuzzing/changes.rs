//! A guest that may write. Nothing of what lies outside may change by its requests.
//!
//! A step of 128 and more is a change. Steps 126 and 127 are the host's, which moves a file out and may remove it there.
//! The others are those of a guest that reads.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use zerocopy::{FromBytes, IntoBytes};

use super::{MARK, NAMES, Play, Steps, TIME, is_folder};
use crate::abi::{
    EntryOut, HandleIn, InHeader, OpenIn, OpenOut, ReadIn, RenameIn, SetattrIn, WriteIn, opcode,
    valid,
};
use crate::server::Server;

/// Names of files that the host moves.
const MOVED: [&str; 4] = ["file", "new", "a", "b"];

/// First of the steps by which the host moves files.
const MOVES_OF_FILES: u8 = 126;

/// Path, mode, times and contents or target of a file.
type Seen = (PathBuf, u32, i64, i64, Vec<u8>);

/// Plays an input of a guest that may write, as [`super::play`] does.
///
/// # Errors
/// The host cannot set the scene.
///
/// # Panics
/// A reply is not in order, or tells of what lies outside, or what lies outside changes.
pub fn play_changes(scratch: &Path, input: &[u8]) -> io::Result<usize> {
    let mut play = Play::set_up(scratch, Server::writable, is_sent)?;
    let mut steps = Steps(input);
    while let Some(&step) = steps.0.first() {
        let before = outside(&play.beyond)?;
        let is_host = step < 128 && (step >= MOVES_OF_FILES || step % 10 < 2);
        let more = match step {
            128.. => play.change(&mut steps),
            MOVES_OF_FILES.. => play.move_file_out(&mut steps)?,
            // The guest may have taken away what the host wants to move.
            _ if is_host => play.step(&mut steps).unwrap_or(None),
            _ => play.step(&mut steps)?,
        };
        if more.is_none() {
            break;
        }
        if !is_host {
            assert_eq!(
                outside(&play.beyond)?,
                before,
                "a request changed what is outside"
            );
        }
    }
    Ok(play.answered)
}

/// Holds back requests by which a file of the guest's would look like one outside.
fn is_sent(request: &[u8]) -> bool {
    let has = |mark: &[u8]| request.windows(mark.len()).any(|part| part == mark);
    let opcode = InHeader::read_from_prefix(request).map(|(header, _)| header.opcode);
    match opcode {
        Ok(opcode::LOOKUP) => true,
        _ => !has(MARK.as_bytes()) && !has(&TIME.to_ne_bytes()),
    }
}

/// Returns all that lies outside.
fn outside(folder: &Path) -> io::Result<Vec<Seen>> {
    let mut all = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let data = path.symlink_metadata()?;
            let contents = match () {
                () if data.is_file() => fs::read(&path)?,
                () if data.is_symlink() => {
                    fs::read_link(&path)?.into_os_string().into_encoded_bytes()
                }
                () => Vec::new(),
            };
            if data.is_dir() {
                folders.push(path.clone());
            }
            all.push((path, data.mode(), data.mtime(), data.mtime_nsec(), contents));
        }
    }
    all.sort();
    Ok(all)
}

impl Play {
    /// Moves a file out that has no name but this one, and marks it. Removes it there if it is one already.
    fn move_file_out(&mut self, steps: &mut Steps<'_>) -> io::Result<Option<()>> {
        let Some([_, folder, name]) = steps.next() else {
            return Ok(None);
        };
        let folder = ["", "a", "a/b", "a/b/c"][usize::from(folder) % 4];
        let name = MOVED[usize::from(name) % MOVED.len()];
        let outside = self
            .beyond
            .join(format!("moved_{}_{name}", folder.replace('/', "_")));
        if outside.symlink_metadata().is_ok() {
            fs::remove_file(outside)?;
            return Ok(Some(()));
        }
        // A link of the host's may stand for the folder, or for one that leads to it.
        let is_inside = Path::new(folder)
            .ancestors()
            .all(|part| is_folder(&self.root.join(part)));
        let inside = self.root.join(folder).join(name);
        let data = inside.symlink_metadata();
        if !is_inside || !data.is_ok_and(|data| data.is_file() && data.nlink() == 1) {
            return Ok(Some(()));
        }
        fs::rename(inside, &outside)?;
        fs::write(&outside, MARK)?;
        let file = File::open(outside)?;
        file.set_modified(UNIX_EPOCH + Duration::from_secs(TIME))?;
        Ok(Some(()))
    }

    /// Sends a request that changes something, or opens or closes a file.
    fn change(&mut self, steps: &mut Steps<'_>) -> Option<()> {
        let [step, first, second, third] = steps.next()?;
        // No name of what lies outside, which a listing would tell of.
        let names = NAMES.map(|name| {
            if name == MARK.as_bytes() {
                b"new"
            } else {
                name
            }
        });
        let name = |number: u8| [names[usize::from(number) % names.len()], b"\0"].concat();
        let (node, other) = (self.node(first), self.node(third));
        let place = usize::from(third);
        let handle = *self
            .handles
            .get(place % self.handles.len().max(1))
            .unwrap_or(&0);
        // Its owner can always reach it.
        let mode = 0o700 | u32::from(third) << 5;
        match step % 16 {
            0..3 => {
                let asked = [u32::from(third) % 4, libc::S_IFREG | mode, 0, 0];
                let body = [asked.as_bytes(), &name(second)].concat();
                let made = self.ask(opcode::CREATE, node, &body);
                self.learn(made.as_deref());
                let opened = made.and_then(|body| {
                    let (opened, _) =
                        OpenOut::read_from_prefix(&body[size_of::<EntryOut>()..]).ok()?;
                    Some(opened.fh)
                });
                self.handles.extend(opened);
            }
            3 | 4 => {
                let asked = OpenIn {
                    flags: u32::from(third) % 4,
                    mode: 0,
                };
                let opened = self.ask(opcode::OPEN, node, asked.as_bytes());
                let opened = opened.and_then(|body| OpenOut::read_from_bytes(&body).ok());
                self.handles.extend(opened.map(|opened| opened.fh));
            }
            5 | 6 => {
                let content = vec![first; usize::from(second)];
                let asked = WriteIn {
                    fh: handle,
                    offset: 1 << (first % 12),
                    size: u32::from(second),
                    ..WriteIn::default()
                };
                self.ask(opcode::WRITE, node, &[asked.as_bytes(), &content].concat());
            }
            7 => {
                let asked = ReadIn {
                    fh: handle,
                    size: 4096,
                    ..ReadIn::default()
                };
                self.ask(opcode::READ, node, asked.as_bytes());
            }
            8 => {
                let asked = HandleIn {
                    fh: handle,
                    ..HandleIn::default()
                };
                let opcode =
                    [opcode::RELEASE, opcode::FSYNC, opcode::FSYNCDIR][usize::from(second) % 3];
                self.ask(opcode, node, asked.as_bytes());
            }
            9 => {
                let body = [[mode, 0].as_bytes(), &name(second)].concat();
                let made = self.ask(opcode::MKDIR, node, &body);
                self.learn(made.as_deref());
            }
            10 if third < 128 => {
                let body = [name(second), b"../beyond/file\0".to_vec()].concat();
                let made = self.ask(opcode::SYMLINK, node, &body);
                self.learn(made.as_deref());
            }
            10 => {
                let old = self.node(third - 128);
                let body = [&old.to_ne_bytes()[..], &name(second)].concat();
                let made = self.ask(opcode::LINK, node, &body);
                self.learn(made.as_deref());
            }
            11 => {
                let opcode = [opcode::UNLINK, opcode::RMDIR][usize::from(third) % 2];
                self.ask(opcode, node, &name(second));
            }
            12 | 13 => {
                let [last] = steps.next().unwrap_or_default();
                let asked = RenameIn {
                    folder: other,
                    flags: u32::from(last >> 4),
                    padding: 0,
                };
                let body = [asked.as_bytes(), &name(second), &name(last)].concat();
                self.ask(opcode::RENAME2, node, &body);
            }
            14 => {
                let asked = SetattrIn {
                    valid: u32::from(second) | (u32::from(third % 2) * valid::MTIME_NOW),
                    fh: handle,
                    size: u64::from(third),
                    mode,
                    ..SetattrIn::default()
                };
                self.ask(opcode::SETATTR, node, asked.as_bytes());
            }
            _ => {
                let body = [
                    [u32::from(second) << 8 | mode, 0, 0, 0].as_bytes(),
                    &name(third),
                ]
                .concat();
                let made = self.ask(opcode::MKNOD, node, &body);
                self.learn(made.as_deref());
            }
        }
        Some(())
    }

    /// Remembers the node that a reply names.
    fn learn(&mut self, body: Option<&[u8]>) {
        let entry = body.and_then(|body| EntryOut::read_from_prefix(body).ok());
        self.nodes.extend(entry.map(|(entry, _)| entry.node));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_leaves_what_is_outside() {
        let scratch = tempfile::tempdir().expect("a folder");
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/fuse_changes");
        let mut answered = 0;
        for entry in fs::read_dir(corpus).expect("a corpus") {
            let path = entry.expect("an entry").path();
            if path.is_file() {
                let input = fs::read(&path).expect("a seed");
                answered += play_changes(scratch.path(), &input).expect("played");
            }
        }
        assert!(answered > 15, "{answered}");
    }

    #[test]
    fn changes_in_any_order_leave_what_is_outside() {
        let scratch = tempfile::tempdir().expect("a folder");
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |below: u16| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            u8::try_from(u16::from(state.to_le_bytes()[3]) % below).unwrap_or(0)
        };
        let mut answered = 0;
        for _ in 0..35 {
            let mut input = Vec::new();
            for _ in 0..120 {
                match random(7) {
                    0 => input.extend([random(2), random(3), random(2)]),
                    6 => input.extend([126, random(4), random(4)]),
                    1 => input.extend([2, random(16), random(12)]),
                    _ => input.extend([128 + random(16), random(16), random(256), random(16)]),
                }
            }
            answered += play_changes(scratch.path(), &input).expect("played");
        }
        assert!(answered > 300, "{answered}");
    }
}
