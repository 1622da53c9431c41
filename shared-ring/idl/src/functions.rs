//! The tables of functions, of what `cuGetProcAddress` answers, and of device attributes.

use std::fmt::Write as _;

use crate::table::{FunctionBody, Table};

/// The module of functions for `wormhole-api`.
#[must_use]
pub fn functions(table: &Table) -> String {
    let mut out = String::new();
    out.push_str(
        "/// Every exported function, in the table's order.\npub static FUNCTIONS: &[FunctionInfo] = &[\n",
    );
    for function in &table.functions {
        let (class, messages) = match (&function.body, table.forwarded(function)) {
            (FunctionBody::Unsupported(reason), _) => {
                (format!("Class::Unsupported({reason:?})"), String::new())
            }
            (_, Some((_, forwarded))) => {
                let ids = forwarded
                    .messages
                    .iter()
                    .map(|name| format!("<{name} as Message>::ID"));
                (
                    format!("Class::{}", forwarded.class.name()),
                    ids.collect::<Vec<_>>().join(", "),
                )
            }
            // The parser refuses a reference to nothing.
            (_, None) => continue,
        };
        let _ = writeln!(
            out,
            "    FunctionInfo {{ id: {}, name: {:?}, class: {class}, messages: &[{messages}] }},",
            function.id, function.name
        );
    }
    out.push_str("];\n\n/// What `cuGetProcAddress` answers, sorted by symbol, stream variant and version.\npub static ENTRY_POINTS: &[EntryPoint] = &[\n");
    let mut rows: Vec<_> = table
        .functions
        .iter()
        .enumerate()
        .filter_map(|(index, function)| function.answers.as_ref().map(|answers| (answers, index)))
        .collect();
    rows.sort();
    for (answers, index) in rows {
        let _ = writeln!(
            out,
            "    EntryPoint {{ symbol: {:?}, per_thread: {}, since: {}, function: {index} }},",
            answers.symbol, answers.per_thread, answers.since
        );
    }
    out.push_str("];\n");
    out.push_str("/// Every `CUdevice_attribute`, by rising id.\npub static ATTRIBUTES: &[AttributeInfo] = &[\n");
    let mut attributes: Vec<_> = table.attributes.iter().collect();
    attributes.sort_by_key(|attribute| attribute.id);
    for attribute in attributes {
        let answer = attribute.answers.as_ref().map(|(value, _)| *value);
        let _ = writeln!(
            out,
            "    AttributeInfo {{ id: {}, name: {:?}, answer: {answer:?} }},",
            attribute.id, attribute.name
        );
    }
    out.push_str("];\n");
    out
}
