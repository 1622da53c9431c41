//! `--volume`: folders of this machine at other places of a guest.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Most volumes of a guest.
const MOST: usize = 8;

/// Folders that are the guest's own.
const OWN: [&str; 3] = ["proc", "sys", "dev"];

/// A volume as given by `--volume`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    pub source: PathBuf,
    pub destination: PathBuf,
    /// Whether the guest may change the folder.
    pub is_writable: bool,
}

/// Reason why a guest cannot have its volumes.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error("a guest cannot have {0} volumes: at most {MOST} are possible")]
    Count(usize),
    #[error("cannot show {} to a guest", .0.display())]
    Source(PathBuf, #[source] io::Error),
    #[error("cannot show {} to a guest: it is no folder", .0.display())]
    NoFolder(PathBuf),
    #[error("two volumes have the place {} in the guest: give each one of its own", .0.display())]
    SamePlace(PathBuf),
}

impl Volume {
    /// Parses `SOURCE:DESTINATION[:ro]`. The destination has no colon.
    pub fn parse(text: OsString) -> Result<Self, &'static str> {
        let text = text.as_bytes();
        let read_only = text.strip_suffix(b":ro");
        let is_writable = read_only.is_none();
        let text = read_only.unwrap_or(text);
        let colon = text.iter().rposition(|byte| *byte == b':');
        let (source, destination) = text.split_at(colon.unwrap_or(0));
        let destination = Path::new(OsStr::from_bytes(destination.get(1..).unwrap_or_default()));
        if source.is_empty() {
            return Err("write a volume as SOURCE:DESTINATION, or SOURCE:DESTINATION:ro");
        }
        let mut parts = destination.components();
        let is_absolute = parts.next() == Some(Component::RootDir);
        let names: Vec<Component<'_>> = parts.collect();
        let are_names = names
            .iter()
            .all(|part| matches!(part, Component::Normal(_)));
        if !is_absolute || names.is_empty() || !are_names {
            return Err("the destination must be a path below / without . and ..");
        }
        if OWN
            .iter()
            .any(|own| names.first() == Some(&Component::Normal(own.as_ref())))
        {
            return Err("/proc, /sys and /dev are the guest's own");
        }
        Ok(Self {
            source: OsStr::from_bytes(source).into(),
            destination: destination.components().collect(),
            is_writable,
        })
    }

    /// Returns the text that [`parse`](Self::parse) reads.
    pub fn text(&self) -> OsString {
        let mut text =
            [self.source.as_os_str(), self.destination.as_os_str()].join(OsStr::new(":"));
        if !self.is_writable {
            text.push(":ro");
        }
        text
    }

    /// Returns how a guest mounts it.
    pub fn mount(&self) -> wormhole_images::Volume {
        wormhole_images::Volume {
            place: self.destination.clone(),
            is_writable: self.is_writable,
        }
    }
}

/// Refuses volumes that are impossible.
pub fn check(volumes: &[Volume]) -> Result<(), VolumeError> {
    if volumes.len() > MOST {
        return Err(VolumeError::Count(volumes.len()));
    }
    for (index, volume) in volumes.iter().enumerate() {
        let source = &volume.source;
        let data = std::fs::metadata(source);
        let data = data.map_err(|error| VolumeError::Source(source.clone(), error))?;
        if !data.is_dir() {
            return Err(VolumeError::NoFolder(source.clone()));
        }
        let is_same = |other: &Volume| other.destination == volume.destination;
        if volumes[..index].iter().any(is_same) {
            return Err(VolumeError::SamePlace(volume.destination.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_read_back() {
        for (end, is_writable) in [("", true), (":ro", false)] {
            let volume = Volume {
                source: "/a:b".into(),
                destination: "/data/set".into(),
                is_writable,
            };
            assert_eq!(Volume::parse(volume.text()), Ok(volume.clone()));
            let text = format!("/a:b:/data//set/{end}");
            assert_eq!(Volume::parse(text.into()), Ok(volume));
        }
    }
}
