//! Managed memory.

use std::ffi::c_void;
use std::path::Path;

use wormhole_api::constants::device_ordinal::{CPU, INVALID};
use wormhole_api::constants::memory_advice::{
    SET_ACCESSED_BY, SET_PREFERRED_LOCATION, SET_READ_MOSTLY, UNSET_ACCESSED_BY,
    UNSET_PREFERRED_LOCATION, UNSET_READ_MOSTLY,
};
use wormhole_api::constants::memory_attach_flags::{GLOBAL, HOST, SINGLE};
use wormhole_api::constants::memory_location;
use wormhole_api::constants::memory_range_attribute::{
    ACCESSED_BY, LAST_PREFETCH_LOCATION, LAST_PREFETCH_LOCATION_ID, LAST_PREFETCH_LOCATION_TYPE,
    PREFERRED_LOCATION, PREFERRED_LOCATION_ID, PREFERRED_LOCATION_TYPE, READ_MOSTLY,
};

use super::device;
use crate::error::{CuError, Result};
use crate::graph::capture;
use crate::memory::managed::{Location, Range};
use crate::memory::{self, residence};
use crate::object::context;
use crate::object::stream::{Target, target};
use crate::parameter::{In, Out};
use crate::types::{
    CUdevice, CUdeviceptr, CUmem_advise, CUmem_range_attribute, CUmemLocation, CUstream,
    DefaultStream,
};

pub fn cuMemAllocManaged(dptr: Out<'_, CUdeviceptr>, bytesize: usize, flags: u32) -> Result {
    dptr.not_null()?;
    let scope = context::scope()?;
    let address = memory::allocate_managed(scope, bytesize as u64, flags)?;
    dptr.put(address)
}

/// Returns the location of a device ordinal; -1 is the host.
fn place(ordinal: CUdevice) -> Result<Location> {
    if ordinal == CPU {
        return Ok(Location::Host);
    }
    device(ordinal)?;
    Ok(Location::Device(ordinal))
}

fn location(location: CUmemLocation) -> Result<Location> {
    match location.r#type {
        memory_location::DEVICE => {
            device(location.id)?;
            Ok(Location::Device(location.id))
        }
        memory_location::HOST => Ok(Location::Host),
        memory_location::HOST_NUMA if numa_node_exists(location.id) => {
            Ok(Location::HostNuma(location.id))
        }
        memory_location::HOST_NUMA_CURRENT => Ok(Location::HostNumaCurrent),
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
        SET_READ_MOSTLY | UNSET_READ_MOSTLY => {
            range.change(|of| of.read_mostly = advice == SET_READ_MOSTLY);
            residence::advise_read_mostly(range.base(), range.whole().is_read_mostly());
        }
        SET_PREFERRED_LOCATION => {
            let preferred = place()?;
            if !matches!(preferred, Location::Device(_)) {
                residence::keep_home(address);
            }
            range.change(|of| of.preferred = Some(preferred));
        }
        UNSET_PREFERRED_LOCATION => range.change(|of| of.preferred = None),
        SET_ACCESSED_BY | UNSET_ACCESSED_BY => {
            let accessor = place()?;
            if matches!(accessor, Location::HostNuma(_) | Location::HostNumaCurrent) {
                return Err(CuError::INVALID_VALUE);
            }
            range.change(|of| of.set_accessed_by(accessor, advice == SET_ACCESSED_BY));
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

/// Returns the stream of a call that no graph can contain, which must not be captured.
fn uncaptured(default: DefaultStream, stream: CUstream) -> Result<Target> {
    let (scope, target) = target(default, stream)?;
    scope.session.alive()?;
    capture::check_work(target)?;
    Ok(target)
}

/// Records a prefetch. Memory that can go to the device does so at once, if the device is idle. Parts that the program
/// uses come to it at its accesses.
fn prefetch(range: Range, to: Location) {
    range.change(|of| of.prefetched = Some(to));
    if matches!(to, Location::Device(_)) {
        residence::expect_device(range.base());
    }
}

pub fn cuMemPrefetchAsync(
    default: DefaultStream,
    devPtr: CUdeviceptr,
    count: usize,
    dstDevice: CUdevice,
    hStream: CUstream,
) -> Result {
    uncaptured(default, hStream)?;
    let to = place(dstDevice)?;
    prefetch(Range::of(devPtr, count as u64)?, to);
    Ok(())
}

pub fn cuMemPrefetchAsync_v2(
    default: DefaultStream,
    devPtr: CUdeviceptr,
    count: usize,
    location: CUmemLocation,
    flags: u32,
    hStream: CUstream,
) -> Result {
    uncaptured(default, hStream)?;
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let to = self::location(location)?;
    prefetch(Range::of(devPtr, count as u64)?, to);
    Ok(())
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
    uncaptured(default, hStream)?;
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let ranges = ranges(dptrs, sizes, count)?;
    let places = places(prefetchLocs, prefetchLocIdxs, numPrefetchLocs, count)?;
    for (range, place) in ranges.into_iter().zip(places) {
        prefetch(range, place);
    }
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
    uncaptured(default, hStream)?;
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    ranges(dptrs, sizes, count).map(drop)
}

/// Checks the arguments. Host and device may access managed memory at the same time, so the attachment has no effect.
pub fn cuStreamAttachMemAsync(
    default: DefaultStream,
    hStream: CUstream,
    dptr: CUdeviceptr,
    length: usize,
    flags: u32,
) -> Result {
    let target = uncaptured(default, hStream)?;
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
        Some(_) => CPU,
        None => INVALID,
    }
}

/// Returns the type and id of a location as a `CUmemLocation`.
fn pair(place: Option<Location>) -> (u32, i32) {
    match place {
        Some(Location::Device(ordinal)) => (memory_location::DEVICE, ordinal),
        Some(Location::Host) => (memory_location::HOST, CPU),
        Some(Location::HostNuma(node)) => (memory_location::HOST_NUMA, node),
        Some(Location::HostNumaCurrent) => (memory_location::HOST_NUMA_CURRENT, 0),
        None => (memory_location::INVALID, INVALID),
    }
}

/// Writes an attribute of a range.
fn put_attribute(data: Out<'_, [u8]>, attribute: CUmem_range_attribute, range: Range) -> Result {
    let bytes = data.len();
    let words = bytes / size_of::<i32>();
    // The only attribute that is a list; all others are one word.
    let fits = match attribute {
        ACCESSED_BY => words > 0 && bytes.is_multiple_of(size_of::<i32>()),
        _ => bytes == size_of::<i32>(),
    };
    if data.is_null() || !fits {
        return Err(CuError::INVALID_VALUE);
    }
    let value = match attribute {
        READ_MOSTLY => i32::from(range.is_read_mostly()),
        PREFERRED_LOCATION => ordinal(range.preferred()),
        ACCESSED_BY => {
            let rest = std::iter::repeat(INVALID);
            let words = range.accessed_by().chain(rest).take(words);
            return data.put_all(words.flat_map(i32::to_ne_bytes));
        }
        LAST_PREFETCH_LOCATION => ordinal(range.prefetched()),
        PREFERRED_LOCATION_TYPE => pair(range.preferred()).0.cast_signed(),
        PREFERRED_LOCATION_ID => pair(range.preferred()).1,
        LAST_PREFETCH_LOCATION_TYPE => pair(range.prefetched()).0.cast_signed(),
        LAST_PREFETCH_LOCATION_ID => pair(range.prefetched()).1,
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
