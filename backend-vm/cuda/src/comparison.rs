//! Comparison of device memory, by a kernel of this library's own.

use wormhole_device::{
    Comparison, Device, DriverCalls, Fill, ImageKind, Jit, Launch, LaunchEvents, RawFunction,
    RawStream, Result,
};

use crate::device::{CudaDevice, handle};

impl CudaDevice {
    /// Returns the kernel, which is loaded at its first use in a context.
    fn comparing(&self) -> Result<RawFunction> {
        let mut comparing = self.comparing.lock();
        if let Some(function) = *comparing {
            return Ok(function);
        }
        let text = Comparison::TEXT.as_bytes();
        let loaded = self.load(text, ImageKind::Module, &mut Jit::default(), None)?;
        let loaded = self.function(loaded.done()?.module, Comparison::KERNEL)?;
        *comparing = Some(loaded.function);
        Ok(loaded.function)
    }

    /// As [`VirtualMemory::differing`](wormhole_device::VirtualMemory::differing).
    pub(crate) fn compared(&self, comparison: &Comparison, stream: RawStream) -> Result<Vec<bool>> {
        let (parts, grid) = (comparison.parts()?, comparison.grid()?);
        let function = self.comparing()?;
        let none = Fill {
            destination: comparison.marks,
            pitch: 0,
            width: parts.into(),
            height: 1,
            value: 0,
            element: 4,
        };
        self.fill(none, stream)?;
        self.launch(&Launch {
            function,
            stream,
            grid,
            block: Comparison::BLOCK,
            shared: 0,
            attributes: &[],
            events: LaunchEvents::default(),
            parameters: &comparison.parameters(),
        })?;
        let mut marks = vec![0_u32; parts as usize];
        let place = handle(marks.as_mut_ptr());
        let copied = self.mem_copy(
            place,
            comparison.marks,
            Comparison::marks_of(comparison.bytes),
            stream,
        );
        // Nothing writes to the marks from here on.
        self.synchronize_stream(stream)?;
        copied?;
        Ok(marks.iter().map(|mark| *mark != 0).collect())
    }
}
