//! Compares the results of calls with wrong arguments with those of the native driver.
//!
//! `native.txt` is the output of `bad_input` on the driver of an H200 (580, CUDA 13.0). Where a call ended the process
//! there, any error is accepted. `docs/bad-input.md` has a row for each other case with a different answer here, under
//! its reason.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use crate::harness::{Finished, alone, finish, program, wormhole};

const NATIVE: &str = include_str!("bad_input/native.txt");
const PAGE: &str = include_str!("../../../docs/bad-input.md");

/// Answers by case: the function and the wrong argument.
type Answers<'a> = BTreeMap<(&'a str, &'a str), &'a str>;
/// Answers by case: natively and here.
type Rows<'a> = BTreeMap<(&'a str, &'a str), (&'a str, &'a str)>;

fn answers(text: &str) -> Answers<'_> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let mut words = line.splitn(3, ' ');
            Some(((words.next()?, words.next()?), words.next()?))
        })
        .collect()
}

/// Returns the rows of the page: case, native answer, answer here.
fn rows(page: &str) -> Rows<'_> {
    let rows = page.lines().filter(|line| line.starts_with("| cu"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, function, case, native, here, _] = cells[..] else {
            panic!("not a row: {row}");
        };
        ((function, case), (native, here))
    })
    .collect()
}

fn ends_the_process(answer: &str) -> bool {
    ["signal", "exit", "hang"]
        .iter()
        .any(|word| answer.starts_with(word))
}

/// Returns the rows that the page lacks, and all other complaints.
fn complaints<'a>(native: &Answers<'_>, here: &Answers<'a>, mut rows: Rows<'a>) -> String {
    let mut out = String::new();
    for (case, answer) in here {
        let (function, what) = case;
        let row = rows.remove(case);
        if ends_the_process(answer) {
            let _ = writeln!(out, "{function} {what}: {answer}");
        }
        let Some(expected) = native.get(case) else {
            continue;
        };
        if ends_the_process(expected) {
            if *answer == "0" {
                let _ = writeln!(out, "{function} {what}: success, and natively {expected}");
            }
        } else if row != (answer != expected).then_some((expected, answer)) {
            let _ = writeln!(out, "| {function} | {what} | {expected} | {answer} |");
        }
    }
    for (function, what) in rows.keys() {
        let _ = writeln!(out, "{function} {what}: on the page, and not tried");
    }
    out
}

/// Returns the content of the program's file of calls, of one in `every` functions.
fn calls(every: usize) -> String {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../shared-ring/api"));
    let table = wormhole_idl::load(folder).expect("the table");
    let called = std::fs::read_to_string(folder.join("called.txt")).expect("the functions");
    let calls = wormhole_idl::calls(&table, &called);
    let lines = calls.split_inclusive('\n').step_by(every);
    lines.collect()
}

/// Tests one in `every` functions: `run` executes the given program with the given file of calls.
pub fn is_answered_as_natively(every: usize, run: impl FnOnce(&Path, &Path) -> Finished) {
    let calls = calls(every);
    let place = tempfile::tempdir().expect("a folder");
    let file = place.path().join("calls.txt");
    std::fs::write(&file, &calls).expect("a file");
    let run = run(&program("static", "bad_input"), &file);
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    let here = answers(&run.stdout);
    let tried = calls.lines().filter_map(|line| line.split(' ').next());
    let tried: BTreeSet<&str> = tried.collect();
    for &function in &tried {
        assert!(here.contains_key(&(function, "good")), "{function}");
        assert!(here.contains_key(&(function, "after-exit")), "{function}");
    }
    let mut rows = rows(PAGE);
    rows.retain(|(function, _), _| tried.contains(function));
    let wrong = complaints(&answers(NATIVE), &here, rows);
    assert!(wrong.is_empty(), "of {} cases:\n{wrong}", here.len());
}

#[test]
fn bad_input_is_answered_as_natively_and_ends_no_process() {
    let _alone = alone();
    is_answered_as_natively(1, |program, calls| {
        finish(
            wormhole(&["run", "--placement", "process", "--device", "cpu", "--"])
                .args([program, calls])
                .arg("2"),
        )
    });
}

#[test]
fn what_differs_or_ends_a_process_is_complained_of() {
    let native = answers("cuA x 1\ncuA y 0\ncuA z signal 11\n");
    let page = "| function | case |\n|---|---|\n| cuA | x | 1 | 2 |\n";
    let here = |text| complaints(&native, &answers(text), rows(page));
    assert_eq!(here("cuA x 2\ncuA y 0\ncuA z 400\ncuA new 7\n"), "");
    assert_eq!(here("cuA x 1\n"), "| cuA | x | 1 | 1 |\n");
    assert_eq!(here("cuA x 2\ncuA y 3\n"), "| cuA | y | 0 | 3 |\n");
    assert_eq!(
        here("cuA x 2\ncuA z 0\n"),
        "cuA z: success, and natively signal 11\n"
    );
    assert_eq!(here("cuA x 2\ncuA new hang\n"), "cuA new: hang\n");
    assert_eq!(here("cuA y 0\n"), "cuA x: on the page, and not tried\n");
}
