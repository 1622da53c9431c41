//! Snapshots: the state of a VM between two instructions, and a VM that goes on from there.
//!
//! A snapshot is taken while no vCPU runs and no device's thread moves a buffer. Devices hold no request then: before a
//! thread stops, it completes the requests that it has taken from its queues. State is read from KVM and the devices, and
//! guest memory is copied to a file, with the memory for files. The window is not part of a snapshot: without sessions it has
//! no contents.
//!
//! A snapshot is input like a configuration, from a file that may be damaged: restoring refuses what does not fit to the
//! machine that the configuration describes, and checks each value that the monitor itself uses. KVM checks those that only
//! the guest's processors use, and a snapshot can do no more through them than a guest can.

mod chips;
mod memory;
mod processor;
mod vcpu;

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use rustix::rand::GetRandomFlags;
use serde::{Deserialize, Serialize};
use wormhole_lock::Mutex;

use self::chips::ChipsState;
pub(crate) use self::memory::Memory;
pub(crate) use self::vcpu::VcpuState;
use crate::device_thread::{DeviceThread, ThreadGone};
use crate::devices::block::{Difference, DiskFile, DiskIdentity};
use crate::devices::pci::{Misfit, PciBus, PciBusState};
use crate::devices::power::{ExitStatusPort, Pm1Ports, Pm1State};
use crate::devices::serial::{IrqTrigger, SerialInput, SerialPort, SerialPortState, Tee};
use crate::memory::FileMemory;
use crate::ram::GuestRam;
use crate::sync::Ending;
use crate::vcpu::{Event, VcpuThreads};

/// Error from saving or restoring a VM.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// KVM does not tell a state.
    #[error("KVM does not tell {what}")]
    Get {
        /// The state.
        what: &'static str,
        /// Error from KVM.
        source: kvm_ioctls::Error,
    },
    /// KVM refused a state.
    #[error("KVM refuses {what} of the snapshot")]
    Set {
        /// The state.
        what: &'static str,
        /// Error from KVM.
        source: kvm_ioctls::Error,
    },
    /// KVM refused the value of an MSR.
    #[error("KVM refuses {value:#x} for the MSR {index:#x} of the snapshot")]
    Msr {
        /// Number of the MSR.
        index: u32,
        /// The value.
        value: u64,
    },
    /// No snapshot has this MSR.
    #[error(
        "the snapshot has a value of the MSR {index:#x}, which this machine's KVM does not save"
    )]
    MsrIndex {
        /// Number of the MSR.
        index: u32,
    },
    /// The processor is allowed to run VMs of the guest.
    #[error(
        "the snapshot lets its guest run virtual machines (SVME of the register EFER), which no guest may"
    )]
    Virtualization,
    /// The TSC of this machine has another frequency.
    #[error("the TSC of the snapshot has {saved} kHz, and that of this machine {here} kHz")]
    Frequency {
        /// Frequency in the snapshot.
        saved: u32,
        /// Frequency of this machine.
        here: u32,
    },
    /// This machine does not offer its guests the processor of the snapshot.
    #[error(
        "the snapshot is of another processor or KVM: this machine does not offer its CPUID leaf {leaf:#x}. It can be \
         restored on the kind of machine on which it was taken"
    )]
    Processor {
        /// First leaf that is not offered.
        leaf: u32,
    },
    /// The VM has another number of vCPUs, disks or devices.
    #[error("the snapshot is of a guest with {saved} {what}, and this one has {here}")]
    Count {
        /// Plural of the counted parts.
        what: &'static str,
        /// Number in the snapshot.
        saved: usize,
        /// Number in the VM.
        here: usize,
    },
    /// A device's state does not fit.
    #[error(transparent)]
    Device(#[from] Misfit),
    /// A disk was changed or replaced after the snapshot.
    #[error(
        "disk {number} (/dev/vd{} in the guest) is not the one of the snapshot any more: {difference}",
        letter(*number)
    )]
    Disk {
        /// Number of the disk, from 0.
        number: usize,
        /// The difference.
        difference: Difference,
    },
    /// A disk cannot be examined.
    #[error("a disk cannot be brought to stable storage, or examined")]
    DiskState(#[source] io::Error),
    /// The memory file has another size than the guest's memory.
    #[error(
        "the memory file of the snapshot has {length} bytes, and that of this guest would have {expected}"
    )]
    MemoryLength {
        /// Size of the file.
        length: u64,
        /// Size of a file of this guest.
        expected: u64,
    },
    /// Memory file and state are of two snapshots.
    #[error("the memory file and the state are of two snapshots")]
    OtherMemory,
    /// The snapshot has no random number.
    #[error("the kernel gives no random number")]
    Identity(#[source] io::Error),
    /// Memory cannot be written to the file.
    #[error("the guest's memory cannot be written")]
    Write(#[source] io::Error),
    /// Memory cannot be read from the file.
    #[error("the memory of the snapshot cannot be read")]
    Read(#[source] io::Error),
    /// Vsock connections are open.
    #[error("programs of the guest have connections to the host open: {}", list(.0))]
    Connections(Vec<OpenConnection>),
    /// The VM has file systems, whose servers have state.
    #[error("the guest has folders of the host ({}), whose open files cannot be saved", .0.join(", "))]
    FileSystems(Vec<String>),
    /// The VM serves windows of tenants.
    #[error("a backend VM cannot be saved: its tenants' windows are not its own")]
    Aperture,
    /// The VM has devices of the host.
    #[error("the guest has devices of the host, whose state cannot be saved")]
    PassedThrough,
    /// A thread of the VM has ended.
    #[error("the guest has ended")]
    Ended,
}

impl From<ThreadGone> for SnapshotError {
    fn from(_: ThreadGone) -> Self {
        Self::Ended
    }
}

/// A connection of the guest to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenConnection {
    /// The guest's port.
    pub guest_port: u32,
    /// The host's port.
    pub host_port: u32,
}

impl fmt::Display for OpenConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {} to port {}", self.guest_port, self.host_port)
    }
}

fn letter(number: usize) -> char {
    let number = u8::try_from(number).unwrap_or(0);
    char::from(b'a'.saturating_add(number))
}

fn list(connections: &[OpenConnection]) -> String {
    let texts: Vec<_> = connections.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

/// Random number of a snapshot, in its state and in its memory file.
type Identity = [u8; 16];

/// State of a VM without its memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct VmState {
    identity: Identity,
    /// CPUID of the first vCPU.
    processor: Vec<kvm_cpuid_entry2>,
    vcpus: Vec<VcpuState>,
    chips: ChipsState,
    pci: PciBusState,
    serial: SerialPortState,
    power: Pm1State,
    exit_status: Option<u32>,
    disks: Vec<DiskIdentity>,
}

/// A snapshot to restore.
#[derive(Debug)]
pub struct Snapshot {
    /// State without memory.
    pub state: VmState,
    /// File with the memory.
    pub memory: File,
}

/// Course of a VM after a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterSnapshot {
    /// The guest runs on.
    Continue,
    /// The VM ends, with [`crate::ExitReason::Stopped`].
    Stop,
}

/// Receives the result of a snapshot while the VM stands, and decides how it goes on.
pub type Conclusion = Box<dyn FnOnce(Result<VmState, SnapshotError>) -> AfterSnapshot + Send>;

/// Request for a snapshot.
pub(crate) struct Request {
    pub memory: File,
    pub conclude: Conclusion,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

/// Takes snapshots of a VM that runs, from any thread.
#[derive(Debug, Clone)]
pub struct SnapshotHandle(Sender<Event>);

impl SnapshotHandle {
    pub(crate) fn new(events: Sender<Event>) -> Self {
        Self(events)
    }

    /// Requests a snapshot, with the memory in an empty file. `conclude` gets the rest on the thread of
    /// [`crate::Vm::run`]; it is dropped if the VM ends before.
    pub fn request(&self, memory: File, conclude: Conclusion) {
        // The receiver is dropped once the VM has ended.
        if self
            .0
            .send(Event::Save(Request { memory, conclude }))
            .is_err()
        {
            tracing::trace!("a snapshot of a VM that has ended");
        }
    }
}

impl Snapshot {
    /// Returns the CPUID that the vCPUs of the restored VM have, which is that of the snapshot. `here` is that of this
    /// machine's first vCPU.
    pub(crate) fn processor(&self, here: &CpuId) -> Result<CpuId, SnapshotError> {
        let saved = &self.state.processor;
        processor::check(saved, here.as_slice())?;
        // Fails for more entries than KVM takes.
        CpuId::from_entries(saved).map_err(|_| SnapshotError::Processor { leaf: 0 })
    }

    /// Gives a new VM its memory, its vCPUs, and the chips of KVM. `msrs` are those of [`msrs`].
    pub(crate) fn restore_processors(
        &self,
        vm: &VmFd,
        memory: Memory<'_>,
        vcpus: &[VcpuFd],
        msrs: &[u32],
    ) -> Result<(), SnapshotError> {
        let state = &self.state;
        check_count("vCPUs", state.vcpus.len(), vcpus.len())?;
        memory::restore(memory, &self.memory, &state.identity)?;
        for (saved, vcpu) in state.vcpus.iter().zip(vcpus) {
            saved.restore(vcpu, msrs)?;
        }
        state.chips.restore(vm)
    }
}

impl VmState {
    /// Creates the serial port, whose interrupt needs the chips.
    pub(crate) fn serial_port(
        &self,
        interrupt: IrqTrigger,
        output: Tee,
    ) -> Result<(Arc<Mutex<SerialPort>>, SerialInput), SnapshotError> {
        let port = SerialPort::restored(interrupt, output, &self.serial);
        port.ok_or_else(|| {
            SnapshotError::Device(Misfit {
                device: "serial port".to_owned(),
                why: "it has more input than the port can hold",
            })
        })
    }

    /// Gives the state to devices that no driver has started.
    pub(crate) fn restore_devices(
        &self,
        pci: &mut PciBus,
        power: &mut Pm1Ports,
        exit_status: &mut ExitStatusPort,
    ) -> Result<(), SnapshotError> {
        exit_status.status = self.exit_status;
        power.restore(&self.power);
        Ok(pci.restore(&self.pci)?)
    }
}

/// The parts of a VM that have state.
#[derive(Debug)]
pub(crate) struct Machine {
    pub vm: Arc<VmFd>,
    pub ram: GuestRam,
    pub pci: Arc<Mutex<PciBus>>,
    pub serial: Arc<Mutex<SerialPort>>,
    pub power: Arc<Mutex<Pm1Ports>>,
    pub exit_status: Arc<Mutex<ExitStatusPort>>,
    pub disks: Vec<DiskFile>,
    /// Tags of the file systems.
    pub file_systems: Vec<String>,
    pub has_aperture: bool,
    pub file_memory: Option<FileMemory>,
    pub passes_devices: bool,
    /// CPUID of the first vCPU.
    pub processor: CpuId,
    /// MSRs that KVM saves.
    pub msrs: Vec<u32>,
}

/// Returns the MSRs that KVM saves.
pub(crate) fn msrs(kvm: &Kvm) -> Result<Vec<u32>, SnapshotError> {
    vcpu::msr_indices(kvm)
}

impl Machine {
    /// Stops the VM, saves it, and lets it go on. If the request says otherwise, begins `ending` instead, and no vCPU runs
    /// again.
    pub fn serve(
        &self,
        request: Request,
        vcpus: &VcpuThreads,
        threads: &[&DeviceThread],
        ending: &Ending,
    ) -> AfterSnapshot {
        let Request { memory, conclude } = request;
        let paused = match vcpus.pause() {
            Ok(paused) => paused,
            Err(error) => return conclude(Err(error)),
        };
        // Dropped at the end: the threads go on then.
        let mut parked = Vec::new();
        let state = self.parked(threads, &mut parked).and_then(|()| {
            let state = self.state(|| paused.save(&self.msrs))?;
            let of_guest = Memory {
                ram: &self.ram,
                files: self.file_memory.as_ref(),
            };
            memory::save(of_guest, &memory, &state.identity)?;
            Ok(state)
        });
        let after = conclude(state);
        if after == AfterSnapshot::Stop {
            ending.begin();
            vcpus.stop();
            for thread in threads {
                thread.stop();
            }
        }
        after
    }

    /// Lets the devices' threads stand.
    fn parked(
        &self,
        threads: &[&DeviceThread],
        parked: &mut Vec<crate::device_thread::Parked>,
    ) -> Result<(), SnapshotError> {
        if self.has_aperture {
            return Err(SnapshotError::Aperture);
        }
        if self.passes_devices {
            return Err(SnapshotError::PassedThrough);
        }
        if !self.file_systems.is_empty() {
            return Err(SnapshotError::FileSystems(self.file_systems.clone()));
        }
        for thread in threads {
            parked.push(thread.park()?);
        }
        let open: Vec<_> = parked
            .iter()
            .flat_map(|parked| parked.connections.clone())
            .collect();
        match open.is_empty() {
            true => Ok(()),
            false => Err(SnapshotError::Connections(open)),
        }
    }

    fn state(
        &self,
        vcpus: impl FnOnce() -> Result<Vec<VcpuState>, SnapshotError>,
    ) -> Result<VmState, SnapshotError> {
        let mut identity = Identity::default();
        rustix::rand::getrandom(&mut identity, GetRandomFlags::empty())
            .map_err(|error| SnapshotError::Identity(error.into()))?;
        let disks = self.disks.iter().map(DiskFile::settle);
        let disks = disks
            .collect::<Result<_, _>>()
            .map_err(SnapshotError::DiskState)?;
        let (pci, serial, power) = (
            self.pci.lock().save(),
            self.serial.lock().save(),
            self.power.lock().save(),
        );
        // Interrupts go from devices to the chips, and from there to the vCPUs. In this order none is lost: one that is
        // on its way is saved twice.
        let chips = ChipsState::save(&self.vm)?;
        Ok(VmState {
            identity,
            processor: self.processor.as_slice().to_vec(),
            vcpus: vcpus()?,
            chips,
            pci,
            serial,
            power,
            exit_status: self.exit_status.lock().status,
            disks,
        })
    }

    /// Gives the devices of a new VM the state of a snapshot, after [`Snapshot::restore_processors`]. They serve their queues
    /// from [`Self::resume`] on.
    pub fn restore(&self, state: &VmState) -> Result<(), SnapshotError> {
        check_count("disks", state.disks.len(), self.disks.len())?;
        for (number, (saved, disk)) in state.disks.iter().zip(&self.disks).enumerate() {
            let here = disk.identity().map_err(SnapshotError::DiskState)?;
            if let Some(difference) = saved.difference(&here) {
                return Err(SnapshotError::Disk { number, difference });
            }
        }
        let (mut pci, mut power) = (self.pci.lock(), self.power.lock());
        state.restore_devices(&mut pci, &mut power, &mut self.exit_status.lock())?;
        state.chips.restore_clock(&self.vm)
    }

    /// Lets the devices of a restored VM serve their queues.
    pub fn resume(&self) -> Result<(), SnapshotError> {
        Ok(self.pci.lock().resume()?)
    }
}

fn check_count(what: &'static str, saved: usize, here: usize) -> Result<(), SnapshotError> {
    if saved != here {
        return Err(SnapshotError::Count { what, saved, here });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
