//! Logs to standard error at the level in `WORMHOLE_LOG`.

use std::fmt::Arguments;
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// Level of a message. `Trace` includes every call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    Off = 1,
    Error = 2,
    Warn = 3,
    Info = 4,
    Debug = 5,
    Trace = 6,
}

/// Current level; zero until the environment has been read.
static LEVEL: AtomicU8 = AtomicU8::new(0);

impl Level {
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "off" => Some(Self::Off),
            "error" => Some(Self::Error),
            "warn" => Some(Self::Warn),
            "info" => Some(Self::Info),
            "debug" => Some(Self::Debug),
            "trace" => Some(Self::Trace),
            _ => None,
        }
    }
}

/// Returns whether a message of this level is printed.
#[must_use]
#[inline]
pub fn enabled(level: Level) -> bool {
    let mut current = LEVEL.load(Ordering::Relaxed);
    if current == 0 {
        current = read_environment();
    }
    level as u8 <= current
}

#[cold]
fn read_environment() -> u8 {
    let text = std::env::var("WORMHOLE_LOG").unwrap_or_default();
    let level = Level::parse(&text);
    LEVEL.store(level.unwrap_or(Level::Error) as u8, Ordering::Relaxed);
    if level.is_none() && !text.is_empty() {
        write(
            Level::Error,
            format_args!(
                "WORMHOLE_LOG={text}: the levels are off, error, warn, info, debug and trace"
            ),
        );
    }
    LEVEL.load(Ordering::Relaxed)
}

/// Function that receives every error, regardless of the level.
static LISTENER: OnceLock<fn(&str)> = OnceLock::new();

/// Registers a function that receives every error. Only the first registration takes effect.
pub fn to(listener: fn(&str)) {
    let _ = LISTENER.set(listener);
}

/// Prints one line if the level is enabled. Ignores a closed standard error.
pub fn write(level: Level, message: Arguments<'_>) {
    if level == Level::Error
        && let Some(listener) = LISTENER.get()
    {
        listener(&message.to_string());
    }
    if enabled(level) {
        let _ = writeln!(std::io::stderr().lock(), "wormhole: {message}");
    }
}

#[doc(hidden)]
#[macro_export]
macro_rules! __error {
    ($($argument:tt)*) => { $crate::log::write($crate::log::Level::Error, format_args!($($argument)*)) };
}
/// Logs an error once per process and call site, since a program may cause the same error repeatedly.
#[doc(hidden)]
#[macro_export]
macro_rules! __error_once {
    ($($argument:tt)*) => {{
        static SAID: std::sync::Once = std::sync::Once::new();
        SAID.call_once(|| $crate::__error!($($argument)*));
    }};
}
#[doc(hidden)]
#[macro_export]
macro_rules! __debug {
    ($($argument:tt)*) => { $crate::log::write($crate::log::Level::Debug, format_args!($($argument)*)) };
}
pub use crate::{__debug as debug, __error as error, __error_once as error_once};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_ordered_from_quiet_to_loud() {
        let names = ["off", "error", "warn", "info", "debug", "trace"];
        let levels: Vec<_> = names
            .iter()
            .map(|name| Level::parse(name).unwrap())
            .collect();
        assert!(levels.is_sorted());
        assert_eq!(Level::parse("loud"), None);
    }
}
