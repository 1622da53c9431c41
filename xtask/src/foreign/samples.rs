//! cuda-samples: one program for each folder whose `CMakeLists.txt` adds an executable.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::{Built, Program, compile, files, with_toolkit};
use crate::command::{Failure, Run};
use crate::programs::is_older;
use crate::stage::Stage;
use crate::toolchain::Toolkit;

/// Returns the programs below `Samples`, in order.
pub fn programs(checkout: &Path) -> Result<Vec<Program>, Failure> {
    let mut programs = Vec::new();
    for group in files(&checkout.join("Samples")) {
        let folders = files(&group).into_iter();
        programs.extend(folders.filter_map(|sources| {
            let text = fs::read_to_string(sources.join("CMakeLists.txt")).ok()?;
            let (name, _) = executable(&text)?;
            Some(Program { name, sources })
        }));
    }
    match programs.is_empty() {
        true => Err(Failure::new(format!(
            "{} has no Samples with programs: is it a checkout of cuda-samples 13?",
            checkout.display()
        ))),
        false => Ok(programs),
    }
}

/// Returns the name and the sources of the first executable that a `CMakeLists.txt` adds.
fn executable(text: &str) -> Option<(String, Vec<String>)> {
    let inside = text.split_once("add_executable(")?.1.split_once(')')?.0;
    let mut words = inside.split_whitespace().map(str::to_owned);
    let name = words.next()?;
    Some((name, words.filter(|word| !word.starts_with('$')).collect()))
}

/// Returns the libraries of the toolkit that a `CMakeLists.txt` links, as the linker names them.
fn libraries(text: &str) -> Vec<String> {
    let names = text.split("CUDA::").skip(1).filter_map(|rest| {
        let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_');
        rest.get(..end.unwrap_or(rest.len()))
    });
    let mut names: Vec<String> = names
        .filter(|name| *name != "cudart")
        .map(|name| format!("-l{}", if name == "cuda_driver" { "cuda" } else { name }))
        .collect();
    names.dedup();
    names
}

/// Builds a program into a folder that also has links to the sample's files, which it reads. Kernels that are not among
/// the executable's sources become images that the program loads.
pub fn build(
    program: &Program,
    toolkit: &Toolkit,
    stage: &Stage,
    output: &Path,
) -> Result<Built, Failure> {
    let lists = program.sources.join("CMakeLists.txt");
    let text = fs::read_to_string(&lists)
        .map_err(|error| Failure::new(format!("cannot read {}: {error}", lists.display())))?;
    let (_, own) = executable(&text).unwrap_or_default();
    let folder = output.join(&program.name);
    let found = files(&program.sources);
    prepare(&folder, &found)
        .map_err(|error| Failure::new(format!("cannot make {}: {error}", folder.display())))?;
    let common = program.sources.join("../../../Common");
    let nvcc = || {
        with_toolkit(Run::new(toolkit.nvcc()), toolkit)
            .args([
                "-O2",
                "-std=c++17",
                "--extended-lambda",
                "-arch=sm_90",
                "-I",
            ])
            .args([&common])
            .dir(&program.sources)
    };
    let kernels = found.iter().filter(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(".cu") && !own.iter().any(|source| *source == name)
    });
    for kernel in kernels.filter(|_| text.contains("-fatbin")) {
        let stem = kernel.file_stem().unwrap_or_default().to_string_lossy();
        let image = folder.join(format!("{stem}64.fatbin"));
        if is_older(&image, std::slice::from_ref(kernel)) {
            compile(nvcc().args(["-fatbin", "-o"]).args([&image, kernel]))?;
        }
    }
    let made = folder.join(&program.name);
    if is_older(&made, &found) {
        let link = || {
            nvcc()
                .args(["-o"])
                .args([&made])
                .args(&own)
                .args(["-L"])
                .args([stage.prefix.join("lib/wormhole")])
                .args(libraries(&text))
        };
        // Some programs launch kernels from kernels, or have device code in several sources.
        let separate = || compile(link().args(["-rdc=true", "-lcudadevrt"]));
        compile(link()).or_else(|why| separate().map_err(|_| why))?;
    }
    Ok(Built {
        folder,
        command: vec![made],
    })
}

/// Makes a folder with links to files.
fn prepare(folder: &Path, files: &[PathBuf]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    for file in files {
        let link = folder.join(file.file_name().unwrap_or_default());
        if fs::symlink_metadata(&link).is_err() {
            symlink(file, &link)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_program_sources_and_libraries() {
        let text = "project(x)\nadd_executable(vectorAddDrv vectorAddDrv.cpp\n  more.cu ${ALL})\n\
                    target_link_libraries(vectorAddDrv PUBLIC\n    CUDA::cudart\n    CUDA::cuda_driver\n CUDA::cublas)\n";
        let (name, sources) = executable(text).unwrap();
        assert_eq!(name, "vectorAddDrv");
        assert_eq!(sources, ["vectorAddDrv.cpp", "more.cu"]);
        assert_eq!(libraries(text), ["-lcuda", "-lcublas"]);
        assert!(executable("add_subdirectory(a)").is_none());
        assert!(libraries("nothing").is_empty());
    }
}
