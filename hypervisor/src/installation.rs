//! Where the parts of Wormhole lie on this host.

use std::path::{Path, PathBuf};

/// The folder that holds what `wormhole` starts and takes along: the supervisor, the workers, the
/// frontend libraries and the init program of images.
#[derive(Debug, Clone)]
pub struct Installation {
    command: PathBuf,
    parts: PathBuf,
    images: PathBuf,
}

/// A part that is not where it should be.
#[derive(Debug, thiserror::Error)]
pub enum InstallationError {
    #[error("cannot tell where the wormhole command itself lies")]
    Command(#[source] std::io::Error),
    #[error(
        "{name} is not in {folder}: install Wormhole whole, or run `cargo xtask stage` in its source tree"
    )]
    Missing { name: &'static str, folder: PathBuf },
}

impl Installation {
    /// `../lib/wormhole` and `../share/wormhole/images` beside the folder of the running command.
    pub fn locate() -> Result<Self, InstallationError> {
        let command = std::env::current_exe().map_err(InstallationError::Command)?;
        let prefix = command.parent().and_then(Path::parent);
        let below = |part| prefix.map(|prefix| prefix.join(part)).unwrap_or_default();
        Ok(Self {
            parts: below("lib/wormhole"),
            images: below("share/wormhole/images"),
            command,
        })
    }

    /// The folder of images: the user's choice, the installation's, or the user's own; see
    /// [`wormhole_images::default_folder`].
    pub fn images(&self) -> Option<PathBuf> {
        wormhole_images::default_folder(&self.images)
    }

    /// The running command.
    pub fn command(&self) -> &Path {
        &self.command
    }

    /// The folder of all parts; workers are found in it by name.
    pub fn folder(&self) -> &Path {
        &self.parts
    }

    pub fn supervisor(&self) -> Result<PathBuf, InstallationError> {
        self.part("wormhole-supervisor")
    }

    pub fn worker(&self) -> Result<PathBuf, InstallationError> {
        self.part("wormhole-worker")
    }

    /// The guests' libraries, the CUDA driver's and NVML, under the names that programs open.
    pub fn frontends(&self) -> Result<Vec<PathBuf>, InstallationError> {
        ["libcuda.so.1", "libnvidia-ml.so.1"]
            .map(|name| self.part(name))
            .into_iter()
            .collect()
    }

    pub fn init(&self) -> Result<PathBuf, InstallationError> {
        self.part("wormhole-init")
    }

    fn part(&self, name: &'static str) -> Result<PathBuf, InstallationError> {
        let path = self.parts.join(name);
        if path.is_file() {
            Ok(path)
        } else {
            Err(InstallationError::Missing {
                name,
                folder: self.parts.clone(),
            })
        }
    }
}
