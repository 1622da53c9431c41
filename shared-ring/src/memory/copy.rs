//! Copies into and out of shared memory.

/// Length from which `rep movsb` is faster than a loop over words: its startup costs about as much
/// as copying this many bytes by words.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const BULK: usize = 512;

/// Copies `source` to shared memory.
///
/// # Safety
/// `destination..destination + source.len()` is mapped and writable, and no other thread of this
/// process accesses it at the same time.
#[inline]
pub(super) unsafe fn copy_in(destination: *mut u8, source: &[u8]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if source.len() >= BULK {
        // SAFETY: both ranges are valid by the contract above, and a private slice never overlaps
        // shared memory. The direction flag is clear in every Rust function.
        unsafe { move_bytes(destination, source.as_ptr(), source.len()) };
        return;
    }
    let mut done = 0;
    if destination.addr().is_multiple_of(8) {
        while source.len() - done >= 8 {
            // SAFETY: eight bytes remain on both sides; the destination is aligned, the source is
            // read unaligned.
            unsafe {
                let word = source.as_ptr().add(done).cast::<u64>().read_unaligned();
                destination.add(done).cast::<u64>().write_volatile(word);
            }
            done += 8;
        }
    }
    for (index, byte) in source.iter().enumerate().skip(done) {
        // SAFETY: `index` is below the length of the range.
        unsafe { destination.add(index).write_volatile(*byte) };
    }
}

/// Copies shared memory to `destination`.
///
/// # Safety
/// `source..source + destination.len()` is mapped and readable, and no other thread of this process
/// writes it at the same time.
#[inline]
pub(super) unsafe fn copy_out(source: *const u8, destination: &mut [u8]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if destination.len() >= BULK {
        // SAFETY: as in `copy_in`.
        unsafe { move_bytes(destination.as_mut_ptr(), source, destination.len()) };
        return;
    }
    let mut done = 0;
    if source.addr().is_multiple_of(8) {
        while destination.len() - done >= 8 {
            // SAFETY: eight bytes remain on both sides; the source is aligned, the destination is
            // written unaligned.
            unsafe {
                let word = source.add(done).cast::<u64>().read_volatile();
                destination
                    .as_mut_ptr()
                    .add(done)
                    .cast::<u64>()
                    .write_unaligned(word);
            }
            done += 8;
        }
    }
    for (index, byte) in destination.iter_mut().enumerate().skip(done) {
        // SAFETY: `index` is below the length of the range.
        *byte = unsafe { source.add(index).read_volatile() };
    }
}

/// Copies with one `rep movsb` in inline assembly, so that the compiler cannot read shared bytes a
/// second time.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn move_bytes(destination: *mut u8, source: *const u8, length: usize) {
    // SAFETY: the caller promises that both ranges are valid.
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rcx") length => _,
            inout("rdi") destination => _,
            inout("rsi") source => _,
            options(nostack, preserves_flags),
        );
    }
}
