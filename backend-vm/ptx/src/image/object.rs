//! PTX in what nvcc makes for the host's linker: object files and archives of them.

use std::borrow::Cow;

use object::Endianness;
use object::elf::FileHeader64;
use object::read::archive::ArchiveFile;
use object::read::elf::{FileHeader, SectionHeader};

use super::{Found, elf, fatbin, find_ptx};
use crate::error::LoadError;

/// Sections with fatbins: of plain compilations, and of relocatable ones.
const SECTIONS: [&[u8]; 2] = [b".nv_fatbin", b"__nv_relfatbin"];
/// Most members of an archive that are looked at.
const MAX_MEMBERS: usize = 4096;

fn damaged(what: &str, error: object::Error) -> LoadError {
    LoadError::InvalidObject(format!("{what}: {error}"))
}

/// The PTX texts in an object file: those of its fatbins, if it is the host's.
///
/// # Errors
/// It is damaged, or has kernels as machine code only.
pub fn of_object(data: &[u8]) -> Result<Vec<Cow<'_, str>>, LoadError> {
    if wormhole_fatbin::is_fatbin(data) || elf::is_cuda(data) {
        return Ok(match find_ptx(data)? {
            Found::Ptx(text) => vec![text],
            Found::Empty => Vec::new(),
        });
    }
    let bad = |error| damaged("the object file", error);
    let header = FileHeader64::<Endianness>::parse(data).map_err(bad)?;
    let endian = header.endian().map_err(bad)?;
    let sections = header.sections(endian, data).map_err(bad)?;
    let mut texts = None;
    for section in sections.iter() {
        let name = sections.section_name(endian, section).map_err(bad)?;
        if SECTIONS.contains(&name) {
            let content = section.data(endian, data).map_err(bad)?;
            let found = fatbin::texts(&wormhole_fatbin::fatbins(content)?)?;
            texts.get_or_insert_with(Vec::new).extend(found);
        }
    }
    texts.ok_or_else(|| LoadError::InvalidObject("Could not find fatbin".to_owned()))
}

/// A member of an archive that holds PTX.
#[derive(Debug)]
pub struct Member<'a> {
    /// Its file name.
    pub name: String,
    /// PTX.
    pub texts: Vec<Cow<'a, str>>,
}

/// The members of an archive.
///
/// # Errors
/// It is damaged, or a member is.
pub fn members(data: &[u8]) -> Result<Vec<Member<'_>>, LoadError> {
    let bad = |error| damaged("the library", error);
    let archive = ArchiveFile::parse(data).map_err(bad)?;
    let mut members = Vec::new();
    for member in archive.members() {
        let member = member.map_err(bad)?;
        let content = member.data(data).map_err(bad)?;
        let texts = if elf::is_elf(content) || wormhole_fatbin::is_fatbin(content) {
            match of_object(content) {
                // What it would have given is missing only if somebody wants it.
                Err(LoadError::NoKernelImage { .. } | LoadError::InvalidObject(_)) => Vec::new(),
                texts => texts?,
            }
        } else {
            Vec::new()
        };
        let name = String::from_utf8_lossy(member.name()).into_owned();
        members.push(Member { name, texts });
        if members.len() > MAX_MEMBERS {
            return Err(LoadError::TooLarge {
                what: "the list of a library's members",
                found: members.len() as u64,
                limit: MAX_MEMBERS as u64,
            });
        }
    }
    Ok(members)
}
