//! Opens devices and the IOMMU's table that they have in common.

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::Arc;

use kvm_bindings::{kvm_create_device, kvm_device_type_KVM_DEV_TYPE_VFIO};
use kvm_ioctls::VmFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vfio_bindings::bindings::vfio::{VFIO_PCI_MSIX_IRQ_INDEX, VFIO_REGION_INFO_FLAG_MMAP};
use vfio_ioctls::{VfioContainer, VfioDevice, VfioDeviceFd, VfioError, VfioOps, VfioRegionInfoCap};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::Hardware;
use super::address::DeviceAddress;
use super::config::Config;
use super::error::PassthroughError;
use crate::ram::{GuestRam, PAGE};

/// Path of VFIO's container.
const CONTAINER: &str = "/dev/vfio/vfio";

/// Parameter with which VFIO passes on interrupts that the IOMMU does not remap.
const UNSAFE_INTERRUPTS: &str = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";

/// Devices that are passed through, before they are on a bus.
#[derive(Debug)]
pub(crate) struct Passthrough {
    pub dma: Dma,
    pub devices: Vec<Opened>,
}

/// A device, and its configuration space for the guest.
#[derive(Debug)]
pub(crate) struct Opened {
    pub device: Arc<Device>,
    pub config: Config,
}

impl Passthrough {
    /// Opens devices, and resets them. Returns `None` without addresses.
    ///
    /// # Errors
    /// One of them cannot be passed through.
    pub fn open(vm: &VmFd, addresses: &[DeviceAddress]) -> Result<Option<Self>, PassthroughError> {
        let Some(first) = addresses.first() else {
            return Ok(None);
        };
        for (at, address) in addresses.iter().enumerate() {
            if addresses[..at].contains(address) {
                return Err(PassthroughError::Twice(address.clone()));
            }
            address.check()?;
        }
        if std::fs::read_to_string(UNSAFE_INTERRUPTS).is_ok_and(|set| set.trim() == "Y") {
            return Err(PassthroughError::UnsafeInterrupts(UNSAFE_INTERRUPTS));
        }
        let mut device = kvm_create_device {
            type_: kvm_device_type_KVM_DEV_TYPE_VFIO,
            ..Default::default()
        };
        let of_kvm = vm
            .create_device(&mut device)
            .map_err(PassthroughError::Kvm)?;
        let of_kvm = Arc::new(VfioDeviceFd::new_from_kvm(of_kvm));
        let container = VfioContainer::new(Some(of_kvm)).map_err(|error| refused(first, error))?;
        let container = Arc::new(container);
        let devices = addresses
            .iter()
            .map(|address| Opened::new(address, &container));
        Ok(Some(Self {
            devices: devices.collect::<Result<_, _>>()?,
            dma: Dma(container),
        }))
    }

    /// Returns the alignment and the size of a range in which all BARs with addresses of 64 bits have room, in their order.
    pub fn wide_bars(&self) -> (u64, u64) {
        let bars = self.devices.iter().flat_map(|device| device.config.bars());
        room(bars.filter(|bar| bar.wide).map(|bar| bar.size))
    }
}

fn room(sizes: impl Iterator<Item = u64>) -> (u64, u64) {
    sizes
        .map(|size| size.max(PAGE))
        .fold((PAGE, 0), |(align, end), size| {
            (align.max(size), end.next_multiple_of(size) + size)
        })
}

impl Opened {
    fn new(
        address: &DeviceAddress,
        container: &Arc<VfioContainer>,
    ) -> Result<Self, PassthroughError> {
        let ops = Arc::clone(container) as Arc<dyn VfioOps>;
        let vfio = VfioDevice::new(&address.folder(), ops, false);
        let vfio = vfio.map_err(|error| refused(address, error))?;
        let device = Device {
            vfio: ManuallyDrop::new(vfio),
            address: address.clone(),
        };
        device.reset();
        let config = Config::new(&device, |region| device.vfio.get_region_size(region));
        let unfit = |why| PassthroughError::Unfit {
            address: address.clone(),
            why,
        };
        let config = config.map_err(unfit)?;
        let vectors = device.vfio.get_irq_info(VFIO_PCI_MSIX_IRQ_INDEX);
        let vectors = vectors.and_then(|vectors| usize::try_from(vectors.count).ok());
        if vectors != Some(config.msix().vectors) {
            return Err(unfit(
                "VFIO offers another number of interrupts than it has",
            ));
        }
        Ok(Self {
            device: Arc::new(device),
            config,
        })
    }
}

/// Returns the sentence for an error from opening a device.
fn refused(address: &DeviceAddress, error: VfioError) -> PassthroughError {
    let denied = |path: &str| PassthroughError::Denied {
        address: address.clone(),
        path: path.into(),
    };
    let is_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    match &error {
        VfioError::OpenContainer(source) if source.kind() == io::ErrorKind::NotFound => {
            PassthroughError::NoVfio
        }
        VfioError::OpenContainer(source) if is_denied(source) => denied(CONTAINER),
        VfioError::OpenGroup(source, group) if is_denied(source) => {
            denied(&Path::new("/dev/vfio").join(group).to_string_lossy())
        }
        VfioError::OpenGroup(source, group) if source.raw_os_error() == Some(libc::EBUSY) => {
            PassthroughError::Busy {
                address: address.clone(),
                group: group.as_str().into(),
            }
        }
        VfioError::ContainerSetIOMMU(source) if source.errno() == libc::EPERM => {
            PassthroughError::NoRemapping(address.clone())
        }
        _ => PassthroughError::Vfio {
            address: address.clone(),
            source: error,
        },
    }
}

/// A device that is open.
///
/// The file is closed when the process ends: vfio-ioctls reads sysfs to close it, which a confined process cannot do.
pub(crate) struct Device {
    vfio: ManuallyDrop<VfioDevice>,
    address: DeviceAddress,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.address).finish()
    }
}

impl AsRawFd for Device {
    fn as_raw_fd(&self) -> RawFd {
        self.vfio.as_raw_fd()
    }
}

impl Device {
    pub fn address(&self) -> &DeviceAddress {
        &self.address
    }

    /// Returns the offset of a region in the device's file.
    pub fn offset_of(&self, region: u32) -> u64 {
        self.vfio.get_region_offset(region)
    }

    /// Returns the parts of a region that VFIO maps.
    pub fn areas(&self, region: u32) -> Vec<Range<u64>> {
        if self.vfio.get_region_flags(region) & VFIO_REGION_INFO_FLAG_MMAP == 0 {
            return Vec::new();
        }
        let capabilities = self.vfio.get_region_caps(region);
        let sparse = capabilities
            .into_iter()
            .find_map(|capability| match capability {
                VfioRegionInfoCap::SparseMmap(sparse) => Some(sparse.areas),
                _ => None,
            });
        match sparse {
            Some(areas) => areas
                .iter()
                .map(|area| area.offset..area.offset.saturating_add(area.size))
                .collect(),
            None => std::iter::once(0..self.vfio.get_region_size(region)).collect(),
        }
    }
}

impl Hardware for Device {
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        self.vfio.region_read(region, data, offset);
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        self.vfio.region_write(region, data, offset);
    }

    fn set_vectors(&self, events: Vec<&EventFd>) -> Result<(), VfioError> {
        match events.is_empty() {
            true => self.vfio.disable_msix(),
            false => self.vfio.enable_msix(events),
        }
    }

    fn reset(&self) {
        self.vfio.reset();
    }
}

/// The IOMMU's table of a VM's devices.
#[derive(Clone)]
pub(crate) struct Dma(Arc<VfioContainer>);

impl fmt::Debug for Dma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Dma")
    }
}

impl Dma {
    /// Lets the devices reach the guest's RAM.
    pub fn map_ram(&self, ram: &GuestRam) -> Result<(), PassthroughError> {
        ram.iter().try_for_each(|region| {
            let start = region.start_addr().0;
            self.map(start, region.len(), region.host_address())
        })
    }

    /// Lets the devices reach `bytes` of this process's memory from address `host` on at guest physical address `start`. VFIO
    /// allocates and pins the memory.
    pub fn map(&self, start: u64, bytes: u64, host: u64) -> Result<(), PassthroughError> {
        let failed = |source| PassthroughError::Map {
            start,
            bytes,
            source,
        };
        let too_large = |_| failed(VfioError::GetHostAddress);
        let size = usize::try_from(bytes).map_err(too_large)?;
        let host = usize::try_from(host).map_err(too_large)?;
        let host = std::ptr::without_provenance_mut(host);
        // SAFETY: callers pass guest memory, to which no Rust reference exists: the guest changes it at any time as well. VFIO
        // pins the pages, so that a device reaches no others if the range is mapped anew.
        unsafe { self.0.vfio_dma_map(start, size, host) }.map_err(failed)
    }

    /// Ends the devices' reach of a range that was mapped. No access of theirs is under way afterwards.
    pub fn unmap(&self, start: u64, bytes: u64) -> Result<(), PassthroughError> {
        let failed = |source| PassthroughError::Unmap {
            start,
            bytes,
            source,
        };
        let size = usize::try_from(bytes).map_err(|_| failed(VfioError::InvalidDmaUnmapSize))?;
        self.0.vfio_dma_unmap(start, size).map_err(failed)
    }
}

/// Lets this process lock as many bytes of memory as its devices will reach. VFIO counts them (RLIMIT_MEMLOCK), later without
/// regard for a capability that the process has dropped by then.
///
/// # Errors
/// The hard limit is lower, and cannot be raised.
pub(crate) fn allow_locking(needed: u64) -> Result<(), PassthroughError> {
    let limit = getrlimit(Resource::Memlock);
    let Some(current) = limit.current.filter(|&current| current < needed) else {
        return Ok(());
    };
    let maximum = limit.maximum.map(|maximum| maximum.max(needed));
    let raised = Rlimit {
        current: Some(needed),
        maximum,
    };
    setrlimit(Resource::Memlock, raised).map_err(|_| PassthroughError::LockedMemory {
        needed,
        limit: limit.maximum.unwrap_or(current),
    })
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::errno::Error;

    use super::*;

    #[test]
    fn errors_of_vfio_have_sentences_with_what_to_do() {
        let address: DeviceAddress = "01:00.0".parse().expect("an address");
        let os = io::Error::from_raw_os_error;
        let group = |error| VfioError::OpenGroup(os(error), "7".to_owned());
        for (error, words) in [
            (
                VfioError::OpenContainer(os(libc::ENOENT)),
                "load the kernel module vfio-pci",
            ),
            (
                VfioError::OpenContainer(os(libc::EACCES)),
                "may not open /dev/vfio/vfio,",
            ),
            (group(libc::EACCES), "may not open /dev/vfio/7,"),
            (
                group(libc::EBUSY),
                "is in use: another process, such as another VM, has IOMMU group 7",
            ),
            (
                VfioError::ContainerSetIOMMU(Error::new(libc::EPERM)),
                "does not remap interrupts",
            ),
            (
                VfioError::GroupViable,
                "VFIO refuses the device 0000:01:00.0",
            ),
        ] {
            let said = refused(&address, error).to_string();
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn bars_of_any_order_have_room_in_their_range() {
        assert_eq!(room([].into_iter()), (4096, 0));
        assert_eq!(room([256].into_iter()), (4096, 4096));
        assert_eq!(
            room([16 << 10, 1 << 30, 32 << 20].into_iter()),
            (1 << 30, (2 << 30) + (32 << 20))
        );
    }

    #[test]
    fn memory_up_to_the_hard_limit_can_be_locked() {
        use std::os::unix::process::CommandExt;
        const IS_OWN: &str = "WORMHOLE_TEST_OF_LOCKED_MEMORY";
        if std::env::var_os(IS_OWN).is_some() {
            let (current, maximum) = (Some(1 << 20), Some(4 << 20));
            setrlimit(Resource::Memlock, Rlimit { current, maximum }).expect("they are lower");
            allow_locking(3 << 20).expect("the soft limit is raised");
            assert_eq!(getrlimit(Resource::Memlock).current, Some(3 << 20));
            allow_locking(2 << 20).expect("it suffices");
            assert_eq!(getrlimit(Resource::Memlock).current, Some(3 << 20));
            // An ordinary user cannot raise the hard limit.
            let error = allow_locking(5 << 20).expect_err("beyond the hard limit");
            let words = "5 MiB here, and this process may lock 4 MiB: raise the limit";
            assert!(error.to_string().contains(words), "{error}");
            return;
        }
        let test = "devices::vfio::open::tests::memory_up_to_the_hard_limit_can_be_locked";
        let mut own = std::process::Command::new("/proc/self/exe");
        own.args(["--exact", test]).env(IS_OWN, "").current_dir("/");
        if rustix::process::geteuid().is_root() {
            own.uid(1000);
        }
        let output = own.output().expect("this program runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("1 passed"), "{said}");
    }
}
