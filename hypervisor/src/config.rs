//! `--config`: a TOML file that says what the flags say.
//!
//! A key of the file is the name of a long flag, or `command` or `name` for values without a flag. The file's keys become
//! arguments in front of those of the command line, and clap parses both together. So the options and the checks of
//! their values are declared once, as flags.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Parser};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use wormhole_link::arguments;

#[derive(Clone, Debug, Args)]
pub struct ConfigOption {
    /// Take options from this TOML file as well: its keys are the names of the long flags. The command line wins over
    /// the file; options that may repeat add up.
    #[arg(long = "config", id = CONFIG, value_name = "FILE")]
    pub file: Option<PathBuf>,
}

const CONFIG: &str = "config";
/// The option whose values may be a table: names and values of variables.
const VARIABLES: &str = "env";
/// Largest file, in bytes.
const LIMIT: u64 = 1 << 20;
/// Most values that a file may have, as the elements of its arrays.
const VALUES: usize = 4096;

/// Reason why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration {}", file.display())]
    Read {
        file: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read the configuration {}: it is no regular file", .0.display())]
    NoFile(PathBuf),
    #[error(
        "cannot read the configuration {}: it is larger than {} MiB",
        .0.display(),
        LIMIT >> 20
    )]
    Large(PathBuf),
    #[error("{}, line {line}: {what}", file.display())]
    Line {
        file: PathBuf,
        line: usize,
        what: String,
    },
}

/// Reason why the arguments, or those of the file, cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Arguments(#[from] clap::Error),
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Places in the file at which options are set.
#[derive(Debug, Default)]
pub struct Origins {
    file: PathBuf,
    /// Lines by the option's key.
    lines: BTreeMap<String, usize>,
}

impl Origins {
    /// Describes where the file sets the options of these names; empty if it sets none of them.
    pub fn note(&self, keys: &[&str]) -> String {
        let set: Vec<String> = keys
            .iter()
            .filter_map(|key| Some(format!("`{key}` in line {}", self.lines.get(*key)?)))
            .collect();
        match set.is_empty() {
            true => String::new(),
            false => format!(" ({} has {})", self.file.display(), set.join(", ")),
        }
    }
}

/// Parses the arguments of this process, its name first, and the configuration file that they name.
pub fn parse<A: Parser>(arguments: Vec<OsString>) -> Result<(A, Origins), Error> {
    let mut command = A::command();
    command.build();
    let (arguments, settings) = match Given::of(&command, &arguments) {
        Some(given) => given.with_file(arguments)?,
        None => (arguments, Settings::default()),
    };
    let matches = command
        .try_get_matches_from_mut(arguments)
        .map_err(|error| settings.locate(error))?;
    let parsed = A::from_arg_matches(&matches)?;
    let lines = settings.all.into_iter().map(|one| (one.key, one.line));
    let origins = Origins {
        file: settings.file,
        lines: lines.collect(),
    };
    Ok((parsed, origins))
}

/// Has a command and its subcommands, which are built already, ignore mistakes.
fn ignoring_errors(command: Command) -> Command {
    command.ignore_errors(true).mut_subcommands(ignoring_errors)
}

/// A command line that names a file.
struct Given {
    file: PathBuf,
    /// The subcommand, and the number of words up to it.
    command: Command,
    depth: usize,
    matches: ArgMatches,
}

impl Given {
    /// Returns `None` if the arguments name no file, or have mistakes, which clap reports when it parses them again.
    fn of(command: &Command, arguments: &[OsString]) -> Option<Self> {
        // The file may have what is missing here.
        let lenient = ignoring_errors(command.clone());
        let mut matches = lenient.try_get_matches_from(arguments).ok()?;
        let (mut command, mut depth) = (command, 0);
        while let Some((name, inner)) = matches.remove_subcommand() {
            command = command.find_subcommand(name)?;
            matches = inner;
            depth += 1;
        }
        let file = matches.try_get_one::<PathBuf>(CONFIG).ok()??.clone();
        Some(Self {
            file,
            command: command.clone(),
            depth,
            matches,
        })
    }

    fn gives(&self, arg: &Arg) -> bool {
        self.matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
    }

    /// Returns whether the command line sets the option (unless it adds up) or one that conflicts with it.
    fn overrides(&self, arg: &Arg) -> bool {
        let adds_up = matches!(arg.get_action(), ArgAction::Append) && !arg.is_positional();
        if self.gives(arg) {
            return !adds_up;
        }
        let excludes = |one: &Arg, other: &Arg| {
            let excluded = self.command.get_arg_conflicts_with(one);
            excluded.iter().any(|arg| arg.get_id() == other.get_id())
        };
        let mut others = self.command.get_arguments();
        others.any(|other| self.gives(other) && (excludes(other, arg) || excludes(arg, other)))
    }

    /// Returns the arguments with those of the file between the subcommand and its own arguments, which are the later
    /// ones. Values without a flag go to the end.
    fn with_file(&self, arguments: Vec<OsString>) -> Result<(Vec<OsString>, Settings), Error> {
        let mut settings = Settings::read(&self.file, &self.command)?;
        settings.all.retain(|setting| !self.overrides(&setting.arg));
        let (mut flags, mut rest) = (Vec::new(), Vec::new());
        for setting in &settings.all {
            match setting.arg.get_long() {
                Some(name) => flags.extend(setting.arguments(name)),
                None => rest.extend(setting.values.iter().map(OsString::from)),
            }
        }
        let ends_options = arguments.last().is_some_and(|last| last == "--");
        if !rest.is_empty() && !ends_options {
            rest.insert(0, "--".into());
        }
        let mut all = arguments;
        let at = all.len().min(self.depth + 1);
        all.splice(at..at, flags);
        all.extend(rest);
        Ok((all, settings))
    }
}

/// The keys of a file.
#[derive(Debug, Default)]
struct Settings {
    file: PathBuf,
    all: Vec<Setting>,
}

/// One key of a file, with its values as the command line has them.
#[derive(Debug)]
struct Setting {
    key: String,
    line: usize,
    arg: Arg,
    values: Vec<String>,
}

impl Setting {
    /// Returns the arguments that say the same.
    fn arguments(&self, name: &str) -> Vec<OsString> {
        let takes_values = self.arg.get_action().takes_values();
        let argument = |value: &String| match takes_values {
            true => format!("--{name}={value}").into(),
            false => format!("--{name}").into(),
        };
        self.values.iter().map(argument).collect()
    }
}

impl Settings {
    fn read(file: &Path, command: &Command) -> Result<Self, ConfigError> {
        let text = read(file)?;
        let fault = |span: Range<usize>, what: String| ConfigError::Line {
            file: file.to_owned(),
            line: line(&text, span.start),
            what,
        };
        let table = DeTable::parse(&text).map_err(|error| {
            let what = error.message().replace('\n', " ");
            fault(
                error.span().unwrap_or_default(),
                format!("not valid TOML: {what}"),
            )
        })?;
        let mut all = Vec::new();
        let mut count = 0;
        for (key, value) in table.get_ref() {
            let name: &str = key.get_ref();
            let arg = find(command, name)
                .ok_or_else(|| fault(key.span(), unknown(command, &shortened(name))))?;
            let values = values(arg, value)
                .map_err(|what| fault(value.span(), format!("`{name}` {what}")))?;
            count += values.len();
            if count > VALUES {
                let what = format!("a file can have {VALUES} values and not more");
                return Err(fault(value.span(), what));
            }
            all.push(Setting {
                key: name.to_owned(),
                line: line(&text, key.span().start),
                arg: arg.clone(),
                values,
            });
        }
        all.sort_by_key(|setting| setting.line);
        Ok(Self {
            file: file.to_owned(),
            all,
        })
    }

    /// Adds the line of the file to a mistake in a value of the file.
    fn locate(&self, error: clap::Error) -> Error {
        let text = |kind| match error.get(kind) {
            Some(ContextValue::String(text)) => Some(text),
            _ => None,
        };
        let Some(arg) = text(ContextKind::InvalidArg) else {
            return error.into();
        };
        let is_its_value = |setting: &Setting| {
            text(ContextKind::InvalidValue).is_none_or(|value| setting.values.contains(value))
        };
        let mut named = self.all.iter().filter(|one| one.arg.to_string() == *arg);
        match named.find(|setting| is_its_value(setting)) {
            None => error.into(),
            Some(setting) => ConfigError::Line {
                file: self.file.clone(),
                line: setting.line,
                what: arguments::sentence(&error),
            }
            .into(),
        }
    }
}

/// Reads a file without waiting for the writer of a pipe.
fn read(path: &Path) -> Result<String, ConfigError> {
    let failed = |source: io::Error| ConfigError::Read {
        file: path.to_owned(),
        source,
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
    let data = fstat(&opened).map_err(|error| failed(error.into()))?;
    if FileType::from_raw_mode(data.st_mode) != FileType::RegularFile {
        return Err(ConfigError::NoFile(path.to_owned()));
    }
    let mut bytes = Vec::new();
    let mut file = File::from(opened).take(LIMIT + 1);
    file.read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > LIMIT {
        return Err(ConfigError::Large(path.to_owned()));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        ConfigError::Line {
            file: path.to_owned(),
            line: 1 + newlines(&error.as_bytes()[..valid]),
            what: "not text in UTF-8".to_owned(),
        }
    })
}

fn line(text: &str, at: usize) -> usize {
    1 + newlines(&text.as_bytes()[..at.min(text.len())])
}

fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').count()
}

/// Returns the key of an option in a file: its long flag, or its name if it has no flag. Hidden options, help and the
/// file itself have none.
fn key(arg: &Arg) -> Option<&str> {
    let is_option = matches!(
        arg.get_action(),
        ArgAction::Set | ArgAction::Append | ArgAction::SetTrue
    );
    if !is_option || arg.is_hide_set() || arg.get_id() == CONFIG {
        return None;
    }
    match arg.is_positional() {
        true => Some(arg.get_id().as_str()),
        false => arg.get_long(),
    }
}

fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| key(arg) == Some(name))
}

/// Says which keys there are instead of an unknown one: the one that clap takes the flag for, or all.
fn unknown(command: &Command, name: &str) -> String {
    let flag = OsString::from(format!("--{name}"));
    let arguments = [OsStr::new(command.get_name()), &flag];
    let suggested = command
        .clone()
        .try_get_matches_from(arguments)
        .err()
        .and_then(|error| match error.get(ContextKind::SuggestedArg) {
            Some(ContextValue::String(flag)) => Some(flag.trim_start_matches('-').to_owned()),
            _ => None,
        })
        .filter(|name| find(command, name).is_some());
    let hint = suggested.map_or_else(
        || {
            let keys: Vec<&str> = command.get_arguments().filter_map(key).collect();
            format!("there are {}", keys.join(", "))
        },
        |name| format!("did you mean `{name}`?"),
    );
    format!("unknown key `{name}`; {hint}")
}

/// Shortens a name for a sentence.
fn shortened(name: &str) -> String {
    /// Longer than any key.
    const SHOWN: usize = 64;
    match name.char_indices().nth(SHOWN) {
        None => name.to_owned(),
        Some((at, _)) => format!("{}...", &name[..at]),
    }
}

/// Returns a key's values as the command line has them. The error says what the key must be.
fn values(arg: &Arg, value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, String> {
    let value = value.get_ref();
    let must = |what: &str| format!("must be {what}, not {}", kind(value));
    let found = match (arg.get_action(), value) {
        (ArgAction::SetTrue, DeValue::Boolean(set)) => {
            return Ok(set.then(String::new).into_iter().collect());
        }
        (ArgAction::SetTrue, _) => return Err(must("true or false")),
        (ArgAction::Append, DeValue::Array(array)) => {
            let element = |element: &Spanned<DeValue<'_>>| {
                let element = element.get_ref();
                let what = || format!("must have strings or numbers, not {}", kind(element));
                scalar(element).ok_or_else(what)
            };
            array.iter().map(element).collect::<Result<Vec<_>, _>>()?
        }
        (ArgAction::Append, DeValue::Table(table)) if arg.get_id() == VARIABLES => {
            let variable = |(name, value): (&Spanned<_>, &Spanned<DeValue<'_>>)| {
                let (name, value): (&std::borrow::Cow<'_, str>, _) =
                    (name.get_ref(), value.get_ref());
                if name.contains('=') {
                    return Err(format!("names a variable {}, with an =", shortened(name)));
                }
                let what = || {
                    let (name, kind) = (shortened(name), kind(value));
                    format!("must give {name} a string or a number, not {kind}")
                };
                Ok(format!("{name}={}", scalar(value).ok_or_else(what)?))
            };
            table.iter().map(variable).collect::<Result<Vec<_>, _>>()?
        }
        (ArgAction::Append, _) if arg.get_id() == VARIABLES => {
            return Err(must("a table of variables, or an array of NAME=VALUE"));
        }
        (ArgAction::Append, _) if arg.is_positional() => {
            return Err(must("an array of the program and its arguments"));
        }
        (ArgAction::Append, _) => return Err(must("an array, since it may repeat")),
        (_, value) => vec![scalar(value).ok_or_else(|| must("a string or a number"))?],
    };
    match found.iter().any(|value| value.contains('\0')) {
        true => Err("has a value with a NUL character".to_owned()),
        false => Ok(found),
    }
}

/// Names the type of a value, with its article.
fn kind(value: &DeValue<'_>) -> String {
    let article = match value {
        DeValue::Integer(_) | DeValue::Array(_) => "an",
        _ => "a",
    };
    format!("{article} {}", value.type_str())
}

/// Returns a string or a number as the command line has it.
fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Some(number.as_str().to_owned()),
        DeValue::Integer(number) => Some(
            u64::from_str_radix(number.as_str(), number.radix())
                .map_or_else(|_| number.to_string(), |number| number.to_string()),
        ),
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        _ => None,
    }
}
