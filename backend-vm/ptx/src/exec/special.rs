//! Values of special registers.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::launch::Launch;
use crate::alu::{LANES, Row};
use crate::decode::insn::Special;

/// Returns the nanoseconds of the clock behind `%clock64`, since the process first read it.
pub(super) fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = START.get_or_init(Instant::now);
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the nanoseconds of the wall clock, for `%globaltimer`.
fn wall() -> u64 {
    let elapsed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the value of a special register in all lanes of a warp.
pub(super) fn read(special: Special, launch: &Launch<'_>, block: [u32; 3], warp: u32) -> Row {
    let per_lane = |f: &dyn Fn(u32) -> u32| -> Row {
        let mut row = [0; LANES];
        for (lane, value) in (0..).zip(&mut row) {
            *value = u64::from(f(lane));
        }
        row
    };
    let low = u64::from(u32::MAX);
    let extent = |extents: [u32; 3], axis: u8, beyond: u32| {
        u64::from(extents.get(usize::from(axis)).copied().unwrap_or(beyond))
    };
    let config = launch.config;
    let value = match special {
        Special::Tid(axis) => {
            let axis = usize::from(axis);
            return per_lane(&|lane| {
                launch
                    .thread_index(warp * 32 + lane)
                    .get(axis)
                    .copied()
                    .unwrap_or(0)
            });
        }
        Special::LaneId => return per_lane(&|lane| lane),
        Special::LaneMaskEq => return per_lane(&|lane| 1 << lane),
        Special::LaneMaskLt => return per_lane(&|lane| (1 << lane) - 1),
        Special::LaneMaskLe => return per_lane(&|lane| u32::MAX >> (31 - lane)),
        Special::LaneMaskGe => return per_lane(&|lane| u32::MAX << lane),
        Special::LaneMaskGt => return per_lane(&|lane| (u32::MAX << lane) << 1),
        Special::Ntid(axis) => extent(config.block, axis, 1),
        Special::Ctaid(axis) => extent(block, axis, 0),
        Special::Nctaid(axis) => extent(config.grid, axis, 1),
        Special::WarpId => u64::from(warp),
        Special::NwarpId => u64::from(launch.warps()),
        Special::SmId => 0,
        Special::NsmId => 1,
        Special::GridId => config.grid_id,
        Special::Clock => now() & low,
        Special::ClockHi => now() >> 32,
        Special::Clock64 => now(),
        Special::GlobalTimer => wall(),
        Special::GlobalTimerLo => wall() & low,
        Special::GlobalTimerHi => wall() >> 32,
        Special::DynamicShared => u64::from(config.dynamic_shared),
        Special::TotalShared => launch.shared_bytes as u64,
        Special::EnvReg(low_half) => {
            if low_half {
                config.grid_workspace & low
            } else {
                config.grid_workspace >> 32
            }
        }
        Special::Constant(value) => value,
    };
    [value; LANES]
}
