//! `cargo xtask structure`: checks the dependency rules between crates, the layers of the guest's library, the number of
//! unsafe blocks, and that the driver API's constants are declared once. Prints the size of each crate.
//!
//! The command reads `cargo metadata` and the sources, and generates the code that build scripts generate. It builds nothing.

mod constants;
mod layers;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::command::{Failure, cargo};
use crate::stage::TARGET;

/// Crates with code for devices: fat binaries, PTX, the driver, and the worker, which links them all.
const DEVICE_CODE: &[&str] = &[
    "wormhole-cpu-device",
    "wormhole-cuda-device",
    "wormhole-fatbin",
    "wormhole-ptx",
    "wormhole-worker",
];

/// Other crates that link code for devices: tests and benchmarks of it. Privileged programs, the user's command and all
/// other crates contain no code that only workers need.
const WITH_DEVICE_CODE: &[&str] = &[
    "wormhole-backend-tests",
    "wormhole-benches",
    "wormhole-fuzz",
    "wormhole-ptx-conformance",
];

/// Crates that must not depend on other crates either, directly or indirectly. Build and development dependencies do not
/// count, because they are linked into no program.
const RULES: &[(&str, &[&str])] = &[
    (
        "wormhole-link",
        &["wormhole-sandbox", "wormhole-supervisor"],
    ),
    ("wormhole-monitor", &["wormhole-link", "wormhole-api"]),
    ("wormhole-fs", &["wormhole-monitor"]),
    ("wormhole-sandbox", &["wormhole-supervisor"]),
    // The worker runs the guest's work. It contains no code that starts processes or grants resources.
    (
        "wormhole-worker",
        &["wormhole-sandbox", "wormhole-supervisor"],
    ),
    // Devices do not depend on sessions or on each other.
    (
        "wormhole-cpu-device",
        &["wormhole-cuda-device", "wormhole-link"],
    ),
    (
        "wormhole-cuda-device",
        &["wormhole-cpu-device", "wormhole-ptx", "wormhole-link"],
    ),
    (
        "wormhole-ptx",
        &["wormhole-api", "wormhole-device", "wormhole-ring"],
    ),
    // Libraries that are loaded into the users' programs.
    ("wormhole-guest", &["wormhole-link", "clap", "tracing"]),
    ("wormhole-nvml", &["wormhole-link", "clap", "tracing"]),
];

/// Crate of the driver API's table.
const API: &str = "wormhole-api";

/// Lines above which a file is listed, because it is hard to review in one sitting.
const LONG: usize = 500;

/// Limit of unsafe blocks in the workspace, with generated code.
const UNSAFE_BLOCKS: usize = 972;

/// Folder of the tables that code is generated from.
const TABLES: &str = "shared-ring/api";

/// The used fields of the output of `cargo metadata`.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: BTreeSet<String>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    manifest_path: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Debug, Deserialize)]
struct DependencyKind {
    /// `None` for a normal dependency, which is linked into the program.
    kind: Option<String>,
}

/// Names of the crates that each crate links directly, by the crate's name.
type Links = BTreeMap<String, BTreeSet<String>>;

/// Prints sizes and rules, and returns whether all rules hold.
pub fn structure(root: &Path) -> Result<bool, Failure> {
    let (status, text) = cargo(root)
        .args(["metadata", "--format-version", "1", "--locked"])
        .args(["--filter-platform", TARGET])
        .output()?;
    if !status.success() {
        return Err(Failure::new("cargo metadata failed"));
    }
    let metadata: Metadata = serde_json::from_str(&text)
        .map_err(|error| Failure::new(format!("cargo metadata cannot be read: {error}")))?;
    let members: BTreeMap<&str, &Path> = metadata
        .packages
        .iter()
        .filter(|package| metadata.workspace_members.contains(&package.id))
        .filter_map(|package| Some((package.name.as_str(), package.manifest_path.parent()?)))
        .collect();
    println!(
        "{:26} {:>7} {:>7}  files over {LONG} lines",
        "crate", "lines", "unsafe"
    );
    let generated = generated(root)?;
    let mut total = Size::default();
    for (name, folder) in &members {
        let size = Size::of(folder)?;
        let long: Vec<String> = size
            .long
            .iter()
            .map(|(file, lines)| {
                let file = file.strip_prefix(folder).unwrap_or(file);
                format!("{} {lines}", file.display())
            })
            .collect();
        println!(
            "{name:26} {:>7} {:>7}  {}",
            size.lines,
            size.unsafe_blocks,
            long.join(", ")
        );
        total.lines += size.lines;
        total.unsafe_blocks += size.unsafe_blocks;
        total.long.extend(size.long);
    }
    for (name, text) in &generated {
        let (lines, unsafe_blocks) = (text.lines().count(), unsafe_blocks(text));
        println!("{:26} {lines:>7} {unsafe_blocks:>7}", format!("{name}/out"));
        total.unsafe_blocks += unsafe_blocks;
    }
    let files = total.long.len();
    println!(
        "{:26} {:>7} {:>7}  {files}",
        "all, lines not generated", total.lines, total.unsafe_blocks
    );
    let mut holds = within(total.unsafe_blocks);

    let links = metadata.links();
    for name in RULES.iter().map(|(name, _)| name).chain(WITH_DEVICE_CODE) {
        if !members.contains_key(name) {
            return Err(Failure::new(format!(
                "a rule is about {name}, which is no crate"
            )));
        }
    }
    let others = members
        .keys()
        .filter(|name| !DEVICE_CODE.contains(*name) && !WITH_DEVICE_CODE.contains(*name));
    for name in others {
        holds &= reaches_none(&links, name, DEVICE_CODE);
    }
    for (name, never) in RULES {
        holds &= reaches_none(&links, name, never);
    }
    let with_table = members
        .iter()
        .filter(|(name, _)| way(&links, name, API).is_some())
        .map(|(_, folder)| *folder);
    let with_table: Vec<&Path> = with_table.collect();
    holds &= constants::constants(root, &with_table)?;
    Ok(holds & layers::layers(root)?)
}

/// Returns the generated code that can have unsafe blocks, by its crate: each C export, and each call of the driver.
fn generated(root: &Path) -> Result<[(&'static str, String); 3], Failure> {
    fn unread(error: impl std::fmt::Display) -> Failure {
        Failure::new(format!("{TABLES} cannot be read: {error}"))
    }
    let folder = root.join(TABLES);
    let table = wormhole_idl::load(&folder).map_err(unread)?;
    let nvml = wormhole_idl::Nvml::load(&folder).map_err(unread)?;
    let calls = wormhole_idl::cuda_driver_calls(&table).map_err(unread)?;
    Ok([
        ("wormhole-guest", wormhole_idl::exports(&table)),
        ("wormhole-nvml", wormhole_idl::nvml_exports(&nvml)),
        ("wormhole-cuda-device", calls),
    ])
}

/// Returns true if the workspace has no more unsafe blocks than its limit, and complains otherwise.
fn within(unsafe_blocks: usize) -> bool {
    let holds = unsafe_blocks <= UNSAFE_BLOCKS;
    if !holds {
        println!(
            "BROKEN: the workspace has {unsafe_blocks} unsafe blocks, {UNSAFE_BLOCKS} are allowed"
        );
    }
    holds
}

impl Metadata {
    fn links(&self) -> Links {
        let names: BTreeMap<&str, &str> = self
            .packages
            .iter()
            .map(|package| (package.id.as_str(), package.name.as_str()))
            .collect();
        let name = |id: &str| names.get(id).map(|name| (*name).to_owned());
        let mut links = Links::new();
        for node in &self.resolve.nodes {
            let linked = node
                .deps
                .iter()
                .filter(|dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none()))
                .filter_map(|dependency| name(&dependency.pkg));
            if let Some(name) = name(&node.id) {
                // Several versions of one crate count as one.
                links.entry(name).or_default().extend(linked);
            }
        }
        links
    }
}

/// Returns true if a crate links none of the others, and complains otherwise.
fn reaches_none(links: &Links, name: &str, never: &[&str]) -> bool {
    let ways: Vec<String> = never
        .iter()
        .filter_map(|other| Some(way(links, name, other)?.join(" > ")))
        .collect();
    for way in &ways {
        println!("BROKEN: {name} links a forbidden crate: {way}");
    }
    if ways.is_empty() {
        println!("{name} reaches none of {}", never.join(", "));
    }
    ways.is_empty()
}

/// Returns a shortest chain of dependencies between two crates.
fn way(links: &Links, from: &str, to: &str) -> Option<Vec<String>> {
    let mut seen = BTreeSet::from([from.to_owned()]);
    let mut ways = vec![vec![from.to_owned()]];
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let last = way.last()?;
            if last == to {
                return Some(way);
            }
            for next in links.get(last).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    longer.push([way.as_slice(), std::slice::from_ref(next)].concat());
                }
            }
        }
        ways = longer;
    }
    None
}

/// Size of a crate's `src`.
#[derive(Debug, Default)]
struct Size {
    lines: usize,
    unsafe_blocks: usize,
    long: Vec<(PathBuf, usize)>,
}

impl Size {
    fn of(folder: &Path) -> Result<Self, Failure> {
        let mut size = Self::default();
        for (path, text) in sources(&folder.join("src"))? {
            let lines = text.lines().count();
            size.lines += lines;
            size.unsafe_blocks += unsafe_blocks(&text);
            if lines > LONG {
                size.long.push((path, lines));
            }
        }
        size.long
            .sort_by_key(|(_, lines)| std::cmp::Reverse(*lines));
        Ok(size)
    }
}

/// Returns the Rust sources below a folder, with their text.
fn sources(folder: &Path) -> Result<Vec<(PathBuf, String)>, Failure> {
    let unread = |path: &Path, error: &std::io::Error| {
        Failure::new(format!("cannot read {}: {error}", path.display()))
    };
    let mut found = Vec::new();
    let entries = fs::read_dir(folder).map_err(|error| unread(folder, &error))?;
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).map_err(|error| unread(&path, &error))?;
            found.push((path, text));
        }
    }
    Ok(found)
}

/// Counts the unsafe blocks of a source. Comments, functions and implementations do not count.
fn unsafe_blocks(text: &str) -> usize {
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .map(|line| line.matches("unsafe {").count())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(pairs: &[(&str, &str)]) -> Links {
        let mut links = Links::new();
        for (from, to) in pairs {
            let linked = links.entry((*from).to_owned()).or_default();
            linked.insert((*to).to_owned());
        }
        links
    }

    #[test]
    fn a_crate_reaches_what_its_dependencies_link() {
        let links = links(&[("a", "b"), ("b", "c"), ("c", "b"), ("a", "d")]);
        assert_eq!(way(&links, "a", "c").unwrap(), ["a", "b", "c"]);
        assert_eq!(way(&links, "d", "a"), None);
        assert_eq!(way(&links, "c", "d"), None);
    }

    #[test]
    fn only_what_is_linked_counts() {
        let text = r#"{
            "packages": [
                {"id": "1", "name": "a", "manifest_path": "/a/Cargo.toml"},
                {"id": "2", "name": "b", "manifest_path": "/b/Cargo.toml"},
                {"id": "3", "name": "c", "manifest_path": "/c/Cargo.toml"}
            ],
            "workspace_members": ["1"],
            "resolve": {"nodes": [
                {"id": "1", "deps": [
                    {"pkg": "2", "dep_kinds": [{"kind": "dev"}, {"kind": null}]},
                    {"pkg": "3", "dep_kinds": [{"kind": "build"}, {"kind": "dev"}]}
                ]}
            ]}
        }"#;
        let metadata: Metadata = serde_json::from_str(text).unwrap();
        assert_eq!(metadata.links(), links(&[("a", "b")]));
    }

    #[test]
    fn no_more_than_the_limit_is_allowed() {
        assert!(within(UNSAFE_BLOCKS) && !within(UNSAFE_BLOCKS + 1));
    }

    #[test]
    fn blocks_are_counted_and_words_about_them_are_not() {
        let text =
            "unsafe { one() }\n// unsafe { two() }\nunsafe fn three() {}\nlet x = unsafe {\n";
        assert_eq!(unsafe_blocks(text), 2);
    }
}
