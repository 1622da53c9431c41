//! Emulates virtio-console (virtio 1.2, section 5.3) with one port.
//!
//! [`Console`] implements the registers. [`ConsoleWorker`] serves the receive queue and the transmit queue on a device
//! thread. In the guest, the `virtio_console` driver provides `/dev/hvc0`, whose output joins that of the 8250.
//! [`ConsoleInput`] is the input of both: a guest reads one of them, and it is the one that it has written to.
//!
//! The device has no further ports (`VIRTIO_CONSOLE_F_MULTIPORT`), tells no size of a terminal
//! (`VIRTIO_CONSOLE_F_SIZE`), and has no register for emergencies (`VIRTIO_CONSOLE_F_EMERG_WRITE`): the 8250 has the
//! kernel's early messages.

mod device;
mod input;
mod worker;

pub use device::Console;
pub use input::{ConsoleInput, PortInput};
pub use worker::ConsoleWorker;
