//! Messages between the supervisor and its spawner: one datagram each.

use wormhole_sandbox::Ending;

use crate::fields::{self, Fields};

/// First ticket of forked processes; workers have those below.
pub const FORKS: u64 = 1 << 63;

/// Work of a process that is forked from the spawner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Close descriptors of the tenant with this number; none if the supervisor serves its only
    /// tenant itself.
    Scrubber(Option<u32>),
    /// Refuse connections and close them.
    Refuser,
    /// Serve the tenant with this number, of this user.
    Tenant { tenant: u32, user: u32 },
}

/// Order of the supervisor. The spawner alone knows the workers' programs and their confinement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Start the worker for a protocol. `environment` comes from a guest, in lines of `NAME=VALUE`.
    Start {
        ticket: u64,
        hash: u64,
        environment: String,
    },
    /// Kill a worker or a forked process.
    Kill { ticket: u64 },
    /// Move a worker into a tenant's cgroup.
    Assign { ticket: u64, tenant: u32 },
    /// Fork a process that starts no program.
    Fork { ticket: u64, role: Role },
    /// Report when nothing of a tenant whose processes have ended is charged to its cgroup any more.
    Remove { tenant: u32 },
}

/// Report of the spawner, by the ticket of the order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// Workers can be started: their protocols, and their device or the reason why there is none.
    /// Each process has a user of its own, if `has_users`.
    Ready {
        has_users: bool,
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
    /// A worker or a forked process has ended and was reaped.
    Ended {
        ticket: u64,
        ending: Ending,
        out_of_memory: bool,
    },
    /// A process was forked. Its socket comes with the report, and the log of one that serves a tenant.
    Forked {
        ticket: u64,
        pid: i32,
    },
    /// The process could not be forked.
    NotForked {
        ticket: u64,
        reason: String,
    },
    /// All memory of a tenant is free, and its cgroup is removed.
    Removed {
        tenant: u32,
    },
    /// A worker is in its tenant's cgroup, if there are cgroups.
    Assigned {
        ticket: u64,
    },
    /// A worker was not moved into its tenant's cgroup, and is killed.
    NotAssigned {
        ticket: u64,
        reason: String,
    },
}

/// Bytes that are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes between supervisor and spawner are no message")]
pub struct Malformed(usize);

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
            Self::Fork { ticket, role } => {
                let (role, tenant, user) = match role {
                    Role::Scrubber(Some(tenant)) => (0, *tenant, 0),
                    Role::Scrubber(None) => (3, 0, 0),
                    Role::Tenant { tenant, user } => (1, *tenant, *user),
                    Role::Refuser => (2, 0, 0),
                };
                let (tenant, user) = (tenant.to_le_bytes(), user.to_le_bytes());
                [&[4], &ticket.to_le_bytes()[..], &[role], &tenant, &user].concat()
            }
            Self::Remove { tenant } => [&[5], &tenant.to_le_bytes()[..]].concat(),
        }
    }

    /// # Errors
    /// The bytes are no output of [`encode`](Self::encode).
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields::new(bytes);
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
                    tenant: fields.half()?,
                },
                4 => Self::Fork {
                    ticket: fields.number()?,
                    role: match (fields.byte()?, fields.half()?, fields.half()?) {
                        (0, tenant, 0) => Role::Scrubber(Some(tenant)),
                        (3, 0, 0) => Role::Scrubber(None),
                        (1, tenant, user) => Role::Tenant { tenant, user },
                        (2, 0, 0) => Role::Refuser,
                        _ => return None,
                    },
                },
                5 => Self::Remove {
                    tenant: fields.half()?,
                },
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
            Self::Ready {
                has_users,
                hashes,
                device,
            } => {
                let count = u64::try_from(hashes.len()).unwrap_or(0);
                let mut bytes = [&[1, u8::from(*has_users)], &count.to_le_bytes()[..]].concat();
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
            } => [
                &[5],
                &ticket.to_le_bytes()[..],
                &fields::ending(*ending, *out_of_memory),
            ]
            .concat(),
            Self::Forked { ticket, pid } => {
                [&[6], &ticket.to_le_bytes()[..], &pid.to_le_bytes()].concat()
            }
            Self::NotForked { ticket, reason } => {
                [&[7], &ticket.to_le_bytes()[..], reason.as_bytes()].concat()
            }
            Self::Removed { tenant } => [&[8], &tenant.to_le_bytes()[..]].concat(),
            Self::Assigned { ticket } => [&[10], &ticket.to_le_bytes()[..]].concat(),
            Self::NotAssigned { ticket, reason } => {
                [&[9], &ticket.to_le_bytes()[..], reason.as_bytes()].concat()
            }
        }
    }

    /// # Errors
    /// The bytes are no output of [`encode`](Self::encode).
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields::new(bytes);
        let mut read = || {
            let report = match fields.byte()? {
                1 => {
                    let has_users = fields.byte()? == 1;
                    let count = fields.number()?;
                    let hashes = (0..count).map(|_| fields.number()).collect::<Option<_>>()?;
                    let works = fields.byte()?;
                    let text = fields.text()?;
                    Self::Ready {
                        has_users,
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
                    let (ending, out_of_memory) = fields.ending()?;
                    Self::Ended {
                        ticket,
                        ending,
                        out_of_memory,
                    }
                }
                6 => Self::Forked {
                    ticket: fields.number()?,
                    pid: fields.signed()?,
                },
                7 => Self::NotForked {
                    ticket: fields.number()?,
                    reason: fields.text()?,
                },
                8 => Self::Removed {
                    tenant: fields.half()?,
                },
                9 => Self::NotAssigned {
                    ticket: fields.number()?,
                    reason: fields.text()?,
                },
                10 => Self::Assigned {
                    ticket: fields.number()?,
                },
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
            Order::Fork {
                ticket: FORKS,
                role: Role::Scrubber(Some(u32::MAX)),
            },
            Order::Fork {
                ticket: FORKS,
                role: Role::Scrubber(None),
            },
            Order::Fork {
                ticket: FORKS + 1,
                role: Role::Tenant {
                    tenant: 7,
                    user: u32::MAX,
                },
            },
            Order::Fork {
                ticket: FORKS + 2,
                role: Role::Refuser,
            },
            Order::Remove { tenant: u32::MAX },
        ];
        for order in orders {
            assert_eq!(Order::decode(&order.encode()), Ok(order));
        }
        let reports = [
            Report::Ready {
                has_users: true,
                hashes: vec![1, 2],
                device: Ok("cpu".to_owned()),
            },
            Report::Ready {
                has_users: false,
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
            Report::Forked {
                ticket: FORKS,
                pid: 5,
            },
            Report::NotForked {
                ticket: FORKS,
                reason: "why".to_owned(),
            },
            Report::Removed { tenant: u32::MAX },
            Report::Assigned { ticket: 3 },
            Report::NotAssigned {
                ticket: 3,
                reason: "why".to_owned(),
            },
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
        let bytes = [&[1, 0], &u64::MAX.to_le_bytes()[..]].concat();
        assert_eq!(Report::decode(&bytes), Err(Malformed(10)));
    }
}
