//! Input of the guest's consoles.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::devices::serial::SerialInput;

/// Input of the virtio console's port.
#[derive(Debug)]
pub struct PortInput {
    /// Blocking end of a pipe, whose other end the device thread reads.
    pub(super) pipe: File,
    /// Whether the guest has written to the port since its driver started.
    pub(super) is_used: Arc<AtomicBool>,
}

/// Input of the guest's console: of the virtio console once the guest has written to it, else of the 8250. A driver that
/// provides buffers shows only that `/dev/hvc0` exists; a program that reads it writes a prompt first.
///
/// A write waits while the console that gets the input is full: until the guest reads. It fails when the VM is gone.
#[derive(Debug)]
pub struct ConsoleInput {
    serial: SerialInput,
    port: PortInput,
}

impl ConsoleInput {
    /// Creates the input of both consoles.
    pub fn new(serial: SerialInput, port: PortInput) -> Self {
        Self { serial, port }
    }
}

impl Write for ConsoleInput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            if self.port.is_used.load(Ordering::Acquire) {
                return self.port.pipe.write(bytes);
            }
            let taken = self.serial.offer(bytes)?;
            if taken > 0 || bytes.is_empty() {
                return Ok(taken);
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
