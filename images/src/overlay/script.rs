//! The overlay and the machine of an emulated host that runs a person's shell script.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wormhole_init::Report;

use super::{HostRun, host_overlay};
use crate::emulated_host::{DiskFile, EmulatedHost};
use crate::error::ImageError;
use crate::image::Image;

/// Parts of the installation that guests and backends need.
const PARTS: [&str; 6] = [
    "wormhole-fs",
    "wormhole-init",
    "wormhole-supervisor",
    "wormhole-worker",
    "libcuda.so.1",
    "libnvidia-ml.so.1",
];

/// A bash script that runs `wormhole` in the emulated host.
#[derive(Clone, Debug)]
pub struct HostScript<'a> {
    /// Folder of the staged installation.
    pub stage: &'a Path,
    /// Images of guests and of backend VMs.
    pub images: Vec<Image>,
    pub script: &'a str,
    /// Arguments of the script. The command's path precedes them.
    pub arguments: Vec<OsString>,
    /// Files to copy to the same paths in the machine; programs with their libraries.
    pub files: Vec<PathBuf>,
    /// Files to return with the report.
    pub collect: Vec<PathBuf>,
}

/// Builds the overlay of the emulated host. The shell is its only program, in place of the command.
pub fn script_overlay(run: &HostScript<'_>) -> Result<Vec<u8>, ImageError> {
    let part = |name: &str| run.stage.join("lib/wormhole").join(name);
    let command = run.stage.join("bin/wormhole");
    let words = [
        "-c".into(),
        run.script.into(),
        "bash".into(),
        command.clone().into(),
    ];
    host_overlay(&HostRun {
        init: part("wormhole-init"),
        wormhole: Path::new("/bin/bash").into(),
        parts: Vec::new(),
        images: run.images.clone(),
        arguments: words
            .into_iter()
            .chain(run.arguments.iter().cloned())
            .collect(),
        variables: Vec::new(),
        stdin: false,
        terminal: None,
        programs: std::iter::once(command)
            .chain(PARTS.map(part))
            .chain(run.files.iter().cloned())
            .collect(),
        has_files: false,
        volumes: Vec::new(),
        taps: 0,
        collect: run.collect.clone(),
    })
}

/// Returns the machine that runs a script, with memory for a few VMs.
pub fn script_host<'a>(
    image: &'a Image,
    overlay: &'a [u8],
    disks: &'a [DiskFile<'a>],
    timeout: Duration,
) -> EmulatedHost<'a> {
    EmulatedHost {
        image,
        overlay,
        memory: 3 << 30,
        processors: 2,
        disks,
        nvme_disks: &[],
        networks: &[],
        files: &[],
        timeout: Some(timeout),
        stdin: None,
        signals: None,
    }
}

/// Returns whether QEMU's emulation failed in a script, by its outcome and by its errors, so that another attempt may
/// succeed: on a real processor Linux never causes a triple fault.
pub fn is_emulation_failure(outcome: &Result<Report, ImageError>, errors: &str) -> bool {
    match outcome {
        Ok(_) => errors.contains("(triple fault)"),
        Err(error) => matches!(
            error,
            ImageError::HostDied { .. }
                | ImageError::HostTimeout { .. }
                | ImageError::HostNotReady { .. }
        ),
    }
}
