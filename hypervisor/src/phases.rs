//! Names the phases of a command to a person who waits for it.

use std::io::{self, IsTerminal};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::confinement;
use crate::say;

/// Pauses between the lines about one phase.
#[derive(Clone, Copy, Debug)]
struct Pauses {
    /// Time after which a phase is named.
    first: Duration,
    /// Time after which it is named again, with its seconds.
    next: Duration,
}

const PAUSES: Pauses = Pauses {
    first: Duration::from_secs(2),
    next: Duration::from_secs(15),
};

/// The phases of a command. The current one ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Phases(Option<Sender<Option<&'static str>>>);

impl Phases {
    /// Names phases if a person waits: standard error is a terminal, and `quiet` is not set.
    pub fn new(quiet: bool) -> Self {
        match !quiet && io::stderr().is_terminal() {
            true => Self::reported(PAUSES, |phase, lasts| {
                if lasts < PAUSES.next {
                    say::line(format_args!("{phase}"));
                } else {
                    say::line(format_args!("{phase}: {} s", lasts.as_secs()));
                }
            }),
            false => Self(None),
        }
    }

    /// Names one phase, until the value is dropped.
    pub fn of(phase: &'static str) -> Self {
        let phases = Self::new(false);
        phases.begin(phase);
        phases
    }

    fn reported(pauses: Pauses, report: impl Fn(&'static str, Duration) + Send + 'static) -> Self {
        let (sender, phases) = channel();
        // Without the thread the command prints no phases, as without a terminal.
        let thread = confinement::spawn("phases", move || report_each(&phases, pauses, report));
        Self(thread.is_ok().then_some(sender))
    }

    /// Begins a phase.
    pub fn begin(&self, phase: &'static str) {
        self.next(Some(phase));
    }

    /// Ends the last phase.
    pub fn end(&self) {
        self.next(None);
    }

    fn next(&self, phase: Option<&'static str>) {
        if let Some(sender) = &self.0 {
            // The receiver exists as long as a sender does.
            let _ = sender.send(phase);
        }
    }
}

/// Reports each phase that lasts longer than the first pause, and again after each further one.
fn report_each(
    phases: &Receiver<Option<&'static str>>,
    pauses: Pauses,
    report: impl Fn(&'static str, Duration),
) {
    let (mut current, mut start, mut pause) = (None, Instant::now(), pauses.first);
    loop {
        let next = match current {
            Some(_) => phases.recv_timeout(pause),
            None => phases.recv().map_err(RecvTimeoutError::from),
        };
        match next {
            Ok(phase) => (current, start, pause) = (phase, Instant::now(), pauses.first),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(phase) = current {
                    report(phase, start.elapsed());
                }
                pause = pauses.next;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns phases with these pauses, and a channel with the name of a phase for each line about it.
    fn heard(first: Duration, next: Duration) -> (Phases, Receiver<&'static str>) {
        let (said, heard) = channel();
        let report = move |phase, _| {
            let _ = said.send(phase);
        };
        (Phases::reported(Pauses { first, next }, report), heard)
    }

    #[test]
    fn a_phase_that_lasts_is_reported_once_and_no_other() {
        let (phases, heard) = heard(Duration::ZERO, Duration::MAX);
        phases.begin("boots");
        assert_eq!(heard.recv(), Ok("boots"));
        phases.begin("runs");
        assert_eq!(heard.recv(), Ok("runs"));
        phases.end();
        drop(phases);
        assert!(heard.recv().is_err(), "the thread has ended");
    }

    #[test]
    fn a_phase_that_lasts_longer_is_reported_again_until_it_ends() {
        let (phases, heard) = heard(Duration::ZERO, Duration::from_millis(1));
        phases.begin("boots");
        assert_eq!([heard.recv(), heard.recv()], [Ok("boots"); 2]);
        phases.end();
        drop(phases);
        assert!(heard.iter().all(|phase| phase == "boots"));
    }

    #[test]
    fn short_phases_are_not_reported() {
        let (phases, heard) = heard(Duration::MAX, Duration::MAX);
        for phase in ["boots", "runs"] {
            phases.begin(phase);
        }
        drop(phases);
        assert!(heard.recv().is_err());
    }
}
