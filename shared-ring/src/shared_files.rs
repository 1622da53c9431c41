//! Memory of a guest VM's shared files: its mark, and messages between a process and the keeper of the files, by a Unix socket of
//! the guest.
//!
//! A process connects once. Its first message names its session, in a device of the window, whose descriptor comes along.
//! Later ones hold a file, whose descriptor comes along, or let one go. Numbers have the guest's byte order.

use zerocopy::transmute;

/// First bytes of the memory that a launcher gives a guest for shared files. A guest makes a file system of no other memory.
pub const MARK: [u8; 32] = *b"wormhole memory for shared files";

/// The keeper's socket, beside the window's devices. Those who may open these may connect.
pub const SOCKET: &str = "/dev/wormhole-shared-files";
/// Bytes of a request, and of the beginning of its answer.
pub const MESSAGE_BYTES: usize = 24;
/// Bytes of a part in an answer.
pub const PART_BYTES: usize = 16;
/// Most parts of a file.
pub const MOST_PARTS: usize = 2048;

/// A message to the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first message: the session's first segment is at an offset in a device of the window.
    Session {
        /// Offset in the device.
        offset: u64,
        /// The session's generation.
        generation: u32,
    },
    /// Hold a file. An [`Answer`] follows.
    Hold {
        /// First byte of a range of whole pages.
        start: u64,
        /// Bytes of the range.
        bytes: u64,
    },
    /// Let a file go. There is no answer.
    LetGo {
        /// The keeper's number of the file.
        number: u64,
    },
}

impl Request {
    const SESSION: u64 = 0;
    const HOLD: u64 = 1;
    const LET_GO: u64 = 2;

    /// Returns the message.
    #[must_use]
    pub fn encode(self) -> [u8; MESSAGE_BYTES] {
        transmute!(match self {
            Self::Session { offset, generation } => [Self::SESSION, offset, generation.into()],
            Self::Hold { start, bytes } => [Self::HOLD, start, bytes],
            Self::LetGo { number } => [Self::LET_GO, number, 0],
        })
    }

    /// Returns the request of a message; `None` if it makes no sense.
    #[must_use]
    pub fn decode(message: [u8; MESSAGE_BYTES]) -> Option<Self> {
        let words: [u64; 3] = transmute!(message);
        match words {
            [Self::SESSION, offset, generation] => Some(Self::Session {
                offset,
                generation: u32::try_from(generation).ok()?,
            }),
            [Self::HOLD, start, bytes] => Some(Self::Hold { start, bytes }),
            [Self::LET_GO, number, _] => Some(Self::LetGo { number }),
            _ => None,
        }
    }
}

/// The beginning of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// 0, or an error of the system.
    pub status: u64,
    /// The keeper's number of the file.
    pub number: u64,
    /// The number of parts in which the range lies. They follow.
    pub parts: u64,
}

impl Answer {
    /// Returns the message.
    #[must_use]
    pub fn encode(self) -> [u8; MESSAGE_BYTES] {
        transmute!([self.status, self.number, self.parts])
    }

    /// Returns the answer of a message.
    #[must_use]
    pub fn decode(message: [u8; MESSAGE_BYTES]) -> Self {
        let [status, number, parts] = transmute!(message);
        Self {
            status,
            number,
            parts,
        }
    }
}

/// A part of the memory for shared files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Offset in the memory.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Part {
    /// Returns the part of an answer.
    #[must_use]
    pub fn encode(self) -> [u8; PART_BYTES] {
        transmute!([self.offset, self.bytes])
    }

    /// Returns the part in an answer.
    #[must_use]
    pub fn decode(part: [u8; PART_BYTES]) -> Self {
        let [offset, bytes] = transmute!(part);
        Self { offset, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        for request in [
            Request::Session {
                offset: 5 << 21,
                generation: u32::MAX,
            },
            Request::Hold {
                start: 4096,
                bytes: u64::MAX,
            },
            Request::LetGo { number: 7 },
        ] {
            assert_eq!(Request::decode(request.encode()), Some(request));
        }
        let answer = Answer {
            status: 1,
            number: 2,
            parts: 3,
        };
        assert_eq!(Answer::decode(answer.encode()), answer);
        let part = Part {
            offset: 4,
            bytes: 5,
        };
        assert_eq!(Part::decode(part.encode()), part);
    }

    #[test]
    fn a_message_that_makes_no_sense_is_no_request() {
        for message in [[3, 0, 0], [u64::MAX; 3], [Request::SESSION, 0, 1 << 32]] {
            assert_eq!(Request::decode(transmute!(message)), None, "{message:?}");
        }
    }
}
