//! Finds mappings of this process (`/proc/self/maps`, proc(5)).
//!
//! Linux answers questions for single mappings since 6.11 (`PROCMAP_QUERY`). Before, all of them are read as text, which takes
//! the longer the more a program has mapped.

use std::fs::File;
use std::io::{self, Read};

use crate::pages::control;

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    /// True for a readable, writable, private and anonymous mapping that is neither executable nor a stack.
    pub is_plain: bool,
    /// True for a readable, writable and shared mapping.
    pub is_shared: bool,
    pub offset: u64,
    pub device: (u32, u32),
    /// 0 for a mapping without a file.
    pub inode: u64,
}

impl Mapping {
    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }
}

const MAPS: &str = "/proc/self/maps";

/// Returns the mappings that overlap a range, ordered by address.
pub fn overlapping(start: u64, end: u64) -> io::Result<Vec<Mapping>> {
    find(start, end, 0, |mapping| mapping.overlaps(start, end))
}

/// Returns the mappings of files, at least those that are shared, ordered by address.
pub fn of_files() -> io::Result<Vec<Mapping>> {
    find(0, u64::MAX, SHARED | OF_FILE, |mapping| mapping.inode != 0)
}

/// Returns the mappings between two addresses that have the permissions and the kind of `flags`. `is_one` chooses them from
/// all mappings where the kernel answers no questions.
fn find(
    start: u64,
    end: u64,
    flags: u64,
    is_one: impl Fn(&Mapping) -> bool,
) -> io::Result<Vec<Mapping>> {
    let mut file = File::open(MAPS)?;
    if let Ok(found) = asked(&file, start, end, flags) {
        return Ok(found);
    }
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(text.lines().filter_map(parse).filter(is_one).collect())
}

const READABLE: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const EXECUTABLE: u64 = 1 << 2;
const SHARED: u64 = 1 << 3;
const COVERING_OR_NEXT: u64 = 1 << 4;
const OF_FILE: u64 = 1 << 5;
const PROCMAP_QUERY: libc::c_ulong = 3 << 30 | (size_of::<Query>() as libc::c_ulong) << 16 | 0x6611;

/// `struct procmap_query` of linux/fs.h.
#[derive(Default)]
#[repr(C)]
struct Query {
    bytes: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    found: u64,
    page: u64,
    offset: u64,
    inode: u64,
    major: u32,
    minor: u32,
    name_bytes: u32,
    build_id_bytes: u32,
    name: u64,
    build_id: u64,
}

/// Place for the names of private mappings without a file.
type Name = [u8; NAME_BYTES as usize];
const NAME_BYTES: u32 = 128;

fn asked(file: &File, start: u64, end: u64, flags: u64) -> io::Result<Vec<Mapping>> {
    let mut found = Vec::new();
    let mut at = start;
    while at < end
        && let Some(answer) = ask(file, at, flags | COVERING_OR_NEXT, None)?
        && answer.start < end
    {
        at = answer.end;
        let permissions = answer.found & (READABLE | WRITABLE | EXECUTABLE | SHARED);
        found.push(Mapping {
            start: answer.start,
            end: answer.end,
            is_plain: permissions == READABLE | WRITABLE
                && answer.inode == 0
                && is_plain(&name(file, answer.start)?),
            is_shared: permissions & !EXECUTABLE == READABLE | WRITABLE | SHARED,
            offset: answer.offset,
            device: (answer.major, answer.minor),
            inode: answer.inode,
        });
    }
    Ok(found)
}

/// Asks for a mapping at an address. `None` if there is none.
fn ask(
    file: &File,
    address: u64,
    flags: u64,
    name: Option<&mut Name>,
) -> io::Result<Option<Query>> {
    let mut query = Query {
        bytes: size_of::<Query>() as u64,
        flags,
        address,
        name_bytes: name.as_ref().map_or(0, |_| NAME_BYTES),
        name: name.map_or(0, |name| name.as_mut_ptr().expose_provenance() as u64),
        ..Query::default()
    };
    match control(file, PROCMAP_QUERY, &mut query) {
        Ok(()) => Ok(Some(query)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

fn name(file: &File, address: u64) -> io::Result<String> {
    let mut name = [0; _];
    let answer = ask(file, address, 0, Some(&mut name))?;
    let bytes = answer.map_or(0, |answer| answer.name_bytes.saturating_sub(1));
    let text = name.get(..bytes as usize).unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}

/// Returns true for the names that private memory of a program has, its stack left out.
fn is_plain(name: &str) -> bool {
    name.is_empty() || name == "[heap]" || name.starts_with("[anon:")
}

fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let permissions = words.next()?;
    let offset = words.next()?;
    let (major, minor) = words.next()?.split_once(':')?;
    let inode: u64 = words.next()?.parse().ok()?;
    let name = words.next().unwrap_or_default();
    let long = |text| u64::from_str_radix(text, 16).ok();
    let short = |text| u32::from_str_radix(text, 16).ok();
    Some(Mapping {
        start: long(start)?,
        end: long(end)?,
        is_plain: permissions == "rw-p" && inode == 0 && is_plain(name),
        is_shared: permissions.starts_with("rw") && permissions.ends_with('s'),
        offset: long(offset)?,
        device: (short(major)?, short(minor)?),
        inode,
    })
}

/// Returns two paths of the file that is mapped at an address: that in `map_files`, and the file's own, which may name
/// another file by now.
pub fn names(address: u64) -> io::Result<Option<[String; 2]>> {
    let text = std::fs::read_to_string(MAPS)?;
    let here = |line: &&str| {
        parse(line).is_some_and(|mapping| (mapping.start..mapping.end).contains(&address))
    };
    Ok(text.lines().find(here).and_then(names_of))
}

fn names_of(line: &str) -> Option<[String; 2]> {
    let range = line.split_whitespace().next()?;
    let (_, name) = line.split_once('/')?;
    Some([format!("/proc/self/map_files/{range}"), format!("/{name}")])
}

/// Returns the parts of `start..end`, one for each mapping; `None` if some of it is not mapped.
pub fn parts(mappings: &[Mapping], start: u64, end: u64) -> Option<Vec<Mapping>> {
    let mut at = start;
    let mut parts = Vec::new();
    for mapping in mappings
        .iter()
        .filter(|mapping| mapping.overlaps(start, end))
    {
        if mapping.start > at {
            return None;
        }
        let stop = mapping.end.min(end);
        parts.push(Mapping {
            start: at,
            end: stop,
            offset: mapping.offset + (at - mapping.start),
            ..*mapping
        });
        at = stop;
    }
    (at == end).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::Spare;

    fn plain(line: &str) -> bool {
        parse(line).unwrap().is_plain
    }

    #[test]
    fn only_private_memory_of_no_file_is_plain() {
        assert!(plain("7f0000000000-7f0000002000 rw-p 00000000 00:00 0 "));
        assert!(plain(
            "55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]"
        ));
        assert!(plain(
            "7f0000000000-7f0000002000 rw-p 00000000 00:00 0    [anon:glibc: malloc]"
        ));
        for line in [
            "7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]",
            "7f0000000000-7f0000002000 rw-s 00000000 00:01 1024      /dev/zero (deleted)",
            "7f0000000000-7f0000002000 rw-s 00000000 00:00 0 ",
            "7f0000000000-7f0000002000 r--p 00000000 00:00 0 ",
            "7f0000000000-7f0000002000 rwxp 00000000 00:00 0 ",
            "7f0000000000-7f0000002000 rw-p 00001000 fe:01 77        /lib/x86_64-linux-gnu/libc.so.6",
            "7f0000000000-7f0000200000 rw-p 00000000 00:0f 12        /anon_hugepage (deleted)",
        ] {
            assert!(!plain(line), "{line}");
        }
    }

    #[test]
    fn a_shared_mapping_has_two_names() {
        let line = "7f0000000000-7f0000002000 rw-s 00001000 00:19 52      /dev/shm/a name";
        let mapping = parse(line).unwrap();
        assert!(mapping.is_shared && !mapping.is_plain);
        let names = names_of(line).unwrap();
        let [by_place, own] = names.each_ref().map(String::as_str);
        assert_eq!(by_place, "/proc/self/map_files/7f0000000000-7f0000002000");
        assert_eq!(own, "/dev/shm/a name");
        assert_eq!(names_of("7f0000000000-7f0000002000 rw-p 0 00:00 0 "), None);
        assert!(
            !parse("7f0000000000-7f0000002000 r--s 0 00:19 52 /x")
                .unwrap()
                .is_shared
        );
    }

    /// The text and the kernel's answers tell the same of all mappings of this process that no other thread changes.
    #[test]
    fn questions_and_the_text_have_the_same_answers() {
        let file = File::open(MAPS).unwrap();
        if let Err(error) = ask(&file, 0, COVERING_OR_NEXT, None) {
            eprintln!("skipped: this kernel answers no questions: {error}");
            return;
        }
        let memory = tempfile::tempfile().unwrap();
        memory.set_len(0x4000).unwrap();
        let shared = Spare::shared(&memory, 0x1000, 0x2000).unwrap();
        let private = Spare::private(0x3000).unwrap();
        let text = std::fs::read_to_string(MAPS).unwrap();
        let all: Vec<Mapping> = text.lines().filter_map(parse).collect();
        let around = |mapping: &Mapping| asked(&file, mapping.start, mapping.end, 0).unwrap();
        let alike = all.iter().filter(|mapping| around(mapping) == [**mapping]);
        assert!(alike.count() * 10 > all.len() * 9);
        for (spare, is_shared) in [(&shared, true), (&private, false)] {
            let pages = spare.pages();
            let found = overlapping(pages.start, pages.end).unwrap();
            let written = all
                .iter()
                .filter(|mapping| mapping.overlaps(pages.start, pages.end));
            assert!(found.iter().eq(written), "{found:?}");
            assert!(found.iter().all(|mapping| mapping.is_shared == is_shared));
            let of_files = of_files().unwrap();
            assert!(
                found
                    .iter()
                    .all(|mapping| of_files.contains(mapping) == is_shared)
            );
        }
        let stack = all
            .iter()
            .find(|mapping| !mapping.is_plain && mapping.inode == 0);
        assert!(stack.is_some());
    }

    #[test]
    fn a_range_is_divided_by_mappings_and_has_no_holes() {
        let mappings: Vec<Mapping> = [
            "1000-3000 rw-p 00000000 00:00 0",
            "3000-5000 rw-s 00007000 00:01 9",
            "6000-7000 rw-p 00000000 00:00 0",
        ]
        .iter()
        .filter_map(|line| parse(line))
        .collect();
        let found = parts(&mappings, 0x2000, 0x4000).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|part| (part.start, part.end, part.offset))
            .collect();
        assert_eq!(found, [(0x2000, 0x3000, 0x1000), (0x3000, 0x4000, 0x7000)]);
        for (start, end) in [
            (0x4000, 0x6000),
            (0x0, 0x2000),
            (0x6000, 0x8000),
            (0x5000, 0x6000),
        ] {
            assert_eq!(parts(&mappings, start, end), None, "{start:x}");
        }
    }
}
