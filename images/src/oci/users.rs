//! Finds the numbers of an image's user.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};
use wormhole_init::User;

use super::OciError;
use super::rooted::open_in;

/// Most bytes of a list of users or groups.
const MOST: u64 = 1 << 20;

/// Finds a user as written in an image: `USER` or `USER:GROUP`, each a number or a name. `None` if it is empty.
pub fn find(folder: &Path, text: &str) -> Result<Option<User>, OciError> {
    if text.is_empty() {
        return Ok(None);
    }
    let missing = || OciError::User(text.to_owned());
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    let (users, groups) = (
        lines(folder, "etc/passwd").map_err(|_| missing())?,
        lines(folder, "etc/group").map_err(|_| missing())?,
    );
    // Names are at the front of a line, and numbers third.
    let known = users
        .iter()
        .find(|fields| fields.len() > 3 && (fields[0] == user || fields[2] == user));
    let number = |text: &str| text.parse().ok().filter(|&id: &u32| id != u32::MAX);
    let uid = number(known.map_or(user, |fields| &fields[2])).ok_or_else(missing)?;
    let gid = match group {
        Some(group) => {
            let known = groups
                .iter()
                .find(|fields| fields.len() > 2 && fields[0] == group);
            number(known.map_or(group, |fields| &fields[2])).ok_or_else(missing)?
        }
        None => known
            .map_or(Some(0), |fields| number(&fields[3]))
            .ok_or_else(missing)?,
    };
    let name = known.map(|fields| &fields[0]);
    let has_user = |fields: &&Vec<String>| {
        // A line without a number names no group.
        if fields.len() < 3 {
            return false;
        }
        let members = fields.get(3).map_or("", String::as_str);
        members
            .split(',')
            .any(|member| Some(member) == name.map(String::as_str))
    };
    let more = groups.iter().filter(has_user);
    let more = more.filter_map(|fields| number(&fields[2])).collect();
    Ok(Some(User {
        uid,
        gid,
        groups: more,
    }))
}

/// Returns the fields of each line of a file of the image; none if there is no file.
fn lines(folder: &Path, path: &str) -> io::Result<Vec<Vec<String>>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let root = openat(CWD, folder, flags | OFlags::DIRECTORY, Mode::empty())?;
    let file = open_in(&root, Path::new(path), flags);
    let mut text = Vec::new();
    match file {
        Err(rustix::io::Errno::NOENT) => return Ok(Vec::new()),
        file => File::from(file?).take(MOST).read_to_end(&mut text)?,
    };
    let text = String::from_utf8_lossy(&text);
    let lines = text.lines();
    Ok(lines
        .map(|line| line.split(':').map(str::to_owned).collect())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_a_number_names_no_group() {
        let folder = tempfile::tempdir().expect("a folder");
        let etc = folder.path().join("etc");
        std::fs::create_dir(&etc).expect("a folder");
        std::fs::write(etc.join("passwd"), ":x:1000:1000\n").expect("room");
        std::fs::write(etc.join("group"), "a\nb:x:7:\n").expect("room");
        let user = find(folder.path(), "1000").expect("a number");
        let user = user.expect("it is not empty");
        assert_eq!(
            (user.uid, user.gid, &user.groups[..]),
            (1000, 1000, &[7][..])
        );
    }
}
