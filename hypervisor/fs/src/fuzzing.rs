//! A hostile guest and a busy host, for the fuzz targets: the guest sends any request, and the host moves folders out of
//! the exported one and back between them. A guest may read alone, or write as well: [`changes`].
//!
//! The input is a list of steps: a byte for the step, then its arguments. All that lies outside has a mark, as its
//! contents, name, link or time, which no reply may contain. A file that is moved gets or loses it.

mod changes;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use zerocopy::{FromBytes, IntoBytes};

pub use self::changes::play_changes;
use crate::abi::{EntryOut, InHeader, OutHeader, ROOT, ReadIn, opcode};
use crate::server::Server;
use crate::tree::Tree;

/// Contents, name and link of what lies outside.
const MARK: &str = "#outside#";
/// Time of a change outside, in seconds. No message of the guest's that a reply repeats can have these bytes.
const TIME: u64 = 0x3_4d41_524b;
const INSIDE: &str = "inside";
/// Folders that the host moves, each with a file and a link.
const FOLDERS: [&str; 3] = ["a", "a/b", "a/b/c"];
const NAMES: [&[u8]; 12] = [
    b"a",
    b"b",
    b"c",
    b"file",
    b"link",
    b"elsewhere",
    b"..",
    b".",
    b"",
    b"a/b",
    b"#outside#",
    b"/etc",
];
/// Requests with a body of `ReadIn`, and others that name a node alone.
const OPCODES: [u32; 8] = [
    opcode::READ,
    opcode::READDIR,
    opcode::READDIRPLUS,
    opcode::GETATTR,
    opcode::READLINK,
    opcode::STATFS,
    opcode::INIT,
    opcode::DESTROY,
];
/// Most bytes of an input that a request takes as they are, which leaves bytes for other steps.
const LONGEST: usize = 64;
/// Few, so that inputs reach the bound.
const NODES: usize = 24;

/// Plays an input of a guest that may read, below `scratch`, which it empties first. Returns the number of requests that
/// were answered without an error.
///
/// # Errors
/// A call of the host's file system fails.
///
/// # Panics
/// A reply is malformed, or contains data from outside the folder.
pub fn play(scratch: &Path, input: &[u8]) -> io::Result<usize> {
    let mut play = Play::set_up(scratch, Server::new, |_| true)?;
    let mut steps = Steps(input);
    while play.step(&mut steps)?.is_some() {}
    Ok(play.answered)
}

/// Creates the folders below `scratch`, which it empties first.
fn scene(scratch: &Path) -> io::Result<(PathBuf, PathBuf)> {
    let (root, beyond) = (scratch.join("root"), scratch.join("beyond"));
    for folder in [&root, &beyond] {
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir(folder)?,
        }
    }
    fs::create_dir_all(root.join("a/b/c"))?;
    for folder in ["", "a", "a/b", "a/b/c"] {
        furnish(&root.join(folder), INSIDE)?;
    }
    symlink("../beyond", root.join("elsewhere"))?;
    mark(&beyond)?;
    Ok((root, beyond))
}

/// The rest of an input.
struct Steps<'a>(&'a [u8]);

impl<'a> Steps<'a> {
    fn next<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (now, later) = self.0.split_first_chunk()?;
        self.0 = later;
        Some(*now)
    }

    fn take(&mut self, most: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(most.min(self.0.len()));
        self.0 = later;
        now
    }
}

struct Play {
    root: PathBuf,
    beyond: PathBuf,
    server: Server,
    nodes: Vec<u64>,
    /// Files that the guest has open.
    handles: Vec<u64>,
    unique: u64,
    answered: usize,
    /// Whether the guest sends a request.
    is_sent: fn(&[u8]) -> bool,
}

impl Play {
    fn set_up(
        scratch: &Path,
        server: impl FnOnce(Tree) -> Server,
        is_sent: fn(&[u8]) -> bool,
    ) -> io::Result<Self> {
        let (root, beyond) = scene(scratch)?;
        let server = server(Tree::open(&root, NODES)?);
        Ok(Self {
            root,
            beyond,
            server,
            nodes: vec![ROOT],
            handles: Vec::new(),
            unique: 0,
            answered: 0,
            is_sent,
        })
    }

    fn step(&mut self, steps: &mut Steps<'_>) -> io::Result<Option<()>> {
        let Some([step, first, second]) = steps.next() else {
            return Ok(None);
        };
        let node = self.node(first);
        match step % 10 {
            0 => self.move_out(first, second % 2 == 0)?,
            1 => self.move_in(first)?,
            2 | 3 => {
                let name = NAMES[usize::from(second) % NAMES.len()];
                self.look_up(node, name);
            }
            4 | 5 => {
                let [offset, size] = steps.next().unwrap_or_default();
                let asked = ReadIn {
                    // Up to the last offset there is.
                    offset: (1 << (offset % 64)) - u64::from(offset > 127),
                    size: 1 << (size % 32),
                    ..ReadIn::default()
                };
                self.ask(
                    OPCODES[usize::from(second) % OPCODES.len()],
                    node,
                    asked.as_bytes(),
                );
            }
            6 => _ = self.ask(opcode::FORGET, node, &u64::from(second).to_ne_bytes()),
            7 => {
                let [other] = steps.next().unwrap_or_default();
                let batch = [u64::from(second), node, 1, self.node(other), u64::MAX];
                self.ask(opcode::BATCH_FORGET, 0, batch.as_bytes());
            }
            8 => {
                _ = self.ask(
                    second.into(),
                    node,
                    steps.take(usize::from(first) % LONGEST),
                )
            }
            _ => _ = self.send(steps.take(usize::from(first) % LONGEST)),
        }
        Ok(Some(()))
    }

    /// Returns a node that the guest knows, or one that it guesses.
    fn node(&self, number: u8) -> u64 {
        match number {
            0..128 => self.nodes[usize::from(number) % self.nodes.len()],
            _ => u64::from(number - 128),
        }
    }

    fn look_up(&mut self, parent: u64, name: &[u8]) {
        let body = self.ask(opcode::LOOKUP, parent, &[name, b"\0"].concat());
        if let Some(body) = body
            && let Ok((entry, _)) = EntryOut::read_from_prefix(&body)
        {
            self.nodes.push(entry.node);
        }
    }

    /// Sends a request, and returns the reply's body if it is no error.
    fn ask(&mut self, opcode: u32, node: u64, body: &[u8]) -> Option<Vec<u8>> {
        self.unique += 1;
        let header = InHeader {
            len: u32::try_from(size_of::<InHeader>() + body.len()).ok()?,
            opcode,
            unique: self.unique,
            node,
            uid: 0,
            gid: 0,
            pid: 0,
            extension: 0,
        };
        self.send(&[header.as_bytes(), body].concat())
    }

    fn send(&mut self, request: &[u8]) -> Option<Vec<u8>> {
        if !(self.is_sent)(request) {
            return None;
        }
        let reply = self.server.serve(request)?;
        let (header, body) = OutHeader::read_from_prefix(reply).expect("a header");
        assert_eq!(header.len as usize, reply.len(), "the length of a reply");
        assert!((-4095..=0).contains(&header.error), "the error of a reply");
        assert!(header.error == 0 || body.is_empty(), "a body of an error");
        for mark in [MARK.as_bytes(), &TIME.to_ne_bytes()] {
            let tells = body.windows(mark.len()).any(|part| part == mark);
            assert!(
                !tells,
                "request {request:?} tells of what is outside: {body:?}"
            );
        }
        if header.error != 0 {
            return None;
        }
        self.answered += 1;
        Some(body.to_vec())
    }

    /// Moves a folder out, if it is inside. A link may take its place.
    fn move_out(&mut self, which: u8, has_link: bool) -> io::Result<()> {
        let Some((inside, outside)) = self.places(which) else {
            return Ok(());
        };
        if !is_folder(&inside) || is_folder(&outside) {
            return Ok(());
        }
        fs::rename(&inside, &outside)?;
        mark(&outside)?;
        match has_link {
            true => symlink(&outside, inside),
            false => Ok(()),
        }
    }

    /// Moves a folder back, if it is outside.
    fn move_in(&mut self, which: u8) -> io::Result<()> {
        let Some((inside, outside)) = self.places(which) else {
            return Ok(());
        };
        if !is_folder(&outside) || is_folder(&inside) {
            return Ok(());
        }
        unmark(&outside)?;
        match fs::remove_file(&inside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => fs::rename(outside, inside),
        }
    }

    /// Returns a folder's places inside and outside; `None` if its parent is not inside.
    fn places(&self, which: u8) -> Option<(PathBuf, PathBuf)> {
        let which = usize::from(which) % FOLDERS.len();
        let mut parents = FOLDERS[..which].iter().map(|name| self.root.join(name));
        let name = FOLDERS[which];
        let outside = self.beyond.join(name.replace('/', "_"));
        parents
            .all(|parent| is_folder(&parent))
            .then(|| (self.root.join(name), outside))
    }
}

fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| found.is_dir())
}

/// Writes the file and the link of a folder.
fn furnish(folder: &Path, text: &str) -> io::Result<()> {
    let [file, link] = ["file", "link"].map(|name| folder.join(name));
    clear(&file)?;
    clear(&link)?;
    fs::write(file, text)?;
    symlink(text, link)
}

/// Removes what is at a path. A guest that may write can have made it any kind of file.
fn clear(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        found => found.and_then(|_| fs::remove_file(path)),
    }
}

/// Returns the folders in a folder.
fn folders_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries: Vec<_> = fs::read_dir(folder)?.collect::<io::Result<_>>()?;
    let mut folders: Vec<_> = entries.iter().map(fs::DirEntry::path).collect();
    folders.retain(|path| is_folder(path));
    Ok(folders)
}

/// Marks a folder outside and all below it. Files that have another name are removed: that may be inside, and then the
/// guest may change them.
fn mark(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let data = entry.metadata()?;
        if data.is_file() && data.nlink() > 1 {
            fs::remove_file(entry.path())?;
        }
    }
    for inner in folders_in(folder)? {
        mark(&inner)?;
    }
    furnish(folder, MARK)?;
    fs::write(folder.join(MARK), MARK)?;
    let time = UNIX_EPOCH + Duration::from_secs(TIME);
    for path in [folder.join("file"), folder.join(MARK), folder.to_path_buf()] {
        File::open(path)?.set_modified(time)?;
    }
    Ok(())
}

/// Takes the marks off a folder and all below it.
fn unmark(folder: &Path) -> io::Result<()> {
    for inner in folders_in(folder)? {
        unmark(&inner)?;
    }
    furnish(folder, INSIDE)?;
    clear(&folder.join(MARK))?;
    for path in [folder.join("file"), folder.to_path_buf()] {
        File::open(path)?.set_modified(UNIX_EPOCH)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seed(name: &str) -> PathBuf {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/fuse_requests");
        corpus.join(name)
    }

    #[test]
    fn the_corpus_tells_of_nothing_outside() {
        let scratch = tempfile::tempdir().expect("a folder");
        let mut answered = 0;
        for entry in fs::read_dir(seed("")).expect("a corpus") {
            let path = entry.expect("an entry").path();
            if path.is_file() {
                let input = fs::read(&path).expect("a seed");
                answered += play(scratch.path(), &input).expect("played");
            }
        }
        assert!(answered > 20, "{answered}");
    }

    #[test]
    fn steps_in_any_order_tell_of_nothing_outside() {
        let scratch = tempfile::tempdir().expect("a folder");
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut random = |below: u8| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3] % below
        };
        let walk = fs::read(seed("walk")).expect("a seed");
        let mut answered = 0;
        for _ in 0..30 {
            let mut input = walk.clone();
            for _ in 0..100 {
                let step = random(8);
                input.extend([step, random(16), random(12)]);
                if matches!(step, 4 | 5) {
                    // The start of a file or of a listing.
                    input.extend([128, 12]);
                }
            }
            answered += play(scratch.path(), &input).expect("played");
        }
        assert!(answered > 300, "{answered}");
    }
}
