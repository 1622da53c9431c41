//! Links PTX: merges several texts into one (PTX ISA 9.0, "Linking Directives").
//!
//! Each text is split into its declarations, and those of all texts are written to one. If several texts
//! define a symbol, one definition stays: a `.visible` one, else the largest `.common` one, else the first
//! `.weak` one. A symbol that is local to its text gets a new name if another has the same.

mod bridge;
mod part;

use std::collections::{HashMap, HashSet, VecDeque};

use crate::decode::is_provided;
use crate::parse::ParseError;
use crate::parse::ast::{Item, ItemKind, Linkage};
use part::{Part, Symbol};

/// Text that goes into a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input<'a> {
    /// Name of the text in messages.
    pub name: &'a str,
    /// PTX.
    pub text: &'a str,
    /// Whether it belongs to a library: it is linked only if it defines a symbol that is missing otherwise.
    pub of_library: bool,
}

/// Functions that every link can use unless another text defines them.
const DEVICE_RUNTIME: Input<'_> = Input {
    name: "the device runtime",
    text: include_str!("device_runtime.ptx"),
    of_library: true,
};

/// Error in linking texts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// A text is not valid PTX.
    #[error("{input}: {error}")]
    Text {
        /// The text.
        input: String,
        /// Error in parsing it.
        error: ParseError,
    },
    /// No text defines the symbol.
    #[error("Undefined reference to '{symbol}' in '{input}'")]
    Undefined {
        /// The symbol.
        symbol: String,
        /// Text that uses it.
        input: String,
    },
    /// Two texts define the symbol.
    #[error("Multiple definition of '{symbol}' in '{input}', first defined in '{first}'")]
    Duplicate {
        /// The symbol.
        symbol: String,
        /// Text of the second definition.
        input: String,
        /// Text of the first definition.
        first: String,
    },
    /// The symbol is a function in one text, a variable in another.
    #[error("'{symbol}' in '{input}' is not of the kind that '{definer}' defines")]
    Kind {
        /// The symbol.
        symbol: String,
        /// Text that uses it.
        input: String,
        /// Text that defines it.
        definer: String,
    },
}

/// Checks that `inputs` can be linked; definitions may still be missing.
///
/// # Errors
/// [`LinkError`].
pub fn try_link(inputs: &[Input<'_>]) -> Result<(), LinkError> {
    definers(&needed(take_apart(inputs)?)).map(drop)
}

fn take_apart<'a>(inputs: &[Input<'a>]) -> Result<Vec<Part<'a>>, LinkError> {
    let inputs = inputs.iter().chain([&DEVICE_RUNTIME]);
    inputs.map(Part::new).collect()
}

/// Links `inputs` into one text.
///
/// # Errors
/// [`LinkError`].
pub fn link(inputs: &[Input<'_>]) -> Result<String, LinkError> {
    let mut parts = needed(take_apart(inputs)?);
    let definers = definers(&parts)?;
    check(&parts, &definers)?;
    rename(&mut parts);
    if let [part] = parts.as_slice() {
        return Ok(part.text.to_owned());
    }
    write(&parts, &definers)
}

/// Returns the texts that take part, in their order.
fn needed(parts: Vec<Part<'_>>) -> Vec<Part<'_>> {
    let mut offers: HashMap<&str, usize> = HashMap::new();
    for (index, part) in parts.iter().enumerate() {
        let defined = part
            .symbols
            .iter()
            .filter(|(_, symbol)| symbol.is_offered());
        for (name, _) in defined {
            // A definition in a text that takes part anyway precedes one in a library.
            let known = offers.entry(name).or_insert(index);
            if parts[*known].of_library && !part.of_library {
                *known = index;
            }
        }
    }
    let mut taken: Vec<bool> = parts.iter().map(|part| !part.of_library).collect();
    let mut queue: VecDeque<usize> = (0..parts.len()).filter(|&index| taken[index]).collect();
    while let Some(index) = queue.pop_front() {
        for name in parts[index].wanted() {
            if let Some(&definer) = offers.get(name)
                && !taken[definer]
            {
                taken[definer] = true;
                queue.push_back(definer);
            }
        }
    }
    let mut taken = taken.into_iter();
    let mut parts = parts;
    parts.retain(|_| taken.next().unwrap_or(false));
    parts
}

/// Returns, for each symbol, the index of the text whose declaration stays.
fn definers<'a>(parts: &[Part<'a>]) -> Result<HashMap<&'a str, usize>, LinkError> {
    let mut definers: HashMap<&str, usize> = HashMap::new();
    for (index, part) in parts.iter().enumerate() {
        for name in &part.order {
            let symbol = &part.symbols[name];
            if symbol.linkage == Linkage::Local {
                continue;
            }
            let Some(&first) = definers.get(name) else {
                definers.insert(name, index);
                continue;
            };
            let known = &parts[first].symbols[name];
            if symbol.is_strong() && known.is_strong() {
                return Err(LinkError::Duplicate {
                    symbol: (*name).to_owned(),
                    input: part.name.to_owned(),
                    first: parts[first].name.to_owned(),
                });
            }
            if symbol.rank() > known.rank() {
                definers.insert(name, index);
            }
        }
    }
    Ok(definers)
}

/// Checks that every used symbol is defined, and as the kind that it is used as.
fn check(parts: &[Part<'_>], definers: &HashMap<&str, usize>) -> Result<(), LinkError> {
    for part in parts {
        for name in part.wanted() {
            let definer = definers
                .get(name)
                .map(|&index| &parts[index])
                .filter(|definer| definer.symbols[name].defined);
            let Some(definer) = definer else {
                if is_provided(name) {
                    continue;
                }
                return Err(LinkError::Undefined {
                    symbol: name.to_owned(),
                    input: part.name.to_owned(),
                });
            };
            if definer.symbols[name].function != part.symbols[name].function {
                return Err(LinkError::Kind {
                    symbol: name.to_owned(),
                    input: part.name.to_owned(),
                    definer: definer.name.to_owned(),
                });
            }
        }
    }
    Ok(())
}

/// Generator of names that are not in use in the link.
#[derive(Default)]
struct Names {
    taken: HashSet<String>,
    number: u32,
}

impl Names {
    /// Returns a name similar to this one that neither the link nor `part` uses.
    fn fresh(&mut self, name: &str, part: &Part<'_>) -> String {
        loop {
            self.number += 1;
            let new = format!("{name}$L{}", self.number);
            if !part.words.contains_key(new.as_str()) && self.taken.insert(new.clone()) {
                return new;
            }
        }
    }
}

/// Assigns new names to local symbols whose names are in use, and the names of bridges to functions whose
/// declaration differs from their definition.
fn rename(parts: &mut [Part<'_>]) {
    let mut names = Names::default();
    let mut defined = HashMap::new();
    for part in &*parts {
        let shared = part.symbols.iter().filter(|(_, symbol)| !symbol.is_local());
        names
            .taken
            .extend(shared.map(|(name, _)| (*name).to_owned()));
        let functions = part.ast.functions.iter();
        for function in functions.filter(|function| function.body.is_some()) {
            if part.symbols[function.name].is_offered() {
                defined.insert(function.name, function.signature.clone());
            }
        }
    }
    for part in parts {
        for &name in &part.order {
            if !part.symbols[name].is_local() || names.taken.insert(name.to_owned()) {
                continue;
            }
            let new = names.fresh(name, part);
            part.renamed.insert(name, new);
        }
        for index in 0..part.ast.functions.len() {
            let declared = &part.ast.functions[index];
            let name = declared.name;
            let Some(defined) = defined.get(name) else {
                continue;
            };
            if part.symbols[name].defined || part.renamed.contains_key(name) {
                continue;
            }
            let new = names.fresh(name, part);
            if let Some(text) = bridge::bridge(&new, name, &declared.signature, defined) {
                part.bridges.push_str(&text);
                part.renamed.insert(name, new);
            }
        }
    }
}

fn write(parts: &[Part<'_>], definers: &HashMap<&str, usize>) -> Result<String, LinkError> {
    let version = parts.iter().map(|part| part.ast.version).max();
    let (major, minor) = version.unwrap_or(crate::parse::NEWEST_VERSION);
    let target = parts.iter().map(|part| part.ast.target);
    let target = target
        .max_by_key(|target| architecture(target))
        .unwrap_or("sm_90");
    let mut out = format!(".version {major}.{minor}\n.target {target}\n.address_size 64\n");
    for (index, part) in parts.iter().enumerate() {
        out.push_str(&format!("\n// {}\n", part.name.escape_default()));
        let stays = |name: &str| {
            let symbol: &Symbol = &part.symbols[name];
            symbol.is_local() || definers.get(name) == Some(&index)
        };
        for Item { kind, span } in &part.ast.items {
            match kind {
                ItemKind::Function(function) => {
                    if stays(part.ast.functions[*function].name) {
                        part.copy(span, &mut out)?;
                        out.push('\n');
                    }
                }
                ItemKind::Alias(alias) => {
                    if stays(part.ast.aliases[*alias].0) {
                        part.copy(span, &mut out)?;
                        out.push('\n');
                    }
                }
                ItemKind::Variables(range) => {
                    let variables = part.ast.variables.get(range.clone()).unwrap_or(&[]);
                    let Some(first) = variables.first() else {
                        continue;
                    };
                    for variable in variables.iter().filter(|found| stays(found.name)) {
                        part.copy(&(span.start..first.span.start), &mut out)?;
                        part.copy(&variable.span, &mut out)?;
                        out.push_str(";\n");
                    }
                }
            }
        }
        out.push_str(&part.bridges);
    }
    Ok(out)
}

/// Returns the architecture's number: 90 for `sm_90a`.
fn architecture(target: &str) -> u32 {
    let digits = target.trim_start_matches(|c: char| !c.is_ascii_digit());
    let digits = digits.trim_end_matches(|c: char| !c.is_ascii_digit());
    digits.parse().unwrap_or(0)
}
