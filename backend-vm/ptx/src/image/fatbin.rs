//! Finds the PTX among a fatbin's entries.

use std::borrow::Cow;

use wormhole_fatbin::{FatbinError, entries, fatbins};

use super::{ARCHITECTURE, Found, elf, text};
use crate::error::LoadError;
use crate::limits::MAX_PTX_BYTES;
use crate::link::{Input, link};

/// Finds the PTX of an image. If the linked fatbin has no PTX, the PTX of the link's inputs is linked
/// again.
pub(super) fn find(image: &[u8]) -> Result<Found<'_>, LoadError> {
    let fatbins = fatbins(image)?;
    let Some((first, inputs)) = fatbins.split_first() else {
        return Ok(Found::Empty);
    };
    let linked = find_in_one(first);
    if inputs.is_empty() || matches!(linked, Ok(Found::Ptx(_))) {
        return linked;
    }
    let texts = texts(inputs)?;
    if texts.is_empty() {
        return linked;
    }
    let names: Vec<String> = (1..=texts.len()).map(|n| format!("input {n}")).collect();
    let inputs: Vec<Input<'_>> = texts
        .iter()
        .zip(&names)
        .map(|(text, name)| Input {
            name,
            text,
            of_library: false,
        })
        .collect();
    Ok(Found::Ptx(Cow::Owned(link(&inputs)?)))
}

/// Returns the PTX of each fatbin that has some.
pub(super) fn texts<'a>(fatbins: &[&'a [u8]]) -> Result<Vec<Cow<'a, str>>, LoadError> {
    let mut texts = Vec::new();
    let mut bytes = 0;
    for fatbin in fatbins {
        if let Found::Ptx(text) = find_in_one(fatbin)? {
            bytes += text.len();
            if bytes > MAX_PTX_BYTES {
                return Err(LoadError::TooLarge {
                    what: "the PTX of all inputs",
                    found: bytes as u64,
                    limit: MAX_PTX_BYTES as u64,
                });
            }
            texts.push(text);
        }
    }
    Ok(texts)
}

/// Finds the PTX for the newest architecture that this device supports.
fn find_in_one(fatbin: &[u8]) -> Result<Found<'_>, LoadError> {
    let entries = entries(fatbin)?;
    let ptx = entries.iter().filter(|entry| entry.is_ptx());
    let best = ptx
        .clone()
        .filter(|entry| entry.architecture() <= ARCHITECTURE)
        .max_by_key(|entry| entry.architecture());
    if let Some(best) = best {
        return match best.unpack(MAX_PTX_BYTES)? {
            Cow::Borrowed(bytes) => text(bytes).map(|text| Found::Ptx(Cow::Borrowed(text))),
            Cow::Owned(bytes) => text(&bytes).map(|text| Found::Ptx(Cow::Owned(text.to_owned()))),
        };
    }
    let mut machine = Vec::new();
    for entry in entries.iter().filter(|entry| entry.is_elf()) {
        let bytes = entry.unpack(MAX_PTX_BYTES)?;
        match elf::has_kernels(&bytes).filter(|_| elf::is_elf(&bytes)) {
            Some(true) => machine.push(format!("sm_{}", entry.architecture())),
            Some(false) => {}
            None => {
                return Err(LoadError::InvalidImage(
                    "an ELF entry of the fatbin is damaged".to_owned(),
                ));
            }
        }
    }
    machine.extend(ptx.map(|entry| format!("compute_{}", entry.architecture())));
    machine.dedup();
    if machine.is_empty() {
        Ok(Found::Empty)
    } else {
        Err(LoadError::NoKernelImage {
            arch: machine.join(", "),
        })
    }
}

impl From<FatbinError> for LoadError {
    fn from(error: FatbinError) -> Self {
        let (what, found, limit) = match error {
            FatbinError::Headers | FatbinError::Compression(_) => {
                return Self::InvalidImage(error.to_string());
            }
            FatbinError::Entries { found, limit } => ("the fatbin's list of entries", found, limit),
            FatbinError::Entry { found, limit } => ("an entry of the fatbin", found, limit),
        };
        Self::TooLarge { what, found, limit }
    }
}
