//! The table's constants against `cuda.h`, by a C program that the test compiles.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use wormhole_idl::{Table, load};

const HEADER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../target/cuda-toolkit/nvidia/cu13/include"
);

/// Returns the constants, attributes and result codes as names in C with their values.
fn names(table: &Table) -> Vec<(String, i64)> {
    let sets = table.constants.iter().filter(|set| !set.prefix.is_empty());
    let constants = sets.flat_map(|set| {
        let name = |name: &str| format!("{}{name}", set.prefix);
        set.values
            .iter()
            .map(move |one| (name(&one.name), one.value))
    });
    let attributes = table
        .attributes
        .iter()
        .map(|one| (format!("CU_DEVICE_ATTRIBUTE_{}", one.name), one.id.into()));
    let last = table.attributes.iter().map(|one| i64::from(one.id)).max();
    let end = ("CU_DEVICE_ATTRIBUTE_MAX".to_owned(), last.unwrap_or(0) + 1);
    let results = table.results.iter().map(|one| {
        let kind = if one.code == 0 { "" } else { "ERROR_" };
        (format!("CUDA_{kind}{}", one.name), one.code.into())
    });
    constants
        .chain(attributes)
        .chain([end])
        .chain(results)
        .collect()
}

#[test]
fn every_constant_has_the_value_that_cuda_h_gives_it() {
    if !Path::new(HEADER).join("cuda.h").exists() {
        // `cargo xtask test` sets the variable, after it has installed the header.
        assert_eq!(
            std::env::var_os("WORMHOLE_PROGRAMS"),
            None,
            "no {HEADER}/cuda.h"
        );
        println!("skipped: no {HEADER}/cuda.h; `cargo xtask setup` installs it");
        return;
    }
    let table = load(concat!(env!("CARGO_MANIFEST_DIR"), "/../api").as_ref()).expect("the table");
    let names = names(&table);
    let mut program = String::from("#include <cuda.h>\n#include <stdio.h>\nint main(void) {\n");
    for (name, value) in &names {
        let _ = writeln!(
            program,
            "if ((long long){name} != {value}ll) printf(\"{name} is %lld, not {value}\\n\", (long long){name});"
        );
    }
    program.push_str("return 0; }\n");
    let folder = tempfile::tempdir().expect("a folder");
    let (source, binary) = (
        folder.path().join("constants.c"),
        folder.path().join("constants"),
    );
    std::fs::write(&source, program).expect("a source");
    let compiled = Command::new("cc")
        .arg("-I")
        .arg(HEADER)
        .arg("-o")
        .args([&binary, &source])
        .output()
        .expect("a C compiler");
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{errors}");
    let output = Command::new(&binary).output().expect("the program");
    assert!(output.status.success(), "the program failed: {output:?}");
    let wrong = String::from_utf8_lossy(&output.stdout);
    assert!(wrong.is_empty(), "the table differs from cuda.h:\n{wrong}");
    assert!(
        names.len() > 500,
        "only {} names were compared",
        names.len()
    );
}
