//! Loads the files of the table.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::{ParseError, Table, parse};

/// Reason why the table could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("cannot read {path}: {error}")]
    Read { path: PathBuf, error: io::Error },
    #[error("{path}, line {line}: {reason}")]
    Parse {
        path: PathBuf,
        line: usize,
        reason: String,
    },
}

/// Loads the table of `folder`: `types.idl`, `messages/*.idl` in the order of their names, `driver.idl`,
/// `constants.idl`, `results.idl`.
///
/// # Errors
/// A file cannot be read, or a line does not parse (the first one is reported).
pub fn load(folder: &Path) -> Result<Table, LoadError> {
    let messages = folder.join("messages");
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |error| LoadError::Read { path, error }
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(&messages).map_err(unreadable(&messages))? {
        let path = entry.map_err(unreadable(&messages))?.path();
        if path.extension().is_some_and(|extension| extension == "idl") {
            paths.push(path);
        }
    }
    paths.sort();
    paths.insert(0, folder.join("types.idl"));
    paths.extend(["driver.idl", "constants.idl", "results.idl"].map(|name| folder.join(name)));

    let mut text = String::new();
    let mut files = Vec::new();
    for path in paths {
        let part = fs::read_to_string(&path).map_err(unreadable(&path))?;
        text.push_str(&part);
        files.push((path, part.lines().count()));
    }
    parse(&text).map_err(|ParseError { mut line, reason }| {
        let mut files = files.into_iter();
        let path = files
            .find(|(_, lines)| {
                let found = line <= *lines;
                if !found {
                    line -= lines;
                }
                found
            })
            .map_or_else(|| folder.to_owned(), |(path, _)| path);
        LoadError::Parse { path, line, reason }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_its_file_and_line() {
        let folder = std::env::temp_dir().join(format!("wormhole-idl-{}", std::process::id()));
        fs::create_dir_all(folder.join("messages")).expect("a folder");
        fs::write(
            folder.join("messages/a.idl"),
            "message 1 Stop record\n    code u32\n",
        )
        .expect("a file");
        fs::write(folder.join("messages/b.idl"), "# Words.\nnonsense\n").expect("a file");
        for name in ["types.idl", "driver.idl", "constants.idl", "results.idl"] {
            fs::write(folder.join(name), "").expect("a file");
        }
        let error = load(&folder).expect_err("nonsense").to_string();
        fs::remove_dir_all(&folder).expect("it is ours");
        assert!(error.contains("b.idl, line 2: "), "{error}");
    }
}
