//! Environment variables of a program.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use rustix::process::geteuid;

use super::Options;

/// Environment variable of a program: name and value.
pub type Variable = (OsString, OsString);

/// Parses a variable as given by `--env`.
pub fn variable(text: OsString) -> Result<Variable, String> {
    let mut parts = text.as_bytes().splitn(2, |byte| *byte == b'=');
    let name = OsStr::from_bytes(parts.next().unwrap_or_default());
    if name.is_empty() {
        return Err("a variable needs a name".to_owned());
    }
    let value = match parts.next() {
        Some(value) => Some(OsStr::from_bytes(value).to_owned()),
        None => std::env::var_os(name),
    };
    match value {
        Some(value) => Ok((name.to_owned(), value)),
        None => Err(format!(
            "{0} is not set here: write {0}=VALUE",
            name.display()
        )),
    }
}

impl Options {
    /// Returns the variables of a program in a guest: those given, and the caller's that it needs.
    pub fn variables(&self) -> Vec<Variable> {
        let mut variables = forwarded_variables();
        if self.has_own_files() {
            let mine = SAME_FILES.iter().filter_map(|name| {
                let value = std::env::var_os(name)?;
                Some((OsString::from(name), value))
            });
            variables.extend(mine);
        } else {
            variables.extend(time_zone().map(|zone| (TIME_ZONE.into(), zone)));
            if !geteuid().is_root() {
                // The usual one is root's.
                variables.push(("HOME".into(), "/".into()));
            }
        }
        if self.tty {
            variables.extend(std::env::var_os(TERMINAL).map(|kind| (TERMINAL.into(), kind)));
        }
        variables.extend(self.env.iter().cloned());
        with_last_values(variables)
    }
}

/// Variables that a program in a guest has from the caller, where it has the caller's files.
const SAME_FILES: [&str; 11] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    TIME_ZONE,
];

/// Names the kind of a terminal (term(7)).
const TERMINAL: &str = "TERM";

/// Names the time zone (tzset(3)).
const TIME_ZONE: &str = "TZ";

/// Returns the caller's time zone, for a guest with other files. Without a variable it is the rule in the system's file, which needs no files in a
/// guest.
fn time_zone() -> Option<OsString> {
    std::env::var_os(TIME_ZONE).or_else(|| rule(&std::fs::read("/etc/localtime").ok()?))
}

/// Returns the rule at the end of a time zone's file (tzfile(5), since version 2), such as `CET-1CEST,M3.5.0,M10.5.0/3`.
fn rule(file: &[u8]) -> Option<OsString> {
    if !file.starts_with(b"TZif") {
        return None;
    }
    let rule = file
        .strip_suffix(b"\n")?
        .rsplit(|byte| *byte == b'\n')
        .next()?;
    (!rule.is_empty()).then(|| OsStr::from_bytes(rule).to_owned())
}

/// Names the folders in which the loader looks for libraries first (ld.so(8)).
pub const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";

/// Returns the variables of this environment that a guest's program gets: those that CUDA programs and the frontend
/// read, and the folders of libraries.
pub fn forwarded_variables() -> Vec<Variable> {
    let folders = std::env::var_os(LIBRARY_PATH).and_then(|path| absolute_folders(&path));
    std::env::vars_os()
        .filter(|(name, _)| {
            let name = name.to_string_lossy();
            name.starts_with("CUDA_") || ["WORMHOLE_LOG", "WORMHOLE_CHAINS"].contains(&&*name)
        })
        .chain(folders.map(|path| (LIBRARY_PATH.into(), path)))
        .collect()
}

/// Returns each variable once, with its last value: programs read the first of two.
fn with_last_values(variables: Vec<Variable>) -> Vec<Variable> {
    let mut seen = HashSet::new();
    let mut last: Vec<Variable> = variables
        .into_iter()
        .rev()
        .filter(|(name, _)| seen.insert(name.clone()))
        .collect();
    last.reverse();
    last
}

/// Makes the folders of a path absolute. The loader takes an empty name for the working directory.
fn absolute_folders(path: &OsStr) -> Option<OsString> {
    if path.is_empty() {
        return None;
    }
    let folders = std::env::split_paths(path).filter_map(|folder| {
        let named = !folder.as_os_str().is_empty();
        let whole = if named {
            std::path::absolute(&folder)
        } else {
            std::env::current_dir()
        };
        whole.ok()
    });
    std::env::join_paths(folders).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_has_its_last_value() {
        let variable = |name: &str, value: &str| (name.into(), value.into());
        let given = vec![variable("A", "1"), variable("B", "2"), variable("A", "3")];
        let last = vec![variable("B", "2"), variable("A", "3")];
        assert_eq!(with_last_values(given), last);
    }

    #[test]
    fn a_time_zones_file_ends_with_its_rule() {
        let rule = |file: &[u8]| rule(file).map(OsString::into_encoded_bytes);
        let central = b"TZif2\0\n\0CET\0\nCET-1CEST,M3.5.0,M10.5.0/3\n";
        assert_eq!(rule(central), Some(b"CET-1CEST,M3.5.0,M10.5.0/3".to_vec()));
        for none in [&b"TZif2\0\n\n"[..], b"TZif", b"UTC0\n", b""] {
            assert_eq!(rule(none), None);
        }
    }

    #[test]
    fn folders_of_libraries_are_the_same_in_a_guest() {
        let here = std::env::current_dir().expect("a working directory");
        let here = here.to_str().expect("text");
        let absolute = |path: &str| absolute_folders(path.as_ref());
        let wanted = format!("/opt/lib:{here}/lib:{here}");
        assert_eq!(absolute("/opt/lib:lib:"), Some(wanted.into()));
        assert_eq!(absolute(""), None);
    }
}
