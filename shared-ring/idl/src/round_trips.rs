//! Generates property tests of the messages: decoding inverts encoding.

use proc_macro2::{Literal, TokenStream};
use quote::{format_ident, quote};
use syn::Ident;

use crate::code::{file, ident};
use crate::messages::{is_empty, scalar_type, snake_case};
use crate::table::{Body, Field, FieldType, Handle, Scalar, Struct, Table};

/// Generates a property test for each message and each reply. The including code provides `message(id, &m)` and
/// `reply(&r)`, which encode, decode and compare, and `handle()`, a strategy of minted handles.
#[must_use]
pub fn round_trips(table: &Table, next: bool) -> String {
    let structs = table.structs.iter().map(structure);
    let mut properties = Vec::new();
    for item in table.protocol(next) {
        let (test, name) = (ident(&snake_case(&item.name)), ident(&item.name));
        let value = value(&name, &item.body);
        let check = quote!(message(#name::ID, &#value, Request::#name(#value))?;);
        properties.push(property(&test, &item.body, &check));
        if !is_empty(&item.reply) {
            let test = format_ident!("{test}_reply");
            let value = self::value(&format_ident!("{name}Reply"), &item.reply);
            let check = quote! {
                let mut body = Vec::new();
                reply(&#value, &mut body)?;
            };
            properties.push(property(&test, &item.reply, &check));
        }
    }
    file(quote! {
        #(#structs)*
        proptest! { #(#properties)* }
    })
}

fn structure(item: &Struct) -> TokenStream {
    let (function, name) = (ident(&snake_case(&item.name)), ident(&item.name));
    let names: Vec<Ident> = item.fields.iter().map(|field| ident(&field.name)).collect();
    let strategies = item.fields.iter().map(strategy);
    quote! {
        fn #function() -> impl Strategy<Value = #name> {
            (#(#strategies,)*).prop_map(|(#(#names,)*)| #name { #(#names),* })
        }
    }
}

/// Expression of a message or reply, from variables with its members' names.
fn value(name: &Ident, body: &Body) -> TokenStream {
    let fields = body.fields.iter().map(|field| {
        let name = ident(&field.name);
        quote!(#name)
    });
    let tails = body.tails.iter().map(|tail| {
        let name = ident(&tail.name);
        match tail.element {
            Some(_) => quote!(#name: Items::new(&#name)),
            None => quote!(#name: &#name),
        }
    });
    let members = fields.chain(tails);
    quote!(#name { #(#members),* })
}

fn property(test: &Ident, body: &Body, check: &TokenStream) -> TokenStream {
    let fields = body.fields.iter().map(|field| {
        let (name, strategy) = (ident(&field.name), strategy(field));
        quote!(#name in #strategy)
    });
    let tails = body.tails.iter().map(|tail| {
        let name = ident(&tail.name);
        let element = match &tail.element {
            None => quote!(any::<u8>()),
            Some(name) => {
                let function = ident(&snake_case(name));
                quote!(#function())
            }
        };
        // Longer tails find no more errors and are slow.
        let max = Literal::u32_unsuffixed(tail.max.min(300));
        quote!(#name in prop::collection::vec(#element, 0..=#max))
    });
    let nothing = is_empty(body).then(|| quote!(_nothing in Just(())));
    let arguments = fields.chain(tails).chain(nothing);
    quote! {
        #[test]
        fn #test(#(#arguments),*) {
            #check
        }
    }
}

fn strategy(field: &Field) -> TokenStream {
    match &field.kind {
        FieldType::Scalar(scalar) => scalar_strategy(*scalar, field.nonzero),
        FieldType::Array(scalar, count) => {
            let strategy = scalar_strategy(*scalar, field.nonzero);
            let (scalar, count) = (scalar_type(*scalar), Literal::usize_unsuffixed(*count));
            quote! {
                prop::collection::vec(#strategy, #count)
                    .prop_map(|values| <[#scalar; #count]>::try_from(values).expect("the length asked for"))
            }
        }
        FieldType::Address => quote!(any::<u64>().prop_map(DevicePtr)),
        FieldType::Handle(Handle::Stream) => {
            quote!(prop_oneof![Just(Handle::<Stream>::LEGACY), handle()])
        }
        FieldType::Handle(_) | FieldType::Minted(_) => quote!(handle()),
        FieldType::OptionalHandle(_) => quote!(prop::option::of(handle())),
        FieldType::Fence => quote!(fence()),
        FieldType::OptionalFence => quote!(prop::option::of(fence())),
        FieldType::Enum(name) => {
            let name = ident(name);
            quote!(prop::sample::select(#name::ALL))
        }
    }
}

fn scalar_strategy(scalar: Scalar, nonzero: bool) -> TokenStream {
    let kind = scalar_type(scalar);
    match (scalar, nonzero) {
        (Scalar::F32, _) => quote!(prop::num::f32::NORMAL),
        (_, true) => {
            let one: Option<Literal> = format!("1_{kind}").parse().ok();
            quote!(#one..)
        }
        (_, false) => quote!(any::<#kind>()),
    }
}
