//! Splits PTX text into words, numbers, strings and punctuation.
//!
//! A word is an identifier with everything that PTX glues to it by dots and
//! double colons, so that `ld.shared::cta.f32` and `%tid.x` are one token each.

use super::ParseError;

/// Token of PTX, borrowed from the text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Token<'a> {
    /// Identifier, directive or dotted opcode.
    Word(&'a str),
    /// Integer literal, as its 64 bits.
    Int(u64),
    /// Single-precision literal (`0f…`), as its bits.
    F32(u32),
    /// Double-precision literal (`0d…` or decimal), as its bits.
    F64(u64),
    /// Quoted string, without its quotes.
    Text(&'a str),
    /// Any other character.
    Punct(u8),
    /// End of the text.
    End,
}

/// Lexer with one token of lookahead.
#[derive(Debug, Clone)]
pub struct Lexer<'a> {
    text: &'a str,
    at: usize,
    scan_line: u32,
    peeked: Option<(Token<'a>, usize, u32)>,
    line: u32,
}

fn is_word_start(c: u8) -> bool {
    is_word(c) && !c.is_ascii_digit()
}

/// Table of the characters of a word. A table, for speed: modules contain megabytes of words.
const WORD: [bool; 256] = {
    let mut table = [false; 256];
    let mut c = 0_u8;
    while c < 128 {
        table[c as usize] = c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.');
        c += 1;
    }
    table
};

fn is_word(c: u8) -> bool {
    WORD[usize::from(c)]
}

impl<'a> Lexer<'a> {
    /// Reads `text` from its beginning; `line` is the number of its first line.
    #[must_use]
    pub fn new(text: &'a str, line: u32) -> Self {
        Self {
            text,
            at: 0,
            scan_line: line,
            peeked: None,
            line,
        }
    }

    /// Returns the line of the token that was read last.
    #[must_use]
    pub fn line(&self) -> u32 {
        self.line
    }

    /// Returns the offset of the next token, after blanks, in bytes.
    pub fn position(&mut self) -> Result<usize, ParseError> {
        self.peek()?;
        Ok(self.at)
    }

    /// Returns the text from `start` to the end of the token that was read last.
    #[must_use]
    pub fn since(&self, start: usize) -> &'a str {
        self.text.get(start..self.at).unwrap_or("")
    }

    /// Reads the text from the next token to its end.
    pub fn rest(&mut self) -> Result<&'a str, ParseError> {
        let start = self.position()?;
        self.peeked = None;
        self.at = self.text.len();
        Ok(self.since(start))
    }

    /// Returns the line of the next token, once it was peeked at.
    #[must_use]
    pub fn upcoming_line(&self) -> u32 {
        self.peeked.map_or(self.scan_line, |peeked| peeked.2)
    }

    /// Returns the offset of the end of the token that was read last.
    #[must_use]
    pub fn end(&self) -> usize {
        self.at
    }

    /// Returns the next token, without reading it.
    pub fn peek(&mut self) -> Result<Token<'a>, ParseError> {
        if self.peeked.is_none() {
            self.skip_blanks()?;
            let (start, line) = (self.at, self.scan_line);
            let token = self.scan()?;
            self.peeked = Some((token, self.at, line));
            self.at = start;
        }
        Ok(self.peeked.map_or(Token::End, |peeked| peeked.0))
    }

    /// Reads the next token.
    pub fn next(&mut self) -> Result<Token<'a>, ParseError> {
        if let Some((token, end, line)) = self.peeked.take() {
            (self.at, self.line) = (end, line);
            return Ok(token);
        }
        self.skip_blanks()?;
        self.line = self.scan_line;
        self.scan()
    }

    /// Reads the next token if it is the punctuation `c`, and returns whether it was.
    pub fn accept(&mut self, c: u8) -> Result<bool, ParseError> {
        let found = self.peek()? == Token::Punct(c);
        if found {
            self.next()?;
        }
        Ok(found)
    }

    /// Reads the punctuation `c`, or fails.
    pub fn expect(&mut self, c: u8) -> Result<(), ParseError> {
        match self.next()? {
            Token::Punct(found) if found == c => Ok(()),
            found => Err(self.unexpected(&format!("`{}`", char::from(c)), found)),
        }
    }

    /// Reads a word, or fails with `what` as the expected token.
    pub fn word(&mut self, what: &str) -> Result<&'a str, ParseError> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            found => Err(self.unexpected(what, found)),
        }
    }

    /// Reads an integer, or fails with `what` as the expected token.
    pub fn int(&mut self, what: &str) -> Result<u64, ParseError> {
        let negative = self.accept(b'-')?;
        match self.next()? {
            Token::Int(value) if negative => Ok(value.wrapping_neg()),
            Token::Int(value) => Ok(value),
            found => Err(self.unexpected(what, found)),
        }
    }

    /// Returns the error that `wanted` was expected.
    pub fn unexpected(&self, wanted: &str, found: Token<'_>) -> ParseError {
        let found = match found {
            Token::Word(word) => format!("`{}`", word.chars().take(64).collect::<String>()),
            Token::Int(value) => format!("`{value}`"),
            Token::F32(_) | Token::F64(_) => "a floating-point literal".to_owned(),
            Token::Text(_) => "a string".to_owned(),
            Token::Punct(c) => format!("`{}`", char::from(c)),
            Token::End => "the end of the text".to_owned(),
        };
        ParseError::Unexpected {
            line: self.line,
            wanted: wanted.to_owned(),
            found,
        }
    }

    /// Skips the rest of the current line.
    pub fn skip_line(&mut self) {
        self.peeked = None;
        let rest = self.text.get(self.at..).unwrap_or("");
        self.at += rest.find('\n').unwrap_or(rest.len());
    }

    fn byte(&self, at: usize) -> u8 {
        self.text.as_bytes().get(at).copied().unwrap_or(0)
    }

    fn skip_blanks(&mut self) -> Result<(), ParseError> {
        loop {
            match self.byte(self.at) {
                b'\n' => {
                    self.scan_line = self.scan_line.saturating_add(1);
                    self.at += 1;
                }
                b' ' | b'\t' | b'\r' | 0x0b | 0x0c => self.at += 1,
                b'/' if self.byte(self.at + 1) == b'/' => self.skip_line(),
                b'#' => self.skip_line(),
                b'@' if self.byte(self.at + 1) == b'@' => self.skip_line(),
                b'/' if self.byte(self.at + 1) == b'*' => {
                    let rest = self.text.get(self.at + 2..).unwrap_or("");
                    let Some(length) = rest.find("*/") else {
                        return Err(ParseError::OpenComment {
                            line: self.scan_line,
                        });
                    };
                    let lines = rest.as_bytes()[..length]
                        .iter()
                        .filter(|&&c| c == b'\n')
                        .count();
                    self.scan_line = self
                        .scan_line
                        .saturating_add(u32::try_from(lines).unwrap_or(u32::MAX));
                    self.at += length + 4;
                }
                _ => return Ok(()),
            }
        }
    }

    fn scan(&mut self) -> Result<Token<'a>, ParseError> {
        let start = self.at;
        let c = self.byte(start);
        if start >= self.text.len() {
            return Ok(Token::End);
        }
        if c.is_ascii_digit() {
            return self.number();
        }
        if is_word_start(c) {
            self.at += 1;
            // Directives may stand without blanks between them: `.reg.b32`.
            let directive = c == b'.';
            loop {
                let rest = self.text.as_bytes().get(self.at..).unwrap_or_default();
                let part = |c: &u8| is_word(*c) && !(directive && *c == b'.');
                let length = rest.iter().position(|c| !part(c)).unwrap_or(rest.len());
                self.at += length;
                match rest.get(length..) {
                    Some([b':', b':', next, ..]) if is_word(*next) => self.at += 2,
                    _ => break,
                }
            }
            return Ok(Token::Word(&self.text[start..self.at]));
        }
        if c == b'"' {
            let rest = &self.text[start + 1..];
            let length = rest.find('"').ok_or(ParseError::OpenString {
                line: self.scan_line,
            })?;
            self.at = start + length + 2;
            return Ok(Token::Text(&rest[..length]));
        }
        if !c.is_ascii() || c == 0 {
            return Err(ParseError::BadCharacter {
                line: self.scan_line,
                byte: c,
            });
        }
        self.at += 1;
        Ok(Token::Punct(c))
    }

    fn number(&mut self) -> Result<Token<'a>, ParseError> {
        let start = self.at;
        while is_word(self.byte(self.at))
            || (matches!(self.byte(self.at), b'+' | b'-')
                && matches!(self.byte(self.at - 1), b'e' | b'E')
                && self.is_decimal_float(start))
        {
            self.at += 1;
        }
        let word = &self.text[start..self.at];
        let bad = || ParseError::BadNumber {
            line: self.scan_line,
            text: word.chars().take(64).collect(),
        };
        let digits = word.trim_end_matches(['U', 'u']);
        let lower = |prefix: usize| digits.get(prefix..).unwrap_or("");
        let second = self.byte(start + 1);
        let value = match (self.byte(start), second) {
            (b'0', b'x' | b'X') => u64::from_str_radix(lower(2), 16)
                .map(Token::Int)
                .map_err(|_| bad())?,
            (b'0', b'b' | b'B') => u64::from_str_radix(lower(2), 2)
                .map(Token::Int)
                .map_err(|_| bad())?,
            (b'0', b'f' | b'F') if word.len() == 10 => {
                Token::F32(u32::from_str_radix(&word[2..], 16).map_err(|_| bad())?)
            }
            (b'0', b'd' | b'D') if word.len() == 18 => {
                Token::F64(u64::from_str_radix(&word[2..], 16).map_err(|_| bad())?)
            }
            _ if word.bytes().any(|c| matches!(c, b'.' | b'e' | b'E')) => {
                Token::F64(word.parse::<f64>().map_err(|_| bad())?.to_bits())
            }
            (b'0', b'0'..=b'7') => u64::from_str_radix(digits, 8)
                .map(Token::Int)
                .map_err(|_| bad())?,
            _ => Token::Int(digits.parse::<u64>().map_err(|_| bad())?),
        };
        Ok(value)
    }

    fn is_decimal_float(&self, start: usize) -> bool {
        !matches!(
            self.byte(start + 1),
            b'x' | b'X' | b'f' | b'F' | b'd' | b'D' | b'b' | b'B'
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<Token<'_>> {
        let mut lexer = Lexer::new(text, 1);
        let mut tokens = Vec::new();
        loop {
            match lexer.next().unwrap() {
                Token::End => return tokens,
                token => tokens.push(token),
            }
        }
    }

    #[test]
    fn dotted_words_and_scopes_are_one_token() {
        assert_eq!(
            all("@%p1 ld.shared::cta.f32 %f1, [%r1+-4];"),
            vec![
                Token::Punct(b'@'),
                Token::Word("%p1"),
                Token::Word("ld.shared::cta.f32"),
                Token::Word("%f1"),
                Token::Punct(b','),
                Token::Punct(b'['),
                Token::Word("%r1"),
                Token::Punct(b'+'),
                Token::Punct(b'-'),
                Token::Int(4),
                Token::Punct(b']'),
                Token::Punct(b';'),
            ]
        );
    }

    #[test]
    fn numbers_of_every_base() {
        assert_eq!(
            all("0x1F 017 0b101 42U 0f3F800000 0d3FF0000000000000 1.5e-3 0"),
            vec![
                Token::Int(31),
                Token::Int(15),
                Token::Int(5),
                Token::Int(42),
                Token::F32(0x3f80_0000),
                Token::F64(0x3ff0_0000_0000_0000),
                Token::F64(1.5e-3_f64.to_bits()),
                Token::Int(0),
            ]
        );
    }

    #[test]
    fn lines_are_counted_through_comments() {
        let mut lexer = Lexer::new("/* a\n b */\n// c\nx", 1);
        assert_eq!(lexer.next().unwrap(), Token::Word("x"));
        assert_eq!(lexer.line(), 4);
    }
}
