//! Work of a stream, in one step or in several.

use std::fmt;
use std::sync::Arc;

use wormhole_device::Result;

use super::{Milestone, Point, Shared};

/// A condition that becomes true without a notification: by a word in memory, another process, or
/// another device.
pub type Condition = Box<dyn FnMut() -> bool + Send>;

/// Result of a step.
pub enum Outcome {
    /// The work is complete.
    Complete,
    /// The work needs a further step after these points.
    After(Vec<Point>),
    /// The work needs a further step once this is true.
    When(Condition),
    /// The work needs a further step that may run a kernel.
    Kernel,
}

type Step = dyn FnMut(&Turn<'_>) -> Result<Outcome> + Send;

/// A piece of work. Its steps do not wait, except that kernels may wait for each other.
pub struct Work {
    pub(super) step: Box<Step>,
    /// Whether its next step runs a kernel.
    pub(super) kernel: bool,
}

impl Work {
    /// Creates work of one step that ends by itself.
    pub fn new(step: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        let mut step = Some(step);
        Self::of_steps(move |_| {
            step.take().map_or(Ok(()), |step| step())?;
            Ok(Outcome::Complete)
        })
    }

    /// Creates work of one step that may run for an unlimited time.
    pub fn kernel(step: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self {
            kernel: true,
            ..Self::new(step)
        }
    }

    /// Creates work that does nothing: a position in the stream's order.
    pub fn nothing() -> Self {
        Self::new(|| Ok(()))
    }

    /// Creates work that repeats `step` until it returns [`Outcome::Complete`].
    pub fn of_steps(step: impl FnMut(&Turn<'_>) -> Result<Outcome> + Send + 'static) -> Self {
        Self {
            step: Box::new(step),
            kernel: false,
        }
    }

    /// Creates work that completes once the condition is true.
    pub fn when(condition: impl FnMut() -> bool + Send + 'static) -> Self {
        let mut condition: Option<Condition> = Some(Box::new(condition));
        Self::of_steps(move |_| Ok(condition.take().map_or(Outcome::Complete, Outcome::When)))
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("kernel", &self.kernel)
            .finish_non_exhaustive()
    }
}

/// One step's view of the scheduler.
pub struct Turn<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) kernel: bool,
}

impl Turn<'_> {
    /// Returns true if this step may run kernels.
    pub fn may_run_kernels(&self) -> bool {
        self.kernel
    }

    /// Begins work beside the stream's work and returns the point where it is complete.
    ///
    /// # Errors
    /// Too much work is queued, or the context is dead.
    pub fn begin(&self, work: Work) -> Result<Point> {
        self.shared.begin(work)
    }

    /// Fails with the sticky error if there is one.
    pub fn alive(&self) -> Result<()> {
        self.shared.alive()
    }

    /// Returns true if all points are reached.
    pub fn are_reached(&self, points: &[Point]) -> bool {
        points.is_empty() || {
            let state = self.shared.state.lock();
            points.iter().all(|point| state.reached(*point))
        }
    }

    /// Creates a milestone, whose point belongs to no visible stream.
    pub fn milestone(&self) -> Milestone {
        self.shared.milestone()
    }
}
