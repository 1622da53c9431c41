//! Finds the folder of a file that a run writes when its guest has ended.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, fstat, openat, readlinkat, statx,
};
use rustix::io::Errno;

/// Most links on the way to a folder, as of the kernel.
const MOST_LINKS: usize = 40;

/// Identity of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: (u32, u32),
    inode: u64,
    /// Number of the mount by which it was reached, if the kernel tells it (Linux 5.8).
    mount: Option<u64>,
    /// Device of that mount's file system. Folders of one file system can have several devices of their own, as subvolumes
    /// of Btrfs have.
    file_system: (u32, u32),
}

impl Identity {
    fn of(folder: impl AsFd, path: &Path, mounts: &str) -> Result<Self, Errno> {
        let flags = AtFlags::EMPTY_PATH;
        let data = statx(folder, path, flags, StatxFlags::INO | StatxFlags::MNT_ID)?;
        let tells_mount = data.stx_mask & StatxFlags::MNT_ID.bits() != 0;
        let mount = tells_mount.then_some(data.stx_mnt_id);
        let device = (data.stx_dev_major, data.stx_dev_minor);
        let file_system = mount.and_then(|mount| file_system_of(mount, mounts));
        Ok(Self {
            device,
            inode: data.stx_ino,
            mount,
            file_system: file_system.unwrap_or(device),
        })
    }

    /// Returns whether the folder is a volume, or may be a part of it: its file system is the volume's by another mount,
    /// which can begin anywhere below the volume.
    fn may_be_of(&self, volume: &Self) -> bool {
        let is_volume = self.device == volume.device && self.inode == volume.inode;
        is_volume || self.file_system == volume.file_system && self.mount != volume.mount
    }
}

/// Table of this process's mounts.
const MOUNTS: &str = "/proc/self/mountinfo";

/// Finds the device of a mount's file system in the table of mounts (proc_pid_mountinfo(5)).
fn file_system_of(mount: u64, mounts: &str) -> Option<(u32, u32)> {
    let number = mount.to_string();
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let is_it = fields.next() == Some(number.as_str());
        let (major, minor) = fields.nth(1).filter(|_| is_it)?.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    })
}

/// Opens the folder of a path that a run writes after its guest. Returns it, and whether it may lie in one of the guest's
/// volumes. There it follows no link: this guest or an earlier one can have made it.
///
/// # Errors
/// The folder does not exist, or a link of a guest is on the way.
pub fn open_parent(path: &Path, volumes: &[&Path]) -> io::Result<(OwnedFd, bool)> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    open_folder(parent.unwrap_or(Path::new(".")), volumes).map_err(of_links)
}

/// Opens a folder part by part. Returns it, and whether it may lie in one of the volumes. Follows links outside of these.
fn open_folder(folder: &Path, volumes: &[&Path]) -> Result<(OwnedFd, bool), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = || openat(CWD, "/", flags, Mode::empty());
    // Without the table a file system is known by the device of its folders alone.
    let mounts = std::fs::read(MOUNTS).unwrap_or_default();
    let mounts = String::from_utf8_lossy(&mounts);
    let volumes = volumes
        .iter()
        .map(|volume| Identity::of(CWD, volume, &mounts));
    let volumes: Vec<Identity> = volumes.flatten().collect();
    let absolute = std::path::absolute(folder).map_err(|_| Errno::NOENT)?;
    let mut parts: Vec<OsString> = parts_of(&absolute);
    // The folders on the way, each with whether it lies in a volume.
    let mut way = vec![(root()?, false)];
    let mut links = 0;
    while let Some(part) = parts.pop() {
        if part == ".." {
            if way.len() > 1 {
                way.pop();
            }
            continue;
        }
        let (above, is_in) = way.last().ok_or(Errno::NOENT)?;
        let found = openat(above, &part, flags, Mode::empty())?;
        let data = fstat(&found)?;
        if FileType::from_raw_mode(data.st_mode) != FileType::Symlink {
            let own = Identity::of(&found, Path::new(""), &mounts)?;
            let is_in = *is_in || volumes.iter().any(|volume| own.may_be_of(volume));
            way.push((found, is_in));
            continue;
        }
        links += 1;
        if *is_in || links > MOST_LINKS {
            return Err(Errno::LOOP);
        }
        let target = readlinkat(above, &part, Vec::new())?;
        let target = Path::new(OsStr::from_bytes(target.to_bytes()));
        if target.is_absolute() {
            way = vec![(root()?, false)];
        }
        parts.extend(parts_of(target));
    }
    let (found, is_in) = way.pop().ok_or(Errno::NOENT)?;
    match FileType::from_raw_mode(fstat(&found)?.st_mode) {
        FileType::Directory => Ok((found, is_in)),
        _ => Err(Errno::NOTDIR),
    }
}

/// Returns the parts of a path, the first one last.
fn parts_of(path: &Path) -> Vec<OsString> {
    let parts = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
    });
    let mut parts: Vec<OsString> = parts.collect();
    parts.reverse();
    parts
}

/// Returns the error of an open that met a link which it does not follow.
pub fn of_links(error: Errno) -> io::Error {
    match error {
        Errno::LOOP => io::Error::other(
            "a link in a volume of the guest is on the way; remove it or name another file",
        ),
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_volume_is_known_by_its_file_system_where_its_device_differs() {
        // Two mounts of one Btrfs, the second one of a subvolume below the first, and one of another file system.
        let mounts = "36 25 0:31 / /vol rw - btrfs /dev/vdb rw\n\
                      47 25 0:31 /in /mnt\\040in rw,noatime shared:1 - btrfs /dev/vdb rw\n\
                      5 25 0:36 / /other rw - tmpfs none rw\n";
        let at = |mount, device, inode| Identity {
            device,
            inode,
            mount: Some(mount),
            file_system: file_system_of(mount, mounts).expect("it is in the table"),
        };
        let volume = at(36, (0, 32), 256);
        assert!(at(47, (0, 33), 256).may_be_of(&volume), "by another mount");
        assert!(at(36, (0, 32), 256).may_be_of(&volume), "itself");
        // Another folder by the same mount would have been reached through the volume.
        assert!(!at(36, (0, 33), 256).may_be_of(&volume));
        assert!(!at(5, (0, 36), 256).may_be_of(&volume));
        assert_eq!(file_system_of(4, mounts), None);
        let own = std::fs::read_to_string(MOUNTS).expect("proc is mounted");
        let root = Identity::of(CWD, Path::new("/"), &own).expect("it is there");
        assert!(
            root.mount
                .is_none_or(|mount| file_system_of(mount, &own).is_some())
        );
    }
}
