//! Checks that comments begin with a verb or a name, and not with a pronoun.

use std::path::Path;

use super::git;
use crate::command::{Failure, step};

/// Words with which no documentation comment may begin. A verb, or the name of the thing, says more.
const FIRST: [&str; 9] = [
    "It", "Nobody", "Of", "That", "Those", "What", "Whatever", "Who", "Whoever",
];

/// Words that no comment may contain.
const ANYWHERE: [&str; 4] = ["hears of", "nobody's", "no one's", "that which"];

/// Returns a complaint for each comment in the sources that breaks these rules.
pub fn prose(root: &Path) -> Result<Vec<String>, Failure> {
    let Some(files) = git(root, &["ls-files", "*.rs"])? else {
        step("skipping the comments: this is no git checkout");
        return Ok(Vec::new());
    };
    let mut complaints = Vec::new();
    for name in files.lines() {
        // A tracked file may be missing if its removal is not committed yet.
        let Ok(text) = std::fs::read_to_string(root.join(name)) else {
            continue;
        };
        let found = riddles(&text);
        complaints
            .extend(found.map(|(line, words)| format!("{name}:{line}: comment with {words}")));
    }
    Ok(complaints)
}

/// Returns the number of each comment line with a forbidden word, and the word.
fn riddles(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut in_comment = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let comment = comment(line);
        let begins = comment.is_some_and(|(is_doc, _)| is_doc) && !in_comment;
        in_comment = comment.is_some_and(|(is_doc, _)| is_doc);
        let (_, words) = comment?;
        let first = words.split(|c: char| !c.is_alphanumeric()).next();
        let first = first.filter(|first| begins && FIRST.contains(first));
        let found = first.map(|first| format!("\"{first}\" at its beginning"));
        let found = found.or_else(|| {
            let held = ANYWHERE.iter().find(|held| words.contains(*held));
            held.map(|held| format!("\"{held}\""))
        });
        found.map(|found| (at + 1, found))
    })
}

/// Returns the words of a line's comment, and whether it is a documentation comment; `None` without a comment.
fn comment(line: &str) -> Option<(bool, &str)> {
    let line = line.trim_start();
    let rest = line.strip_prefix("//")?;
    let doc = rest.strip_prefix('/').or_else(|| rest.strip_prefix('!'));
    Some((doc.is_some(), doc.unwrap_or(rest).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(usize, String)> {
        riddles(text).collect()
    }

    #[test]
    fn a_comment_begins_with_a_verb_or_a_name() {
        let text = "/// Returns the ring.\n/// What follows a first line is free.\nfn ring() {}\n\n// What here.\n";
        assert_eq!(found(text), []);
    }

    #[test]
    fn a_comment_that_begins_with_a_pronoun_is_found() {
        for word in FIRST {
            let text = format!("struct S {{\n    /// {word} is left.\n    left: u8,\n}}\n");
            let words = format!("\"{word}\" at its beginning");
            assert_eq!(found(&text), [(2, words)]);
        }
        assert_eq!(found("//! What is here.\n").len(), 1);
    }

    #[test]
    fn words_that_hide_their_subject_are_found_anywhere() {
        let text = "/// Frees the page.\n/// The page is nobody's.\n";
        assert_eq!(found(text), [(2, "\"nobody's\"".to_owned())]);
    }
}
