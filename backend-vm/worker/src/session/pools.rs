//! Memory pools and stream-ordered allocation.

use std::collections::HashMap;
use std::sync::Arc;

use wormhole_api::{
    CuResult, DevicePtr, Handle, Outcome, Pool, PoolAlloc, PoolAllocReply, PoolCreate, PoolDefault,
    PoolDestroy, PoolFree, PoolGetAttribute, PoolGetAttributeReply, PoolSetAttribute, PoolTrim,
    Serve, Served, Stream,
};
use wormhole_device::{Device, PoolProperties, RawPool};

use super::addresses::admitted;
use super::closed;
use super::sharing::Key;
use super::{Answer, Call, Session};
use crate::devices::SessionDevice;
use crate::objects::StreamObject;
use crate::peers;

/// A pool. Jobs hold it while they use it. Unless it is a default pool, it is destroyed when the
/// last reference is dropped.
#[derive(Debug)]
pub(super) struct PoolObject {
    device: SessionDevice,
    raw: RawPool,
    is_default: bool,
}

impl Drop for PoolObject {
    fn drop(&mut self) {
        if !self.is_default
            && let Err(error) = self.device.pool_destroy(self.raw)
        {
            tracing::debug!("destroying a pool: {error}");
        }
    }
}

impl PoolObject {
    pub fn raw(&self) -> RawPool {
        self.raw
    }

    /// Returns the device whose memory the pool allocates.
    pub fn device(&self) -> &SessionDevice {
        &self.device
    }
}

impl Serve<PoolCreate> for Session {
    fn serve(&mut self, call: &Call, message: &PoolCreate) -> Outcome<()> {
        closed::HANDLE_TYPES.check(message.handle_types)?;
        let properties = PoolProperties {
            handle_types: message.handle_types,
            most: message.most,
        };
        let make = move |device: &dyn Device| device.create_pool(&properties);
        self.enter_pool(call, message.new, false, make)
    }
}

impl Serve<PoolDefault> for Session {
    fn serve(&mut self, call: &Call, message: &PoolDefault) -> Outcome<()> {
        self.enter_pool(call, message.new, true, |device| device.pool_default())
    }
}

impl Session {
    pub(super) fn enter_pool(
        &mut self,
        call: &Call,
        new: Handle<Pool>,
        is_default: bool,
        make: impl FnOnce(&dyn Device) -> wormhole_device::Result<RawPool> + Send + 'static,
    ) -> Outcome<()> {
        let device = self.here(call);
        self.ask(call, device.clone(), make, move |session, raw| {
            let pool = Arc::new(PoolObject {
                device,
                raw,
                is_default,
            });
            Answer::of(session.objects.pools.enter(new, pool))
        })
    }
}

/// Removes the pool, so that it may not be named any more.
impl Serve<PoolDestroy> for Session {
    fn serve(&mut self, call: &Call, message: &PoolDestroy) -> Outcome<()> {
        let handle = message.pool;
        if self.objects.pools.get(handle)?.is_default {
            return Err(CuResult::INVALID_VALUE);
        }
        self.shares.unshare(Key::Pool(handle), &self.registrar);
        let pool = self.objects.pools.remove(handle)?;
        self.free(call, self.here(call), move |_| {
            drop(pool);
            Ok(())
        })
    }
}

impl Session {
    /// Runs a job that uses a pool.
    pub(super) fn ask_pool<R, T: Send + 'static>(
        &mut self,
        call: &Call,
        handle: Handle<Pool>,
        ask: impl FnOnce(&dyn Device, RawPool) -> wormhole_device::Result<T> + Send + 'static,
        answer: impl FnOnce(&mut Self, T) -> Answer + Send + 'static,
    ) -> Outcome<R> {
        let pool = Arc::clone(self.objects.pools.get(handle)?);
        let device = pool.device.clone();
        self.ask(call, device, move |device| ask(device, pool.raw), answer)
    }
}

impl Serve<PoolTrim> for Session {
    fn serve(&mut self, call: &Call, message: &PoolTrim) -> Outcome<()> {
        let keep = message.keep;
        let pool = Arc::clone(self.objects.pools.get(message.pool)?);
        self.recycled.clear();
        let legacy = &self.objects.legacy()[call.device];
        let streams = self.objects.streams.values().chain([legacy]);
        let streams: Vec<Arc<StreamObject>> = streams.map(Arc::clone).collect();
        self.free(call, pool.device.clone(), move |device| {
            // The driver trims only memory that a synchronization has shown to be free, and
            // guests that wait by fences never synchronize. A stream's error reaches the
            // threads that wait for the stream.
            for stream in &streams {
                if matches!(stream.device.query_stream(stream.raw), Ok(true)) {
                    let _ = stream.device.synchronize_stream(stream.raw);
                }
            }
            device.pool_trim(pool.raw, keep)
        })
    }
}

impl Serve<PoolGetAttribute> for Session {
    fn serve(&mut self, call: &Call, message: &PoolGetAttribute) -> Outcome<PoolGetAttributeReply> {
        let (handle, attribute) = (message.pool, message.attribute);
        self.ask_pool(
            call,
            handle,
            move |device, pool| device.pool_attribute(pool, attribute),
            |_, value| Answer::reply(&PoolGetAttributeReply { value }),
        )
    }
}

impl Serve<PoolSetAttribute> for Session {
    fn serve(&mut self, call: &Call, message: &PoolSetAttribute) -> Outcome<()> {
        let (handle, attribute, value) = (message.pool, message.attribute, message.value);
        self.recycled.clear();
        self.ask_pool(
            call,
            handle,
            move |device, pool| device.set_pool_attribute(pool, attribute, value),
            |_, ()| Answer::done(),
        )
    }
}

/// Memory that streams have freed, and that their pools allocate again at once: the number of free
/// pieces by pool, stream and size. A piece that is not counted costs a hand-over to a job, and one
/// that was released meanwhile a wait.
#[derive(Debug, Default)]
pub(super) struct Recycled(HashMap<(Handle<Pool>, Handle<Stream>, u64), u32>);

impl Recycled {
    /// Greatest number of entries.
    const MOST: usize = 4096;

    fn put(&mut self, pool: Handle<Pool>, stream: Handle<Stream>, bytes: u64) {
        if self.0.len() >= Self::MOST {
            self.0.clear();
        }
        *self.0.entry((pool, stream, bytes)).or_default() += 1;
    }

    fn take(&mut self, pool: Handle<Pool>, stream: Handle<Stream>, bytes: u64) -> bool {
        let count = self.0.get_mut(&(pool, stream, bytes));
        let count = count.filter(|count| **count > 0);
        count.map(|count| *count -= 1).is_some()
    }

    /// Forgets everything, because pools may have released what is free.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// Allocates from a pool of `owner` in the order of a stream.
fn allocate(
    owner: &SessionDevice,
    pool: RawPool,
    bytes: u64,
    stream: &StreamObject,
) -> wormhole_device::Result<u64> {
    let address = peers::allocate_async(owner, pool, bytes, stream)?;
    admitted(address, bytes, |address| {
        peers::free_async(owner, address, stream)
    })
}

/// Runs as a job, because a pool that has to grow may wait for the device. The executor has
/// submitted all of the guest's earlier work to the stream, and later work comes after the answer,
/// so the job has its place in the stream's order. Memory that the stream has freed is allocated
/// without a job.
impl Serve<PoolAlloc> for Session {
    fn serve(&mut self, call: &Call, message: &PoolAlloc) -> Outcome<PoolAllocReply> {
        let bytes = message.bytes;
        if bytes == 0 {
            return Err(CuResult::INVALID_VALUE);
        }
        let handle = message.pool;
        let stream = Arc::clone(self.objects.stream(call, message.stream)?);
        let pool = self.objects.pools.get(handle)?;
        let (owner, raw) = (pool.device.clone(), pool.raw);
        if self.recycled.take(handle, message.stream, bytes) {
            let address = self.done(allocate(&owner, raw, bytes, &stream))?;
            self.addresses
                .enter_of_pool(handle, owner, address, bytes)?;
            return Ok(Served::Done(PoolAllocReply {
                address: DevicePtr(address),
            }));
        }
        let holder = owner.clone();
        self.ask_pool(
            call,
            handle,
            move |_, pool| allocate(&owner, pool, bytes, &stream),
            move |session, address| {
                let entered = session
                    .addresses
                    .enter_of_pool(handle, holder, address, bytes);
                match entered {
                    Ok(()) => Answer::reply(&PoolAllocReply {
                        address: DevicePtr(address),
                    }),
                    Err(error) => Answer::failed(error),
                }
            },
        )
    }
}

/// Removes the allocation, so that it may not be named any more.
impl Serve<PoolFree> for Session {
    fn serve(&mut self, call: &Call, message: &PoolFree) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        let address = message.address.0;
        let freed = self.addresses.free_of_pool(address)?;
        self.shares.unshare(Key::Pointer(address), &self.registrar);
        let same_device = stream.device == freed.device;
        self.done(peers::free_async(&freed.device, address, stream))?;
        if let Some(pool) = freed.pool.filter(|_| same_device) {
            self.recycled.put(pool, message.stream, freed.bytes);
        }
        Ok(Served::Done(()))
    }
}
