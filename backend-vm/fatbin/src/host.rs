//! Fatbins in what `nvcc` makes for the host's linker: object files, and archives of them.

use object::Endianness;
use object::elf::{EM_CUDA, FileHeader64};
use object::read::archive::ArchiveFile;
use object::read::elf::{FileHeader, SectionHeader};

use crate::{FatbinError, fatbins, is_fatbin};

/// Sections with fatbins: of plain compilations, and of relocatable ones.
const SECTIONS: [&[u8]; 2] = [b".nv_fatbin", b"__nv_relfatbin"];
/// Most members of an archive that are looked at.
const MAX_MEMBERS: usize = 4096;

/// Why an object file or an archive cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("{what}")]
    Damaged {
        what: &'static str,
        #[source]
        source: object::Error,
    },
    #[error("the object file has no section with a fatbin")]
    NoFatbin,
    #[error("the archive has more members than the limit of {0}")]
    Members(usize),
    #[error(transparent)]
    Fatbin(#[from] FatbinError),
}

/// The device code of an object file.
#[derive(Debug)]
pub enum Content<'a> {
    /// The file is machine code for a GPU itself.
    Cubin(&'a [u8]),
    Fatbins(Vec<&'a [u8]>),
}

/// Finds the device code in an object file.
///
/// # Errors
/// The file is damaged, or has none.
pub fn of_object(data: &[u8]) -> Result<Content<'_>, HostError> {
    if is_fatbin(data) {
        return Ok(Content::Fatbins(fatbins(data)?));
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
            let content = section.data(endian, data).map_err(bad)?;
            found.get_or_insert_with(Vec::new).extend(fatbins(content)?);
        }
    }
    found.map(Content::Fatbins).ok_or(HostError::NoFatbin)
}

/// A member of an archive.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Its file name.
    pub name: &'a [u8],
    pub data: &'a [u8],
}

/// The members of an archive.
///
/// # Errors
/// It is damaged, or has too many.
pub fn members(data: &[u8]) -> Result<Vec<Member<'_>>, HostError> {
    let bad = |source| HostError::Damaged {
        what: "the archive is damaged",
        source,
    };
    let archive = ArchiveFile::parse(data).map_err(bad)?;
    let mut members = Vec::new();
    for member in archive.members() {
        let member = member.map_err(bad)?;
        if members.len() == MAX_MEMBERS {
            return Err(HostError::Members(MAX_MEMBERS));
        }
        members.push(Member {
            name: member.name(),
            data: member.data(data).map_err(bad)?,
        });
    }
    Ok(members)
}
