//! HeCBench: one program for each folder `src/*-cuda`, built and run by its own `Makefile`.

use std::path::{Path, PathBuf};

use super::{Built, Program, compile, files, with_toolkit};
use crate::command::{Failure, Run};
use crate::toolchain::Toolkit;

/// Returns the programs below `src`, in order.
pub fn programs(checkout: &Path) -> Result<Vec<Program>, Failure> {
    let folders = files(&checkout.join("src")).into_iter();
    let programs: Vec<Program> = folders
        .filter(|sources| sources.join("Makefile").is_file())
        .filter_map(|sources| {
            let name = sources.file_name()?.to_str()?.to_owned();
            name.ends_with("-cuda").then_some(Program { name, sources })
        })
        .collect();
    match programs.is_empty() {
        true => Err(Failure::new(format!(
            "{} has no src/*-cuda with a Makefile: is it a checkout of HeCBench?",
            checkout.display()
        ))),
        false => Ok(programs),
    }
}

/// Builds a program where its sources are. `make run` then runs it with its usual arguments.
pub fn build(program: &Program, toolkit: &Toolkit) -> Result<Built, Failure> {
    let make = with_toolkit(Run::new("make"), toolkit);
    compile(make.args(["-s", "ARCH=sm_90"]).dir(&program.sources))?;
    Ok(Built {
        folder: program.sources.clone(),
        command: ["make", "-s", "ARCH=sm_90", "run"]
            .map(PathBuf::from)
            .into(),
    })
}
