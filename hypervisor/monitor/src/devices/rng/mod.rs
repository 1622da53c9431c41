//! Emulates virtio-rng (virtio 1.2, section 5.4): random bytes from the host for the guest.
//!
//! The device fills each buffer with at most [`MAX_REQUEST`] bytes from the host's `getrandom`. In the
//! guest, the `virtio_rng` driver provides `/dev/hwrng`, from which the kernel feeds its entropy pool.

mod device;

pub use device::{MAX_REQUEST, Rng, RngWorker};
