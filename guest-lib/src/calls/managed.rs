//! Managed memory.

use std::ffi::c_void;
use std::path::Path;

use super::{body, device, put};
use crate::capture;
use crate::context;
use crate::error::{CuError, Result};
use crate::managed::{DEVICE_CPU, DEVICE_INVALID, Location, Range};
use crate::memory;
use crate::stream::target;
use crate::types::{
    CUdevice, CUdeviceptr, CUmem_advise, CUmem_range_attribute, CUmemLocation, CUresult, CUstream,
    DefaultStream,
};

/// Values of `CUmemLocationType`.
const LOCATION_INVALID: u32 = 0;
const LOCATION_DEVICE: u32 = 1;
const LOCATION_HOST: u32 = 2;
const LOCATION_HOST_NUMA: u32 = 3;
const LOCATION_HOST_NUMA_CURRENT: u32 = 4;

pub unsafe fn cuMemAllocManaged(dptr: *mut CUdeviceptr, bytesize: usize, flags: u32) -> CUresult {
    body! {
        if dptr.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let scope = context::scope()?;
        let address = memory::allocate_managed(scope, bytesize as u64, flags)?;
        // SAFETY: as the caller promises.
        unsafe { put(dptr, address) }
    }
}

/// The place that a device ordinal names, -1 being the host.
fn place(ordinal: CUdevice) -> Result<Location> {
    if ordinal == DEVICE_CPU {
        return Ok(Location::Host);
    }
    device(ordinal)?;
    Ok(Location::Device(ordinal))
}

fn location(location: CUmemLocation) -> Result<Location> {
    match location.r#type {
        LOCATION_DEVICE => {
            device(location.id)?;
            Ok(Location::Device(location.id))
        }
        LOCATION_HOST => Ok(Location::Host),
        LOCATION_HOST_NUMA if numa_node_exists(location.id) => Ok(Location::HostNuma(location.id)),
        LOCATION_HOST_NUMA_CURRENT => Ok(Location::HostNumaCurrent),
        _ => Err(CuError::INVALID_VALUE),
    }
}

fn numa_node_exists(node: i32) -> bool {
    node == 0 || node > 0 && Path::new(&format!("/sys/devices/system/node/node{node}")).exists()
}

/// What is said with `cuMemAdvise`. Only some kinds of advice name a place.
fn advise(
    address: CUdeviceptr,
    bytes: usize,
    advice: CUmem_advise,
    place: impl FnOnce() -> Result<Location>,
) -> Result {
    context::scope()?;
    let range = Range::of(address, bytes as u64)?;
    match advice {
        1 | 2 => range.change(|of| of.read_mostly = advice == 1),
        3 => {
            let preferred = Some(place()?);
            range.change(|of| of.preferred = preferred);
        }
        4 => range.change(|of| of.preferred = None),
        5 | 6 => {
            let accessor = place()?;
            if matches!(accessor, Location::HostNuma(_) | Location::HostNumaCurrent) {
                return Err(CuError::INVALID_VALUE);
            }
            range.change(|of| of.set_accessed_by(accessor, advice == 5));
        }
        _ => return Err(CuError::INVALID_VALUE),
    }
    Ok(())
}

pub unsafe fn cuMemAdvise(
    devPtr: CUdeviceptr,
    count: usize,
    advice: CUmem_advise,
    device: CUdevice,
) -> CUresult {
    body! { advise(devPtr, count, advice, || place(device)) }
}

pub unsafe fn cuMemAdvise_v2(
    devPtr: CUdeviceptr,
    count: usize,
    advice: CUmem_advise,
    location: CUmemLocation,
) -> CUresult {
    body! { advise(devPtr, count, advice, || self::location(location)) }
}

/// Memory does not move, so a prefetch is complete at once.
fn prefetch(address: CUdeviceptr, bytes: usize, to: Location) -> Result {
    Range::of(address, bytes as u64)?.change(|of| of.prefetched = Some(to));
    Ok(())
}

pub unsafe fn cuMemPrefetchAsync(
    default: DefaultStream,
    devPtr: CUdeviceptr,
    count: usize,
    dstDevice: CUdevice,
    hStream: CUstream,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        scope.session.alive()?;
        capture::check_work(target)?;
        prefetch(devPtr, count, place(dstDevice)?)
    }
}

pub unsafe fn cuMemPrefetchAsync_v2(
    default: DefaultStream,
    devPtr: CUdeviceptr,
    count: usize,
    location: CUmemLocation,
    flags: u32,
    hStream: CUstream,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        scope.session.alive()?;
        capture::check_work(target)?;
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        prefetch(devPtr, count, self::location(location)?)
    }
}

/// Checked operands of a batch.
struct Batch {
    ranges: Vec<Range>,
    /// A place for each range; none where the batch moves nothing.
    places: Vec<Location>,
}

/// The ranges of a batch call.
///
/// # Safety
/// The arrays are null or have `count` elements.
unsafe fn ranges(
    addresses: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
) -> Result<Vec<Range>> {
    if addresses.is_null() || sizes.is_null() || count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    (0..count)
        .map(|index| {
            // SAFETY: both arrays have that many elements.
            let (address, bytes) =
                unsafe { (addresses.add(index).read(), sizes.add(index).read()) };
            Range::of(address, bytes as u64)
        })
        .collect()
}

/// The place of each of `count` ranges: a place holds from the range that its index names on.
///
/// # Safety
/// The arrays are null or have `number` elements.
unsafe fn places(
    locations: *const CUmemLocation,
    indices: *const usize,
    number: usize,
    count: usize,
) -> Result<Vec<Location>> {
    if locations.is_null() || indices.is_null() || number == 0 || number > count {
        return Err(CuError::INVALID_VALUE);
    }
    let mut places = Vec::with_capacity(count);
    for index in 0..number {
        // SAFETY: both arrays have that many elements.
        let (first, named) = unsafe { (indices.add(index).read(), locations.add(index).read()) };
        let is_next = match index {
            0 => first == 0,
            _ => (places.len()..count).contains(&first),
        };
        let named = location(named)?;
        if !is_next {
            return Err(CuError::INVALID_VALUE);
        }
        let before = places.last().copied().unwrap_or(named);
        places.resize(first, before);
        places.push(named);
    }
    let last = places.last().copied().ok_or(CuError::INVALID_VALUE)?;
    places.resize(count, last);
    Ok(places)
}

impl Batch {
    fn prefetch(&self) {
        for (range, place) in self.ranges.iter().zip(&self.places) {
            range.change(|of| of.prefetched = Some(*place));
        }
    }
}

pub unsafe fn cuMemPrefetchBatchAsync(
    default: DefaultStream,
    dptrs: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
    prefetchLocs: *const CUmemLocation,
    prefetchLocIdxs: *const usize,
    numPrefetchLocs: usize,
    flags: u64,
    hStream: CUstream,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        scope.session.alive()?;
        capture::check_work(target)?;
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        let batch = unsafe {
            Batch {
                ranges: ranges(dptrs, sizes, count)?,
                places: places(prefetchLocs, prefetchLocIdxs, numPrefetchLocs, count)?,
            }
        };
        batch.prefetch();
        Ok(())
    }
}

/// What was discarded may keep its contents: only a write or a prefetch makes them defined again.
pub unsafe fn cuMemDiscardBatchAsync(
    default: DefaultStream,
    dptrs: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
    flags: u64,
    hStream: CUstream,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        scope.session.alive()?;
        capture::check_work(target)?;
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe { ranges(dptrs, sizes, count) }.map(drop)
    }
}

pub unsafe fn cuMemDiscardAndPrefetchBatchAsync(
    default: DefaultStream,
    dptrs: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
    prefetchLocs: *const CUmemLocation,
    prefetchLocIdxs: *const usize,
    numPrefetchLocs: usize,
    flags: u64,
    hStream: CUstream,
) -> CUresult {
    // SAFETY: as the caller promises. What was discarded may keep its contents.
    unsafe {
        cuMemPrefetchBatchAsync(
            default,
            dptrs,
            sizes,
            count,
            prefetchLocs,
            prefetchLocIdxs,
            numPrefetchLocs,
            flags,
            hStream,
        )
    }
}

/// Host and device reach managed memory at the same time, so it makes no difference what it is attached to.
pub unsafe fn cuStreamAttachMemAsync(
    default: DefaultStream,
    hStream: CUstream,
    dptr: CUdeviceptr,
    length: usize,
    flags: u32,
) -> CUresult {
    const GLOBAL: u32 = 1;
    const HOST: u32 = 2;
    const SINGLE: u32 = 4;
    body! {
        let (scope, target) = target(default, hStream)?;
        scope.session.alive()?;
        capture::check_work(target)?;
        let known = match flags {
            GLOBAL | HOST => true,
            SINGLE => !target.handle.is_legacy(),
            _ => false,
        };
        let whole = memory::memory_map()
            .find(dptr)
            .filter(|allocation| allocation.is_managed() && allocation.base == dptr)
            .is_some_and(|allocation| length == 0 || length as u64 == allocation.bytes);
        if known && whole { Ok(()) } else { Err(CuError::INVALID_VALUE) }
    }
}

/// The device ordinal that stands for a place.
fn ordinal(place: Option<Location>) -> i32 {
    match place {
        Some(Location::Device(ordinal)) => ordinal,
        Some(_) => DEVICE_CPU,
        None => DEVICE_INVALID,
    }
}

/// A place as a `CUmemLocation`: type and id.
fn pair(place: Option<Location>) -> (u32, i32) {
    match place {
        Some(Location::Device(ordinal)) => (LOCATION_DEVICE, ordinal),
        Some(Location::Host) => (LOCATION_HOST, DEVICE_CPU),
        Some(Location::HostNuma(node)) => (LOCATION_HOST_NUMA, node),
        Some(Location::HostNumaCurrent) => (LOCATION_HOST_NUMA_CURRENT, 0),
        None => (LOCATION_INVALID, DEVICE_INVALID),
    }
}

/// Writes an attribute of a range.
///
/// # Safety
/// `data` is writable for `bytes` bytes.
unsafe fn put_attribute(
    data: *mut c_void,
    bytes: usize,
    attribute: CUmem_range_attribute,
    range: Range,
) -> Result {
    /// `CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY`: a list, all others are one word.
    const ACCESSED_BY: CUmem_range_attribute = 3;
    let words = bytes / size_of::<i32>();
    let fits = match attribute {
        ACCESSED_BY => words > 0 && bytes.is_multiple_of(size_of::<i32>()),
        _ => bytes == size_of::<i32>(),
    };
    if data.is_null() || !fits {
        return Err(CuError::INVALID_VALUE);
    }
    let value = match attribute {
        1 => i32::from(range.is_read_mostly()),
        2 => ordinal(range.preferred()),
        ACCESSED_BY => {
            let rest = std::iter::repeat(DEVICE_INVALID);
            for (index, accessor) in range.accessed_by().chain(rest).take(words).enumerate() {
                // SAFETY: that many words fit.
                unsafe { data.cast::<i32>().add(index).write_unaligned(accessor) };
            }
            return Ok(());
        }
        4 => ordinal(range.prefetched()),
        5 => pair(range.preferred()).0.cast_signed(),
        6 => pair(range.preferred()).1,
        7 => pair(range.prefetched()).0.cast_signed(),
        8 => pair(range.prefetched()).1,
        _ => return Err(CuError::INVALID_VALUE),
    };
    // SAFETY: one word fits.
    unsafe { data.cast::<i32>().write_unaligned(value) };
    Ok(())
}

pub unsafe fn cuMemRangeGetAttribute(
    data: *mut c_void,
    dataSize: usize,
    attribute: CUmem_range_attribute,
    devPtr: CUdeviceptr,
    count: usize,
) -> CUresult {
    body! {
        context::scope()?;
        let range = Range::of(devPtr, count as u64)?;
        // SAFETY: as the caller promises.
        unsafe { put_attribute(data, dataSize, attribute, range) }
    }
}

pub unsafe fn cuMemRangeGetAttributes(
    data: *mut *mut c_void,
    dataSizes: *const usize,
    attributes: *const CUmem_range_attribute,
    numAttributes: usize,
    devPtr: CUdeviceptr,
    count: usize,
) -> CUresult {
    body! {
        context::scope()?;
        if data.is_null() || dataSizes.is_null() || attributes.is_null() || numAttributes == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let range = Range::of(devPtr, count as u64)?;
        for index in 0..numAttributes {
            // SAFETY: the arrays have that many elements, and each place its size.
            unsafe {
                let (place, bytes) = (data.add(index).read(), dataSizes.add(index).read());
                put_attribute(place, bytes, attributes.add(index).read(), range)?;
            }
        }
        Ok(())
    }
}
