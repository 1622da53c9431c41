//! Runs a shell script on a machine that has VMs: this one, or an emulated host.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use wormhole_images::{
    Collected, Ending, HostScript, Image, ImageError, Kernel, Report, is_emulation_failure,
    script_host, script_overlay,
};
use wormhole_monitor::{KvmCaps, probe};

use crate::command::{Failure, Run, step};
use crate::setup;
use crate::stage::Stage;

/// Most attempts to run the emulated host, which sometimes fails.
const ATTEMPTS: u32 = 3;
/// Folder of a script in the emulated host.
const FOLDER: &str = "/run";
/// Times by which an emulated machine is slower than its processors. It bounds waiting, and nothing is measured by it.
const SLOWNESS: u32 = 4;

/// A bash script of guests and backend VMs. `$1` is the command, `$2` a folder for its files, `$3` the seconds after which a
/// guest counts as hung.
#[derive(Debug)]
pub struct Script<'a> {
    pub text: &'a str,
    /// Arguments from `$4` on.
    pub arguments: Vec<OsString>,
    /// Programs that the script and its guests use.
    pub programs: Vec<PathBuf>,
    /// Names of files in the folder that the script leaves.
    pub results: Vec<String>,
    /// Seconds after which a guest counts as hung, on processors that are not emulated.
    pub patience: u32,
    /// Time after which the emulated host counts as hung.
    pub host_patience: Duration,
}

/// Outcome of a script.
#[derive(Debug)]
pub struct Ran {
    pub is_success: bool,
    pub output: String,
    /// The results that are there, in their order.
    pub results: Vec<Vec<u8>>,
    /// `kvm` or `emulated`.
    pub guest: &'static str,
}

impl Script<'_> {
    /// Runs the script, and shows its output. Its folder below `target` is `name`.
    pub fn run(&self, root: &Path, stage: &Stage, name: &str) -> Result<Ran, Failure> {
        match probe() {
            KvmCaps::Linux => self.run_here(&root.join("target").join(name), stage),
            _ => self.run_emulated(root, stage),
        }
    }

    fn arguments(&self, folder: &Path, slowness: u32) -> Vec<OsString> {
        let patience = (self.patience * slowness).to_string();
        [folder.into(), patience.into()]
            .into_iter()
            .chain(self.arguments.iter().cloned())
            .collect()
    }

    fn run_here(&self, folder: &Path, stage: &Stage) -> Result<Ran, Failure> {
        let failed = |error: io::Error| Failure::new(format!("{}: {error}", folder.display()));
        if folder.exists() {
            fs::remove_dir_all(folder).map_err(failed)?;
        }
        fs::create_dir_all(folder).map_err(failed)?;
        let (status, output) = Run::new("bash")
            .args(["-c", self.text, "bash"])
            .args([stage.wormhole()])
            .args(self.arguments(folder, 1))
            .tee_once()?;
        let results = self.results.iter().map(|name| fs::read(folder.join(name)));
        Ok(Ran {
            is_success: status.success(),
            output,
            results: results.flatten().collect(),
            guest: "kvm",
        })
    }

    fn run_emulated(&self, root: &Path, stage: &Stage) -> Result<Ran, Failure> {
        let failed = |error: ImageError| Failure::new(error.to_string());
        let images = setup::images(root);
        let find = |image: fn(&Path, Kernel) -> Result<Image, ImageError>| {
            image(&images, Kernel::V6_1).map_err(failed)
        };
        let overlay = script_overlay(&HostScript {
            stage: &stage.prefix,
            images: vec![find(Image::guest)?, find(Image::backend)?],
            script: self.text,
            arguments: self.arguments(Path::new(FOLDER), SLOWNESS),
            files: self.programs.clone(),
            collect: self
                .results
                .iter()
                .map(|name| Path::new(FOLDER).join(name))
                .collect(),
        })
        .map_err(failed)?;
        let image = find(Image::emulated_host)?;
        let mut attempt = 1;
        loop {
            let (mut output, mut errors) = (Tee::of(io::stdout()), Tee::of(io::stderr()));
            let host = script_host(&image, &overlay, &[], self.host_patience);
            let report = host.run(&mut output, &mut errors);
            if is_emulation_failure(&report, &errors.text()) && attempt < ATTEMPTS {
                attempt += 1;
                step("the emulated host failed: once more");
                continue;
            }
            let Report { ending, collected } = report.map_err(failed)?;
            let files = collected.into_iter().filter_map(|result| match result {
                Collected::File(bytes) => Some(bytes),
                Collected::Folder(_) | Collected::Absent(_) => None,
            });
            return Ok(Ran {
                is_success: ending == Ending::Exited(0),
                output: output.text(),
                results: files.collect(),
                guest: "emulated",
            });
        }
    }
}

/// Passes bytes on, and keeps them.
struct Tee<W> {
    to: W,
    bytes: Vec<u8>,
}

impl<W> Tee<W> {
    fn of(to: W) -> Self {
        Self {
            to,
            bytes: Vec::new(),
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

impl<W: Write> Write for Tee<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend(bytes);
        // A closed output does not end the script.
        let _ = self.to.write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.to.flush();
        Ok(())
    }
}
