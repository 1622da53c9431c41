//! Finds the shared libraries of a program on this machine as the dynamic loader does (ld.so(8)), without running
//! anything.
//!
//! Ignores variants of libraries for newer processors (glibc-hwcaps), since the program may run on another
//! machine.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use object::Endianness;
use object::elf::{DT_NEEDED, DT_RPATH, DT_RUNPATH, DT_SONAME, DT_STRSZ, DT_STRTAB};
use object::elf::{EM_X86_64, ET_DYN, ET_EXEC, FileHeader64, PT_LOAD};
use object::read::StringTable;
use object::read::elf::{Dyn, FileHeader, ProgramHeader};

use crate::error::{ImageError, io};

/// Folders that the loader searches last.
const DEFAULT_FOLDERS: [&str; 6] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
];

/// Cache of the loader, with the libraries in the folders of `/etc/ld.so.conf`.
pub const CACHE: &str = "/etc/ld.so.cache";

/// Search paths for libraries.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Folders of LD_LIBRARY_PATH.
    pub library_path: Vec<PathBuf>,
    /// Names of libraries that the target machine provides, which are not searched here.
    pub provided: BTreeSet<String>,
    /// Names and paths in the loader's cache.
    pub cache: Vec<(String, PathBuf)>,
}

/// Dynamic linking information of an ELF file.
#[derive(Debug)]
struct Object {
    path: PathBuf,
    interpreter: Option<PathBuf>,
    needed: Vec<String>,
    /// DT_RUNPATH: folders for the libraries of this object only.
    runpath: Vec<PathBuf>,
    /// DT_RPATH: folders for the libraries of this object and of the objects that it loads.
    rpath: Vec<PathBuf>,
}

impl Search {
    /// Creates a search in `library_path`, then in this machine's cache.
    pub fn of_this_machine(library_path: Vec<PathBuf>) -> Self {
        let cache = fs::read(CACHE)
            .map(|bytes| parse_cache(&bytes))
            .unwrap_or_default();
        Self {
            library_path,
            provided: BTreeSet::new(),
            cache,
        }
    }

    /// Returns the paths of the loader and all libraries of a program or library.
    /// Empty for a statically linked program.
    pub fn libraries(&self, program: &Path) -> Result<Vec<PathBuf>, ImageError> {
        let program = fs::canonicalize(program).map_err(io("find", program))?;
        let mut objects = vec![Object::read(&program)?];
        // For each object, the index of the object that needed it first.
        let mut parents = vec![None];
        let mut names = BTreeSet::new();
        let mut next = 0;
        while next < objects.len() {
            for name in objects[next].needed.clone() {
                if self.provided.contains(&name) || !names.insert(name.clone()) {
                    continue;
                }
                let found = self.find(&name, next, &objects, &parents).ok_or_else(|| {
                    ImageError::MissingLibrary {
                        name,
                        needed_by: objects[next].path.clone(),
                    }
                })?;
                if objects.iter().all(|object| object.path != found.path) {
                    objects.push(found);
                    parents.push(Some(next));
                }
            }
            next += 1;
        }
        let mut paths: Vec<PathBuf> = objects[0].interpreter.iter().cloned().collect();
        for object in objects.into_iter().skip(1) {
            if !paths.contains(&object.path) {
                paths.push(object.path);
            }
        }
        Ok(paths)
    }

    /// Returns the path of a library that a program opens by its name.
    pub fn named(&self, name: &str) -> Option<PathBuf> {
        let folders = self.library_path.iter().map(PathBuf::as_path);
        let found = self.in_folders(name, folders.collect())?;
        Some(found.path)
    }

    fn find(
        &self,
        name: &str,
        by: usize,
        objects: &[Object],
        parents: &[Option<usize>],
    ) -> Option<Object> {
        if name.contains('/') {
            return Object::read(Path::new(name)).ok();
        }
        let mut folders: Vec<&Path> = Vec::new();
        if objects[by].runpath.is_empty() {
            let mut current = Some(by);
            while let Some(index) = current {
                folders.extend(objects[index].rpath.iter().map(PathBuf::as_path));
                current = parents[index];
            }
        }
        folders.extend(self.library_path.iter().map(PathBuf::as_path));
        folders.extend(objects[by].runpath.iter().map(PathBuf::as_path));
        self.in_folders(name, folders)
    }

    /// Finds a library in these folders, then in the cache and in those that the loader searches last.
    fn in_folders(&self, name: &str, folders: Vec<&Path>) -> Option<Object> {
        folders
            .into_iter()
            .map(|folder| folder.join(name))
            .chain(
                self.cache
                    .iter()
                    .filter(|(known, _)| known == name)
                    .map(|(_, path)| path.clone()),
            )
            .chain(
                DEFAULT_FOLDERS
                    .iter()
                    .map(|folder| Path::new(folder).join(name)),
            )
            .find_map(|path| Object::read(&path).ok())
    }
}

impl Object {
    fn read(path: &Path) -> Result<Self, ImageError> {
        let bytes = fs::read(path).map_err(io("read", path))?;
        let bad = |reason: &str| ImageError::Elf {
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        let elf = Dynamic::parse(&bytes).map_err(|error| bad(&error.to_string()))?;
        if elf.machine != EM_X86_64 {
            return Err(bad("it is not for x86-64"));
        }
        if !matches!(elf.kind, ET_DYN | ET_EXEC) {
            return Err(bad("it is neither a program nor a library"));
        }
        let origin = path.parent().unwrap_or(Path::new("/"));
        let strings = |tag| {
            let found = elf.strings(tag);
            found.ok_or_else(|| bad("its dynamic section names strings that it lacks"))
        };
        let folders = |lists: Vec<String>| {
            lists
                .iter()
                .flat_map(|list| list.split(':'))
                .filter(|folder| !folder.is_empty())
                .map(|folder| {
                    let folder = folder
                        .replace("${ORIGIN}", "$ORIGIN")
                        .replace("${LIB}", "$LIB");
                    let folder = folder.replace("$LIB", "lib/x86_64-linux-gnu");
                    folder.replace("$ORIGIN", &origin.to_string_lossy()).into()
                })
                .collect::<Vec<PathBuf>>()
        };
        let runpath = folders(strings(DT_RUNPATH)?);
        Ok(Self {
            path: path.to_owned(),
            interpreter: elf.interpreter.map(|path| OsStr::from_bytes(path).into()),
            needed: strings(DT_NEEDED)?,
            // The loader ignores DT_RPATH if there is a DT_RUNPATH.
            rpath: if runpath.is_empty() {
                folders(strings(DT_RPATH)?)
            } else {
                Vec::new()
            },
            runpath,
        })
    }
}

/// Names in a library.
#[derive(Debug)]
pub struct Names {
    /// Name by which others need it (DT_SONAME).
    pub own: Option<String>,
    /// Names of those that it needs.
    pub needed: Vec<String>,
}

/// Returns the names in a library.
pub fn names(path: &Path) -> Result<Names, ImageError> {
    let needed = Object::read(path)?.needed;
    let bytes = fs::read(path).map_err(io("read", path))?;
    let elf = Dynamic::parse(&bytes).ok();
    let own = elf.and_then(|elf| elf.strings(DT_SONAME)?.into_iter().next());
    Ok(Names { own, needed })
}

/// The parts of an ELF file that the dynamic loader reads.
struct Dynamic<'data> {
    machine: u16,
    kind: u16,
    interpreter: Option<&'data [u8]>,
    /// Tags and values of the dynamic section.
    entries: Vec<(u64, u64)>,
    strings: StringTable<'data>,
}

impl<'data> Dynamic<'data> {
    fn parse(bytes: &'data [u8]) -> object::Result<Self> {
        let header = FileHeader64::<Endianness>::parse(bytes)?;
        let endian = header.endian()?;
        // The loader uses segments, and files without section headers have them too.
        let segments = header.program_headers(endian, bytes)?;
        let (mut interpreter, mut entries) = (None, Vec::new());
        for segment in segments {
            interpreter = interpreter.or(segment.interpreter(endian, bytes)?);
            let found = segment.dynamic(endian, bytes)?.unwrap_or_default();
            let found = found
                .iter()
                .map(|entry| (entry.d_tag(endian), entry.d_val(endian)));
            entries.extend(found);
        }
        let value = |tag: u32| {
            let found = entries.iter().find(|entry| entry.0 == u64::from(tag));
            found.map(|entry| entry.1)
        };
        let strings = value(DT_STRTAB).zip(value(DT_STRSZ));
        let strings = strings.and_then(|(address, size)| {
            let mut loaded = segments
                .iter()
                .filter(|segment| segment.p_type(endian) == PT_LOAD);
            loaded.find_map(|segment| segment.data_range(endian, bytes, address, size).ok()?)
        });
        let strings = strings.unwrap_or_default();
        let end = u64::try_from(strings.len()).unwrap_or(u64::MAX);
        Ok(Self {
            machine: header.e_machine(endian),
            kind: header.e_type(endian),
            interpreter,
            strings: StringTable::new(strings, 0, end),
            entries,
        })
    }

    /// Returns the strings of all entries with this tag; `None` if one lies outside the string table.
    fn strings(&self, tag: u32) -> Option<Vec<String>> {
        let values = self
            .entries
            .iter()
            .filter(|entry| entry.0 == u64::from(tag));
        values
            .map(|entry| {
                let name = self.strings.get(u32::try_from(entry.1).ok()?).ok()?;
                Some(String::from_utf8_lossy(name).into_owned())
            })
            .collect()
    }
}

/// Returns whether a file starts with the ELF magic.
pub fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Parses the loader's cache in its current format (glibc's `dl-cache.h`): a header of 48 bytes that starts
/// with its name and version and has the number of entries at offset 20; entries of 24 bytes with flags, the
/// offsets of name and path, and the processor variant. Returns an empty cache for any other format.
fn parse_cache(bytes: &[u8]) -> Vec<(String, PathBuf)> {
    const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
    const HEADER: usize = 48;
    const ENTRY: usize = 24;
    /// Flags of an x86-64 library for glibc 2.
    const X86_64: u32 = 0x0303;

    let Some(start) = bytes
        .windows(MAGIC.len())
        .position(|window| window == MAGIC)
    else {
        return Vec::new();
    };
    let cache = &bytes[start..];
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_le_bytes(cache.get(at..at + 4)?.try_into().ok()?))
    };
    let text =
        |at: u32| -> Option<&[u8]> { cache.get(at as usize..)?.split(|&byte| byte == 0).next() };
    let Some(count) = word(MAGIC.len()) else {
        return Vec::new();
    };
    (0..count as usize)
        .map_while(|index| {
            let at = HEADER.checked_add(index.checked_mul(ENTRY)?)?;
            let (flags, name, path) = (word(at)?, text(word(at + 4)?)?, text(word(at + 8)?)?);
            let variant = (word(at + 16)?, word(at + 20)?);
            let name = String::from_utf8_lossy(name).into_owned();
            Some((
                flags == X86_64 && variant == (0, 0),
                name,
                PathBuf::from(OsStr::from_bytes(path)),
            ))
        })
        .filter(|(plain, ..)| *plain)
        .map(|(_, name, path)| (name, path))
        .collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Compiles an empty library or program with the additional arguments `args`, such as `-l`.
    pub fn compile(folder: &Path, output: &str, shared: bool, args: &[&str]) {
        let source = folder.join("source.c");
        fs::write(
            &source,
            if shared {
                "int nothing;\n"
            } else {
                "int main(void) { return 0; }\n"
            },
        )
        .expect("the source is written");
        let mut command = std::process::Command::new("cc");
        command
            .arg("-Wl,--no-as-needed")
            .arg("-L")
            .arg(folder)
            .arg("-o")
            .arg(folder.join(output))
            .arg(&source);
        if shared {
            command.args(["-shared", "-fPIC"]);
        }
        assert!(
            command
                .args(args)
                .status()
                .expect("the compiler runs")
                .success()
        );
    }

    #[test]
    fn this_test_needs_what_the_loader_loaded_for_it() {
        let own = std::env::current_exe().expect("the test has a file");
        let found = Search::of_this_machine(Vec::new())
            .libraries(&own)
            .expect("it runs here");
        let maps = fs::read_to_string("/proc/self/maps").expect("proc is mounted");
        for library in ["libc.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"] {
            let path = found
                .iter()
                .find(|path| path.ends_with(library))
                .expect(library);
            let real = fs::canonicalize(path).expect("it is there");
            assert!(
                maps.contains(&*real.to_string_lossy()),
                "{}",
                real.display()
            );
        }
    }

    #[test]
    fn runpath_library_path_and_what_is_provided_decide() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = &fs::canonicalize(folder.path()).expect("it is there");
        let sub = folder.join("sub");
        fs::create_dir(&sub).expect("a folder");
        compile(folder, "libinner.so", true, &[]);
        compile(folder, "libouter.so", true, &["-linner"]);
        compile(
            folder,
            "program",
            false,
            &["-louter", "-Wl,-rpath,$ORIGIN/sub,--allow-shlib-undefined"],
        );
        fs::rename(folder.join("libouter.so"), sub.join("libouter.so")).expect("it is moved");

        // A RUNPATH does not apply to the libraries of libraries.
        let mut search = Search::of_this_machine(Vec::new());
        let error = search
            .libraries(&folder.join("program"))
            .expect_err("libinner.so is nowhere");
        match error {
            ImageError::MissingLibrary { name, needed_by } => {
                assert_eq!(
                    (name.as_str(), needed_by),
                    ("libinner.so", sub.join("libouter.so"))
                );
            }
            other => panic!("{other}"),
        }
        search.library_path = vec![folder.clone()];
        let found = search
            .libraries(&folder.join("program"))
            .expect("all are there");
        assert!(
            found.contains(&sub.join("libouter.so")) && found.contains(&folder.join("libinner.so"))
        );

        search = Search::of_this_machine(Vec::new());
        search.provided.insert("libinner.so".to_owned());
        let found = search
            .libraries(&folder.join("program"))
            .expect("the rest is there");
        assert!(!found.iter().any(|path| path.ends_with("libinner.so")));
    }

    #[test]
    fn a_static_program_needs_nothing_and_a_text_is_no_program() {
        let folder = tempfile::tempdir().expect("a folder");
        compile(folder.path(), "program", false, &["-static"]);
        let search = Search::of_this_machine(Vec::new());
        assert_eq!(
            search
                .libraries(&folder.path().join("program"))
                .expect("it is ELF"),
            Vec::<PathBuf>::new()
        );
        assert!(matches!(
            search.libraries(&folder.path().join("source.c")),
            Err(ImageError::Elf { .. })
        ));
    }

    #[test]
    fn a_damaged_cache_gives_no_wrong_entries() {
        let whole = fs::read(CACHE).expect("this machine has a cache");
        let entries = parse_cache(&whole);
        assert!(
            entries
                .iter()
                .any(|(name, path)| name == "libc.so.6" && path.exists())
        );
        for length in [0, 19, 20, 47, 48, 60, whole.len() / 2] {
            assert!(parse_cache(&whole[..length]).len() <= entries.len());
        }
        assert!(parse_cache(b"glibc-ld.so.cache1.1\xff\xff\xff\xff").is_empty());
    }
}
