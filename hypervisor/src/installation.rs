//! Location of Wormhole's parts on this host.

use std::path::{Path, PathBuf};

/// Folder of the programs and libraries that `wormhole` starts or copies into images: the
/// supervisor, the workers, the frontend libraries and the init program.
#[derive(Debug, Clone)]
pub struct Installation {
    command: PathBuf,
    parts: PathBuf,
    images: PathBuf,
}

/// Error for a missing part.
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
    /// Locates `../lib/wormhole` and `../share/wormhole/images` relative to the folder of the
    /// running command.
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

    /// Returns the folder of images: the user's choice, the installation's, or the user's own; see
    /// [`wormhole_images::default_folder`].
    pub fn images(&self) -> Option<PathBuf> {
        wormhole_images::default_folder(&self.images)
    }

    /// Returns the path of the running command.
    pub fn command(&self) -> &Path {
        &self.command
    }

    /// Returns the folder of all parts. The supervisor finds workers in it by name.
    pub fn folder(&self) -> &Path {
        &self.parts
    }

    pub fn supervisor(&self) -> Result<PathBuf, InstallationError> {
        self.part("wormhole-supervisor")
    }

    pub fn worker(&self) -> Result<PathBuf, InstallationError> {
        self.part("wormhole-worker")
    }

    /// Returns the guest's libraries, CUDA driver and NVML, under the names that programs open.
    pub fn frontends(&self) -> Result<Vec<PathBuf>, InstallationError> {
        ["libcuda.so.1", "libnvidia-ml.so.1"]
            .map(|name| self.part(name))
            .into_iter()
            .collect()
    }

    /// Returns the server of the host's files.
    pub fn files(&self) -> Result<PathBuf, InstallationError> {
        self.part("wormhole-fs")
    }

    /// Returns the command of guests that boot a system of their own.
    pub fn guest_command(&self) -> Result<PathBuf, InstallationError> {
        self.part("wormhole-guest")
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
