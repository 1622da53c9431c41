//! Cache of compiled code.
//!
//! NVRTC looks a compilation up before it compiles, by everything that the result depends on, and stores the result
//! afterwards. The native driver stores results in files, controlled by the environment (CUDA programming guide,
//! "CUDA environment variables": `CUDA_CACHE_DISABLE`, `CUDA_CACHE_PATH`, `CUDA_CACHE_MAXSIZE`). This cache obeys the
//! same variables: one file for each result, named by the hash of its inputs.
//!
//! The results are code that runs on the device for this user, so a folder that another user can write is no cache.

use std::ffi::CStr;
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, fstat, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use sha2::{Digest, Sha256};
use wormhole_connect::environment;

/// First bytes of a file; the hash of the result follows.
const MAGIC: [u8; 8] = *b"WHCOMP01";
const HEADER: usize = MAGIC.len() + size_of::<Hash>();
/// Default size limit, the native driver's for desktops and servers.
const DEFAULT_LIMIT: u64 = 1 << 30;
/// End of the name of a file that is being written.
const FRESH: &[u8] = b".fresh";

type Hash = [u8; 32];

/// Cache key: the hash of everything that a result depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question(Hash);

impl Question {
    /// Hashes the parts in order. Equal parts in equal order produce equal keys.
    pub fn new(numbers: &[u32], source: &[u8], words: &[&CStr]) -> Self {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update(bytes.len().to_le_bytes());
            hash.update(bytes);
        };
        for number in numbers {
            part(&number.to_le_bytes());
        }
        part(source);
        for word in words {
            part(word.to_bytes());
        }
        Self(hash.finalize().into())
    }

    fn file_name(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Folder of cached results.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    /// Maximum total size of all results, in bytes.
    limit: u64,
}

impl Store {
    /// Returns the cache that the environment selects, or `None` if `CUDA_CACHE_DISABLE` is set, no path is known, or the
    /// environment is that of a user with fewer rights.
    pub fn of_the_environment() -> Option<Self> {
        if environment::is_of_another_user() {
            return None;
        }
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if variable("CUDA_CACHE_DISABLE").is_some_and(|value| value != "0") {
            return None;
        }
        let folder = match variable("CUDA_CACHE_PATH") {
            Some(path) => PathBuf::from(path),
            None => PathBuf::from(variable("HOME")?).join(".nv/ComputeCache"),
        };
        let limit = variable("CUDA_CACHE_MAXSIZE")
            .and_then(|value| value.to_str()?.parse().ok())
            .unwrap_or(DEFAULT_LIMIT);
        Some(Self {
            folder: folder.join("wormhole"),
            limit,
        })
    }

    /// Opens the folder.
    ///
    /// # Errors
    /// As `open`, or the folder is a link, of another user, or one that others can write.
    fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = openat(CWD, &self.folder, flags, Mode::empty())?;
        let facts = fstat(&folder)?;
        let is_writable = Mode::from_raw_mode(facts.st_mode).intersects(Mode::WGRP | Mode::WOTH);
        if facts.st_uid != geteuid().as_raw() || is_writable {
            return Err(io::Error::other("others can write to the cache's folder"));
        }
        Ok(folder)
    }

    /// Returns the cached result of a key. Removes a damaged file and returns `None`.
    pub fn find(&self, question: &Question) -> Option<Vec<u8>> {
        let (folder, name) = (self.open().ok()?, question.file_name());
        // A pipe without a writer is not waited for.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut opened = File::from(openat(&folder, &name, flags, Mode::empty()).ok()?);
        if !opened.metadata().ok()?.is_file() {
            return None;
        }
        let mut file = Vec::new();
        opened.read_to_end(&mut file).ok()?;
        if !is_whole(&file) {
            let _ = unlinkat(&folder, &name, AtFlags::empty());
            return None;
        }
        // The modification time makes eviction least recently used.
        let _ = opened.set_modified(SystemTime::now());
        file.drain(..HEADER);
        Some(file)
    }

    /// Stores a result, unless it exceeds the limit alone.
    pub fn insert(&self, question: &Question, result: &[u8]) -> io::Result<()> {
        if (HEADER + result.len()) as u64 > self.limit {
            return Ok(());
        }
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&self.folder)?;
        let folder = self.open()?;
        let (fresh, file) = create(&folder)?;
        let written = write(file, result);
        // The rename is atomic: a reader finds a whole file or none.
        let name = question.file_name();
        let placed = written.and_then(|()| Ok(renameat(&folder, &fresh, &folder, &name)?));
        if placed.is_err() {
            let _ = unlinkat(&folder, &fresh, AtFlags::empty());
        }
        placed?;
        self.make_room(&folder, name.as_bytes())
    }

    /// Removes the least recently used files until the total is within the limit, but not the one of name `newest`: another
    /// file can have the same time. Files with other names than this module gives stay, and do not count.
    fn make_room(&self, folder: &OwnedFd, newest: &[u8]) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in Dir::read_from(folder)?.flatten() {
            let name = entry.file_name();
            let bytes = name.to_bytes();
            let is_result = bytes.len() == 2 * size_of::<Hash>()
                && bytes.iter().all(|byte| byte.is_ascii_hexdigit());
            if !is_result && !bytes.ends_with(FRESH) {
                continue;
            }
            let Ok(facts) = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            if FileType::from_raw_mode(facts.st_mode) == FileType::RegularFile {
                let modified = (facts.st_mtime, facts.st_mtime_nsec);
                files.push((modified, facts.st_size.unsigned_abs(), name.to_owned()));
            }
        }
        let mut bytes: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        files.sort();
        files.retain(|(_, _, name)| name.to_bytes() != newest);
        for (_, length, name) in files {
            if bytes <= self.limit {
                break;
            }
            match unlinkat(folder, &name, AtFlags::empty()) {
                // Another process may have removed it first.
                Ok(()) | Err(Errno::NOENT) => bytes -= length,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Creates a file with a name of its own.
fn create(folder: &OwnedFd) -> io::Result<(Vec<u8>, File)> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    loop {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut name = format!("{}.{number}", std::process::id()).into_bytes();
        name.extend_from_slice(FRESH);
        match openat(folder, &name, flags, Mode::RUSR | Mode::WUSR) {
            // An earlier process with this number has left it.
            Err(Errno::EXIST) => {}
            opened => return Ok((name, opened?.into())),
        }
    }
}

fn write(mut file: File, result: &[u8]) -> io::Result<()> {
    file.write_all(&MAGIC)?;
    file.write_all(&Sha256::digest(result))?;
    file.write_all(result)
}

fn is_whole(file: &[u8]) -> bool {
    file.split_at_checked(HEADER).is_some_and(|(header, rest)| {
        let (magic, hash) = header.split_at(MAGIC.len());
        magic == MAGIC && hash == Sha256::digest(rest).as_slice()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    /// Temporary folder of one test, removed on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder =
                std::env::temp_dir().join(format!("compilations-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            Self(folder)
        }

        fn store(&self, limit: usize) -> Store {
            Store {
                folder: self.0.clone(),
                limit: limit as u64,
            }
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn question(source: &str, options: &CStr) -> Question {
        Question::new(&[2, 90], source.as_bytes(), &[options, c"HOST64"])
    }

    #[test]
    fn what_is_kept_is_found_by_the_same_question_alone() {
        let folder = Folder::new("found");
        let store = folder.store(1 << 20);
        let asked = question("source", c"-arch=compute_90");
        assert_eq!(store.find(&asked), None);
        store.insert(&asked, b"result").unwrap();
        assert_eq!(store.find(&asked).as_deref(), Some(&b"result"[..]));
        for other in [
            question("source ", c"-arch=compute_90"),
            question("source", c"-arch=compute_80"),
            Question::new(&[1, 90], b"source", &[c"-arch=compute_90", c"HOST64"]),
            Question::new(&[2, 90], b"source", &[c"-arch=compute_90HOST64", c""]),
        ] {
            assert_eq!(store.find(&other), None);
        }
        store.insert(&asked, b"").unwrap();
        assert_eq!(store.find(&asked).as_deref(), Some(&b""[..]));
    }

    #[test]
    fn a_damaged_file_is_no_result_and_goes() {
        let folder = Folder::new("damaged");
        let store = folder.store(1 << 20);
        let asked = question("source", c"");
        let path = folder.0.join(asked.file_name());
        store.insert(&asked, b"result").unwrap();
        let whole = fs::read(&path).unwrap();
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        for damaged in [&changed[..], &whole[..whole.len() - 1], &whole[..5], b""] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(store.find(&asked), None);
            assert!(!path.exists());
        }
    }

    #[test]
    fn what_was_not_used_for_longest_makes_room() {
        let folder = Folder::new("room");
        let result = [7; 100];
        let store = folder.store(3 * (HEADER + result.len()));
        let asked: Vec<Question> = (0..5)
            .map(|number| question(&number.to_string(), c""))
            .collect();
        let age = |question: &Question, seconds| {
            let path = folder.0.join(question.file_name());
            let file = File::options().append(true).open(path).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds))
                .unwrap();
        };
        for (number, asked) in asked[..3].iter().enumerate() {
            store.insert(asked, &result).unwrap();
            age(asked, number as u64);
        }
        // The lookup refreshes the oldest result, so the next oldest is evicted.
        assert!(store.find(&asked[0]).is_some());
        store.insert(&asked[3], &result).unwrap();
        assert!(store.find(&asked[0]).is_some() && store.find(&asked[3]).is_some());
        assert!(store.find(&asked[1]).is_none() && store.find(&asked[2]).is_some());
        // A result above the limit is not stored and evicts nothing.
        store.insert(&asked[4], &[7; 1000]).unwrap();
        assert!(store.find(&asked[4]).is_none() && store.find(&asked[3]).is_some());
        // The result that is stored stays, whatever the times of the others are.
        let in_a_century = 4_900_000_000;
        for asked in [&asked[0], &asked[2], &asked[3]] {
            age(asked, in_a_century);
        }
        store.insert(&asked[1], &result).unwrap();
        assert!(store.find(&asked[1]).is_some());
    }

    #[test]
    fn a_folder_that_others_can_write_is_no_cache() {
        let folder = Folder::new("foreign");
        let store = folder.store(1 << 20);
        let asked = question("source", c"");
        store.insert(&asked, b"result").unwrap();
        let mode = |mode| fs::set_permissions(&folder.0, fs::Permissions::from_mode(mode)).unwrap();
        let is_used = |store: &Store| {
            let (found, inserted) = (store.find(&asked), store.insert(&asked, b"result"));
            assert_eq!(found.is_some(), inserted.is_ok());
            found.is_some()
        };
        let made = fs::metadata(&folder.0).unwrap().permissions().mode();
        assert_eq!(made & 0o777, 0o700);
        for (bits, expected) in [(0o755, true), (0o770, false), (0o707, false), (0o700, true)] {
            mode(bits);
            assert_eq!(is_used(&store), expected, "{bits:o}");
        }
        let link = Folder::new("foreign-link");
        symlink(&folder.0, &link.0).unwrap();
        assert!(!is_used(&link.store(1 << 20)));
        fs::remove_file(&link.0).unwrap();
        if geteuid().is_root() {
            chown(&folder.0, Some(65534), None).unwrap();
            assert!(!is_used(&store));
        }
    }

    #[test]
    fn what_is_no_result_is_neither_read_nor_waited_for_nor_removed() {
        let folder = Folder::new("others");
        let store = folder.store(HEADER + 4);
        let (pipe, link) = (question("pipe", c""), question("link", c""));
        store.insert(&question("first", c""), b"1").unwrap();
        let notes = folder.0.join("notes");
        fs::write(&notes, [7; 1000]).unwrap();
        let place = folder.0.join(pipe.file_name());
        rustix::fs::mknodat(CWD, &place, FileType::Fifo, Mode::RWXU, 0).unwrap();
        symlink(&notes, folder.0.join(link.file_name())).unwrap();
        assert!(store.find(&pipe).is_none() && store.find(&link).is_none());
        // A file of an earlier process with this number.
        let left = format!("{}.0.fresh", std::process::id());
        symlink(&notes, folder.0.join(left)).unwrap();
        let second = question("second", c"");
        store.insert(&second, b"2").unwrap();
        assert_eq!(store.find(&second).as_deref(), Some(&b"2"[..]));
        assert_eq!(fs::read(&notes).unwrap(), [7; 1000]);
        // A result takes the place of what is there.
        store.insert(&link, b"3").unwrap();
        assert_eq!(store.find(&link).as_deref(), Some(&b"3"[..]));
        assert_eq!(fs::read(&notes).unwrap(), [7; 1000]);
    }
}
