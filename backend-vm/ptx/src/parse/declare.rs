//! Parses declarations of variables: names, shapes and initialisers.

use super::ast::{InitItem, InitValue, Reference, Space, Type, Variable};
use super::lexer::{Lexer, Token};
use super::{ParseError, skip_attribute};
use crate::limits::{MAX_INITIALISER_BYTES, MAX_NESTING, MAX_VARIABLE_BYTES};

/// Part of a declaration before its names.
#[derive(Clone, Copy)]
struct Shape {
    ty: Type,
    vector: u32,
    align: Option<u32>,
    managed: bool,
    reference: Option<Reference>,
}

/// Parses the declaration that follows a state space, up to its `;`.
pub(super) fn variables<'a>(
    lexer: &mut Lexer<'a>,
    space: Space,
    into: &mut Vec<Variable<'a>>,
) -> Result<(), ParseError> {
    let shape = shape(lexer)?;
    loop {
        into.push(declarator(lexer, space, shape)?);
        if !lexer.accept(b',')? {
            return Ok(());
        }
    }
}

/// Parses `( .param .u32 a, .reg .b32 b )`.
pub(super) fn parameters<'a>(lexer: &mut Lexer<'a>) -> Result<Vec<Variable<'a>>, ParseError> {
    lexer.expect(b'(')?;
    let mut list = Vec::new();
    if lexer.accept(b')')? {
        return Ok(list);
    }
    loop {
        let space = match lexer.word("`.param` or `.reg`")? {
            ".param" => Space::Param,
            ".reg" => Space::Reg,
            found => return Err(lexer.unexpected("`.param` or `.reg`", Token::Word(found))),
        };
        let shape = shape(lexer)?;
        list.push(declarator(lexer, space, shape)?);
        if lexer.accept(b')')? {
            return Ok(list);
        }
        lexer.expect(b',')?;
    }
}

fn shape(lexer: &mut Lexer<'_>) -> Result<Shape, ParseError> {
    let mut vector = 1;
    let mut align = None;
    let mut managed = false;
    loop {
        let Token::Word(word) = lexer.peek()? else {
            let found = lexer.next()?;
            return Err(lexer.unexpected("a type", found));
        };
        match word {
            ".attribute" => {
                // `.managed` is the only attribute that changes the kind of a variable.
                let mut probe = lexer.clone();
                probe.next()?;
                probe.accept(b'(')?;
                managed |= probe.peek()? == Token::Word(".managed");
                skip_attribute(lexer)?;
                continue;
            }
            ".align" => {
                lexer.next()?;
                align = Some(alignment(lexer)?);
                continue;
            }
            _ => {}
        }
        lexer.next()?;
        match word {
            ".v2" => vector = 2,
            ".v4" => vector = 4,
            ".v8" => vector = 8,
            // A sampler, texture or surface reference is an opaque 64-bit handle.
            ".texref" | ".samplerref" | ".surfref" => {
                // Managed memory would let a program write the value, which belongs to the device.
                if managed {
                    let found = Token::Word(word);
                    return Err(lexer.unexpected("a type that can be managed", found));
                }
                let reference = match word {
                    ".texref" => Reference::Texture,
                    ".surfref" => Reference::Surface,
                    _ => Reference::Sampler,
                };
                return Ok(Shape {
                    ty: Type::B64,
                    vector,
                    align: None,
                    managed,
                    reference: Some(reference),
                });
            }
            ".u8" | ".b8" | ".s8" | ".u16" | ".s16" | ".b16" | ".u32" | ".s32" | ".b32"
            | ".u64" | ".s64" | ".b64" | ".b128" | ".f16" | ".f16x2" | ".bf16" | ".bf16x2"
            | ".f32" | ".f64" | ".pred" => {
                let Some(ty) = Type::named(&word[1..]) else {
                    continue;
                };
                // `.ptr` and its space and alignment describe what a parameter points to.
                while let Token::Word(
                    ".ptr" | ".global" | ".shared" | ".local" | ".const" | ".align",
                ) = lexer.peek()?
                {
                    if lexer.next()? == Token::Word(".align") {
                        alignment(lexer)?;
                    }
                }
                return Ok(Shape {
                    ty,
                    vector,
                    align,
                    managed,
                    reference: None,
                });
            }
            found => return Err(lexer.unexpected("a type", Token::Word(found))),
        }
    }
}

fn alignment(lexer: &mut Lexer<'_>) -> Result<u32, ParseError> {
    let value = lexer.int("an alignment")?;
    match u32::try_from(value) {
        Ok(align) if align.is_power_of_two() && align <= 1 << 16 => Ok(align),
        _ => Err(lexer.unexpected("a power of two up to 65536", Token::Int(value))),
    }
}

fn declarator<'a>(
    lexer: &mut Lexer<'a>,
    space: Space,
    shape: Shape,
) -> Result<Variable<'a>, ParseError> {
    let start = lexer.position()?;
    let name = lexer.word("a name")?;
    let line = lexer.line();
    let natural = shape.ty.bytes() * shape.vector;
    let mut variable = Variable {
        name,
        space,
        ty: shape.ty,
        vector: shape.vector,
        align: shape.align.unwrap_or(natural).max(1),
        count: 1,
        init: Vec::new(),
        linkage: super::Linkage::Local,
        managed: shape.managed,
        reference: shape.reference,
        range: None,
        span: start..lexer.end(),
        line,
    };
    if lexer.accept(b'<')? {
        let count = lexer.int("a count of registers")?;
        variable.range = Some(u32::try_from(count).unwrap_or(u32::MAX));
        lexer.expect(b'>')?;
        variable.span.end = lexer.end();
        return Ok(variable);
    }
    let mut dims = Vec::new();
    while lexer.accept(b'[')? {
        let extent = if lexer.peek()? == Token::Punct(b']') {
            0
        } else {
            lexer.int("an extent")?
        };
        lexer.expect(b']')?;
        if dims.len() >= MAX_NESTING {
            return Err(ParseError::TooMuch {
                line,
                what: "the number of dimensions",
                limit: MAX_NESTING as u64,
            });
        }
        dims.push(extent);
    }
    let too_large = ParseError::TooMuch {
        line,
        what: "the size of a variable",
        limit: MAX_VARIABLE_BYTES,
    };
    for extent in &dims {
        variable.count = variable
            .count
            .checked_mul(*extent)
            .ok_or_else(|| too_large.clone())?;
    }
    let is_too_large = |variable: &Variable<'_>| {
        variable
            .bytes()
            .is_none_or(|bytes| bytes > MAX_VARIABLE_BYTES)
    };
    if is_too_large(&variable) {
        return Err(too_large);
    }
    if lexer.accept(b'=')? {
        let mut strides = Vec::new();
        let mut stride = u64::from(shape.vector);
        if shape.vector > 1 {
            strides.push(1);
        }
        for extent in dims.iter().skip(1).rev() {
            strides.push(stride);
            stride = stride.saturating_mul(*extent);
        }
        if !dims.is_empty() {
            strides.push(stride);
        }
        let mut at = 0;
        initialiser(lexer, &strides, 0, &mut at, &mut variable)?;
        if dims.first() == Some(&0) {
            let rows = at.div_ceil(stride.max(1));
            variable.count = dims
                .iter()
                .skip(1)
                .fold(rows, |product, extent| product.saturating_mul(*extent));
            if is_too_large(&variable) {
                return Err(too_large);
            }
        }
        let total = variable.count.saturating_mul(u64::from(variable.vector));
        if variable.init.iter().any(|item| item.index >= total) {
            return Err(lexer.unexpected("as many initialisers as elements", Token::Punct(b'}')));
        }
    }
    variable.span.end = lexer.end();
    Ok(variable)
}

/// Parses one initialiser; `strides` are in scalars, outermost dimension last.
fn initialiser<'a>(
    lexer: &mut Lexer<'a>,
    strides: &[u64],
    depth: usize,
    at: &mut u64,
    variable: &mut Variable<'a>,
) -> Result<(), ParseError> {
    if depth > MAX_NESTING {
        let limit = MAX_NESTING as u64;
        return Err(ParseError::TooMuch {
            line: lexer.line(),
            what: "the nesting of an initialiser",
            limit,
        });
    }
    if !lexer.accept(b'{')? {
        let value = scalar(lexer)?;
        variable.init.push(InitItem { index: *at, value });
        *at += 1;
        if variable.init.len() as u64 > MAX_INITIALISER_BYTES {
            let limit = MAX_INITIALISER_BYTES;
            return Err(ParseError::TooMuch {
                line: lexer.line(),
                what: "an initialiser",
                limit,
            });
        }
        return Ok(());
    }
    let (inner, stride) = match strides.split_last() {
        Some((stride, inner)) => (inner, *stride),
        None => (strides, 1),
    };
    if lexer.accept(b'}')? {
        return Ok(());
    }
    let start = *at;
    loop {
        let element = *at;
        let braced = lexer.peek()? == Token::Punct(b'{');
        initialiser(lexer, inner, depth + 1, at, variable)?;
        if braced {
            *at = element.saturating_add(stride.max(1)).max(*at);
        }
        if lexer.accept(b'}')? {
            *at = (*at).max(start);
            return Ok(());
        }
        lexer.expect(b',')?;
        if lexer.accept(b'}')? {
            return Ok(());
        }
    }
}

fn scalar<'a>(lexer: &mut Lexer<'a>) -> Result<InitValue<'a>, ParseError> {
    let negative = lexer.accept(b'-')?;
    match lexer.next()? {
        Token::Int(value) if negative => Ok(InitValue::Int(value.wrapping_neg())),
        Token::Int(value) => Ok(InitValue::Int(value)),
        Token::F32(bits) if negative => Ok(InitValue::F32(bits ^ 1 << 31)),
        Token::F32(bits) => Ok(InitValue::F32(bits)),
        Token::F64(bits) if negative => Ok(InitValue::F64(bits ^ 1 << 63)),
        Token::F64(bits) => Ok(InitValue::F64(bits)),
        Token::Word("generic") => {
            lexer.expect(b'(')?;
            let name = lexer.word("a variable")?;
            let inner = offset(lexer)?;
            lexer.expect(b')')?;
            let outer = offset(lexer)?;
            Ok(InitValue::Symbol {
                name,
                offset: inner.wrapping_add(outer),
                generic: true,
            })
        }
        Token::Word(name) => Ok(InitValue::Symbol {
            name,
            offset: offset(lexer)?,
            generic: false,
        }),
        found => Err(lexer.unexpected("an initialiser", found)),
    }
}

/// Parses `+4`, `-4`, `+-4` or nothing.
pub(super) fn offset(lexer: &mut Lexer<'_>) -> Result<i64, ParseError> {
    if lexer.accept(b'+')? {
        Ok(lexer.int("an offset")?.cast_signed())
    } else if lexer.accept(b'-')? {
        Ok(lexer.int("an offset")?.cast_signed().wrapping_neg())
    } else {
        Ok(0)
    }
}
