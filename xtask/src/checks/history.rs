//! Checks the form of commit messages.

use std::path::Path;

use super::git;
use crate::command::{Failure, step};

/// Last commit to which the form does not apply.
const BASE: &str = "754b4a38cf722cdef7a7eba1ee9cb8b93a210050";

/// Last commit whose subject may name several components.
const SEVERAL: &str = "61096e0dc7fe467ed460942024190a335723d137";

/// Returns the defect of a commit's message, if any.
type Rule = fn(&str) -> Option<&'static str>;

/// Most columns of a subject.
const COLUMNS: usize = 72;

/// Returns a complaint for each commit after [`BASE`] in the clone whose message does not have the form of
/// CONTRIBUTING.md, and for each after [`SEVERAL`] that names more than one component.
pub fn history(root: &Path) -> Result<Vec<String>, Failure> {
    let Some(commits) = git(root, &["rev-list", "HEAD"])? else {
        step("skipping the form of commits: this is no git checkout");
        return Ok(Vec::new());
    };
    let rules: [(&str, Rule); 2] = [(BASE, complaint), (SEVERAL, several)];
    let mut complaints = Vec::new();
    for (base, rule) in rules {
        // A shallow clone that does not reach back to the base has only newer commits.
        let range = if commits.lines().any(|commit| commit == base) {
            format!("{base}..HEAD")
        } else {
            "HEAD".to_owned()
        };
        let log = git(root, &["log", "--no-merges", "--format=%h%n%B%x00", &range])?;
        let log = log.unwrap_or_default();
        let messages = log.split('\0').map(str::trim);
        let messages = messages.filter_map(|commit| commit.split_once('\n'));
        complaints.extend(
            messages.filter_map(|(commit, message)| {
                Some(format!("commit {commit}: {}", rule(message)?))
            }),
        );
    }
    Ok(complaints)
}

/// Returns the defect of a message whose subject names several components.
fn several(message: &str) -> Option<&'static str> {
    let (components, _) = message.lines().next()?.split_once(": ")?;
    components
        .contains(',')
        .then_some("its subject names more than one component")
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
        for subject in ["ring: park", "ring: park, and wake", "guest-lib/nvml: x"] {
            let message = format!("{subject}\n\nBecause.\n");
            assert_eq!(complaint(&message), None, "{message}");
            assert_eq!(several(&message), None, "{message}");
        }
        let longest = format!("ring: {}\n\nBecause.", "x".repeat(COLUMNS - 6));
        assert_eq!(complaint(&longest), None);
    }

    #[test]
    fn a_second_component_is_refused() {
        let found = several("cpu, cuda: free streams\n\nBecause.\n");
        assert_eq!(found, Some("its subject names more than one component"));
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
