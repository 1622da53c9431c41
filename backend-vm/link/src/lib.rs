//! Code that the launcher, the supervisor and its workers share.
//!
//! The supervisor accepts tenants' windows and guest processes' control streams, grants sessions, starts and reaps
//! workers; a worker executes one guest process's calls. They exchange messages over a [`channel`], agree on a
//! [`device`], and count in pages that the worker maps ([`counters`], [`progress`]). This crate contains no code for any
//! device, because the launcher and the supervisor are built without it.

pub mod arguments;
pub mod channel;
pub mod counters;
pub mod device;
pub mod log_budget;
pub mod made;
pub mod memory;
pub mod neighbours;
pub mod operator;
pub mod process;
pub mod progress;
pub mod report;
pub mod tasks;
pub mod usage;
pub mod users;

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Replaces characters that could change a terminal or what its reader sees by dots: control characters, which move the
/// cursor or change the terminal's state, and characters of formatting, which are invisible or change the order of the
/// text around them. Line ends and tabs stay.
///
/// The joiners of scripts and of emoji (U+200C, U+200D) are such characters too: two names that differ in one look the same
/// in most scripts.
pub fn harmless(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c,
        c if c.is_control() || is_formatting(c) => '.',
        c => c,
    };
    text.chars().map(shown).collect()
}

/// Returns bytes as [`harmless`] text. Bytes that are not UTF-8 become dots. The text is never longer than the bytes, so that
/// the budget of a log can count the bytes.
pub fn harmless_bytes(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(&harmless(chunk.valid()));
        if !chunk.invalid().is_empty() {
            text.push('.');
        }
    }
    text
}

/// Returns whether a character is of the general categories Cf, Zl or Zp, or is one of the other characters that Unicode
/// lets be shown as nothing (`Default_Ignorable_Code_Point`, Unicode 16, DerivedCoreProperties.txt). They include the
/// bidirectional controls (UTR 36, section 2.5).
fn is_formatting(c: char) -> bool {
    matches!(c,
        '\u{AD}'
        | '\u{34F}'
        | '\u{600}'..='\u{605}'
        | '\u{61C}'
        | '\u{6DD}'
        | '\u{70F}'
        | '\u{890}'..='\u{891}'
        | '\u{8E2}'
        | '\u{115F}'..='\u{1160}'
        | '\u{17B4}'..='\u{17B5}'
        | '\u{180B}'..='\u{180F}'
        | '\u{200B}'..='\u{200F}'
        | '\u{2028}'..='\u{202E}'
        | '\u{2060}'..='\u{206F}'
        | '\u{3164}'
        | '\u{FE00}'..='\u{FE0F}'
        | '\u{FEFF}'
        | '\u{FFA0}'
        | '\u{FFF0}'..='\u{FFFB}'
        | '\u{110BD}'
        | '\u{110CD}'
        | '\u{13430}'..='\u{1343F}'
        | '\u{1BCA0}'..='\u{1BCA3}'
        | '\u{1D173}'..='\u{1D17A}'
        | '\u{E0000}'..='\u{E0FFF}'
    )
}

/// Raises the number of descriptors that this process may have to its hard limit, and returns that; none if there is none.
///
/// # Errors
/// Same as `setrlimit`.
pub fn raise_descriptor_limit() -> io::Result<Option<u64>> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, raised)?;
    Ok(maximum)
}

/// Formats an error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // A transparent error has the text of its cause.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = error.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::{harmless, harmless_bytes};

    #[test]
    fn what_a_guest_says_does_not_reach_the_terminal_as_commands() {
        assert_eq!(
            harmless("its last lines:\n\x1b[2J\x1b]0;title\x07\r\u{9b}31m\tend"),
            "its last lines:\n.[2J.]0;title...31m\tend"
        );
    }

    #[test]
    fn what_a_guest_says_is_shown_in_its_own_order_with_nothing_hidden() {
        // The bidirectional controls, and each other kind of invisible character.
        let hidden = "\u{61c}\u{200e}\u{200f}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}\
                      \u{ad}\u{200b}\u{200c}\u{200d}\u{2028}\u{2029}\u{2060}\u{feff}\u{fff9}\u{fe0f}\u{e0041}\u{3164}";
        assert_eq!(harmless(hidden), ".".repeat(hidden.chars().count()));
        // A joiner of Persian letters, and one of emoji.
        assert_eq!(harmless("می\u{200c}خواهم"), "می.خواهم");
        assert_eq!(harmless("👩\u{200d}🚀"), "👩.🚀");
        for shown in ["größer als 3 µs", "שלום", "中文 한국어", "e\u{301}", "→ ✓"] {
            assert_eq!(harmless(shown), shown);
        }
    }
    #[test]
    fn what_is_written_is_never_longer_than_what_a_guest_has_said() {
        for (said, written) in [
            (&b"one\x1b\n"[..], "one.\n"),
            (b"\xff\xfe", ".."),
            (b"\xe2\x82", "."),
            ("\u{9b}\u{202e}µ".as_bytes(), "..µ"),
        ] {
            assert_eq!(harmless_bytes(said), written);
        }
        let all: Vec<u8> = (0..=u8::MAX).collect();
        for first in 0..=u8::MAX {
            let said = [&[first], &all[..]].concat();
            assert!(harmless_bytes(&said).len() <= said.len());
        }
    }
}
