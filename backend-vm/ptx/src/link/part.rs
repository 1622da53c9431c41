//! One text of a link: its symbols, and the symbols that it uses.

use std::collections::HashMap;
use std::ops::Range;

use super::{Input, LinkError};
use crate::parse::ast::{Ast, Linkage, Space};
use crate::parse::{Lexer, ParseError, Token, parse_body, parse_module};

/// Name of module scope in one text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    pub function: bool,
    /// Widest linkage of its declarations; [`Linkage::Extern`] if it is only declared.
    pub linkage: Linkage,
    pub defined: bool,
    /// Whether it is dynamic shared memory: every text declares it, none defines it.
    dynamic: bool,
    /// Size of a variable.
    bytes: u64,
    align: u32,
    declarations: u32,
}

impl Symbol {
    pub fn is_local(&self) -> bool {
        self.linkage == Linkage::Local
    }

    /// Returns whether other texts may use its definition.
    pub fn is_offered(&self) -> bool {
        self.defined && !self.is_local()
    }

    pub fn is_strong(&self) -> bool {
        self.defined && self.linkage == Linkage::Visible
    }

    /// Returns the precedence of the declaration: the greatest stays, of equal ones the first.
    pub fn rank(&self) -> (u8, u64) {
        match self.linkage {
            _ if self.dynamic => (0, u64::from(self.align)),
            _ if !self.defined => (0, 0),
            Linkage::Visible => (3, 0),
            Linkage::Common => (2, self.bytes),
            _ => (1, 0),
        }
    }
}

/// Returns the rank of a linkage's visibility: the widest linkage of several declarations counts.
fn width(linkage: Linkage) -> u8 {
    match linkage {
        Linkage::Extern => 0,
        Linkage::Local => 1,
        Linkage::Common => 2,
        Linkage::Weak => 3,
        Linkage::Visible => 4,
    }
}

/// Text of a link, split into its declarations.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub name: &'a str,
    pub text: &'a str,
    pub of_library: bool,
    pub ast: Ast<'a>,
    pub symbols: HashMap<&'a str, Symbol>,
    /// Names of the symbols, in the order of the text.
    pub order: Vec<&'a str>,
    /// Number of occurrences of each word in the declarations.
    pub words: HashMap<&'a str, u32>,
    /// New names of symbols that are renamed.
    pub renamed: HashMap<&'a str, String>,
    /// Text of the bridges, whose names are among these.
    pub bridges: String,
}

impl<'a> Part<'a> {
    pub fn new(input: &Input<'a>) -> Result<Self, LinkError> {
        let in_input = |error| LinkError::Text {
            input: input.name.to_owned(),
            error,
        };
        let ast = parse_module(input.text).map_err(in_input)?;
        let mut part = Self {
            name: input.name,
            text: input.text,
            of_library: input.of_library,
            ast,
            symbols: HashMap::new(),
            order: Vec::new(),
            words: HashMap::new(),
            renamed: HashMap::new(),
            bridges: String::new(),
        };
        part.take_symbols().map_err(in_input)?;
        part.count_words().map_err(in_input)?;
        Ok(part)
    }

    fn take_symbols(&mut self) -> Result<(), ParseError> {
        let declared = |function, linkage, defined| Symbol {
            function,
            linkage,
            defined,
            dynamic: false,
            bytes: 0,
            align: 1,
            declarations: 1,
        };
        let mut found = Vec::new();
        for function in &self.ast.functions {
            if let Some(body) = function.body {
                parse_body(body)?;
            }
            // Programs look kernels up by name, whatever their linkage.
            let linkage = match function.linkage {
                Linkage::Local if function.entry => Linkage::Visible,
                linkage => linkage,
            };
            found.push((
                function.name,
                declared(true, linkage, function.body.is_some()),
            ));
        }
        for (second, _) in &self.ast.aliases {
            found.push((second, declared(true, Linkage::Local, true)));
        }
        for variable in &self.ast.variables {
            let is_extern = variable.linkage == Linkage::Extern;
            let shared = variable.space == Space::Shared;
            found.push((
                variable.name,
                Symbol {
                    dynamic: is_extern && shared && variable.count == 0,
                    bytes: variable.bytes().unwrap_or(0),
                    align: variable.align,
                    ..declared(false, variable.linkage, !is_extern)
                },
            ));
        }
        for (name, symbol) in found {
            let Some(known) = self.symbols.get_mut(name) else {
                self.order.push(name);
                self.symbols.insert(name, symbol);
                continue;
            };
            known.declarations += 1;
            known.defined |= symbol.defined;
            if width(symbol.linkage) > width(known.linkage) {
                known.linkage = symbol.linkage;
            }
        }
        for symbol in self.symbols.values_mut() {
            if !symbol.defined {
                symbol.linkage = Linkage::Extern;
            }
        }
        Ok(())
    }

    fn count_words(&mut self) -> Result<(), ParseError> {
        for item in &self.ast.items {
            let text = self.text.get(item.span.clone()).unwrap_or("");
            each_word(text, |word, _| {
                *self.words.entry(word).or_default() += 1;
            })?;
        }
        Ok(())
    }

    /// Returns the symbols that the text uses and other texts must define.
    pub fn wanted(&self) -> impl Iterator<Item = &'a str> {
        self.order.iter().copied().filter(|name| {
            let symbol = &self.symbols[name];
            let used = self.words.get(name).copied().unwrap_or(0) > symbol.declarations;
            !symbol.defined && !symbol.dynamic && used
        })
    }

    /// Appends a range of the text, with the new names.
    pub fn copy(&self, span: &Range<usize>, out: &mut String) -> Result<(), LinkError> {
        let text = self.text.get(span.clone()).unwrap_or("");
        if self.renamed.is_empty() {
            out.push_str(text);
            return Ok(());
        }
        let mut copied = 0;
        each_word(text, |word, place| {
            if let Some(new) = self.renamed.get(word) {
                out.push_str(&text[copied..place.start]);
                out.push_str(new);
                copied = place.end;
            }
        })
        .map_err(|error| LinkError::Text {
            input: self.name.to_owned(),
            error,
        })?;
        out.push_str(&text[copied..]);
        Ok(())
    }
}

/// Calls `found` for every word and its place, except for words of debug information.
fn each_word<'a>(
    text: &'a str,
    mut found: impl FnMut(&'a str, Range<usize>),
) -> Result<(), ParseError> {
    let mut lexer = Lexer::new(text, 1);
    loop {
        let start = lexer.position()?;
        match lexer.next()? {
            Token::End => return Ok(()),
            Token::Word(".loc" | ".file") => lexer.skip_line(),
            Token::Word(word) => found(word, start..lexer.end()),
            _ => {}
        }
    }
}
