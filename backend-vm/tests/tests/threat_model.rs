//! docs/threat-model.md names tests that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Adds the names of all tests in the Rust files of a folder and of those below it.
fn add_tests(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let is_hidden = name.as_encoded_bytes().starts_with(b".");
        if path.is_dir() && !is_hidden && name != "target" {
            add_tests(&path, names);
        } else if path.extension().is_some_and(|end| end == "rs") {
            names.extend(tests(&fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Returns the functions with the attribute of a test, and those that an executable which is its own harness names in
/// its list of tests.
fn tests(text: &str) -> Vec<String> {
    let (mut found, mut is_test) = (Vec::new(), false);
    for line in text.lines().map(str::trim) {
        let function = line
            .strip_prefix("fn ")
            .and_then(|rest| rest.split_once('('));
        if let Some((name, _)) = function
            && (is_test || is_listed(text, name))
        {
            found.push(name.to_owned());
        }
        is_test = line == "#[test]" || (is_test && line.starts_with("#["));
    }
    found
}

/// Returns whether a list of tests has a function: first its name as text, then itself.
fn is_listed(text: &str, function: &str) -> bool {
    let name = format!("\"{function}\",");
    text.contains("stub::main(")
        && text.split(&name).skip(1).any(|rest| {
            let itself = rest.trim_start().strip_prefix(function);
            itself.is_some_and(|rest| rest.starts_with([',', ')']))
        })
}

#[test]
fn a_function_that_is_no_test_is_none() {
    let text = "#[test]\n#[ignore = \"x\"]\nfn one() {\n    two();\n}\n\n\
        fn two() {}\n\n#[cfg(test)]\nfn three() {}\n\n// \"four\", four\nfn four() {}\n";
    assert_eq!(tests(text), ["one"]);
    let listed = "stub::main(&[(\"two\", two)], worker);\nfn two() {}\nfn worker() {}\n";
    assert_eq!(tests(listed), ["two"]);
}

#[test]
fn each_attack_of_the_threat_model_has_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/threat-model.md")).unwrap();
    let (_, table) = page.split_once("| attack | tests |\n|---|---|\n").unwrap();
    let rows: Vec<&str> = table
        .lines()
        .take_while(|line| line.starts_with('|'))
        .collect();
    assert!(rows.len() > 20, "{} attacks", rows.len());
    let mut known = BTreeSet::new();
    add_tests(&root, &mut known);
    for row in rows {
        let (_, tests) = row.trim_end_matches([' ', '|']).rsplit_once('|').unwrap();
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test in {row}");
        for name in names {
            assert!(known.contains(name), "no test is called {name}");
        }
    }
}
