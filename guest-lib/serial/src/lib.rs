//! Carries the control streams of a guest's processes over one virtio-serial port, where the guest has no vsock.
//!
//! An agent in the guest owns the port and listens on a Unix socket. It numbers the streams of the processes that connect,
//! and `wormhole attach` on the host opens a stream of the backend for each ([`Mux`]). Each side grants the other a window of
//! bytes for each stream, so that a stream whose reader stops delays no other. A side buffers at most [`WINDOW`] bytes for
//! each of at most [`MAX_STREAMS`] streams.
//!
//! Neither side trusts the other. A [frame](Frame) that breaks the protocol ends all streams. The host then ignores all bytes
//! until the agent's next hello, and the agent all bytes until the host's answer to its hello.

mod agent;
mod closer;
mod frame;
mod line;
mod mux;
mod stream;

pub use agent::{AgentError, listen, open_port, serve_port};
pub use closer::ProcessSocket;
pub use frame::{Frame, MAX_DATA, Malformed, VERSION};
pub use line::{LineError, serve};
pub use mux::{MAX_STREAMS, Mux};
pub use stream::{Opening, WINDOW};

/// The port in the guest, by the name that the monitor gives it.
pub const PORT: &str = "/dev/virtio-ports/org.wormhole.control";
