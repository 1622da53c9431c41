//! Messages between the supervisor and its spawner: one datagram each.

use wormhole_sandbox::Ending;

/// Order of the supervisor. The spawner alone knows the workers' programs and their confinement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Start the worker for a protocol. `environment` comes from a guest, in lines of `NAME=VALUE`.
    Start {
        ticket: u64,
        hash: u64,
        environment: String,
    },
    Kill {
        ticket: u64,
    },
    /// Move a worker into a tenant's cgroup.
    Assign {
        ticket: u64,
        tenant: u32,
    },
    /// Fork a process that closes descriptors.
    Scrubber,
}

/// Report of the spawner, by the ticket of the order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// Workers can be started: their protocols, and their device or the reason why there is none.
    Ready {
        hashes: Vec<u64>,
        device: Result<String, String>,
    },
    /// Workers cannot be started on this system.
    Unfit(String),
    /// A worker has executed its program. Its stream and its log come with the report.
    Started {
        ticket: u64,
        pid: i32,
    },
    Failed {
        ticket: u64,
        reason: String,
    },
    /// A worker has ended and was reaped.
    Ended {
        ticket: u64,
        ending: Ending,
        out_of_memory: bool,
    },
    /// A process that closes descriptors was forked. Its socket comes with the report.
    Scrubber {
        pid: i32,
    },
    /// Such a process has ended and was reaped.
    ScrubberEnded {
        pid: i32,
    },
    /// The process could not be forked.
    NoScrubber(String),
}

/// Bytes that are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes between supervisor and spawner are no message")]
pub struct Malformed(usize);

/// Decoder of a message's fields, in order.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn number(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn signed(&mut self) -> Option<i32> {
        self.bytes().map(i32::from_le_bytes)
    }

    fn byte(&mut self) -> Option<u8> {
        self.bytes().map(|[byte]| byte)
    }

    /// Takes all remaining bytes as text.
    fn text(&mut self) -> Option<String> {
        let bytes: &'a [u8] = std::mem::take(&mut self.0);
        std::str::from_utf8(bytes).ok().map(str::to_owned)
    }

    fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

impl Order {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Start {
                ticket,
                hash,
                environment,
            } => [
                &[1],
                &ticket.to_le_bytes()[..],
                &hash.to_le_bytes(),
                environment.as_bytes(),
            ]
            .concat(),
            Self::Kill { ticket } => [&[2], &ticket.to_le_bytes()[..]].concat(),
            Self::Assign { ticket, tenant } => {
                [&[3], &ticket.to_le_bytes()[..], &tenant.to_le_bytes()].concat()
            }
            Self::Scrubber => vec![4],
        }
    }

    /// # Errors
    /// The bytes are no output of [`encode`](Self::encode).
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        let mut read = || {
            let order = match fields.byte()? {
                1 => Self::Start {
                    ticket: fields.number()?,
                    hash: fields.number()?,
                    environment: fields.text()?,
                },
                2 => Self::Kill {
                    ticket: fields.number()?,
                },
                3 => Self::Assign {
                    ticket: fields.number()?,
                    tenant: u32::from_le_bytes(fields.bytes()?),
                },
                4 => Self::Scrubber,
                _ => return None,
            };
            fields.end().map(|()| order)
        };
        read().ok_or(Malformed(bytes.len()))
    }
}

impl Report {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Ready { hashes, device } => {
                let count = u64::try_from(hashes.len()).unwrap_or(0);
                let mut bytes = [&[1], &count.to_le_bytes()[..]].concat();
                bytes.extend(hashes.iter().flat_map(|hash| hash.to_le_bytes()));
                bytes.push(u8::from(device.is_ok()));
                let (Ok(text) | Err(text)) = device;
                bytes.extend_from_slice(text.as_bytes());
                bytes
            }
            Self::Unfit(reason) => [&[2], reason.as_bytes()].concat(),
            Self::Started { ticket, pid } => {
                [&[3], &ticket.to_le_bytes()[..], &pid.to_le_bytes()].concat()
            }
            Self::Failed { ticket, reason } => {
                [&[4], &ticket.to_le_bytes()[..], reason.as_bytes()].concat()
            }
            Self::Ended {
                ticket,
                ending,
                out_of_memory,
            } => {
                let (kind, value) = match ending {
                    Ending::Exited(status) => (0, *status),
                    Ending::Signalled(signal) => (1, *signal),
                };
                let flags = [kind, u8::from(*out_of_memory)];
                [
                    &[5],
                    &ticket.to_le_bytes()[..],
                    &value.to_le_bytes(),
                    &flags,
                ]
                .concat()
            }
            Self::Scrubber { pid } => [&[6], &pid.to_le_bytes()[..]].concat(),
            Self::ScrubberEnded { pid } => [&[8], &pid.to_le_bytes()[..]].concat(),
            Self::NoScrubber(reason) => [&[7], reason.as_bytes()].concat(),
        }
    }

    /// # Errors
    /// The bytes are no output of [`encode`](Self::encode).
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        let mut read = || {
            let report = match fields.byte()? {
                1 => {
                    let count = fields.number()?;
                    let hashes = (0..count).map(|_| fields.number()).collect::<Option<_>>()?;
                    let works = fields.byte()?;
                    let text = fields.text()?;
                    Self::Ready {
                        hashes,
                        device: if works == 1 { Ok(text) } else { Err(text) },
                    }
                }
                2 => Self::Unfit(fields.text()?),
                3 => Self::Started {
                    ticket: fields.number()?,
                    pid: fields.signed()?,
                },
                4 => Self::Failed {
                    ticket: fields.number()?,
                    reason: fields.text()?,
                },
                5 => {
                    let ticket = fields.number()?;
                    let value = fields.signed()?;
                    let ending = match fields.byte()? {
                        0 => Ending::Exited(value),
                        1 => Ending::Signalled(value),
                        _ => return None,
                    };
                    Self::Ended {
                        ticket,
                        ending,
                        out_of_memory: fields.byte()? == 1,
                    }
                }
                6 => Self::Scrubber {
                    pid: fields.signed()?,
                },
                8 => Self::ScrubberEnded {
                    pid: fields.signed()?,
                },
                7 => Self::NoScrubber(fields.text()?),
                _ => return None,
            };
            fields.end().map(|()| report)
        };
        read().ok_or(Malformed(bytes.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let orders = [
            Order::Start {
                ticket: 7,
                hash: u64::MAX,
                environment: "A=1\nB=2".to_owned(),
            },
            Order::Kill { ticket: 3 },
            Order::Assign {
                ticket: 4,
                tenant: u32::MAX,
            },
            Order::Scrubber,
        ];
        for order in orders {
            assert_eq!(Order::decode(&order.encode()), Ok(order));
        }
        let reports = [
            Report::Ready {
                hashes: vec![1, 2],
                device: Ok("cpu".to_owned()),
            },
            Report::Ready {
                hashes: Vec::new(),
                device: Err("none".to_owned()),
            },
            Report::Unfit("no namespaces".to_owned()),
            Report::Started { ticket: 1, pid: 2 },
            Report::Failed {
                ticket: 1,
                reason: "why".to_owned(),
            },
            Report::Ended {
                ticket: 9,
                ending: Ending::Exited(-1),
                out_of_memory: false,
            },
            Report::Ended {
                ticket: 9,
                ending: Ending::Signalled(9),
                out_of_memory: true,
            },
            Report::Scrubber { pid: 5 },
            Report::ScrubberEnded { pid: 5 },
            Report::NoScrubber("why".to_owned()),
        ];
        for report in reports {
            assert_eq!(Report::decode(&report.encode()), Ok(report));
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none(
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..64),
        ) {
            if let Ok(order) = Order::decode(&bytes) {
                assert_eq!(order.encode(), bytes);
            }
            let _ = Report::decode(&bytes);
        }
    }

    #[test]
    fn a_count_that_is_not_there_is_refused() {
        let bytes = [&[1], &u64::MAX.to_le_bytes()[..]].concat();
        assert_eq!(Report::decode(&bytes), Err(Malformed(9)));
    }
}
