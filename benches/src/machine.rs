//! Describes the machine of a benchmark and calibrates its time stamp counter.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Machine and versions on which results depend.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
pub struct Machine {
    pub processor: String,
    pub processors: usize,
    pub kernel: String,
    pub wormhole: String,
}

impl Machine {
    pub fn read() -> Self {
        let field = |file: &str, key: &str| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            text.lines()
                .find_map(|line| {
                    line.strip_prefix(key)?
                        .split_once(':')
                        .map(|(_, value)| value.trim().to_owned())
                })
                .unwrap_or_default()
        };
        Self {
            processor: field("/proc/cpuinfo", "model name"),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            wormhole: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

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
