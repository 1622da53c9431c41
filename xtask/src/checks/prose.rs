//! Checks that comments, pages and messages name their subjects: no sentence and no clause begins with a pronoun for
//! something that the reader must guess.

use std::path::Path;

use super::git;
use crate::command::{Failure, step};

/// Words with which no paragraph of a documentation comment may begin. A verb, or the name of the thing, says more.
const FIRST: [&str; 9] = [
    "It", "Its", "Of", "That", "They", "Those", "Where", "Which", "Why",
];

/// Words with which no sentence may begin.
const SUBJECTS: [&str; 8] = [
    "How", "Kept", "Nobody", "Told", "What", "Whatever", "Who", "Whoever",
];

/// Words with which no part of a comment's sentence may begin after a semicolon or colon, also behind "and". After a name
/// in code they may, as on pages, whose tables say of files what they contain.
const PARTS: [&str; 6] = ["kept", "told", "what", "whatever", "who", "whoever"];

/// Words that may stand nowhere.
const ANYWHERE: [&[&str]; 8] = [
    &["That", "of"],
    &["and", "who"],
    &["hears", "of"],
    &["is", "none", "of"],
    &["nobody's"],
    &["no", "one's"],
    &["that", "is", "none"],
    &["that", "which"],
];

/// Words with which no clause may begin.
const CLAUSE: [&str; 2] = ["of", "which"];

/// Begin of an error's message.
const ERROR: &str = "#[error(";

/// Calls that write a line of a log or of a command's output.
const LOGS: [&str; 7] = [
    "tracing::error!(",
    "tracing::warn!(",
    "tracing::info!(",
    "tracing::debug!(",
    "say::line(format_args!(",
    "eprintln!(",
    "println!(",
];

/// Words that may not stand in the message of an error, where they hide the thing that failed.
const IN_MESSAGES: [&str; 2] = ["nobody", "what"];

/// Kinds of text, by the rules that hold for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Documentation,
    Comment,
    Page,
    /// Message of an error, which begins in lower case.
    Message,
    /// Line of a log or of a command's output.
    Log,
}

/// Lines of text that belong together, with their numbers.
#[derive(Debug)]
struct Passage<'a> {
    kind: Kind,
    lines: Vec<(usize, &'a str)>,
}

/// Word of a passage without its punctuation.
#[derive(Debug)]
struct Word<'a> {
    line: usize,
    text: &'a str,
    begins_sentence: bool,
    begins_part: bool,
    begins_clause: bool,
}

/// Returns a complaint for each passage in the sources that breaks these rules.
pub fn prose(root: &Path) -> Result<Vec<String>, Failure> {
    let Some(files) = git(
        root,
        &["ls-files", "*.rs", "*.md", "*.idl", "*.cu", "*.cuh"],
    )?
    else {
        step("skipping the prose: this is no git checkout");
        return Ok(Vec::new());
    };
    let mut complaints = Vec::new();
    for name in files.lines() {
        // A tracked file may be missing if its removal is not committed yet.
        let Ok(text) = std::fs::read_to_string(root.join(name)) else {
            continue;
        };
        let found = riddles(name, &text).into_iter();
        complaints.extend(found.map(|(line, words)| format!("{name}:{line}: {words}")));
    }
    Ok(complaints)
}

/// Returns the number of each line of a file with forbidden words, and the words.
fn riddles(name: &str, text: &str) -> Vec<(usize, String)> {
    let extension = Path::new(name).extension().and_then(|name| name.to_str());
    let mut passages = match extension {
        Some("md") => passages(text, |line| Some((Kind::Page, line.trim()))),
        Some("idl") => passages(text, |line| comment(line).or_else(|| remark(line))),
        _ => passages(text, comment),
    };
    if extension == Some("rs") {
        passages.extend(messages(text, ERROR, Kind::Message));
        passages.extend(LOGS.iter().flat_map(|call| messages(text, call, Kind::Log)));
    }
    let mut found: Vec<_> = passages.iter().flat_map(riddles_of).collect();
    found.sort();
    found
}

/// Returns what breaks the rules in one passage.
fn riddles_of(passage: &Passage) -> Vec<(usize, String)> {
    let words = words(passage);
    let mut found = Vec::new();
    for (at, word) in words.iter().enumerate() {
        let rest = || words[at..].iter().map(|word| word.text);
        let starts = |held: &[&str]| rest().take(held.len()).eq(held.iter().copied());
        let is_one_of = |held: &[&str]| match passage.kind {
            Kind::Message | Kind::Log => {
                held.iter().any(|held| held.eq_ignore_ascii_case(word.text))
            }
            _ => held.contains(&word.text),
        };
        let mut complain = |words: &str, place| {
            found.push((word.line, format!("\"{words}\" {place}")));
        };
        if at == 0 && passage.kind == Kind::Documentation && FIRST.contains(&word.text) {
            complain(word.text, "at the beginning of a paragraph");
        }
        if word.begins_sentence && is_one_of(&SUBJECTS) {
            complain(word.text, "at the beginning of a sentence");
        } else if passage.kind == Kind::Message && is_one_of(&IN_MESSAGES) {
            complain(word.text, "in the message of an error");
        }
        if word.begins_part && passage.kind != Kind::Page && PARTS.contains(&word.text) {
            complain(word.text, "at the beginning of a part of a sentence");
        }
        if word.begins_clause && rest().map(str::to_lowercase).take(2).eq(CLAUSE) {
            complain("of which", "at the beginning of a clause");
        }
        if let Some(held) = ANYWHERE.iter().find(|held| starts(held)) {
            complain(&held.join(" "), "hides a subject");
        }
    }
    found
}

/// Returns the words of a passage. Code in backquotes and arguments of a message count as the word "code".
fn words<'a>(passage: &Passage<'a>) -> Vec<Word<'a>> {
    let mut words = Vec::new();
    let (mut begins_sentence, mut begins_clause) = (true, true);
    let mut begins_part = false;
    let mut is_code = false;
    let mut is_heading = false;
    for &(line, text) in &passage.lines {
        // Items of lists, headings, quotations and the lines below headings begin sentences.
        begins_sentence |= is_heading;
        is_heading = text.starts_with('#');
        begins_sentence |= ["- ", "* ", "#", "> "]
            .iter()
            .any(|mark| text.starts_with(mark));
        for (at, part) in text.split('`').enumerate() {
            is_code ^= at > 0;
            for whole in part.split_whitespace() {
                let is_message = matches!(passage.kind, Kind::Message | Kind::Log);
                let is_argument = is_message && whole.contains('{');
                let text = if is_code || is_argument {
                    "code"
                } else {
                    whole.trim_matches(|c: char| !c.is_alphanumeric())
                };
                if !text.is_empty() {
                    words.push(Word {
                        line,
                        text,
                        begins_sentence,
                        begins_part,
                        begins_clause,
                    });
                    begins_part &= text == "and";
                    (begins_sentence, begins_clause) = (false, false);
                }
                if is_code {
                    continue;
                }
                let is_name = words.last().is_some_and(|word| word.text == "code");
                begins_part |= whole.ends_with(';') || whole.ends_with(':') && !is_name;
                // Cells of a table, and full stops, also before closing marks.
                let end = whole.trim_end_matches([')', '"', '*', '_', '”']);
                begins_sentence |= whole == "|" || end.ends_with(['.', '?', '!', ':']);
                begins_clause |= begins_sentence || end.ends_with([',', ';']);
            }
        }
    }
    words
}

/// Joins consecutive lines of one kind to passages. An empty line ends a passage, and blocks of code are left out.
fn passages<'a>(
    text: &'a str,
    read: impl Fn(&'a str) -> Option<(Kind, &'a str)>,
) -> Vec<Passage<'a>> {
    let mut passages: Vec<Passage> = Vec::new();
    let mut before = None;
    let mut is_code = false;
    for (number, line) in (1..).zip(text.lines()) {
        let read = read(line);
        is_code &= read.is_some();
        let fence = read.is_some_and(|(_, words)| words.starts_with("```"));
        is_code ^= fence;
        let prose = read.filter(|(_, words)| !is_code && !fence && !words.is_empty());
        if let Some((kind, words)) = prose {
            match passages.last_mut() {
                Some(passage) if before == Some(kind) => passage.lines.push((number, words)),
                _ => passages.push(Passage {
                    kind,
                    lines: vec![(number, words)],
                }),
            }
        }
        before = prose.map(|(kind, _)| kind);
    }
    passages
}

/// Returns the words of a line's comment that begins with `//`.
fn comment(line: &str) -> Option<(Kind, &str)> {
    let rest = line.trim_start().strip_prefix("//")?;
    match rest.strip_prefix(['/', '!']) {
        Some(words) => Some((Kind::Documentation, words.trim())),
        None => Some((Kind::Comment, rest.trim())),
    }
}

/// Returns the words of a line's comment that begins with `#`.
fn remark(line: &str) -> Option<(Kind, &str)> {
    let words = line.trim_start().strip_prefix('#')?;
    Some((Kind::Comment, words.trim()))
}

/// Returns the messages that a source gives to `call`, as literals.
fn messages<'a>(
    text: &'a str,
    call: &'static str,
    kind: Kind,
) -> impl Iterator<Item = Passage<'a>> {
    text.match_indices(call).filter_map(move |(at, mark)| {
        let literal = text[at + mark.len()..].trim_start().strip_prefix('"')?;
        let mut is_escaped = false;
        let end = literal.find(|c| {
            let ends = c == '"' && !is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            ends
        })?;
        let first = text[..text.len() - literal.len()].lines().count();
        let lines = literal[..end]
            .lines()
            .map(|line| line.trim_end_matches('\\'));
        Some(Passage {
            kind,
            lines: (first..).zip(lines).collect(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, text: &str) -> Vec<usize> {
        let found = riddles(name, text).into_iter();
        found.map(|(line, _)| line).collect()
    }

    #[test]
    fn a_comment_begins_with_a_verb_or_a_name() {
        let text = "/// Returns the ring, and what follows it.\n/// That is free.\nfn ring() {}\n";
        assert_eq!(riddles("a.rs", text), []);
        for word in FIRST {
            let text = format!("struct S {{\n    /// {word} is left.\n    left: u8,\n}}\n");
            let words = format!("\"{word}\" at the beginning of a paragraph");
            assert_eq!(riddles("a.rs", &text), [(2, words)]);
        }
    }

    #[test]
    fn a_sentence_that_begins_with_a_pronoun_is_found_in_each_kind_of_text() {
        for word in SUBJECTS {
            let lower = word.to_lowercase();
            for (name, text) in [
                ("a.rs", format!("\n/// {word} is left.\n")),
                (
                    "a.rs",
                    format!("/// Returns the\n/// ring. {word} is left.\n"),
                ),
                ("a.rs", format!("// Is left.\n//! {word} is left.\n")),
                ("a.rs", format!("\n    // {word} is left.\n")),
                ("a.rs", format!("#[error(\n\"{lower} is \\\"left\\\"\")]")),
                (
                    "a.rs",
                    format!("tracing::warn!(\n\"{lower} is {{left}}\");"),
                ),
                ("a.cu", format!("\n    // {word} is left.\n")),
                ("a.idl", format!("\n    # {word} is left.\n")),
                (
                    "a.idl",
                    format!("message 1\n    /// Bytes. {word} is left.\n"),
                ),
                ("a.md", format!("# Title\n{word} is left.\n")),
                ("a.md", format!("It is\n`left`. {word} is.\n")),
                ("a.md", format!("\n- **{word} is left.**\n")),
                ("a.md", format!("\n| left | {word} is left |\n")),
            ] {
                assert_eq!(found(name, &text), [2], "{text}");
            }
        }
    }

    #[test]
    fn a_pronoun_after_a_semicolon_or_colon_is_found_in_comments() {
        for word in PARTS {
            for before in ["a part;", "its rest:"] {
                let text = format!("// Frees {before} {word} is left.\n");
                assert_eq!(found("a.rs", &text), [1], "{text}");
                assert_eq!(found("a.md", &text), [0; 0], "{text}");
            }
            let text = format!("/// Beside `rest`: {word} is left.\n");
            assert_eq!(found("a.rs", &text), [0; 0], "{text}");
        }
        assert_eq!(found("a.rs", "// Frees a part; and what is left.\n"), [1]);
    }

    #[test]
    fn code_and_words_within_sentences_are_free() {
        for text in [
            "```sh\nWhat\n```\n",
            "`What` it is.\n",
            "It says what is left.\n",
            "Most of which is left.\n",
        ] {
            assert_eq!(riddles("a.md", text), [], "{text}");
        }
        let source = "let a = \"// What\"; \"What\";\n#[error(\"{0} cannot be {what}\")]\n";
        assert_eq!(riddles("a.rs", source), []);
    }

    #[test]
    fn words_that_hide_their_subject_are_found_anywhere() {
        let text =
            "/// Frees a page.\n/// Counts nobody's pages and that\n/// which the kernel holds.\n";
        assert_eq!(found("a.rs", text), [2, 2]);
        assert_eq!(found("a.md", "Pages,\nof which two are left.\n"), [2]);
        assert_eq!(
            found("a.rs", "#[error(\"the guest sent what it may not\")]"),
            [1]
        );
    }
}
