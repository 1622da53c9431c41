//! Result codes, flags and enumerations of the driver API.

use proc_macro2::Literal;
use quote::quote;

use crate::code::{c_string, docs, file, ident};
use crate::table::Table;

/// Generates the module of constants for `wormhole-api`: a module for each set, and `device_attribute`.
#[must_use]
pub fn constants(table: &Table) -> String {
    let sets = table.constants.iter().map(|set| {
        let (doc, name, kind) = (docs(&set.doc), ident(&set.name), ident(&set.kind));
        let values = set.values.iter().map(|constant| {
            let (doc, name) = (docs(&constant.doc), ident(&constant.name));
            let value = Literal::i64_unsuffixed(constant.value);
            quote!(#doc pub const #name: #kind = #value;)
        });
        quote!(#doc pub mod #name { #(#values)* })
    });
    let attributes = table.attributes.iter().map(|attribute| {
        let name = ident(&attribute.name);
        let id = Literal::i32_unsuffixed(attribute.id);
        quote!(pub const #name: i32 = #id;)
    });
    let last = table.attributes.iter().map(|attribute| attribute.id).max();
    let end = Literal::i32_unsuffixed(last.unwrap_or(0) + 1);
    file(quote! {
        #(#sets)*
        /// `CUdevice_attribute`.
        pub mod device_attribute {
            #(#attributes)*
            /// One past the last of CUDA 13.0.
            pub const MAX: i32 = #end;
        }
    })
}

/// Generates the list of result codes, as arguments of the macro `results` of `wormhole-api`.
#[must_use]
pub fn results(table: &Table) -> String {
    let results = table.results.iter().map(|result| {
        let (name, code) = (ident(&result.name), Literal::u32_unsuffixed(result.code));
        let kind = if result.code == 0 { "" } else { "ERROR_" };
        let c_name = c_string(&format!("CUDA_{kind}{name}"));
        let text = c_string(&result.text);
        quote!(#name = #code, #c_name, #text;)
    });
    file(quote!(results! { #(#results)* }))
}
