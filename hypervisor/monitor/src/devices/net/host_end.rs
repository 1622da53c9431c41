//! Declares what a device needs of the host's end of an interface.

use std::fmt;
use std::io;
use std::os::fd::AsFd;

use super::frame::GuestFrame;

/// The host's end of an interface. No operation blocks; its descriptor tells when frames arrive.
///
/// Frames have virtio's header before them in both directions.
pub trait HostEnd: AsFd + fmt::Debug + Send {
    /// Returns the features of the device that this end serves: checksums and segmentation.
    fn features(&self) -> u64;

    /// Begins to serve a driver with these features.
    fn start(&mut self, features: u64) -> io::Result<()>;

    /// Reads a frame, and returns its length with the header; 0 if no frame will come any more.
    fn receive(&mut self, frame: &mut [u8]) -> io::Result<usize>;

    /// Takes a frame, or drops it.
    fn send(&mut self, frame: &GuestFrame<'_>) -> io::Result<()>;

    /// Tries to pass on what the end still holds of a frame. Returns whether it must do so before it takes the next one:
    /// its descriptor can be written then.
    fn is_blocked(&mut self) -> bool;
}
