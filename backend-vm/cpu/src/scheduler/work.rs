//! Work: what a stream runs, in one step or in several.

use std::fmt;
use std::sync::Arc;

use wormhole_device::Result;

use super::{Milestone, Point, Shared};

/// Becomes true without a notice: a word in memory, another process, another device.
pub type Condition = Box<dyn FnMut() -> bool + Send>;

/// What work needs once it returns.
pub enum Outcome {
    /// Nothing: it is complete.
    Complete,
    /// A further step, after these points.
    After(Vec<Point>),
    /// A further step, once this is true.
    When(Condition),
    /// A further step, with the right to run a kernel.
    Kernel,
}

type Step = dyn FnMut(&Turn<'_>) -> Result<Outcome> + Send;

/// One piece of work. Its steps do not wait, except that kernels may wait for each other.
pub struct Work {
    pub(super) step: Box<Step>,
    /// Its next step runs a kernel.
    pub(super) kernel: bool,
}

impl Work {
    /// One step that ends by itself.
    pub fn new(step: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        let mut step = Some(step);
        Self::of_steps(move |_| {
            step.take().map_or(Ok(()), |step| step())?;
            Ok(Outcome::Complete)
        })
    }

    /// One step that may run for as long as it likes.
    pub fn kernel(step: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self {
            kernel: true,
            ..Self::new(step)
        }
    }

    /// No step: a place in the stream's order.
    pub fn nothing() -> Self {
        Self::new(|| Ok(()))
    }

    /// Steps until one says that the work is complete.
    pub fn of_steps(step: impl FnMut(&Turn<'_>) -> Result<Outcome> + Send + 'static) -> Self {
        Self {
            step: Box::new(step),
            kernel: false,
        }
    }

    /// Complete once the condition is true.
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
    /// Whether this step may run kernels.
    pub fn may_run_kernels(&self) -> bool {
        self.kernel
    }

    /// Begins work beside the stream's and returns the point where it is complete.
    ///
    /// # Errors
    /// Too much work is queued, or the context is dead.
    pub fn begin(&self, work: Work) -> Result<Point> {
        self.shared.begin(work)
    }

    /// `Err` with the sticky error.
    pub fn alive(&self) -> Result<()> {
        self.shared.alive()
    }

    /// Whether all points are reached.
    pub fn are_reached(&self, points: &[Point]) -> bool {
        points.is_empty() || {
            let state = self.shared.lock();
            points.iter().all(|point| state.reached(*point))
        }
    }

    /// A point of its own, like the end of a stream's only work.
    pub fn milestone(&self) -> Milestone {
        self.shared.milestone()
    }
}
