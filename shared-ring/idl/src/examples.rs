//! Generates a valid example of each message.

use proc_macro2::{Literal, TokenStream};
use quote::quote;
use syn::Ident;

use crate::code::{check_name, file, ident};
use crate::messages::borrows;
use crate::table::{Field, FieldType, Message, Scalar, Table, Tail};

/// Generates `Example` for each message, and `examples`, which makes the entry of each. The including code provides the
/// trait, `entry`, and `Source`: `existing`, `newest` and `minted` for handles, `fence`, `device`, and the methods that
/// the table names.
#[must_use]
pub fn examples(table: &Table) -> String {
    let messages: Vec<&Message> = table.protocol(false).collect();
    let examples = messages.iter().map(|message| example(message));
    let names = messages.iter().map(|message| ident(&message.name));
    let entries = names.map(|name| {
        quote!({
            let message = #name::example(source);
            let entry = entry(&message);
            assert_eq!(decode(#name::ID, &entry.body), Ok(Request::#name(message)));
            entry
        })
    });
    file(quote! {
        #(#examples)*

        /// The example of each message, in the order of the ids. Each decodes to itself.
        pub fn examples(source: &mut Source<'_>) -> Vec<Entry> {
            vec![#(#entries),*]
        }
    })
}

fn example(message: &Message) -> TokenStream {
    let (name, body) = (ident(&message.name), &message.body);
    let any = borrows(body).then(|| quote!(<'_>));
    let fields = body.fields.iter().map(|field| {
        let (name, value) = (ident(&field.name), value(field));
        quote!(#name: #value)
    });
    let tails = body.tails.iter().map(|tail| {
        let (name, value) = (ident(&tail.name), elements(tail));
        quote!(#name: #value)
    });
    let members = fields.chain(tails);
    quote! {
        impl Example for #name #any {
            fn example(source: &mut Source<'_>) -> Self {
                Self { #(#members),* }
            }
        }
    }
}

fn elements(tail: &Tail) -> TokenStream {
    match tail.element {
        Some(_) => quote!(Items::new(&[])),
        None => {
            let bytes = Literal::byte_string(tail.example.as_bytes());
            quote!(#bytes)
        }
    }
}

fn value(field: &Field) -> TokenStream {
    let first = field.example.first();
    let name = first.filter(|word| check_name(word).is_ok());
    let name: Option<Ident> = name.map(|word| ident(word));
    let number = |scalar, index| number(scalar, field.example.get(index), field.nonzero);
    match (&field.kind, name) {
        (FieldType::Enum(kind), value) => {
            let kind = ident(kind);
            value.map_or_else(|| quote!(#kind::ALL[0]), |value| quote!(#kind::#value))
        }
        (FieldType::OptionalHandle(_) | FieldType::OptionalFence, method) => match method {
            Some(method) => quote!(Some(source.#method())),
            None => quote!(None),
        },
        (FieldType::Scalar(_), Some(method)) => quote!(source.#method().0),
        (_, Some(method)) => quote!(source.#method()),
        (FieldType::Scalar(scalar), None) => number(*scalar, 0),
        (FieldType::Array(scalar, count), None) => {
            let elements = (0..*count).map(|index| number(*scalar, index));
            quote!([#(#elements),*])
        }
        (FieldType::Address, None) if first.is_some() => {
            let address = number(Scalar::U64, 0);
            quote!(DevicePtr(#address))
        }
        (FieldType::Address, None) => quote!(source.device()),
        (FieldType::Handle(_), None) => quote!(source.existing()),
        (FieldType::Minted(_), None) => quote!(source.minted()),
        (FieldType::Fence, None) => quote!(source.fence()),
    }
}

fn number(scalar: Scalar, given: Option<&String>, nonzero: bool) -> TokenStream {
    let value = given.map_or(if nonzero { "1" } else { "0" }, String::as_str);
    let literal = format!("{value}_{}", scalar.name());
    literal.parse().unwrap_or_default()
}
