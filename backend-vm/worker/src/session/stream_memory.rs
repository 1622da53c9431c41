//! Memory operations and attributes of streams.

use wormhole_api::{
    CuResult, Items, MemoryOperation as WireOperation, StreamMemory, StreamSetAttribute,
};
use wormhole_device::{CuError, LaunchAttribute, MemoryOperation, MemoryOperationKind};

use super::{Session, to_result};

/// `CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW`: an address, and the bytes from there on.
const ACCESS_POLICY_WINDOW: u32 = 1;
/// Attributes of a stream whose value is plain numbers: synchronization policy, priority, memory synchronization
/// domain map and domain, scheduling for NVLink.
const PLAIN: &[u32] = &[3, 8, 9, 10, 16];

impl Session {
    pub(super) fn memory_operations(&mut self, message: &StreamMemory<'_>) -> Result<(), CuResult> {
        let mut operations = std::mem::take(&mut self.memory_operations);
        let made = self
            .read_memory_operations(message.operations, &mut operations)
            .and_then(|()| {
                let stream = self.stream(message.stream)?.raw;
                self.done(self.device.memory_operations(stream, &operations))
            });
        self.memory_operations = operations;
        made
    }

    /// The operations as a device is to make them: each names a word that the session may name.
    pub(super) fn read_memory_operations(
        &self,
        wire: Items<'_, WireOperation>,
        operations: &mut Vec<MemoryOperation>,
    ) -> Result<(), CuResult> {
        operations.clear();
        for operation in wire.iter() {
            let Some(kind) = MemoryOperationKind::new(operation.kind) else {
                return Err(CuResult::INVALID_VALUE);
            };
            let width = kind.width();
            if operation.flags & !kind.flags() != 0 {
                return Err(CuResult::INVALID_VALUE);
            }
            if width > 0 {
                if !operation.address.is_multiple_of(width) {
                    return Err(self.invalid_address());
                }
                self.place(operation.address, width)?;
            }
            operations.push(MemoryOperation {
                kind,
                flags: operation.flags,
                address: operation.address,
                value: operation.value,
            });
        }
        Ok(())
    }

    pub(super) fn set_stream_attribute(
        &self,
        message: &StreamSetAttribute,
    ) -> Result<(), CuResult> {
        let stream = self.stream(message.stream)?.raw;
        let attribute = LaunchAttribute::new(message.id, message.value);
        if message.id == ACCESS_POLICY_WINDOW {
            self.check_policy_window(&attribute)?;
        } else if !PLAIN.contains(&message.id) {
            return Err(to_result(CuError::NOT_SUPPORTED));
        }
        self.done(self.device.set_stream_attribute(stream, &attribute))
    }

    /// A window lies in memory of the session, or is empty.
    fn check_policy_window(&self, attribute: &LaunchAttribute) -> Result<(), CuResult> {
        let words = attribute.value.as_chunks::<8>().0;
        let [address, bytes] = [0, 1].map(|index| u64::from_le_bytes(words[index]));
        if bytes == 0 {
            return Ok(());
        }
        self.place(address, bytes).map(drop)
    }
}
