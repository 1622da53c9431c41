//! The C exports of the guest's driver library.

use std::fmt::Write as _;

use crate::table::{Direction, Forwarded, Function, FunctionBody, Parameter, Table};

/// The module of exports for the guest's library: one C function per name of the table, and their addresses.
///
/// The code calls, in the crate that includes it:
/// - `crate::calls::NAME(parameters) -> Result`, for every function that is neither unsupported nor a plain
///   return code, with parameters of the types in `crate::parameter`; a function that depends on the
///   default stream gets a `DefaultStream` first; `crate::calls::code(Result) -> CUresult`;
/// - `crate::runtime::enter(usize)` at each call, with the function's index in `FUNCTIONS`;
/// - `crate::runtime::tracing() -> bool`, and when it is true
///   `crate::runtime::trace(usize, core::fmt::Arguments, CUresult)` after the call;
/// - `crate::runtime::unsupported(usize) -> CUresult`;
/// - for a plain return code `crate::runtime::clear(*mut T)`, unsafe, for every result, and then
///   `crate::runtime::refuse(usize, CUresult) -> CUresult`;
/// - with the feature `mutants`, `crate::mutants::returns_at_once(usize) -> bool`.
#[must_use]
pub fn exports(table: &Table) -> String {
    let mut out = String::new();
    for (index, function) in table.functions.iter().enumerate() {
        export(&mut out, table, index, function);
    }
    addresses(&mut out, table);
    for data in &table.data {
        let (kind, value) = match data.bytes {
            4 => (
                "core::sync::atomic::AtomicU32".to_owned(),
                "core::sync::atomic::AtomicU32::new(0)",
            ),
            8 => (
                "core::sync::atomic::AtomicU64".to_owned(),
                "core::sync::atomic::AtomicU64::new(0)",
            ),
            bytes => (
                format!("[core::sync::atomic::AtomicU8; {bytes}]"),
                "[const { core::sync::atomic::AtomicU8::new(0) }; _]",
            ),
        };
        let value = value.replace("; _]", &format!("; {}]", data.bytes));
        let _ = writeln!(
            out,
            "/// Looked up by debuggers; always zero.\n// SAFETY: the name belongs to the CUDA driver API, and this library is its only definition.\n#[unsafe(no_mangle)]\npub static {}: {kind} = {value};",
            data.name
        );
    }
    out
}

fn export(out: &mut String, table: &Table, index: usize, function: &Function) {
    let name = &function.name;
    let head = "// SAFETY: the name belongs to the CUDA driver API, and this library is its only definition.\n#[unsafe(no_mangle)]";
    let Some((base, forwarded)) = table.forwarded(function) else {
        let _ = writeln!(
            out,
            "/// Not supported: see the table.\n{head}\npub extern \"C\" fn {name}() -> CUresult {{\n    crate::runtime::unsupported({index})\n}}\n"
        );
        return;
    };
    let parameters: Vec<String> = forwarded
        .parameters
        .iter()
        .map(|parameter| format!("{}: {}", parameter.name, rust_type(parameter)))
        .collect();
    if let Some(code) = forwarded.returns {
        let results = forwarded.parameters.iter();
        let cleared: String = results
            .map(|result| format!("        crate::runtime::clear({});\n", result.name))
            .collect();
        let cleared = match cleared.is_empty() {
            true => cleared,
            false => format!(
                "    // SAFETY: each result has a place, or none.\n    unsafe {{\n{cleared}    }}\n"
            ),
        };
        let _ = writeln!(
            out,
            "/// CUDA driver API: always this code, and no results.\n///\n/// # Safety\n/// Results have a place, or none.\n{head}\npub unsafe extern \"C\" fn {name}({}) -> CUresult {{\n{}{cleared}    crate::runtime::refuse({index}, {code})\n}}\n",
            parameters.join(", "),
            mutant(index)
        );
        return;
    }
    let _ = writeln!(
        out,
        "/// CUDA driver API.\n///\n/// # Safety\n/// The caller keeps the contract of `{name}`.\n{head}\npub unsafe extern \"C\" fn {name}({}) -> CUresult {{\n{}    crate::runtime::enter({index});",
        parameters.join(", "),
        mutant(index)
    );
    let per_thread = matches!(function.body, FunctionBody::PerThread(_));
    let made: Vec<(&str, String)> = forwarded
        .parameters
        .iter()
        .filter_map(|parameter| Some((parameter.name.as_str(), typed(forwarded, parameter)?)))
        .collect();
    let typed = match made.is_empty() {
        true => String::new(),
        false => {
            let (names, made): (Vec<_>, Vec<_>) = made.into_iter().unzip();
            format!(
                "        // SAFETY: the caller keeps the contract of the C function, and the table says how long each place is.\n        let ({},) = unsafe {{ ({},) }};\n",
                names.join(", "),
                made.join(", ")
            )
        }
    };
    let _ = writeln!(
        out,
        "    let result = {{\n{typed}        crate::calls::code(crate::calls::{}({}))\n    }};\n    if crate::runtime::tracing() {{\n        crate::runtime::trace({index}, {}, result);\n    }}\n    result\n}}\n",
        base.name,
        arguments(forwarded, per_thread),
        trace(forwarded)
    );
}

/// The lines by which a function can be made to do nothing, to see which test notices.
fn mutant(index: usize) -> String {
    format!(
        "    #[cfg(feature = \"mutants\")]\n    if crate::mutants::returns_at_once({index}) {{\n        return 0;\n    }}\n"
    )
}

fn arguments(forwarded: &Forwarded, per_thread: bool) -> String {
    let default = forwarded.stream.then_some(if per_thread {
        "DefaultStream::PerThread"
    } else {
        "DefaultStream::Legacy"
    });
    let names = forwarded
        .parameters
        .iter()
        .map(|parameter| parameter.name.as_str());
    default
        .into_iter()
        .chain(names)
        .collect::<Vec<_>>()
        .join(", ")
}

/// What makes a type of `crate::parameter` out of what C passes; nothing for a number, a handle or a function.
fn typed(forwarded: &Forwarded, parameter: &Parameter) -> Option<String> {
    let Parameter {
        name,
        direction,
        kind,
        length,
    } = parameter;
    let in_bytes = match kind.as_str() {
        "void" | "char" => ".cast::<u8>()",
        _ => "",
    };
    Some(match (direction, length.as_deref()) {
        (Direction::In, None) if kind == "string" => format!("Text::new({name})"),
        (Direction::In, None) if kind == "CUdeviceptr" && forwarded.unified => {
            format!("UnifiedPtr::new({name})")
        }
        (Direction::In, None) => return None,
        (Direction::In, Some("")) => format!("Pointer::new({name}.cast_mut())"),
        (_, Some("")) => format!("Pointer::new({name})"),
        (_, None) if kind == "void" => format!("Pointer::new({name})"),
        (_, None | Some("1")) => format!("{direction:?}::new({name})"),
        (_, Some(length)) if length.parse::<usize>().is_ok() => {
            let element = match in_bytes {
                "" => pointed(kind),
                _ => "u8".to_owned(),
            };
            format!("{direction:?}::new({name}.cast::<[{element}; {length}]>())")
        }
        (_, Some(length)) => {
            let mut others = forwarded.parameters.iter();
            let count = others.find(|other| other.name == length)?;
            // The list of where results go is read itself.
            let direction = match kind.as_str() {
                "void*" if *direction == Direction::Out => Direction::In,
                _ => *direction,
            };
            match count.direction {
                Direction::In => {
                    format!("{direction:?}::list({name}{in_bytes}, {length}.length())")
                }
                _ => format!("Room::new({name}{in_bytes}, InOut::new({length}))"),
            }
        }
    })
}

fn trace(forwarded: &Forwarded) -> String {
    let shown: Vec<String> = forwarded
        .parameters
        .iter()
        .map(|p| format!("{0}: {{{0}:x?}}", p.name))
        .collect();
    format!("format_args!(\"{}\")", shown.join(", "))
}

/// The type behind a pointer.
fn pointed(kind: &str) -> String {
    match kind {
        "void" => "c_void".to_owned(),
        "void*" => "*mut c_void".to_owned(),
        "char" => "c_char".to_owned(),
        "string" => "*const c_char".to_owned(),
        other => match other.strip_suffix('*') {
            Some(kind) => format!("*const {kind}"),
            None => other.to_owned(),
        },
    }
}

/// The type in C.
pub(crate) fn rust_type(parameter: &Parameter) -> String {
    let pointed = pointed(&parameter.kind);
    match (parameter.direction, &parameter.length) {
        (Direction::In, None) => pointed,
        (Direction::In, Some(_)) => format!("*const {pointed}"),
        (Direction::Out | Direction::InOut, _) => format!("*mut {pointed}"),
    }
}

fn addresses(out: &mut String, table: &Table) {
    out.push_str(
        "/// The address of each function, by its index in `FUNCTIONS`.\npub static ADDRESSES: &[fn() -> *const c_void] = &[\n",
    );
    for function in &table.functions {
        let _ = writeln!(out, "    || {} as *const c_void,", function.name);
    }
    out.push_str("];\n\n");
}
