//! Generates the C exports of the guest's driver library.

use proc_macro2::{Literal, TokenStream};
use quote::quote;
use syn::Ident;

use crate::code::{file, ident};
use crate::table::{Data, Direction, Forwarded, Function, FunctionBody, Parameter, Table};

/// Generates the module of exports for the guest's library: one C function for each name of the table, and their
/// addresses.
///
/// The code calls, in the crate that includes it:
/// - `crate::calls::NAME(parameters) -> Result`, for every function that is neither unsupported nor a plain
///   return code nor served by another (`calls`), with parameters of the types in `crate::parameter`; a function that depends on the
///   default stream gets a `DefaultStream` first; `crate::calls::code(Result) -> CUresult`;
/// - `crate::runtime::enter::<INDEX>()` at each call, with the function's index in `FUNCTIONS`;
/// - `crate::runtime::tracing() -> bool`, and when it is true
///   `crate::runtime::trace(usize, core::fmt::Arguments, CUresult)` after the call;
/// - `crate::runtime::unsupported(usize) -> CUresult`;
/// - for a plain return code `Out::clear()` for every result, and then
///   `crate::runtime::refuse(CUresult) -> CUresult`;
/// - with the feature `mutants`, `crate::mutants::returns_at_once(usize) -> bool`.
///
/// The types of `crate::parameter` are addresses in C, so the exports have them as parameters. Only a list needs an
/// unsafe block, which joins its address and its length. It is sound: the program keeps the contract of the C function,
/// and the table names the parameter that is the length. The names of functions and variables belong to this library
/// alone.
#[must_use]
pub fn exports(table: &Table) -> String {
    let functions = table.functions.iter().enumerate();
    let functions = functions.map(|(index, function)| export(table, index, function));
    let names = table.functions.iter().map(|function| ident(&function.name));
    let variables = table.data.iter().map(variable);
    file(quote! {
        #(#functions)*

        /// Address of each function, by its index in `FUNCTIONS`.
        pub static ADDRESSES: &[fn() -> *const c_void] = &[#(|| #names as *const c_void),*];

        #(#variables)*
    })
}

fn variable(data: &Data) -> TokenStream {
    let name = ident(&data.name);
    let bytes = Literal::usize_unsuffixed(data.bytes);
    let (kind, value) = match data.bytes {
        4 => (
            quote!(core::sync::atomic::AtomicU32),
            quote!(core::sync::atomic::AtomicU32::new(0)),
        ),
        8 => (
            quote!(core::sync::atomic::AtomicU64),
            quote!(core::sync::atomic::AtomicU64::new(0)),
        ),
        _ => (
            quote!([core::sync::atomic::AtomicU8; #bytes]),
            quote!([const { core::sync::atomic::AtomicU8::new(0) }; #bytes]),
        ),
    };
    quote! {
        /// Variable that debuggers look up; always zero.
        #[unsafe(no_mangle)]
        pub static #name: #kind = #value;
    }
}

fn export(table: &Table, index: usize, function: &Function) -> TokenStream {
    let name = ident(&function.name);
    let index = Literal::usize_unsuffixed(index);
    let Some((base, forwarded)) = table.forwarded(function) else {
        return quote! {
            /// Not supported: see the table.
            #[unsafe(no_mangle)]
            pub extern "C" fn #name() -> CUresult {
                crate::runtime::unsupported(#index)
            }
        };
    };
    let (docs, body) = match forwarded.returns {
        Some(code) => (
            quote! {
                /// CUDA driver API: always returns this code, without results.
            },
            refused(forwarded, code),
        ),
        None => {
            let per_thread = matches!(function.body, FunctionBody::PerThread(_));
            (
                quote! {
                    /// CUDA driver API.
                },
                served(table, &index, (base, forwarded), per_thread),
            )
        }
    };
    let parameters = forwarded.parameters.iter().map(|parameter| {
        let (name, kind) = (ident(&parameter.name), typed(forwarded, parameter));
        quote!(#name: #kind)
    });
    quote! {
        #docs
        #[unsafe(no_mangle)]
        pub extern "C" fn #name(#(#parameters),*) -> CUresult {
            // With this feature a function can return at once, to find the tests that notice.
            #[cfg(feature = "mutants")]
            if crate::mutants::returns_at_once(#index) {
                return 0;
            }
            #body
        }
    }
}

fn refused(forwarded: &Forwarded, code: u32) -> TokenStream {
    let code = Literal::u32_unsuffixed(code);
    let results: Vec<Ident> = names(forwarded);
    quote! {
        #(#results.clear();)*
        crate::runtime::refuse(#code)
    }
}

fn served(
    table: &Table,
    index: &Literal,
    (base, forwarded): (&Function, &Forwarded),
    per_thread: bool,
) -> TokenStream {
    let calls = forwarded.calls.as_deref();
    let (called, takes) = calls
        .and_then(|name| table.declared(name))
        .unwrap_or((base, forwarded));
    let function = ident(&called.name);
    let arguments =
        takes
            .parameters
            .iter()
            .map(|parameter| match forwarded.parameters.contains(parameter) {
                true => {
                    let name = ident(&parameter.name);
                    quote!(#name)
                }
                false => absent(takes, parameter),
            });
    let lists = forwarded
        .parameters
        .iter()
        .filter_map(|parameter| Some((ident(&parameter.name), list(forwarded, parameter)?)));
    let (list_names, lists): (Vec<_>, Vec<_>) = lists.unzip();
    let lists =
        (!lists.is_empty()).then(|| quote!(let (#(#list_names,)*) = unsafe { (#(#lists,)*) };));
    let default = forwarded.stream.then(|| match per_thread {
        true => quote!(DefaultStream::PerThread,),
        false => quote!(DefaultStream::Legacy,),
    });
    let parameters = forwarded.parameters.iter();
    let shown: Vec<String> = parameters
        .map(|p| format!("{0}: {{{0}:x?}}", p.name))
        .collect();
    let shown = shown.join(", ");
    quote! {
        crate::runtime::enter::<#index>();
        let result = {
            #lists
            crate::calls::code(crate::calls::#function(#default #(#arguments),*))
        };
        if crate::runtime::tracing() {
            crate::runtime::trace(#index, format_args!(#shown), result);
        }
        result
    }
}

/// Argument for a parameter that a caller lacks: null or 0.
fn absent(takes: &Forwarded, parameter: &Parameter) -> TokenStream {
    if parameter.length.is_none() && parameter.direction == Direction::In {
        return quote!(0);
    }
    match count(takes, parameter) {
        Some(count) if count.direction != Direction::In => {
            let count = ident(&count.name);
            quote!(Room::none(#count))
        }
        _ => {
            let direction = ident(&format!("{:?}", parameter.direction));
            quote!(#direction::none())
        }
    }
}

fn names(forwarded: &Forwarded) -> Vec<Ident> {
    let parameters = forwarded.parameters.iter();
    parameters.map(|parameter| ident(&parameter.name)).collect()
}

/// Type of an export's parameter. A list is a `Pointer` until its length is known.
fn typed(forwarded: &Forwarded, parameter: &Parameter) -> TokenStream {
    let kind = parameter.kind.as_str();
    let pointed = pointed(kind);
    let direction = ident(&format!("{:?}", parameter.direction));
    let length = parameter.length.as_deref().map(str::parse::<usize>);
    match (parameter.direction, length) {
        (Direction::In, None) => match kind {
            "string" => quote!(Text<'_>),
            "CUdeviceptr" if forwarded.unified => quote!(UnifiedPtr<'_>),
            _ => pointed,
        },
        (_, None) if kind == "void" => quote!(Pointer<'_, c_void>),
        (_, None | Some(Ok(1))) => quote!(#direction<'_, #pointed>),
        (_, Some(Ok(length))) => {
            let (element, length) = (element(kind), Literal::usize_unsuffixed(length));
            quote!(#direction<'_, [#element; #length]>)
        }
        (_, Some(Err(_))) => quote!(Pointer<'_, #pointed>),
    }
}

/// Code that makes a list of a parameter and its length; `None` for parameters that are no lists.
fn list(forwarded: &Forwarded, parameter: &Parameter) -> Option<TokenStream> {
    let (kind, name) = (parameter.kind.as_str(), ident(&parameter.name));
    let count = count(forwarded, parameter)?;
    let length = ident(&count.name);
    let element = element(kind);
    let place = quote!(#name.as_ptr().cast::<#element>());
    if count.direction != Direction::In {
        return Some(quote!(Room::new(#place, #length)));
    }
    // The array of result pointers is read, not written.
    let direction = match (kind, parameter.direction) {
        ("void*", Direction::Out) => ident("In"),
        (_, direction) => ident(&format!("{direction:?}")),
    };
    Some(quote!(#direction::list(#place, #length.length())))
}

/// Parameter that is a list's length.
fn count<'f>(forwarded: &'f Forwarded, parameter: &Parameter) -> Option<&'f Parameter> {
    let length = parameter.length.as_deref()?;
    forwarded.parameters.iter().find(|it| it.name == length)
}

/// Type of a list's elements.
fn element(kind: &str) -> TokenStream {
    match kind {
        "void" | "char" => quote!(u8),
        _ => pointed(kind),
    }
}

/// Type that a pointer points to.
fn pointed(kind: &str) -> TokenStream {
    match kind {
        "void" => quote!(c_void),
        "void*" => quote!(*mut c_void),
        "char" => quote!(c_char),
        "string" => quote!(*const c_char),
        other => match other.strip_suffix('*') {
            Some(kind) => {
                let kind = ident(kind);
                quote!(*const #kind)
            }
            None => {
                let kind = ident(other);
                quote!(#kind)
            }
        },
    }
}

/// Rust type of a C parameter.
pub(crate) fn rust_type(parameter: &Parameter) -> TokenStream {
    let pointed = pointed(&parameter.kind);
    match (parameter.direction, &parameter.length) {
        (Direction::In, None) => pointed,
        (Direction::In, Some(_)) => quote!(*const #pointed),
        (Direction::Out | Direction::InOut, _) => quote!(*mut #pointed),
    }
}
