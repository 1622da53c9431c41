//! Checks the layers of the guest's library and its unsafe blocks, as a part of `cargo xtask structure`.

use std::collections::BTreeSet;
use std::path::Path;

use super::{sources, unsafe_blocks};
use crate::command::Failure;

/// Modules of each layer, from the top. A module may use its own layer and those below it.
const LAYERS: &[(&str, &[&str])] = &[
    (
        "exports",
        &["calls", "export_tables", "exports", "logs", "runtime"],
    ),
    ("graph", &["graph"]),
    ("work", &["work"]),
    ("objects, memory", &["memory", "object"]),
    ("session", &["device", "session"]),
    (
        "ground",
        &[
            "bulk",
            "counts",
            "error",
            "faults",
            "handle",
            "log",
            "mutants",
            "pages",
            "parameter",
            "readable",
            "signals",
            "thread",
            "types",
        ],
    ),
];

/// Limit of unsafe blocks in a layer. Exports get their parameters as types that can be used safely.
const LIMITS: &[(&str, usize)] = &[("exports", 60)];

/// Stored functions by which a layer calls one above it, which sets them: the file, and the name of the variable or field.
const HOOKS: &[(&str, &str)] = &[
    // Managed memory follows the work that any layer sends.
    ("session/gate.rs", "open"),
    ("session/gate.rs", "refresh"),
];

/// Words that justify no unsafe block of these layers: their callers are programs, which promise only what the C
/// function documents.
const EMPTY_WORDS: &str = "as the caller promises";

/// Folder of the sources.
const FOLDER: &str = "guest-lib/src";

/// Prints the layers. Returns whether no module uses a layer above its own, and unsafe blocks are within their limits.
pub fn layers(root: &Path) -> Result<bool, Failure> {
    let folder = root.join(FOLDER);
    let mut complaints = Vec::new();
    let mut counts = vec![Count::default(); LAYERS.len()];
    for (path, text) in sources(&folder)? {
        let file = path.strip_prefix(&folder).unwrap_or(&path);
        let file = file.to_string_lossy().into_owned();
        let Some(module) = module_of(&file) else {
            continue;
        };
        if let Some(own) = layer(module) {
            counts[own].add(&text);
        }
        complaints.extend(wrong(&file, module, &text));
    }
    println!(
        "{:26} {:>7} {:>7} {:>7}",
        "layer of the guest", "files", "lines", "unsafe"
    );
    for ((name, _), count) in LAYERS.iter().zip(&counts) {
        println!(
            "{name:26} {:>7} {:>7} {:>7}",
            count.files, count.lines, count.unsafe_blocks
        );
        complaints.extend(over_limit(name, count.unsafe_blocks));
    }
    for complaint in &complaints {
        println!("BROKEN: {complaint}");
    }
    Ok(complaints.is_empty())
}

/// Size of a layer.
#[derive(Clone, Debug, Default)]
struct Count {
    files: usize,
    lines: usize,
    unsafe_blocks: usize,
}

impl Count {
    fn add(&mut self, text: &str) {
        self.files += 1;
        self.lines += text.lines().count();
        self.unsafe_blocks += unsafe_blocks(text);
    }
}

/// Complains of a layer with more unsafe blocks than its limit.
fn over_limit(layer: &str, unsafe_blocks: usize) -> Option<String> {
    let (_, limit) = LIMITS.iter().find(|(limited, _)| *limited == layer)?;
    (unsafe_blocks > *limit)
        .then(|| format!("{layer} has {unsafe_blocks} unsafe blocks, {limit} are allowed"))
}

/// Returns true for a module of a layer with a limit.
fn is_limited(module: &str) -> bool {
    let name = layer(module).and_then(|own| LAYERS.get(own));
    name.is_some_and(|(name, _)| LIMITS.iter().any(|(limited, _)| limited == name))
}

/// Returns the module of the crate that a file is in; none for the crate's root, which names them all.
fn module_of(file: &str) -> Option<&str> {
    file.split(['/', '.']).next().filter(|name| *name != "lib")
}

/// Complains of a module's file: of each layer above its own that it uses, of each name without a layer, of relative
/// paths that may leave its layer, and of [`EMPTY_WORDS`].
fn wrong(file: &str, module: &str, text: &str) -> Vec<String> {
    let Some(own) = layer(module) else {
        return vec![format!("{file} belongs to no layer")];
    };
    let code = code(text);
    let used = uses(&code).into_iter();
    let complaint = |used: String| match layer(&used) {
        None => Some(format!("{file} uses {used}, which belongs to no layer")),
        Some(other) if other < own => Some(format!("{file} uses {used}, which is a layer above")),
        Some(_) => None,
    };
    let mut complaints: Vec<String> = used.filter_map(complaint).collect();
    let relative = relative(file, &code).into_iter();
    complaints.extend(relative.map(|path| format!("{file} uses {path} in place of crate::")));
    let hooks = hooks(&code).into_iter();
    let unknown = hooks.filter(|name| !HOOKS.contains(&(file, name)));
    complaints.extend(unknown.map(|name| {
        format!("{file} stores a function in {name}, by which it may call a layer above")
    }));
    if is_limited(module) && text.to_lowercase().contains(EMPTY_WORDS) {
        complaints.push(format!("{file} says \"{EMPTY_WORDS}\" of an unsafe block"));
    }
    complaints
}

/// Returns the number of a module's layer, from the top.
fn layer(module: &str) -> Option<usize> {
    LAYERS
        .iter()
        .position(|(_, modules)| modules.contains(&module))
}

/// Returns a source without its comments and its modules of tests, which stand at its end.
fn code(text: &str) -> String {
    let tests = ["#[cfg(test)]\nmod ", "#[cfg(test)]\npub mod "];
    let ends = tests.iter().filter_map(|tests| text.find(tests));
    let lines = text[..ends.min().unwrap_or(text.len())].lines();
    let lines: Vec<&str> = lines
        .map(|line| line.split("//").next().unwrap_or(line))
        .collect();
    lines.join("\n")
}

/// Returns the path by which a file names modules relative to its own and may leave its layer, if there is one.
/// [`uses`] does not read such paths.
fn relative(file: &str, code: &str) -> Option<&'static str> {
    let depth = file.trim_end_matches("/mod.rs").matches('/').count();
    let path = if depth == 0 {
        "super::"
    } else {
        "super::super::"
    };
    code.contains(path).then_some(path)
}

/// Returns the names of variables and fields that store functions or closures.
fn hooks(code: &str) -> Vec<&str> {
    let hook = |line| {
        let (declared, kind) = str::split_once(line, ": ")?;
        let is_static = declared.contains("static ");
        let name = declared.rsplit(' ').next()?;
        // A parameter is used and forgotten.
        let is_parameter = declared.contains(['(', '|']);
        let is_stored_closure = kind.contains("dyn Fn") && !kind.starts_with("&dyn");
        let stores = kind.starts_with("fn(") || is_static && kind.contains("<fn(");
        (!is_parameter && (stores || is_stored_closure)).then_some(name)
    };
    code.lines().map(str::trim).filter_map(hook).collect()
}

/// Returns the modules of the crate that code names from the crate's root.
fn uses(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            Some(group) => found.extend(heads(group)),
            None => found.extend(head(rest)),
        }
    }
    found
}

/// Returns the identifier at the beginning of a text.
fn head(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    let name = &text[..end.unwrap_or(text.len())];
    (!name.is_empty()).then(|| name.to_owned())
}

/// Returns the first identifier of each path of a group, up to its closing brace.
fn heads(group: &str) -> Vec<String> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                found.extend(head(group[start..at].trim_start()));
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_found_in_paths_and_groups() {
        let text = "use crate::work::{copy, peer::{self, meet}};\n\
                    use crate::{graph, object::{array, stream}, types::{\n    CUarray,\n}};\n\
                    // crate::calls is not used\n\
                    fn f() { crate::session::session(); }\n\
                    #[cfg(test)]\nmod tests { use crate::exports; }\n";
        let found: Vec<String> = uses(&code(text)).into_iter().collect();
        assert_eq!(found, ["graph", "object", "session", "types", "work"]);
    }

    #[test]
    fn an_upward_use_is_complained_of_and_so_is_a_module_without_a_layer() {
        let text = "use crate::{calls, graph, memory, session, no_such};";
        assert_eq!(
            wrong("work/a.rs", "work", text),
            [
                "work/a.rs uses calls, which is a layer above",
                "work/a.rs uses graph, which is a layer above",
                "work/a.rs uses no_such, which belongs to no layer",
            ]
        );
        assert_eq!(
            wrong("calls/a.rs", "calls", "use crate::{logs, graph};"),
            [""; 0]
        );
        assert_eq!(wrong("new.rs", "new", ""), ["new.rs belongs to no layer"]);
        assert_eq!(module_of("work/a.rs"), Some("work"));
        assert_eq!(module_of("lib.rs"), None);
    }

    #[test]
    fn a_relative_path_that_may_leave_its_layer_is_refused() {
        for (file, path) in [
            ("work/a.rs", "super::super::"),
            ("work/mod.rs", "super::"),
            ("work.rs", "super::"),
        ] {
            let text = format!("use {path}calls;\n");
            let complaint = format!("{file} uses {path} in place of crate::");
            assert_eq!(wrong(file, "work", &text), [complaint]);
        }
        for (file, text) in [
            ("work/a.rs", "use super::b;\n"),
            ("work/a/mod.rs", "use super::b;\n"),
            ("work.rs", "#[cfg(test)]\nmod tests { use super::*; }\n"),
        ] {
            assert_eq!(wrong(file, "work", text), [""; 0], "{file}");
        }
    }

    #[test]
    fn a_stored_function_is_a_hook_that_must_be_named() {
        let text = "static LEAVE: OnceLock<fn(u8)> = OnceLock::new();\n\
                    struct A {\n    pub open: fn(),\n    kind: PhantomData<fn() -> K>,\n    \
                    pub close: Box<dyn Fn() + Send>,\n    end: Option<Arc<dyn FnOnce(u8)>>,\n}\n\
                    fn each(\n    visit: &dyn Fn(u8),\n) {}\n\
                    let any = |is: fn(u8) -> bool| true;\n";
        assert_eq!(hooks(text), ["LEAVE", "open", "close", "end"]);
        let complaint = "stores a function in LEAVE, by which it may call a layer above";
        let found = wrong("session/a.rs", "session", text);
        assert_eq!(found[0], format!("session/a.rs {complaint}"));
        let known = "pub struct Keeper {\n    pub open: fn(),\n}\n";
        assert_eq!(wrong("session/gate.rs", "session", known), [""; 0]);
    }

    #[test]
    fn an_export_says_what_its_caller_promises() {
        let text = "// SAFETY: As the caller promises.\n";
        let complaint = ["calls/a.rs says \"as the caller promises\" of an unsafe block"];
        assert_eq!(wrong("calls/a.rs", "calls", text), complaint);
        assert_eq!(wrong("session/a.rs", "session", text), [""; 0]);
    }

    #[test]
    fn a_layer_has_no_more_unsafe_blocks_than_its_limit() {
        let complaint = over_limit("exports", 61);
        let wanted = "exports has 61 unsafe blocks, 60 are allowed";
        assert_eq!(complaint.as_deref(), Some(wanted));
        assert_eq!(over_limit("exports", 60), None);
        assert_eq!(over_limit("session", 61), None);
    }

    #[test]
    fn layers_are_numbered_from_the_top() {
        assert!(layer("calls") < layer("graph") && layer("work") < layer("memory"));
        assert_eq!(layer("no_such_module"), None);
    }
}
