//! Images in the layout of the OCI (image-layout.md, manifest.md and config.md of its image specification, 1.1): a folder
//! with an index, and with manifests, configurations and layers by their sums.
//!
//! All of it comes from elsewhere. Sizes are bounded, sums are compared before anything is used, and [`unpack`] writes
//! nothing outside of its folder.

mod layer;
mod removal;
mod rooted;
mod users;

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use rustix::fs::{FileType, Mode, OFlags, fstat};
use wormhole_init::User;

use crate::sums;

use self::layer::Unpacking;
pub use self::removal::remove_unpacked;

/// The file by which a folder is a layout.
const MARKER: &str = "oci-layout";
/// Versions of the layout that begin so are known.
const VERSION: &str = "1.";
/// Most bytes of an index, a manifest or a configuration.
const MOST_JSON: u64 = 4 << 20;
/// Most indexes on the way to a manifest.
const MOST_INDEXES: usize = 4;
/// Most layers of an image.
const MOST_LAYERS: usize = 512;
/// The platform of guests, by the names of Go.
const PLATFORM: (&str, &str) = ("linux", "amd64");

/// Reason why an image cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum OciError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} does not have the form of the OCI's layout", .path.display())]
    Json {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("{} has version {version:?} of the OCI's layout: only 1 is known", .path.display())]
    Version { path: PathBuf, version: String },
    #[error(
        "{} has {count} images for linux/amd64: make a layout with exactly one, as `skopeo copy` does",
        .path.display()
    )]
    Count { path: PathBuf, count: usize },
    #[error("the image has {0:?} instead of a SHA-256 sum")]
    Sum(String),
    #[error("{} does not have the size and the sum by which the image names it: copy the image again", .0.display())]
    Changed(PathBuf),
    #[error("the image is for {os}/{architecture}, and guests are linux/amd64")]
    Platform { os: String, architecture: String },
    #[error("the image has {0} layers: at most {MOST_LAYERS} are possible")]
    Layers(usize),
    #[error(
        "the image has a layer of the kind {0:?}: only tar, with gzip, zstd or nothing, is known"
    )]
    Kind(String),
    #[error("cannot unpack {}", .path.display())]
    Layer { path: PathBuf, source: io::Error },
    #[error("cannot unpack {} of the image", .path.display())]
    Entry { path: PathBuf, source: io::Error },
    #[error("the image names {}, which is outside of it", .0.display())]
    Outside(PathBuf),
    #[error("the image's user {0:?} is not in its /etc/passwd and /etc/group")]
    User(String),
    #[error("the image has more than {0} files and folders")]
    Files(u64),
    #[error("the image has a path with more than {0} parts")]
    Depth(usize),
    #[error("the paths of a layer take more than {0} bytes")]
    Names(u64),
    #[error("the image has more than {0} bytes: the limit, or half of the free space below TMPDIR")]
    Bytes(u64),
}

/// Defaults of an image for starting its program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct ImageProgram {
    /// `UID`, `UID:GID` or names of them; the caller's if empty.
    pub user: String,
    /// `NAME=VALUE` each.
    pub env: Vec<String>,
    #[serde(deserialize_with = "or_null")]
    pub entrypoint: Vec<String>,
    #[serde(deserialize_with = "or_null")]
    pub cmd: Vec<String>,
    pub working_dir: String,
}

/// Reads a list, or nothing in its place.
fn or_null<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

impl ImageProgram {
    /// Returns the user of the image, with numbers from the files of its unpacked folder; `None` if it names none.
    ///
    /// # Errors
    /// The folder has no such user or group.
    pub fn user(&self, folder: &Path) -> Result<Option<User>, OciError> {
        users::find(folder, &self.user)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Marker {
    image_layout_version: String,
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<Platform>,
}

#[derive(Clone, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

#[derive(Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Configuration {
    os: String,
    architecture: String,
    config: Option<ImageProgram>,
}

/// Returns whether a folder is a layout.
#[must_use]
pub fn is_layout(folder: &Path) -> bool {
    folder.join(MARKER).is_file()
}

/// Unpacks the layout's image for guests into `to`, an empty folder, and returns how its program is started.
///
/// # Errors
/// The layout is damaged, or has no such image or several, or the folder has no room.
pub fn unpack(layout: &Path, to: &Path) -> Result<ImageProgram, OciError> {
    let path = layout.join(MARKER);
    let marker: Marker = json(&path, &bytes(&path, MOST_JSON)?)?;
    if !marker.image_layout_version.starts_with(VERSION) {
        let version = marker.image_layout_version;
        return Err(OciError::Version { path, version });
    }
    let path = layout.join("index.json");
    let mut index: Index = json(&path, &bytes(&path, MOST_JSON)?)?;
    let mut chosen = choose(layout, &index)?;
    for _ in 0..MOST_INDEXES {
        if !(chosen.media_type.contains(".index.") || chosen.media_type.contains(".list.")) {
            break;
        }
        index = parsed(layout, &chosen)?;
        chosen = choose(layout, &index)?;
    }
    let manifest: Manifest = parsed(layout, &chosen)?;
    let configuration: Configuration = parsed(layout, &manifest.config)?;
    let (os, architecture) = (configuration.os, configuration.architecture);
    if (&*os, &*architecture) != PLATFORM {
        return Err(OciError::Platform { os, architecture });
    }
    if manifest.layers.len() > MOST_LAYERS {
        return Err(OciError::Layers(manifest.layers.len()));
    }
    let mut unpacking = Unpacking::new(to)?;
    for layer in &manifest.layers {
        let path = blob(layout, layer)?;
        let mut file = verified(&path, layer)?;
        let content: Box<dyn Read + '_> = match layer.media_type.rsplit(['.', '+']).next() {
            Some("tar") => Box::new(&mut file),
            Some("gzip") => Box::new(flate2::read::MultiGzDecoder::new(&mut file)),
            Some("zstd") => Box::new(ruzstd::decoding::StreamingDecoder::new(&mut file).map_err(
                |error| OciError::Layer {
                    path: path.clone(),
                    source: io::Error::other(error),
                },
            )?),
            _ => return Err(OciError::Kind(layer.media_type.clone())),
        };
        unpacking.layer(&path, content)?;
    }
    Ok(configuration.config.unwrap_or_default())
}

/// Returns the one image of an index that guests can have.
fn choose(layout: &Path, index: &Index) -> Result<Descriptor, OciError> {
    let is_of = |descriptor: &&Descriptor| match &descriptor.platform {
        Some(platform) => (&*platform.os, &*platform.architecture) == PLATFORM,
        // Its configuration tells.
        None => true,
    };
    let mut found = index.manifests.iter().filter(is_of);
    match (found.next(), found.count()) {
        (Some(one), 0) => Ok(one.clone()),
        (first, more) => Err(OciError::Count {
            path: layout.to_owned(),
            count: usize::from(first.is_some()) + more,
        }),
    }
}

/// Returns the path of a blob.
fn blob(layout: &Path, descriptor: &Descriptor) -> Result<PathBuf, OciError> {
    let sum = descriptor.digest.strip_prefix("sha256:");
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let sum = sum.filter(|sum| sum.len() == 64 && sum.bytes().all(is_hex));
    let sum = sum.ok_or_else(|| OciError::Sum(descriptor.digest.clone()))?;
    Ok(layout.join("blobs/sha256").join(sum))
}

/// Opens a file of a layout. Anything else, as a pipe, could hold up its reader.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    match FileType::from_raw_mode(fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(file.into()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is no regular file",
        )),
    }
}

/// Opens a blob that has its size and its sum.
fn verified(path: &Path, descriptor: &Descriptor) -> Result<File, OciError> {
    let failed = |source| OciError::Read {
        path: path.to_owned(),
        source,
    };
    let mut file = open(path).map_err(failed)?;
    // One byte more than there should be.
    let mut content = (&mut file).take(descriptor.size.saturating_add(1));
    let (sum, size) = sums::of_all(&mut content).map_err(failed)?;
    if size != descriptor.size || !path.ends_with(&sum) {
        return Err(OciError::Changed(path.to_owned()));
    }
    file.rewind().map_err(failed)?;
    Ok(file)
}

fn parsed<T: DeserializeOwned>(layout: &Path, descriptor: &Descriptor) -> Result<T, OciError> {
    let path = blob(layout, descriptor)?;
    if descriptor.size > MOST_JSON {
        return Err(OciError::Changed(path));
    }
    // Parses the bytes that were compared, whoever else writes to the file.
    let bytes = bytes(&path, descriptor.size.saturating_add(1))?;
    if bytes.len() as u64 != descriptor.size || !path.ends_with(sums::of(&bytes)) {
        return Err(OciError::Changed(path));
    }
    json(&path, &bytes)
}

fn bytes(path: &Path, most: u64) -> Result<Vec<u8>, OciError> {
    let mut bytes = Vec::new();
    let read = open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    match read {
        Ok(_) => Ok(bytes),
        Err(source) => Err(OciError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

fn json<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, OciError> {
    serde_json::from_slice(bytes).map_err(|source| OciError::Json {
        path: path.to_owned(),
        source,
    })
}
