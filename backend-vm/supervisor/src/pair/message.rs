//! Messages between the supervisor and a tenant's process: one datagram each.

use std::time::Duration;

use wormhole_link::usage::Usage;
use wormhole_ring::control::Refusal;
use wormhole_sandbox::Ending;

use crate::Id;
use crate::fields::{self, Fields};
use crate::sampler::Sample;

/// Longest text in a message, in bytes.
pub const LONGEST_TEXT: usize = 16 << 10;

/// Limits and facts with which a process serves its tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Number of the tenant in the log.
    pub tenant: Id,
    /// Time within which its launcher must attach; none if it may take any.
    pub attach_limit: Option<Duration>,
    pub hello_limit: Duration,
    pub reap_limit: Duration,
    /// Lines that it may log before its launcher has attached.
    pub lines: u32,
    /// Largest number of its sessions.
    pub sessions: u64,
    /// Largest size of its window in bytes.
    pub window: u64,
    /// Largest number of descriptors that were sent to the tenant's parties and that these have not
    /// received.
    pub unread: u64,
    /// Whether the devices have NVIDIA's driver: values in the host's NVML, and exports that workers
    /// share.
    pub has_driver: bool,
    /// Whether the supervisor's other tenants are strangers to this one.
    pub has_strangers: bool,
    /// Protocol hashes of the installed workers.
    pub hashes: Vec<u64>,
}

/// Message to a tenant's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Serve the tenant whose stream comes with this.
    Serve(Service),
    /// Tell the workers whether other tenants use the devices as well, and report that. Until the first of these none do.
    Neighbours(bool),
    /// The supervisor has closed its copies of the descriptors sent so far.
    Released,
    /// Facts on the devices, or the reason why no worker has one.
    Device(Result<String, String>),
    /// A worker with a device, for a session. Its stream and its log come with this.
    Worker {
        session: Id,
        ticket: u64,
        pid: i32,
    },
    NoWorker {
        session: Id,
        refusal: Refusal,
        reason: String,
    },
    /// A worker has ended and was reaped.
    Ended {
        ticket: u64,
        ending: Ending,
        out_of_memory: bool,
    },
    /// A scrubber, whose socket comes with this.
    Scrubber {
        pid: i32,
    },
    NoScrubber(String),
    ScrubberEnded {
        pid: i32,
    },
    /// A part of a [`Sample`] of each device, encoded.
    Figures {
        is_last: bool,
        part: String,
    },
    /// Report the tenant's usage.
    CountUsage,
    /// A part of the answer to [`Report::AskUsage`]: JSON.
    Usage {
        is_last: bool,
        part: String,
    },
    /// Log the pending waits.
    Dump,
    /// End all sessions, for this reason.
    Stop(String),
    /// No worker and no scrubber can be started any more, for this reason, and all have ended. Only a
    /// loop in the supervisor's own process learns of that: the others have ended as well.
    Lost(String),
}

/// Message from a tenant's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// The launcher's window can be used, and these lines of those before it are left.
    Attached { lines: u32 },
    /// The workers have been told what the first unanswered [`Order::Neighbours`] says.
    Told,
    /// A session begins and needs a worker.
    Want {
        session: Id,
        hash: u64,
        environment: String,
    },
    /// A session's worker has taken it.
    Taken { session: Id },
    /// A session is over.
    Over { session: Id },
    /// Kill a worker.
    Kill { ticket: u64 },
    /// Start a scrubber.
    Scrubber,
    /// Send the figures of the host's NVML.
    Figures,
    /// Send the usage of the tenants that the client may see.
    AskUsage,
    /// The tenant's usage. If it is not the last report, another one with the exits of the guest follows.
    Usage { usage: Box<Usage>, is_last: bool },
}

/// Returns a text's bytes. None is cut: environments and facts come in frames of 8 KiB, and reasons
/// are short.
fn text(text: &str) -> &[u8] {
    &text.as_bytes()[..text.floor_char_boundary(LONGEST_TEXT)]
}

fn milliseconds(time: Duration) -> [u8; 8] {
    u64::try_from(time.as_millis())
        .unwrap_or(u64::MAX)
        .to_le_bytes()
}

impl Service {
    fn encode(&self) -> Vec<u8> {
        // No process has the time 0.
        let attach = self.attach_limit.unwrap_or_default();
        let mut bytes = [
            &self.tenant.to_le_bytes()[..],
            &milliseconds(attach),
            &milliseconds(self.hello_limit),
            &milliseconds(self.reap_limit),
            &self.lines.to_le_bytes(),
            &self.sessions.to_le_bytes(),
            &self.window.to_le_bytes(),
            &self.unread.to_le_bytes(),
            &[u8::from(self.has_driver), u8::from(self.has_strangers)],
        ]
        .concat();
        bytes.extend(self.hashes.iter().flat_map(|hash| hash.to_le_bytes()));
        bytes
    }

    fn decode(fields: &mut Fields<'_>) -> Option<Self> {
        let tenant = fields.half()?;
        let attach = Duration::from_millis(fields.number()?);
        Some(Self {
            tenant,
            attach_limit: Some(attach).filter(|time| !time.is_zero()),
            hello_limit: Duration::from_millis(fields.number()?),
            reap_limit: Duration::from_millis(fields.number()?),
            lines: fields.half()?,
            sessions: fields.number()?,
            window: fields.number()?,
            unread: fields.number()?,
            has_driver: fields.byte()? != 0,
            has_strangers: fields.byte()? != 0,
            hashes: fields.numbers()?,
        })
    }
}

impl Order {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Serve(service) => [&[1], &service.encode()[..]].concat(),
            Self::Released => vec![2],
            Self::Device(Ok(facts)) => [&[3], text(facts)].concat(),
            Self::Device(Err(reason)) => [&[4], text(reason)].concat(),
            Self::Worker {
                session,
                ticket,
                pid,
            } => [
                &[5],
                &session.to_le_bytes()[..],
                &ticket.to_le_bytes(),
                &pid.to_le_bytes(),
            ]
            .concat(),
            Self::NoWorker {
                session,
                refusal,
                reason,
            } => [
                &[6],
                &session.to_le_bytes()[..],
                &(*refusal as u32).to_le_bytes(),
                text(reason),
            ]
            .concat(),
            Self::Ended {
                ticket,
                ending,
                out_of_memory,
            } => [
                &[7],
                &ticket.to_le_bytes()[..],
                &fields::ending(*ending, *out_of_memory),
            ]
            .concat(),
            Self::Scrubber { pid } => [&[8], &pid.to_le_bytes()[..]].concat(),
            Self::NoScrubber(reason) => [&[9], text(reason)].concat(),
            Self::ScrubberEnded { pid } => [&[10], &pid.to_le_bytes()[..]].concat(),
            Self::Figures { is_last, part } => [&[11, u8::from(*is_last)], text(part)].concat(),
            Self::Dump => vec![12],
            Self::Stop(why) => [&[13], text(why)].concat(),
            Self::Lost(reason) => [&[14], text(reason)].concat(),
            Self::CountUsage => vec![15],
            Self::Usage { is_last, part } => [&[16, u8::from(*is_last)], text(part)].concat(),
            Self::Neighbours(some) => vec![17, u8::from(*some)],
        }
    }

    /// Returns none if the bytes are no output of [`encode`](Self::encode).
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields::new(bytes);
        let order = match fields.byte()? {
            1 => Self::Serve(Service::decode(&mut fields)?),
            2 => Self::Released,
            3 => Self::Device(Ok(fields.text()?)),
            4 => Self::Device(Err(fields.text()?)),
            5 => Self::Worker {
                session: fields.half()?,
                ticket: fields.number()?,
                pid: fields.signed()?,
            },
            6 => Self::NoWorker {
                session: fields.half()?,
                refusal: Refusal::from_code(fields.half()?)?,
                reason: fields.text()?,
            },
            7 => {
                let ticket = fields.number()?;
                let (ending, out_of_memory) = fields.ending()?;
                Self::Ended {
                    ticket,
                    ending,
                    out_of_memory,
                }
            }
            8 => Self::Scrubber {
                pid: fields.signed()?,
            },
            9 => Self::NoScrubber(fields.text()?),
            10 => Self::ScrubberEnded {
                pid: fields.signed()?,
            },
            11 => Self::Figures {
                is_last: fields.byte()? != 0,
                part: fields.text()?,
            },
            12 => Self::Dump,
            13 => Self::Stop(fields.text()?),
            14 => Self::Lost(fields.text()?),
            15 => Self::CountUsage,
            16 => Self::Usage {
                is_last: fields.byte()? != 0,
                part: fields.text()?,
            },
            17 => Self::Neighbours(fields.byte()? != 0),
            _ => return None,
        };
        fields.end().map(|()| order)
    }
}

impl Report {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Attached { lines } => [&[1], &lines.to_le_bytes()[..]].concat(),
            Self::Want {
                session,
                hash,
                environment,
            } => [
                &[2],
                &session.to_le_bytes()[..],
                &hash.to_le_bytes(),
                text(environment),
            ]
            .concat(),
            Self::Taken { session } => [&[3], &session.to_le_bytes()[..]].concat(),
            Self::Over { session } => [&[4], &session.to_le_bytes()[..]].concat(),
            Self::Kill { ticket } => [&[5], &ticket.to_le_bytes()[..]].concat(),
            Self::Scrubber => vec![6],
            Self::Figures => vec![7],
            Self::AskUsage => vec![8],
            Self::Usage { usage, is_last } => {
                let words = usage.words();
                let words = words.iter().flat_map(|word| word.to_le_bytes());
                [9, u8::from(*is_last)].into_iter().chain(words).collect()
            }
            Self::Told => vec![10],
        }
    }

    /// Returns none if the bytes are no output of [`encode`](Self::encode).
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields::new(bytes);
        let report = match fields.byte()? {
            1 => Self::Attached {
                lines: fields.half()?,
            },
            2 => Self::Want {
                session: fields.half()?,
                hash: fields.number()?,
                environment: fields.text()?,
            },
            3 => Self::Taken {
                session: fields.half()?,
            },
            4 => Self::Over {
                session: fields.half()?,
            },
            5 => Self::Kill {
                ticket: fields.number()?,
            },
            6 => Self::Scrubber,
            7 => Self::Figures,
            8 => Self::AskUsage,
            9 => Self::Usage {
                is_last: match fields.byte()? {
                    0 => false,
                    1 => true,
                    _ => return None,
                },
                usage: Box::new(Usage::of_words(&fields.numbers()?)?),
            },
            10 => Self::Told,
            _ => return None,
        };
        fields.end().map(|()| report)
    }
}

/// Returns the orders that carry these samples, by device.
pub fn figures(samples: &[Sample]) -> Vec<Order> {
    // Text and numbers by number: nothing that cannot be written.
    let text = serde_json::to_string(samples).unwrap_or_default();
    let (mut rest, mut orders) = (text.as_str(), Vec::new());
    loop {
        let (part, after) = rest.split_at(rest.floor_char_boundary(LONGEST_TEXT));
        let is_last = after.is_empty();
        let part = part.to_owned();
        orders.push(Order::Figures { is_last, part });
        if is_last {
            return orders;
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn orders() -> Vec<Order> {
        let service = Service {
            tenant: 7,
            attach_limit: None,
            hello_limit: Duration::from_secs(10),
            reap_limit: Duration::from_millis(600),
            lines: 2,
            sessions: 128,
            window: 1 << 40,
            unread: 64,
            has_driver: true,
            has_strangers: false,
            hashes: vec![3, u64::MAX],
        };
        let waits = Service {
            attach_limit: Some(Duration::from_secs(2)),
            has_strangers: true,
            hashes: Vec::new(),
            ..service.clone()
        };
        let [facts, reason] = ["name=cpu\n", "no device"].map(str::to_owned);
        vec![
            Order::Serve(service),
            Order::Serve(waits),
            Order::Neighbours(false),
            Order::Neighbours(true),
            Order::Released,
            Order::Device(Ok(facts.clone())),
            Order::Device(Err(reason.clone())),
            Order::Worker {
                session: 9,
                ticket: 1 << 40,
                pid: 4000,
            },
            Order::NoWorker {
                session: 9,
                refusal: Refusal::Quota,
                reason: reason.clone(),
            },
            Order::Ended {
                ticket: 4,
                ending: Ending::Signalled(9),
                out_of_memory: true,
            },
            Order::Ended {
                ticket: 4,
                ending: Ending::Exited(1),
                out_of_memory: false,
            },
            Order::Scrubber { pid: 5 },
            Order::NoScrubber(reason.clone()),
            Order::ScrubberEnded { pid: 5 },
            Order::Figures {
                is_last: true,
                part: facts.clone(),
            },
            Order::CountUsage,
            Order::Usage {
                is_last: false,
                part: facts,
            },
            Order::Dump,
            Order::Stop(reason.clone()),
            Order::Lost(reason),
        ]
    }

    fn reports() -> Vec<Report> {
        vec![
            Report::Attached { lines: 2 },
            Report::Told,
            Report::Want {
                session: 9,
                hash: 1 << 60,
                environment: "A=1\nB=2".to_owned(),
            },
            Report::Taken { session: 9 },
            Report::Over { session: 9 },
            Report::Kill { ticket: 8 },
            Report::Scrubber,
            Report::Figures,
            Report::AskUsage,
            Report::Usage {
                is_last: false,
                usage: Box::new(Usage {
                    records: 1 << 50,
                    vm_exits: Some(7),
                    ..Usage::default()
                }),
            },
        ]
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        for order in orders() {
            assert_eq!(Order::decode(&order.encode()), Some(order));
        }
        for report in reports() {
            assert_eq!(Report::decode(&report.encode()), Some(report));
        }
    }

    #[test]
    fn a_message_that_is_cut_or_too_long_is_none() {
        let longer = |bytes: &[u8]| [bytes, &[0xff]].concat();
        for bytes in orders().iter().map(Order::encode) {
            assert_ne!(Order::decode(&longer(&bytes)), Order::decode(&bytes));
        }
        for bytes in reports().iter().map(Report::encode) {
            assert_eq!(Report::decode(&longer(&bytes)), None);
            for length in 0..bytes.len() {
                assert_ne!(Report::decode(&bytes[..length]), Report::decode(&bytes));
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none(
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..80),
        ) {
            if let Some(report) = Report::decode(&bytes) {
                assert_eq!(report.encode(), bytes);
            }
            let _ = Order::decode(&bytes);
        }
    }

    #[test]
    fn figures_are_sent_in_parts() {
        let samples = [Sample {
            facts: "ä".repeat(LONGEST_TEXT),
            live: "power=1\n".to_owned(),
            counters: String::new(),
            processes: BTreeMap::from([(7, 600)]),
        }];
        let orders = figures(&samples);
        assert!(orders.len() > 2);
        let mut text = String::new();
        for order in &orders {
            let Some(Order::Figures { is_last, part }) = Order::decode(&order.encode()) else {
                panic!("{order:?}");
            };
            text.push_str(&part);
            assert_eq!(is_last, Some(order) == orders.last());
        }
        let read: Vec<Sample> = serde_json::from_str(&text).unwrap();
        assert_eq!(read, samples);
    }
}
