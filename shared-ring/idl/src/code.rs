//! Pieces of Rust, and how they become a file.

use std::ffi::CString;

use proc_macro2::{Literal, TokenStream};
use quote::quote;
use syn::Ident;

/// A string of C, for which the text has no zero.
pub(crate) fn c_string(text: &str) -> Literal {
    Literal::c_string(&CString::new(text).unwrap_or_default())
}

/// A name.
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
