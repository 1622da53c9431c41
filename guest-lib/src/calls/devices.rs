//! Device queries, answered from the description received at `cuInit`.

use wormhole_api::constants::atomic_capability::{
    REDUCTION, SCALAR_32, SCALAR_64, SIGNED, UNSIGNED,
};

use crate::device::{Device, attribute, copy_string};
use crate::error::{CuError, Result};
use crate::parameter::{In, Out, Text};
use crate::session::session;
use crate::types::{
    CUatomicOperation, CUdevice, CUdevice_attribute, CUdevprop, CUexecAffinityType, CUuuid,
};

/// Looks up a device by its `CUdevice`.
#[inline]
pub fn device(device: CUdevice) -> Result<&'static Device> {
    let devices = session()?.devices();
    let found = usize::try_from(device).ok().and_then(|at| devices.get(at));
    found.ok_or(CuError::INVALID_DEVICE)
}

/// Returns the ordinal of a `CUdevice`.
#[inline]
pub fn ordinal(device: CUdevice) -> Result<usize> {
    let count = session()?.devices().len();
    let number = usize::try_from(device).ok();
    number
        .filter(|number| *number < count)
        .ok_or(CuError::INVALID_DEVICE)
}

/// Returns the `CUdevice` of an ordinal.
pub fn named(ordinal: usize) -> CUdevice {
    CUdevice::try_from(ordinal).unwrap_or(-1)
}

pub fn cuDeviceGet(device: Out<'_, CUdevice>, ordinal: i32) -> Result {
    self::ordinal(ordinal)?;
    device.put(ordinal)
}

pub fn cuDeviceGetCount(count: Out<'_, i32>) -> Result {
    let devices = session()?.devices().len();
    count.put(named(devices))
}

pub fn cuDeviceGetAttribute(pi: Out<'_, i32>, attrib: CUdevice_attribute, dev: CUdevice) -> Result {
    pi.not_null()?;
    let value = device(dev)?.attribute(attrib)?;
    pi.put(value)
}

pub fn cuDeviceGetName(name: Out<'_, [u8]>, _len: i32, dev: CUdevice) -> Result {
    copy_string(device(dev)?.name.to_bytes(), name)
}

pub fn cuDeviceGetPCIBusId(pciBusId: Out<'_, [u8]>, _len: i32, dev: CUdevice) -> Result {
    copy_string(device(dev)?.pci_bus_id().as_bytes(), pciBusId)
}

pub fn cuDeviceGetByPCIBusId(dev: Out<'_, CUdevice>, pciBusId: Text<'_>) -> Result {
    let devices = session()?.devices();
    let asked = pciBusId.get()?.to_string_lossy().to_ascii_uppercase();
    let found = devices
        .iter()
        .position(|device| is_at(&device.pci_bus_id(), &asked));
    let found = found.ok_or(CuError::INVALID_DEVICE)?;
    dev.put(named(found))
}

/// Returns whether a PCI address equals the requested one, which may omit the domain and the function.
fn is_at(own: &str, asked: &str) -> bool {
    let short = own.split_once(':').map_or("", |(_, rest)| rest);
    let plain = |text: &str| text.trim_end_matches(".0").to_owned();
    [plain(own), plain(short)].contains(&plain(asked))
}

pub fn cuDeviceGetUuid_v2(uuid: Out<'_, CUuuid>, dev: CUdevice) -> Result {
    uuid.put(CUuuid {
        bytes: device(dev)?.uuid,
    })
}

/// Fails, because locally unique identifiers exist on Windows only.
pub fn cuDeviceGetLuid(
    _luid: Out<'_, [u8; 8]>,
    _deviceNodeMask: Out<'_, u32>,
    dev: CUdevice,
) -> Result {
    device(dev)?;
    Err(CuError::NOT_SUPPORTED)
}

pub fn cuDeviceTotalMem_v2(bytes: Out<'_, usize>, dev: CUdevice) -> Result {
    let total = device(dev)?.total_memory;
    bytes.put(usize::try_from(total).unwrap_or(usize::MAX))
}

pub fn cuDeviceComputeCapability(
    major: Out<'_, i32>,
    minor: Out<'_, i32>,
    dev: CUdevice,
) -> Result {
    let device = device(dev)?;
    major.put(device.value(attribute::COMPUTE_CAPABILITY_MAJOR))?;
    minor.put(device.value(attribute::COMPUTE_CAPABILITY_MINOR))
}

pub fn cuDeviceGetProperties(prop: Out<'_, CUdevprop>, dev: CUdevice) -> Result {
    let device = device(dev)?;
    let three = |first| [first, first + 1, first + 2].map(|id| device.value(id));
    let properties = CUdevprop {
        maxThreadsPerBlock: device.value(attribute::MAX_THREADS_PER_BLOCK),
        maxThreadsDim: three(attribute::MAX_BLOCK_DIM_X),
        maxGridSize: three(attribute::MAX_GRID_DIM_X),
        sharedMemPerBlock: device.value(attribute::MAX_SHARED_MEMORY_PER_BLOCK),
        totalConstantMemory: device.value(attribute::TOTAL_CONSTANT_MEMORY),
        SIMDWidth: device.value(attribute::WARP_SIZE),
        memPitch: device.value(attribute::MAX_PITCH),
        regsPerBlock: device.value(attribute::MAX_REGISTERS_PER_BLOCK),
        clockRate: device.value(attribute::CLOCK_RATE),
        textureAlign: device.value(attribute::TEXTURE_ALIGNMENT),
    };
    prop.put(properties)
}

/// Reports no support: execution affinity requires the multi-process service, which runs on the host.
pub fn cuDeviceGetExecAffinitySupport(
    pi: Out<'_, i32>,
    _kind: CUexecAffinityType,
    dev: CUdevice,
) -> Result {
    device(dev)?;
    pi.put(0)
}

/// Capabilities of each `CUatomicOperation` in PTX ("PTX ISA", `atom` and `red`), for a device with native atomic
/// operations on host memory.
const ATOMICS: [u32; 13] = {
    const INTEGERS: u32 = SIGNED | UNSIGNED | REDUCTION | SCALAR_32 | SCALAR_64;
    const WRAPPING: u32 = UNSIGNED | REDUCTION | SCALAR_32;
    const BITS: u32 = UNSIGNED | REDUCTION | SCALAR_32 | SCALAR_64;
    const EXCHANGES: u32 = UNSIGNED | SCALAR_32 | SCALAR_64;
    const FLOATS: u32 = SIGNED | REDUCTION | SCALAR_32 | SCALAR_64;
    [
        INTEGERS, INTEGERS, INTEGERS, WRAPPING, WRAPPING, BITS, BITS, BITS, EXCHANGES, EXCHANGES,
        FLOATS, 0, 0,
    ]
};

pub fn cuDeviceGetHostAtomicCapabilities(
    capabilities: Out<'_, [u32]>,
    operations: In<'_, [CUatomicOperation]>,
    count: u32,
    dev: CUdevice,
) -> Result {
    session()?;
    if capabilities.is_null() || operations.is_null() || count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let native = device(dev)?.value(attribute::HOST_NATIVE_ATOMIC_SUPPORTED) != 0;
    put_atomics(capabilities, operations, native)
}

/// Writes the capabilities of atomic operations, or 0 for each if they are not native.
pub(super) fn put_atomics(
    capabilities: Out<'_, [u32]>,
    operations: In<'_, [CUatomicOperation]>,
    native: bool,
) -> Result {
    let known = |operation: CUatomicOperation| ATOMICS.get(operation as usize).copied();
    let found: Option<Vec<u32>> = operations.values()?.map(known).collect();
    let found = found.ok_or(CuError::INVALID_VALUE)?;
    capabilities.put_all(found.into_iter().map(|one| if native { one } else { 0 }))
}
