//! Memory operations and attributes of streams.

use wormhole_api::ctypes::CUstreamBatchMemOpParams;
use wormhole_api::limits::MEMORY_OPERATIONS;
use wormhole_device::{
    CuError, LaunchAttribute, MemOps, MemoryOperation, MemoryOperationKind, RawStream, Result,
};

use crate::device::{CudaDevice, stream};

/// Converts an operation to the driver's form.
pub fn parameters(operation: &MemoryOperation) -> CUstreamBatchMemOpParams {
    let kind = CUstreamBatchMemOpParams {
        operation: operation.kind.to_wire(),
        ..CUstreamBatchMemOpParams::default()
    };
    match operation.kind {
        MemoryOperationKind::Barrier => CUstreamBatchMemOpParams {
            barrier_flags: operation.flags,
            ..kind
        },
        _ => CUstreamBatchMemOpParams {
            address: operation.address,
            value64: operation.value,
            flags: operation.flags,
            ..kind
        },
    }
}

impl MemOps for CudaDevice {
    fn memory_operations(&self, on: RawStream, operations: &[MemoryOperation]) -> Result<()> {
        let mut list = [CUstreamBatchMemOpParams::default(); MEMORY_OPERATIONS];
        if operations.len() > MEMORY_OPERATIONS {
            return Err(CuError::INVALID_VALUE);
        }
        for (place, operation) in list.iter_mut().zip(operations) {
            *place = parameters(operation);
        }
        let count = u32::try_from(operations.len()).map_err(|_| CuError::INVALID_VALUE)?;
        // SAFETY: the list has `count` entries; each names a word that the caller has checked to be in
        // device or registered memory, which has one address on both sides.
        unsafe {
            self.driver()
                .cuStreamBatchMemOp_v2(stream(on), count, list.as_ptr(), 0)
        }
    }

    fn set_stream_attribute(&self, on: RawStream, attribute: &LaunchAttribute) -> Result<()> {
        // SAFETY: the caller passes a live stream and an attribute of plain numbers; the value has the
        // bytes of a `CUstreamAttrValue`, aligned as that.
        unsafe {
            self.driver().cuStreamSetAttribute(
                stream(on),
                attribute.id,
                (&raw const attribute.value).cast(),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_has_its_flags_where_the_driver_reads_them() {
        let operation = |kind, flags| MemoryOperation {
            kind,
            flags,
            address: 0x1000,
            value: 7,
        };
        let words = |operation| {
            let made = parameters(operation);
            let first = (made.operation, made.barrier_flags);
            (first, made.address, made.value64, made.flags)
        };
        let wait = operation(MemoryOperationKind::Wait64, 3);
        assert_eq!(words(&wait), ((4, 0), 0x1000, 7, 3));
        let barrier = operation(MemoryOperationKind::Barrier, 1);
        assert_eq!(words(&barrier), ((6, 1), 0, 0, 0));
    }
}
