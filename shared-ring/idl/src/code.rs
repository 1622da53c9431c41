//! Conversion of the table's words to Rust, and of tokens to a file.

use std::ffi::CString;

use proc_macro2::{Literal, TokenStream};
use quote::quote;
use syn::{Ident, Type};

/// Fails if a word of a table is not a Rust identifier.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    match syn::parse_str::<Ident>(name) {
        Ok(_) => Ok(()),
        Err(_) => Err(format!("{name} cannot be a name in Rust")),
    }
}

/// Fails if a text of a table is not a Rust type.
pub(crate) fn check_type(text: &str) -> Result<(), String> {
    match syn::parse_str::<Type>(text) {
        Ok(_) => Ok(()),
        Err(_) => Err(format!("{text} is no type in Rust")),
    }
}

/// Tokens of a type. The table's parser has checked it.
pub(crate) fn rust(text: &str) -> TokenStream {
    text.parse().unwrap_or_default()
}

/// C string literal of a text without zero bytes.
pub(crate) fn c_string(text: &str) -> Literal {
    Literal::c_string(&CString::new(text).unwrap_or_default())
}

/// Identifier of a name. The table's parser has checked it.
pub(crate) fn ident(name: &str) -> Ident {
    quote::format_ident!("{name}")
}

/// Doc attributes, one for each line.
pub(crate) fn docs(lines: &[String]) -> TokenStream {
    let lines = lines.iter().map(|line| format!(" {line}"));
    quote!(#(#[doc = #lines])*)
}

/// Formats generated code as the text of a file.
///
/// # Panics
/// The generated code does not parse as Rust.
pub(crate) fn file(code: TokenStream) -> String {
    match syn::parse2(code) {
        Ok(file) => prettyplease::unparse(&file),
        Err(error) => panic!("the generated code is not Rust: {error}"),
    }
}
