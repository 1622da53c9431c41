//! Suites of Debian, and names of packages.

use std::fmt;
use std::str::FromStr;

/// A release of Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// Debian 12, with Linux 6.1.
    Bookworm,
    /// Debian 13, with Linux 6.12.
    Trixie,
}

impl Suite {
    /// Returns the archives of the release and of its security updates.
    pub(crate) fn sources(self) -> [String; 2] {
        [
            format!("http://deb.debian.org/debian {self} main"),
            format!("http://deb.debian.org/debian-security {self}-security main"),
        ]
    }
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
        })
    }
}

/// Packages of each image beside Debian's essential ones: a system that boots, has a network, and lets users log in.
const ALWAYS: [&str; 7] = [
    "iproute2",
    "linux-image-cloud-amd64",
    "login",
    "passwd",
    "systemd-resolved",
    "systemd-sysv",
    "udev",
];

/// Returns the packages of an image, sorted.
pub(super) fn of(others: &[PackageName]) -> Vec<&str> {
    let others = others.iter().map(|name| name.0.as_str());
    let mut names: Vec<&str> = ALWAYS.into_iter().chain(others).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The name of a Debian package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackageName(String);

/// Error for a text that cannot be the name of a Debian package.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} cannot be the name of a Debian package, which has at least two of a-z, 0-9, +, - and ., first a letter or a \
     digit"
)]
pub struct NotAPackage(String);

impl FromStr for PackageName {
    type Err = NotAPackage;

    /// Debian's policy manual, 5.6.1.
    fn from_str(text: &str) -> Result<Self, NotAPackage> {
        let plain = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
        let is_name = text.len() >= 2
            && text.starts_with(plain)
            && text
                .chars()
                .all(|letter| plain(letter) || "+-.".contains(letter));
        match is_name {
            true => Ok(Self(text.to_owned())),
            false => Err(NotAPackage(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_apt_would_read_as_something_else_are_refused() {
        for good in ["python3-numpy", "g++", "libc6", "0ad", "libstdc++6-12-dev"] {
            assert!(good.parse::<PackageName>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "a",
            "-o",
            "python3,vim",
            "?essential",
            "vim/sid",
            "Vim",
            "./x.deb",
            "a=1",
            "a b",
        ] {
            assert!(bad.parse::<PackageName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_package_is_installed_once() {
        let more = ["udev", "abc"].map(|name| name.parse().expect("a name"));
        let names = of(&more);
        assert_eq!(names.first(), Some(&"abc"));
        assert_eq!(names.len(), ALWAYS.len() + 1);
    }
}
