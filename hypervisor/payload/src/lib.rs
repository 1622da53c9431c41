//! Runtime of payloads: entry point, parameter block, access to the window, and exit.
//!
//! The monitor enters a payload at its ELF entry point in long mode at privilege level 3, with
//! RDI = address of this vCPU's parameter block (a page of 512 words shared with the host) and
//! RSI = number of the vCPU. There is no kernel: no system calls, no allocator, no AVX. A payload
//! ends by writing its status to a port. An exception ends it with an error that contains the
//! registers.
#![no_std]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::handle::{Function, Stream};
use wormhole_api::{Handle, Items, LaunchKernel};
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::memory::{SessionMemory, WindowMemory};

/// Port of the exit status (`wormhole_monitor::EXIT_STATUS_PORT`).
const EXIT_STATUS_PORT: u16 = 0xf4;

/// Number of words in a parameter block.
pub const PARAMETERS: usize = 512;

/// The parameter block: words shared by payload and host.
#[derive(Debug, Clone, Copy)]
pub struct Parameters(&'static [AtomicU64; PARAMETERS]);

impl Parameters {
    /// Returns the block at `address`.
    ///
    /// # Safety
    /// `address` must be the value that the monitor passed in RDI.
    pub unsafe fn at(address: u64) -> Self {
        // SAFETY: the monitor maps a page at `address` for as long as the payload runs, and the page is
        // only accessed as atomic words.
        Self(unsafe { &*(address as *const [AtomicU64; PARAMETERS]) })
    }

    /// Loads a word; SYNC POINT with the host's store.
    pub fn load(self, index: usize) -> u64 {
        self.0[index].load(Ordering::Acquire)
    }

    /// Stores a word; SYNC POINT with the host's load.
    pub fn store(self, index: usize, value: u64) {
        self.0[index].store(value, Ordering::Release);
    }
}

/// Returns the word at `address`, which the host may access concurrently.
///
/// # Safety
/// `address` must be a host-provided address of a mapped, aligned word in the window.
pub unsafe fn shared_word(address: u64) -> &'static AtomicU64 {
    // SAFETY: the caller guarantees the address; the window stays mapped for as long as the payload runs.
    unsafe { &*(address as *const AtomicU64) }
}

/// Returns the session segment at `address`. Exits with [`NO_SESSION_STATUS`] if it is invalid.
///
/// # Safety
/// `address` must be a host-provided address of a session segment, mapped for as long as the payload
/// runs.
pub unsafe fn session(address: u64) -> SessionMemory {
    let base = address as *mut u8;
    // SAFETY: the caller guarantees it.
    match unsafe { SessionMemory::new(base, SEGMENT_BYTES) } {
        Ok(session) => session,
        Err(_) => exit(NO_SESSION_STATUS),
    }
}

/// Returns the segment of the window at `address`. Exits with [`NO_SESSION_STATUS`] if it is invalid.
///
/// # Safety
/// As [`session`].
pub unsafe fn window(address: u64) -> WindowMemory {
    // SAFETY: the caller guarantees it.
    match unsafe { WindowMemory::new(address as *mut u8, SEGMENT_BYTES) } {
        Ok(window) => window,
        Err(_) => exit(NO_SESSION_STATUS),
    }
}

/// Returns the launch of one thread of a kernel whose only parameter has these bytes.
pub fn launch_of_one<'a>(
    function: Handle<Function>,
    stream: Handle<Stream>,
    parameters: &'a [u8],
) -> LaunchKernel<'a> {
    LaunchKernel {
        function,
        stream,
        grid: [1, 1, 1],
        block: [1, 1, 1],
        shared: 0,
        attributes: Items::new(&[]),
        parameters,
    }
}

/// Ends the payload on this vCPU.
pub fn exit(status: u32) -> ! {
    loop {
        // SAFETY: the monitor runs payloads with an I/O privilege level that allows port access, and
        // this write ends the vCPU.
        unsafe {
            asm!("out dx, eax", in("dx") EXIT_STATUS_PORT, in("eax") status, options(nomem, nostack));
        }
    }
}

/// Ports of the doorbell and of the wait for its answer (`wormhole_monitor::payload::Doorbell`).
const RING_PORT: u16 = 0xf6;
const WAIT_PORT: u16 = 0xf7;

/// Rings the host's doorbell, by a VM exit.
pub fn ring() {
    // SAFETY: the write to the port changes no memory of the payload.
    unsafe {
        asm!("out dx, al", in("dx") RING_PORT, in("al") 0u8, options(nostack));
    }
}

/// Waits in the host, by another VM exit, until it has answered. Returns at once if it has since the last call.
pub fn wait() {
    // SAFETY: as for `ring`.
    unsafe {
        asm!("in al, dx", in("dx") WAIT_PORT, out("al") _, options(nostack));
    }
}

/// Returns the processor's time stamp counter.
pub fn timestamp() -> u64 {
    // SAFETY: RDTSC has no side effects; the monitor leaves CR4.TSD clear.
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

/// Personality function that the precompiled `core` references. Payloads never unwind.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// Exit status of a payload whose session segment is invalid.
pub const NO_SESSION_STATUS: u32 = 0xbad;

/// Exit status of a payload that panicked.
pub const PANIC_STATUS: u32 = 0xdead;
