//! Emulates PCI with configuration mechanism 1: one bus, a host bridge, and the functions behind it.

mod bar_space;
mod bus;
mod config_space;
mod msix;

pub use bar_space::{BarSpace, NoBarSpace};
pub use bus::{
    CONFIG_PORTS, CONFIG_PORTS_LEN, MAX_FUNCTIONS, Misfit, PciBus, PciBusState, PciFull,
    PciFunction,
};
pub use config_space::{Bar, ConfigSpace, Identity};
pub(crate) use config_space::{STATUS, STATUS_INTERRUPT};
pub use msix::{Msix, MsixState, NO_VECTOR};

#[cfg(test)]
pub(crate) use msix::tests;
