//! Text format of answers: for each form its name, the digest of its kernel and operands, and its
//! results.
//!
//! ```text
//! form add.u32 0123456789abcdef
//! 0 1 ffffffff 80000000 7fffffff 2 fffffffe 80000001
//! form mma.ludicrous 0123456789abcdef
//! refused 218
//! ```
//! Results are hexadecimal, eight rows a line; colons join the results of one row.

use std::fmt::Write;

use crate::form::Form;
use crate::operands::{hash, rows};
use crate::{kernel, run::Failure};

/// Number of rows on a line.
const LINE: usize = 8;

/// Results of a form, row by row, or the reason why there are none (`refused 218`).
pub type Results = Result<Vec<Vec<u64>>, String>;

/// Answer of a device for a form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub name: String,
    pub digest: u64,
    pub results: Results,
}

impl Answer {
    #[must_use]
    pub fn new(form: &Form, results: Result<Vec<Vec<u64>>, Failure>) -> Self {
        Self {
            name: form.name.clone(),
            digest: digest(form),
            results: results.map_err(|failure| match failure {
                Failure::Refused(error) => format!("refused {}", error.0),
                Failure::Faulted(error) => format!("faulted {}", error.0),
            }),
        }
    }

    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("form {} {:016x}\n", self.name, self.digest);
        match &self.results {
            Ok(results) => {
                for line in results.chunks(LINE) {
                    for (index, row) in line.iter().enumerate() {
                        text.push_str(if index == 0 { "" } else { " " });
                        for (column, value) in row.iter().enumerate() {
                            let joint = if column == 0 { "" } else { ":" };
                            let _ = write!(text, "{joint}{value:x}");
                        }
                    }
                    text.push('\n');
                }
            }
            Err(reason) => {
                let _ = writeln!(text, "{reason}");
            }
        }
        text
    }
}

/// Returns a 64-bit digest of a form's kernel, operands and image.
#[must_use]
pub fn digest(form: &Form) -> u64 {
    let values = rows(form).into_iter().flatten();
    let object = form.object.map(|object| object.digest().to_le_bytes());
    let object = object.into_iter().flatten();
    hash(
        kernel::text(form)
            .into_bytes()
            .into_iter()
            .chain(values.flat_map(u64::to_le_bytes))
            .chain(object),
    )
}

/// Returns the PTX module of a form.
#[must_use]
pub fn module(form: &Form) -> String {
    kernel::text(form)
}

/// Reads a file of answers.
pub fn parse(text: &str) -> Result<Vec<Answer>, String> {
    let mut answers: Vec<Answer> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let wrong = || format!("line {}: {line:?} is no answer", index + 1);
        if let Some(head) = line.strip_prefix("form ") {
            let (name, digest) = head.rsplit_once(' ').ok_or_else(wrong)?;
            answers.push(Answer {
                name: name.to_owned(),
                digest: u64::from_str_radix(digest, 16).map_err(|_| wrong())?,
                results: Ok(Vec::new()),
            });
            continue;
        }
        let answer = answers.last_mut().ok_or_else(wrong)?;
        if line.starts_with("refused ") || line.starts_with("faulted ") {
            answer.results = Err(line.to_owned());
            continue;
        }
        let results = answer.results.as_mut().map_err(|_| wrong())?;
        for row in line.split(' ') {
            let row: Result<_, _> = row
                .split(':')
                .map(|value| u64::from_str_radix(value, 16))
                .collect();
            results.push(row.map_err(|_| wrong())?);
        }
    }
    Ok(answers)
}

#[cfg(test)]
mod tests {
    use wormhole_device::CuError;

    use super::*;
    use crate::operands::Class;

    #[test]
    fn what_is_written_is_read_back() {
        let form = Form::new("two results", &[Class::Int(32)], &[32, 1], String::new());
        let rows = (0..19)
            .map(|row| vec![row * 0x0101_0101, row & 1])
            .collect();
        let answers = [
            Answer::new(&form, Ok(rows)),
            Answer::new(&form, Err(Failure::Refused(CuError::INVALID_PTX))),
            Answer::new(&form, Err(Failure::Faulted(CuError::ILLEGAL_ADDRESS))),
        ];
        let text: String = answers.iter().map(Answer::text).collect();
        assert_eq!(parse(&text).unwrap(), answers);
    }

    #[test]
    fn what_is_no_answer_is_named_by_its_line() {
        for text in [
            "1 2 3",
            "form x 12\n1 g",
            "form x",
            "form x 1\nrefused 1\n5",
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with("line "), "{error}");
        }
    }
}
