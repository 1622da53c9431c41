//! Counters of this process's calls, by class. Threads count on different cache lines.

use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::Class;

use crate::thread;

const CLASSES: usize = 5;
const SHARDS: usize = 32;

#[derive(Debug)]
#[repr(align(128))]
struct Shard([AtomicU64; CLASSES]);

static COUNTS: [Shard; SHARDS] = [const { Shard([const { AtomicU64::new(0) }; CLASSES]) }; SHARDS];

const LOCAL: usize = 0;
const UNSUPPORTED: usize = 4;

fn place(class: Class) -> usize {
    match class {
        Class::Local => LOCAL,
        Class::Record => 1,
        Class::Request => 2,
        Class::Fence => 3,
        Class::Unsupported(_) => UNSUPPORTED,
    }
}

/// Counts one call.
#[inline]
pub fn count(class: Class) {
    let shard = usize::from(thread::number()) % SHARDS;
    COUNTS[shard].0[place(class)].fetch_add(1, Ordering::Relaxed);
}

fn sum(place: usize) -> u64 {
    COUNTS
        .iter()
        .map(|shard| shard.0[place].load(Ordering::Relaxed))
        .sum()
}

/// Returns the number of calls that never left the guest.
pub fn local() -> u64 {
    sum(LOCAL) + sum(UNSUPPORTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_all_threads_are_counted() {
        let before = sum(place(Class::Fence));
        std::thread::scope(|scope| {
            for _ in 0..2 * SHARDS {
                scope.spawn(|| (0..100).for_each(|_| count(Class::Fence)));
            }
        });
        assert_eq!(sum(place(Class::Fence)) - before, 2 * SHARDS as u64 * 100);
    }
}
