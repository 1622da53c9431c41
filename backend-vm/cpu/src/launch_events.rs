//! Events that launches record, which are reached while the kernel runs.

use wormhole_device::LaunchEvents;

use crate::scheduler::{Milestone, Point, Scheduler};

/// Milestones of a launch's events.
#[derive(Clone, Debug)]
pub struct Milestones {
    at_block_start: bool,
    programmatic: Option<Milestone>,
    begun: Option<Milestone>,
}

impl Milestones {
    pub fn new(events: &LaunchEvents, scheduler: &Scheduler) -> Self {
        let milestone = |event: Option<_>| event.map(|_| scheduler.milestone());
        Self {
            at_block_start: events.at_block_start,
            programmatic: milestone(events.programmatic),
            begun: milestone(events.begun),
        }
    }

    /// Returns the points of the programmatic event and of the event of the blocks' beginning.
    pub fn points(&self) -> (Option<Point>, Option<Point>) {
        let point = |milestone: &Option<Milestone>| Some(milestone.as_ref()?.point());
        (point(&self.programmatic), point(&self.begun))
    }

    /// Reaches all milestones.
    pub fn reach(&self) {
        reach(self.programmatic.as_ref());
        reach(self.begun.as_ref());
    }
}

fn reach(milestone: Option<&Milestone>) {
    if let Some(milestone) = milestone {
        milestone.reach();
    }
}

impl wormhole_ptx::Milestones for Milestones {
    fn begun(&self) {
        reach(self.begun.as_ref());
        if self.at_block_start {
            reach(self.programmatic.as_ref());
        }
    }

    fn triggered(&self) {
        reach(self.programmatic.as_ref());
    }
}
