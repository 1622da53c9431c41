//! virtio-rng (virtio 1.2, section 5.4): random bytes from the host for the guest.
//!
//! The driver offers buffers, the device fills them with `getrandom` of the host, at most
//! [`MAX_REQUEST`] bytes for each. A guest's `virtio_rng` gives it `/dev/hwrng`, and its kernel feeds
//! its own pool from there.

mod device;

pub use device::{MAX_REQUEST, Rng, RngWorker};
