//! Progress of long runs.

use indicatif::{ProgressBar, ProgressStyle};

/// Time so far, part that is done, time that remains, and the current work.
const FORM: &str = "{elapsed} {bar:30} {pos} of {len}, {eta} left: {msg}";

/// Begins a bar of so many steps, on standard error. Where that is no terminal, nothing is shown.
pub fn progress(steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    match ProgressStyle::with_template(FORM) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
