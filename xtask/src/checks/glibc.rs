//! Checks the glibc version that the staged programs and libraries need.

use std::path::Path;

use object::Endianness;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, SectionHeader};

use crate::command::Failure;
use crate::stage;

/// Newest glibc whose symbols are allowed: the one of Debian 10 and of Red Hat Enterprise Linux 8.
const NEWEST: Version = (2, 28);

type Version = (u32, u32);

/// Returns a complaint for each staged file that needs a newer glibc than [`NEWEST`].
pub fn glibc(root: &Path) -> Result<Vec<String>, Failure> {
    let mut complaints = Vec::new();
    for part in stage::parts(root) {
        let bytes = std::fs::read(&part)
            .map_err(|error| Failure::new(format!("cannot read {}: {error}", part.display())))?;
        let needs =
            needs(&bytes).map_err(|error| Failure::new(format!("{}: {error}", part.display())))?;
        let newest = needs.iter().filter_map(|need| version(need)).max();
        if let Some((major, minor)) = newest.filter(|&newest| newest > NEWEST) {
            complaints.push(format!(
                "{} needs glibc {major}.{minor}, newer than {}.{}",
                part.display(),
                NEWEST.0,
                NEWEST.1
            ));
        }
    }
    Ok(complaints)
}

/// Returns the symbol versions that an ELF file needs from its libraries, such as `GLIBC_2.17`; none for a static
/// program.
fn needs(bytes: &[u8]) -> object::Result<Vec<String>> {
    let header = FileHeader64::<Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let mut names = Vec::new();
    for section in sections.iter() {
        let Some((mut files, link)) = section.gnu_verneed(endian, bytes)? else {
            continue;
        };
        let strings = sections.strings(endian, bytes, link)?;
        while let Some((_, mut versions)) = files.next()? {
            while let Some(version) = versions.next()? {
                let name = version.name(endian, strings)?;
                names.push(String::from_utf8_lossy(name).into_owned());
            }
        }
    }
    Ok(names)
}

/// Returns the glibc version of a symbol version.
fn version(need: &str) -> Option<Version> {
    let mut numbers = need.strip_prefix("GLIBC_")?.split('.');
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_their_numbers() {
        assert_eq!(version("GLIBC_2.2.5"), Some((2, 2)));
        assert!(version("GLIBC_2.34") > version("GLIBC_2.4"));
        assert_eq!(version("GCC_3.0"), None);
        assert_eq!(version("GLIBC_PRIVATE"), None);
    }

    #[test]
    fn the_needs_of_this_test_are_read() {
        let own = std::env::current_exe().expect("the test has a file");
        let needs = needs(&std::fs::read(own).expect("it is read")).expect("it is an ELF file");
        assert!(
            needs.iter().any(|need| version(need).is_some()),
            "{needs:?}"
        );
    }
}
