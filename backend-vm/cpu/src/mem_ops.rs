//! Stream memory operations: waits for words in memory, and writes (`cuStreamWaitValue`, `cuStreamWriteValue`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use wormhole_device::constants::launch_attribute::{
    ACCESS_POLICY_WINDOW, MEM_SYNC_DOMAIN, MEM_SYNC_DOMAIN_MAP, NVLINK_UTIL_CENTRIC_SCHEDULING,
    PRIORITY, SYNCHRONIZATION_POLICY,
};
use wormhole_device::{
    CuError, LaunchAttribute, MemOps, MemoryOperation, MemoryOperationKind, RawStream, Result,
    condition,
};

use crate::device::CpuDevice;
use crate::memory::{Memory, Use, pointer};
use crate::scheduler::{Outcome, Work};

/// Attributes of streams.
const STREAM_ATTRIBUTES: [u32; 6] = [
    ACCESS_POLICY_WINDOW,
    SYNCHRONIZATION_POLICY,
    PRIORITY,
    MEM_SYNC_DOMAIN_MAP,
    MEM_SYNC_DOMAIN,
    NVLINK_UTIL_CENTRIC_SCHEDULING,
];

/// Refuses invalid operations.
pub fn check(memory: &Memory, operation: &MemoryOperation) -> Result<()> {
    let width = operation.width();
    if !operation.has_valid_flags() {
        return Err(CuError::INVALID_VALUE);
    }
    if width == 0 {
        return Ok(());
    }
    if !operation.address.is_multiple_of(width) {
        return Err(CuError::INVALID_VALUE);
    }
    memory.check(operation.address, width, Use::Write)
}

/// Executes checked operations in order, from `next` on. Stops behind a wait that is not fulfilled, and returns it.
pub fn advance(operations: &[MemoryOperation], next: &mut usize) -> Option<MemoryOperation> {
    while let Some(operation) = operations.get(*next) {
        *next += 1;
        match operation.kind {
            MemoryOperationKind::Wait32 | MemoryOperationKind::Wait64 => {
                if !is_fulfilled(operation, load(operation)) {
                    return Some(*operation);
                }
            }
            MemoryOperationKind::Write32 | MemoryOperationKind::Write64 => store(operation),
            MemoryOperationKind::Barrier => fence(Ordering::SeqCst),
        }
    }
    None
}

/// Returns the outcome that continues once a wait in this memory is fulfilled.
pub fn awaited(wait: MemoryOperation, memory: Arc<Memory>) -> Outcome {
    Outcome::When(Box::new(move || {
        let _mapped = &memory;
        is_fulfilled(&wait, load(&wait))
    }))
}

fn load(operation: &MemoryOperation) -> u64 {
    let word = pointer(operation.address);
    // SAFETY: the word was checked to be aligned, in memory of the device or in a registered range, which
    // stays mapped until the work before its unregistration is complete; other sides access it atomically.
    // SYNC POINT: stream word. The writer's earlier writes are visible behind the wait.
    unsafe {
        match operation.width() {
            4 => AtomicU32::from_ptr(word.cast())
                .load(Ordering::Acquire)
                .into(),
            _ => AtomicU64::from_ptr(word.cast()).load(Ordering::Acquire),
        }
    }
}

fn store(operation: &MemoryOperation) {
    let word = pointer(operation.address);
    let [low, _] = halves(operation.value);
    // SAFETY: as in `load`.
    // SYNC POINT: stream word. A thread that reads the value sees all writes of the work before it.
    unsafe {
        match operation.width() {
            4 => AtomicU32::from_ptr(word.cast()).store(low, Ordering::Release),
            _ => AtomicU64::from_ptr(word.cast()).store(operation.value, Ordering::Release),
        }
    }
}

fn halves(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [
        u32::from_le_bytes([a, b, c, d]),
        u32::from_le_bytes([e, f, g, h]),
    ]
}

/// Returns true if a word fulfils a wait's condition (`CUstreamWaitValue_flags`).
fn is_fulfilled(operation: &MemoryOperation, word: u64) -> bool {
    let narrow = operation.width() == 4;
    let [low, _] = halves(operation.value);
    let value = if narrow {
        u64::from(low)
    } else {
        operation.value
    };
    match operation.flags {
        condition::EQ => word == value,
        condition::AND => word & value != 0,
        condition::NOR if narrow => halves(!(word | value))[0] != 0,
        condition::NOR => !(word | value) != 0,
        // GEQ compares cyclically: the difference is not negative.
        _ if narrow => halves(word.wrapping_sub(value))[0] < 1 << 31,
        _ => word.wrapping_sub(value) < 1 << 63,
    }
}

impl MemOps for CpuDevice {
    fn memory_operations(&self, stream: RawStream, operations: &[MemoryOperation]) -> Result<()> {
        let context = self.context()?;
        operations
            .iter()
            .try_for_each(|operation| check(&self.memory, operation))?;
        let memory = Arc::clone(&self.memory);
        let operations = Box::<[MemoryOperation]>::from(operations);
        let bytes = size_of_val(&*operations);
        let mut next = 0;
        let work = Work::of_steps(move |_| {
            let wait = advance(&operations, &mut next);
            Ok(wait.map_or(Outcome::Complete, |wait| awaited(wait, Arc::clone(&memory))))
        });
        context.scheduler.submit_with(stream, bytes, work).map(drop)
    }

    /// Accepts the known attributes as hints without effect: streams of the CPU device have no cache partitions, and
    /// their threads no priorities.
    fn set_stream_attribute(&self, stream: RawStream, attribute: &LaunchAttribute) -> Result<()> {
        self.context()?.scheduler.frontier(stream)?;
        if STREAM_ATTRIBUTES.contains(&attribute.id) {
            Ok(())
        } else {
            Err(CuError::INVALID_VALUE)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(kind: MemoryOperationKind, flags: u32, value: u64, word: u64) -> bool {
        let operation = MemoryOperation {
            kind,
            flags,
            address: 0,
            value,
        };
        !is_fulfilled(&operation, word)
    }

    #[test]
    fn conditions_are_those_of_the_driver() {
        use MemoryOperationKind::{Wait32, Wait64};
        assert!(!waits(Wait32, condition::GEQ, 5, 5));
        assert!(waits(Wait32, condition::GEQ, 5, 4));
        assert!(
            !waits(Wait32, condition::GEQ, u64::from(u32::MAX), 3),
            "the comparison is cyclic"
        );
        assert!(waits(Wait64, condition::GEQ, u64::from(u32::MAX), 3));
        assert!(!waits(Wait64, condition::GEQ, u64::MAX, 3));
        assert!(waits(Wait64, condition::EQ, 1 << 40, 0));
        assert!(
            !waits(Wait32, condition::EQ, 1 << 40, 0),
            "32 bits are compared"
        );
        assert!(waits(Wait32, condition::AND, 6, 9));
        assert!(!waits(Wait32, condition::AND, 6, 4));
        assert!(!waits(Wait32, condition::NOR, 0xFFFF_FFF0, 7));
        assert!(waits(Wait32, condition::NOR, 0xFFFF_FFF0, 15));
        assert!(!waits(Wait64, condition::NOR, 0xFFFF_FFF0, 15));
    }
}
