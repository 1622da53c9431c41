//! Names what a run does to a person who waits for its program.

use std::io::{self, IsTerminal};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use wormhole_link::tasks;

use crate::say;

/// Time after which a phase is named.
const PATIENCE: Duration = Duration::from_secs(2);

/// The phases of a run before its program starts.
#[derive(Clone, Debug)]
pub struct Phases(Option<Sender<Option<&'static str>>>);

impl Phases {
    /// Names phases if a person waits: standard error is a terminal, and `quiet` is not set.
    pub fn new(quiet: bool) -> Self {
        match !quiet && io::stderr().is_terminal() {
            true => Self::told(PATIENCE, |phase| say::line(format_args!("{phase}"))),
            false => Self(None),
        }
    }

    fn told(patience: Duration, tell: impl Fn(&'static str) + Send + 'static) -> Self {
        let (sender, phases) = channel();
        // Without the thread the run is as silent as at no terminal.
        let told = tasks::spawn("phases", move || tell_of(&phases, patience, tell));
        Self(told.is_ok().then_some(sender))
    }

    /// Begins a phase.
    pub fn begin(&self, phase: &'static str) {
        self.next(Some(phase));
    }

    /// Ends the last phase: the program starts.
    pub fn end(&self) {
        self.next(None);
    }

    fn next(&self, phase: Option<&'static str>) {
        if let Some(sender) = &self.0 {
            // The receiver is there as long as a sender is.
            let _ = sender.send(phase);
        }
    }
}

/// Tells of each phase that lasts longer than `patience`, once.
fn tell_of(
    phases: &Receiver<Option<&'static str>>,
    patience: Duration,
    tell: impl Fn(&'static str),
) {
    let mut next = phases.recv();
    while let Ok(phase) = next {
        next = match phases.recv_timeout(patience) {
            Ok(phase) => Ok(phase),
            Err(RecvTimeoutError::Timeout) => {
                phase.into_iter().for_each(&tell);
                phases.recv()
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_lasts_is_told_once_and_no_other() {
        let (said, heard) = channel();
        let phases = Phases::told(Duration::ZERO, move |phase| said.send(phase).unwrap());
        phases.begin("boots");
        assert_eq!(heard.recv(), Ok("boots"));
        phases.begin("runs");
        assert_eq!(heard.recv(), Ok("runs"));
        phases.end();
        drop(phases);
        assert!(heard.recv().is_err(), "the thread has ended");
    }

    #[test]
    fn short_phases_are_not_told() {
        let (said, heard) = channel();
        let phases = Phases::told(Duration::MAX, move |phase| said.send(phase).unwrap());
        for phase in ["boots", "runs"] {
            phases.begin(phase);
        }
        drop(phases);
        assert!(heard.recv().is_err());
    }
}
