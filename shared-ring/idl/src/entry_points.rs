//! The driver's entry points, for a device that calls the driver.

use quote::quote;

use crate::code::{file, ident};
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
    let mut needed = Vec::new();
    let mut optional = Vec::new();
    for line in names.lines().filter(|line| !line.starts_with('#')) {
        let (name, list, word) = match line.strip_prefix("optional ") {
            Some(name) => (name, &mut optional, Some(ident("optional"))),
            None => (line, &mut needed, None),
        };
        let function = table.functions.iter().find(|known| known.name == name);
        let (_, forwarded) = function
            .and_then(|function| table.forwarded(function))
            .ok_or_else(|| NoSuchFunction(name.to_owned()))?;
        let parameters = forwarded.parameters.iter().map(|parameter| {
            let (name, kind) = (ident(&parameter.name), rust_type(parameter));
            quote!(#name: #kind)
        });
        let name = ident(name);
        list.push(quote!(#word fn #name(#(#parameters),*);));
    }
    Ok(file(quote!(entry_points! { #(#needed)* #(#optional)* })))
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
        let code = entry_points(&table, names).map(|code| code.replace(char::is_whitespace, ""));
        let expected = "entry_points!{fncuOld(flags:u32);optionalfncuNew(pointer:*mutCUdeviceptr,name:*constc_char);}";
        assert_eq!(code.as_deref(), Ok(expected));
        for missing in ["cuNever", "cuNone"] {
            let error = entry_points(&table, missing).expect_err("no such function");
            assert!(error.to_string().contains(missing), "{error}");
        }
    }
}
