//! Limits that an operator sets for a supervisor's tenants: the options of the supervisor, and of the command that
//! starts one.

use clap::builder::RangedU64ValueParser;
use clap::{Args, value_parser};

/// Bytes of memory without which no worker starts.
pub const LEAST_MEMORY: u64 = 64 << 20;

/// Sessions of a tenant for which the operator gives no number.
pub const SESSIONS: usize = 128;

/// The operator's options. Each has a default in the supervisor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct OperatorOptions {
    /// A user, by number, whose processes may attach over the socket, beside root and the supervisor's own user.
    #[arg(long, value_name = "UID", value_parser = value_parser!(u32).range(..i64::from(u32::MAX)))]
    pub tenant_user: Vec<u32>,
    /// The tenants trust each other. They are then served although no cgroup is delegated to the supervisor, so that
    /// nothing limits their memory and processors. On a GPU the supervisor need not be root, and programs share memory by
    /// cuIpcGetMemHandle, with handles of the driver's that another tenant's worker could guess if it were taken over.
    #[arg(long)]
    pub trusted_tenants: bool,
    /// Memory that a worker may have, as in 4G: memory of the CPU device, and the window. As much as its
    /// tenant if not given. A cgroup of each worker's own limits it where the
    /// supervisor's own is delegated to it (systemd: Delegate=yes) and there is one tenant, or they trust each other;
    /// elsewhere a resource limit does on the CPU device, for private memory, and nothing does with CUDA.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub worker_memory: Option<u64>,
    /// Memory that the workers of one tenant may have together, where there are cgroups. If not given, three quarters of
    /// the system's memory, or of the supervisor's own limit, which is what all workers may have together, divided by the
    /// tenants that there may be at the same time: --tenants-per-user for the supervisor's own user and each --tenant-user,
    /// but no more than have 512 MiB each, or --worker-memory if that is more. Further ones are refused.
    /// With --trusted-tenants each may have all of it.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub tenant_memory: Option<u64>,
    /// Tenants that one user may have over the socket at the same time; 64 if not given.
    #[arg(long, value_name = "N", value_parser = count())]
    pub tenants_per_user: Option<usize>,
    /// Sessions, which are CUDA processes, that one tenant may have at the same time; 128 if not given. Where there are
    /// cgroups, their workers may have as many threads for each as the devices need, but one of several tenants at most
    /// half of the threads that all workers may have: three quarters of the system's limit.
    #[arg(long, value_name = "N", value_parser = count())]
    pub sessions: Option<usize>,
    /// Sessions that all tenants of one user may have at the same time; 1,024 if not given.
    #[arg(long, value_name = "N", value_parser = count())]
    pub sessions_per_user: Option<usize>,
    /// Use of its window that a tenant may make at a time, as in 64G; as much as its workers have memory if not given.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub window_limit: Option<u64>,
}

/// A limit that has no effect, since another one is lower. Both are names of options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--{part} has no effect, since --{whole} allows less: lower it or leave it out")]
pub struct Beyond {
    pub part: &'static str,
    pub whole: &'static str,
}

impl OperatorOptions {
    /// Checks that a worker's memory is within its tenant's, and a tenant's sessions within its user's.
    ///
    /// # Errors
    /// One of them is not.
    pub fn check(&self) -> Result<(), Beyond> {
        let count = |count: Option<usize>| count.map(|count| count as u64);
        let within = [
            (
                ("worker-memory", self.worker_memory),
                ("tenant-memory", self.tenant_memory),
            ),
            (
                ("sessions", count(self.sessions)),
                ("sessions-per-user", count(self.sessions_per_user)),
            ),
        ];
        let beyond = within
            .iter()
            .find(|((_, part), (_, whole))| whole.is_some() && part > whole);
        beyond.map_or(Ok(()), |((part, _), (whole, _))| {
            Err(Beyond { part, whole })
        })
    }

    /// Returns the arguments that set the same options for another process.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let users = self.tenant_user.iter().map(|user| u64::from(*user));
        let count = |count: Option<usize>| count.map(|count| count as u64);
        let values = [
            ("--worker-memory", self.worker_memory),
            ("--tenant-memory", self.tenant_memory),
            ("--tenants-per-user", count(self.tenants_per_user)),
            ("--sessions", count(self.sessions)),
            ("--sessions-per-user", count(self.sessions_per_user)),
            ("--window-limit", self.window_limit),
        ];
        let values = values
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        let mut arguments: Vec<String> = users
            .map(|user| ("--tenant-user", user))
            .chain(values)
            .flat_map(|(name, value)| [name.to_owned(), value.to_string()])
            .collect();
        arguments.extend(self.trusted_tenants.then(|| "--trusted-tenants".to_owned()));
        arguments
    }
}

/// A backend without any tenants or sessions would serve nobody.
fn count() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

fn memory(text: &str) -> Result<u64, String> {
    let units = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];
    let (digits, shift) = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(*unit)?, *shift)))
        .unwrap_or((text, 0));
    digits
        .parse::<u64>()
        .ok()
        .and_then(|count| count.checked_mul(1u64 << shift))
        .filter(|bytes| *bytes >= LEAST_MEMORY)
        .ok_or_else(|| format!("write a size such as 4G, at least {}M", LEAST_MEMORY >> 20))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        options: OperatorOptions,
    }

    #[test]
    fn a_size_is_read_with_its_unit() {
        assert_eq!(memory("4G"), Ok(4 << 30));
        assert_eq!(memory("100M"), Ok(100 << 20));
        assert_eq!(memory("100000000"), Ok(100_000_000));
        for wrong in ["", "G", "4GG", "-4G", "4 G", "4g", "63M", "99999999999T"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn options_with_which_no_one_is_served_are_refused() {
        for option in [
            "--sessions=0",
            "--sessions-per-user=0",
            "--tenants-per-user=0",
            "--tenant-user=4294967295",
        ] {
            let parsed = Command::try_parse_from(["x", option]);
            assert!(parsed.is_err(), "{option}");
        }
    }

    #[test]
    fn a_limit_beyond_that_of_the_whole_is_refused() {
        let check = |arguments: &[&str]| {
            let all = ["x"].iter().chain(arguments);
            Command::try_parse_from(all).unwrap().options.check()
        };
        for good in [
            &["--worker-memory=2G", "--tenant-memory=2G"][..],
            &["--sessions=2", "--sessions-per-user=3"],
            &["--sessions=5000", "--worker-memory=1T"],
        ] {
            assert_eq!(check(good), Ok(()));
        }
        for bad in [
            &["--worker-memory=2G", "--tenant-memory=1G"][..],
            &["--sessions=2", "--sessions-per-user=1"],
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn another_process_gets_the_same_options() {
        let options = OperatorOptions {
            tenant_user: vec![1000, 65534],
            trusted_tenants: true,
            worker_memory: Some(64 << 20),
            tenant_memory: Some(1 << 30),
            tenants_per_user: Some(2),
            sessions: Some(3),
            sessions_per_user: Some(4),
            window_limit: Some(8 << 40),
        };
        for options in [options, OperatorOptions::default()] {
            let arguments = ["x".to_owned()].into_iter().chain(options.arguments());
            let command = Command::try_parse_from(arguments).unwrap();
            assert_eq!(command.options, options);
        }
    }
}
