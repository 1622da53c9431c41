//! Tests that `cuGetProcAddress` finds the functions that the native driver finds.

use wormhole_api::{ENTRY_POINTS, FUNCTIONS, NoEntryPoint, entry_point};

fn name(symbol: &str, version: u32, per_thread: bool) -> Result<&'static str, NoEntryPoint> {
    entry_point(symbol.as_bytes(), version, per_thread).map(|index| FUNCTIONS[index].name)
}

#[test]
fn every_question_that_programs_ask_has_the_native_answer() {
    let mut questions = 0;
    for line in include_str!("entry-points.tsv")
        .lines()
        .filter(|line| !line.starts_with('#'))
    {
        let [symbol, version, flags, export] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("{line:?} is not four columns");
        };
        let version = version.parse().expect("a version");
        assert_eq!(name(symbol, version, flags == "2"), Ok(export), "{line}");
        questions += 1;
    }
    assert_eq!(questions, 517);
}

#[test]
fn unknown_and_too_young_functions_are_distinguished() {
    assert_eq!(name("", 0, false), Err(NoEntryPoint::Symbol));
    assert_eq!(
        name("cuMemAlloc_v2", 13000, false),
        Err(NoEntryPoint::Symbol)
    );
    assert_eq!(
        name("cuGreenCtxCreate", 12030, false),
        Err(NoEntryPoint::Version)
    );
}

#[test]
fn a_symbol_without_a_per_thread_variant_is_the_same_for_both() {
    assert_eq!(name("cuMemAlloc", 13000, true), Ok("cuMemAlloc_v2"));
    assert_eq!(name("cuMemcpyHtoD", 5000, true), Ok("cuMemcpyHtoD_v2"));
    assert_eq!(name("cuMemcpyHtoD", 7000, true), Ok("cuMemcpyHtoD_v2_ptds"));
}

#[test]
fn entry_points_are_sorted_so_that_every_one_is_found() {
    for row in ENTRY_POINTS {
        assert_eq!(
            entry_point(row.symbol.as_bytes(), row.since, row.per_thread),
            Ok(row.function)
        );
    }
}
