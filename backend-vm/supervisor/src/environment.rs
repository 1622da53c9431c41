//! Environment variables that workers receive from guests and from the supervisor.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::thread;

use wormhole_link::process::PROCESSORS;

/// Variables that the driver reads at start and that change its behaviour for programs (CUDA
/// programming guide, "CUDA environment variables"). The frontend itself handles those that select
/// devices or make launches block.
const PASSED: &[&str] = &[
    "CUDA_CACHE_DISABLE",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_MAX_COPY_CONNECTIONS",
    "CUDA_DISABLE_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_FORCE_JIT",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_GRAPHS_USE_NODE_PRIORITY",
    "CUDA_MODULE_DATA_LOADING",
    "CUDA_MODULE_LOADING",
    "CUDA_SCALE_LAUNCH_QUEUES",
    // The worker's own switch of chains of launches, and the transport.
    "WORMHOLE_CHAINS",
    wormhole_ring::transport::VARIABLE,
];
/// Variables of that list that set a part of the whole device, and so of other tenants' work.
const WHOLE_DEVICE: &[&str] = &["CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT"];
/// Variables of that list that set how many channels of a device the driver takes. All tenants' channels come out of one supply.
const CHANNELS: &[&str] = &[
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_MAX_COPY_CONNECTIONS",
];
/// Values of these variables up to the driver's default (CUDA programming guide, "CUDA environment variables").
const DEFAULT_CHANNELS: RangeInclusive<u32> = 1..=8;
/// Largest size of a value in bytes.
const LONGEST: usize = 32;

/// Returns the part of a hello's environment that the worker is started with, sorted. Other
/// variables are dropped.
pub fn passed_on(text: &str) -> Vec<(OsString, OsString)> {
    let mut variables: Vec<(OsString, OsString)> = text
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(name, value)| {
            PASSED.contains(name)
                && value.len() <= LONGEST
                && value
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"_-.%".contains(&byte))
        })
        .map(|(name, value)| (name.into(), value.into()))
        .collect();
    variables.sort();
    variables.dedup_by(|a, b| a.0 == b.0);
    variables
}

/// Returns the part of a hello's environment for a worker of a tenant that may get neighbours: no variable takes more
/// channels than the driver's default.
pub fn with_default_channels(text: &str) -> Vec<(OsString, OsString)> {
    let mut variables = passed_on(text);
    variables.retain(|(name, value)| {
        let number = value.to_str().and_then(number);
        !CHANNELS.iter().any(|one| name == one)
            || number.is_some_and(|number| DEFAULT_CHANNELS.contains(&number))
    });
    variables
}

/// Reads a number, decimal or hexadecimal.
fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Returns the part of a hello's environment for a worker of a tenant that has neighbours.
pub fn beside_neighbours(text: &str) -> Vec<(OsString, OsString)> {
    let mut variables = with_default_channels(text);
    variables.retain(|(name, _)| !WHOLE_DEVICE.iter().any(|one| name == one));
    variables
}

/// Returns the variables of the supervisor that workers need.
pub fn inherited() -> Vec<(OsString, OsString)> {
    let mut variables: Vec<(OsString, OsString)> = ["WORMHOLE_LOG", "RUST_BACKTRACE"]
        .iter()
        .filter_map(|name| std::env::var_os(name).map(|value| ((*name).into(), value)))
        .collect();
    variables.push(("PATH".into(), "/usr/bin:/bin".into()));
    variables.push(("HOME".into(), "/tmp".into()));
    // Fewer where a cgroup has a quota.
    if let Ok(processors) = thread::available_parallelism() {
        variables.push((PROCESSORS.into(), processors.to_string().into()));
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_driver_reads_is_passed_on() {
        let text = "CUDA_MODULE_LOADING=EAGER\nLD_PRELOAD=/tmp/x.so\nCUDA_INJECTION64_PATH=/tmp/y\n\
                    CUDA_DEVICE_MAX_CONNECTIONS=8\nCUDA_CACHE_MAXSIZE=1;rm\nnonsense";
        let passed: Vec<String> = passed_on(text)
            .into_iter()
            .map(|(name, value)| format!("{}={}", name.display(), value.display()))
            .collect();
        assert_eq!(
            passed,
            ["CUDA_DEVICE_MAX_CONNECTIONS=8", "CUDA_MODULE_LOADING=EAGER"]
        );
        assert_eq!(passed_on("WORMHOLE_PROCESSORS=64"), []);
    }

    #[test]
    fn where_tenants_may_come_no_variable_takes_more_channels_than_the_drivers_default() {
        let kept = |variable: &str| !with_default_channels(variable).is_empty();
        for name in CHANNELS {
            for value in ["1", "8", "0x1"] {
                assert!(kept(&format!("{name}={value}")), "{name}={value}");
            }
            for value in ["0", "9", "32", "0x20", "-1", "8.5", "x", "99999999999"] {
                let variable = format!("{name}={value}");
                assert!(!kept(&variable), "{variable}");
                assert!(!passed_on(&variable).is_empty(), "{variable}");
                assert!(beside_neighbours(&variable).is_empty(), "{variable}");
            }
        }
        assert!(kept("CUDA_CACHE_MAXSIZE=32"));
    }

    #[test]
    fn a_worker_learns_of_how_many_processors_it_has_a_part() {
        let inherited = inherited();
        let told = inherited.iter().find(|(name, _)| name == PROCESSORS);
        let processors = thread::available_parallelism().unwrap().to_string();
        assert_eq!(
            told.map(|(_, number)| number.clone()),
            Some(processors.into())
        );
    }
}
