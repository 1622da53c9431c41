//! Messages between the supervisor and a scrubber's process.

use std::io;

use wormhole_ring::session::Run;
use wormhole_ring::status::EndCause;

use crate::fields::Fields;

/// Largest number of runs in one message.
pub const MAX_RUNS: usize = 1024;

/// Work to do with the descriptors of a message, before they are closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    Close,
    /// Send a refusal on each of the descriptors, which are launchers' connections, unless the
    /// reason is empty, and shut them down. A connection with descriptors in its queue stays open
    /// until the process exits.
    Refuse {
        code: u32,
        reason: String,
    },
    /// Keep the descriptors open until the process exits.
    Keep,
    /// Exit after all earlier work, which closes all descriptors.
    End,
    /// Free the memory of runs of a session's file, at most [`MAX_RUNS`].
    Scrub(Vec<Run>),
    /// Free all memory of a session's file from an offset on.
    Discard(u64),
    /// Complete the records of these parties, a bit each, in the words of an event.
    CompleteRecords(u32),
    /// Write the bootstrap of a window of this many bytes.
    Bootstrap(u64),
    /// Write the cause of a session's end to its status word. `segment` is the session's own
    /// segment in its file.
    Status {
        segment: u32,
        result: u32,
        cause: EndCause,
    },
}

/// Message to the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    Do {
        ticket: u64,
        work: Work,
    },
    /// The supervisor has closed its copies of the descriptors sent so far.
    Released,
}

/// Error number of work that is done and whose descriptors the process keeps.
pub const KEPT: i32 = libc::EBUSY;

/// Message from the process: the work is done and its descriptors are closed, unless `error` is
/// [`KEPT`]. `error` is 0 or an error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    pub ticket: u64,
    pub error: i32,
}

impl Order {
    pub fn encode(&self) -> Vec<u8> {
        let (kind, ticket, arguments) = match self {
            Self::Released => (0, 0, Vec::new()),
            Self::Do { ticket, work } => {
                let (kind, arguments) = match work {
                    Work::Close => (1, Vec::new()),
                    Work::Scrub(runs) => (2, runs.iter().map(|run| number_of(*run)).collect()),
                    Work::Discard(from) => (3, vec![*from]),
                    Work::CompleteRecords(parties) => (4, vec![u64::from(*parties)]),
                    Work::Bootstrap(bytes) => (5, vec![*bytes]),
                    Work::End => (6, Vec::new()),
                    Work::Keep => (9, Vec::new()),
                    Work::Refuse { code, reason } => {
                        let numbers = [*ticket, u64::from(*code)].map(u64::to_le_bytes);
                        return [&[8], numbers.as_flattened(), reason.as_bytes()].concat();
                    }
                    Work::Status {
                        segment,
                        result,
                        cause,
                    } => {
                        let numbers = [*segment, *result, *cause as u32];
                        (7, numbers.map(u64::from).to_vec())
                    }
                };
                (kind, *ticket, arguments)
            }
        };
        let numbers = [ticket].into_iter().chain(arguments);
        let numbers = numbers.flat_map(u64::to_le_bytes);
        [kind].into_iter().chain(numbers).collect()
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, numbers) = bytes.split_first()?;
        if *kind == 8 {
            let mut fields = Fields::new(numbers);
            let (ticket, code) = (fields.number()?, u32::try_from(fields.number()?).ok()?);
            let reason = fields.text()?;
            let work = Work::Refuse { code, reason };
            return Some(Self::Do { ticket, work });
        }
        let (numbers, rest) = numbers.as_chunks::<8>();
        let numbers: Vec<u64> = numbers
            .iter()
            .map(|number| u64::from_le_bytes(*number))
            .collect();
        let (ticket, arguments) = numbers.split_first().filter(|_| rest.is_empty())?;
        let work = match (kind, arguments) {
            (0, []) => return Some(Self::Released),
            (1, []) => Work::Close,
            (2, runs) => Work::Scrub(runs.iter().copied().map(run_of).collect()),
            (3, [from]) => Work::Discard(*from),
            (4, [parties]) => Work::CompleteRecords(u32::try_from(*parties).ok()?),
            (5, [bytes]) => Work::Bootstrap(*bytes),
            (6, []) => Work::End,
            (9, []) => Work::Keep,
            (7, [segment, result, cause]) => Work::Status {
                segment: u32::try_from(*segment).ok()?,
                result: u32::try_from(*result).ok()?,
                cause: EndCause::from_code(u32::try_from(*cause).ok()?)?,
            },
            _ => return None,
        };
        let ticket = *ticket;
        Some(Self::Do { ticket, work })
    }
}

fn number_of(run: Run) -> u64 {
    u64::from(run.first) << 32 | u64::from(run.count)
}

fn run_of(number: u64) -> Run {
    let half = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0);
    Run {
        first: half(number >> 32),
        count: half(number),
    }
}

impl Done {
    pub fn new(ticket: u64, result: &io::Result<()>) -> Self {
        let number = |error: &io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        let error = result.as_ref().err().map_or(0, number);
        Self { ticket, error }
    }

    pub fn result(self) -> io::Result<()> {
        match self.error {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    pub fn encode(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&self.ticket.to_le_bytes());
        bytes[8..].copy_from_slice(&self.error.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (ticket, error) = bytes.split_first_chunk()?;
        Some(Self {
            ticket: u64::from_le_bytes(*ticket),
            error: i32::from_le_bytes(error.try_into().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let works = [
            Work::Close,
            Work::Refuse {
                code: 2,
                reason: "too many".to_owned(),
            },
            Work::Keep,
            Work::End,
            Work::Scrub(Vec::new()),
            Work::Scrub(vec![
                Run {
                    first: 7,
                    count: u32::MAX,
                },
                Run { first: 0, count: 1 },
            ]),
            Work::Discard(1 << 21),
            Work::CompleteRecords(1 << 31 | 1),
            Work::Bootstrap(1 << 42),
            Work::Status {
                segment: u32::MAX,
                result: 709,
                cause: EndCause::WorkerLost,
            },
        ];
        for work in works {
            let order = Order::Do { ticket: 9, work };
            assert_eq!(Order::decode(&order.encode()), Some(order));
        }
        let released = Order::Released;
        assert_eq!(Order::decode(&released.encode()), Some(released));
        assert_eq!(Order::decode(&[7; 17]), None);
        assert_eq!(Order::decode(&[1; 17]), None);
        assert_eq!(Order::decode(&[1; 16]), None);
        let done = Done {
            ticket: 1 << 40,
            error: libc::EPERM,
        };
        assert_eq!(Done::decode(&done.encode()), Some(done));
        assert_eq!(Done::decode(&[0; 13]), None);
    }
}
