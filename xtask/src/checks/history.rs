//! Checks the form of commit messages.

use std::path::Path;

use super::git;
use crate::command::{Failure, step};

/// Last commit to which the form does not apply.
const BASE: &str = "754b4a38cf722cdef7a7eba1ee9cb8b93a210050";

/// Most columns of a subject.
const COLUMNS: usize = 72;

/// Returns a complaint for each commit after [`BASE`] in the clone whose message does not have the form of
/// CONTRIBUTING.md.
pub fn history(root: &Path) -> Result<Vec<String>, Failure> {
    let Some(commits) = git(root, &["rev-list", "HEAD"])? else {
        step("skipping the form of commits: this is no git checkout");
        return Ok(Vec::new());
    };
    // A shallow clone that does not reach back to the base has only newer commits.
    let base = commits.lines().any(|commit| commit == BASE);
    let range = if base {
        format!("{BASE}..HEAD")
    } else {
        "HEAD".to_owned()
    };
    let log = git(root, &["log", "--no-merges", "--format=%h%n%B%x00", &range])?;
    Ok(log
        .unwrap_or_default()
        .split('\0')
        .map(str::trim)
        .filter_map(|commit| commit.split_once('\n'))
        .filter_map(|(commit, message)| Some(format!("commit {commit}: {}", complaint(message)?)))
        .collect())
}

/// Returns the defect of a commit's message, if any.
fn complaint(message: &str) -> Option<&'static str> {
    let mut lines = message.lines();
    let subject = lines.next().unwrap_or_default();
    if subject.chars().count() > COLUMNS {
        return Some("its subject is longer than 72 columns");
    }
    let is_component = |name: &str| {
        !name.is_empty()
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c))
    };
    let formed = subject
        .split_once(": ")
        .is_some_and(|(components, change)| {
            components.split(", ").all(is_component) && !change.trim().is_empty()
        });
    if !formed {
        return Some("its subject is not `component: what changes`");
    }
    if lines.next().is_some_and(|line| !line.is_empty()) || lines.all(|line| line.trim().is_empty())
    {
        return Some("it has no body, after an empty line, that says why");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_component_a_change_and_a_reason_are_a_message() {
        for subject in ["ring: park", "cpu, cuda: free streams", "guest-lib/nvml: x"] {
            let message = format!("{subject}\n\nBecause.\n");
            assert_eq!(complaint(&message), None, "{message}");
        }
        let longest = format!("ring: {}\n\nBecause.", "x".repeat(COLUMNS - 6));
        assert_eq!(complaint(&longest), None);
    }

    #[test]
    fn each_lack_is_named() {
        let long = format!("ring: {}\n\nBecause.", "x".repeat(COLUMNS - 5));
        for (message, lack) in [
            (long.as_str(), "longer"),
            ("park\n\nBecause.", "component"),
            ("a word: park\n\nBecause.", "component"),
            ("ring:\n\nBecause.", "component"),
            ("ring: park", "no body"),
            ("ring: park\n\n \n", "no body"),
            ("ring: park\nBecause.\n", "no body"),
        ] {
            let found = complaint(message);
            assert!(
                found.is_some_and(|found| found.contains(lack)),
                "{message}: {found:?}"
            );
        }
    }
}
