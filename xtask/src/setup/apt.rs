//! Installs Debian packages without removing any.

use std::path::Path;

use super::host::{Plan, QEMU_PACKAGE, old_qemu, qemu_version};
use crate::command::{Failure, Run, step};

/// apt sources of Debian 12's backports, which have QEMU 10.
const BACKPORTS: &str = "\
    deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main\n\
    deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm-backports main\n";

/// Arguments of an installation. With `--no-remove` apt fails if it would have to remove a package.
const INSTALL: [&str; 4] = ["--yes", "--no-remove", "--no-install-recommends", "install"];

/// Installs the packages of the plan.
pub fn install(plan: &Plan, root: &Path) -> Result<(), Failure> {
    if !plan.packages.is_empty() {
        let names = plan.packages.join(" ");
        step(&format!("installing Debian packages: {names}"));
        apt_get(&["update"])?;
        apt_get(&[&INSTALL[..], &plan.packages].concat())?;
    }
    if plan.backports {
        backported_qemu(root)?;
    }
    if let Some(note) = &plan.note {
        step(note);
    }
    Ok(())
}

/// Installs QEMU from Debian 12's backports. Does not change the system's list of sources.
fn backported_qemu(root: &Path) -> Result<(), Failure> {
    let folder = root.join("target/apt");
    let lists = folder.join("lists");
    let sources = folder.join("backports.list");
    std::fs::create_dir_all(&lists)
        .and_then(|()| std::fs::write(&sources, BACKPORTS))
        .map_err(|error| Failure::new(format!("cannot write {}: {error}", sources.display())))?;
    let options = [
        "-o".to_owned(),
        format!("Dir::Etc::SourceList={}", sources.display()),
        "-o".to_owned(),
        "Dir::Etc::SourceParts=-".to_owned(),
        "-o".to_owned(),
        format!("Dir::State::Lists={}", lists.display()),
    ];
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let listed = Run::new("dpkg-query")
        .args(["--show", "--showformat"])
        .args(["${db:Status-Abbrev} ${source:Package} ${binary:Package}\n"])
        .output()?
        .1;
    let parts = parts_of_qemu(&listed);
    step(&format!(
        "installing from Debian 12's backports: {}",
        parts.join(" ")
    ));
    let release = ["--target-release", "bookworm-backports"];
    let installed = apt_get(&[&options[..], &["update"]].concat())
        .and_then(|()| apt_get(&[&options[..], &release, &INSTALL, &parts].concat()));
    let Err(failure) = installed else {
        return Ok(());
    };
    step(&format!("{failure}: using Debian 12's own QEMU"));
    if qemu_version().is_none() {
        apt_get(&["update"])?;
        apt_get(&[&INSTALL[..], &[QEMU_PACKAGE]].concat())?;
    }
    if let Some(version) = qemu_version() {
        step(&old_qemu(version));
    }
    Ok(())
}

/// Returns QEMU's system emulator and all installed packages of QEMU's source package. They conflict with other
/// versions of each other, so all are upgraded together.
fn parts_of_qemu(listed: &str) -> Vec<&str> {
    let mut parts = vec![QEMU_PACKAGE];
    for line in listed.lines() {
        let mut words = line.split_whitespace();
        if words.next() == Some("ii") && words.next() == Some("qemu") {
            let package = words.next().filter(|package| !parts.contains(package));
            parts.extend(package);
        }
    }
    parts
}

/// Runs `apt-get` as root.
fn apt_get(args: &[&str]) -> Result<(), Failure> {
    let run = if rustix::process::geteuid().is_root() {
        Run::new("apt-get")
    } else {
        Run::new("sudo").args(["apt-get"])
    };
    run.args(["--quiet"])
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .check()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installed_parts_of_qemu_are_upgraded_along() {
        let listed = "ii  qemu qemu-utils\nrc  qemu qemu-block-extra\nii  gcc-12 g++-12\nii  qemu qemu-system-x86\n";
        assert_eq!(parts_of_qemu(listed), ["qemu-system-x86", "qemu-utils"]);
    }
}
