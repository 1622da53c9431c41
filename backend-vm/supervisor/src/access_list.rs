//! Access control lists of files (acl(5)), as Linux's `posix_acl_xattr.h` lays them out.

use std::collections::BTreeSet;
use std::path::Path;

use rustix::fs::{XattrFlags, lgetxattr, setxattr};
use rustix::io::Errno;

/// Extended attribute with a file's list.
const ACCESS_LIST: &str = "system.posix_acl_access";

/// Longest value of an extended attribute (`XATTR_SIZE_MAX`).
const LONGEST: usize = 64 << 10;

const FORMAT: u32 = 2;
const FORMAT_BYTES: usize = size_of::<u32>();
const ENTRY_BYTES: usize = 8;

const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const OWN_GROUP: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;

const WRITE: u16 = 2;
const READ_WRITE: u16 = 6;
const NO_USER: u32 = u32::MAX;

/// Lets the owner and `users` read and write a file, and nobody else.
///
/// # Errors
/// As for setxattr(2): `OPNOTSUPP` if the file system has no lists.
pub fn open_to(path: &Path, users: &[u32]) -> rustix::io::Result<()> {
    setxattr(path, ACCESS_LIST, &of_users(users), XattrFlags::empty())
}

/// Returns a list by which the owner and `users` may read and write.
fn of_users(users: &[u32]) -> Vec<u8> {
    // The kernel wants them in order.
    let users: BTreeSet<u32> = users.iter().copied().collect();
    let users = users.into_iter().map(|user| (USER, READ_WRITE, user));
    let entries = [(OWNER, READ_WRITE, NO_USER)]
        .into_iter()
        .chain(users)
        .chain([
            (OWN_GROUP, 0, NO_USER),
            (MASK, READ_WRITE, NO_USER),
            (OTHERS, 0, NO_USER),
        ]);
    let mut bytes = FORMAT.to_le_bytes().to_vec();
    for (tag, access, user) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(access.to_le_bytes());
        bytes.extend(user.to_le_bytes());
    }
    bytes
}

/// Returns whether a file has a list that lets a named user or group write. The mask is not looked at: the file's mode shows it
/// in the bits of the group. Follows no link.
///
/// # Errors
/// The list cannot be read.
pub fn names_a_writer(path: &Path) -> rustix::io::Result<bool> {
    let mut bytes = vec![0; LONGEST];
    match lgetxattr(path, ACCESS_LIST, &mut bytes[..]) {
        Ok(length) => Ok(is_writable_by_name(&bytes[..length])),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns whether an entry of a list lets a named user or group write. A list of another format may have one.
fn is_writable_by_name(list: &[u8]) -> bool {
    let Some((format, entries)) = list.split_at_checked(FORMAT_BYTES) else {
        return true;
    };
    let word = |entry: &[u8], at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
    let names_one = |entry: &[u8]| {
        matches!(word(entry, 0), USER | GROUP) && word(entry, size_of::<u16>()) & WRITE != 0
    };
    *format != FORMAT.to_le_bytes() || entries.chunks_exact(ENTRY_BYTES).any(names_one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_names_a_writer_is_told_from_others() {
        assert!(!is_writable_by_name(&of_users(&[])));
        assert!(is_writable_by_name(&of_users(&[1000])));
        let entry = |tag: u16, access: u16| {
            let [tag, access] = [tag, access].map(u16::to_le_bytes);
            [&tag[..], &access, &1000_u32.to_le_bytes()].concat()
        };
        let list = |entry: &[u8]| [&FORMAT.to_le_bytes()[..], entry].concat();
        assert!(is_writable_by_name(&list(&entry(GROUP, READ_WRITE))));
        for (tag, access) in [(USER, 5), (GROUP, 5), (MASK, 7), (OWN_GROUP, 7)] {
            assert!(!is_writable_by_name(&list(&entry(tag, access))));
        }
        assert!(is_writable_by_name(&[1, 0, 0, 0]), "another format");
        assert!(is_writable_by_name(&[]));
    }
}
