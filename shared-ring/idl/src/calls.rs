//! Lists the functions that programs call, for tests that call them: `shared-ring/api/called.txt`.

use std::fmt::Write as _;

use crate::table::{Direction, Table};

/// Returns a line for each function of `called` (one name a line): the name, then each parameter as
/// `name:direction:type`, with `:length` after an array. Functions that are not served have no line.
#[must_use]
pub fn calls(table: &Table, called: &str) -> String {
    let mut out = String::new();
    for name in called.lines().filter(|line| !line.starts_with('#')) {
        let function = table.functions.iter().find(|other| other.name == name);
        let Some((_, forwarded)) = function.and_then(|function| table.forwarded(function)) else {
            continue;
        };
        out.push_str(name);
        for parameter in &forwarded.parameters {
            let direction = match parameter.direction {
                Direction::In => "in",
                Direction::Out => "out",
                Direction::InOut => "inout",
            };
            let _ = write!(out, " {}:{direction}:{}", parameter.name, parameter.kind);
            if let Some(length) = &parameter.length {
                let _ = write!(out, ":{length}");
            }
        }
        out.push('\n');
    }
    out
}
