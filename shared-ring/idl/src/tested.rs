//! Table of the tests that notice when a function does nothing: `shared-ring/api/tested.txt`.
//!
//! A line is a function, a tab, and the test; or `none: ` and the reason why no test can notice.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use crate::table::Table;

const HEAD: &str = "# Functions, and for each the test that fails when it returns success and does nothing: `cargo xtask mutants`.\n";

/// Prefix of a reason.
const NONE: &str = "none: ";

/// Tests of functions, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tested(BTreeMap<String, String>);

impl Tested {
    /// Reads the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn load(path: &Path) -> io::Result<Self> {
        let text = fs::read_to_string(path)?;
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let pairs = lines.filter_map(|line| line.split_once('\t'));
        Ok(Self(
            pairs
                .map(|(name, test)| (name.to_owned(), test.to_owned()))
                .collect(),
        ))
    }

    /// Returns the test of a function, or the reason why it has none.
    #[must_use]
    pub fn by(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub fn set(&mut self, name: &str, test: &str) {
        self.0.insert(name.to_owned(), test.to_owned());
    }

    /// Returns the served functions that have neither a reason nor a test in `tests`.
    pub fn missing<'t>(
        &self,
        table: &'t Table,
        tests: &BTreeSet<&str>,
    ) -> impl Iterator<Item = &'t str> {
        let served = table
            .functions
            .iter()
            .filter(|function| table.forwarded(function).is_some());
        let names = served.map(|function| function.name.as_str());
        names.filter(|name| {
            self.by(name)
                .is_none_or(|by| !by.starts_with(NONE) && !tests.contains(by))
        })
    }

    /// Formats the file, in the order of the table.
    #[must_use]
    pub fn text(&self, table: &Table) -> String {
        let mut out = String::from(HEAD);
        for function in &table.functions {
            if let Some(test) = self.by(&function.name) {
                let _ = writeln!(out, "{}\t{test}", function.name);
            }
        }
        out
    }
}
