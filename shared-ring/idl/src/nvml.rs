//! Parser of the table of NVML's functions, and generators of code from it.
//!
//! One declaration a line; `#` starts a comment.
//!
//! | line | what the guest's library does |
//! |---|---|
//! | `answered NAME(PARAMETER: TYPE, …) [-> TYPE]` | answers by itself: `crate::calls::NAME` |
//! | `same NAME OTHER` | answers as `OTHER`, declared earlier |
//! | `fixed NAME(OUTPUTS) = VALUES` | answers with these numbers for any device |
//! | `host NAME(SELECTORS, OUTPUTS) [else VALUES]` | answers with the host's NVML result, read once; without one, with the values or `NVML_ERROR_NOT_SUPPORTED` |
//! | `live NAME(SELECTORS, OUTPUTS)` | the same, read at each call |
//! | `field ID NAME`, `live-field ID NAME` | the same for a field of `nvmlDeviceGetFieldValues`; `NAME(SCOPES)` if each link has the field |
//! | `because REASON` | the reason for the refusals that follow |
//! | `unsupported NAME`, `refused NAME` | `NVML_ERROR_NOT_SUPPORTED`, `NVML_ERROR_NO_PERMISSION` |
//!
//! The first parameter of `fixed`, `host` and `live` functions is the device. A selector is the number of its values,
//! which begin with 0; an output is `u32`, `u64`, or a structure of such (`u32+u32`).

use std::fmt::Write as _;
use std::path::Path;

use proc_macro2::{Literal, TokenStream};
use quote::{format_ident, quote};
use syn::Ident;

use crate::code::{check_name, check_type, file, ident, rust};

/// Type of an integer that a function returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    U32,
    U64,
}

impl Word {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "u32" => Some(Self::U32),
            "u64" => Some(Self::U64),
            _ => None,
        }
    }

    fn rust(self) -> &'static str {
        match self {
            Self::U32 => "u32",
            Self::U64 => "u64",
        }
    }
}

/// Selectors and outputs of a function of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    pub selectors: Vec<u32>,
    pub outputs: Vec<Vec<Word>>,
}

impl Shape {
    fn words(&self) -> usize {
        self.outputs.iter().map(Vec::len).sum()
    }
}

/// Way in which the library serves a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    Answered {
        parameters: Vec<(String, String)>,
        returns: Option<String>,
    },
    Same(String),
    Fixed {
        shape: Shape,
        values: Vec<u64>,
    },
    Host {
        shape: Shape,
        live: bool,
        otherwise: Option<Vec<u64>>,
    },
    Unsupported(String),
    Refused(String),
}

/// Function of NVML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    pub name: String,
    pub body: Body,
}

/// Field of `nvmlDeviceGetFieldValues`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub id: u32,
    pub name: String,
    pub live: bool,
    /// Number of scopes, beginning with 0; `None` for a field of the device, which ignores the scope.
    pub scopes: Option<u32>,
}

/// Parsed table of NVML.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nvml {
    pub functions: Vec<Function>,
    pub fields: Vec<Field>,
}

/// Reason why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    #[error("the table of NVML cannot be read")]
    Read(#[from] std::io::Error),
    #[error("line {line} of the table of NVML: {what}")]
    Line { line: usize, what: String },
}

impl Nvml {
    /// Loads `nvml.idl` from `folder`.
    ///
    /// # Errors
    /// The file cannot be read or does not parse.
    pub fn load(folder: &Path) -> Result<Self, NvmlError> {
        Self::parse(&std::fs::read_to_string(folder.join("nvml.idl"))?)
    }

    /// Parses a table.
    ///
    /// # Errors
    /// A line is not in the language (see the module).
    pub fn parse(text: &str) -> Result<Self, NvmlError> {
        let mut table = Self::default();
        let mut reason = None;
        for (index, line) in text.lines().enumerate() {
            let declaration = line
                .split_once('#')
                .map_or(line, |(before, _)| before)
                .trim();
            let (word, rest) = declaration.split_once(' ').unwrap_or((declaration, ""));
            table
                .declare(word, rest.trim(), &mut reason)
                .map_err(|what| NvmlError::Line {
                    line: index + 1,
                    what,
                })?;
        }
        Ok(table)
    }

    fn declare(
        &mut self,
        word: &str,
        rest: &str,
        reason: &mut Option<String>,
    ) -> Result<(), String> {
        let because = || {
            reason
                .clone()
                .ok_or_else(|| format!("no reason before {rest}"))
        };
        let (name, body) = match word {
            "" => return Ok(()),
            "because" => {
                *reason = Some(rest.to_owned());
                return Ok(());
            }
            "field" | "live-field" => return self.field(rest, word == "live-field"),
            "answered" => answered(rest)?,
            "same" => {
                let (name, other) = rest.split_once(' ').ok_or("as which function?")?;
                if self.function(other).is_none() {
                    return Err(format!("{other} does not come before {name}"));
                }
                (name.to_owned(), Body::Same(other.to_owned()))
            }
            "fixed" => {
                let (call, values) = rest.split_once(" = ").ok_or("which values?")?;
                let (name, shape) = shape(call)?;
                let values = numbers(values, &shape)?;
                (name, Body::Fixed { shape, values })
            }
            "host" | "live" => {
                let (call, otherwise) = match rest.split_once(" else ") {
                    Some((call, values)) => (call, Some(values)),
                    None => (rest, None),
                };
                let (name, shape) = shape(call)?;
                let otherwise = otherwise
                    .map(|values| numbers(values, &shape))
                    .transpose()?;
                let live = word == "live";
                (
                    name,
                    Body::Host {
                        shape,
                        live,
                        otherwise,
                    },
                )
            }
            "unsupported" => (rest.to_owned(), Body::Unsupported(because()?)),
            "refused" => (rest.to_owned(), Body::Refused(because()?)),
            other => return Err(format!("{other} declares nothing")),
        };
        check_name(&name)?;
        if self.function(&name).is_some() {
            return Err(format!("{name} is declared twice"));
        }
        self.functions.push(Function { name, body });
        Ok(())
    }

    fn field(&mut self, rest: &str, live: bool) -> Result<(), String> {
        let (id, name) = rest
            .split_once(' ')
            .ok_or("a field has a number and a name")?;
        let id = id.parse().map_err(|_| format!("{id} is no number"))?;
        if self.fields.iter().any(|field| field.id == id) {
            return Err(format!("field {id} is declared twice"));
        }
        let (name, scopes) = match name.contains('(') {
            true => {
                let (name, shape) = shape(name)?;
                match (shape.selectors.as_slice(), shape.outputs.as_slice()) {
                    ([scopes], []) => (name, Some(*scopes)),
                    _ => return Err(format!("{name} has one number of scopes")),
                }
            }
            false => (name.to_owned(), None),
        };
        self.fields.push(Field {
            id,
            name,
            live,
            scopes,
        });
        Ok(())
    }

    /// Finds a function by name.
    #[must_use]
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|function| function.name == name)
    }

    /// Body of a function, or of the function that it is the same as, with that function's name.
    fn body<'t>(&'t self, function: &'t Function) -> (&'t str, &'t Body) {
        match &function.body {
            Body::Same(other) => self
                .function(other)
                .map_or((&function.name, &function.body), |other| {
                    (&other.name, &other.body)
                }),
            body => (&function.name, body),
        }
    }

    fn hosts(&self) -> impl Iterator<Item = (&str, &Shape, bool)> {
        self.functions
            .iter()
            .filter_map(|function| match &function.body {
                Body::Host { shape, live, .. } => Some((function.name.as_str(), shape, *live)),
                _ => None,
            })
    }
}

fn answered(text: &str) -> Result<(String, Body), String> {
    let (call, returns) = match text.split_once(" -> ") {
        Some((call, returns)) => {
            check_type(returns)?;
            (call, Some(returns.to_owned()))
        }
        None => (text, None),
    };
    let (name, inside) = parts(call)?;
    let parameters = inside
        .into_iter()
        .map(|parameter| {
            let (name, kind) = parameter
                .split_once(": ")
                .ok_or_else(|| format!("{parameter} has no type"))?;
            check_name(name)?;
            check_type(kind)?;
            Ok((name.to_owned(), kind.to_owned()))
        })
        .collect::<Result<_, String>>()?;
    Ok((
        name,
        Body::Answered {
            parameters,
            returns,
        },
    ))
}

/// Splits a call into its name and the parts between its brackets.
fn parts(call: &str) -> Result<(String, Vec<&str>), String> {
    let (name, inside) = call
        .strip_suffix(')')
        .and_then(|call| call.split_once('('))
        .ok_or_else(|| format!("{call} has no brackets"))?;
    let inside = inside.split(", ").filter(|part| !part.is_empty());
    Ok((name.to_owned(), inside.collect()))
}

fn shape(call: &str) -> Result<(String, Shape), String> {
    let (name, inside) = parts(call)?;
    let mut shape = Shape::default();
    for part in inside {
        if let Ok(count) = part.parse() {
            if !shape.outputs.is_empty() {
                return Err(format!("{name}: selectors come before outputs"));
            }
            shape.selectors.push(count);
        } else {
            let words: Option<Vec<Word>> = part.split('+').map(Word::parse).collect();
            let words = words.ok_or_else(|| format!("{name}: {part} is no output"))?;
            shape.outputs.push(words);
        }
    }
    Ok((name, shape))
}

fn numbers(text: &str, shape: &Shape) -> Result<Vec<u64>, String> {
    let values: Result<Vec<u64>, _> = text.split(' ').map(str::parse).collect();
    values
        .ok()
        .filter(|values| values.len() == shape.words())
        .ok_or_else(|| format!("{text} are not the values of {} outputs", shape.words()))
}

/// Generates the tables for `wormhole_api::nvml`.
#[must_use]
pub fn nvml_tables(table: &Nvml) -> String {
    let functions = table.functions.iter().map(|function| {
        let name = &function.name;
        let class = match table.body(function).1 {
            Body::Answered { .. } | Body::Fixed { .. } | Body::Same(_) => quote!(Answered),
            Body::Host { .. } => quote!(Host),
            Body::Unsupported(reason) => quote!(Unsupported(#reason)),
            Body::Refused(reason) => quote!(Refused(#reason)),
        };
        quote!(FunctionInfo { name: #name, class: Class::#class })
    });
    let hosts = table.hosts().map(|(name, shape, live)| {
        let selectors = shape.selectors.iter().copied().map(Literal::u32_unsuffixed);
        let outputs = outputs(shape);
        quote! {
            HostFunction { name: #name, live: #live, selectors: &[#(#selectors),*], outputs: #outputs }
        }
    });
    let fields = table.fields.iter().map(|field| {
        let (id, name, live) = (Literal::u32_unsuffixed(field.id), &field.name, field.live);
        let scopes = match field.scopes.map(Literal::u32_unsuffixed) {
            Some(scopes) => quote!(Some(#scopes)),
            None => quote!(None),
        };
        quote!(Field { id: #id, name: #name, live: #live, scopes: #scopes })
    });
    file(quote! {
        /// Every exported function, in the table's order.
        pub static FUNCTIONS: &[FunctionInfo] = &[#(#functions),*];

        /// Functions of the host's NVML that the backend calls.
        pub static HOST: &[HostFunction] = &[#(#hosts),*];

        /// Fields that the backend reads from the host's NVML.
        pub static FIELDS: &[Field] = &[#(#fields),*];
    })
}

fn outputs(shape: &Shape) -> TokenStream {
    let outputs = shape.outputs.iter().map(|words| {
        let words = words.iter().map(|word| ident(&format!("{word:?}")));
        quote!(&[#(Word::#words),*])
    });
    quote!(&[#(#outputs),*])
}

/// Generates the C exports of the guest's library.
///
/// The code calls, in the crate that includes it:
/// - `crate::calls::NAME(arguments)`, unsafe, for answered functions;
/// - `crate::host::passed_on` and `crate::host::fixed` for the others that are served;
/// - `crate::runtime::answer(usize, impl FnOnce() -> Result)`, around each of them, with the function's index in
///   `FUNCTIONS`;
/// - `crate::runtime::unsupported(usize)` and `crate::runtime::refused(usize)`.
#[must_use]
pub fn nvml_exports(table: &Nvml) -> String {
    let functions = table.functions.iter().enumerate();
    let functions = functions.map(|(index, function)| {
        let (name, index) = (ident(&function.name), Literal::usize_unsuffixed(index));
        match served(table, function) {
            Ok(Served {
                parameters,
                call,
                returns,
            }) => {
                let call = quote!(unsafe { #call });
                let (kind, body) = match returns {
                    Some(kind) => (rust(kind), call),
                    None => (
                        quote!(nvmlReturn_t),
                        quote!(crate::runtime::answer(#index, || { #call })),
                    ),
                };
                let contract = format!(" The caller keeps the contract of `{name}`.");
                quote! {
                    /// NVML.
                    ///
                    /// # Safety
                    #[doc = #contract]
                    #[unsafe(no_mangle)]
                    pub unsafe extern "C" fn #name(#parameters) -> #kind {
                        #body
                    }
                }
            }
            Err(NotServed(way)) => quote! {
                /// Not served: see the table.
                #[unsafe(no_mangle)]
                pub extern "C" fn #name() -> nvmlReturn_t {
                    crate::runtime::#way(#index)
                }
            },
        }
    });
    file(quote!(#(#functions)*))
}

struct Served<'t> {
    parameters: TokenStream,
    call: TokenStream,
    returns: Option<&'t str>,
}

/// Function of `crate::runtime` that answers instead.
struct NotServed(Ident);

fn served<'t>(table: &'t Nvml, function: &'t Function) -> Result<Served<'t>, NotServed> {
    let (base, body) = table.body(function);
    match body {
        Body::Refused(_) => Err(NotServed(ident("refused"))),
        Body::Unsupported(_) | Body::Same(_) => Err(NotServed(ident("unsupported"))),
        Body::Answered {
            parameters,
            returns,
        } => {
            let base = ident(base);
            let names: Vec<Ident> = parameters.iter().map(|(name, _)| ident(name)).collect();
            let kinds = parameters.iter().map(|(_, kind)| rust(kind));
            Ok(Served {
                parameters: quote!(#(#names: #kinds),*),
                call: quote!(crate::calls::#base(#(#names),*)),
                returns: returns.as_deref(),
            })
        }
        Body::Fixed { shape, values } => {
            let (outputs, names) = (outputs(shape), output_names(shape));
            let values = numbers_list(values);
            Ok(Served {
                parameters: shape_parameters(shape),
                call: quote!(crate::host::fixed(device, #outputs, &[#(#names.cast()),*], #values)),
                returns: None,
            })
        }
        Body::Host {
            shape, otherwise, ..
        } => {
            let place = table.hosts().take_while(|(name, ..)| *name != base).count();
            let place = Literal::usize_unsuffixed(place);
            let (selectors, names) = (selector_names(shape), output_names(shape));
            let otherwise = match otherwise {
                Some(values) => {
                    let values = numbers_list(values);
                    quote!(Some(#values))
                }
                None => quote!(None),
            };
            Ok(Served {
                parameters: shape_parameters(shape),
                call: quote! {
                    crate::host::passed_on(
                        &HOST[#place],
                        device,
                        &[#(#selectors),*],
                        &[#(#names.cast()),*],
                        #otherwise
                    )
                },
                returns: None,
            })
        }
    }
}

fn numbers_list(values: &[u64]) -> TokenStream {
    let values = values.iter().copied().map(Literal::u64_unsuffixed);
    quote!(&[#(#values),*])
}

fn shape_parameters(shape: &Shape) -> TokenStream {
    let selectors = selector_names(shape);
    let outputs = output_names(shape);
    let kinds = shape.outputs.iter().map(|words| match words.as_slice() {
        [word] => ident(word.rust()),
        _ => ident("c_void"),
    });
    quote!(device: nvmlDevice_t #(, #selectors: u32)* #(, #outputs: *mut #kinds)*)
}

fn selector_names(shape: &Shape) -> Vec<Ident> {
    let places = 0..shape.selectors.len();
    places.map(|at| format_ident!("selector{at}")).collect()
}

fn output_names(shape: &Shape) -> Vec<Ident> {
    let places = 0..shape.outputs.len();
    places.map(|at| format_ident!("output{at}")).collect()
}

/// Generates the page that lists the served functions of NVML, in Markdown.
#[must_use]
pub fn nvml_coverage(table: &Nvml) -> String {
    let mut out = String::from(
        "# NVML: functions that are served\n\nGenerated from `shared-ring/api/nvml.idl`: `cargo run -p wormhole-idl --example nvml_coverage > docs/nvml-coverage.md`.\n\nA program sees its tenant's devices, memory and processes, and no other's.\n\n",
    );
    let count = |wanted: fn(&Body) -> bool| {
        table
            .functions
            .iter()
            .filter(|function| wanted(table.body(function).1))
            .count()
    };
    let _ = writeln!(
        out,
        "| functions | answered |\n|---|---|\n| {} | by the library, from what the backend says of the tenant's devices, memory and processes |\n| {} | with what the host's NVML says; `NVML_ERROR_NOT_SUPPORTED` on a device that has none |\n| {} | with `NVML_ERROR_NOT_SUPPORTED` |\n| {} | with `NVML_ERROR_NO_PERMISSION` |\n",
        count(|body| matches!(body, Body::Answered { .. } | Body::Fixed { .. })),
        count(|body| matches!(body, Body::Host { .. })),
        count(|body| matches!(body, Body::Unsupported(_))),
        count(|body| matches!(body, Body::Refused(_))),
    );
    let _ = writeln!(
        out,
        "{} functions are exported: every name of the native `libnvidia-ml.so.1` of driver 580.\n",
        table.functions.len()
    );
    let mut list = |title: &str, wanted: fn(&Body) -> bool| {
        let names: Vec<&str> = table
            .functions
            .iter()
            .filter(|function| wanted(table.body(function).1))
            .map(|function| function.name.as_str())
            .collect();
        let _ = writeln!(out, "## {title}\n\n{}.\n", names.join(", "));
    };
    list("Answered by the library", |body| {
        matches!(body, Body::Answered { .. } | Body::Fixed { .. })
    });
    list("Answered by the host's NVML, asked once", |body| {
        matches!(body, Body::Host { live: false, .. })
    });
    list("Answered by the host's NVML, asked at each call", |body| {
        matches!(body, Body::Host { live: true, .. })
    });
    let fields: Vec<String> = table
        .fields
        .iter()
        .map(|field| {
            let of = if field.scopes.is_some() {
                ", of each link"
            } else {
                ""
            };
            format!("{} ({}{of})", field.name, field.id)
        })
        .collect();
    let _ = writeln!(
        out,
        "`nvmlDeviceGetFieldValues` passes on these fields of the host's, the others are not supported: {}.\n",
        fields.join(", ")
    );
    for (title, refused) in [("Not supported", false), ("No permission", true)] {
        let _ = writeln!(out, "## {title}\n");
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for function in &table.functions {
            let reason = match &function.body {
                Body::Unsupported(reason) if !refused => reason,
                Body::Refused(reason) if refused => reason,
                _ => continue,
            };
            match reasons.iter_mut().find(|(known, _)| known == reason) {
                Some((_, names)) => names.push(&function.name),
                None => reasons.push((reason, vec![&function.name])),
            }
        }
        for (reason, names) in reasons {
            let _ = writeln!(out, "- {reason}: {}.", names.join(", "));
        }
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}
