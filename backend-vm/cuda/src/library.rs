//! Checks libraries (archives of object files) before the driver's linker reads them.
//!
//! The driver itself selects the members that a link needs, so it gets the whole archive, and each member passes the
//! check of a file that a guest passes alone: also members for other GPUs, and object files without device code.

use wormhole_device::CuError;
use wormhole_fatbin::host::{self, Content, HostError};

use crate::code::{Attempts, Budget, Code};
use crate::elf;

/// Reason why a library does not reach the driver.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    #[error("the library cannot be read")]
    Unreadable(#[from] HostError),
    #[error("the library has code that the driver does not get")]
    Code(#[from] CuError),
}

/// Checks all members of a library. Counts what it decompresses in `attempts`.
///
/// # Errors
/// The archive, an object file in it or a fat binary is damaged, or an entry of a fat binary is no code. All entries
/// together decompress too much.
pub fn check(budget: &Budget, attempts: &mut Attempts, library: &[u8]) -> Result<(), LibraryError> {
    for member in host::members(library)? {
        let fatbins = match host::of_object(member.data) {
            Ok(Content::Cubin(cubin)) => {
                Code::machine(cubin.into())?;
                continue;
            }
            Ok(Content::Fatbins(fatbins)) => fatbins,
            Err(HostError::NoFatbin) => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let is_object = elf::is_elf(member.data);
        if is_object && elf::machine(member.data).is_none() {
            return Err(CuError::INVALID_IMAGE.into());
        }
        for fatbin in fatbins {
            for entry in wormhole_fatbin::entries(fatbin).map_err(HostError::from)? {
                attempts.add(&entry)?;
                budget.check(&entry)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::alternatives;
    use crate::code::tests::{ELF, PTX, ZSTD, fatbin, part};
    use crate::managed;

    const TEXT: &[u8] = b".version 8.0 // text\0";
    const AMD64: u8 = 62;
    /// Offset of the field in an ELF header that locates the table of sections.
    const SECTIONS: usize = 40;
    /// Kind of an entry with intermediate code.
    const INTERMEDIATE: u16 = 8;

    fn member(name: &str, content: &[u8]) -> Vec<u8> {
        let (zero, size) = (0, content.len());
        let header =
            format!("{name:<16}{zero:<12}{zero:<6}{zero:<6}{zero:<8}{size:<10}`\n").into_bytes();
        let padding = vec![b'\n'; size % 2];
        [header, content.to_vec(), padding].concat()
    }

    /// Archive whose index names one symbol at an offset.
    fn indexed(offset: u32, members: &[Vec<u8>]) -> Vec<u8> {
        let index = [
            &1_u32.to_be_bytes()[..],
            &offset.to_be_bytes(),
            b"symbol\0\0",
        ]
        .concat();
        let all = [&[member("/", &index)], members].concat();
        [&b"!<arch>\n"[..], &all.concat()].concat()
    }

    fn archive(members: &[Vec<u8>]) -> Vec<u8> {
        [&b"!<arch>\n"[..], &members.concat()].concat()
    }

    fn cubin() -> Vec<u8> {
        managed::tests::image(2, false)
    }

    /// Object file of the host with a fat binary.
    fn object(fatbin: &[u8]) -> Vec<u8> {
        let names = b"\0__nv_relfatbin\0";
        let mut file = cubin()[..64].to_vec();
        file[18] = AMD64;
        file[19] = 0;
        let mut headers = vec![0; 64];
        for (name, kind, content) in [(0_u32, 3_u32, &names[..]), (1, 1, fatbin)] {
            let mut header = vec![0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[24..32].copy_from_slice(&(file.len() as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(content.len() as u64).to_le_bytes());
            headers.extend(header);
            file.extend_from_slice(content);
            file.resize(file.len().next_multiple_of(8), 0);
        }
        let table = file.len() as u64;
        file[SECTIONS..SECTIONS + 8].copy_from_slice(&table.to_le_bytes());
        file[60] = 3;
        file[62] = 1;
        file.extend(headers);
        file
    }

    /// Object file of the host without device code.
    fn plain_object() -> Vec<u8> {
        let mut file = object(b"");
        file[64 + 1] = b'-';
        file
    }

    fn refusal(library: &[u8]) -> Option<LibraryError> {
        check(&Budget::default(), &mut Attempts::default(), library).err()
    }

    #[test]
    fn libraries_of_whole_members_pass() {
        let entries = [
            part(PTX, 75, 0, TEXT, 0),
            part(ELF, 80, 0, &cubin(), 0),
            part(ELF, 100, 0, &cubin(), 0),
        ];
        let fatbin = fatbin(&entries);
        let members = [
            member("cubin.o/", &cubin()),
            member("object.o/", &object(&fatbin)),
            member("fatbin/", &fatbin),
            member("host.o/", &plain_object()),
        ];
        let first = 8 + 60 + 16;
        for library in [archive(&members), indexed(first, &members)] {
            let refused = refusal(&library);
            assert!(refused.is_none(), "{refused:?}");
        }
    }

    #[test]
    fn each_member_of_a_library_is_checked() {
        let damaged = |mut file: Vec<u8>| {
            file[SECTIONS + 6] = 0x7f;
            file
        };
        // Its last section names another one that the file lacks.
        let linked = |mut file: Vec<u8>| {
            let link = file.len() - 64 + 40;
            file[link] = 9;
            file
        };
        let changed = |at: usize, value: u8| {
            let mut entry = part(PTX, 90, 0, TEXT, 0);
            entry[at] = value;
            entry
        };
        let with = |entry: Vec<u8>| object(&fatbin(&[part(PTX, 75, 0, TEXT, 0), entry]));
        for (what, file) in [
            ("machine code", damaged(cubin())),
            ("an object file", linked(plain_object())),
            (
                "an object file with a fat binary",
                linked(object(&fatbin(&[part(PTX, 75, 0, TEXT, 0)]))),
            ),
            ("an entry", with(part(ELF, 90, 0, &damaged(cubin()), 0))),
            ("another GPU's", with(part(ELF, 10, 0, TEXT, 0))),
            ("text", with(part(PTX, 90, 0, b"BC\xc0\xde\0\0\0\0", 0))),
            (
                "text without an end",
                with(part(PTX, 90, 0, b"// text.", 0)),
            ),
            ("an identifier elsewhere", with(changed(32, 1))),
            ("an unknown flag", with(changed(41, 0x10))),
            (
                "intermediate code",
                with(part(INTERMEDIATE, 90, 0, TEXT, 0)),
            ),
        ] {
            for members in [
                &[member("a/", &file)][..],
                &[member("a/", &cubin()), member("b/", &file)],
            ] {
                let refused = refusal(&archive(members));
                assert!(
                    matches!(refused, Some(LibraryError::Code(CuError::INVALID_IMAGE))),
                    "{what}: {refused:?}"
                );
            }
        }
    }

    /// A linker that goes by names, or looks for fat binaries, would find others than the check.
    #[test]
    fn a_section_that_two_readers_see_differently_is_refused() {
        let fatbin = fatbin(&[part(PTX, 75, 0, TEXT, 0)]);
        let padded = |zeros, more: &[u8]| [&fatbin, &vec![0; zeros][..], more].concat();
        for content in [padded(0, &[]), padded(64, &[]), padded(8, &fatbin)] {
            let refused = refusal(&archive(&[member("a/", &object(&content))]));
            assert!(refused.is_none(), "{refused:?}");
        }
        let mut without_bytes = object(&fatbin);
        // The kind of the last section becomes SHT_NOBITS.
        let kind = without_bytes.len() - 64 + 4;
        without_bytes[kind] = 8;
        for (what, file) in [
            ("no bytes", without_bytes),
            ("far behind", object(&padded(64, &fatbin))),
            ("other bytes", object(&padded(8, b"more"))),
            ("no fat binary", object(b"none")),
        ] {
            let refused = refusal(&archive(&[member("a/", &file)]));
            assert!(
                matches!(refused, Some(LibraryError::Unreadable(_))),
                "{what}: {refused:?}"
            );
        }
    }

    #[test]
    fn the_members_of_a_library_unpack_only_so_much_together() {
        let object = object(&fatbin(&[part(PTX, 90, 0, TEXT, 0)]));
        let library = |count| archive(&vec![member("a/", &object); count]);
        // Leaves room for this many entries.
        let after_others = |room: usize| {
            let rest = (1 << 30) - room * TEXT.len().next_multiple_of(8);
            let sizes = [1 << 30, 1 << 30, 1 << 30, rest];
            let image = fatbin(&sizes.map(|bytes| part(PTX, 90, ZSTD, TEXT, bytes)));
            let mut attempts = Attempts::default();
            for way in alternatives(&image, 90, false).expect("it is whole") {
                attempts.begin(&way).expect("there is room");
            }
            attempts
        };
        let checked = |members, room| {
            let budget = Budget::default();
            check(&budget, &mut after_others(room), &library(members)).err()
        };
        for (members, room) in [(1, 1), (3, 3)] {
            let refused = checked(members, room);
            assert!(refused.is_none(), "{refused:?}");
        }
        for (members, room) in [(1, 0), (3, 2)] {
            let refused = checked(members, room);
            assert!(
                matches!(refused, Some(LibraryError::Code(CuError::OUT_OF_MEMORY))),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn an_archive_is_refused_whose_index_or_kind_leads_elsewhere() {
        // A member in another one, which the index alone names.
        let inner = member("inner.o/", &cubin());
        let whole = object(&fatbin(&[part(PTX, 75, 0, TEXT, 0)]));
        let outer = [member("outer.o/", &[whole, inner].concat())];
        let unreadable =
            |library: &[u8]| matches!(refusal(library), Some(LibraryError::Unreadable(_)));
        let inside = |library: &[u8]| {
            let at = library.windows(8).position(|name| name == b"inner.o/");
            u32::try_from(at.expect("the inner member")).expect("small")
        };
        let library = indexed(0, &outer);
        assert!(unreadable(&indexed(inside(&library), &outer)));
        assert!(!unreadable(&indexed(8 + 60 + 16, &outer)));
        // A thin archive names files.
        assert!(unreadable(
            &[&b"!<thin>\n"[..], &member("/etc/x/", &cubin())].concat()
        ));
        assert!(unreadable(b"!<thin>\n"));
        // Of two indexes one reader follows the first and another the second, and where names lie in the bytes, readers
        // differ in where the content begins.
        let none = member("/", &[0; 4]);
        let two = [std::slice::from_ref(&none), &outer[..]].concat();
        assert!(unreadable(&indexed(inside(&library), &two)));
        assert!(unreadable(&archive(&[&outer[..], &[none]].concat())));
        assert!(unreadable(&archive(&[member("#1/4", &cubin())])));
        assert!(unreadable(b"<bigaf>\n"));
    }
}
