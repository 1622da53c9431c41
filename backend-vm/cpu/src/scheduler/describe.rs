//! Describes the queues of a context, for people to read.

use super::{Scheduler, State, Stream};

/// Most streams that are described individually.
const MOST: usize = 32;

impl State {
    /// Describes the state of a stream with incomplete work, and the point that its front waits for.
    fn place(&self, id: u64, stream: &Stream) -> String {
        // A thread removes the front from the queue while it runs it. A milestone has no queue.
        let waiting = stream.queue.len() as u64;
        let front = match stream.queue.front() {
            Some(front) if waiting == stream.submitted - stream.completed => front,
            _ => return "its front runs".to_owned(),
        };
        if self.ready.contains(&id) || self.ready_kernels.contains(&id) {
            return "its front is ready and waits for a thread".to_owned();
        }
        let unreached = front.after.iter().find(|point| !self.reached(**point));
        match unreached {
            Some(point) => format!(
                "its front waits for stream {} to complete {} pieces, which has completed {}",
                point.stream,
                point.sequence,
                self.streams
                    .get(&point.stream)
                    .map_or(0, |stream| stream.completed)
            ),
            None => "its front waits for a condition that the watcher polls".to_owned(),
        }
    }
}

impl Scheduler {
    /// Returns a line for the threads, and one for each stream with incomplete work.
    pub fn describe(&self) -> Vec<String> {
        let state = self.shared.state.lock();
        let pending: Vec<(&u64, &Stream)> = state
            .streams
            .iter()
            .filter(|(_, stream)| stream.pending())
            .collect();
        let mut lines = vec![format!(
            "{} streams have work; {} threads, {} of them idle; {} kernels run; {} host threads wait",
            pending.len(),
            state.threads.len(),
            state.idle.len(),
            state.kernels,
            state.waiters,
        )];
        lines.extend(pending.iter().take(MOST).map(|(id, stream)| {
            format!(
                "stream {id}: {} of {} pieces of work are complete; {}",
                stream.completed,
                stream.submitted,
                state.place(**id, stream)
            )
        }));
        if pending.len() > MOST {
            lines.push(format!("and {} more streams", pending.len() - MOST));
        }
        lines
    }
}
