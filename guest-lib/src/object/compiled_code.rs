//! Cache of compiled code.
//!
//! NVRTC looks a compilation up before it compiles, by everything that the result depends on, and stores the result
//! afterwards. The native driver stores results in files, controlled by the environment (CUDA programming guide,
//! "CUDA environment variables": `CUDA_CACHE_DISABLE`, `CUDA_CACHE_PATH`, `CUDA_CACHE_MAXSIZE`). This cache obeys the
//! same variables: one file for each result, named by the hash of its inputs.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

/// First bytes of a file; the hash of the result follows.
const MAGIC: [u8; 8] = *b"WHCOMP01";
const HEADER: usize = MAGIC.len() + size_of::<Hash>();
/// Default size limit, the native driver's for desktops and servers.
const DEFAULT_LIMIT: u64 = 1 << 30;

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
    /// Opens the cache that the environment selects, or returns `None` if `CUDA_CACHE_DISABLE` is set or no path is
    /// known.
    pub fn of_the_environment() -> Option<Self> {
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

    /// Returns the cached result of a key. Removes a damaged file and returns `None`.
    pub fn find(&self, question: &Question) -> Option<Vec<u8>> {
        let path = self.folder.join(question.file_name());
        let mut file = fs::read(&path).ok()?;
        if !is_whole(&file) {
            let _ = fs::remove_file(&path);
            return None;
        }
        // The modification time makes eviction least recently used.
        if let Ok(opened) = File::options().append(true).open(&path) {
            let _ = opened.set_modified(SystemTime::now());
        }
        file.drain(..HEADER);
        Some(file)
    }

    /// Stores a result, unless it exceeds the limit alone.
    pub fn insert(&self, question: &Question, result: &[u8]) -> std::io::Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        if (HEADER + result.len()) as u64 > self.limit {
            return Ok(());
        }
        fs::create_dir_all(&self.folder)?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}.{number}.fresh", std::process::id());
        let fresh = self.folder.join(name);
        let written = File::create(&fresh).and_then(|mut file| {
            file.write_all(&MAGIC)?;
            file.write_all(&Sha256::digest(result))?;
            file.write_all(result)
        });
        // The rename is atomic: a reader finds a whole file or none.
        let placed =
            written.and_then(|()| fs::rename(&fresh, self.folder.join(question.file_name())));
        if placed.is_err() {
            let _ = fs::remove_file(&fresh);
        }
        placed?;
        self.make_room()
    }

    /// Removes the least recently used files until the total is within the limit.
    fn make_room(&self) -> std::io::Result<()> {
        let mut files: Vec<(SystemTime, u64, PathBuf)> = fs::read_dir(&self.folder)?
            .flatten()
            .filter_map(|entry| {
                let facts = entry.metadata().ok()?;
                Some((facts.modified().ok()?, facts.len(), entry.path()))
            })
            .collect();
        let mut bytes: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        files.sort();
        for (_, length, path) in files {
            if bytes <= self.limit {
                break;
            }
            remove(&path)?;
            bytes -= length;
        }
        Ok(())
    }
}

/// Removes a file. Another process may have removed it first.
fn remove(path: &Path) -> std::io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn is_whole(file: &[u8]) -> bool {
    file.split_at_checked(HEADER).is_some_and(|(header, rest)| {
        let (magic, hash) = header.split_at(MAGIC.len());
        magic == MAGIC && hash == Sha256::digest(rest).as_slice()
    })
}

#[cfg(test)]
mod tests {
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
    }
}
