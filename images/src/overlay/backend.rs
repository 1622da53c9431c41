//! The overlay of a backend VM.

use std::ffi::OsString;
use std::path::PathBuf;

use wormhole_init::{PARTS, RunFile, Sink};

use super::{EXIT_PORT, HOST_CID, Overlay, common_variables, ports};
use crate::driver::{self, Driver};
use crate::error::ImageError;

/// A run of the backend in a VM of its own.
#[derive(Clone, Debug)]
pub struct BackendRun {
    /// Path of `wormhole-init`.
    pub init: PathBuf,
    /// Path of the `wormhole` command.
    pub wormhole: PathBuf,
    /// Paths of the supervisor and of the workers.
    pub parts: Vec<PathBuf>,
    /// Arguments of `wormhole`, without its name.
    pub arguments: Vec<OsString>,
    /// Environment variables. They replace common ones.
    pub variables: Vec<(OsString, OsString)>,
    /// Size of each window in bytes.
    pub window: u64,
    /// Driver of GPUs that the VM loads.
    pub driver: Option<Driver>,
}

/// Builds the overlay of a backend VM, which has no files of the host.
pub fn backend_overlay(run: &BackendRun) -> Result<Vec<u8>, ImageError> {
    let mut overlay = Overlay::new(&run.init, &run.variables)?;
    let command = overlay.install(&run.wormhole, &run.parts)?;
    let mut folders = PARTS.to_owned();
    if let Some(driver) = &run.driver {
        overlay.libraries(&driver.libraries)?;
        folders.push(':');
        folders.push_str(driver::LIBRARIES);
    }
    let mut variables = common_variables(&run.variables, &folders);
    let own = run.variables.iter();
    variables.extend(own.filter(|(name, _)| name != "LD_LIBRARY_PATH").cloned());
    let vsock = |port| Sink::Vsock {
        cid: HOST_CID,
        port,
    };
    let mut run_file = RunFile::new(command);
    run_file.arguments.extend(run.arguments.iter().cloned());
    overlay.finish(&RunFile {
        variables,
        hostname: Some("backend".to_owned()),
        stdout: vsock(ports::STDOUT),
        stderr: Some(vsock(ports::STDERR)),
        report: vsock(ports::REPORT),
        windows: Some(run.window),
        exit_port: Some(EXIT_PORT),
        ..run_file
    })
}
