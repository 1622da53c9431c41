//! Memory operations and attributes of streams.

use wormhole_device::{
    CuError, LaunchAttribute, MemoryOperation, MemoryOperationKind, RawStream, Result, StreamMemory,
};

use crate::device::{CudaDevice, stream};

/// Operations of one call: the driver takes no more.
const MOST: usize = 255;

/// The operation as a `CUstreamBatchMemOpParams`.
pub fn parameters(operation: &MemoryOperation) -> [u64; 6] {
    let kind = u64::from(operation.kind.operation());
    let flags = u64::from(operation.flags);
    match operation.kind {
        MemoryOperationKind::Barrier => [kind | flags << 32, 0, 0, 0, 0, 0],
        _ => [kind, operation.address, operation.value, flags, 0, 0],
    }
}

impl StreamMemory for CudaDevice {
    fn memory_operations(&self, on: RawStream, operations: &[MemoryOperation]) -> Result<()> {
        let mut list = [[0; 6]; MOST];
        if operations.len() > MOST {
            return Err(CuError::INVALID_VALUE);
        }
        for (place, operation) in list.iter_mut().zip(operations) {
            *place = parameters(operation);
        }
        let count = u32::try_from(operations.len()).map_err(|_| CuError::INVALID_VALUE)?;
        // SAFETY: the list has `count` entries; each names a word that the caller has checked to be in
        // device or registered memory, which has one address on both sides.
        unsafe {
            self.driver
                .cuStreamBatchMemOp_v2(stream(on), count, list.as_mut_ptr(), 0)
        }
    }

    fn set_stream_attribute(&self, on: RawStream, attribute: &LaunchAttribute) -> Result<()> {
        // SAFETY: the caller passes a live stream and an attribute of plain numbers; the value has the
        // bytes of a `CUstreamAttrValue`, aligned as that.
        unsafe {
            self.driver
                .cuStreamSetAttribute(stream(on), attribute.id, &raw const attribute.value)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_laid_out_as_the_driver_reads_them() {
        let operation = |kind, flags| MemoryOperation {
            kind,
            flags,
            address: 0x1000,
            value: 7,
        };
        let wait = operation(MemoryOperationKind::Wait64, 3);
        assert_eq!(parameters(&wait), [4, 0x1000, 7, 3, 0, 0]);
        let barrier = operation(MemoryOperationKind::Barrier, 1);
        assert_eq!(parameters(&barrier), [6 | 1 << 32, 0, 0, 0, 0, 0]);
    }
}
