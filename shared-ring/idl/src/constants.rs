//! Result codes, flags and enumerations of the driver API.

use std::fmt::Write as _;

use crate::table::Table;

/// The module of constants for `wormhole-api`: a module for each set, and `device_attribute`.
#[must_use]
pub fn constants(table: &Table) -> String {
    let mut out = String::new();
    for set in &table.constants {
        docs(&mut out, "", &set.doc);
        let _ = writeln!(out, "pub mod {} {{", set.name);
        for constant in &set.values {
            docs(&mut out, "    ", &constant.doc);
            let _ = writeln!(
                out,
                "    pub const {}: {} = {};",
                constant.name, set.kind, constant.value
            );
        }
        out.push_str("}\n\n");
    }
    out.push_str("/// `CUdevice_attribute`.\npub mod device_attribute {\n");
    for attribute in &table.attributes {
        let _ = writeln!(
            out,
            "    pub const {}: i32 = {};",
            attribute.name, attribute.id
        );
    }
    out.push_str("}\n");
    out
}

/// The list of result codes for `wormhole-api`, as its macro `results` takes it.
#[must_use]
pub fn results(table: &Table) -> String {
    let mut out = "results! {\n".to_owned();
    for result in &table.results {
        let kind = if result.code == 0 { "" } else { "ERROR_" };
        let _ = writeln!(
            out,
            "    {0} = {1}, c\"CUDA_{kind}{0}\", c{2:?};",
            result.name, result.code, result.text
        );
    }
    out.push_str("}\n");
    out
}

fn docs(out: &mut String, indent: &str, doc: &[String]) {
    for line in doc {
        let _ = writeln!(out, "{indent}/// {line}");
    }
}
