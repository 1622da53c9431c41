//! The driver's entry points, for a device that calls the driver.

use std::fmt::Write as _;

use crate::exports::rust_type;
use crate::table::Table;

/// Why an entry point cannot be called by a list of names.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the table declares no parameters of {0}")]
pub struct NoSuchFunction(String);

/// A call of the macro `entry_points` with the signatures of `names`, which has a name on each line, those of functions
/// that a driver may lack behind `optional`. Lines that begin with `#` are comments.
///
/// # Errors
/// The first name that is no function of the table, or one that is not served.
pub fn entry_points(table: &Table, names: &str) -> Result<String, NoSuchFunction> {
    let mut needed = String::new();
    let mut optional = String::new();
    for line in names.lines().filter(|line| !line.starts_with('#')) {
        let (name, list, word) = match line.strip_prefix("optional ") {
            Some(name) => (name, &mut optional, "optional "),
            None => (line, &mut needed, ""),
        };
        let function = table.functions.iter().find(|known| known.name == name);
        let (_, forwarded) = function
            .and_then(|function| table.forwarded(function))
            .ok_or_else(|| NoSuchFunction(name.to_owned()))?;
        let parameters = forwarded.parameters.iter();
        let parameters: Vec<String> = parameters
            .map(|parameter| format!("{}: {}", parameter.name, rust_type(parameter)))
            .collect();
        let _ = writeln!(list, "    {word}fn {name}({});", parameters.join(", "));
    }
    Ok(format!("entry_points! {{\n{needed}{optional}}}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_names_becomes_signatures() {
        let table = crate::parse(
            "function 1 cuInit local\n    in flags u32\n\
             function 2 cuOld same cuInit\n\
             function 3 cuNew local\n    out pointer CUdeviceptr\n    in name string\n\
             function 4 cuNever unsupported no\n",
        )
        .expect("a table");
        let names = "# Names.\ncuOld\noptional cuNew\n";
        assert_eq!(
            entry_points(&table, names).as_deref(),
            Ok("entry_points! {\n    fn cuOld(flags: u32);\n    \
                optional fn cuNew(pointer: *mut CUdeviceptr, name: *const c_char);\n}\n")
        );
        for missing in ["cuNever", "cuNone"] {
            let error = entry_points(&table, missing).expect_err("no such function");
            assert!(error.to_string().contains(missing), "{error}");
        }
    }
}
