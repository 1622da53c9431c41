//! KVM monitor of Wormhole: boots a Linux guest with a window, or runs a payload without a kernel.
//!
//! Mechanism only; the caller decides policy.
//!
//! - [`Vm`] boots a stock kernel with an initramfs. The guest has a serial console, ACPI power button and power-off,
//!   pvpanic, ports for the exit status and exit accounts, and a PCI bus with virtio-blk, virtio-net, virtio-fs,
//!   virtio-vsock, virtio-rng, virtio-balloon and virtio-console. The window is soft-reserved memory, which Linux's `dax_hmem` and
//!   `device_dax` expose as a `/dev/dax` device; an [`Aperture`] has several, whose memory comes and goes.
//! - A [`SnapshotHandle`] saves a running VM; a VM that starts with the [`Snapshot`] goes on from it.
//! - [`payload`] runs a freestanding program in user mode.
//! - [`kvm_caps::probe`] probes the capabilities of the machine's KVM, [`stats`] reads its statistics.
//!
//! Threads that parse guest data are confined first: see [`confinement`].
//!
//! Invariants: guest memory is never the target of a Rust reference; guest data is copied out before
//! it is parsed; no guest input makes the monitor panic, block or grow without bound.

pub mod aperture;
pub mod boot;
pub mod bus;
mod chipset;
pub mod confinement;
mod cpu;
mod device_thread;
pub mod devices;
mod disabled_exits;
pub mod exit_accounting;
mod exit_reason;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod irq;
pub mod kvm_caps;
pub mod memory;
pub mod payload;
pub mod ram;
pub mod snapshot;
pub mod stats;
mod sync;
mod vcpu;
mod vm;

pub use aperture::{Aperture, MAX_SLOTS, Slots, WindowConfig};
pub use boot::{BootError, BootSource, InitramfsPart};
pub use cpu::CpuError;
pub use devices::block::{DiskAccess, DiskError, DiskImage};
pub use devices::console::ConsoleInput;
pub use devices::fs::Tag;
pub use devices::net::{FrameStream, GuestFrame, HostEnd, MacAddress, StreamEnd, Tap, TapError};
pub use devices::power::{EXIT_STATUS as EXIT_STATUS_PORT, PowerButton};
pub use devices::serial::ConsoleTail;
pub use devices::vsock::{ConnectRequest, Refused, VsockAcceptor};
pub use disabled_exits::DisabledExits;
pub use exit_reason::{ExitReason, Registers, Report};
pub use kvm_caps::{KvmCaps, probe};
pub use memory::{MemoryError, Window, sealed_file};
pub use snapshot::{
    AfterSnapshot, OpenConnection, Snapshot, SnapshotError, SnapshotHandle, VmState,
};
pub use vcpu::{ExitCounters, ExitCounts, StopHandle, ThreadError};
pub use vm::{
    FsConfig, MAX_DEVICES, MAX_DISKS, MAX_NETWORKS, MAX_VCPUS, NetConfig, Start, Vm, VmConfig,
    VmError, VsockConfig,
};
