//! Checks the layers of the guest's library, as a part of `cargo xtask structure`.

use std::collections::BTreeSet;
use std::path::Path;

use super::sources;
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
            "counts",
            "error",
            "handle",
            "log",
            "mutants",
            "pages",
            "parameter",
            "readable",
            "types",
        ],
    ),
];

/// Known upward uses: a file, and the module that it uses. Each kind of work checks whether its stream is captured, and
/// then calls the graph's capture. A stream that waits calls its context's events and the output of kernels. No use may
/// be added, and a removed use must leave the list.
const UPWARD: &[(&str, &str)] = &[];

/// Folder of the sources.
const FOLDER: &str = "guest-lib/src";

/// Prints the layers and returns whether no module uses a layer above its own, except for [`UPWARD`].
pub fn layers(root: &Path) -> Result<bool, Failure> {
    let folder = root.join(FOLDER);
    let mut complaints = Vec::new();
    let mut upward = BTreeSet::new();
    let mut counts = vec![(0, 0); LAYERS.len()];
    for (path, text) in sources(&folder)? {
        let file = path.strip_prefix(&folder).unwrap_or(&path);
        let file = file.to_string_lossy().into_owned();
        let module = file.split(['/', '.']).next().unwrap_or_default();
        if module == "lib" {
            continue;
        }
        let Some(own) = layer(module) else {
            complaints.push(format!("{file} belongs to no layer"));
            continue;
        };
        counts[own].0 += 1;
        counts[own].1 += text.lines().count();
        for used in uses(&text) {
            match layer(&used) {
                None => complaints.push(format!("{file} uses {used}, which belongs to no layer")),
                Some(other) if other < own => {
                    upward.insert((file.clone(), used));
                }
                Some(_) => {}
            }
        }
    }
    println!(
        "{:26} {:>7} {:>7}  uses that are left",
        "layer of the guest", "files", "lines"
    );
    for ((name, modules), (files, lines)) in LAYERS.iter().zip(counts) {
        let own = |file: &str| modules.contains(&file.split(['/', '.']).next().unwrap_or_default());
        let left = UPWARD.iter().filter(|(file, _)| own(file)).count();
        println!("{name:26} {files:>7} {lines:>7}  {left}");
    }
    complaints.extend(compare(&upward, UPWARD));
    for complaint in &complaints {
        println!("BROKEN: {complaint}");
    }
    Ok(complaints.is_empty())
}

/// Compares the found upward uses with the known ones and returns a complaint for each difference.
fn compare(found: &BTreeSet<(String, String)>, known: &[(&str, &str)]) -> Vec<String> {
    let is_known = |(file, used): &&(String, String)| !known.contains(&(file, used));
    let added = found
        .iter()
        .filter(is_known)
        .map(|(file, used)| format!("{file} uses {used}, which is a layer above"));
    let gone = known
        .iter()
        .filter(|(file, used)| !found.contains(&((*file).to_owned(), (*used).to_owned())))
        .map(|(file, used)| format!("{file} uses {used} no longer: take it off the list"));
    added.chain(gone).collect()
}

/// Returns the number of a module's layer, from the top.
fn layer(module: &str) -> Option<usize> {
    LAYERS
        .iter()
        .position(|(_, modules)| modules.contains(&module))
}

/// Returns the modules of the crate that a source names outside comments and tests.
fn uses(text: &str) -> BTreeSet<String> {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let code: Vec<&str> = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or(line))
        .collect();
    let code = code.join("\n");
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
        let found: Vec<String> = uses(text).into_iter().collect();
        assert_eq!(found, ["graph", "object", "session", "types", "work"]);
    }

    #[test]
    fn an_upward_use_is_complained_of_and_so_is_one_that_has_gone() {
        let use_of = |file: &str, module: &str| (file.to_owned(), module.to_owned());
        let found = BTreeSet::from([use_of("work/a.rs", "graph"), use_of("work/b.rs", "calls")]);
        let known = [("work/a.rs", "graph"), ("work/c.rs", "graph")];
        let complaints = compare(&found, &known);
        assert_eq!(
            complaints,
            [
                "work/b.rs uses calls, which is a layer above",
                "work/c.rs uses graph no longer: take it off the list"
            ]
        );
        assert_eq!(compare(&BTreeSet::new(), &[]), Vec::<String>::new());
    }

    #[test]
    fn layers_are_numbered_from_the_top() {
        assert!(layer("calls") < layer("graph") && layer("work") < layer("memory"));
        assert_eq!(layer("no_such_module"), None);
    }
}
