//! Memory operations and attributes of streams.

use std::sync::atomic::Ordering;

use wormhole_api::{
    CuResult, Items, MemoryOperation as WireOperation, Outcome, Serve, Served, StreamMemory,
    StreamSetAttribute,
};
use wormhole_device::{MemoryOperation, MemoryOperationKind};

use super::attributes::Scope;
use super::{Call, Session};

impl Serve<StreamMemory<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &StreamMemory<'_>) -> Outcome<()> {
        let mut operations = std::mem::take(&mut self.scratch.memory_operations);
        let made = self
            .read_memory_operations(message.operations, &mut operations)
            .and_then(|()| {
                let stream = self.objects.stream(call, message.stream)?;
                self.done(stream.device.memory_operations(stream.raw, &operations))
            });
        self.scratch.memory_operations = operations;
        made.map(Served::Done)
    }
}

impl Session {
    /// Translates the operations for the device. Each must name a word that the session may name.
    pub(super) fn read_memory_operations(
        &self,
        wire: Items<'_, WireOperation>,
        operations: &mut Vec<MemoryOperation>,
    ) -> Result<(), CuResult> {
        operations.clear();
        for operation in wire.iter() {
            let Some(kind) = MemoryOperationKind::from_wire(operation.kind) else {
                return Err(CuResult::INVALID_VALUE);
            };
            let operation = MemoryOperation {
                kind,
                flags: operation.flags,
                address: operation.address,
                value: operation.value,
            };
            let width = operation.width();
            if !operation.has_valid_flags() {
                return Err(CuResult::INVALID_VALUE);
            }
            if width > 0 {
                if !operation.address.is_multiple_of(width) {
                    return Err(self.addresses.refused());
                }
                self.addresses.place(operation.address, width)?;
            }
            operations.push(operation);
        }
        Ok(())
    }
}

impl Serve<StreamSetAttribute> for Session {
    fn serve(&mut self, call: &Call, message: &StreamSetAttribute) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        if let Some(attribute) = self.admit_attribute(Scope::Stream, message.id, message.value)? {
            stream.has_attributes.store(true, Ordering::Relaxed);
            self.done(stream.device.set_stream_attribute(stream.raw, &attribute))?;
        }
        Ok(Served::Done(()))
    }
}
