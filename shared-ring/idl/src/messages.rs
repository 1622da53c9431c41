//! Generates the messages, their encoders, the decoder and the dispatch.

use std::fmt::Write as _;

use proc_macro2::{Literal, TokenStream};
use quote::{format_ident, quote};
use syn::Ident;

use crate::code::{docs, file, ident};
use crate::table::{Body, Enum, Field, FieldType, Message, Scalar, Struct, Table, Tail};

/// Hashes the properties that both ends of a ring must agree on: ids, names, fields, types, bounds, values, in the
/// words of the language (so that the hash depends on the table alone).
#[must_use]
pub fn protocol_hash(table: &Table, next: bool) -> u64 {
    let mut canonical = String::new();
    for message in table.protocol(next) {
        let _ = writeln!(
            canonical,
            "message {} {} {}",
            message.id,
            message.name,
            message.kind.words()
        );
        for body in [&message.body, &message.reply] {
            for field in &body.fields {
                let nonzero = if field.nonzero { " nonzero" } else { "" };
                let _ = writeln!(canonical, "{} {}{nonzero}", field.name, field.kind);
            }
            for tail in &body.tails {
                let element = tail.element.as_deref().unwrap_or("bytes");
                let _ = writeln!(canonical, "tail {} {element} max {}", tail.name, tail.max);
            }
            canonical.push_str("reply\n");
        }
    }
    for item in &table.enums {
        for (value, name) in &item.values {
            let _ = writeln!(canonical, "enum {} {value} {name}", item.name);
        }
    }
    for item in &table.structs {
        for field in &item.fields {
            let _ = writeln!(
                canonical,
                "struct {} {} {}",
                item.name, field.name, field.kind
            );
        }
    }
    fnv1a(canonical.as_bytes())
}

/// FNV-1a, 64 bits (Fowler, Noll, Vo).
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Generates the module of messages for `wormhole-api`.
#[must_use]
pub fn messages(table: &Table, next: bool) -> String {
    let messages: Vec<&Message> = table.protocol(next).collect();
    let hash = format!("{:#018x}", protocol_hash(table, next));
    let hash: Option<Literal> = hash.parse().ok();
    let enums = table.enums.iter().map(enumeration);
    let structs = table.structs.iter().map(structure);
    let each = messages.iter().map(|message| whole_message(message));
    let requests = requests(&messages);
    let dispatch = dispatch(&messages);
    file(quote! {
        /// Hash of the protocol, which both ends of a ring must agree on.
        pub const PROTOCOL_HASH: u64 = #hash;
        #(#enums)*
        #(#structs)*
        #(#each)*
        #requests
        #dispatch
    })
}

fn enumeration(item: &Enum) -> TokenStream {
    let doc = docs(&item.doc);
    let name = ident(&item.name);
    let names: Vec<Ident> = item.values.iter().map(|(_, name)| ident(name)).collect();
    let values = item.values.iter();
    let values: Vec<Literal> = values
        .map(|(value, _)| Literal::u32_unsuffixed(*value))
        .collect();
    quote! {
        #doc
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum #name { #(#names),* }

        impl #name {
            /// Every value.
            pub const ALL: &'static [Self] = &[#(Self::#names),*];

            /// Returns the value on the wire.
            #[must_use]
            pub const fn to_wire(self) -> u32 {
                match self { #(Self::#names => #values,)* }
            }

            /// Converts a value on the wire; `None` if it is not declared.
            #[must_use]
            pub const fn from_wire(value: u32) -> Option<Self> {
                match value {
                    #(#values => Some(Self::#names),)*
                    _ => None,
                }
            }
        }
    }
}

/// Derives of types whose layout on the wire is that in memory.
fn wire_derives() -> TokenStream {
    quote! {
        Clone, Copy, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout
    }
}

fn structure(item: &Struct) -> TokenStream {
    let (doc, name, derives) = (docs(&item.doc), ident(&item.name), wire_derives());
    let align = item.align.map(Literal::usize_unsuffixed);
    let align = align.map(|bytes| quote!(, align(#bytes)));
    let fields = item.fields.iter().map(|field| {
        let (doc, name, kind) = (docs(&field.doc), ident(&field.name), wire_type(&field.kind));
        quote!(#doc pub #name: #kind)
    });
    quote! {
        #doc
        #[repr(C #align)]
        #[derive(#derives, Debug, PartialEq)]
        pub struct #name { #(#fields),* }
    }
}

fn whole_message(message: &Message) -> TokenStream {
    let name = ident(&message.name);
    let side = |name: &Ident, doc: &[String], body, limit: &str| {
        let side = Side {
            name,
            message: &message.name,
            body,
        };
        side.all(doc, &ident(limit))
    };
    let request = side(&name, &message.doc, &message.body, "MESSAGE_LIMIT");
    let reply_name = format_ident!("{name}Reply");
    let (answer, reply) = match (is_empty(&message.reply), borrows(&message.reply)) {
        (true, _) => (None, quote!(())),
        (false, borrows) => {
            let doc = [format!("The answer to [`{name}`].")];
            let lifetime = borrows.then(|| quote!(<'r>));
            let answer = side(&reply_name, &doc, &message.reply, "REPLY_LIMIT");
            (Some(answer), quote!(#reply_name #lifetime))
        }
    };
    let any = borrows(&message.body).then(|| quote!(<'_>));
    let (id, kind) = (
        Literal::u16_unsuffixed(message.id),
        ident(&format!("{:?}", message.kind)),
    );
    let text = &message.name;
    quote! {
        #request
        #answer
        impl Message for #name #any {
            const ID: u16 = #id;
            const NAME: &'static str = #text;
            const KIND: Kind = Kind::#kind;
            type Reply<'r> = #reply;
        }
    }
}

pub(crate) fn is_empty(body: &Body) -> bool {
    body.fields.is_empty() && body.tails.is_empty()
}

pub(crate) fn borrows(body: &Body) -> bool {
    !body.tails.is_empty()
}

fn wire_type(kind: &FieldType) -> TokenStream {
    match kind {
        FieldType::Scalar(scalar) => scalar_type(*scalar),
        FieldType::Array(scalar, count) => {
            let (scalar, count) = (scalar_type(*scalar), Literal::usize_unsuffixed(*count));
            quote!([#scalar; #count])
        }
        FieldType::Address
        | FieldType::Handle(_)
        | FieldType::Minted(_)
        | FieldType::OptionalHandle(_) => quote!(u64),
        FieldType::Fence | FieldType::OptionalFence | FieldType::Enum(_) => quote!(u32),
    }
}

pub(crate) fn scalar_type(scalar: Scalar) -> TokenStream {
    let name = ident(scalar.name());
    quote!(#name)
}

fn rust_type(kind: &FieldType) -> TokenStream {
    match kind {
        FieldType::Scalar(_) | FieldType::Array(..) => wire_type(kind),
        FieldType::Address => quote!(DevicePtr),
        FieldType::Handle(handle) | FieldType::Minted(handle) => {
            let handle = ident(handle.name());
            quote!(Handle<#handle>)
        }
        FieldType::OptionalHandle(handle) => {
            let handle = ident(handle.name());
            quote!(Option<Handle<#handle>>)
        }
        FieldType::Fence => quote!(Fence),
        FieldType::OptionalFence => quote!(Option<Fence>),
        FieldType::Enum(name) => {
            let name = ident(name);
            quote!(#name)
        }
    }
}

fn tail_type(tail: &Tail) -> TokenStream {
    match tail.element.as_deref().map(ident) {
        None => quote!(&'a [u8]),
        Some(element) => quote!(Items<'a, #element>),
    }
}

/// Message or reply.
struct Side<'t> {
    /// Name of the struct.
    name: &'t Ident,
    message: &'t str,
    body: &'t Body,
}

impl Side<'_> {
    /// Generates the struct with typed fields, its layout on the wire, and the conversions between them.
    fn all(&self, doc: &[String], limit: &Ident) -> TokenStream {
        let (name, body) = (self.name, self.body);
        let lifetime = borrows(body).then(|| quote!(<'a>));
        let doc = match doc {
            [] => quote!(#[doc = " See the message in `messages/`."]),
            lines => docs(lines),
        };
        let fields = body.fields.iter().map(|field| {
            let (doc, name, kind) = (docs(&field.doc), ident(&field.name), rust_type(&field.kind));
            quote!(#doc pub #name: #kind)
        });
        let tails = body.tails.iter().map(|tail| {
            let (doc, name, kind) = (docs(&tail.doc), ident(&tail.name), tail_type(tail));
            quote!(#doc pub #name: #kind)
        });
        let members = fields.chain(tails);
        let limits = self.limits();
        let wire = self.wire_struct();
        let encoder = self.encoder(limit);
        let decoder = self.decoder();
        quote! {
            #doc
            #[derive(Clone, Copy, Debug, PartialEq)]
            pub struct #name #lifetime { #(#members),* }
            #limits
            #wire
            #encoder
            #decoder
        }
    }

    /// Generates the limits of the tails.
    fn limits(&self) -> Option<TokenStream> {
        let (name, tails) = (self.name, &self.body.tails);
        let limits = tails.iter().map(|tail| {
            let doc = format!(" Greatest length of `{}`.", tail.name);
            let limit = format_ident!("MOST_{}", tail.name.to_uppercase());
            let most = Literal::u32_unsuffixed(tail.max);
            quote!(#[doc = #doc] pub const #limit: usize = #most;)
        });
        (!tails.is_empty()).then(|| quote!(impl #name<'_> { #(#limits)* }))
    }

    fn wire_name(&self) -> Ident {
        format_ident!("{}Wire", self.name)
    }

    fn wire_struct(&self) -> Option<TokenStream> {
        if is_empty(self.body) {
            return None;
        }
        let (name, derives) = (self.wire_name(), wire_derives());
        let (pads, _) = padding(self.body);
        let pads = pads.iter().enumerate().map(|(index, bytes)| {
            let (pad, bytes) = (format_ident!("pad{index}"), written(*bytes)?);
            Some(quote!(#pad: [u8; #bytes],))
        });
        let fields = self.body.fields.iter().map(|field| {
            let (name, kind) = (ident(&field.name), wire_type(&field.kind));
            Some(quote!(#name: #kind,))
        });
        let tails = self.body.tails.iter().map(|tail| {
            let count = count_name(tail);
            Some(quote!(#count: u32,))
        });
        // The last padding follows the last member.
        let members = fields.chain(tails).chain([None]);
        let members = pads.zip(members).map(|(pad, member)| quote!(#pad #member));
        Some(quote! {
            #[repr(C)]
            #[derive(#derives)]
            struct #name { #(#members)* }
        })
    }

    fn encoder(&self, limit: &Ident) -> TokenStream {
        let (name, body) = (self.name, self.body);
        let any = borrows(body).then(|| quote!(<'_>));
        let encoded = if is_empty(body) {
            quote!(Ok(send(&[])))
        } else {
            self.encoded(limit)
        };
        quote! {
            impl Encode for #name #any {
                #[inline]
                fn encode<R>(&self, send: impl FnOnce(&[&[u8]]) -> R) -> Result<R, EncodeError> {
                    #encoded
                }
            }
        }
    }

    fn encoded(&self, limit: &Ident) -> TokenStream {
        let (body, message, wire) = (self.body, self.message, self.wire_name());
        let (pads, fixed) = padding(body);
        let fixed = Literal::usize_unsuffixed(fixed);
        let total = borrows(body).then(|| quote!(let mut total = #fixed;));
        let bytes: Vec<TokenStream> = body.tails.iter().map(tail_bytes).collect();
        let counts = body.tails.iter().zip(&bytes).map(|(tail, bytes)| {
            let (name, count) = (ident(&tail.name), count_name(tail));
            let (text, max) = (&tail.name, Literal::u32_unsuffixed(tail.max));
            quote! {
                let #count = wire::count(#message, #text, self.#name.len(), #max)?;
                total += #bytes.len();
            }
        });
        let check = borrows(body).then(|| quote!(wire::total(#message, total, wire::#limit)?;));
        let pads = pads.iter().enumerate().filter_map(|(index, bytes)| {
            let (pad, bytes) = (format_ident!("pad{index}"), written(*bytes)?);
            Some(quote!(#pad: [0; #bytes]))
        });
        let fields = body.fields.iter().map(|field| {
            let (name, value) = (ident(&field.name), to_wire(field));
            quote!(#name: #value)
        });
        let tails = body.tails.iter().map(|tail| {
            let count = count_name(tail);
            quote!(#count)
        });
        let members = pads.chain(fields).chain(tails);
        quote! {
            #total
            #(#counts)*
            #check
            let fixed = #wire { #(#members),* };
            Ok(send(&[fixed.as_bytes() #(, #bytes)*]))
        }
    }

    fn decoder(&self) -> TokenStream {
        let (name, message) = (self.name, self.message);
        let lifetime = borrows(self.body).then(|| quote!(<'a>));
        let decoded = if is_empty(self.body) {
            quote! {
                wire::end(NAME, body)?;
                Ok(Self {})
            }
        } else {
            self.decoded()
        };
        quote! {
            impl<'a> Decode<'a> for #name #lifetime {
                #[inline]
                fn decode(body: &'a [u8]) -> Result<Self, DecodeError> {
                    const NAME: &str = #message;
                    #decoded
                }
            }
        }
    }

    fn decoded(&self) -> TokenStream {
        let (body, wire) = (self.body, self.wire_name());
        let mutable = borrows(body).then(|| quote!(mut));
        let tails = body.tails.iter().map(|tail| {
            let function = ident(match tail.element {
                Some(_) => "items",
                None => "bytes",
            });
            let (name, text, count) = (ident(&tail.name), &tail.name, count_name(tail));
            let max = Literal::u32_unsuffixed(tail.max);
            quote!(let #name = wire::#function(NAME, #text, fixed.#count, #max, &mut rest)?;)
        });
        let nonzero = body.fields.iter().filter(|field| field.nonzero);
        let nonzero = nonzero.map(|field| {
            let (name, text) = (ident(&field.name), &field.name);
            let slice = match field.kind {
                FieldType::Array(Scalar::U32, _) => quote!(&fixed.#name),
                _ => quote!(&[fixed.#name]),
            };
            quote!(wire::nonzero(NAME, #text, #slice)?;)
        });
        let fields = body.fields.iter().map(|field| {
            let (name, value) = (ident(&field.name), from_wire(field));
            quote!(#name: #value)
        });
        let names = body.tails.iter().map(|tail| {
            let name = ident(&tail.name);
            quote!(#name)
        });
        let members = fields.chain(names);
        quote! {
            let (fixed, #mutable rest) = wire::fixed::<#wire>(NAME, body)?;
            #(#tails)*
            wire::end(NAME, rest)?;
            #(#nonzero)*
            Ok(Self { #(#members),* })
        }
    }
}

fn count_name(tail: &Tail) -> Ident {
    format_ident!("{}_count", tail.name)
}

/// Expression for the bytes of a tail.
fn tail_bytes(tail: &Tail) -> TokenStream {
    let name = ident(&tail.name);
    let bytes = tail.element.as_ref().map(|_| quote!(.as_bytes()));
    quote!(self.#name #bytes)
}

/// Literal of a padding's length; `None` for no padding.
fn written(bytes: usize) -> Option<Literal> {
    (bytes != 0).then(|| Literal::usize_unsuffixed(bytes))
}

/// Computes the padding before each field of the fixed part and at its end, and the total size.
fn padding(body: &Body) -> (Vec<usize>, usize) {
    let mut offset = 0_usize;
    let mut greatest = 1;
    let mut pads = Vec::new();
    let layouts = body.fields.iter().map(|field| field.kind.layout());
    for (size, align) in layouts.chain(body.tails.iter().map(|_| (4, 4))) {
        let aligned = offset.next_multiple_of(align);
        pads.push(aligned - offset);
        offset = aligned + size;
        greatest = greatest.max(align);
    }
    let size = offset.next_multiple_of(greatest);
    pads.push(size - offset);
    (pads, size)
}

fn to_wire(field: &Field) -> TokenStream {
    let name = ident(&field.name);
    match &field.kind {
        FieldType::Scalar(_) | FieldType::Array(..) => quote!(self.#name),
        FieldType::Address => quote!(self.#name.0),
        FieldType::Handle(_) | FieldType::Minted(_) | FieldType::Fence | FieldType::Enum(_) => {
            quote!(self.#name.to_wire())
        }
        FieldType::OptionalHandle(_) => quote!(self.#name.map_or(0, Handle::to_wire)),
        FieldType::OptionalFence => quote!(self.#name.map_or(u32::MAX, Fence::to_wire)),
    }
}

fn from_wire(field: &Field) -> TokenStream {
    let (name, text) = (ident(&field.name), &field.name);
    let checked = |function: &str| {
        let function = ident(function);
        quote!(wire::#function(NAME, #text, fixed.#name)?)
    };
    match &field.kind {
        FieldType::Scalar(_) | FieldType::Array(..) => quote!(fixed.#name),
        FieldType::Address => quote!(DevicePtr(fixed.#name)),
        FieldType::Handle(_) => checked("handle"),
        FieldType::Minted(_) => checked("minted"),
        FieldType::OptionalHandle(_) => checked("optional_handle"),
        FieldType::Fence => checked("fence"),
        FieldType::OptionalFence => checked("optional_fence"),
        FieldType::Enum(kind) => {
            let kind = ident(kind);
            quote! {
                #kind::from_wire(fixed.#name)
                    .ok_or_else(|| wire::value(NAME, #text, u64::from(fixed.#name)))?
            }
        }
    }
}

fn requests(messages: &[&Message]) -> TokenStream {
    let mut sorted = messages.to_vec();
    sorted.sort_by_key(|message| message.id);
    let info =
        |name: &Ident| quote!(MessageInfo { id: #name::ID, name: #name::NAME, kind: #name::KIND });
    let infos = sorted.iter().map(|message| info(&ident(&message.name)));
    let names: Vec<Ident> = messages
        .iter()
        .map(|message| ident(&message.name))
        .collect();
    let variants = messages.iter().zip(&names).map(|(message, name)| {
        let lifetime = borrows(&message.body).then(|| quote!(<'a>));
        quote!(#name(#name #lifetime))
    });
    let arms = names.iter().map(|name| {
        let info = info(name);
        quote!(Self::#name(_) => #info,)
    });
    quote! {
        /// Every message: id, name, kind, in the order of the ids.
        pub const MESSAGES: &[MessageInfo] = &[#(#infos),*];

        /// Decoded and checked message.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Request<'a> { #(#variants),* }

        impl Request<'_> {
            /// Id, name and kind of the message.
            #[must_use]
            pub const fn info(&self) -> MessageInfo {
                match self { #(#arms)* }
            }
        }

        /// Decodes and checks a record's body. Total: every input is a message or an error.
        ///
        /// # Errors
        /// The first fault, with the names of the message and the field.
        pub fn decode(message: u16, body: &[u8]) -> Result<Request<'_>, DecodeError> {
            match message {
                #(#names::ID => Ok(Request::#names(#names::decode(body)?)),)*
                _ => Err(DecodeError::UnknownMessage { id: message }),
            }
        }
    }
}

/// Converts the name of a message to that of a test.
pub(crate) fn snake_case(name: &str) -> String {
    let mut out = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(letter.to_ascii_lowercase());
    }
    out
}

/// Generates `Serve` for a message whose answer is constant.
fn constant(message: &Message) -> Option<TokenStream> {
    let fields = message.reply.fields.iter().map(|field| {
        let (name, value) = (ident(&field.name), ident(field.constant.as_ref()?));
        Some(quote!(#name: #value))
    });
    let fields: Option<Vec<TokenStream>> = fields.collect();
    let fields = fields.filter(|fields| !fields.is_empty())?;
    let (name, reply) = (ident(&message.name), format_ident!("{}Reply", message.name));
    Some(quote! {
        impl<S: Server> Serve<#name> for S {
            fn serve(&mut self, _: &Self::Call, _: &#name) -> wire::Outcome<#reply> {
                Ok(wire::Served::Done(#reply { #(#fields),* }))
            }
        }
    })
}

/// Generates the dispatch to a server of every message, and the services with constant answers.
fn dispatch(messages: &[&Message]) -> TokenStream {
    let constants = messages.iter().filter_map(|message| constant(message));
    let bounds = messages.iter().map(|message| {
        let name = ident(&message.name);
        match borrows(&message.body) {
            true => quote!(S: for<'m> Serve<#name<'m>>,),
            false => quote!(S: Serve<#name>,),
        }
    });
    let names = messages.iter().map(|message| ident(&message.name));
    quote! {
        #(#constants)*

        /// Executes a message and passes its answer to `answer`, unless the server has deferred it.
        pub fn dispatch<S>(
            server: &mut S,
            call: &S::Call,
            request: &Request<'_>,
            mut answer: impl FnMut(CuResult, &[&[u8]]),
        ) -> Dispatched
        where
            S: Server,
            #(#bounds)*
        {
            match request {
                #(Request::#names(message) => deliver(server.serve(call, message), &mut answer),)*
            }
        }
    }
}
