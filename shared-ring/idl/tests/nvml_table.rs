//! Tests of NVML's table.

use std::collections::BTreeSet;
use std::fs;

use wormhole_idl::{Nvml, nvml_coverage, nvml_exports};

const API: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../api");

fn table() -> Nvml {
    Nvml::load(API.as_ref()).expect("the table")
}

#[test]
fn every_name_of_the_native_library_is_declared_and_exported_once() {
    let table = table();
    let declared: BTreeSet<&str> = table
        .functions
        .iter()
        .map(|function| function.name.as_str())
        .collect();
    let symbols = fs::read_to_string(format!("{API}/nvml-symbols.txt")).expect("the names");
    let native: BTreeSet<&str> = symbols.lines().collect();
    let missing: Vec<_> = native.difference(&declared).collect();
    let invented: Vec<_> = declared.difference(&native).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "missing {missing:?}, invented {invented:?}"
    );
    let code = nvml_exports(&table);
    for name in native {
        let exports = code.matches(&format!(" extern \"C\" fn {name}(")).count();
        assert_eq!(exports, 1, "{name}");
    }
}

#[test]
fn the_coverage_page_is_that_of_the_table() {
    let page = format!("{API}/../../docs/nvml-coverage.md");
    let page = fs::read_to_string(page).expect("the page");
    assert!(
        page == nvml_coverage(&table()),
        "run: cargo run -p wormhole-idl --example nvml_coverage > docs/nvml-coverage.md"
    );
}

#[test]
fn what_declares_nothing_is_refused_with_its_line() {
    for (text, what) in [
        ("\nserved nvmlInit", "line 2"),
        ("unsupported nvmlInit", "no reason"),
        ("answered nvmlInit", "brackets"),
        ("answered nvmlInit(flags)", "no type"),
        ("answered nvmlInit(fn: u32)", "fn cannot be a name"),
        ("answered nvmlInit(flags: u32 u32)", "u32 u32 is no type"),
        ("host nvmlX(f32)", "f32 is no output"),
        ("host nvmlX(u32, 4)", "selectors come before"),
        ("fixed nvmlX(u32, u32) = 1", "values of 2 outputs"),
        ("fixed nvmlX(u32) = many", "values of 1 outputs"),
        ("same nvmlX nvmlY", "nvmlY does not come before"),
        ("host nvmlX(u32)\nlive nvmlX(u32)", "declared twice"),
        ("field 1 A\nfield 1 B", "declared twice"),
        ("field one A", "no number"),
        ("field 1 A(2, 3)", "one number of scopes"),
        ("field 1 A(u32)", "one number of scopes"),
    ] {
        let error = Nvml::parse(text).expect_err(text).to_string();
        assert!(error.contains(what), "{text}: {error}");
    }
}
