//! Copies and fills.
//!
//! Device memory and page-locked memory are reached by the device itself. Other host memory goes through
//! staging buffers in the arena: the guest fills the next while the device empties the last.

use std::collections::VecDeque;

use wormhole_api::{DevicePtr, Element, MemCopy, MemSet, MemWrite};
use wormhole_lock::{Mutex, MutexGuard};
use wormhole_ring::waits::Wait;

use crate::bulk::{LARGE, Stores};
use crate::error::{CuError, Result};
use crate::memory::end::{CopyEnd, End};
use crate::object::context::Scope;
use crate::object::stream::{Cover, Target};
use crate::session::STAGING_BYTES;
use crate::work::peer;
use crate::work::pieces::Piece;

/// Greatest number of bytes of a copy whose data travel in the record itself.
const INLINE: usize = 4096;
/// Bytes of a staging buffer.
pub const CHUNK: usize = STAGING_BYTES;
/// Number of buffers that one copy to the host uses at a time.
const DEPTH: usize = 4;

/// Whether the call returns when the copy is complete, as the synchronous copies do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Synchronous,
    Asynchronous,
}

/// Splits a range into parts of at most `limit` bytes: offset and length.
fn chunks(bytes: usize, limit: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes.div_ceil(limit)).map(move |index| {
        let offset = index * limit;
        (offset, limit.min(bytes - offset))
    })
}

/// Checks that a copy may name a range.
pub fn check(address: u64, bytes: usize) -> Result {
    match bytes {
        0 => Ok(()),
        bytes => End::of(address, bytes as u64).map(drop),
    }
}

/// A copy of a range.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// The destination and the source as the program gave them.
    pub given: (CopyEnd, CopyEnd),
    /// Kinds of memory of both ends; `places` has their addresses for the side that reaches them.
    ends: (End, End),
    places: (u64, u64),
    pub bytes: usize,
    pub mode: Mode,
}

impl Copy {
    /// Looks both ends up. `bytes` must not be 0.
    pub fn new(given: (CopyEnd, CopyEnd), bytes: usize, mode: Mode) -> Result<Self> {
        let (to, destination) = given.0.find(bytes)?;
        let (from, source) = given.1.find(bytes)?;
        Ok(Self {
            given,
            ends: (to, from),
            places: (destination, source),
            bytes,
            mode,
        })
    }

    /// Returns the addresses of the destination and of the source.
    pub fn places(&self) -> [u64; 2] {
        [self.places.0, self.places.1]
    }

    /// Hands the copy to a stream.
    pub fn send(self, scope: Scope, target: Target) -> Result {
        // SAFETY: an end that is the program's own memory is valid, by the contract of `CopyEnd`.
        unsafe { hand_over(scope, target, self.ends, self.places, self.bytes, self.mode) }
    }
}

/// Copies between ends that were looked up.
///
/// # Safety
/// An end that is host memory is valid for the copy.
unsafe fn hand_over(
    scope: Scope,
    target: Target,
    ends: (End, End),
    (destination, source): (u64, u64),
    bytes: usize,
    mode: Mode,
) -> Result {
    match ends {
        // From host to host every copy is synchronous (CUDA driver API, "API synchronization behavior").
        (End::Pageable | End::Pinned, End::Pageable | End::Pinned) => {
            target.synchronize(scope)?;
            let [to, from] = [destination, source].map(host_pointer);
            // SAFETY: both ends are memory that the program holds and vouches for.
            unsafe { to.copy_from(from, bytes) };
            Ok(())
        }
        (End::Pageable, _) => {
            // SAFETY: the destination is the program's memory, which it vouches for.
            unsafe { download(scope, target, host_pointer(destination), source, bytes) }?;
            target.show_output(scope)
        }
        (_, End::Pageable) => {
            if mode == Mode::Synchronous {
                // The native driver waits before such a copy, so a fault of earlier launches shows here.
                target.synchronize_if_faults_are_possible(scope)?;
            }
            // SAFETY: the source is the program's memory, which it vouches for.
            unsafe { upload(scope, target, destination, host_pointer(source), bytes) }
        }
        (to, from) => {
            submit(scope, target, destination, source, bytes as u64)?;
            let with_host = to == End::Pinned || from == End::Pinned;
            if mode == Mode::Synchronous && with_host {
                target.synchronize(scope)
            } else {
                Ok(())
            }
        }
    }
}

pub fn host_pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}

/// Hands a copy by the device to a stream.
fn submit(scope: Scope, target: Target, destination: u64, source: u64, bytes: u64) -> Result {
    let message = MemCopy {
        destination: DevicePtr(destination),
        source: DevicePtr(source),
        bytes,
        stream: target.handle,
    };
    scope.session.record(&message)?;
    target.worked(scope)
}

/// Copies pageable memory to the device; returns when the source may be used again.
unsafe fn upload(
    scope: Scope,
    target: Target,
    destination: u64,
    source: *const u8,
    bytes: usize,
) -> Result {
    if bytes <= INLINE {
        // SAFETY: the caller vouches for the source; it is read before this returns.
        let data = unsafe { std::slice::from_raw_parts(source, bytes) };
        let message = MemWrite {
            destination: DevicePtr(destination),
            stream: target.handle,
            data,
        };
        scope.session.record(&message)?;
        return target.worked(scope);
    }
    let source = source.expose_provenance();
    let fill = |&(offset, length): &(usize, usize), buffer| {
        // The buffer holds CHUNK bytes that the device has done with, outside the program's memory, and the caller
        // vouches for the source.
        let piece = Piece {
            destination: buffer,
            source: (source + offset) as u64,
            bytes: length,
            stores: Stores::Cached,
        };
        piece.copy_up(scope.session, bytes >= LARGE);
    };
    let hand_over = |&(offset, length): &(usize, usize), buffer| {
        let destination = destination + offset as u64;
        submit(scope, target, destination, buffer, length as u64)
    };
    stage_up(scope, target, chunks(bytes, CHUNK), fill, hand_over)
}

/// Copies device memory to pageable memory; returns when the copy is complete.
unsafe fn download(
    scope: Scope,
    target: Target,
    destination: *mut u8,
    source: u64,
    bytes: usize,
) -> Result {
    let hand_over = |&(offset, length): &(usize, usize), buffer| {
        submit(scope, target, buffer, source + offset as u64, length as u64)
    };
    let destination = destination.expose_provenance();
    let empty = |&(offset, length): &(usize, usize), buffer| {
        // The device has written the buffer, and the caller vouches for the destination.
        let piece = Piece {
            destination: (destination + offset) as u64,
            source: buffer,
            bytes: length,
            stores: if bytes >= LARGE {
                Stores::Streaming
            } else {
                Stores::Cached
            },
        };
        piece.copy_down(scope.session, bytes >= LARGE);
    };
    stage_down(scope, target, chunks(bytes, CHUNK), hand_over, empty)
}

/// Copies parts of pageable memory, none longer than [`CHUNK`], through staging buffers: `fill` writes a buffer, and
/// `hand_over` submits the device's read of it. Returns when all data are in buffers.
pub fn stage_up<P>(
    scope: Scope,
    target: Target,
    parts: impl Iterator<Item = P>,
    fill: impl Fn(&P, u64),
    hand_over: impl Fn(&P, u64) -> Result,
) -> Result {
    for part in parts {
        let buffer = STAGING.take(scope)?;
        fill(&part, buffer.address);
        let submitted = hand_over(&part, buffer.address).and_then(|()| target.fence_now(scope));
        STAGING.give_back(buffer, submitted.as_ref().ok().copied());
        submitted?;
    }
    Ok(())
}

/// Copies parts to pageable memory through staging buffers: `hand_over` submits the device's write of a buffer, and
/// `empty` reads it. Returns when all data are read.
pub fn stage_down<P>(
    scope: Scope,
    target: Target,
    parts: impl Iterator<Item = P>,
    hand_over: impl Fn(&P, u64) -> Result,
    empty: impl Fn(&P, u64),
) -> Result {
    let mut pending: VecDeque<(Buffer, Cover, P)> = VecDeque::with_capacity(DEPTH);
    let mut parts = parts.peekable();
    loop {
        while pending.len() < DEPTH && parts.peek().is_some() {
            let buffer = if pending.is_empty() {
                STAGING.take(scope)?
            } else {
                match STAGING.try_take(scope) {
                    Some(buffer) => buffer?,
                    None => break,
                }
            };
            let Some(part) = parts.next() else { break };
            let submitted = hand_over(&part, buffer.address).and_then(|()| target.fence_now(scope));
            match submitted {
                Ok(cover) => pending.push_back((buffer, cover, part)),
                Err(error) => {
                    STAGING.give_back(buffer, None);
                    return Err(error);
                }
            }
        }
        let Some((buffer, cover, part)) = pending.pop_front() else {
            return Ok(());
        };
        let waited = target.wait(scope, cover);
        if waited.is_ok() {
            empty(&part, buffer.address);
        }
        STAGING.give_back(buffer, None);
        waited?;
    }
}

/// A staging buffer of [`CHUNK`] bytes in the arena.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    address: u64,
}

/// The staging buffers of the process.
#[derive(Debug)]
struct Staging(Mutex<Pool>);

#[derive(Debug)]
struct Pool {
    /// Free buffers, oldest first, each with the fence of the device's last use.
    free: VecDeque<(Buffer, Option<Cover>)>,
    /// Bit mask of the buffers that were allocated.
    made: u8,
    /// True after the arena had no room for another buffer.
    complete: bool,
}

static STAGING: Staging = Staging(Mutex::new(Pool {
    free: VecDeque::new(),
    made: 0,
    complete: false,
}));

impl Staging {
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.0.lock()
    }

    /// Takes a buffer that the device has finished with, if there is one now.
    fn try_take(&self, scope: Scope) -> Option<Result<Buffer>> {
        let mut pool = self.pool();
        let is_ready = |(_, cover): &(Buffer, Option<Cover>)| {
            cover.is_none_or(|cover| scope.session.fence_passed(cover.fence, cover.value))
        };
        if let Some(index) = pool.free.iter().position(is_ready) {
            return pool.free.remove(index).map(|(buffer, _)| Ok(buffer));
        }
        let number = pool.made.trailing_ones();
        if number == u8::BITS || (pool.complete && pool.made != 0) {
            return None;
        }
        pool.made |= 1 << number;
        drop(pool);
        let made = scope.session.staging_buffer(number as usize);
        let error = match made {
            Ok(address) => return Some(Ok(Buffer { address })),
            Err(error) => error,
        };
        let mut pool = self.pool();
        pool.made &= !(1 << number);
        if error == CuError::OUT_OF_MEMORY && pool.made != 0 {
            pool.complete = true;
            return None;
        }
        Some(Err(error))
    }

    /// Waits for a buffer and takes it. A caller that already holds one uses [`Staging::try_take`].
    fn take(&self, scope: Scope) -> Result<Buffer> {
        scope.session.wait(Wait::Staging, || self.try_take(scope))?
    }

    /// Returns a buffer to the pool; `cover` is the fence of the device's last use.
    fn give_back(&self, buffer: Buffer, cover: Option<Cover>) {
        self.pool().free.push_back((buffer, cover));
    }
}

/// A fill of `height` rows of `width` elements.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    pub destination: u64,
    /// Bytes from row to row; ignored with one row.
    pub pitch: usize,
    pub value: u32,
    pub element: Element,
    pub width: usize,
    pub height: usize,
}

/// A fill that has passed the checks of its shape. A stream checks the memory at once, a graph when it is instantiated.
#[derive(Clone, Copy, Debug)]
pub struct CheckedFill {
    pub fill: Fill,
    /// Bytes from row to row.
    pitch: u64,
    pub bytes: u64,
    pub mode: Mode,
}

impl Fill {
    /// Checks the shape, which must not be empty.
    pub fn checked(self, mode: Mode) -> Result<CheckedFill> {
        let element = u64::from(self.element.to_wire());
        let row = (self.width as u64).checked_mul(element);
        let row = row.ok_or(CuError::INVALID_VALUE)?;
        let pitch = if self.height > 1 {
            self.pitch as u64
        } else {
            row
        };
        let aligned = self.destination.is_multiple_of(element) && pitch.is_multiple_of(element);
        if pitch < row || !aligned {
            return Err(CuError::INVALID_VALUE);
        }
        let bytes = (self.height as u64)
            .checked_sub(1)
            .and_then(|rows| rows.checked_mul(pitch))
            .and_then(|bytes| bytes.checked_add(row))
            .ok_or(CuError::INVALID_VALUE)?;
        Ok(CheckedFill {
            fill: self,
            pitch,
            bytes,
            mode,
        })
    }
}

impl CheckedFill {
    /// Returns the kind of memory, and its address for the side that reaches it.
    pub fn end(&self) -> Result<(End, u64)> {
        match End::of(self.fill.destination, self.bytes)? {
            (End::Pageable, _) => Err(CuError::INVALID_VALUE),
            found => Ok(found),
        }
    }

    /// Hands the fill to a stream.
    pub fn send(self, scope: Scope, target: Target) -> Result {
        let (end, destination) = self.end()?;
        peer::check(scope, target, destination)?;
        let message = MemSet {
            destination: DevicePtr(destination),
            pitch: self.pitch,
            width: self.fill.width as u64,
            height: self.fill.height as u64,
            value: self.fill.value,
            element: self.fill.element,
            stream: target.handle,
        };
        scope.session.record(&message)?;
        target.worked(scope)?;
        // Natively a synchronous fill of host memory waits, and one of device memory does not.
        if self.mode == Mode::Synchronous && end == End::Pinned {
            target.synchronize(scope)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunks_cover_a_range_once_and_in_order(bytes in 0..10_000_usize, limit in 1..3000_usize) {
            let mut end = 0;
            for (offset, length) in chunks(bytes, limit) {
                prop_assert_eq!(offset, end);
                prop_assert!(length > 0 && length <= limit);
                end += length;
            }
            prop_assert_eq!(end, bytes);
        }
    }
}
