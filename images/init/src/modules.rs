//! Loads the kernel modules of the image in the order of its list.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::system::finit_module;

#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    #[error("the module list {path} cannot be read: {source}")]
    List { path: PathBuf, source: io::Error },
    #[error("the kernel module {path} cannot be opened: {source}")]
    Open { path: String, source: io::Error },
    #[error("the kernel does not take the module {path}: {source}")]
    Load { path: String, source: io::Error },
}

pub fn load(list: &Path) -> Result<(), ModuleError> {
    let text = std::fs::read_to_string(list).map_err(|source| ModuleError::List {
        path: list.to_owned(),
        source,
    })?;
    for line in text.lines().filter(|line| !line.is_empty()) {
        let (path, parameters) = line.split_once(' ').unwrap_or((line, ""));
        let file = File::open(path).map_err(|source| ModuleError::Open {
            path: path.to_owned(),
            source,
        })?;
        insert(&file, parameters).map_err(|source| ModuleError::Load {
            path: path.to_owned(),
            source,
        })?;
    }
    Ok(())
}

fn insert(file: &File, parameters: &str) -> io::Result<()> {
    let parameters = CString::new(parameters)?;
    match finit_module(file, &parameters, 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
