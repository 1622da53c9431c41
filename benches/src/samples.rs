//! Durations from the time stamp counter.

use std::time::{Duration, Instant};

/// Measures the period of the time stamp counter in nanoseconds against the system's clock.
pub fn timestamp_period() -> f64 {
    // SAFETY: RDTSC has no side effects.
    let stamp = || unsafe { core::arch::x86_64::_rdtsc() };
    let (clock, begin) = (Instant::now(), stamp());
    while clock.elapsed() < Duration::from_millis(50) {
        std::hint::spin_loop();
    }
    let (elapsed, steps) = (clock.elapsed(), stamp() - begin);
    #[expect(clippy::cast_precision_loss, reason = "a duration of milliseconds")]
    let steps = steps as f64;
    elapsed.as_secs_f64() * 1e9 / steps
}

/// Returns nanoseconds for time stamp differences. `period` is the nanoseconds of one step, and each difference covers
/// `parts` operations.
pub fn nanoseconds(stamps: &[u64], period: f64, parts: f64) -> Vec<f64> {
    #[expect(clippy::cast_precision_loss, reason = "durations far below 2^52")]
    let one = |stamp: &u64| *stamp as f64 * period / parts;
    stamps.iter().map(one).collect()
}
