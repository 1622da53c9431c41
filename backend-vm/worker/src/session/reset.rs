//! Context reset, which waits until no job is left.

use wormhole_api::{ContextReset, CuResult, Outcome, Serve, Served};

use super::{Answer, Call, Event, Session};
use crate::registrar::Task;

/// Number of running jobs, and the reset that waits for them.
#[derive(Debug, Default)]
pub(super) struct Reset {
    /// Whether a reset is pending or running. No other work may use the device then.
    begun: bool,
    /// Reset that waits for jobs to end.
    wanted: Option<Call>,
    /// Number of jobs whose [`Finish`](super::Finish) has not run yet.
    jobs: usize,
}

impl Reset {
    /// Returns whether a reset has begun, so that no record may be taken.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Returns whether no job is underway.
    pub fn is_quiet(&self) -> bool {
        self.jobs == 0
    }

    pub fn job_begun(&mut self) {
        self.jobs += 1;
    }

    /// Counts a job whose `Finish` has run.
    fn job_ended(&mut self) {
        self.jobs -= 1;
    }

    /// Takes the waiting reset, once no job is left.
    fn due(&mut self) -> Option<Call> {
        self.wanted.take_if(|_| self.jobs == 0)
    }

    /// Stops further work from starting. Returns whether the reset may run at once; otherwise it
    /// waits for jobs.
    fn begin(&mut self, call: &Call) -> bool {
        self.begun = true;
        if self.jobs > 0 {
            self.wanted = Some(*call);
        }
        self.jobs == 0
    }

    fn end(&mut self) {
        self.begun = false;
    }
}

/// Destroys everything in the context. It starts once the jobs before it are done, and no record is
/// taken until it is done, so no other work uses the device meanwhile.
impl Serve<ContextReset> for Session {
    fn serve(&mut self, call: &Call, _: &ContextReset) -> Outcome<()> {
        if self.reset.begin(call) {
            self.carry_out_reset(call)
        } else {
            Ok(Served::Deferred)
        }
    }
}

impl Session {
    /// Resumes the work that waited for a job, after the job's `Finish` has run. Returns the
    /// requests that failed, with the error to answer.
    pub fn job_finished(&mut self) -> Vec<(Call, CuResult)> {
        self.reset.job_ended();
        let mut refused = self.unload_unused();
        if let Some(call) = self.reset.due()
            && let Err(error) = self.carry_out_reset(&call)
        {
            refused.push((call, error));
        }
        refused
    }

    fn carry_out_reset(&mut self, call: &Call) -> Outcome<()> {
        let Some(slot) = call.slot else {
            self.reset.end();
            return Err(CuResult::INVALID_VALUE);
        };
        self.chains.forget_all();
        let (ending, unloads) = self.objects.reset();
        self.addresses.reset();
        self.placements.reset(&mut self.addresses);
        self.shares.unshare_context(&self.registrar);
        let watcher = self.watcher.pause(self.objects.legacy());
        let (notifier, sequence) = (self.notifier.clone(), call.sequence);
        let unloads = unloads.iter();
        let unloads: Vec<_> = unloads
            .filter_map(|call| Some((call.slot?, call.sequence)))
            .inspect(|_| self.reset.job_begun())
            .collect();
        let outstanding = self.unloads.outstanding();
        self.registrar.run(Task::new(move |registrations| {
            // After the reset the driver may give their handles to other images.
            if let Some(outstanding) = outstanding {
                outstanding.wait();
            }
            ending.end();
            let result = registrations.reset();
            drop(watcher);
            // The reset has unloaded their images.
            for (slot, sequence) in unloads {
                notifier.send(Event::Finished {
                    slot,
                    sequence,
                    finish: Box::new(|_| Answer::done()),
                });
            }
            let finish = move |session: &mut Session| {
                session.reset.end();
                match result {
                    Ok(()) => Answer::done(),
                    Err(error) => Answer::failed(session.failed(error)),
                }
            };
            notifier.send(Event::Finished {
                slot,
                sequence,
                finish: Box::new(finish),
            });
        }));
        self.reset.job_begun();
        Ok(Served::Deferred)
    }
}
