//! Generates the tables of functions, entry points of `cuGetProcAddress`, and device attributes.

use proc_macro2::{Literal, TokenStream};
use quote::quote;

use crate::code::{file, ident};
use crate::table::{Function, FunctionBody, Table};

/// Generates the module of functions for `wormhole-api`.
#[must_use]
pub fn functions(table: &Table) -> String {
    let functions = table.functions.iter().filter_map(|one| info(table, one));
    let mut entry_points: Vec<_> = table
        .functions
        .iter()
        .enumerate()
        .filter_map(|(index, function)| function.answers.as_ref().map(|answers| (answers, index)))
        .collect();
    entry_points.sort();
    let entry_points = entry_points.into_iter().map(|(answers, index)| {
        let (symbol, per_thread) = (&answers.symbol, answers.per_thread);
        let since = Literal::u32_unsuffixed(answers.since);
        let index = Literal::usize_unsuffixed(index);
        quote! {
            EntryPoint { symbol: #symbol, per_thread: #per_thread, since: #since, function: #index }
        }
    });
    let mut attributes: Vec<_> = table.attributes.iter().collect();
    attributes.sort_by_key(|attribute| attribute.id);
    let attributes = attributes.into_iter().map(|attribute| {
        let (id, name) = (Literal::i32_unsuffixed(attribute.id), &attribute.name);
        let answer = match &attribute.answers {
            None => quote!(None),
            Some((value, _)) => {
                let value = Literal::i32_unsuffixed(*value);
                quote!(Some(#value))
            }
        };
        quote!(AttributeInfo { id: #id, name: #name, answer: #answer })
    });
    file(quote! {
        /// Every exported function, in the table's order.
        pub static FUNCTIONS: &[FunctionInfo] = &[#(#functions),*];

        /// Entry points of `cuGetProcAddress`, sorted by symbol, stream variant and version.
        pub static ENTRY_POINTS: &[EntryPoint] = &[#(#entry_points),*];

        /// Every `CUdevice_attribute`, by ascending id.
        pub static ATTRIBUTES: &[AttributeInfo] = &[#(#attributes),*];
    })
}

fn info(table: &Table, function: &Function) -> Option<TokenStream> {
    let (class, messages): (_, &[String]) = match (&function.body, table.forwarded(function)) {
        (FunctionBody::Unsupported(reason), _) => (quote!(Unsupported(#reason)), &[]),
        (_, Some((_, forwarded))) => {
            let class = ident(forwarded.class.name());
            (quote!(#class), &forwarded.messages)
        }
        // The parser refuses references to missing functions.
        (_, None) => return None,
    };
    let (id, name) = (Literal::u16_unsuffixed(function.id), &function.name);
    let messages = messages.iter().map(|message| ident(message));
    Some(quote! {
        FunctionInfo {
            id: #id,
            name: #name,
            class: Class::#class,
            messages: &[#(<#messages as Message>::ID),*],
        }
    })
}
