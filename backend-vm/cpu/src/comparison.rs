//! Comparison of device memory.

use std::sync::Arc;

use wormhole_device::{Comparison, CuError, Device, RawStream, Result};
use wormhole_lock::Mutex;

use crate::CpuDevice;
use crate::aperture::to_usize;
use crate::memory::{Use, pointer};
use crate::scheduler::Work;

impl CpuDevice {
    /// As [`VirtualMemory::differing`](wormhole_device::VirtualMemory::differing).
    pub(crate) fn compared(&self, comparison: &Comparison, stream: RawStream) -> Result<Vec<bool>> {
        let parts = u64::from(comparison.parts()?);
        let part = Comparison::PART;
        let (ranges, bytes) = (comparison.ranges, comparison.bytes);
        let context = self.context()?;
        let used = ranges.map(|start| (start, bytes, Use::Read));
        if !self.reaches(&context, stream, &used)? {
            return Err(CuError::ILLEGAL_ADDRESS);
        }
        let memory = Arc::clone(&self.memory);
        let found = Arc::new(Mutex::new(Vec::new()));
        let results = Arc::clone(&found);
        let work = move || {
            let _mapped = memory;
            let differs = |index: u64| {
                let [first, second] = ranges.map(|start| pointer(start + index * part));
                // SAFETY: both ranges were checked to lie in memory of the device or in registered ranges, which stay mapped
                // until the work before their unregistration is complete. The C library's function is used because other
                // threads may write to the memory meanwhile.
                unsafe { libc::memcmp(first.cast(), second.cast(), to_usize(part)) != 0 }
            };
            *results.lock() = (0..parts).map(differs).collect();
            Ok(())
        };
        context.scheduler.submit(stream, Work::new(work))?;
        self.synchronize_stream(stream)?;
        Ok(std::mem::take(&mut *found.lock()))
    }
}
