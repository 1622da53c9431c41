//! Checks pages. Each developer command that they name parses, and is in [`COMMANDS`] with the place that executes it or
//! the reason why none does. `hypervisor/tests/runs/documents.rs` executes their other commands.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;

use super::Command;

/// Test or step that executes a command of the pages.
enum Executed {
    /// Test of this file and name.
    Test(&'static str, &'static str),
    /// Call in the source of `cargo xtask test`.
    Gate(&'static str),
    /// None, for this reason.
    Not(&'static str),
}

use Executed::{Gate, Not, Test};

/// Test of the benchmarks of the driver's functions.
const CALLS: &str = "the_benchmarks_of_calls_measure_every_group";
/// Tests of commands in a small form.
const SMALL: &str = "xtask/tests/commands.rs";

const COMMANDS: [(&str, Executed); 34] = [
    ("setup", Gate("setup::setup_and_stage(root, true)")),
    ("stage", Gate("setup::setup_and_stage(root, true)")),
    ("test", Gate("pub fn test(root: &Path)")),
    ("structure", Gate("structure::structure(root)")),
    ("history", Gate("checks::history(root)")),
    ("paths", Gate("checks::paths(root)")),
    ("glibc", Gate("checks::glibc(root)")),
    ("prose", Gate("checks::prose(root)")),
    (
        "demo --backend process",
        Test(
            "xtask/tests/demo.rs",
            "the_demo_fails_where_a_kernel_is_broken",
        ),
    ),
    (
        "demo",
        Test(
            "xtask/tests/demo.rs",
            "the_demo_runs_programs_in_two_guests_of_a_backend_vm",
        ),
    ),
    (
        "bench ring",
        Test(
            "benches/tests/commands.rs",
            "the_benchmarks_of_the_window_measure_a_payload",
        ),
    ),
    (
        "bench launch",
        Test(
            "benches/tests/commands.rs",
            "the_benchmarks_of_the_window_measure_a_payload",
        ),
    ),
    ("bench calls", Test("benches/tests/commands.rs", CALLS)),
    ("bench copies", Test("benches/tests/commands.rs", CALLS)),
    ("bench memory", Test("benches/tests/commands.rs", CALLS)),
    ("bench threads", Test("benches/tests/commands.rs", CALLS)),
    ("bench waits", Test("benches/tests/commands.rs", CALLS)),
    ("bench start", Test("benches/tests/commands.rs", CALLS)),
    (
        "bench workloads",
        Test(
            "benches/tests/commands.rs",
            "the_benchmark_of_workloads_measures_the_programs",
        ),
    ),
    (
        "performance",
        Test(
            "xtask/src/performance/mod.rs",
            "the_page_and_the_plots_are_made_of_the_committed_figures",
        ),
    ),
    (
        "bench monitors",
        Test(SMALL, "the_benchmark_of_monitors_boots_all_of_them"),
    ),
    (
        "bench programs",
        Test(
            "benches/tests/commands.rs",
            "the_benchmark_of_programs_times_a_program",
        ),
    ),
    (
        "bench neighbours",
        Test(
            "benches/tests/commands.rs",
            "beside_every_attack_the_victim_is_never_refused",
        ),
    ),
    (
        "fixtures",
        Test(
            SMALL,
            "the_committed_fixtures_are_those_that_their_sources_make",
        ),
    ),
    (
        "python",
        Test(SMALL, "numpy_numba_and_cupy_pass_in_a_guest"),
    ),
    (
        "numba",
        Test(SMALL, "a_module_of_numbas_tests_passes_on_the_cpu_device"),
    ),
    (
        "cuda-python",
        Test(
            SMALL,
            "a_module_of_the_bindings_tests_passes_on_the_cpu_device",
        ),
    ),
    (
        "foreign pytest",
        Test(SMALL, "tests_of_a_suite_are_compared_one_by_one"),
    ),
    (
        "foreign",
        Test(
            SMALL,
            "programs_of_a_checkout_are_built_and_those_that_fail_are_listed",
        ),
    ),
    (
        "nccl",
        Not("downloads 190 MB, and one way alone takes a processor for 35 s"),
    ),
    (
        "delays",
        Not("builds a whole installation of its own: six minutes of a processor"),
    ),
    (
        "soak --windows",
        Test("xtask/tests/soak.rs", "windows_come_and_go_beside_a_guest"),
    ),
    (
        "soak",
        Test("xtask/tests/soak.rs", "a_short_soak_finds_nothing_wrong"),
    ),
    (
        "mutants",
        Not(
            "compiles the library and its tests anew: two minutes of a processor even for the tests of one file",
        ),
    ),
];

/// Returns the root of the sources.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns README, the other pages for developers, and those in `docs`.
fn pages() -> impl Iterator<Item = PathBuf> {
    let docs = fs::read_dir(root().join("docs")).expect("the folder of pages");
    let docs = docs.flatten().map(|entry| entry.path());
    let docs = docs.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let others = [
        "README.md",
        "CONTRIBUTING.md",
        "ARCHITECTURE.md",
        "fuzz/README.md",
    ];
    docs.chain(others.map(|name| root().join(name)))
}

/// Returns the words behind each `cargo xtask` of the pages.
fn named() -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for line in text.split("cargo xtask ").skip(1) {
            let line = line.split(['`', '\n', '#']).next().unwrap_or(line);
            found.push(line.split_whitespace().map(str::to_owned).collect());
        }
    }
    found
}

#[test]
fn each_command_of_the_pages_is_executed_or_has_a_reason() {
    let root = root();
    let gate = fs::read_to_string(root.join("xtask/src/test.rs")).expect("the gate");
    let mut used = [false; COMMANDS.len()];
    for words in named() {
        let all = ["cargo xtask"]
            .into_iter()
            .chain(words.iter().map(String::as_str));
        if let Err(error) = Command::try_parse_from(all) {
            panic!("{words:?}: {error}");
        }
        let known = COMMANDS.iter().position(|(command, _)| {
            command
                .split(' ')
                .eq(words.iter().take(command.split(' ').count()))
        });
        let known = known.unwrap_or_else(|| panic!("nothing says who executes {words:?}"));
        used[known] = true;
    }
    for ((command, executed), used) in COMMANDS.iter().zip(used) {
        assert!(used, "no page names {command}");
        match executed {
            Test(file, name) => {
                assert!(
                    has_test(&[root.join(file)], name),
                    "{file} has no test {name}"
                );
            }
            Gate(call) => assert!(gate.contains(call), "the gate does not execute {command}"),
            Not(reason) => assert!(!reason.is_empty(), "{command}"),
        }
    }
}

#[test]
fn each_file_of_the_sources_that_a_page_names_exists() {
    let mut checked = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for span in text.split('`').skip(1).step_by(2) {
            let folder = span.split('/').next().unwrap_or(span);
            let is_path = span.contains('/') && !span.contains([' ', '\n', '{', '*', '…']);
            if !is_path || ["", "target"].contains(&folder) || !root().join(folder).is_dir() {
                continue;
            }
            assert!(
                root().join(span).exists(),
                "{} names {span}",
                page.display()
            );
            checked += 1;
        }
    }
    assert!(checked > 100, "only {checked} paths were found");
}

/// Returns whether one of these files has this test.
fn has_test(files: &[PathBuf], name: &str) -> bool {
    let start = format!("fn {name}(");
    let texts = files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok());
    texts.into_iter().any(|text| {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        lines
            .windows(2)
            .any(|pair| pair[0] == "#[test]" && pair[1].starts_with(&start))
    })
}

#[test]
fn each_requirement_of_the_virtio_page_has_a_test_that_exists_or_a_reason() {
    const REASONS: [&str; 2] = ["by construction: ", "in part: "];
    let root = root();
    let devices = root.join("hypervisor/monitor/src/devices");
    let page = fs::read_to_string(root.join("docs/virtio.md")).expect("the page");
    let mut requirements = 0;
    for line in page.lines() {
        // The rows of requirements begin with a section's number.
        let cells: Vec<&str> = line.split(" | ").collect();
        let is_row = line.starts_with("| ") && line[2..].starts_with(|c: char| c.is_ascii_digit());
        if !is_row {
            continue;
        }
        let [_, _, shown] = cells[..] else {
            panic!("not a section, a requirement and what shows it: {line}");
        };
        let code = shown.split('`').skip(1).step_by(2);
        let tests: Vec<&str> = code.filter(|text| text.contains("::")).collect();
        let is_explained = REASONS.iter().any(|reason| shown.starts_with(reason));
        assert!(
            !tests.is_empty() || is_explained,
            "neither test nor reason: {line}"
        );
        for test in tests {
            let (module, name) = test.rsplit_once("::").expect("a module and a test");
            let module = devices.join(module.replace("::", "/"));
            let files = [module.with_extension("rs"), module.join("tests.rs")];
            assert!(
                has_test(&files, name),
                "docs/virtio.md: no such test: {test}"
            );
        }
        requirements += 1;
    }
    assert!(
        requirements > 50,
        "only {requirements} requirements were found"
    );
}

/// Questions of maintainers, by words of the row of ARCHITECTURE.md that answers each, and a file that the row must name.
const QUESTIONS: [(&str, &str); 10] = [
    (
        "change when a pool gives memory back",
        "backend-vm/worker/src/session/pools.rs",
    ),
    (
        "end a registration",
        "guest-lib/src/memory/registration/mod.rs",
    ),
    (
        "forward a driver function that one call",
        "shared-ring/api/driver.idl",
    ),
    (
        "limit one more thing for a tenant",
        "backend-vm/sandbox/src/cgroup.rs",
    ),
    (
        "let a worker make one more system call",
        "backend-vm/sandbox/src/seccomp.rs",
    ),
    (
        "change how windows come to a running backend VM",
        "hypervisor/monitor/src/aperture.rs",
    ),
    (
        "put another file into an image",
        "images/src/disk/packages.rs",
    ),
    (
        "update nodes of an executable graph",
        "guest-lib/src/calls/graph_nodes.rs",
    ),
    (
        "handle a worker's death",
        "backend-vm/supervisor/src/spawner/process.rs",
    ),
    (
        "admit one more launch attribute",
        "backend-vm/worker/src/session/attributes.rs",
    ),
];

#[test]
fn questions_of_maintainers_are_answered_in_one_row() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page");
    for (question, file) in QUESTIONS {
        let row = page.lines().find(|line| line.contains(question));
        let row = row.unwrap_or_else(|| panic!("no row answers: {question}"));
        assert!(row.contains(file), "{question}: {file} is not in {row}");
        assert!(root().join(file).is_file(), "{file}");
    }
}
