//! Reads KVM's binary statistics (KVM API, section 4.133 `KVM_GET_STATS_FD`).

mod format;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use kvm_bindings::KVMIO;
use kvm_ioctls::{VcpuFd, VmFd};

pub use format::{FormatError, Schema};

/// Error from reading statistics.
#[derive(Debug, thiserror::Error)]
pub enum StatsError {
    /// KVM_GET_STATS_FD failed.
    #[error("KVM gives no statistics for the {owner}")]
    Unavailable {
        /// "VM" or "vCPU".
        owner: &'static str,
        /// Error from KVM.
        source: std::io::Error,
    },
    /// Reading failed.
    #[error("cannot read KVM's statistics")]
    Read(#[from] std::io::Error),
    /// The statistics file is malformed.
    #[error("KVM's statistics cannot be understood")]
    Format(#[from] FormatError),
}

/// Values by name. A histogram's buckets are `name[0]`, `name[1]`, …
pub type Values = BTreeMap<String, u64>;

/// The statistics of one VM or vCPU.
#[derive(Debug)]
pub struct Stats {
    file: File,
    schema: Schema,
}

vmm_sys_util::ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);

impl Stats {
    /// Opens the statistics of a VM.
    pub fn of_vm(vm: &VmFd) -> Result<Self, StatsError> {
        Self::open(vm, "VM")
    }

    /// Opens the statistics of a vCPU.
    pub fn of_vcpu(vcpu: &VcpuFd) -> Result<Self, StatsError> {
        Self::open(vcpu, "vCPU")
    }

    fn open(owner: &impl AsRawFd, name: &'static str) -> Result<Self, StatsError> {
        // SAFETY: the request takes no argument and returns a new descriptor.
        let fd = unsafe { vmm_sys_util::ioctl::ioctl(owner, KVM_GET_STATS_FD()) };
        if fd < 0 {
            return Err(StatsError::Unavailable {
                owner: name,
                source: std::io::Error::last_os_error(),
            });
        }
        // SAFETY: KVM has just created this descriptor, and nothing else owns it.
        Self::of_file(unsafe { File::from_raw_fd(fd) })
    }

    /// Takes a file of statistics, which another process may have opened.
    pub fn of_file(file: File) -> Result<Self, StatsError> {
        let schema = Schema::parse(|offset, bytes| file.read_exact_at(bytes, offset))?;
        Ok(Self { file, schema })
    }

    /// Returns the file, which another process can read as well.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the name of the VM in KVM's statistics: `kvm-` and the number of the process that made it.
    pub fn vm_name(&self) -> &str {
        // A vCPU's identity is that of its VM, a slash, and its own.
        let id = self.schema.id();
        id.split_once('/').map_or(id, |(vm, _)| vm)
    }

    /// Reads the number of exits of a vCPU; `None` if it cannot be read.
    pub fn exits(&self) -> Option<u64> {
        self.read().ok()?.get("exits").copied()
    }

    /// Reads the current values.
    pub fn read(&self) -> Result<Values, StatsError> {
        let mut data = vec![0; self.schema.data_len()];
        self.file
            .read_exact_at(&mut data, self.schema.data_offset())?;
        Ok(self.schema.values(&data))
    }
}

/// Statistics of a VM and its vCPUs at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The VM's own statistics.
    pub vm: Values,
    /// Statistics of each vCPU.
    pub vcpus: Vec<Values>,
}

impl Snapshot {
    /// Returns the sum of a statistic over the vCPUs; 0 if this KVM does not count it.
    pub fn vcpu_sum(&self, name: &str) -> u64 {
        self.vcpus
            .iter()
            .filter_map(|values| values.get(name))
            .sum()
    }

    /// Returns the increase of each value between `earlier` and this snapshot. Decreases count as 0: KVM
    /// also reports states and peaks.
    pub fn since(&self, earlier: &Self) -> Self {
        let empty = Values::new();
        Self {
            vm: difference(&self.vm, &earlier.vm),
            vcpus: self
                .vcpus
                .iter()
                .enumerate()
                .map(|(index, now)| difference(now, earlier.vcpus.get(index).unwrap_or(&empty)))
                .collect(),
        }
    }
}

fn difference(now: &Values, earlier: &Values) -> Values {
    now.iter()
        .map(|(name, value)| {
            let before = earlier.get(name).copied().unwrap_or(0);
            (name.clone(), value.saturating_sub(before))
        })
        .collect()
}

/// Statistics of a VM and all its vCPUs, readable from any thread, while the VM runs and after.
#[derive(Debug, Clone)]
pub struct VmStats {
    vm: Arc<Stats>,
    vcpus: Arc<[Stats]>,
}

impl VmStats {
    pub(crate) fn new(vm: Stats, vcpus: Vec<Stats>) -> Self {
        Self {
            vm: Arc::new(vm),
            vcpus: vcpus.into(),
        }
    }

    /// Returns the name of the VM, as [`Stats::vm_name`].
    pub fn vm_name(&self) -> &str {
        self.vm.vm_name()
    }

    /// Returns the statistics of each vCPU.
    pub fn vcpus(&self) -> &[Stats] {
        &self.vcpus
    }

    /// Reads the current values.
    pub fn read(&self) -> Result<Snapshot, StatsError> {
        Ok(Snapshot {
            vm: self.vm.read()?,
            vcpus: self
                .vcpus
                .iter()
                .map(Stats::read)
                .collect::<Result<_, _>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_per_vcpu_and_never_negative() {
        let values = |pairs: &[(&str, u64)]| -> Values {
            pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), *value))
                .collect()
        };
        let earlier = Snapshot {
            vm: values(&[("pages", 5)]),
            vcpus: vec![values(&[("exits", 10)]), values(&[("exits", 1)])],
        };
        let now = Snapshot {
            vm: values(&[("pages", 3)]),
            vcpus: vec![
                values(&[("exits", 15)]),
                values(&[("exits", 3), ("new", 4)]),
            ],
        };
        let difference = now.since(&earlier);
        assert_eq!(difference.vcpu_sum("exits"), 7);
        assert_eq!(difference.vcpu_sum("new"), 4);
        assert_eq!(difference.vcpu_sum("unknown"), 0);
        assert_eq!(difference.vm["pages"], 0);
    }
}
