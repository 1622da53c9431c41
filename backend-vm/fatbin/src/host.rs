//! Finds fatbins in the files that `nvcc` writes for the host's linker: object files and archives
//! of them.

use std::collections::HashSet;

use object::Endianness;
use object::elf::{EM_CUDA, FileHeader64, SHT_PROGBITS};
use object::read::archive::{ArchiveFile, ArchiveKind};
use object::read::elf::{FileHeader, SectionHeader};

use crate::{FatbinError, is_fatbin, whole};

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
/// The file is damaged, or has no device code. Fatbins, in a section or as the file itself, are followed by something else
/// than zeros, or by another fatbin behind more zeros than align it.
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
            found.get_or_insert_with(Vec::new).extend(whole(content)?);
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
