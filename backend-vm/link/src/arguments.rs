//! Parses command lines and reports mistakes in one sentence.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use crate::harmless;

/// Exit status after a mistake in the arguments.
pub const USAGE: u8 = 2;

/// Parses the arguments of this process. Prints help or version if requested.
///
/// # Errors
/// The arguments are wrong. The mistake was printed; the error is the status to exit with.
pub fn parse<A: Parser>(program: &str) -> Result<A, ExitCode> {
    A::try_parse().map_err(|error| report(program, &error))
}

/// Prints a mistake in arguments in one sentence, or help or version if these were requested. Returns the status to exit
/// with; exits itself after help or version.
pub fn report(program: &str, error: &clap::Error) -> ExitCode {
    let is_help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if !error.use_stderr() || is_help {
        error.exit();
    }
    // If standard error cannot be written, the exit status still reports the mistake.
    let _ = writeln!(
        std::io::stderr(),
        "{program}: {}",
        harmless(&sentence(error))
    );
    ExitCode::from(USAGE)
}

/// Returns clap's message in one line: the mistake and perhaps a tip, without the usage.
#[must_use]
pub fn sentence(error: &clap::Error) -> String {
    joined(&error.to_string())
}

/// Joins the paragraphs of a clap message, the mistake and perhaps a tip, without the usage.
fn joined(text: &str) -> String {
    let paragraphs: Vec<String> = text
        .trim_start_matches("error: ")
        .split("\n\n")
        .take_while(|paragraph| !paragraph.starts_with("Usage:"))
        .map(|paragraph| {
            let words: Vec<&str> = paragraph.split_whitespace().collect();
            words.join(" ")
        })
        .filter(|paragraph| !paragraph.is_empty())
        .collect();
    let mut sentence = paragraphs.join("; ");
    if let Some(end) = sentence.find("; For more information, try") {
        sentence.truncate(end);
    }
    sentence
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    struct Arguments {
        #[arg(long)]
        _count: Option<u8>,
        #[arg(long, required = true)]
        _name: String,
    }

    #[test]
    fn a_mistake_is_one_line_without_usage() {
        for wrong in [
            &["x", "--count", "many"][..],
            &["x", "--nmae"],
            &["x"],
            &["x", "--count", "1", "--name"],
        ] {
            let sentence = sentence(&Arguments::try_parse_from(wrong).unwrap_err());
            assert!(!sentence.contains('\n'), "{sentence}");
            assert!(!sentence.contains("Usage"), "{sentence}");
            assert!(!sentence.contains("more information"), "{sentence}");
            assert!(!sentence.starts_with("error"), "{sentence}");
        }
    }
}
