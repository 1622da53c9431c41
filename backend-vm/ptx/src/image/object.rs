//! PTX in what nvcc makes for the host's linker: object files and archives of them.

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
            HostError::Damaged { what, source } => Self::InvalidObject(format!("{what}: {source}")),
        }
    }
}

/// The PTX texts in an object file: those of its fatbins, if it is the host's.
///
/// # Errors
/// It is damaged, or has kernels as machine code only.
pub fn of_object(data: &[u8]) -> Result<Vec<Cow<'_, str>>, LoadError> {
    match host::of_object(data)? {
        Content::Cubin(image) => Ok(match find_ptx(image)? {
            Found::Ptx(text) => vec![text],
            Found::Empty => Vec::new(),
        }),
        Content::Fatbins(fatbins) => fatbin::texts(&fatbins),
    }
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
    let mut members = Vec::new();
    for member in host::members(data)? {
        let content = member.data;
        let texts = if elf::is_elf(content) || wormhole_fatbin::is_fatbin(content) {
            match of_object(content) {
                // What it would have given is missing only if somebody wants it.
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
