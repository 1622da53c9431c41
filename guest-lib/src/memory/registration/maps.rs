//! Reads the mappings of this process (`/proc/self/maps`, proc(5)).

use std::io;

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

/// Returns all mappings, ordered by address.
pub fn read() -> io::Result<Vec<Mapping>> {
    let text = std::fs::read_to_string("/proc/self/maps")?;
    Ok(text.lines().filter_map(parse).collect())
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
        is_plain: permissions == "rw-p"
            && inode == 0
            && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:")),
        is_shared: permissions.starts_with("rw") && permissions.ends_with('s'),
        offset: long(offset)?,
        device: (short(major)?, short(minor)?),
        inode,
    })
}

/// Returns two paths of the file that is mapped at an address: that in `map_files`, and the file's own, which may name
/// another file by now.
pub fn names(address: u64) -> io::Result<Option<[String; 2]>> {
    let text = std::fs::read_to_string("/proc/self/maps")?;
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
        .filter(|mapping| mapping.end > start && mapping.start < end)
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
