//! Parses the body of a function: declarations, labels and instructions.

use super::ast::{Body, Instruction, Operand, Signature, Space, Statement, Variable};
use super::lexer::{Lexer, Token};
use super::{ParseError, declare, skip_statement};
use crate::limits::{MAX_INSTRUCTIONS, MAX_NESTING};

/// Parses the body of a function, from its `{` to its `}`.
pub fn parse_body(body: Body<'_>) -> Result<Vec<Statement<'_>>, ParseError> {
    let mut lexer = Lexer::new(body.text, body.line);
    let mut statements = Vec::new();
    let mut depth = 0_usize;
    loop {
        match lexer.next()? {
            Token::Punct(b'{') => {
                depth += 1;
                if depth > MAX_NESTING {
                    let limit = MAX_NESTING as u64;
                    return Err(ParseError::TooMuch {
                        line: lexer.line(),
                        what: "the nesting of blocks",
                        limit,
                    });
                }
                statements.push(Statement::Open);
            }
            Token::Punct(b'}') => {
                statements.push(Statement::Close);
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return Ok(statements);
                }
            }
            Token::Punct(b';') => {}
            Token::Punct(b'@') => {
                let negated = lexer.accept(b'!')?;
                let predicate = lexer.word("a predicate")?;
                let opcode = lexer.word("an instruction")?;
                statements.push(instruction(&mut lexer, opcode, Some((predicate, negated)))?);
            }
            Token::Word(word) => statement(&mut lexer, word, &mut statements)?,
            Token::End => return Err(ParseError::OpenBlock { line: body.line }),
            found => return Err(lexer.unexpected("an instruction", found)),
        }
        if statements.len() > MAX_INSTRUCTIONS {
            let limit = MAX_INSTRUCTIONS as u64;
            return Err(ParseError::TooMuch {
                line: lexer.line(),
                what: "the length of a function",
                limit,
            });
        }
    }
}

fn statement<'a>(
    lexer: &mut Lexer<'a>,
    word: &'a str,
    into: &mut Vec<Statement<'a>>,
) -> Result<(), ParseError> {
    let space = match word {
        ".reg" => Some(Space::Reg),
        ".local" => Some(Space::Local),
        ".shared" => Some(Space::Shared),
        ".param" => Some(Space::Param),
        ".global" => Some(Space::Global),
        ".const" => Some(Space::Const),
        _ => None,
    };
    if let Some(space) = space {
        let mut list: Vec<Variable<'a>> = Vec::new();
        declare::variables(lexer, space, &mut list)?;
        lexer.expect(b';')?;
        into.extend(list.into_iter().map(Statement::Variable));
        return Ok(());
    }
    match word {
        ".loc" | ".file" => lexer.skip_line(),
        ".pragma" => skip_statement(lexer)?,
        _ if word.starts_with('.') => {
            return Err(lexer.unexpected("an instruction", Token::Word(word)));
        }
        _ if lexer.accept(b':')? => labelled(lexer, word, into)?,
        _ => into.push(instruction(lexer, word, None)?),
    }
    Ok(())
}

fn labelled<'a>(
    lexer: &mut Lexer<'a>,
    label: &'a str,
    into: &mut Vec<Statement<'a>>,
) -> Result<(), ParseError> {
    match lexer.peek()? {
        Token::Word(".branchtargets") => {
            lexer.next()?;
            into.push(Statement::BranchTargets(label, names(lexer)?));
        }
        Token::Word(".calltargets") => {
            lexer.next()?;
            into.push(Statement::CallTargets(label, names(lexer)?));
        }
        Token::Word(".callprototype") => {
            lexer.next()?;
            let returns = if lexer.peek()? == Token::Punct(b'(') {
                declare::parameters(lexer)?
            } else {
                Vec::new()
            };
            lexer.word("`_`")?;
            let params = if lexer.peek()? == Token::Punct(b'(') {
                declare::parameters(lexer)?
            } else {
                Vec::new()
            };
            skip_statement(lexer)?;
            into.push(Statement::Prototype(label, Signature { returns, params }));
        }
        _ => into.push(Statement::Label(label)),
    }
    Ok(())
}

fn names<'a>(lexer: &mut Lexer<'a>) -> Result<Vec<&'a str>, ParseError> {
    let mut list = vec![lexer.word("a label")?];
    while lexer.accept(b',')? {
        list.push(lexer.word("a label")?);
    }
    lexer.expect(b';')?;
    Ok(list)
}

fn instruction<'a>(
    lexer: &mut Lexer<'a>,
    opcode: &'a str,
    guard: Option<(&'a str, bool)>,
) -> Result<Statement<'a>, ParseError> {
    let line = lexer.line();
    let mut operands = Vec::new();
    if !lexer.accept(b';')? {
        loop {
            operands.push(operand(lexer, 0)?);
            if lexer.accept(b';')? {
                break;
            }
            lexer.expect(b',')?;
        }
    }
    Ok(Statement::Instruction(Instruction {
        guard,
        opcode,
        operands,
        line,
    }))
}

fn operand<'a>(lexer: &mut Lexer<'a>, depth: usize) -> Result<Operand<'a>, ParseError> {
    if depth > 4 {
        return Err(ParseError::TooMuch {
            line: lexer.line(),
            what: "the nesting of an operand",
            limit: 4,
        });
    }
    match lexer.next()? {
        Token::Int(value) => Ok(Operand::Int(value)),
        Token::F32(bits) => Ok(Operand::F32(bits)),
        Token::F64(bits) => Ok(Operand::F64(bits)),
        Token::Punct(b'-') => match lexer.next()? {
            Token::Int(value) => Ok(Operand::Int(value.wrapping_neg())),
            Token::F32(bits) => Ok(Operand::F32(bits ^ 1 << 31)),
            Token::F64(bits) => Ok(Operand::F64(bits ^ 1 << 63)),
            Token::Word(name) => Ok(Operand::Negative(name)),
            found => Err(lexer.unexpected("a number or a register", found)),
        },
        Token::Punct(b'~') => Ok(Operand::Int(!lexer.int("a number")?)),
        Token::Punct(b'!') => Ok(Operand::Not(lexer.word("a predicate")?)),
        Token::Punct(b'{') => {
            let mut list = vec![operand(lexer, depth + 1)?];
            while lexer.accept(b',')? {
                list.push(operand(lexer, depth + 1)?);
            }
            lexer.expect(b'}')?;
            let vector = Operand::Vector(list);
            // A texture fetch may have a second destination: whether the texels are in memory.
            if lexer.accept(b'|')? {
                let second = Operand::Name(lexer.word("a second destination")?);
                return Ok(Operand::List(vec![vector, second]));
            }
            Ok(vector)
        }
        Token::Punct(b'(') => {
            let mut list = Vec::new();
            if lexer.accept(b')')? {
                return Ok(Operand::List(list));
            }
            loop {
                list.push(operand(lexer, depth + 1)?);
                if lexer.accept(b')')? {
                    return Ok(Operand::List(list));
                }
                lexer.expect(b',')?;
            }
        }
        Token::Punct(b'[') => address(lexer, depth),
        Token::Word(name) => match lexer.peek()? {
            Token::Punct(b'|') => {
                lexer.next()?;
                Ok(Operand::Pair(name, lexer.word("a second destination")?))
            }
            Token::Punct(b'+' | b'-') => Ok(Operand::Offset(name, declare::offset(lexer)?)),
            _ => Ok(Operand::Name(name)),
        },
        found => Err(lexer.unexpected("an operand", found)),
    }
}

fn address<'a>(lexer: &mut Lexer<'a>, depth: usize) -> Result<Operand<'a>, ParseError> {
    let base = match lexer.peek()? {
        Token::Word(name) => {
            lexer.next()?;
            Some(name)
        }
        _ => None,
    };
    let offset = if base.is_some() {
        declare::offset(lexer)?
    } else {
        lexer.int("an address")?.cast_signed()
    };
    if lexer.accept(b']')? {
        return Ok(Operand::Address(base, offset));
    }
    // The coordinates of a tensor or texture: `[map, {x, y}]`.
    let mut list = vec![Operand::Address(base, offset)];
    while lexer.accept(b',')? {
        list.push(operand(lexer, depth + 1)?);
    }
    lexer.expect(b']')?;
    Ok(Operand::List(list))
}
