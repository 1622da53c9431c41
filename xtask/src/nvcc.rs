//! Runs nvcc: compiles each program once, links it with each kind of CUDA runtime, and works on as many programs at a
//! time as the machine has processors.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use wormhole_lock::Mutex;

use crate::command::{Failure, Run, step};
use crate::toolchain::Toolkit;

/// Linkage of the CUDA runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    Static,
    Shared,
}

impl Link {
    /// Returns nvcc's name for the linkage, which is also the folder's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Shared => "shared",
        }
    }
}

/// A program to compile and link.
#[derive(Debug)]
pub struct Build {
    /// Name of the program, for the developer.
    pub name: String,
    pub sources: Vec<PathBuf>,
    /// Further flags for nvcc, both when it compiles and when it links.
    pub flags: Vec<String>,
    /// A program for each linkage. All are in one file system.
    pub outputs: Vec<(Link, PathBuf)>,
}

/// Makes all programs. Stops at the first failure.
pub fn build(toolkit: &Toolkit, builds: Vec<Build>) -> Result<(), Failure> {
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let workers = workers.min(builds.len());
    let queue = Mutex::new(builds.into_iter());
    let next = || queue.lock().next();
    let work = || -> Result<(), Failure> {
        while let Some(build) = next() {
            let made = build.make(toolkit);
            if made.is_err() {
                // Leaves nothing for the other threads.
                while next().is_some() {}
            }
            made?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(Failure::new("a thread that compiles panicked")))
        })
    })
}

impl Build {
    fn make(&self, toolkit: &Toolkit) -> Result<(), Failure> {
        step(&format!("compiling {}", self.name));
        let Some((_, first)) = self.outputs.first() else {
            return Ok(());
        };
        let objects = first.with_extension("objects");
        make_folder(&objects)?;
        let compiled = self.compile_and_link(toolkit, &objects);
        fs::remove_dir_all(&objects).map_err(|error| {
            Failure::new(format!("cannot remove {}: {error}", objects.display()))
        })?;
        compiled
    }

    fn compile_and_link(&self, toolkit: &Toolkit, objects: &Path) -> Result<(), Failure> {
        let mut linked = Vec::new();
        for source in &self.sources {
            let object = objects.join(source.file_name().unwrap_or_default());
            let object = object.with_extension("o");
            Run::new(toolkit.nvcc())
                .args(["-O2", "-std=c++17", "-c", "-o"])
                .args([&object, source])
                .args(&self.flags)
                .check()?;
            linked.push(object);
        }
        for (link, path) in &self.outputs {
            if let Some(folder) = path.parent() {
                make_folder(folder)?;
            }
            let fresh = path.with_extension("fresh");
            Run::new(toolkit.nvcc())
                .args(["-cudart", link.name(), "-Xlinker", "-rpath,$ORIGIN", "-L"])
                .args([toolkit.libraries().as_path(), Path::new("-o"), &fresh])
                .args(&linked)
                .args(&self.flags)
                .check()?;
            fs::rename(&fresh, path).map_err(|error| {
                Failure::new(format!("cannot place {}: {error}", path.display()))
            })?;
        }
        Ok(())
    }
}

fn make_folder(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder)
        .map_err(|error| Failure::new(format!("cannot make {}: {error}", folder.display())))
}
