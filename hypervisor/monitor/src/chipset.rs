//! Assembles the machine around the vCPUs: creates KVM's interrupt controllers and timer, places
//! devices on the buses, and assigns their addresses and interrupts.

use std::sync::Arc;

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;
use wormhole_lock::Mutex;

use crate::bus::{BusError, Buses, SharedDevice};
use crate::device_thread::DeviceThread;
use crate::devices::pci::{BarSpace, CONFIG_PORTS, CONFIG_PORTS_LEN, Msix, PciBus};
use crate::devices::vfio::{self, Hardware, Opened, VfioFunction};
use crate::devices::virtio::{BAR_SIZE, ServerHandle, VirtioDevice, VirtioPci, VirtioWorker};
use crate::irq::{IrqError, IrqRouter, MsiController};
use crate::memory::{FIRST_BAR_SLOT, PCI_HOLE_END, PCI_HOLE_START, Range};
use crate::ram::{GuestRam, PAGE};
use crate::vm::{VmError, kvm_error};

/// Address of the three pages that KVM on Intel processors needs for real mode (KVM_SET_TSS_ADDR).
const TSS_ADDRESS: usize = 0xfffb_d000;
/// Address of KVM's identity map (KVM_SET_IDENTITY_MAP_ADDR).
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// Creates the chips that KVM emulates. Call before the first vCPU is created.
pub(crate) fn create_chips(vm: &VmFd) -> Result<(), VmError> {
    vm.set_identity_map_address(IDENTITY_MAP_ADDRESS)
        .map_err(kvm_error("to place its identity map"))?;
    vm.set_tss_address(TSS_ADDRESS)
        .map_err(kvm_error("to place its task state"))?;
    vm.create_irq_chip()
        .map_err(kvm_error("an interrupt controller"))?;
    vm.create_pit2(kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    })
    .map_err(kvm_error("a timer"))
}

/// Adds devices to a VM: connects them to the buses, to interrupts and to notifications.
#[derive(Debug)]
pub(crate) struct Chipset {
    vm: Arc<VmFd>,
    ram: GuestRam,
    router: Arc<IrqRouter>,
    buses: Buses,
    pci: PciBus,
    bars: BarSpace,
    wide_bars: BarSpace,
    /// Number of the next memory slot of a BAR.
    slot: u32,
}

impl Chipset {
    /// Creates a machine without devices. Devices access `ram`. BARs with addresses of 64 bits are in `wide_bars`.
    pub fn new(vm: Arc<VmFd>, ram: GuestRam, wide_bars: Option<Range>) -> Self {
        let buses = Buses::default();
        let wide_bars = wide_bars.map_or(0..0, |range| range.start..range.end());
        Self {
            wide_bars: BarSpace::new(wide_bars),
            slot: FIRST_BAR_SLOT,
            router: Arc::new(IrqRouter::new(Arc::clone(&vm))),
            pci: PciBus::new(Arc::clone(&buses.memory)),
            bars: BarSpace::new(PCI_HOLE_START..PCI_HOLE_END),
            vm,
            ram,
            buses,
        }
    }

    /// Connects a new eventfd to an unused line of the interrupt controllers.
    pub fn legacy_line(&self, line: u32) -> Result<EventFd, IrqError> {
        self.router.legacy_line(line)
    }

    /// Claims `len` ports from `start` on for a device.
    pub fn add_ports(&self, start: u16, len: u16, device: SharedDevice) -> Result<(), BusError> {
        self.buses.ports.insert(start.into(), len.into(), device)
    }

    /// Adds a virtio device to the PCI bus; `worker` serves its queues on `thread`.
    ///
    /// Allocates a BAR, one MSI-X vector per queue, one vector for configuration changes, and one
    /// ioeventfd per queue for notifications.
    pub fn add_virtio(
        &mut self,
        thread: &DeviceThread,
        device: Box<dyn VirtioDevice>,
        worker: Box<dyn VirtioWorker>,
    ) -> Result<(), VmError> {
        let queues = device.queue_sizes().len();
        let address = self.bars.allocate(BAR_SIZE)?;
        let server =
            ServerHandle::new(thread.handle(), worker, queues).map_err(VmError::EventFd)?;
        for (queue, kick) in (0u16..).zip(server.kicks()) {
            let address = IoEventAddress::Mmio(VirtioPci::notify_address(address, queue));
            self.vm
                .register_ioevent(kick, &address, NoDatamatch)
                .map_err(kvm_error("an ioeventfd"))?;
        }
        let controller: Arc<dyn MsiController> = self.router.clone();
        let msix = Msix::new(controller, queues + 1)?;
        let function = VirtioPci::new(device, server, self.ram.clone(), msix, address);
        self.pci.add(Arc::new(Mutex::new(function)))?;
        Ok(())
    }

    /// Adds a device of the host to the PCI bus.
    ///
    /// Allocates its BARs, memory slots for those parts of them that VFIO maps, and its MSI-X vectors.
    pub fn add_passed_through(&mut self, opened: Opened) -> Result<(), VmError> {
        let Opened { device, mut config } = opened;
        let mut mappings = Vec::new();
        for bar in config.bars().to_vec() {
            // A BAR that shares a page with another one could not be mapped.
            let size = bar.size.max(PAGE);
            let address = match (bar.wide, u32::try_from(size)) {
                (false, Ok(size)) => self.bars.allocate(size)?.into(),
                _ => self.wide_bars.allocate_wide(size)?,
            };
            config.set_address(bar, address);
            let parts = vfio::mapped(bar, &device.areas(bar.index), config.msix());
            let mapped = vfio::map(&self.vm, &device, bar, parts, address, &mut self.slot)?;
            mappings.extend(mapped);
        }
        let controller: Arc<dyn MsiController> = self.router.clone();
        let device: Arc<dyn Hardware> = device;
        let function = VfioFunction::new(device, config, mappings, controller)?;
        self.pci.add(Arc::new(Mutex::new(function)))?;
        Ok(())
    }

    /// Returns the buses with all devices, for the vCPUs, and the PCI bus.
    pub fn into_buses(self) -> Result<(Buses, Arc<Mutex<PciBus>>), BusError> {
        let pci = Arc::new(Mutex::new(self.pci));
        let (start, len) = (CONFIG_PORTS.into(), CONFIG_PORTS_LEN.into());
        self.buses.ports.insert(start, len, pci.clone())?;
        Ok((self.buses, pci))
    }
}
