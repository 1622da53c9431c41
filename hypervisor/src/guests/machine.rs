//! The machine of a guest, by its options or by a snapshot.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use wormhole_monitor::{MAX_VCPUS, NetConfig};
use wormhole_ring::layout::SEGMENT_BYTES;

use super::start::Options;
use crate::run::network::{self, EndOption};
use crate::run::{Disk, RunError, Size, check_memory, check_window, resources, usual_window};

/// File with the machine of a guest, in the guest's folder and in its snapshots.
pub const FILE: &str = "machine.json";
/// Larger than any machine: each of its paths has at most 4 KiB.
pub const LARGEST: u64 = 1 << 20;

/// Properties that a restored guest has in common with the one that was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Memory in bytes.
    pub memory: u64,
    pub cpus: u8,
    /// Size of the window in bytes.
    pub window: u64,
    /// Memory for shared files in bytes. A guest that boots gets it when its backend is known.
    pub files: u64,
    pub prefault: bool,
    /// Path, and whether the guest can only read it.
    disks: Vec<(PathBuf, bool)>,
    /// Values of `--network`.
    networks: Vec<String>,
}

impl Machine {
    /// Returns the machine that the options describe.
    pub fn of(options: &Options) -> Self {
        let disks = options.disk.iter().map(Disk::parts);
        Self {
            memory: options.memory.0,
            cpus: options.cpus,
            window: (options.window).map_or_else(|| usual_window(options.memory.0), |size| size.0),
            files: 0,
            prefault: options.prefault,
            disks: disks.collect(),
            networks: options.network.iter().map(ToString::to_string).collect(),
        }
    }

    /// Writes the machine to a file, which snapshots copy. Call it after [`Self::open_networks`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self)?;
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        options.open(path)?.write_all(&text)
    }

    pub fn disks(&self) -> Vec<Disk> {
        let disks = self.disks.iter().cloned();
        disks
            .map(|(path, is_read_only)| Disk::new(path, is_read_only))
            .collect()
    }

    fn ends(&self) -> Result<Vec<EndOption>, RunError> {
        let ends = self.networks.iter().map(|text| text.parse());
        ends.collect::<Result<_, _>>().map_err(RunError::Machine)
    }

    /// Refuses what no guest can have.
    pub fn check(&self) -> Result<(), RunError> {
        check_window(Size(self.window))?;
        check_memory(Size(self.memory))?;
        if !self.files.is_multiple_of(SEGMENT_BYTES as u64) || self.files > self.memory {
            return Err(RunError::Machine(format!(
                "it has memory for files of {} bytes",
                self.files
            )));
        }
        if !(1..=MAX_VCPUS).contains(&self.cpus) {
            return Err(RunError::Machine(format!(
                "it has {} processors, and 1 to {MAX_VCPUS} are possible",
                self.cpus
            )));
        }
        Disk::check(&self.disks())?;
        network::check_ends(&self.ends()?)?;
        if self.prefault {
            resources::check_memory(self.memory)?;
        }
        Ok(())
    }

    /// Opens the networks. From then on the machine has their hardware addresses, which a restored guest needs again.
    pub fn open_networks(&mut self) -> Result<Vec<NetConfig>, RunError> {
        let ends = self.ends()?;
        let networks = network::open_ends(&ends)?;
        let named = ends.iter().zip(&networks);
        self.networks = named
            .map(|(end, network)| end.with_mac(network.mac).to_string())
            .collect();
        Ok(networks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            memory: 256 << 20,
            cpus: 2,
            window: 258 << 20,
            files: 128 << 20,
            prefault: false,
            disks: vec![("/disk".into(), true)],
            networks: vec!["passt,mac=02:00:00:00:00:07".to_owned()],
        }
    }

    #[test]
    fn a_machine_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(FILE);
        machine().write(&path).expect("room");
        let text = std::fs::read(&path).expect("it is there");
        let read: Machine = serde_json::from_slice(&text).expect("a machine");
        assert_eq!(read, machine());
    }

    #[test]
    fn a_machine_that_no_guest_can_have_is_refused() {
        machine().check().expect("it can be");
        let changes: [fn(&mut Machine); 9] = [
            |machine| machine.memory += 1,
            |machine| machine.memory = 0,
            |machine| machine.cpus = 0,
            |machine| machine.cpus = 65,
            |machine| machine.window = 7,
            |machine| machine.files += 4096,
            |machine| machine.files = 258 << 20,
            |machine| machine.disks = vec![("/disk".into(), true); 100],
            |machine| machine.networks.push("tape=0".to_owned()),
        ];
        for change in changes {
            let mut other = machine();
            change(&mut other);
            other.check().expect_err("impossible");
        }
        let mut other = machine();
        other.cpus = 65;
        let refused = other.check().expect_err("impossible").to_string();
        assert_eq!(
            refused,
            "no guest can have the machine of the snapshot: it has 65 processors, and 1 to 64 are possible"
        );
    }
}
