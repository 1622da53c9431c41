//! Runs a form on a device.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_device::{
    CuError, Device, Fill, ImageKind, Jit, Launch, LaunchEvents, Loading, RawFunction, RawStream,
};

use crate::form::Form;
use crate::kernel;
use crate::object::Object;
use crate::operands;
use crate::place::Placed;

/// Bytes of the memory for operands, and of that for results.
const BYTES: usize = 64 << 10;
const STREAM: RawStream = RawStream::LEGACY;
/// Initial words of the memory for results, so that a result that is not stored is seen.
const UNWRITTEN: u32 = 0xa5a5_a5a5;

/// Reason why a form has no results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The device refused the kernel.
    Refused(CuError),
    /// The kernel failed; the context may be dead.
    Faulted(CuError),
}

/// Device with memory for operands and results.
#[derive(Debug)]
pub struct Runner<'d> {
    device: &'d dyn Device,
    operands: u64,
    results: u64,
    scratch: u64,
    host: HostMemory<'d>,
}

impl<'d> Runner<'d> {
    /// Allocates memory on the device.
    pub fn new(device: &'d dyn Device) -> Result<Self, String> {
        let allocate = |bytes: u64| {
            let failed = |error| format!("no device memory: {error}");
            device.mem_alloc(bytes).map_err(failed)
        };
        Ok(Self {
            device,
            operands: allocate(BYTES as u64)?,
            results: allocate(BYTES as u64)?,
            scratch: allocate(kernel::SCRATCH)?,
            host: HostMemory::new(device)?,
        })
    }

    /// Runs a form, and returns its results, row by row, each cut to its width.
    pub fn run(&self, form: &Form) -> Result<Vec<Vec<u64>>, Failure> {
        let device = self.device;
        let text = kernel::text(form);
        let module = device
            .load(
                text.as_bytes(),
                ImageKind::Module,
                &mut Jit::default(),
                None,
            )
            .and_then(Loading::done)
            .map_err(Failure::Refused)?
            .module;
        let answer = device
            .function(module, kernel::NAME)
            .map_err(Failure::Refused)
            .and_then(|function| self.run_with_object(form, function.function));
        // Unloading fails in a dead context.
        let _ = device.unload(module);
        answer
    }

    fn run_with_object(
        &self,
        form: &Form,
        function: RawFunction,
    ) -> Result<Vec<Vec<u64>>, Failure> {
        let placed = match &form.object {
            Some(object) => Some(Placed::new(self.device, object).map_err(Failure::Refused)?),
            None => None,
        };
        let launched = self.launch(form, function, placed.as_ref());
        // A dead context cannot free anything.
        if let (Ok(_), Some(placed)) = (&launched, &placed) {
            placed.free(self.device).map_err(Failure::Faulted)?;
        }
        launched.map_err(Failure::Faulted)
    }

    fn launch(
        &self,
        form: &Form,
        function: RawFunction,
        object: Option<&Placed>,
    ) -> wormhole_device::Result<Vec<Vec<u64>>> {
        let device = self.device;
        let rows = operands::rows(form);
        let width = form.outputs.len();
        let bytes: Vec<u8> = rows
            .iter()
            .flatten()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        let taken = 8 * rows.len() * width;
        assert!(bytes.len() <= BYTES && taken <= BYTES && rows.len() <= kernel::BLOCK);
        device.write(self.operands, &bytes, STREAM)?;
        for (destination, value, bytes) in [
            (self.results, UNWRITTEN, BYTES as u64),
            (self.scratch, 0, kernel::SCRATCH),
        ] {
            let fill = Fill {
                destination,
                pitch: 0,
                width: bytes / 4,
                height: 1,
                value,
                element: 4,
            };
            device.fill(fill, STREAM)?;
        }
        let parameters: Vec<u8> = [self.operands, self.results, self.scratch]
            .iter()
            .chain(object.map(|object| &object.handle))
            .flat_map(|address| address.to_le_bytes())
            .collect();
        device.launch(&Launch {
            function,
            stream: STREAM,
            grid: [1, 1, 1],
            block: [u32::try_from(rows.len()).unwrap_or(u32::MAX), 1, 1],
            shared: 0,
            attributes: &[],
            events: LaunchEvents::default(),
            parameters: &parameters,
        })?;
        if let (Some(Object::Written(picture)), Some(placed)) = (&form.object, object) {
            let bytes = placed.read(device, picture, self.results)?;
            device.mem_copy(self.host.address(), self.results, bytes, STREAM)?;
            device.synchronize()?;
            return Ok(self.pieces(form, usize::try_from(bytes).unwrap_or(BYTES)));
        }
        device.mem_copy(self.host.address(), self.results, taken as u64, STREAM)?;
        device.synchronize()?;
        Ok((0..rows.len())
            .map(|row| {
                let results = form.outputs.iter().enumerate();
                results
                    .map(|(column, &bits)| self.host.word(row * width + column) & mask(bits))
                    .collect()
            })
            .collect())
    }
}

impl Runner<'_> {
    /// Splits an image's bytes into rows of results.
    fn pieces(&self, form: &Form, bytes: usize) -> Vec<Vec<u64>> {
        let widths = || form.outputs.iter().map(|&bits| bits as usize / 8);
        let row: usize = widths().sum();
        assert_eq!(row * form.rows, bytes, "{}: rows and image", form.name);
        let mut at = 0;
        let mut next = |width: usize| {
            let bytes = (at..at + width).rev();
            at += width;
            bytes.fold(0, |value, at| {
                value << 8 | self.host.word(at / 8) >> (at % 8 * 8) & 0xff
            })
        };
        (0..form.rows)
            .map(|_| widths().map(&mut next).collect())
            .collect()
    }
}

/// Returns a mask of the lowest `bits` bits.
fn mask(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

/// Host memory that the device writes, read by words.
#[derive(Debug)]
struct HostMemory<'d> {
    device: &'d dyn Device,
    start: *mut u64,
}

impl<'d> HostMemory<'d> {
    fn new(device: &'d dyn Device) -> Result<Self, String> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
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
        };
        // SAFETY: the mapping lives as long as `memory`, which unregisters it first.
        unsafe { device.register(memory.address(), BYTES as u64) }
            .map_err(|error| format!("host memory cannot be registered: {error}"))?;
        Ok(memory)
    }

    fn address(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    fn word(&self, index: usize) -> u64 {
        assert!(index < BYTES / 8);
        // SAFETY: in bounds and aligned; the memory is accessed through atomics only.
        unsafe { AtomicU64::from_ptr(self.start.add(index)) }.load(Ordering::Acquire)
    }
}

impl Drop for HostMemory<'_> {
    fn drop(&mut self) {
        // A dead context has no registrations.
        let _ = self.device.unregister(self.address());
        // SAFETY: this object's own mapping.
        unsafe { libc::munmap(self.start.cast(), BYTES) };
    }
}
