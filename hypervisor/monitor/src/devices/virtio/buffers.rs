//! Finds the guest memory of a driver's buffers, and passes it to the kernel without a copy.

use virtio_queue::desc::split::Descriptor;
use vm_memory::volatile_memory::PtrGuardMut;
use vm_memory::{GuestMemoryBackend, VolatileSlice};

use crate::ram::GuestRam;

/// Appends the guest memory of the descriptors to `slices`, in order, and returns its bytes; `None` if a part of it is not
/// RAM.
pub fn append_slices<'m>(
    memory: &'m GuestRam,
    descriptors: impl Iterator<Item = Descriptor>,
    slices: &mut Vec<VolatileSlice<'m>>,
) -> Option<usize> {
    let mut bytes = 0;
    for descriptor in descriptors {
        let len = descriptor.len() as usize;
        for slice in memory.get_slices(descriptor.addr(), len) {
            slices.push(slice.ok()?);
        }
        bytes += len;
    }
    Some(bytes)
}

/// Returns the guest memory of the descriptors, in order; `None` if a part of it is not RAM.
pub fn slices<'m>(
    memory: &'m GuestRam,
    descriptors: impl Iterator<Item = Descriptor>,
) -> Option<Vec<VolatileSlice<'m>>> {
    let mut slices = Vec::new();
    append_slices(memory, descriptors, &mut slices)?;
    Some(slices)
}

/// Returns guards, which keep the ranges mapped.
pub fn guards(slices: &[VolatileSlice<'_>]) -> Vec<PtrGuardMut> {
    slices.iter().map(VolatileSlice::ptr_guard_mut).collect()
}

/// Returns a vector for the kernel of the guarded ranges.
pub fn vector(guards: &[PtrGuardMut]) -> Vec<libc::iovec> {
    let part = |guard: &PtrGuardMut| libc::iovec {
        iov_base: guard.as_ptr().cast(),
        iov_len: guard.len(),
    };
    guards.iter().map(part).collect()
}
