//! Generates code for messages that one driver call answers: the device's operation, the CUDA device's implementation
//! of it, and the worker's service.
//!
//! The operation has the message's name, takes its fields in their order and returns what the driver makes for its new
//! handles and the fields of its reply.

use proc_macro2::{Literal, TokenStream};
use quote::{format_ident, quote};
use syn::Ident;

use crate::code::{docs, file, ident};
use crate::messages::{is_empty, scalar_type, snake_case};
use crate::table::{Body, Direction, DriverCall, Field, FieldType, Handle, Message, Table};

/// Reason why the driver's function does not fit the message that names it.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("message {message} calls {function}, {reason}")]
pub struct DriverCallError {
    message: String,
    function: String,
    reason: String,
}

fn calls(table: &Table) -> impl Iterator<Item = (&Message, &DriverCall)> {
    let messages = table.protocol(false);
    messages.filter_map(|message| Some((message, message.driver.as_ref()?)))
}

/// Generates the trait `DriverCalls` for `wormhole-device`.
#[must_use]
pub fn driver_calls(table: &Table) -> String {
    let methods = calls(table).map(|(message, call)| {
        let mut lines = message.doc.clone();
        if !lines.is_empty() {
            lines.push(String::new());
        }
        lines.push(format!("Calls `{}`.", call.function));
        let (doc, signature) = (docs(&lines), signature(message));
        quote!(#doc #signature;)
    });
    file(quote! {
        /// Operations that are one driver call each: the messages with a `driver` line. Operations of
        /// records never wait for the device.
        pub trait DriverCalls { #(#methods)* }
    })
}

/// Generates `DriverCalls` for the CUDA device. The code calls the device's `driver()` and `ordinal()`, `pointer(u64)`
/// and `handle(pointer)` for handles, and `number(n)`, which converts between integer types.
///
/// The unsafe blocks of the code are sound: callers of the operation pass live handles, and each output points to a local
/// variable.
///
/// # Errors
/// The first message whose `driver` line does not fit the function.
pub fn cuda_driver_calls(table: &Table) -> Result<String, DriverCallError> {
    let methods: Vec<TokenStream> = calls(table)
        .map(|(message, call)| {
            cuda_method(table, message, call).map_err(|reason| DriverCallError {
                message: message.name.clone(),
                function: call.function.clone(),
                reason,
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(file(quote! {
        impl DriverCalls for CudaDevice { #(#methods)* }
    }))
}

/// Generates the worker's service of each message that needs no check, for `Session`. The code calls `ask_KIND` if the
/// message names an object of that kind, else `ask` on the message's device.
#[must_use]
pub fn served_driver_calls(table: &Table) -> String {
    let unchecked = calls(table).filter(|(_, call)| !call.checked);
    let services = unchecked.map(|(message, _)| service(message));
    file(quote!(#(#services)*))
}

fn names(body: &Body) -> Vec<Ident> {
    body.fields.iter().map(|field| ident(&field.name)).collect()
}

/// One value alone, several as a tuple.
fn tuple(values: &[TokenStream]) -> TokenStream {
    match values {
        [only] => only.clone(),
        values => quote!((#(#values),*)),
    }
}

fn operation(message: &Message) -> Ident {
    ident(&snake_case(&message.name))
}

/// Handle of the device.
fn raw(handle: Handle) -> Ident {
    format_ident!("Raw{}", handle.name())
}

/// Device's type of a field; the parser has refused fields without one.
fn device_type(field: &Field) -> Option<TokenStream> {
    match field.kind {
        FieldType::Scalar(scalar) => Some(scalar_type(scalar)),
        FieldType::Address => Some(quote!(u64)),
        FieldType::Handle(handle) | FieldType::Minted(handle) => {
            let raw = raw(handle);
            Some(quote!(#raw))
        }
        _ => None,
    }
}

/// Fields that the operation takes.
fn taken(message: &Message) -> impl Iterator<Item = &Field> {
    let fields = message.body.fields.iter();
    fields.filter(|field| !matches!(field.kind, FieldType::Minted(_)))
}

/// Fields that the operation returns: new handles, then the reply.
fn returned(message: &Message) -> impl Iterator<Item = &Field> {
    let fields = message.body.fields.iter();
    let new = fields.filter(|field| matches!(field.kind, FieldType::Minted(_)));
    new.chain(&message.reply.fields)
}

fn signature(message: &Message) -> TokenStream {
    let operation = operation(message);
    let names = taken(message).map(|field| ident(&field.name));
    let kinds = taken(message).filter_map(device_type);
    let results: Vec<TokenStream> = returned(message).filter_map(device_type).collect();
    let results = tuple(&results);
    quote!(fn #operation(&self #(, #names: #kinds)*) -> Result<#results>)
}

fn cuda_method(table: &Table, message: &Message, call: &DriverCall) -> Result<TokenStream, String> {
    let function = table
        .functions
        .iter()
        .find(|known| known.name == call.function);
    let (_, forwarded) = function
        .and_then(|function| table.forwarded(function))
        .ok_or("whose parameters the table does not declare")?;
    let (given, wanted) = (&call.arguments, &forwarded.parameters);
    if given.len() != wanted.len() {
        let (given, wanted) = (given.len(), wanted.len());
        return Err(format!("which takes {wanted} arguments, with {given}"));
    }
    let mut arguments = Vec::new();
    for (argument, parameter) in given.iter().zip(wanted) {
        let result = returned(message).any(|field| field.name == *argument);
        if result != (parameter.direction == Direction::Out) {
            return Err(format!("whose {} cannot be {argument}", parameter.name));
        }
        if let Ok(number) = argument.parse() {
            let number = Literal::u64_unsuffixed(number);
            arguments.push(quote!(#number));
            continue;
        }
        let name = ident(argument);
        let field = taken(message).find(|field| field.name == *argument);
        arguments.push(match field.map(|field| &field.kind) {
            _ if result => quote!(&raw mut #name),
            // The driver's only handle that is no pointer.
            Some(FieldType::Handle(Handle::Memory)) => quote!(#name.0),
            Some(FieldType::Handle(_)) => quote!(pointer(#name.0)),
            Some(_) => quote!(number(#name)?),
            None => quote!(self.ordinal()),
        });
    }
    let (signature, function) = (signature(message), ident(&call.function));
    let called = quote!(unsafe { self.driver().#function(#(#arguments),*) });
    let results: Vec<&Field> = returned(message).collect();
    let places = results.iter().map(|field| {
        let name = ident(&field.name);
        let place = match field.kind {
            FieldType::Minted(_) => quote!(std::ptr::null_mut()),
            _ => quote!(Default::default()),
        };
        quote!(let mut #name = #place;)
    });
    let found = |field: &Field| {
        let name = ident(&field.name);
        match field.kind {
            FieldType::Minted(made) => {
                let raw = raw(made);
                quote!(#raw(handle(#name)))
            }
            _ => quote!(number(#name)?),
        }
    };
    let body = match results.as_slice() {
        [] => called,
        [Field { name, kind, .. }] if !matches!(kind, FieldType::Minted(_)) => {
            let name = ident(name);
            quote!(#(#places)* #called?; number(#name))
        }
        results => {
            let found: Vec<TokenStream> = results.iter().map(|field| found(field)).collect();
            let found = tuple(&found);
            quote!(#(#places)* #called?; Ok(#found))
        }
    };
    Ok(quote!(#signature { #body }))
}

fn service(message: &Message) -> TokenStream {
    let (name, operation, fields) = (
        ident(&message.name),
        operation(message),
        names(&message.body),
    );
    let mut handles = message
        .body
        .fields
        .iter()
        .filter_map(|field| match field.kind {
            FieldType::Handle(handle) => Some((ident(&field.name), handle)),
            _ => None,
        });
    let (ask, on, device) = match handles.next() {
        Some((field, handle)) => (
            format_ident!("ask_{}", snake_case(handle.name())),
            quote!(#field),
            quote!(device, #field),
        ),
        None => (ident("ask"), quote!(self.here(call)), quote!(device)),
    };
    let results = names(&message.reply);
    let found: Vec<TokenStream> = results.iter().map(|name| quote!(#name)).collect();
    let found = tuple(&found);
    let (reply, answer) = match is_empty(&message.reply) {
        true => (quote!(()), quote!(Answer::done())),
        false => {
            let reply = format_ident!("{name}Reply");
            let answer = quote!(Answer::reply(&wormhole_api::#reply { #(#results),* }));
            (quote!(wormhole_api::#reply), answer)
        }
    };
    quote! {
        impl Serve<wormhole_api::#name> for Session {
            fn serve(&mut self, call: &Call, message: &wormhole_api::#name) -> Outcome<#reply> {
                let &wormhole_api::#name { #(#fields),* } = message;
                self.#ask(
                    call,
                    #on,
                    move |#device| device.#operation(#(#fields),*),
                    |_, #found| #answer,
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FUNCTIONS: &str = "function 1 cuAsk request Ask\n    out bytes usize\n    in func CUfunction\n    in block i32\n    in dev CUdevice\n";

    fn table(driver: &str) -> Table {
        let text = format!(
            "message 1 Ask request blocking\n    block u32\n    function function\n  reply\n    bytes u64\n  driver {driver}\n{FUNCTIONS}"
        );
        crate::parse(&text).expect("a table")
    }

    fn squeezed(code: &str) -> String {
        code.replace(char::is_whitespace, "")
    }

    #[test]
    fn a_driver_line_makes_operation_implementation_and_service() {
        let table = table("cuAsk(bytes, function, block, device)");
        let signature = "fnask(&self,block:u32,function:RawFunction)->Result<u64>";
        assert!(squeezed(&driver_calls(&table)).contains(&format!("{signature};")));
        let cuda = squeezed(&cuda_driver_calls(&table).expect("it fits"));
        assert!(cuda.contains(signature), "{cuda}");
        assert!(
            cuda.contains("cuAsk(&rawmutbytes,pointer(function.0),number(block)?,self.ordinal()"),
            "{cuda}"
        );
        let served = squeezed(&served_driver_calls(&table));
        assert!(
            served.contains("self.ask_function(call,function,move|device,function|device.ask(block,function),|_,bytes|Answer::reply(&wormhole_api::AskReply{bytes}),)"),
            "{served}"
        );
    }

    #[test]
    fn the_driver_makes_new_handles_and_takes_addresses_and_numbers() {
        let text = "message 1 Make request blocking\n    new new stream\n    from event\n    memory memory\n    at address\n  reply\n    bytes u64\n  driver cuMake(new, bytes, from, memory, at, 7) checked\nfunction 1 cuMake request Make\n    out made CUstream\n    out bytes usize\n    in from CUevent\n    in memory CUmemGenericAllocationHandle\n    in at CUdeviceptr\n    in flags u32\n";
        let table = crate::parse(text).expect("a table");
        let cuda = squeezed(&cuda_driver_calls(&table).expect("it fits"));
        for part in [
            "fnmake(&self,from:RawEvent,memory:RawMemory,at:u64,)->Result<(RawStream,u64)>",
            "letmutnew=std::ptr::null_mut();",
            "cuMake(&rawmutnew,&rawmutbytes,pointer(from.0),memory.0,number(at)?,7",
            "Ok((RawStream(handle(new)),number(bytes)?))",
        ] {
            assert!(cuda.contains(part), "{part} in {cuda}");
        }
    }

    #[test]
    fn the_worker_serves_by_hand_what_it_checks() {
        let table = table("cuAsk(bytes, function, block, device) checked");
        assert!(driver_calls(&table).contains("fn ask"));
        assert_eq!(served_driver_calls(&table), "");
    }

    #[test]
    fn a_driver_line_must_fit_the_function() {
        for (driver, reason) in [
            (
                "cuNone(bytes, function, block)",
                "whose parameters the table does not declare",
            ),
            ("cuAsk(bytes, function, block)", "takes 4 arguments, with 3"),
            (
                "cuAsk(function, bytes, block, device)",
                "whose bytes cannot be function",
            ),
        ] {
            let error = cuda_driver_calls(&table(driver))
                .expect_err(driver)
                .to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
