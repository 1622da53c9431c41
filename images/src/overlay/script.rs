//! The overlay of an emulated host that runs a person's shell script.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::{HostRun, host_overlay};
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
