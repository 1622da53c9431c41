//! Managed memory.

use std::ffi::c_void;
use std::path::Path;

use super::device;
use crate::error::{CuError, Result};
use crate::graph::capture;
use crate::memory;
use crate::memory::managed::{DEVICE_CPU, DEVICE_INVALID, Location, Range};
use crate::object::context;
use crate::object::stream::target;
use crate::parameter::{In, Out};
use crate::types::{
    CUdevice, CUdeviceptr, CUmem_advise, CUmem_range_attribute, CUmemLocation, CUstream,
    DefaultStream,
};

/// Values of `CUmemLocationType`.
const LOCATION_INVALID: u32 = 0;
const LOCATION_DEVICE: u32 = 1;
const LOCATION_HOST: u32 = 2;
const LOCATION_HOST_NUMA: u32 = 3;
const LOCATION_HOST_NUMA_CURRENT: u32 = 4;

pub fn cuMemAllocManaged(dptr: Out<'_, CUdeviceptr>, bytesize: usize, flags: u32) -> Result {
    if dptr.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let scope = context::scope()?;
    let address = memory::allocate_managed(scope, bytesize as u64, flags)?;
    dptr.put(address)
}

/// Returns the location of a device ordinal; -1 is the host.
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

/// Records advice (`cuMemAdvise`). Only some kinds of advice use a location.
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

pub fn cuMemAdvise(
    devPtr: CUdeviceptr,
    count: usize,
    advice: CUmem_advise,
    device: CUdevice,
) -> Result {
    advise(devPtr, count, advice, || place(device))
}

pub fn cuMemAdvise_v2(
    devPtr: CUdeviceptr,
    count: usize,
    advice: CUmem_advise,
    location: CUmemLocation,
) -> Result {
    advise(devPtr, count, advice, || self::location(location))
}

/// Records a prefetch. Memory does not migrate, so a prefetch is complete at once.
fn prefetch(address: CUdeviceptr, bytes: usize, to: Location) -> Result {
    Range::of(address, bytes as u64)?.change(|of| of.prefetched = Some(to));
    Ok(())
}

pub fn cuMemPrefetchAsync(
    default: DefaultStream,
    devPtr: CUdeviceptr,
    count: usize,
    dstDevice: CUdevice,
    hStream: CUstream,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    scope.session.alive()?;
    capture::check_work(target)?;
    prefetch(devPtr, count, place(dstDevice)?)
}

pub fn cuMemPrefetchAsync_v2(
    default: DefaultStream,
    devPtr: CUdeviceptr,
    count: usize,
    location: CUmemLocation,
    flags: u32,
    hStream: CUstream,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    scope.session.alive()?;
    capture::check_work(target)?;
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    prefetch(devPtr, count, self::location(location)?)
}

/// Checked operands of a batch call.
struct Batch {
    ranges: Vec<Range>,
    /// Location of each range; empty if the batch call does not prefetch.
    places: Vec<Location>,
}

/// Reads the ranges of a batch call.
fn ranges(
    addresses: In<'_, [CUdeviceptr]>,
    sizes: In<'_, [usize]>,
    count: usize,
) -> Result<Vec<Range>> {
    if addresses.is_null() || sizes.is_null() || count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    (0..count)
        .map(|index| Range::of(addresses.get(index)?, sizes.get(index)? as u64))
        .collect()
}

/// Returns the location of each of `count` ranges. A location applies from the range of its index to the next
/// location's.
fn places(
    locations: In<'_, [CUmemLocation]>,
    indices: In<'_, [usize]>,
    number: usize,
    count: usize,
) -> Result<Vec<Location>> {
    if locations.is_null() || indices.is_null() || number == 0 || number > count {
        return Err(CuError::INVALID_VALUE);
    }
    let mut places = Vec::with_capacity(count);
    for index in 0..number {
        let (first, named) = (indices.get(index)?, locations.get(index)?);
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

pub fn cuMemPrefetchBatchAsync(
    default: DefaultStream,
    dptrs: In<'_, [CUdeviceptr]>,
    sizes: In<'_, [usize]>,
    count: usize,
    prefetchLocs: In<'_, [CUmemLocation]>,
    prefetchLocIdxs: In<'_, [usize]>,
    numPrefetchLocs: usize,
    flags: u64,
    hStream: CUstream,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    scope.session.alive()?;
    capture::check_work(target)?;
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let batch = Batch {
        ranges: ranges(dptrs, sizes, count)?,
        places: places(prefetchLocs, prefetchLocIdxs, numPrefetchLocs, count)?,
    };
    batch.prefetch();
    Ok(())
}

/// Checks the ranges. Discarded memory keeps its contents, which is permitted: they are undefined until a write or a
/// prefetch.
pub fn cuMemDiscardBatchAsync(
    default: DefaultStream,
    dptrs: In<'_, [CUdeviceptr]>,
    sizes: In<'_, [usize]>,
    count: usize,
    flags: u64,
    hStream: CUstream,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    scope.session.alive()?;
    capture::check_work(target)?;
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    ranges(dptrs, sizes, count).map(drop)
}

pub fn cuMemDiscardAndPrefetchBatchAsync(
    default: DefaultStream,
    dptrs: In<'_, [CUdeviceptr]>,
    sizes: In<'_, [usize]>,
    count: usize,
    prefetchLocs: In<'_, [CUmemLocation]>,
    prefetchLocIdxs: In<'_, [usize]>,
    numPrefetchLocs: usize,
    flags: u64,
    hStream: CUstream,
) -> Result {
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

/// Checks the arguments. Host and device can access managed memory at the same time, so the attachment has no effect.
pub fn cuStreamAttachMemAsync(
    default: DefaultStream,
    hStream: CUstream,
    dptr: CUdeviceptr,
    length: usize,
    flags: u32,
) -> Result {
    const GLOBAL: u32 = 1;
    const HOST: u32 = 2;
    const SINGLE: u32 = 4;
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
    if known && whole {
        Ok(())
    } else {
        Err(CuError::INVALID_VALUE)
    }
}

/// Returns the device ordinal of a location.
fn ordinal(place: Option<Location>) -> i32 {
    match place {
        Some(Location::Device(ordinal)) => ordinal,
        Some(_) => DEVICE_CPU,
        None => DEVICE_INVALID,
    }
}

/// Returns the type and id of a location as a `CUmemLocation`.
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
fn put_attribute(data: Out<'_, [u8]>, attribute: CUmem_range_attribute, range: Range) -> Result {
    /// `CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY`, the only attribute that is a list; all others are one word.
    const ACCESSED_BY: CUmem_range_attribute = 3;
    let bytes = data.len();
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
            let words = range.accessed_by().chain(rest).take(words);
            return data.put_all(words.flat_map(i32::to_ne_bytes));
        }
        4 => ordinal(range.prefetched()),
        5 => pair(range.preferred()).0.cast_signed(),
        6 => pair(range.preferred()).1,
        7 => pair(range.prefetched()).0.cast_signed(),
        8 => pair(range.prefetched()).1,
        _ => return Err(CuError::INVALID_VALUE),
    };
    data.put_all(value.to_ne_bytes())
}

pub fn cuMemRangeGetAttribute(
    data: Out<'_, [u8]>,
    _dataSize: usize,
    attribute: CUmem_range_attribute,
    devPtr: CUdeviceptr,
    count: usize,
) -> Result {
    context::scope()?;
    let range = Range::of(devPtr, count as u64)?;
    put_attribute(data, attribute, range)
}

pub fn cuMemRangeGetAttributes(
    data: In<'_, [*mut c_void]>,
    dataSizes: In<'_, [usize]>,
    attributes: In<'_, [CUmem_range_attribute]>,
    numAttributes: usize,
    devPtr: CUdeviceptr,
    count: usize,
) -> Result {
    context::scope()?;
    if data.is_null() || dataSizes.is_null() || attributes.is_null() || numAttributes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let range = Range::of(devPtr, count as u64)?;
    for index in 0..numAttributes {
        let (place, bytes) = (data.get(index)?, dataSizes.get(index)?);
        // SAFETY: each place is as long as its size says, by the contract of `In`.
        let place = unsafe { Out::list(place.cast(), bytes) };
        put_attribute(place, attributes.get(index)?, range)?;
    }
    Ok(())
}
