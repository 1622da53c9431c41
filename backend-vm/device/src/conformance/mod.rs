//! Checks that every device must pass, both on the real driver and on the CPU.
//!
//! Each check gets a device of its own, since some kill the context. A driver that cannot open a second context after
//! a fault runs each check in a process of its own. A failed check returns a sentence that names the violated
//! property.

mod arrays;
mod conditional_graphs;
mod faults;
mod graphs;
mod green_contexts;
mod kernels;
mod launch_events;
mod launches;
mod linking;
mod mem_ops;
mod memory;
mod modules;
mod peers;
mod pools;
mod questions;
mod sharing;
mod streams;
mod texture_references;
mod virtual_memory;

pub use peers::{Pair, PeerCheck, peer_checks};

use std::fmt::Debug;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use wormhole_api::constants::stream_flags::NON_BLOCKING;

use crate::{
    Device, ImageKind, Jit, Launch, LaunchAttribute, LaunchEvents, LoadedFunction, LoadedModule,
    Loading, RawStream, Result,
};

/// Result of a check: nothing, or a sentence about the failure.
pub type Outcome = std::result::Result<(), String>;

/// Check of one device.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Property that must hold.
    pub name: &'static str,
    /// Function that checks it on a fresh device.
    pub run: fn(&dyn Device) -> Outcome,
}

/// Lists all checks of one device.
pub fn checks() -> Vec<Check> {
    [
        memory::CHECKS,
        arrays::CHECKS,
        streams::CHECKS,
        mem_ops::CHECKS,
        launches::CHECKS,
        launch_events::CHECKS,
        linking::CHECKS,
        modules::CHECKS,
        questions::CHECKS,
        texture_references::CHECKS,
        sharing::CHECKS,
        faults::CHECKS,
        graphs::CHECKS,
        conditional_graphs::CHECKS,
        green_contexts::CHECKS,
        pools::CHECKS,
        virtual_memory::CHECKS,
    ]
    .concat()
}

/// Time limit of any wait.
const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;

/// Host memory that the device can access, zeroed. Words are accessed atomically, since the device writes them.
struct HostMemory<'a> {
    device: &'a dyn Device,
    start: *mut u8,
    bytes: usize,
}

impl<'a> HostMemory<'a> {
    fn new(device: &'a dyn Device, pages: usize) -> std::result::Result<Self, String> {
        let bytes = pages * PAGE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(format!("mmap: {}", io::Error::last_os_error()));
        }
        let memory = Self {
            device,
            start: start.cast(),
            bytes,
        };
        // SAFETY: the mapping lives as long as `memory`, which unregisters it first.
        worked("register", unsafe {
            device.register(memory.address(0), bytes as u64)
        })?;
        Ok(memory)
    }

    fn address(&self, offset: usize) -> u64 {
        self.start.expose_provenance() as u64 + offset as u64
    }

    /// Writes a byte at an address of this memory.
    fn set_byte(&self, address: u64, byte: u8) {
        let offset = usize::try_from(address - self.address(0)).unwrap_or(usize::MAX);
        assert!(offset < self.bytes);
        // SAFETY: inside the mapping, which is not written elsewhere at this time.
        unsafe { self.start.add(offset).write_volatile(byte) };
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!((index + 1) * 8 <= self.bytes);
        // SAFETY: in bounds and aligned; the memory is accessed through atomics only.
        unsafe { AtomicU64::from_ptr(self.start.cast::<u64>().add(index)) }
    }

    fn half_word(&self, index: usize) -> &AtomicU32 {
        assert!((index + 1) * 4 <= self.bytes);
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.start.cast::<u32>().add(index)) }
    }

    fn read(&self, bytes: usize) -> Vec<u8> {
        (0..bytes.div_ceil(4))
            .flat_map(|index| self.half_word(index).load(Ordering::Acquire).to_ne_bytes())
            .take(bytes)
            .collect()
    }
}

impl Drop for HostMemory<'_> {
    fn drop(&mut self) {
        // A dead context has no registrations.
        let _ = self.device.unregister(self.address(0));
        // SAFETY: the mapping belongs to this object.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// Returns the value, or a sentence that names the failed call.
fn worked<T>(what: &str, result: Result<T>) -> std::result::Result<T, String> {
    result.map_err(|error| format!("{what} failed: {error}"))
}

/// Fails with a sentence unless the two are equal.
fn same<T: PartialEq + Debug>(what: &str, found: T, expected: T) -> Outcome {
    if found == expected {
        Ok(())
    } else {
        Err(format!("{what}: found {found:?}, expected {expected:?}"))
    }
}

/// Returns whether an address lies in the bands that a guest reserves for device memory.
fn in_bands(address: u64) -> bool {
    (0x6000_0000_0000..0x6400_0000_0000).contains(&address)
        || (0x2_0000_0000..0x100_0000_0000).contains(&address)
}

/// Fails with a sentence unless the condition holds.
fn holds(what: &str, condition: bool) -> Outcome {
    condition
        .then_some(())
        .ok_or_else(|| format!("it does not hold that {what}"))
}

/// Waits until the condition holds. Fails with a sentence after [`PATIENCE`].
fn eventually(what: &str, mut condition: impl FnMut() -> bool) -> Outcome {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > PATIENCE {
            return Err(format!("after {PATIENCE:?} it did not hold that {what}"));
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn load(device: &dyn Device, text: &str) -> std::result::Result<LoadedModule, String> {
    load_image(device, text.as_bytes(), ImageKind::Module)
}

/// Loads an image without managed variables.
fn load_image(
    device: &dyn Device,
    image: &[u8],
    kind: ImageKind,
) -> std::result::Result<LoadedModule, String> {
    let loaded = device.load(image, kind, &mut Jit::default(), None);
    worked("load", loaded.and_then(Loading::done))
}

fn function(
    device: &dyn Device,
    module: &LoadedModule,
    name: &str,
) -> std::result::Result<LoadedFunction, String> {
    worked(name, device.function(module.module, name))
}

/// Loads [`kernels::PLAIN`] and returns its kernel `name`.
fn kernel(device: &dyn Device, name: &str) -> std::result::Result<LoadedFunction, String> {
    function(device, &load(device, kernels::PLAIN)?, name)
}

/// Packs parameters of 4 or 8 bytes, in the kernel's layout.
fn pack(function: &LoadedFunction, values: &[u64]) -> Vec<u8> {
    let mut packed = Vec::new();
    for (parameter, value) in function.parameters.iter().zip(values) {
        packed.resize(parameter.offset as usize, 0);
        packed.extend_from_slice(&value.to_le_bytes()[..parameter.size as usize]);
    }
    packed
}

/// Geometry of a launch.
#[derive(Clone, Copy)]
struct Shape<'a> {
    grid: u32,
    block: u32,
    shared: u32,
    attributes: &'a [LaunchAttribute],
}

const ONE_THREAD: Shape<'_> = Shape {
    grid: 1,
    block: 1,
    shared: 0,
    attributes: &[],
};

fn launch(
    device: &dyn Device,
    stream: RawStream,
    function: &LoadedFunction,
    shape: Shape<'_>,
    values: &[u64],
) -> Result<()> {
    device.launch(&Launch {
        function: function.function,
        stream,
        grid: [shape.grid, 1, 1],
        block: [shape.block, 1, 1],
        shared: shape.shared,
        attributes: shape.attributes,
        events: LaunchEvents::default(),
        parameters: &pack(function, values),
    })
}
