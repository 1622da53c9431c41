//! Emulates virtio-vsock (virtio 1.2, section 5.10): stream connections from the guest to the host.
//!
//! The guest connects to CID 2. For each connection the caller's [`VsockAcceptor`] gives the device a
//! stream. Packets are copied out of guest memory before they are parsed. No packet
//! makes the device panic, block or grow without bound: it has at most [`MAX_CONNECTIONS`] connections
//! with [`BUFFER`] bytes each, and a bounded queue of resets.

mod connection;
mod device;
mod event_handler;
mod mux;
mod opening;
mod packet;
mod turn;
mod vhost_user;

pub use connection::BUFFER;
pub use device::Vsock;
pub use event_handler::VsockWorker;
pub use mux::{MAX_CONNECTIONS, Mux};
pub use opening::{Accepted, Hold, Holders, Opener, Opening};
pub use packet::{HEADER_LEN, Header, Op};
#[cfg(feature = "fuzzing")]
pub use vhost_user::Attached;
pub use vhost_user::serve;

/// The host's context id.
pub const HOST_CID: u64 = 2;

/// A guest process's request to connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The requested host port.
    pub port: u32,
    /// The guest's port.
    pub peer_port: u32,
}

/// The connection is refused; the guest's `connect` fails with ECONNRESET.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no program of the host accepts connections to this port")]
pub struct Refused;

/// Accepts connections from a guest. Called on the device's thread: the guest's other connections wait for it.
pub trait VsockAcceptor: Send {
    /// Returns the device's end of a stream for a new connection, or what waits for one, or refuses it.
    ///
    /// The other end reaches end of file when the guest's socket is closed, however its process ends.
    /// Closing the other end closes the guest's socket.
    fn accept(&mut self, request: ConnectRequest) -> Result<Accepted, Refused>;
}

impl<F, A> VsockAcceptor for F
where
    F: FnMut(ConnectRequest) -> Result<A, Refused> + Send,
    A: Into<Accepted>,
{
    fn accept(&mut self, request: ConnectRequest) -> Result<Accepted, Refused> {
        self(request).map(Into::into)
    }
}
