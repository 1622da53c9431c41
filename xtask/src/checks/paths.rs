//! Checks that no file names a path of the build machine.

use std::path::{Path, PathBuf};

use memchr::memmem;

use super::git;
use crate::command::{Failure, step};
use crate::stage;

/// Folders of users, which project files have no reason to name.
const USERS: [&str; 3] = ["/root/", "/home/", "/.cargo/registry/"];

/// Allowed paths, by the end of the path of the file that names them.
const ALLOWED: [(&str, &str); 2] = [
    // The root of a process in /proc.
    ("tests/sandbox/attacks.rs", "/root/"),
    // The constants above.
    ("xtask/src/checks/paths.rs", ""),
];

/// Returns a complaint for each path of this machine in the files of the repository and of the staged installation.
/// Symbol files are not checked, because those of the linker's own objects name the folder in which it ran.
pub fn paths(root: &Path) -> Result<Vec<String>, Failure> {
    let mut files: Vec<PathBuf> = match git(root, &["ls-files", "-z"])? {
        Some(list) => list
            .split_terminator('\0')
            .map(|name| root.join(name))
            .collect(),
        None => {
            step("skipping the paths in sources: this is no git checkout");
            Vec::new()
        }
    };
    files.extend(stage::parts(root));
    let wanted = wanted(root);
    let mut complaints = Vec::new();
    // Tracked files may be missing if their removal is not committed yet.
    for file in files.iter().filter(|file| file.is_file()) {
        let bytes = std::fs::read(file)
            .map_err(|error| Failure::new(format!("cannot read {}: {error}", file.display())))?;
        let name = file.strip_prefix(root).unwrap_or(file);
        let found = named(&bytes, &wanted).filter(|path| !is_allowed(name, path));
        complaints.extend(found.map(|path| format!("{} names {path}", name.display())));
    }
    Ok(complaints)
}

/// Returns the paths to look for.
fn wanted(root: &Path) -> Vec<String> {
    let own = [
        Some(root.to_path_buf()),
        Some(stage::cargo_home()),
        std::env::var_os("HOME").map(PathBuf::from),
    ];
    let own = own
        .into_iter()
        .flatten()
        // A user without a home folder has `/`.
        .filter(|folder| folder.components().count() > 1)
        .map(|folder| format!("{}/", folder.display()));
    let mut wanted: Vec<String> = USERS.map(str::to_owned).into_iter().chain(own).collect();
    wanted.sort();
    wanted.dedup();
    wanted
}

/// Returns the wanted paths that occur in these bytes.
fn named<'a>(bytes: &[u8], wanted: &'a [String]) -> impl Iterator<Item = &'a str> {
    wanted
        .iter()
        .map(String::as_str)
        .filter(move |path| memmem::find(bytes, path.as_bytes()).is_some())
}

fn is_allowed(file: &Path, path: &str) -> bool {
    ALLOWED
        .iter()
        .any(|&(end, allowed)| file.ends_with(end) && path.starts_with(allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_in_the_midst_of_binaries() {
        let wanted = wanted(Path::new("/build/checkout"));
        let bytes = b"\x7fELF\0\xff-L/build/checkout/target\0/usr/lib\0";
        let found: Vec<&str> = named(bytes, &wanted).collect();
        assert_eq!(found, ["/build/checkout/"]);
        assert_eq!(named(b"\x7fELF wormhole/target", &wanted).count(), 0);
    }

    #[test]
    fn a_reason_is_for_one_file() {
        assert!(is_allowed(
            Path::new("backend-vm/tests/sandbox/attacks.rs"),
            "/root/"
        ));
        assert!(!is_allowed(
            Path::new("backend-vm/tests/sandbox/attacks.rs"),
            "/home/"
        ));
        assert!(!is_allowed(Path::new("README.md"), "/root/"));
    }
}
