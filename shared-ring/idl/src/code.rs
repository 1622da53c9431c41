//! Pieces of Rust, and how they become a file.

use std::ffi::CString;

use proc_macro2::{Literal, TokenStream};
use quote::quote;
use syn::{Ident, Type};

/// Why a word of a table cannot be in Rust.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    match syn::parse_str::<Ident>(name) {
        Ok(_) => Ok(()),
        Err(_) => Err(format!("{name} cannot be a name in Rust")),
    }
}

/// Why the text of a table is no type in Rust.
pub(crate) fn check_type(text: &str) -> Result<(), String> {
    match syn::parse_str::<Type>(text) {
        Ok(_) => Ok(()),
        Err(_) => Err(format!("{text} is no type in Rust")),
    }
}

/// A type, which the table's parser has checked.
pub(crate) fn rust(text: &str) -> TokenStream {
    text.parse().unwrap_or_default()
}

/// A string of C, for which the text has no zero.
pub(crate) fn c_string(text: &str) -> Literal {
    Literal::c_string(&CString::new(text).unwrap_or_default())
}

/// A name, which the table's parser has checked.
pub(crate) fn ident(name: &str) -> Ident {
    quote::format_ident!("{name}")
}

/// Documentation, line by line.
pub(crate) fn docs(lines: &[String]) -> TokenStream {
    let lines = lines.iter().map(|line| format!(" {line}"));
    quote!(#(#[doc = #lines])*)
}

/// The text of a file.
///
/// # Panics
/// The generator has written something that is no Rust.
pub(crate) fn file(code: TokenStream) -> String {
    match syn::parse2(code) {
        Ok(file) => prettyplease::unparse(&file),
        Err(error) => panic!("the generated code is not Rust: {error}"),
    }
}
