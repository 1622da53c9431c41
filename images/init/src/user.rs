//! Describes the user of a program, as `UID:GID:GROUP,GROUP`.

use std::fmt;
use std::str::FromStr;

/// Most supplementary groups of a process (`NGROUPS_MAX` of Linux).
const MOST_GROUPS: usize = 65_536;

/// Identity with which a program is executed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Error from parsing a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write a user as UID:GID:GROUP,GROUP in numbers")]
pub struct UserError;

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.uid, self.gid)?;
        for (index, group) in self.groups.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{group}")?;
        }
        Ok(())
    }
}

impl FromStr for User {
    type Err = UserError;

    fn from_str(text: &str) -> Result<Self, UserError> {
        let mut parts = text.splitn(3, ':');
        // The last number stands for no change in setuid(2) and its like.
        let number = |text: &str| text.parse().ok().filter(|&id: &u32| id != u32::MAX);
        let mut next = || parts.next().and_then(number).ok_or(UserError);
        let (uid, gid) = (next()?, next()?);
        let groups = match parts.next().ok_or(UserError)? {
            "" => Vec::new(),
            list => list
                .split(',')
                .map(|group| number(group).ok_or(UserError))
                .collect::<Result<_, _>>()?,
        };
        match groups.len() <= MOST_GROUPS {
            true => Ok(Self { uid, gid, groups }),
            false => Err(UserError),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_read_back() {
        for (groups, text) in [(vec![], "1000:100:"), (vec![4, 27], "1000:100:4,27")] {
            let user = User {
                uid: 1000,
                gid: 100,
                groups,
            };
            assert_eq!(user.to_string(), text);
            assert_eq!(text.parse(), Ok(user));
        }
    }

    #[test]
    fn text_that_is_no_user_is_refused() {
        for text in [
            "",
            "0",
            "0:0",
            "a:0:",
            "0:-1:",
            "0:0:x",
            "0:0:1,",
            "4294967295:0:",
        ] {
            assert_eq!(text.parse::<User>(), Err(UserError), "{text}");
        }
    }
}
