//! Vector clocks: the latest time of every thread that another thread is ordered after.

/// Number of threads of a part.
const PART: usize = 32;

/// Latest known time of each thread. A part without known times is absent.
#[derive(Debug, Clone, Default)]
pub(super) struct Clock(Vec<Option<Box<[u32; PART]>>>);

impl Clock {
    pub fn get(&self, thread: u32) -> u32 {
        let at = thread as usize;
        self.0
            .get(at / PART)
            .and_then(Option::as_ref)
            .map_or(0, |part| part[at % PART])
    }

    pub fn set(&mut self, thread: u32, time: u32) {
        let at = thread as usize;
        if self.0.len() <= at / PART {
            self.0.resize(at / PART + 1, None);
        }
        let part = self.0[at / PART].get_or_insert_with(|| Box::new([0; PART]));
        part[at % PART] = time;
    }

    /// Joins another clock: keeps the later of both times for each thread.
    pub fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), None);
        }
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            match (own, other) {
                (_, None) => {}
                (own @ None, other) => own.clone_from(other),
                (Some(own), Some(other)) => {
                    for (own, other) in own.iter_mut().zip(other.iter()) {
                        *own = (*own).max(*other);
                    }
                }
            }
        }
    }
}
