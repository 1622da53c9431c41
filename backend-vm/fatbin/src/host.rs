//! Finds fatbins in the files that `nvcc` writes for the host's linker: object files and archives
//! of them.

use std::collections::HashSet;

use object::Endianness;
use object::elf::{EM_CUDA, FileHeader64, SHT_PROGBITS};
use object::read::archive::{ArchiveFile, ArchiveKind};
use object::read::elf::{FileHeader, SectionHeader};

use crate::{FatbinError, is_fatbin, whole, within_limit};

/// Names of the sections that hold fatbins: in plain compilations, and in relocatable ones.
const SECTIONS: [&[u8]; 2] = [b".nv_fatbin", b"__nv_relfatbin"];
/// Maximum number of members read from an archive.
const MAX_MEMBERS: usize = 4096;

/// Error in reading an object file or an archive.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("{what}")]
    Damaged {
        what: &'static str,
        #[source]
        source: object::Error,
    },
    #[error("the object file has a section for fatbins that has no bytes in the file")]
    Kind,
    #[error("the object file has no section with a fatbin")]
    NoFatbin,
    #[error("the archive has more members than the limit of {0}")]
    Members(usize),
    #[error("the archive has its members in other files")]
    Thin,
    #[error("the archive's index names a place at which no member starts")]
    Index,
    #[error(transparent)]
    Fatbin(#[from] FatbinError),
}

/// Device code of an object file.
#[derive(Debug)]
pub enum Content<'a> {
    /// Machine code for a GPU: the file itself.
    Cubin(&'a [u8]),
    Fatbins(Vec<&'a [u8]>),
}

/// Finds the device code in an object file.
///
/// # Errors
/// The file is damaged, or has no device code, or more fatbins than the limit. Fatbins, in a section or as the file itself, are
/// followed by something else than zeros, or by another fatbin behind more zeros than align it.
pub fn of_object(data: &[u8]) -> Result<Content<'_>, HostError> {
    if is_fatbin(data) {
        return Ok(Content::Fatbins(whole(data)?));
    }
    let bad = |source| HostError::Damaged {
        what: "the object file is damaged",
        source,
    };
    let header = FileHeader64::<Endianness>::parse(data).map_err(bad)?;
    let endian = header.endian().map_err(bad)?;
    if header.e_machine(endian) == EM_CUDA {
        return Ok(Content::Cubin(data));
    }
    let sections = header.sections(endian, data).map_err(bad)?;
    let mut found = None;
    for section in sections.iter() {
        let name = sections.section_name(endian, section).map_err(bad)?;
        if SECTIONS.contains(&name) {
            // A linker that goes by the name would read bytes that are not looked at here.
            if section.sh_type(endian) != SHT_PROGBITS {
                return Err(HostError::Kind);
            }
            let content = section.data(endian, data).map_err(bad)?;
            let found = found.get_or_insert_with(Vec::new);
            found.extend(whole(content)?);
            // Sections may overlap, so a small file can have any number of them.
            within_limit(found.len())?;
        }
    }
    found.map(Content::Fatbins).ok_or(HostError::NoFatbin)
}

/// A member of an archive.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// File name of the member.
    pub name: &'a [u8],
    pub data: &'a [u8],
}

/// Returns the members of an archive.
///
/// # Errors
/// The archive is damaged, has more members than the limit, has them in other files, or has an index that names anything
/// else than its members.
pub fn members(data: &[u8]) -> Result<Vec<Member<'_>>, HostError> {
    let bad = |source| HostError::Damaged {
        what: "the archive is damaged",
        source,
    };
    let archive = ArchiveFile::parse(data).map_err(bad)?;
    if archive.is_thin() {
        return Err(HostError::Thin);
    }
    // Other kinds have two indexes, or names at the beginning of the members' bytes: another reader would find other
    // members.
    let is_gnu = matches!(
        archive.kind(),
        ArchiveKind::Unknown | ArchiveKind::Gnu | ArchiveKind::Gnu64
    );
    if !is_gnu {
        return Err(HostError::Index);
    }
    let (mut members, mut ranges) = (Vec::new(), HashSet::new());
    for member in archive.members() {
        let member = member.map_err(bad)?;
        if members.len() == MAX_MEMBERS {
            return Err(HostError::Members(MAX_MEMBERS));
        }
        // Another index, or a name that is part of the bytes.
        let is_special = member.header().is_some_and(|header| {
            let [first, second, ..] = header.name;
            header.name.starts_with(b"#1/") || first == b'/' && !second.is_ascii_digit()
        });
        if is_special {
            return Err(HostError::Index);
        }
        ranges.insert(member.file_range());
        members.push(Member {
            name: member.name(),
            data: member.data(data).map_err(bad)?,
        });
    }
    for symbol in archive.symbols().map_err(bad)?.into_iter().flatten() {
        let offset = symbol.map_err(bad)?.offset();
        let named = archive.member(offset).map_err(bad)?;
        if !ranges.contains(&named.file_range()) {
            return Err(HostError::Index);
        }
    }
    Ok(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fatbin without entries.
    fn empty() -> Vec<u8> {
        let mut fatbin = crate::MAGIC.to_vec();
        fatbin.extend([1, 0, 16, 0]);
        fatbin.extend([0; 8]);
        fatbin
    }

    /// Two sections have the same 2,049 fatbins.
    #[test]
    fn fatbins_of_all_sections_together_are_bounded() {
        let object = |fatbins: usize| {
            let mut file = vec![0; 64];
            file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
            file[16] = 1;
            file[18] = 62;
            file[20] = 1;
            file[52] = 64;
            file[58] = 64;
            file[60] = 4;
            file[62] = 1;
            let names = b"\0.nv_fatbin\0\0\0\0\0";
            file.extend_from_slice(names);
            let content = empty().repeat(fatbins);
            let start = file.len();
            file.extend_from_slice(&content);
            let headers = file.len() as u64;
            file[40..48].copy_from_slice(&headers.to_le_bytes());
            let header = |name: u8, kind: u8, offset: usize, bytes: usize| {
                let mut header = [0; 64];
                (header[0], header[4]) = (name, kind);
                header[24..32].copy_from_slice(&(offset as u64).to_le_bytes());
                header[32..40].copy_from_slice(&(bytes as u64).to_le_bytes());
                header
            };
            file.extend(header(0, 0, 0, 0));
            file.extend(header(0, 3, 64, names.len()));
            for _ in 0..2 {
                file.extend(header(1, 1, start, content.len()));
            }
            file
        };
        let small = object(2048);
        let found = of_object(&small);
        assert!(matches!(found, Ok(Content::Fatbins(fatbins)) if fatbins.len() == 4096));
        let large = object(2049);
        let refused = of_object(&large);
        let limit = FatbinError::Entries {
            found: 4098,
            limit: 4096,
        };
        assert!(matches!(refused, Err(HostError::Fatbin(error)) if error == limit));
    }

    #[test]
    fn fatbins_that_another_reader_would_find_are_refused() {
        let after = |zeros: usize, more: &[u8]| [&empty(), &vec![0; zeros][..], more].concat();
        let count = |file: &[u8]| match of_object(file) {
            Ok(Content::Fatbins(fatbins)) => Some(fatbins.len()),
            _ => None,
        };
        for zeros in [0, 1, 16] {
            assert_eq!(count(&after(zeros, &empty())), Some(2), "{zeros}");
        }
        for zeros in [0, 17, 1000] {
            assert_eq!(count(&after(zeros, &[])), Some(1), "{zeros}");
        }
        for zeros in [17, 32, 1000] {
            assert_eq!(count(&after(zeros, &empty())), None, "{zeros}");
        }
        assert_eq!(count(&after(4, b"more")), None);
    }
}
