//! Writes bridges to functions that one text declares with another signature than their definition has.
//!
//! Machine code does not state a function's parameters and results, so natively such texts link: a parameter that is
//! not passed is undefined (here zero), and one that the function does not declare is lost. PTX states them: the text
//! with the other declaration calls a bridge, which has the declared signature and calls the function by the defined
//! one.

use std::fmt::Write as _;

use crate::parse::ast::{Signature, Variable};

/// Returns the size in bytes of each variable; `None` unless all are scalars.
fn scalars(variables: &[Variable<'_>]) -> Option<Vec<u64>> {
    let bytes = |variable: &Variable<'_>| {
        let bytes = variable.bytes()?;
        matches!(bytes, 1 | 2 | 4 | 8).then_some(bytes)
    };
    variables.iter().map(bytes).collect()
}

/// Returns the text of the function `bridge`, which has the signature `declared` and calls `name`, which has the
/// signature `defined`. Returns `None` if both are alike, or if a parameter or a result is no scalar.
pub(super) fn bridge(
    bridge: &str,
    name: &str,
    declared: &Signature<'_>,
    defined: &Signature<'_>,
) -> Option<String> {
    let (given, taken) = (scalars(&declared.params)?, scalars(&defined.params)?);
    let (wanted, returned) = (scalars(&declared.returns)?, scalars(&defined.returns)?);
    if given == taken && wanted == returned {
        return None;
    }
    let mut body = String::from(".reg .b64 %v;\n");
    declare(&mut body, 'a', &taken);
    pass(&mut body, ('p', &given), ('a', &taken));
    declare(&mut body, 'b', &returned);
    let returns = match returned.len() {
        0 => String::new(),
        count => format!("{}, ", names('b', count)),
    };
    let arguments = match taken.len() {
        0 => String::new(),
        count => format!(", {}", names('a', count)),
    };
    let _ = writeln!(body, "call.uni {returns}{name}{arguments};");
    pass(&mut body, ('b', &returned), ('r', &wanted));
    let returns = match wanted.len() {
        0 => String::new(),
        _ => format!("({}) ", parameters('r', &wanted)),
    };
    let parameters = parameters('p', &given);
    Some(format!(
        ".func {returns}{bridge}({parameters})\n{{\n{body}ret;\n}}\n"
    ))
}

/// Declares variables for a call.
fn declare(out: &mut String, letter: char, bytes: &[u64]) {
    for (index, bytes) in bytes.iter().enumerate() {
        let _ = writeln!(out, ".param .b{} {letter}${index};", 8 * bytes);
    }
}

/// Writes a value to each variable of `to`: that of the same index in `from`, or zero if there is none.
fn pass(out: &mut String, from: (char, &[u64]), to: (char, &[u64])) {
    for (index, bytes) in to.1.iter().enumerate() {
        let value = match from.1.get(index) {
            Some(found) => {
                let bits = 8 * bytes.min(found);
                let _ = writeln!(out, "ld.param.u{bits} %v, [{}${index}];", from.0);
                "%v"
            }
            None => "0",
        };
        let bits = 8 * bytes;
        let _ = writeln!(out, "st.param.b{bits} [{}${index}], {value};", to.0);
    }
}

fn names(letter: char, count: usize) -> String {
    let names: Vec<String> = (0..count)
        .map(|index| format!("{letter}${index}"))
        .collect();
    format!("({})", names.join(", "))
}

fn parameters(letter: char, bytes: &[u64]) -> String {
    let parameters: Vec<String> = bytes
        .iter()
        .enumerate()
        .map(|(index, bytes)| format!(".param .b{} {letter}${index}", 8 * bytes))
        .collect();
    parameters.join(", ")
}
