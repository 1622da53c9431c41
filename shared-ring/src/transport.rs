//! Ways in which records reach the backend. All but the first exist to be measured beside it.

use core::fmt;

/// Variable of a program's environment with the transport, which `wormhole run --transport` sets.
pub const VARIABLE: &str = "WORMHOLE_TRANSPORT";

/// Way in which records reach the backend.
///
/// ```
/// use wormhole_ring::transport::Transport;
/// for text in ["poll", "doorbell", "socket:/run/stream"] {
///     assert_eq!(Transport::parse(text).unwrap().to_string(), text);
/// }
/// assert_eq!(Transport::parse("carrier pigeon"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport<'a> {
    /// By the ring, which the backend polls while it is awake.
    Poll,
    /// By the ring, with a doorbell for each record. A backend without work sleeps at once, and so does a thread that
    /// waits: each is woken by the system.
    Doorbell,
    /// By a [stream](crate::stream), whose server listens at this path.
    Socket(&'a str),
}

const POLL: &str = "poll";
const DOORBELL: &str = "doorbell";
const SOCKET: &str = "socket:";

impl<'a> Transport<'a> {
    /// Reads a transport as [`Transport`] is displayed.
    #[must_use]
    pub fn parse(text: &'a str) -> Option<Self> {
        match text {
            POLL => Some(Self::Poll),
            DOORBELL => Some(Self::Doorbell),
            _ => text.strip_prefix(SOCKET).map(Self::Socket),
        }
    }
}

impl fmt::Display for Transport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Poll => f.write_str(POLL),
            Self::Doorbell => f.write_str(DOORBELL),
            Self::Socket(path) => write!(f, "{SOCKET}{path}"),
        }
    }
}
