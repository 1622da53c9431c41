//! Developer commands: `cargo xtask …`. CI runs the same commands.

mod bench;
mod bench_programs;
mod checks;
mod command;
mod cuda_python;
mod demo;
mod fixtures;
mod linker;
mod mutants;
mod nccl;
mod numba;
mod older_cuda;
mod programs;
mod pytest;
mod setup;
mod soak;
mod stage;
mod structure;
mod test;
mod test_results;
mod toolchain;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Wormhole's developer commands")]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Install packages from Debian and PyPI, and build programs and images.
    Setup {
        /// Also install and build the parts that only the tests need.
        #[arg(long)]
        tests: bool,
    },
    /// Build Wormhole and lay it out in target/wormhole.
    Stage,
    /// Run CUDA programs in a guest VM and verify their results: the given ones, or the standard set.
    Demo { programs: Vec<PathBuf> },
    /// Compile the images again that tests of the PTX engine read.
    Fixtures,
    /// Run all checks and tests.
    Test,
    /// Check the rules between crates, and print the size of each.
    Structure,
    /// Check the form of commits.
    History,
    /// Look for paths of this machine in sources and in the staged installation.
    Paths,
    /// Check which glibc the staged installation needs.
    Glibc,
    /// Look for comments, pages and messages of errors that make their reader guess.
    Prose,
    /// Run Numba's own CUDA tests on the CPU device.
    Numba {
        /// Run only tests that match this expression, as pytest's `-k` does.
        filter: Option<String>,
    },
    /// Run the tests of NVIDIA's Python bindings on the CPU device.
    CudaPython,
    /// Run NCCL between two processes on the CPU device.
    Nccl,
    /// Run programs in lanes under load, beside a heartbeat, and look for wrong results, stalls and growing memory.
    Soak(soak::Options),
    /// For each function of the driver API, find a test that fails if the function does nothing.
    Mutants {
        /// Check all functions whose names contain this text. Without it, check the functions that have no test (any
        /// more).
        filter: Option<String>,
    },
    /// Run a benchmark and print the ratios of one run.
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(Path::to_path_buf)
        .unwrap_or_default();
    let outcome = match Command::parse().action {
        Action::Setup { tests } => setup::setup(&root, tests).map(|()| true),
        Action::Stage => stage::stage(&root).map(|_| true),
        Action::Demo { programs } => demo::demo(&root, &programs),
        Action::Fixtures => fixtures::fixtures(&root).map(|()| true),
        Action::Test => test::test(&root),
        Action::Structure => structure::structure(&root),
        Action::History => checks::history(&root).map(|found| checks::holds(&found)),
        Action::Paths => checks::paths(&root).map(|found| checks::holds(&found)),
        Action::Glibc => checks::glibc(&root).map(|found| checks::holds(&found)),
        Action::Prose => checks::prose(&root).map(|found| checks::holds(&found)),
        Action::Numba { filter } => numba::numba(&root, filter.as_deref()),
        Action::CudaPython => cuda_python::cuda_python(&root),
        Action::Nccl => nccl::nccl(&root),
        Action::Soak(options) => soak::soak(&root, &options),
        Action::Mutants { filter } => mutants::mutants(&root, filter.as_deref()),
        Action::Bench(bench) => bench::bench(&root, &bench).map(|()| true),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_commands_of_the_pages_parse() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let docs = fs::read_dir(root.join("docs")).expect("the folder of pages");
        let docs = docs.flatten().map(|entry| entry.path());
        let docs = docs.filter(|path| path.extension().is_some_and(|end| end == "md"));
        let mut parsed = 0;
        for page in docs.chain(["README.md", "CONTRIBUTING.md"].map(|name| root.join(name))) {
            let text = fs::read_to_string(&page).expect("a page");
            for line in text.split("cargo xtask ").skip(1) {
                let line = line.split(['`', '\n', '#']).next().unwrap_or(line);
                let words = line.split_whitespace();
                if let Err(error) =
                    Command::try_parse_from(["cargo xtask"].into_iter().chain(words))
                {
                    panic!("{}: {error}", page.display());
                }
                parsed += 1;
            }
        }
        assert!(parsed > 10, "only {parsed} commands were found");
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
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let devices = root.join("hypervisor/monitor/src/devices");
        let page = fs::read_to_string(root.join("docs/virtio.md")).expect("the page");
        let mut requirements = 0;
        for line in page.lines() {
            // The rows of requirements begin with a section's number.
            let cells: Vec<&str> = line.split(" | ").collect();
            let is_row =
                line.starts_with("| ") && line[2..].starts_with(|c: char| c.is_ascii_digit());
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
}
