//! Mounts the host's files, which a virtio file system holds.
//!
//! As the root they lie read-only below an overlay whose changes are in memory. A volume may be writable. The file systems of this machine, those
//! in [`MOVED`], cover their namesakes of the host.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chroot};
use std::path::Path;

use wormhole_init::{FILES_TAG, PARTS, PARTS_BESIDE_FILES, Volume, mount_one, volume_tag};

/// Folders of the image in which the root is put together.
const LOWER: &str = "/files/lower";
const CHANGES: &str = "/files/changes";
const ROOT: &str = "/files/root";

/// Mounts of the first root that move to the new one. Mounts below them move along.
const MOVED: [&str; 3] = ["/proc", "/sys", "/dev"];

const READ_ONLY: libc::c_ulong = libc::MS_RDONLY | libc::MS_NODEV;
const WRITABLE: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV;

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error("cannot mount the host's files: {source}{}", hint(.source))]
    Host { source: io::Error },
    #[error("cannot make {path} for the host's files: {source}")]
    Folder { path: String, source: io::Error },
    #[error("cannot mount {path} beside the host's files: {source}{}", hint(.source))]
    Mount { path: String, source: io::Error },
    #[error("cannot make the host's files the root: {source}")]
    Root { source: io::Error },
}

/// Names the remedy if the kernel lacks a driver.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENODEV) => {
            "; the image lacks a driver: build it again with `wormhole image build guest --rebuild` (and \
             `emulated-host`)"
        }
        _ => "",
    }
}

/// Mounts the host's files at a place, or as the root.
pub fn mount(place: &Path) -> Result<(), FilesError> {
    if place != Path::new("/") {
        let place = place.display().to_string();
        make(&place)?;
        return mount_host(&place);
    }
    for folder in [LOWER, CHANGES, ROOT] {
        make(folder)?;
    }
    mount_host(LOWER)?;
    let failed = |path: &str| {
        let path = path.to_owned();
        |source| FilesError::Mount { path, source }
    };
    mount_one("tmpfs", "tmpfs", CHANGES, 0, "mode=0755").map_err(failed(CHANGES))?;
    let [upper, work] = ["upper", "work"].map(|name| format!("{CHANGES}/{name}"));
    make(&upper)?;
    make(&work)?;
    let options = format!("lowerdir={LOWER},upperdir={upper},workdir={work}");
    mount_one("overlay", "overlay", ROOT, 0, &options).map_err(failed("/"))?;
    for path in MOVED {
        let to = format!("{ROOT}{path}");
        make(&to)?;
        mount_one("", path, &to, libc::MS_MOVE, "").map_err(failed(path))?;
    }
    let run = format!("{ROOT}/run");
    make(&run)?;
    mount_one("tmpfs", "tmpfs", &run, 0, "mode=0755").map_err(failed("/run"))?;
    let parts = format!("{ROOT}{PARTS_BESIDE_FILES}");
    make(&parts)?;
    mount_one("", PARTS, &parts, libc::MS_BIND, "").map_err(failed(PARTS_BESIDE_FILES))?;
    let shared = format!("{ROOT}/tmp");
    if fs::metadata(&shared).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        make(&shared)?;
        // A failure shows in the program that needs the folder.
        let _ = fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777));
    }
    enter(ROOT).map_err(|source| FilesError::Root { source })
}

/// Mounts further folders of the host at their places of the root.
pub fn mount_volumes(volumes: &[Volume]) -> Result<(), FilesError> {
    for (number, volume) in volumes.iter().enumerate() {
        let place = volume.place.display().to_string();
        let flags = match volume.is_writable {
            true => WRITABLE,
            false => READ_ONLY,
        };
        make(&place)?;
        mount_one("virtiofs", &volume_tag(number), &place, flags, "").map_err(|source| {
            FilesError::Mount {
                path: place.clone(),
                source,
            }
        })?;
    }
    Ok(())
}

fn mount_host(place: &str) -> Result<(), FilesError> {
    mount_one("virtiofs", FILES_TAG, place, READ_ONLY, "")
        .map_err(|source| FilesError::Host { source })
}

fn make(folder: &str) -> Result<(), FilesError> {
    fs::create_dir_all(folder).map_err(|source| FilesError::Folder {
        path: folder.to_owned(),
        source,
    })
}

/// Makes a mount the root of this process, over the first root, which cannot be unmounted.
fn enter(root: &str) -> io::Result<()> {
    std::env::set_current_dir(root)?;
    mount_one("", ".", "/", libc::MS_MOVE, "")?;
    chroot(".")?;
    std::env::set_current_dir("/")
}
