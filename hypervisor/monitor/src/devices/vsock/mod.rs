//! virtio-vsock (virtio 1.2, section 5.10): stream connections from the guest to the host.
//!
//! The guest connects to CID 2; for each connection the host side of a socket pair is handed to
//! the caller's [`VsockAcceptor`]. What a guest sends is copied out of its memory, then parsed,
//! then acted on; no packet can make the device panic, wait or grow without bound:
//! [`MAX_CONNECTIONS`] connections with [`BUFFER`] bytes each, and a bounded queue of resets.

mod connection;
mod device;
mod event_handler;
mod mux;
mod packet;

use std::os::unix::net::UnixStream;

pub use connection::BUFFER;
pub use device::Vsock;
pub use event_handler::VsockWorker;
pub use mux::{MAX_CONNECTIONS, Mux};
pub use packet::{HEADER_LEN, Header, Op};

/// The host's context id.
pub const HOST_CID: u64 = 2;

/// A guest process wants to connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The host port it wants.
    pub port: u32,
    /// The guest's own port.
    pub peer_port: u32,
}

/// The connection is not wanted; the guest sees ECONNRESET.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("nobody listens there")]
pub struct Refused;

/// Takes connections from a guest. Called on the device's thread, so it must not block.
///
/// The stream ends (end of file) when the guest's socket is closed, by whatever way its process
/// ends; closing the stream closes the guest's socket.
pub trait VsockAcceptor: Send {
    /// Takes the host's end of a new connection, or refuses it.
    fn accept(&mut self, request: ConnectRequest, stream: UnixStream) -> Result<(), Refused>;
}

impl<F> VsockAcceptor for F
where
    F: FnMut(ConnectRequest, UnixStream) -> Result<(), Refused> + Send,
{
    fn accept(&mut self, request: ConnectRequest, stream: UnixStream) -> Result<(), Refused> {
        self(request, stream)
    }
}
