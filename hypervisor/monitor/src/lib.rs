//! Wormhole's KVM monitor: boots a Linux guest that has a window, or runs a payload without a
//! kernel.
//!
//! Mechanism only; what is run and why is decided by the caller.
//!
//! - [`Vm`] boots a stock kernel with an initramfs. The guest gets a serial console, ACPI
//!   power-off, ports for exit status and exit accounts, a PCI bus with virtio-blk, virtio-vsock and virtio-rng, and the
//!   window as soft-reserved memory that Linux's `dax_hmem` and `device_dax` make a `/dev/dax` device.
//! - [`payload`] runs a freestanding program in user mode.
//! - [`kvm_caps::probe`] tells what the machine's KVM can do, [`stats`] what it counted.
//!
//! Threads that meet what a guest wrote are confined first: see [`confinement`].
//!
//! Invariants: guest memory is never the target of a Rust reference; what a guest wrote is copied
//! out before it is looked at; nothing a guest does makes the monitor panic, wait or grow without
//! bound.

pub mod boot;
pub mod bus;
mod chipset;
pub mod confinement;
mod cpu;
mod device_thread;
pub mod devices;
pub mod exit_accounting;
mod exit_reason;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod irq;
pub mod kvm_caps;
pub mod memory;
pub mod payload;
pub mod ram;
pub mod stats;
mod sync;
mod vcpu;
mod vm;

pub use boot::{BootError, BootSource, InitramfsPart};
pub use cpu::CpuError;
pub use devices::block::{DiskAccess, DiskError, DiskImage};
pub use devices::power::EXIT_STATUS as EXIT_STATUS_PORT;
pub use devices::serial::ConsoleTail;
pub use devices::vsock::{ConnectRequest, Refused, VsockAcceptor};
pub use exit_reason::{ExitReason, Registers, Report};
pub use kvm_caps::{KvmCaps, probe};
pub use memory::{MemoryError, Window};
pub use vcpu::{ExitCounters, ExitCounts, StopHandle, ThreadError};
pub use vm::{DisabledExits, MAX_DISKS, MAX_VCPUS, Vm, VmConfig, VmError, VsockConfig};
