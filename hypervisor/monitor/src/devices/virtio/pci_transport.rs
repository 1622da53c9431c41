//! Implements the modern PCI transport (virtio 1.2, section 4.1), without the transitional interface.
//!
//! All structures lie in BAR 0, each on its own page. Notifications reach the device through
//! ioeventfds at the BAR's initial address. After a guest moves the BAR, its notifications exit to the
//! monitor.

mod saved;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};

pub use self::saved::VirtioPciState;
use super::device::VirtioDevice;
use super::queue::{ActiveQueue, Interrupt, QueueSetup};
use super::server::ServerHandle;
use crate::bus::{BusDevice, Effect, SharedDevice};
use crate::devices::pci::{
    Bar, ConfigSpace, Identity, Msix, NO_VECTOR, PciFunction, STATUS, STATUS_INTERRUPT,
};
use crate::memory::Range;
use crate::ram::GuestRam;

/// Size of the BAR in bytes.
pub const BAR_SIZE: u32 = 0x8000;

const COMMON: u64 = 0x0000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;
const MSIX_TABLE: u64 = 0x4000;
const MSIX_PENDING: u64 = 0x5000;
const REGION: u64 = 0x1000;
/// Distance in bytes between the notification addresses of two queues.
const NOTIFY_MULTIPLIER: u32 = 4;

const VENDOR: u16 = 0x1af4;
const DEVICE_ID_BASE: u16 = 0x1040;
const CAPABILITY_VENDOR: u8 = 0x09;
const CAPABILITY_MSIX: u8 = 0x11;

/// Offsets in the body of the capability by which a driver accesses the BAR (virtio 1.2, 4.1.4.9).
const WINDOW_BAR: usize = 2;
const WINDOW_OFFSET: usize = 6;
const WINDOW_LENGTH: usize = 10;
const WINDOW_DATA: usize = 14;

const STATUS_DRIVER_OK: u8 = VIRTIO_CONFIG_S_DRIVER_OK.to_le_bytes()[0];
const STATUS_FEATURES_OK: u8 = VIRTIO_CONFIG_S_FEATURES_OK.to_le_bytes()[0];
const STATUS_NEEDS_RESET: u8 = VIRTIO_CONFIG_S_NEEDS_RESET.to_le_bytes()[0];

/// Bit of the ISR status: a queue has used buffers.
const ISR_QUEUE: u8 = 1;
/// Bit of the ISR status: the device's configuration or its status has changed.
const ISR_CONFIG: u8 = 2;

/// Interrupt that sets the ISR status and triggers an MSI-X vector.
#[derive(Debug)]
struct PciInterrupt {
    msix: Arc<Msix>,
    isr: Arc<AtomicU8>,
}

impl PciInterrupt {
    /// Notifies the driver, by this vector, that configuration or status has changed.
    fn config_changed(&self, vector: u16) {
        self.isr.fetch_or(ISR_CONFIG, Ordering::SeqCst);
        self.msix.trigger(vector);
    }
}

impl Interrupt for PciInterrupt {
    fn queue_used(&self, vector: u16) {
        self.isr.fetch_or(ISR_QUEUE, Ordering::SeqCst);
        self.msix.trigger(vector);
    }
}

/// Registers of the common configuration (virtio 1.2, 4.1.4.3) that are not a queue's.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Registers {
    status: u8,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    config_vector: u16,
    queue_select: u16,
}

impl Default for Registers {
    fn default() -> Self {
        Self {
            status: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            queue_select: 0,
        }
    }
}

/// A virtio device on the PCI bus.
#[derive(Debug)]
pub struct VirtioPci {
    device: Box<dyn VirtioDevice>,
    server: ServerHandle,
    memory: GuestRam,
    config: ConfigSpace,
    msix: Arc<Msix>,
    msix_control: usize,
    /// Place of the capability by which a driver accesses the BAR.
    window: usize,
    isr: Arc<AtomicU8>,
    registers: Registers,
    queues: Vec<QueueSetup>,
}

impl VirtioPci {
    /// Creates the PCI function of `device`, whose queues `server` serves, with its BAR at `address`.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        server: ServerHandle,
        memory: GuestRam,
        msix: Msix,
        address: u32,
    ) -> Self {
        let pci_device = DEVICE_ID_BASE + low16(device.id().into());
        let mut config = ConfigSpace::new(
            Identity {
                vendor: VENDOR,
                device: pci_device,
                revision: 1,
                class: device.pci_class(),
                subsystem: pci_device,
            },
            Some(Bar {
                address,
                size: BAR_SIZE,
            }),
        );
        for (kind, offset) in [(1u8, COMMON), (3, ISR), (4, DEVICE)] {
            config.add_capability(CAPABILITY_VENDOR, &region_capability(kind, offset), &[]);
        }
        let mut notify = region_capability(2, NOTIFY).to_vec();
        notify[0] += 4;
        notify.extend_from_slice(&NOTIFY_MULTIPLIER.to_le_bytes());
        config.add_capability(CAPABILITY_VENDOR, &notify, &[]);
        let mut window = region_capability(5, 0).to_vec();
        window[0] += 4;
        window[WINDOW_LENGTH..].fill(0);
        window.extend_from_slice(&[0; 4]);
        let mut writable = vec![0; window.len()];
        writable[WINDOW_BAR] = 0xff;
        writable[WINDOW_OFFSET..].fill(0xff);
        let window = config.add_capability(CAPABILITY_VENDOR, &window, &writable);
        let (body, writable) = msix.capability(low(MSIX_TABLE), low(MSIX_PENDING));
        let msix_control = config.add_capability(CAPABILITY_MSIX, &body, &writable) + 1;
        let queues = device
            .queue_sizes()
            .iter()
            .map(|size| QueueSetup::new(*size))
            .collect();
        Self {
            device,
            server,
            memory,
            config,
            msix: Arc::new(msix),
            msix_control,
            window,
            isr: Arc::new(AtomicU8::new(0)),
            registers: Registers::default(),
            queues,
        }
    }

    /// Returns the guest physical address at which the driver notifies `queue`, for a BAR at `address`.
    pub fn notify_address(address: u32, queue: u16) -> u64 {
        u64::from(address) + NOTIFY + u64::from(queue) * u64::from(NOTIFY_MULTIPLIER)
    }

    /// Returns the feature bits that are offered to the driver.
    fn features(&self) -> u64 {
        self.device.features() | 1 << VIRTIO_F_VERSION_1
    }

    fn selected(&self) -> Option<&QueueSetup> {
        self.queues.get(usize::from(self.registers.queue_select))
    }

    fn read_common(&self, offset: u64, data: &mut [u8]) {
        let mut registers = [0u8; 0x38];
        let mut put = |at: usize, bytes: &[u8]| {
            registers[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let features = |select: u32, bits: u64| match select {
            0 => low(bits),
            1 => low(bits >> 32),
            _ => 0,
        };
        put(0x00, &self.registers.device_feature_select.to_le_bytes());
        put(
            0x04,
            &features(self.registers.device_feature_select, self.features()).to_le_bytes(),
        );
        put(0x08, &self.registers.driver_feature_select.to_le_bytes());
        put(
            0x0c,
            &features(
                self.registers.driver_feature_select,
                self.registers.driver_features,
            )
            .to_le_bytes(),
        );
        put(0x10, &self.registers.config_vector.to_le_bytes());
        let count = u16::try_from(self.queues.len()).unwrap_or(u16::MAX);
        put(0x12, &count.to_le_bytes());
        put(0x14, &[self.registers.status]);
        put(0x16, &self.registers.queue_select.to_le_bytes());
        if let Some(queue) = self.selected() {
            put(0x18, &queue.size.to_le_bytes());
            put(0x1a, &queue.vector.to_le_bytes());
            put(0x1c, &u16::from(queue.enabled).to_le_bytes());
            put(0x1e, &self.registers.queue_select.to_le_bytes());
            put(0x20, &queue.descriptors.to_le_bytes());
            put(0x28, &queue.available.to_le_bytes());
            put(0x30, &queue.used.to_le_bytes());
        }
        copy_out(&registers, offset, data);
    }

    fn write_common(&mut self, offset: u64, data: &[u8]) {
        let value = data
            .iter()
            .take(8)
            .rev()
            .fold(0u64, |value, byte| value << 8 | u64::from(*byte));
        let word = low16(value);
        match offset {
            0x00 => self.registers.device_feature_select = low(value),
            0x08 => self.registers.driver_feature_select = low(value),
            0x0c => self.write_driver_features(low(value)),
            0x10 => self.registers.config_vector = self.checked_vector(word),
            0x14 => self.write_status(value.to_le_bytes()[0]),
            0x16 => self.registers.queue_select = word,
            _ => self.write_queue(offset, data.len(), value),
        }
    }

    fn write_driver_features(&mut self, bits: u32) {
        if self.registers.status & STATUS_FEATURES_OK != 0 {
            return;
        }
        let shift = match self.registers.driver_feature_select {
            0 => 0,
            1 => 32,
            _ => return,
        };
        let others = self.registers.driver_features & !(u64::from(u32::MAX) << shift);
        self.registers.driver_features = (others | u64::from(bits) << shift) & self.features();
    }

    fn checked_vector(&self, vector: u16) -> u16 {
        if self.msix.has(vector) {
            vector
        } else {
            NO_VECTOR
        }
    }

    fn write_queue(&mut self, offset: u64, len: usize, value: u64) {
        // The registers of a queue are read-only from DRIVER_OK to reset.
        let active = self.registers.status & STATUS_DRIVER_OK != 0;
        let vector = self.checked_vector(low16(value));
        let Some(queue) = self
            .queues
            .get_mut(usize::from(self.registers.queue_select))
        else {
            return;
        };
        if active || queue.enabled && offset != 0x1a {
            return;
        }
        match offset {
            0x18 => {
                let size = low16(value);
                if size <= queue.max_size && size.is_power_of_two() {
                    queue.size = size;
                }
            }
            0x1a => queue.vector = vector,
            0x1c => queue.enabled = value == 1,
            0x20..0x28 => patch(&mut queue.descriptors, offset - 0x20, len, value),
            0x28..0x30 => patch(&mut queue.available, offset - 0x28, len, value),
            0x30..0x38 => patch(&mut queue.used, offset - 0x30, len, value),
            _ => {}
        }
    }

    fn write_status(&mut self, status: u8) {
        if status == 0 {
            return self.reset();
        }
        // A driver takes no bit back but by a reset, and only the device sets NEEDS_RESET.
        let mut set = status & !self.registers.status & !STATUS_NEEDS_RESET;
        if set & STATUS_FEATURES_OK != 0 && !self.accepts_features() {
            tracing::debug!(device = ?self.device, "the driver accepts features that do not go together");
            set &= !STATUS_FEATURES_OK;
        }
        self.registers.status |= set;
        if set & STATUS_DRIVER_OK != 0 {
            let is_negotiated = self.registers.status & STATUS_FEATURES_OK != 0;
            if !is_negotiated || !self.activate() {
                self.registers.status |= STATUS_NEEDS_RESET;
                self.interrupt()
                    .config_changed(self.registers.config_vector);
            }
        }
    }

    /// Returns whether the device works with the features that the driver accepts. Legacy drivers, which accept no
    /// VIRTIO_F_VERSION_1, lay requests out in other ways.
    fn accepts_features(&self) -> bool {
        let is_modern = self.registers.driver_features & 1 << VIRTIO_F_VERSION_1 != 0;
        is_modern && self.device.accepts(self.registers.driver_features)
    }

    fn reset(&mut self) {
        self.server.stop();
        self.registers.status = 0;
        self.registers.driver_features = 0;
        self.registers.config_vector = NO_VECTOR;
        self.isr.store(0, Ordering::SeqCst);
        self.msix.forget_pending();
        for queue in &mut self.queues {
            *queue = QueueSetup::new(queue.max_size);
        }
    }

    fn interrupt(&self) -> PciInterrupt {
        PciInterrupt {
            msix: Arc::clone(&self.msix),
            isr: Arc::clone(&self.isr),
        }
    }

    /// Passes the queues to the worker; `false` if a queue is invalid or the worker's thread has ended.
    fn activate(&mut self) -> bool {
        let Some(queues) = self.active_queues() else {
            tracing::debug!(device = ?self.device, "the driver set up queues that cannot be");
            return false;
        };
        match self.server.start(queues, self.registers.driver_features) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "a device does not start");
                false
            }
        }
    }

    /// Returns the queues that the driver set up; `None` if one of them is invalid.
    fn active_queues(&self) -> Option<Vec<ActiveQueue>> {
        let interrupt = Arc::new(self.interrupt());
        self.queues
            .iter()
            .zip(self.server.kicks())
            .enumerate()
            .take_while(|(at, (setup, _))| setup.enabled || *at < self.device.required_queues())
            .map(|(_, (setup, kick))| {
                let interrupt = Arc::clone(&interrupt) as Arc<dyn Interrupt>;
                let queue = setup.build(&self.memory)?;
                let kick = Arc::clone(kick);
                Some(ActiveQueue::new(queue, setup.vector, interrupt, kick))
            })
            .collect()
    }
}

impl PciFunction for VirtioPci {
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
        let end = offset + data.len();
        let mut put = |at: usize, bytes: &[u8]| {
            for (at, byte) in (at..).zip(bytes) {
                if let Some(place) = at.checked_sub(offset).and_then(|at| data.get_mut(at)) {
                    *place = *byte;
                }
            }
        };
        if !self.msix.is_enabled() && self.isr.load(Ordering::SeqCst) != 0 {
            put(STATUS, &[self.config.byte(STATUS) | STATUS_INTERRUPT]);
        }
        let window = self.window + WINDOW_DATA;
        if offset < window + 4
            && end > window
            && let Some((address, length)) = self.windowed()
        {
            let mut bytes = [0; 4];
            self.read_bar(address, &mut bytes[..length]);
            put(window, &bytes[..length]);
        }
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        let written = offset..offset + data.len();
        if written.contains(&self.msix_control) {
            self.msix.set_control(self.config.byte(self.msix_control));
        }
        let window = self.window + WINDOW_DATA;
        if written.start < window + 4
            && written.end > window
            && let Some((address, length)) = self.windowed()
        {
            let mut bytes = [0; 4];
            self.config.read(window, &mut bytes);
            self.write(address, &bytes[..length]);
        }
    }

    fn ranges(&self) -> Vec<(Range, Option<SharedDevice>)> {
        let range = self.config.bar().map(Bar::range);
        range.into_iter().map(|range| (range, None)).collect()
    }

    fn save(&self) -> Option<VirtioPciState> {
        Some(VirtioPciState::of(self))
    }

    fn restore(&mut self, state: &VirtioPciState) -> Result<(), &'static str> {
        state.apply(self)
    }

    fn resume(&mut self) -> Result<(), &'static str> {
        saved::resume(self)
    }
}

impl VirtioPci {
    /// Returns offset and length of the access to the BAR that the driver has prepared in configuration space; `None` if
    /// there is none such.
    fn windowed(&self) -> Option<(u64, usize)> {
        let word = |at| {
            let mut word = [0; 4];
            self.config.read(self.window + at, &mut word);
            u32::from_le_bytes(word)
        };
        let (offset, length) = (word(WINDOW_OFFSET), word(WINDOW_LENGTH));
        let is_access = matches!(length, 1 | 2 | 4)
            && offset.is_multiple_of(length)
            && offset < BAR_SIZE
            && self.config.byte(self.window + WINDOW_BAR) == 0;
        let length = usize::try_from(length).ok()?;
        is_access.then_some((offset.into(), length))
    }

    fn read_bar(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let within = usize::try_from(offset % REGION).unwrap_or(0);
        match offset - offset % REGION {
            COMMON => self.read_common(offset, data),
            // A read of the ISR status clears it.
            ISR if within == 0 => copy_out(&[self.isr.swap(0, Ordering::SeqCst)], 0, data),
            DEVICE => copy_out(self.device.config(), offset % REGION, data),
            MSIX_TABLE => self.msix.read_table(within, data),
            MSIX_PENDING => self.msix.read_pending(within, data),
            _ => {}
        }
    }
}

/// Handles accesses to the BAR.
impl BusDevice for VirtioPci {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.read_bar(offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let within = offset % REGION;
        match offset - within {
            COMMON => self.write_common(offset, data),
            NOTIFY => {
                if let Ok(queue) = u16::try_from(within / u64::from(NOTIFY_MULTIPLIER)) {
                    self.server.notify(queue);
                }
            }
            MSIX_TABLE => self
                .msix
                .write_table(usize::try_from(within).unwrap_or(0), data),
            _ => {}
        }
        Effect::Continue
    }
}

/// Returns the body of a vendor capability (virtio 1.2, 4.1.4), after id and next pointer.
fn region_capability(kind: u8, offset: u64) -> [u8; 14] {
    let mut body = [0; 14];
    body[0] = 16; // length of the whole capability
    body[1] = kind;
    body[6..10].copy_from_slice(&low(offset).to_le_bytes());
    body[10..].copy_from_slice(&low(REGION).to_le_bytes());
    body
}

/// Copies the bytes at `offset` of `registers` to `data`. Leaves bytes of `data` past the end unchanged.
fn copy_out(registers: &[u8], offset: u64, data: &mut [u8]) {
    let Some(rest) = usize::try_from(offset)
        .ok()
        .and_then(|offset| registers.get(offset..))
    else {
        return;
    };
    for (byte, register) in data.iter_mut().zip(rest) {
        *byte = *register;
    }
}

/// Writes one or both halves of a 64-bit register.
fn patch(register: &mut u64, offset: u64, len: usize, value: u64) {
    const HALF: u64 = 0xffff_ffff;
    match (offset, len) {
        (0, 8) => *register = value,
        (0, 4) => *register = *register & !HALF | value,
        (4, 4) => *register = *register & HALF | value << 32,
        _ => {}
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the low half is what is meant"
)]
fn low(value: u64) -> u32 {
    value as u32
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the low part is what is meant"
)]
fn low16(value: u64) -> u16 {
    value as u16
}

#[cfg(test)]
mod tests;
