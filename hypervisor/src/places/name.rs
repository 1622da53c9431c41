//! Names of backends and guests.

use std::fmt;
use std::str::FromStr;

/// Name of a process: part of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(String);

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const LONGEST: usize = 32;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let starts = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        if starts && text.len() <= LONGEST && text.chars().all(is_plain) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "a name has 1 to {LONGEST} letters, digits, dots, dashes and underscores, and starts with a letter or digit"
        ))
    }
}

impl Name {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_part_of_a_path() {
        for good in ["default", "a", "0.gpu-1_x", &"n".repeat(32)] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
        for bad in [
            "",
            ".",
            "..",
            ".x",
            "-x",
            "a/b",
            "a b",
            "ä",
            &"n".repeat(33),
        ] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
    }
}
