//! Work between the devices of a session.
//!
//! Devices of one kind reach each other's memory by copies, and wait for each other's events. Every
//! other operation on a stream needs objects of the stream's device; where CUDA allows another
//! device's, this module does the work on that device.

use wormhole_api::constants::event_flags::DISABLE_TIMING;
use wormhole_api::constants::stream_flags::NON_BLOCKING;
use wormhole_device::{MemCopy3d, RawEvent, RawGraph, RawPool, RawStream, Result};

use super::devices::{Devices, SessionDevice};
use super::objects::StreamObject;

impl Devices {
    /// Registers a host range for all devices: the first device's registration is valid for its
    /// peers.
    ///
    /// # Safety
    /// Same as [`wormhole_device::Device::register`].
    pub unsafe fn register(&self, address: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self[0].register(address, bytes) }
    }

    /// Ends a registration. The first device waits for its own work alone. Its peers may reach the
    /// range until they are idle, and may start to before the registration has ended; so this waits
    /// for them before and after.
    pub fn unregister(&self, address: u64) -> Result<()> {
        let idle = self.synchronize_peers();
        self[0].unregister(address)?;
        idle.and_then(|()| self.synchronize_peers())
    }

    /// Ends the memory that a device has placed at an address. Work of the other devices reaches it
    /// too, and is waited for.
    pub fn displace(&self, owner: &SessionDevice, address: u64, bytes: u64) -> Result<()> {
        self.iter()
            .filter(|device| *device != owner)
            .try_for_each(|device| device.synchronize())?;
        owner.displace(address, bytes)
    }

    /// Resets every device's context, after waiting until no device has work that reaches another.
    pub fn reset(&self) -> Result<()> {
        if self.count() > 1 {
            self[0].synchronize()?;
            self.synchronize_peers()?;
        }
        self.iter().try_for_each(|device| device.reset())
    }

    /// Waits for all work of all devices but the first.
    fn synchronize_peers(&self) -> Result<()> {
        self.iter()
            .skip(1)
            .try_for_each(|device| device.synchronize())
    }
}

/// Copies a 3-D region. Each end is memory, or an array of the device given for it.
pub fn copy_3d(
    copy: &MemCopy3d,
    [to, from]: [Option<&SessionDevice>; 2],
    stream: &StreamObject,
) -> Result<()> {
    let here = &stream.device;
    let (to, from) = (to.unwrap_or(here), from.unwrap_or(here));
    if to == here && from == here {
        return here.copy_3d(copy, stream.raw);
    }
    here.copy_between(copy, to.as_peer(), from.as_peer(), stream.raw)
}

/// Allocates from a pool for a stream. If the stream is on another device than the pool, the pool's
/// device allocates first and this waits for it.
pub fn allocate_async(
    owner: &SessionDevice,
    pool: RawPool,
    bytes: u64,
    stream: &StreamObject,
) -> Result<u64> {
    if stream.device == *owner {
        return owner.pool_alloc(pool, stream.raw, bytes);
    }
    let address = owner.pool_alloc(pool, RawStream::LEGACY, bytes)?;
    owner.synchronize_stream(RawStream::LEGACY)?;
    Ok(address)
}

/// Frees memory from a pool of `owner`, after the work in a stream.
pub fn free_async(owner: &SessionDevice, address: u64, stream: &StreamObject) -> Result<()> {
    if stream.device != *owner && stream.device.holds(address) {
        return stream.device.pool_free(address, stream.raw);
    }
    in_place_of(stream, owner, |there| owner.pool_free(address, there))
}

/// Launches a graph of `owner` at the stream's place in order.
pub fn launch_graph(owner: &SessionDevice, graph: RawGraph, stream: &StreamObject) -> Result<()> {
    in_place_of(stream, owner, |there| owner.launch_graph(graph, there))
}

/// Uploads a graph of `owner` at the stream's place in order.
pub fn upload_graph(owner: &SessionDevice, graph: RawGraph, stream: &StreamObject) -> Result<()> {
    in_place_of(stream, owner, |there| owner.upload_graph(graph, there))
}

/// Runs `work` of `owner` in the order of a stream. `work` receives the stream of `owner` to use: the
/// stream itself if it is of that device.
fn in_place_of(
    stream: &StreamObject,
    owner: &SessionDevice,
    work: impl FnOnce(RawStream) -> Result<()>,
) -> Result<()> {
    let waiting = &stream.device;
    if waiting == owner {
        return work(stream.raw);
    }
    with_event(waiting, |before| {
        waiting.record_event(before, stream.raw, 0)?;
        with_event(owner, |after| {
            let there = owner.stream_create(NON_BLOCKING, 0)?;
            let done = owner
                .wait_event(there, before, 0)
                .and_then(|()| work(there))
                .and_then(|()| owner.record_event(after, there, 0));
            let gone = owner.destroy_stream(there);
            done.and(gone)?;
            waiting.wait_event(stream.raw, after, 0)
        })
    })
}

/// Runs `work` with an event of a device, and destroys the event afterwards.
fn with_event(device: &SessionDevice, work: impl FnOnce(RawEvent) -> Result<()>) -> Result<()> {
    let event = device.create_event(DISABLE_TIMING)?;
    let done = work(event);
    let gone = device.destroy_event(event);
    done.and(gone)
}
