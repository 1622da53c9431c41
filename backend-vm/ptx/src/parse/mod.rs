//! Parses PTX text to a syntax tree (PTX ISA 9.0, chapters 4, 5, 7 and 11).
//!
//! The parser is total over hostile text: every nesting, count and size is bounded, and unknown syntax is an
//! error with its line. The parser accepts any *instruction*; the decoder decides, kernel by kernel, whether
//! it is known.

pub mod ast;
mod body;
mod declare;
mod lexer;

use ast::{Ast, Body, Function, Item, ItemKind, Linkage, Space, Tuning};
pub(crate) use lexer::{Lexer, Token};

pub use body::parse_body;

/// Error in parsing PTX.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Another token was expected.
    #[error("line {line}: expected {wanted}, found {found}")]
    Unexpected {
        /// Line of the text.
        line: u32,
        /// Expected token.
        wanted: String,
        /// Token found.
        found: String,
    },
    /// A comment without its end.
    #[error("line {line}: the comment that begins here never ends")]
    OpenComment {
        /// Line on which it begins.
        line: u32,
    },
    /// A string without its end.
    #[error("line {line}: the string that begins here never ends")]
    OpenString {
        /// Line on which it begins.
        line: u32,
    },
    /// A brace without its end.
    #[error("line {line}: the block that begins here never ends")]
    OpenBlock {
        /// Line on which it begins.
        line: u32,
    },
    /// A character has no meaning in PTX.
    #[error("line {line}: byte {byte:#04x} has no meaning in PTX")]
    BadCharacter {
        /// Line of the text.
        line: u32,
        /// The byte.
        byte: u8,
    },
    /// A malformed or too large number.
    #[error("line {line}: `{text}` is not a number")]
    BadNumber {
        /// Line of the text.
        line: u32,
        /// The number.
        text: String,
    },
    /// A limit of the engine is exceeded.
    #[error("line {line}: {what} exceeds the limit of {limit}")]
    TooMuch {
        /// Line of the text.
        line: u32,
        /// Name of the quantity.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// `.version` newer than this engine's.
    #[error("PTX version {major}.{minor} is newer than 9.0, the newest this device knows")]
    Version {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
    },
    /// The module is not a 64-bit one.
    #[error("`.address_size {size}` is not supported, only 64")]
    AddressSize {
        /// Declared address size.
        size: u64,
    },
}

/// Newest PTX version that is accepted.
pub const NEWEST_VERSION: (u32, u32) = (9, 0);

/// Parses a whole module. Bodies are only delimited; [`parse_body`] checks them.
pub fn parse_module(text: &str) -> Result<Ast<'_>, ParseError> {
    let mut lexer = Lexer::new(text, 1);
    let mut ast = header(&mut lexer)?;
    loop {
        let start = lexer.position()?;
        let word = match lexer.next()? {
            Token::End => return Ok(ast),
            Token::Word(word) => word,
            Token::Punct(b';') => continue,
            found => return Err(lexer.unexpected("a directive", found)),
        };
        match word {
            ".loc" | ".file" => lexer.skip_line(),
            ".section" => skip_section(&mut lexer)?,
            ".pragma" => skip_statement(&mut lexer)?,
            ".target" => {
                lexer.word("a target")?;
                while lexer.accept(b',')? {
                    lexer.word("a target option")?;
                }
            }
            ".version" => {
                lexer.next()?;
            }
            ".address_size" => {
                lexer.int("an address size")?;
            }
            ".alias" => {
                let second = lexer.word("a function")?;
                lexer.expect(b',')?;
                ast.aliases.push((second, lexer.word("a function")?));
                lexer.expect(b';')?;
                ast.items.push(Item {
                    kind: ItemKind::Alias(ast.aliases.len() - 1),
                    span: start..lexer.end(),
                });
            }
            _ => {
                let kind = declaration(&mut lexer, word, &mut ast)?;
                let span = start..lexer.end();
                ast.items.push(Item { kind, span });
            }
        }
    }
}

fn header<'a>(lexer: &mut Lexer<'a>) -> Result<Ast<'a>, ParseError> {
    match lexer.next()? {
        Token::Word(".version") => {}
        found => return Err(lexer.unexpected("`.version`", found)),
    }
    let version = match lexer.next()? {
        Token::F64(bits) => {
            let tenths = (f64::from_bits(bits) * 10.0).round();
            if !(10.0..10_000.0).contains(&tenths) {
                return Err(lexer.unexpected("a version", Token::F64(bits)));
            }
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "in 10..10000"
            )]
            let tenths = tenths as u32;
            (tenths / 10, tenths % 10)
        }
        found => return Err(lexer.unexpected("a version such as 9.0", found)),
    };
    if version > NEWEST_VERSION {
        return Err(ParseError::Version {
            major: version.0,
            minor: version.1,
        });
    }
    match lexer.next()? {
        Token::Word(".target") => {}
        found => return Err(lexer.unexpected("`.target`", found)),
    }
    let target = lexer.word("a target")?;
    while lexer.accept(b',')? {
        lexer.word("a target option")?;
    }
    if lexer.peek()? == Token::Word(".address_size") {
        lexer.next()?;
        let size = lexer.int("an address size")?;
        if size != 64 {
            return Err(ParseError::AddressSize { size });
        }
    }
    Ok(Ast {
        version,
        target,
        address_size: 64,
        variables: Vec::new(),
        functions: Vec::new(),
        aliases: Vec::new(),
        items: Vec::new(),
    })
}

fn declaration<'a>(
    lexer: &mut Lexer<'a>,
    first: &'a str,
    ast: &mut Ast<'a>,
) -> Result<ItemKind, ParseError> {
    let mut linkage = Linkage::Local;
    let mut word = first;
    loop {
        match word {
            ".visible" => linkage = Linkage::Visible,
            ".extern" => linkage = Linkage::Extern,
            ".weak" => linkage = Linkage::Weak,
            ".common" => linkage = Linkage::Common,
            ".entry" => {
                let function = function(lexer, true, linkage, delimit)?;
                ast.functions.push(function);
                return Ok(ItemKind::Function(ast.functions.len() - 1));
            }
            ".func" => {
                let function = function(lexer, false, linkage, delimit)?;
                ast.functions.push(function);
                return Ok(ItemKind::Function(ast.functions.len() - 1));
            }
            ".global" | ".const" | ".shared" | ".local" | ".tex" => {
                let space = match word {
                    ".const" => Space::Const,
                    ".shared" => Space::Shared,
                    ".local" => Space::Local,
                    _ => Space::Global,
                };
                let first = ast.variables.len();
                declare::variables(lexer, space, &mut ast.variables)?;
                lexer.expect(b';')?;
                for variable in ast.variables.iter_mut().skip(first) {
                    variable.linkage = linkage;
                }
                return Ok(ItemKind::Variables(first..ast.variables.len()));
            }
            found => return Err(lexer.unexpected("a declaration", Token::Word(found))),
        }
        word = lexer.word("a declaration")?;
    }
}

fn function<'a>(
    lexer: &mut Lexer<'a>,
    entry: bool,
    linkage: Linkage,
    body: impl FnOnce(&mut Lexer<'a>) -> Result<Body<'a>, ParseError>,
) -> Result<Function<'a>, ParseError> {
    while matches!(lexer.peek()?, Token::Word(".attribute")) {
        skip_attribute(lexer)?;
    }
    let start = lexer.position()?;
    let line = lexer.upcoming_line();
    let returns = if !entry && lexer.peek()? == Token::Punct(b'(') {
        declare::parameters(lexer)?
    } else {
        Vec::new()
    };
    let name = lexer.word("a function name")?;
    let params = if lexer.peek()? == Token::Punct(b'(') {
        declare::parameters(lexer)?
    } else {
        Vec::new()
    };
    let mut tuning = Tuning::default();
    let body = loop {
        match lexer.peek()? {
            Token::Punct(b'{') => break Some(body(lexer)?),
            Token::Punct(b';') => {
                lexer.next()?;
                break None;
            }
            Token::Word(word) => {
                lexer.next()?;
                tune(lexer, word, &mut tuning)?;
            }
            found => return Err(lexer.unexpected("a function body", found)),
        }
    };
    let signature = ast::Signature { returns, params };
    let end = lexer.end();
    Ok(Function {
        name,
        entry,
        linkage,
        signature,
        tuning,
        body,
        start,
        end,
        line,
    })
}

/// Parses one function from its own text, which begins after `.entry` or `.func` and ends with the function.
pub fn parse_function(text: &str, line: u32, entry: bool) -> Result<Function<'_>, ParseError> {
    let lexer = &mut Lexer::new(text, line);
    function(lexer, entry, Linkage::Local, remaining)
}

fn tune(lexer: &mut Lexer<'_>, word: &str, tuning: &mut Tuning) -> Result<(), ParseError> {
    match word {
        ".maxntid" => tuning.max_threads = Some(triple(lexer)?),
        ".reqntid" => tuning.required_threads = Some(triple(lexer)?),
        ".reqnctapercluster" => tuning.required_cluster = Some(triple(lexer)?),
        ".minnctapersm" | ".maxnctapersm" => tuning.min_blocks = Some(word32(lexer)?),
        ".maxnreg" => tuning.max_registers = Some(word32(lexer)?),
        ".maxclusterrank" => tuning.max_cluster_rank = Some(word32(lexer)?),
        ".explicitcluster" => tuning.explicit_cluster = true,
        ".blocksareclusters" => tuning.blocks_are_clusters = true,
        ".noreturn" => {}
        ".abi_preserve" | ".abi_preserve_control" => {
            word32(lexer)?;
        }
        ".pragma" => skip_statement(lexer)?,
        ".attribute" => {
            lexer.expect(b'(')?;
            while !lexer.accept(b')')? {
                if lexer.next()? == Token::End {
                    return Err(ParseError::OpenBlock { line: lexer.line() });
                }
            }
        }
        found => {
            return Err(lexer.unexpected(
                "a function body or a performance directive",
                Token::Word(found),
            ));
        }
    }
    Ok(())
}

fn word32(lexer: &mut Lexer<'_>) -> Result<u32, ParseError> {
    let value = lexer.int("a count")?;
    u32::try_from(value).map_err(|_| ParseError::TooMuch {
        line: lexer.line(),
        what: "a count",
        limit: u64::from(u32::MAX),
    })
}

fn triple(lexer: &mut Lexer<'_>) -> Result<[u32; 3], ParseError> {
    let mut value = [word32(lexer)?, 1, 1];
    for extent in value.iter_mut().skip(1) {
        if lexer.accept(b',')? {
            *extent = word32(lexer)?;
        }
    }
    Ok(value)
}

fn skip_attribute(lexer: &mut Lexer<'_>) -> Result<(), ParseError> {
    lexer.next()?;
    lexer.expect(b'(')?;
    loop {
        match lexer.next()? {
            Token::Punct(b')') => return Ok(()),
            Token::End => return Err(ParseError::OpenBlock { line: lexer.line() }),
            _ => {}
        }
    }
}

pub(super) fn skip_statement(lexer: &mut Lexer<'_>) -> Result<(), ParseError> {
    loop {
        match lexer.next()? {
            Token::Punct(b';') => return Ok(()),
            Token::End => return Err(lexer.unexpected("`;`", Token::End)),
            _ => {}
        }
    }
}

fn skip_section(lexer: &mut Lexer<'_>) -> Result<(), ParseError> {
    lexer.word("a section name")?;
    let line = lexer.line();
    lexer.expect(b'{')?;
    loop {
        match lexer.next()? {
            Token::Punct(b'}') => return Ok(()),
            Token::End => return Err(ParseError::OpenBlock { line }),
            _ => {}
        }
    }
}

/// Reads a body that begins with the next token, `{`, and ends with the text.
fn remaining<'a>(lexer: &mut Lexer<'a>) -> Result<Body<'a>, ParseError> {
    lexer.peek()?;
    let line = lexer.upcoming_line();
    let text = lexer.rest()?;
    Ok(Body { text, line })
}

/// Reads a body that begins with the next token, `{`, and finds its end.
fn delimit<'a>(lexer: &mut Lexer<'a>) -> Result<Body<'a>, ParseError> {
    let start = lexer.position()?;
    lexer.expect(b'{')?;
    let line = lexer.line();
    let mut depth = 1_usize;
    loop {
        match lexer.next()? {
            Token::Punct(b'{') => depth += 1,
            Token::Punct(b'}') => {
                depth -= 1;
                if depth == 0 {
                    return Ok(Body {
                        text: lexer.since(start),
                        line,
                    });
                }
            }
            Token::Word(".loc" | ".file") => lexer.skip_line(),
            Token::End => return Err(ParseError::OpenBlock { line }),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ast::{InitValue, Linkage, Statement};
    use super::*;

    const HEAD: &str = ".version 8.7\n.target sm_90\n.address_size 64\n";

    #[test]
    fn a_module_with_variables_and_kernels() {
        let text = format!(
            "{HEAD}.visible .global .align 4 .b8 table[8] = {{1, 2, 3}};\n\
             .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n\
             .visible .entry k(.param .u64 k_0, .param .align 8 .b8 k_1[24])\n.maxntid 128, 1, 1\n{{\nret;\n}}\n"
        );
        let ast = parse_module(&text).unwrap();
        assert_eq!(ast.version, (8, 7));
        assert_eq!(ast.target, "sm_90");
        assert_eq!(ast.variables[0].bytes(), Some(8));
        assert_eq!(ast.variables[0].linkage, Linkage::Visible);
        assert_eq!(ast.variables[0].init.len(), 3);
        assert_eq!(ast.functions.len(), 2);
        let kernel = &ast.functions[1];
        assert!(kernel.entry);
        assert_eq!(kernel.tuning.max_threads, Some([128, 1, 1]));
        assert_eq!(kernel.signature.params[1].count, 24);
        let body = parse_body(kernel.body.unwrap()).unwrap();
        assert!(matches!(&body[1], Statement::Instruction(i) if i.opcode == "ret"));
    }

    #[test]
    fn initialisers_hold_addresses() {
        let text = format!("{HEAD}.global .b8 a[4];\n.global .u64 p[2] = {{generic(a)+4, a}};\n");
        let ast = parse_module(&text).unwrap();
        let init = &ast.variables[1].init;
        assert_eq!(
            init[0].value,
            InitValue::Symbol {
                name: "a",
                offset: 4,
                generic: true
            }
        );
        assert_eq!(
            init[1].value,
            InitValue::Symbol {
                name: "a",
                offset: 0,
                generic: false
            }
        );
    }

    #[test]
    fn a_newer_version_is_refused_by_number() {
        let error = parse_module(".version 9.3\n.target sm_90\n").unwrap_err();
        assert_eq!(error, ParseError::Version { major: 9, minor: 3 });
    }

    #[test]
    fn errors_carry_their_line() {
        let error = parse_module(&format!("{HEAD}.visible .entry k() {{ ret; \n")).unwrap_err();
        assert_eq!(error, ParseError::OpenBlock { line: 4 });
        assert!(parse_module("hello").is_err());
    }

    #[test]
    fn nesting_is_bounded() {
        let text = format!("{HEAD}.global .b8 a[4] = {}", "{".repeat(100_000));
        assert!(matches!(
            parse_module(&text),
            Err(ParseError::TooMuch { .. })
        ));
    }

    /// The count of rows follows from the initial values.
    #[test]
    fn a_variable_is_bounded_also_where_its_values_count_its_rows() {
        let text =
            |columns: u64| format!("{HEAD}.global .b32 a[][{columns}][4] = {{{{{{1}}}}}};\n");
        assert!(parse_module(&text(16)).is_ok());
        for columns in [1 << 30, 1 << 61, 1 << 62, u64::MAX >> 1] {
            let text = text(columns);
            let refused = matches!(parse_module(&text), Err(ParseError::TooMuch { .. }));
            assert!(refused, "{columns}");
        }
    }
}
