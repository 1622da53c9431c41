//! What a payload needs: an entry point, its parameter block, and a way to end.
//!
//! The monitor enters a payload at its ELF entry point in long mode at privilege level 3, with
//! RDI = address of this vCPU's parameter block (a page of 512 words that the host reads and
//! writes too) and RSI = number of the vCPU. There is no kernel: no system calls, no allocator, no
//! AVX. A payload ends by writing its status to a port; an exception ends it with an error that
//! tells where it was.
#![no_std]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::memory::SessionMemory;

/// The port that takes the exit status (`wormhole_monitor::EXIT_STATUS_PORT`).
const EXIT_STATUS_PORT: u16 = 0xf4;

/// Words in a parameter block.
pub const PARAMETERS: usize = 512;

/// The parameter block: words that payload and host share.
#[derive(Debug, Clone, Copy)]
pub struct Parameters(&'static [AtomicU64; PARAMETERS]);

impl Parameters {
    /// The block at `address`.
    ///
    /// # Safety
    /// `address` is what the monitor passed in RDI.
    pub unsafe fn at(address: u64) -> Self {
        // SAFETY: the monitor maps a page there for as long as the payload runs, and it is only
        // accessed as atomic words.
        Self(unsafe { &*(address as *const [AtomicU64; PARAMETERS]) })
    }

    /// Reads a word; SYNC POINT with the host's store.
    pub fn load(self, index: usize) -> u64 {
        self.0[index].load(Ordering::Acquire)
    }

    /// Writes a word; SYNC POINT with the host's load.
    pub fn store(self, index: usize, value: u64) {
        self.0[index].store(value, Ordering::Release);
    }
}

/// The word at `address`, shared with somebody else.
///
/// # Safety
/// The host named `address` as that of a mapped, aligned word in the window.
pub unsafe fn shared_word(address: u64) -> &'static AtomicU64 {
    // SAFETY: see above; the window stays mapped for as long as the payload runs.
    unsafe { &*(address as *const AtomicU64) }
}

/// The session segment at `address`; a payload that is given none cannot go on.
///
/// # Safety
/// The host named `address` as that of a session segment, mapped for as long as the payload runs.
pub unsafe fn session(address: u64) -> SessionMemory {
    let base = address as *mut u8;
    // SAFETY: see above.
    match unsafe { SessionMemory::new(base, SEGMENT_BYTES) } {
        Ok(session) => session,
        Err(_) => exit(NO_SESSION_STATUS),
    }
}

/// Ends this vCPU's program.
pub fn exit(status: u32) -> ! {
    loop {
        // SAFETY: the monitor runs payloads with an I/O privilege level that allows ports, and ends
        // the vCPU at this write.
        unsafe {
            asm!("out dx, eax", in("dx") EXIT_STATUS_PORT, in("eax") status, options(nomem, nostack));
        }
    }
}

/// The processor's time stamp counter.
pub fn timestamp() -> u64 {
    // SAFETY: reading the counter has no effect; the monitor leaves it readable in user mode.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Defines the entry point: `entry!(main)` where `fn main(parameters: Parameters, vcpu: u64) -> u32`.
#[macro_export]
macro_rules! entry {
    ($main:path) => {
        #[unsafe(no_mangle)]
        extern "C" fn _start(parameters: u64, vcpu: u64) -> ! {
            // SAFETY: the monitor passed the address of the parameter block.
            let parameters = unsafe { $crate::Parameters::at(parameters) };
            let main: fn($crate::Parameters, u64) -> u32 = $main;
            $crate::exit(main(parameters, vcpu))
        }

        #[panic_handler]
        fn on_panic(_: &core::panic::PanicInfo<'_>) -> ! {
            $crate::exit($crate::PANIC_STATUS)
        }
    };
}

/// The precompiled `core` names its unwinder although nothing here unwinds.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// The status of a payload whose session segment is not one.
pub const NO_SESSION_STATUS: u32 = 0xbad;

/// The status of a payload that panicked.
pub const PANIC_STATUS: u32 = 0xdead;
