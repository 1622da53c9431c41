//! Generates the driver's entry points, for a device that calls the driver.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use proc_macro2::{TokenStream, TokenTree};
use quote::quote;

use crate::code::{file, ident};
use crate::exports::rust_type;
use crate::table::Table;

/// Reason why the entry points cannot be generated.
#[derive(Debug, thiserror::Error)]
pub enum EntryPointError {
    #[error("a source is no Rust: {0}")]
    Source(#[from] proc_macro2::LexError),
    #[error(
        "{0} is called, but the table does not declare its parameters: declare the function in driver.idl"
    )]
    NoSuchFunction(String),
}

/// Generates a call of the macro `entry_points` with the signatures of the functions that Rust sources call as methods
/// (`driver.cuInit(0)`).
///
/// # Errors
/// A source does not parse as Rust, or a called name is not in the table, or is not served.
pub fn entry_points(table: &Table, sources: &[String]) -> Result<String, EntryPointError> {
    let mut names = BTreeSet::new();
    for source in sources {
        add_calls(source.parse()?, &mut names);
    }
    let mut signatures = Vec::new();
    for name in names {
        let function = table.functions.iter().find(|known| known.name == name);
        let Some((_, forwarded)) = function.and_then(|function| table.forwarded(function)) else {
            return Err(EntryPointError::NoSuchFunction(name));
        };
        let parameters = forwarded.parameters.iter().map(|parameter| {
            let (name, kind) = (ident(&parameter.name), rust_type(parameter));
            quote!(#name: #kind)
        });
        let name = ident(&name);
        signatures.push(quote!(fn #name(#(#parameters),*);));
    }
    Ok(file(quote!(entry_points! { #(#signatures)* })))
}

/// Returns the text of each file in a folder of Rust sources and in its folders.
///
/// # Errors
/// A folder or a file cannot be read.
pub fn sources(folder: &Path) -> io::Result<Vec<String>> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => texts.append(&mut sources(&path)?),
            false => texts.push(fs::read_to_string(path)?),
        }
    }
    Ok(texts)
}

/// Adds the names that follow a dot and look like functions of the driver.
fn add_calls(code: TokenStream, names: &mut BTreeSet<String>) {
    let mut behind_dot = false;
    for token in code {
        match &token {
            TokenTree::Group(group) => add_calls(group.stream(), names),
            TokenTree::Ident(name) if behind_dot => {
                let name = name.to_string();
                let rest = name.strip_prefix("cu");
                if rest.is_some_and(|rest| rest.starts_with(|first: char| first.is_uppercase())) {
                    names.insert(name);
                }
            }
            _ => {}
        }
        behind_dot = matches!(&token, TokenTree::Punct(punct) if punct.as_char() == '.');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source: &str) -> Result<String, String> {
        let table = crate::parse(
            "function 1 cuInit local\n    in flags u32\n\
             function 2 cuOld same cuInit\n\
             function 3 cuNew local\n    out pointer CUdeviceptr\n    in name string\n\
             function 4 cuNever unsupported no\n",
        )
        .expect("a table");
        entry_points(&table, &[source.to_owned()])
            .map(|code| code.replace(char::is_whitespace, ""))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_functions_that_are_called_have_their_signatures() {
        let source = "// driver.cuNever()\nfn f() { { self.driver().cuOld(1); self.curve } driver\n.cuNew(p, n)?; }";
        assert_eq!(
            found(source).as_deref(),
            Ok(
                "entry_points!{fncuNew(pointer:*mutCUdeviceptr,name:*constc_char);fncuOld(flags:u32);}"
            )
        );
    }

    #[test]
    fn a_function_that_the_table_does_not_serve_is_named() {
        for missing in ["cuNever", "cuNone"] {
            let error = found(&format!("driver.{missing}()")).expect_err("no such function");
            assert!(error.contains(missing), "{error}");
        }
        let error = found("fn f( {").expect_err("brackets are open");
        assert!(error.contains("no Rust"), "{error}");
    }
}
