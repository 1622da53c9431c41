//! Finds the PTX in the files that `nvcc` writes for the host's linker: object files and archives
//! of them.

use std::borrow::Cow;

use wormhole_fatbin::host::{self, Content, HostError};

use super::{Found, elf, fatbin, find_ptx};
use crate::error::LoadError;

impl From<HostError> for LoadError {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Fatbin(error) => error.into(),
            HostError::NoFatbin => Self::InvalidObject("Could not find fatbin".to_owned()),
            HostError::Members(limit) => Self::TooLarge {
                what: "the list of a library's members",
                found: limit as u64 + 1,
                limit: limit as u64,
            },
            error @ (HostError::Kind | HostError::Thin | HostError::Index) => {
                Self::InvalidObject(error.to_string())
            }
            HostError::Damaged { what, source } => Self::InvalidObject(format!("{what}: {source}")),
        }
    }
}

/// Returns the PTX texts in an object file; for an object file of the host, those of its fatbins.
///
/// # Errors
/// The file is damaged, or has kernels as machine code only.
pub fn of_object(data: &[u8]) -> Result<Vec<Cow<'_, str>>, LoadError> {
    match host::of_object(data)? {
        Content::Cubin(image) => Ok(match find_ptx(image)? {
            Found::Ptx(text) => vec![text],
            Found::Empty => Vec::new(),
        }),
        Content::Fatbins(fatbins) => fatbin::texts(&fatbins),
    }
}

/// Member of an archive, with its PTX.
#[derive(Debug)]
pub struct Member<'a> {
    /// File name of the member.
    pub name: String,
    /// PTX texts.
    pub texts: Vec<Cow<'a, str>>,
}

/// Returns the members of an archive.
///
/// # Errors
/// The archive or a member is damaged.
pub fn members(data: &[u8]) -> Result<Vec<Member<'_>>, LoadError> {
    let mut members = Vec::new();
    for member in host::members(data)? {
        let content = member.data;
        let texts = if elf::is_elf(content) || wormhole_fatbin::is_fatbin(content) {
            match of_object(content) {
                // The definitions of such a member are missing only if the link needs them.
                Err(LoadError::NoKernelImage { .. } | LoadError::InvalidObject(_)) => Vec::new(),
                texts => texts?,
            }
        } else {
            Vec::new()
        };
        let name = String::from_utf8_lossy(member.name).into_owned();
        members.push(Member { name, texts });
    }
    Ok(members)
}
