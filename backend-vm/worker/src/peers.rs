//! Work between the devices of a session.
//!
//! Devices of one kind reach each other's memory by copies, and wait for each other's events. Anything else that is
//! handed to a stream must be of the stream's device; where CUDA allows another device's, it is done here.

use wormhole_api::constants::event_flags::DISABLE_TIMING;
use wormhole_api::constants::stream_flags::NON_BLOCKING;
use wormhole_device::{MemCopy3d, RawEvent, RawGraph, RawPool, RawStream, Result};

use super::devices::{Devices, SessionDevice};
use super::objects::StreamObject;

impl Devices {
    /// Makes a host range usable by every device: memory that the first registers is registered for its peers.
    ///
    /// # Safety
    /// As [`wormhole_device::Device::register`].
    pub unsafe fn register(&self, address: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self[0].register(address, bytes) }
    }

    /// Ends a registration. The first device waits for its own work alone. Its peers may reach the range until they
    /// are found idle, and may have begun to before the registration ended.
    pub fn unregister(&self, address: u64) -> Result<()> {
        let idle = self.synchronize_peers();
        self[0].unregister(address)?;
        idle.and_then(|()| self.synchronize_peers())
    }

    /// Resets every device's context, when none has work that reaches another's.
    pub fn reset(&self) -> Result<()> {
        if self.count() > 1 {
            self[0].synchronize()?;
            self.synchronize_peers()?;
        }
        self.iter().try_for_each(|device| device.reset())
    }

    /// Waits for all work of the devices but the first.
    fn synchronize_peers(&self) -> Result<()> {
        self.iter()
            .skip(1)
            .try_for_each(|device| device.synchronize())
    }
}

/// Copies between ends of which each is memory or an array of the device beside it.
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

/// Allocates from a pool for a stream. For a stream of another device the pool's own gets the memory first, which
/// waits.
pub fn allocate_async(
    owner: &SessionDevice,
    pool: RawPool,
    bytes: u64,
    stream: &StreamObject,
) -> Result<u64> {
    if stream.device == *owner {
        return owner.allocate_async(pool, bytes, stream.raw);
    }
    let address = owner.allocate_async(pool, bytes, RawStream::LEGACY)?;
    owner.synchronize_stream(RawStream::LEGACY)?;
    Ok(address)
}

/// Frees memory of a pool of `owner` behind the work of a stream.
pub fn free_async(owner: &SessionDevice, address: u64, stream: &StreamObject) -> Result<()> {
    if stream.device == *owner || stream.device.holds(address) {
        return stream.device.free_async(address, stream.raw);
    }
    in_place_of(stream, owner, |there| owner.free_async(address, there))
}

/// Launches a graph of `owner` in the place of a stream.
pub fn launch_graph(owner: &SessionDevice, graph: RawGraph, stream: &StreamObject) -> Result<()> {
    if stream.device == *owner {
        return owner.launch_graph(graph, stream.raw);
    }
    in_place_of(stream, owner, |there| owner.launch_graph(graph, there))
}

/// The same for an upload.
pub fn upload_graph(owner: &SessionDevice, graph: RawGraph, stream: &StreamObject) -> Result<()> {
    if stream.device == *owner {
        return owner.upload_graph(graph, stream.raw);
    }
    in_place_of(stream, owner, |there| owner.upload_graph(graph, there))
}

/// Does work of `owner` in the place of a stream of another device: `work` is handed the stream that stands for it.
fn in_place_of(
    stream: &StreamObject,
    owner: &SessionDevice,
    work: impl FnOnce(RawStream) -> Result<()>,
) -> Result<()> {
    let waiting = &stream.device;
    with_event(waiting, |before| {
        waiting.record_event(before, stream.raw, 0)?;
        with_event(owner, |after| {
            let there = owner.create_stream(NON_BLOCKING, 0)?;
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

/// Has an event of a device for as long as `work` lasts.
fn with_event(device: &SessionDevice, work: impl FnOnce(RawEvent) -> Result<()>) -> Result<()> {
    let event = device.create_event(DISABLE_TIMING)?;
    let done = work(event);
    let gone = device.destroy_event(event);
    done.and(gone)
}
