//! Green contexts: partitions of the multiprocessors that the device reports. Partitions do not restrict work: a green
//! context's work may run on more processors, as it may on a GPU.

use std::collections::HashMap;

use wormhole_device::constants::resource_split_flags::{
    IGNORE_SM_COSCHEDULING, MAX_POTENTIAL_CLUSTER_SIZE,
};
use wormhole_device::{
    CuError, DriverCalls, GreenContexts, Multiprocessors, RawGreenContext, RawStream, Result, Split,
};
use wormhole_lock::Mutex;

use crate::device::CpuDevice;

/// Granularity of a split in multiprocessors: by default, and with `IGNORE_SM_COSCHEDULING`.
const TOGETHER: u32 = 8;
const APART: u32 = 2;
/// Flags that exclude each other.
const BOTH: u32 = IGNORE_SM_COSCHEDULING | MAX_POTENTIAL_CLUSTER_SIZE;

/// Green contexts of a context: the last number, and the multiprocessors of each.
#[derive(Debug, Default)]
pub struct GreenContextTable(Mutex<(u64, HashMap<u64, u32>)>);

impl GreenContextTable {
    fn count(&self, green: RawGreenContext) -> Result<u32> {
        let green_contexts = self.0.lock();
        let found = green_contexts.1.get(&green.0).copied();
        found.ok_or(CuError::INVALID_CONTEXT)
    }
}

/// Returns a resource of multiprocessors that can be split.
fn whole(count: u32) -> Multiprocessors {
    let unit = TOGETHER.min(count);
    Multiprocessors {
        count,
        least: unit,
        alignment: unit,
        described: [0; 18],
    }
}

/// Returns a resource made by a split.
fn part(count: u32) -> Multiprocessors {
    Multiprocessors {
        least: 0,
        alignment: 0,
        ..whole(count)
    }
}

impl GreenContexts for CpuDevice {
    fn multiprocessors(&self, green: Option<RawGreenContext>) -> Result<Multiprocessors> {
        let context = self.context()?;
        let count = match green {
            Some(green) => context.green_contexts.count(green)?,
            None => self.multiprocessor_count(),
        };
        Ok(whole(count))
    }

    fn split(&self, from: &Multiprocessors, flags: u32, least: u32, groups: u32) -> Result<Split> {
        self.context()?;
        if flags & BOTH == BOTH {
            return Err(CuError::INVALID_VALUE);
        }
        if from.least == 0 || least > from.count {
            return Err(CuError::INVALID_RESOURCE_CONFIGURATION);
        }
        let unit = if flags & IGNORE_SM_COSCHEDULING != 0 {
            APART
        } else {
            TOGETHER
        };
        let size = least.max(1).next_multiple_of(unit).min(from.count);
        let possible = from.count / size;
        let made = possible.min(groups);
        let left = from.count - made * size;
        Ok(Split {
            possible,
            groups: vec![part(size); made as usize],
            rest: (groups != 0 && left != 0).then(|| part(left)),
        })
    }

    fn create_green(&self, parts: &[Multiprocessors]) -> Result<RawGreenContext> {
        let context = self.context()?;
        let count = match parts {
            [] => self.multiprocessor_count(),
            parts => parts.iter().map(|part| part.count).sum(),
        };
        let mut green_contexts = context.green_contexts.0.lock();
        green_contexts.0 += 1;
        let number = green_contexts.0;
        green_contexts.1.insert(number, count);
        Ok(RawGreenContext(number))
    }

    fn destroy_green(&self, green: RawGreenContext) -> Result<()> {
        let context = self.context()?;
        let mut green_contexts = context.green_contexts.0.lock();
        let gone = green_contexts.1.remove(&green.0);
        gone.map(drop).ok_or(CuError::INVALID_CONTEXT)
    }

    fn green_stream(&self, green: RawGreenContext, flags: u32, priority: i32) -> Result<RawStream> {
        self.context()?.green_contexts.count(green)?;
        self.stream_create(flags, priority)
    }
}
