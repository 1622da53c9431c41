//! The description of an image's driver.

use std::fmt;
use std::path::PathBuf;

/// A driver of an image, as the image's file `driver` and [`Driver::FILE`] in the VM describe it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Driver {
    /// NVIDIA's version.
    pub version: String,
    /// The file or the packages that it was built of.
    pub origin: String,
    /// Release of the kernel that its modules are for.
    pub release: String,
    /// Paths in the VM and parameters of its modules, in load order.
    pub modules: Vec<(PathBuf, String)>,
    /// Names of libraries that its own need, and that the image does not have.
    pub libraries: Vec<String>,
}

impl Driver {
    /// Path of the description in a VM.
    pub const FILE: &str = "/etc/wormhole/driver";

    /// Reads a description; `None` if it is none.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut driver = Self::default();
        for line in text.lines() {
            let (key, value) = line.split_once(' ')?;
            match key {
                "version" => value.clone_into(&mut driver.version),
                "origin" => value.clone_into(&mut driver.origin),
                "release" => value.clone_into(&mut driver.release),
                "module" => {
                    let (path, parameters) = value.split_once(' ').unwrap_or((value, ""));
                    driver.modules.push((path.into(), parameters.to_owned()));
                }
                // The library of that name is looked for on this machine.
                "library" if is_plain(value) => driver.libraries.push(value.to_owned()),
                _ => return None,
            }
        }
        let is_whole =
            !driver.version.is_empty() && !driver.release.is_empty() && !driver.modules.is_empty();
        is_whole.then_some(driver)
    }
}

/// Returns whether a library's name is a plain file name: no path, and nothing that would be another line.
pub(super) fn is_plain(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
    (1..=255).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(is_part)
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "version {}", self.version)?;
        writeln!(f, "origin {}", self.origin)?;
        writeln!(f, "release {}", self.release)?;
        for (path, parameters) in &self.modules {
            let line = format!("module {} {parameters}", path.display());
            writeln!(f, "{}", line.trim_end())?;
        }
        self.libraries
            .iter()
            .try_for_each(|name| writeln!(f, "library {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_back_and_no_part_of_it_is_a_panic() {
        let driver = Driver {
            version: "580.95.05".to_owned(),
            origin: "NVIDIA-Linux-x86_64-580.95.05.run".to_owned(),
            release: "6.1.0-56-cloud-amd64".to_owned(),
            modules: vec![
                ("/usr/lib/modules/a.ko".into(), String::new()),
                ("/usr/lib/modules/b.ko".into(), "one=1 two=2".to_owned()),
            ],
            libraries: vec!["libm.so.6".to_owned()],
        };
        let text = driver.to_string();
        assert_eq!(Driver::parse(&text), Some(driver));
        for length in 0..text.len() {
            let _ = Driver::parse(&text[..length]);
        }
        assert_eq!(Driver::parse(""), None);
        assert_eq!(Driver::parse("version 1.2\nrelease 6.1\n"), None);
        assert_eq!(Driver::parse(&format!("{text}other 1\n")), None);
        for name in [
            "",
            "..",
            "/dev/zero",
            "../a.so",
            "a/b.so",
            "a b",
            "a\u{1b}",
            ".so",
        ] {
            assert!(!is_plain(name), "{name:?}");
            assert_eq!(
                Driver::parse(&format!("{text}library {name}\n")),
                None,
                "{name:?}"
            );
        }
        assert!(!is_plain("a\nmodule /b") && !is_plain(&"a".repeat(256)));
        for name in ["libstdc++.so.6", "ld-linux-x86-64.so.2", "libc_1.so"] {
            assert!(is_plain(name), "{name}");
        }
    }
}
