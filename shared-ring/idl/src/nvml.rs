//! The table of NVML's functions, and what is generated from it.
//!
//! One declaration a line; `#` begins a comment.
//!
//! | line | what the guest's library does |
//! |---|---|
//! | `answered NAME(PARAMETER: TYPE, …) [-> TYPE]` | answers by itself: `crate::calls::NAME` |
//! | `same NAME OTHER` | what it does for `OTHER`, which comes before |
//! | `fixed NAME(OUTPUTS) = VALUES` | answers with these numbers for any device |
//! | `host NAME(SELECTORS, OUTPUTS) [else VALUES]` | passes on what the host's NVML said once; without one, the values or `NVML_ERROR_NOT_SUPPORTED` |
//! | `live NAME(SELECTORS, OUTPUTS)` | the same, asked anew each time |
//! | `field ID NAME`, `live-field ID NAME` | the same for a field of `nvmlDeviceGetFieldValues`; `NAME(SCOPES)` if it is told of each link |
//! | `because REASON` | the reason for the refusals that follow |
//! | `unsupported NAME`, `refused NAME` | `NVML_ERROR_NOT_SUPPORTED`, `NVML_ERROR_NO_PERMISSION` |
//!
//! The first parameter of `fixed`, `host` and `live` functions is the device. A selector is the number of its values,
//! which begin with 0; an output is `u32`, `u64`, or a structure of such (`u32+u32`).

use std::fmt::Write as _;
use std::path::Path;

/// An integer that a function fills.
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

/// What a function of a device takes and fills.
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

/// What the library does.
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

/// A function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    pub name: String,
    pub body: Body,
}

/// A field of `nvmlDeviceGetFieldValues`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub id: u32,
    pub name: String,
    pub live: bool,
    /// How many scopes it has, beginning with 0; none if it is the device's and scopes mean nothing to it.
    pub scopes: Option<u32>,
}

/// The table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nvml {
    pub functions: Vec<Function>,
    pub fields: Vec<Field>,
}

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    #[error("the table of NVML cannot be read")]
    Read(#[from] std::io::Error),
    #[error("line {line} of the table of NVML: {what}")]
    Line { line: usize, what: String },
}

impl Nvml {
    /// Reads `nvml.idl` in `folder`.
    ///
    /// # Errors
    /// The file cannot be read or is no table.
    pub fn load(folder: &Path) -> Result<Self, NvmlError> {
        Self::parse(&std::fs::read_to_string(folder.join("nvml.idl"))?)
    }

    /// Reads a table.
    ///
    /// # Errors
    /// It is none: see the module.
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

    /// The function of this name.
    #[must_use]
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|function| function.name == name)
    }

    /// What it does, by way of the function that it is the same as.
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
        Some((call, returns)) => (call, Some(returns.to_owned())),
        None => (text, None),
    };
    let (name, inside) = parts(call)?;
    let parameters = inside
        .into_iter()
        .map(|parameter| {
            let (name, kind) = parameter
                .split_once(": ")
                .ok_or_else(|| format!("{parameter} has no type"))?;
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

/// A name, and what is between its brackets.
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

/// The tables for `wormhole_api::nvml`.
#[must_use]
pub fn nvml_tables(table: &Nvml) -> String {
    let mut out = String::from(
        "/// Every exported function, in the table's order.\npub static FUNCTIONS: &[FunctionInfo] = &[\n",
    );
    for function in &table.functions {
        let class = match table.body(function).1 {
            Body::Answered { .. } | Body::Fixed { .. } | Body::Same(_) => {
                "Class::Answered".to_owned()
            }
            Body::Host { .. } => "Class::Host".to_owned(),
            Body::Unsupported(reason) => format!("Class::Unsupported({reason:?})"),
            Body::Refused(reason) => format!("Class::Refused({reason:?})"),
        };
        let _ = writeln!(
            out,
            "    FunctionInfo {{ name: {:?}, class: {class} }},",
            function.name
        );
    }
    out.push_str(
        "];\n\n/// What the host's NVML is asked.\npub static HOST: &[HostFunction] = &[\n",
    );
    for (name, shape, live) in table.hosts() {
        let _ = writeln!(
            out,
            "    HostFunction {{ name: {name:?}, live: {live}, selectors: &{:?}, outputs: {} }},",
            shape.selectors,
            outputs(shape)
        );
    }
    out.push_str("];\n\n/// The fields that it is asked for.\npub static FIELDS: &[Field] = &[\n");
    for Field {
        id,
        name,
        live,
        scopes,
    } in &table.fields
    {
        let _ = writeln!(
            out,
            "    Field {{ id: {id}, name: {name:?}, live: {live}, scopes: {scopes:?} }},"
        );
    }
    out.push_str("];\n");
    out
}

fn outputs(shape: &Shape) -> String {
    let outputs: Vec<String> = shape
        .outputs
        .iter()
        .map(|words| {
            let words: Vec<String> = words.iter().map(|word| format!("Word::{word:?}")).collect();
            format!("&[{}]", words.join(", "))
        })
        .collect();
    format!("&[{}]", outputs.join(", "))
}

/// The C exports of the guest's library.
///
/// The code calls, in the crate that includes it:
/// - `crate::calls::NAME(arguments)`, unsafe, for answered functions;
/// - `crate::host::passed_on` and `crate::host::fixed` for the others that are served;
/// - `crate::runtime::answer(usize, impl FnOnce() -> Result)`, around each of them, with the function's index in
///   `FUNCTIONS`;
/// - `crate::runtime::unsupported(usize)` and `crate::runtime::refused(usize)`.
#[must_use]
pub fn nvml_exports(table: &Nvml) -> String {
    let mut out = String::new();
    for (index, function) in table.functions.iter().enumerate() {
        let name = &function.name;
        let (base, body) = table.body(function);
        let head = "// SAFETY: the name belongs to NVML, and this library is its only definition.\n#[unsafe(no_mangle)]";
        let (parameters, call, returns) = match body {
            Body::Unsupported(_) | Body::Refused(_) | Body::Same(_) => {
                let way = match body {
                    Body::Refused(_) => "refused",
                    _ => "unsupported",
                };
                let _ = writeln!(
                    out,
                    "/// Not served: see the table.\n{head}\npub extern \"C\" fn {name}() -> nvmlReturn_t {{\n    crate::runtime::{way}({index})\n}}\n"
                );
                continue;
            }
            Body::Answered {
                parameters,
                returns,
            } => {
                let names: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).collect();
                let call = format!("crate::calls::{base}({})", names.join(", "));
                (parameters.clone(), call, returns.as_deref())
            }
            Body::Fixed { shape, values } => {
                let call = format!(
                    "crate::host::fixed(device, {}, &[{}], &{values:?})",
                    outputs(shape),
                    output_names(shape)
                );
                (shape_parameters(shape), call, None)
            }
            Body::Host {
                shape, otherwise, ..
            } => {
                let place = table.hosts().take_while(|(name, ..)| *name != base).count();
                let selectors: Vec<String> = (0..shape.selectors.len())
                    .map(|at| format!("selector{at}"))
                    .collect();
                let otherwise = otherwise
                    .as_ref()
                    .map_or("None".to_owned(), |values| format!("Some(&{values:?})"));
                let call = format!(
                    "crate::host::passed_on(&HOST[{place}], device, &[{}], &[{}], {otherwise})",
                    selectors.join(", "),
                    output_names(shape)
                );
                (shape_parameters(shape), call, None)
            }
        };
        let parameters: Vec<String> = parameters
            .iter()
            .map(|(name, kind)| format!("{name}: {kind}"))
            .collect();
        let call = format!(
            "// SAFETY: the caller keeps the contract of the C function.\n        unsafe {{ {call} }}"
        );
        let (kind, body) = match returns {
            Some(kind) => (kind, call),
            None => (
                "nvmlReturn_t",
                format!("crate::runtime::answer({index}, || {{\n        {call}\n    }})"),
            ),
        };
        let _ = writeln!(
            out,
            "/// NVML.\n///\n/// # Safety\n/// The caller keeps the contract of `{name}`.\n{head}\npub unsafe extern \"C\" fn {name}({}) -> {kind} {{\n    {body}\n}}\n",
            parameters.join(", ")
        );
    }
    out
}

fn shape_parameters(shape: &Shape) -> Vec<(String, String)> {
    let device = ("device".to_owned(), "nvmlDevice_t".to_owned());
    let selectors =
        (0..shape.selectors.len()).map(|at| (format!("selector{at}"), "u32".to_owned()));
    let outputs = shape.outputs.iter().enumerate().map(|(at, words)| {
        let kind = match words.as_slice() {
            [word] => word.rust(),
            _ => "c_void",
        };
        (format!("output{at}"), format!("*mut {kind}"))
    });
    std::iter::once(device)
        .chain(selectors)
        .chain(outputs)
        .collect()
}

fn output_names(shape: &Shape) -> String {
    let names: Vec<String> = (0..shape.outputs.len())
        .map(|at| format!("output{at}.cast()"))
        .collect();
    names.join(", ")
}

/// The page that says what of NVML is served, in Markdown.
#[must_use]
pub fn nvml_coverage(table: &Nvml) -> String {
    let mut out = String::from(
        "# NVML: what is served\n\nGenerated from `shared-ring/api/nvml.idl`: `cargo run -p wormhole-idl --example nvml_coverage > docs/nvml-coverage.md`.\n\nA program sees its tenant's devices, memory and processes, and no other's.\n\n",
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
    list("What the host's NVML says, once", |body| {
        matches!(body, Body::Host { live: false, .. })
    });
    list("What it says at the moment of the question", |body| {
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
