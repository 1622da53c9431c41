//! Conditions of a run.

use std::process::Command;

use serde::{Deserialize, Serialize};

/// Variable with the commit, for machines that have no checkout.
const COMMIT: &str = "WORMHOLE_COMMIT";

/// Conditions on which figures depend.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
pub struct Conditions {
    /// Universal time, as `date` writes it.
    pub date: String,
    pub commit: String,
    pub machine: Machine,
    /// Name of the device, where the benchmark has one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// Version of NVIDIA's kernel driver, where there is one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub driver: String,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
pub struct Machine {
    pub processor: String,
    pub processors: usize,
    pub kernel: String,
    /// Linux's load average of the last minute.
    pub load_before: f64,
    pub load_after: f64,
}

impl Conditions {
    pub fn read() -> Self {
        let of_driver = read("/proc/driver/nvidia/version");
        let commit = std::env::var(COMMIT).ok();
        Self {
            date: said(Command::new("date").args(["--utc", "+%F %R"])),
            commit: commit.unwrap_or_else(|| {
                let form = ["describe", "--always", "--dirty", "--exclude=*"];
                said(Command::new("git").args(form))
            }),
            machine: Machine::read(),
            device: String::new(),
            // `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  …`
            driver: of_driver
                .split_whitespace()
                .find(|word| word.starts_with(|first: char| first.is_ascii_digit()))
                .unwrap_or_default()
                .to_owned(),
        }
    }
}

impl Machine {
    fn read() -> Self {
        let model = |line: &str| {
            Some(
                line.strip_prefix("model name")?
                    .split_once(':')?
                    .1
                    .trim()
                    .to_owned(),
            )
        };
        let load = load();
        Self {
            processor: read("/proc/cpuinfo")
                .lines()
                .find_map(model)
                .unwrap_or_default(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load_before: load,
            load_after: load,
        }
    }
}

/// Returns Linux's load average of the last minute.
pub(crate) fn load() -> f64 {
    let text = read("/proc/loadavg");
    let first = text.split(' ').next().and_then(|word| word.parse().ok());
    first.unwrap_or_default()
}

fn read(file: &str) -> String {
    std::fs::read_to_string(file).unwrap_or_default()
}

/// Returns the output of a command, and nothing if it fails.
fn said(command: &mut Command) -> String {
    let output = command
        .output()
        .ok()
        .filter(|output| output.status.success());
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.unwrap_or_default()
}
