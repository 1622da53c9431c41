//! Memory pools.
//!
//! A pool allocates chunks of device memory and divides them. A free on a stream does not wait. The same stream may
//! reuse the memory at once, because its work runs in order; other streams may reuse it when the work before the free
//! is complete, or when they are ordered after it. At synchronizations a pool releases unused chunks, down to its
//! release threshold.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use wormhole_device::{
    Access, CuError, PoolProperties, RawPool, RawStream, Result, pool_attribute,
};
use wormhole_lock::{Mutex, MutexGuard};

use crate::holes::Holes;
use crate::memory::{ALIGNMENT, Memory, Owner};
use crate::peer_set::Accesses;
use crate::scheduler::{Point, Scheduler, Work};

/// Unit of the sizes of chunks.
const CHUNK: u64 = 2 << 20;
/// Number of the default pool, which always exists.
const DEFAULT: u64 = 1;

/// Memory freed on a stream.
#[derive(Clone, Copy, Debug)]
struct Freed {
    start: u64,
    bytes: u64,
    stream: RawStream,
    /// Point at which the work before the free is complete.
    point: Point,
}

/// Sharing of a pool with other processes.
#[derive(Debug)]
enum Scope {
    Private,
    /// Other processes may import it.
    Shared,
    /// Imported from another process, with the file of its memory. It allows no allocation.
    Foreign(OwnedFd),
}

/// A part of the device's memory that a pool has allocated.
#[derive(Debug)]
struct Chunk {
    bytes: u64,
    holes: Holes,
}

/// Chunks of a pool by address. Each allocation lies in one: to the device they are different memory, also where they are
/// adjacent.
#[derive(Debug, Default)]
struct Chunks(BTreeMap<u64, Chunk>);

impl Chunks {
    fn add(&mut self, start: u64, bytes: u64) {
        let mut holes = Holes::default();
        holes.put(start, bytes);
        self.0.insert(start, Chunk { bytes, holes });
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        let mut chunks = self.0.values_mut();
        chunks.find_map(|chunk| chunk.holes.take(bytes, ALIGNMENT))
    }

    /// Gives back an allocation, or a part of one.
    fn put(&mut self, address: u64, bytes: u64) {
        if let Some((_, chunk)) = self.0.range_mut(..=address).next_back() {
            chunk.holes.put(address, bytes);
        }
    }

    /// Removes a chunk without allocations. Returns its start and its bytes.
    fn remove_unused(&mut self) -> Option<(u64, u64)> {
        let mut chunks = self.0.iter_mut();
        let (start, bytes) = chunks.find_map(|(start, chunk)| {
            let is_unused = chunk.holes.take_at(*start, chunk.bytes);
            is_unused.then_some((*start, chunk.bytes))
        })?;
        self.0.remove(&start);
        Some((start, bytes))
    }
}

#[derive(Debug)]
struct Pool {
    scope: Scope,
    chunks: Chunks,
    freed: Vec<Freed>,
    live: BTreeMap<u64, u64>,
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    threshold: u64,
    /// Most bytes that the pool may hold.
    most: u64,
    /// Values of the reuse attributes: whether memory freed on other streams may be reused.
    reuse: BTreeMap<u32, u64>,
    /// Accesses allowed to kernels of other devices.
    accesses: Accesses,
    /// Set once the program has destroyed the pool. The pool is removed with its last allocation.
    destroyed: bool,
}

impl Pool {
    fn new(most: u64, scope: Scope) -> Self {
        let reuse = [
            pool_attribute::REUSE_FOLLOW_EVENT_DEPENDENCIES,
            pool_attribute::REUSE_ALLOW_OPPORTUNISTIC,
            pool_attribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES,
        ];
        Self {
            accesses: Accesses::default(),
            scope,
            chunks: Chunks::default(),
            freed: Vec::new(),
            live: BTreeMap::new(),
            reserved: 0,
            reserved_high: 0,
            used: 0,
            used_high: 0,
            threshold: 0,
            most,
            reuse: reuse.map(|attribute| (attribute, 1)).into(),
            destroyed: false,
        }
    }

    fn is_foreign(&self) -> bool {
        matches!(self.scope, Scope::Foreign(_))
    }

    fn allows(&self, attribute: u32) -> bool {
        self.reuse.get(&attribute) != Some(&0)
    }

    /// Makes freed memory available to all streams once the work before the free is complete.
    fn recycle_freed(&mut self, scheduler: &Scheduler) {
        let chunks = &mut self.chunks;
        self.freed.retain(|freed| {
            // Work of a dead context accesses no memory.
            let reached = scheduler.reached(&[freed.point]).unwrap_or(true);
            if reached {
                chunks.put(freed.start, freed.bytes);
            }
            !reached
        });
    }

    /// Allocates from freed memory that `wanted` accepts. Returns its start and the point to wait for.
    fn reuse(&mut self, bytes: u64, wanted: impl Fn(&Freed) -> bool) -> Option<(u64, Point)> {
        let fits = |freed: &Freed| freed.bytes >= bytes && wanted(freed);
        let index = self.freed.iter().position(fits)?;
        let freed = &mut self.freed[index];
        let (start, point) = (freed.start, freed.point);
        freed.start += bytes;
        freed.bytes -= bytes;
        if freed.bytes == 0 {
            self.freed.swap_remove(index);
        }
        Some((start, point))
    }

    /// Allocates another chunk. Fails if the device has no memory left, or if the pool's limit is reached.
    fn grow(&mut self, bytes: u64, memory: &Memory) -> Result<()> {
        let chunk = bytes
            .checked_next_multiple_of(CHUNK)
            .ok_or(CuError::OUT_OF_MEMORY)?;
        if chunk > self.most.saturating_sub(self.reserved) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let start = memory.allocate(chunk, Owner::Pool)?;
        memory.write().set_accesses(start, self.accesses);
        self.chunks.add(start, chunk);
        self.reserved += chunk;
        self.reserved_high = self.reserved_high.max(self.reserved);
        Ok(())
    }

    /// Frees unused chunks until the pool holds no more than `keep` bytes.
    fn release(&mut self, keep: u64, memory: &Memory) {
        while self.reserved > keep
            && let Some((start, bytes)) = self.chunks.remove_unused()
        {
            self.reserved -= bytes;
            if let Err(error) = memory.free(start, Owner::Pool) {
                tracing::error!(%error, "a pool held memory that was not its own");
            }
        }
    }

    fn attribute(&self, attribute: u32) -> Result<u64> {
        Ok(match attribute {
            pool_attribute::RELEASE_THRESHOLD => self.threshold,
            pool_attribute::RESERVED_MEM_CURRENT => self.reserved,
            pool_attribute::RESERVED_MEM_HIGH => self.reserved_high,
            pool_attribute::USED_MEM_CURRENT => self.used,
            pool_attribute::USED_MEM_HIGH => self.used_high,
            other => *self.reuse.get(&other).ok_or(CuError::INVALID_VALUE)?,
        })
    }

    fn set_attribute(&mut self, attribute: u32, value: u64) -> Result<()> {
        match attribute {
            pool_attribute::RELEASE_THRESHOLD => self.threshold = value,
            pool_attribute::RESERVED_MEM_HIGH if value == 0 => self.reserved_high = self.reserved,
            pool_attribute::USED_MEM_HIGH if value == 0 => self.used_high = self.used,
            other => {
                let allowed = self.reuse.get_mut(&other).ok_or(CuError::INVALID_VALUE)?;
                *allowed = u64::from(value != 0);
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
struct State {
    pools: BTreeMap<u64, Pool>,
    /// Number of the pool of each allocation, by address.
    owners: BTreeMap<u64, u64>,
    next: u64,
}

impl State {
    fn pool(&mut self, pool: RawPool) -> Result<&mut Pool> {
        match self.pools.get_mut(&pool.0) {
            Some(found) if !found.destroyed => Ok(found),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    /// Returns true if an allocation belongs to an imported pool.
    fn is_foreign(&self, address: u64) -> bool {
        let pool = self
            .owners
            .get(&address)
            .and_then(|number| self.pools.get(number));
        pool.is_some_and(Pool::is_foreign)
    }

    /// Removes a pool that is destroyed and empty.
    fn sweep(&mut self, number: u64, memory: &Memory) {
        if let Some(pool) = self.pools.get_mut(&number)
            && pool.destroyed
        {
            pool.release(0, memory);
            if pool.live.is_empty() && pool.freed.is_empty() {
                self.pools.remove(&number);
            }
        }
    }
}

/// A view of an allocation of another process's pool, removed on drop.
#[derive(Debug)]
struct ForeignView {
    memory: Arc<Memory>,
    address: u64,
}

impl Drop for ForeignView {
    fn drop(&mut self) {
        if let Err(error) = self.memory.close(self.address, Owner::Pool) {
            tracing::error!(%error, "a pool's memory was not shown where it was freed");
        }
    }
}

/// Memory pools of one device.
#[derive(Debug)]
pub struct Pools {
    memory: Arc<Memory>,
    state: Mutex<State>,
}

impl Pools {
    pub fn new(memory: Arc<Memory>) -> Self {
        let default = Pool::new(memory.limit(), Scope::Private);
        Self {
            memory,
            state: Mutex::new(State {
                pools: BTreeMap::from([(DEFAULT, default)]),
                owners: BTreeMap::new(),
                next: DEFAULT + 1,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub fn default_pool(&self) -> RawPool {
        RawPool(DEFAULT)
    }

    pub fn create(&self, properties: &PoolProperties) -> RawPool {
        let most = match properties.most {
            0 => self.memory.limit(),
            most => most.checked_next_multiple_of(CHUNK).unwrap_or(u64::MAX),
        };
        let scope = match properties.handle_types {
            0 => Scope::Private,
            _ => Scope::Shared,
        };
        self.add(Pool::new(most, scope))
    }

    fn add(&self, pool: Pool) -> RawPool {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.pools.insert(number, pool);
        RawPool(number)
    }

    /// Checks that other processes may import a pool.
    pub fn shared(&self, pool: RawPool) -> Result<()> {
        match self.state().pool(pool)?.scope {
            Scope::Shared => Ok(()),
            Scope::Private | Scope::Foreign(_) => Err(CuError::INVALID_VALUE),
        }
    }

    /// Returns offset in the device's file and bytes of an allocation of a shared pool.
    pub fn home(&self, address: u64) -> Result<(u64, u64)> {
        let state = self.state();
        let owner = state.owners.get(&address);
        let pool = owner.and_then(|number| state.pools.get(number));
        let pool = pool.filter(|pool| matches!(pool.scope, Scope::Shared));
        let bytes = pool.and_then(|pool| pool.live.get(&address));
        let bytes = *bytes.ok_or(CuError::INVALID_VALUE)?;
        Ok((self.memory.aperture().place(address).1, bytes))
    }

    /// Imports another process's pool.
    pub fn open(&self, file: OwnedFd) -> RawPool {
        self.add(Pool::new(0, Scope::Foreign(file)))
    }

    /// Imports an allocation of another process's pool.
    pub fn open_pointer(&self, raw: RawPool, offset: u64, bytes: u64) -> Result<u64> {
        let mut state = self.state();
        let pool = state.pool(raw)?;
        let Scope::Foreign(file) = &pool.scope else {
            return Err(CuError::INVALID_VALUE);
        };
        let address = self.memory.open(file, offset, bytes, Owner::Pool)?;
        pool.live.insert(address, bytes);
        pool.used += bytes;
        state.owners.insert(address, raw.0);
        Ok(address)
    }

    pub fn destroy(&self, pool: RawPool) -> Result<()> {
        if pool.0 == DEFAULT {
            return Err(CuError::INVALID_VALUE);
        }
        let mut state = self.state();
        state.pool(pool)?.destroyed = true;
        state.sweep(pool.0, &self.memory);
        Ok(())
    }

    pub fn trim(&self, pool: RawPool, keep: u64, scheduler: &Scheduler) -> Result<()> {
        let mut state = self.state();
        let pool = state.pool(pool)?;
        pool.recycle_freed(scheduler);
        pool.release(keep, &self.memory);
        Ok(())
    }

    /// Sets the access of another device's kernels to the pool's memory, present and future.
    pub fn set_access(&self, pool: RawPool, device: usize, access: Access) -> Result<()> {
        let mut state = self.state();
        let pool = state.pool(pool)?;
        pool.accesses.set(device, access);
        let mut map = self.memory.write();
        for start in pool.chunks.0.keys() {
            map.set_accesses(*start, pool.accesses);
        }
        Ok(())
    }

    pub fn attribute(&self, pool: RawPool, attribute: u32) -> Result<u64> {
        self.state().pool(pool)?.attribute(attribute)
    }

    pub fn set_attribute(&self, pool: RawPool, attribute: u32, value: u64) -> Result<()> {
        self.state().pool(pool)?.set_attribute(attribute, value)
    }

    pub fn allocate(
        &self,
        raw: RawPool,
        bytes: u64,
        stream: RawStream,
        scheduler: &Scheduler,
    ) -> Result<u64> {
        scheduler.frontier(stream)?;
        let mut state = self.state();
        let pool = state.pool(raw)?;
        if bytes == 0 || pool.is_foreign() {
            return Err(CuError::INVALID_VALUE);
        }
        let bytes = bytes
            .checked_next_multiple_of(ALIGNMENT)
            .ok_or(CuError::OUT_OF_MEMORY)?;
        if pool.allows(pool_attribute::REUSE_ALLOW_OPPORTUNISTIC) {
            pool.recycle_freed(scheduler);
        }
        let own = pool.reuse(bytes, |freed| freed.stream == stream);
        let found = match own.map(|(start, _)| start) {
            Some(start) => Some(start),
            None => pool.chunks.take(bytes),
        };
        let address = match found {
            Some(start) => start,
            None => self.find_more(&mut state, raw, bytes, stream, scheduler)?,
        };
        let pool = state.pool(raw)?;
        pool.live.insert(address, bytes);
        pool.used += bytes;
        pool.used_high = pool.used_high.max(pool.used);
        state.owners.insert(address, raw.0);
        Ok(address)
    }

    /// Allocates from a new chunk; else from memory that another stream has freed, and makes the stream wait for it;
    /// else from a new chunk after every pool has released its unused chunks.
    fn find_more(
        &self,
        state: &mut State,
        raw: RawPool,
        bytes: u64,
        stream: RawStream,
        scheduler: &Scheduler,
    ) -> Result<u64> {
        let pool = state.pool(raw)?;
        if pool.grow(bytes, &self.memory).is_err() {
            if pool.allows(pool_attribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES)
                && let Some((start, point)) = pool.reuse(bytes, |_| true)
            {
                scheduler.submit_after(stream, Some(point), Work::nothing())?;
                return Ok(start);
            }
            for pool in state.pools.values_mut() {
                pool.recycle_freed(scheduler);
                pool.release(0, &self.memory);
            }
            let pool = state.pool(raw)?;
            pool.grow(bytes, &self.memory)?;
        }
        let pool = state.pool(raw)?;
        pool.chunks.take(bytes).ok_or(CuError::OUT_OF_MEMORY)
    }

    /// Returns true if an allocation of a pool starts at `address`.
    pub fn owns(&self, address: u64) -> bool {
        self.state().owners.contains_key(&address)
    }

    fn remove(state: &mut State, address: u64) -> Result<(u64, u64, &mut Pool)> {
        let number = state
            .owners
            .remove(&address)
            .ok_or(CuError::INVALID_VALUE)?;
        let pool = state.pools.get_mut(&number).ok_or(CuError::INVALID_VALUE)?;
        let bytes = pool.live.remove(&address).ok_or(CuError::INVALID_VALUE)?;
        pool.used -= bytes;
        Ok((number, bytes, pool))
    }

    /// Frees an allocation in the order of a stream's work.
    pub fn free(&self, address: u64, stream: RawStream, scheduler: &Scheduler) -> Result<()> {
        let mut state = self.state();
        if !state.owners.contains_key(&address) {
            return Err(CuError::INVALID_VALUE);
        }
        if state.is_foreign(address) {
            // The view is removed when the work runs, or when the stream's queue is dropped.
            let view = ForeignView {
                memory: Arc::clone(&self.memory),
                address,
            };
            let hide = move || {
                drop(view);
                Ok(())
            };
            scheduler.submit(stream, Work::new(hide))?;
            return Self::remove(&mut state, address).map(drop);
        }
        let point = scheduler.submit(stream, Work::nothing())?;
        let (_, bytes, pool) = Self::remove(&mut state, address)?;
        pool.freed.push(Freed {
            start: address,
            bytes,
            stream,
            point,
        });
        Ok(())
    }

    /// Frees an allocation at once. The program guarantees that no work uses the memory.
    pub fn free_now(&self, address: u64) -> Result<()> {
        let mut state = self.state();
        let (number, bytes, pool) = Self::remove(&mut state, address)?;
        if pool.is_foreign() {
            self.memory.close(address, Owner::Pool)?;
        } else {
            pool.chunks.put(address, bytes);
        }
        state.sweep(number, &self.memory);
        Ok(())
    }

    /// Releases unused chunks above the pools' thresholds. Called at synchronizations.
    pub fn synchronized(&self, scheduler: &Scheduler) {
        let mut state = self.state();
        for pool in state.pools.values_mut() {
            pool.recycle_freed(scheduler);
            pool.release(pool.threshold, &self.memory);
        }
        let numbers: Vec<u64> = state.pools.keys().copied().collect();
        for number in numbers {
            state.sweep(number, &self.memory);
        }
    }

    /// Makes all freed memory available at once, because the streams that freed it are gone.
    pub fn abandon(&self) {
        for pool in self.state().pools.values_mut() {
            for freed in std::mem::take(&mut pool.freed) {
                pool.chunks.put(freed.start, freed.bytes);
            }
        }
    }

    /// Releases all unused chunks.
    pub fn release_all(&self, scheduler: &Scheduler) {
        let mut state = self.state();
        for pool in state.pools.values_mut() {
            pool.recycle_freed(scheduler);
            pool.release(0, &self.memory);
        }
    }
}

impl wormhole_device::Pools for crate::CpuDevice {
    fn create_pool(&self, properties: &PoolProperties) -> Result<RawPool> {
        self.context()?;
        Ok(self.pools().create(properties))
    }

    fn pool_attribute(&self, pool: RawPool, attribute: u32) -> Result<u64> {
        self.pools().attribute(pool, attribute)
    }

    fn set_pool_attribute(&self, pool: RawPool, attribute: u32, value: u64) -> Result<()> {
        self.pools().set_attribute(pool, attribute, value)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::memory::Use;

    const MIB: u64 = 1 << 20;

    struct Bench {
        memory: Arc<Memory>,
        pools: Pools,
        scheduler: Scheduler,
    }

    fn bench() -> Bench {
        let memory = Arc::new(Memory::new(64 * MIB).expect("an aperture"));
        Bench {
            pools: Pools::new(Arc::clone(&memory)),
            memory,
            scheduler: Scheduler::new(),
        }
    }

    impl Bench {
        fn take(&self, bytes: u64, stream: RawStream) -> Result<u64> {
            let pool = self.pools.default_pool();
            self.pools.allocate(pool, bytes, stream, &self.scheduler)
        }

        fn free(&self, address: u64, stream: RawStream) {
            self.pools
                .free(address, stream, &self.scheduler)
                .expect("free");
        }

        /// Creates a stream that is busy until a message is sent.
        fn busy(&self) -> (RawStream, mpsc::Sender<()>) {
            let stream = self.scheduler.create(false);
            let (sender, receiver) = mpsc::channel::<()>();
            let work = move || receiver.recv().map_err(|_| CuError::UNKNOWN);
            self.scheduler
                .submit(stream, Work::new(work))
                .expect("submit");
            (stream, sender)
        }

        fn attribute(&self, attribute: u32) -> u64 {
            let pool = self.pools.default_pool();
            self.pools.attribute(pool, attribute).expect("an attribute")
        }
    }

    #[test]
    fn an_allocation_lies_in_one_chunk() {
        let bench = bench();
        let stream = bench.scheduler.create(false);
        // The first one leaves a part of its chunk, and the next chunk is adjacent.
        for bytes in [CHUNK - ALIGNMENT, CHUNK, 3 * CHUNK + 1, ALIGNMENT, 1] {
            let address = bench.take(bytes, stream).expect("allocate");
            let is_one = bench.memory.check(address, bytes, Use::Write);
            assert_eq!(is_one, Ok(()), "{bytes} bytes at {address:#x}");
        }
    }

    #[test]
    fn the_stream_that_freed_memory_uses_it_at_once_and_others_when_it_is_done() {
        let bench = bench();
        let (busy, done) = bench.busy();
        let idle = bench.scheduler.create(false);
        let first = bench.take(2 * MIB, busy).expect("allocate");
        bench.free(first, busy);
        let other = bench.take(2 * MIB, idle).expect("allocate");
        assert_ne!(other, first, "the busy stream may still reach it");
        assert_eq!(bench.take(2 * MIB, busy), Ok(first));
        bench.free(first, busy);
        done.send(()).expect("the stream listens");
        let point = bench.scheduler.frontier(busy).expect("frontier");
        bench.scheduler.wait(&point).expect("wait");
        assert_eq!(bench.take(2 * MIB, idle), Ok(first));
    }

    #[test]
    fn without_more_memory_a_stream_is_made_to_wait_for_another() {
        let bench = bench();
        let (busy, done) = bench.busy();
        let idle = bench.scheduler.create(false);
        let all = bench.take(64 * MIB, busy).expect("allocate");
        assert_eq!(bench.take(MIB, idle), Err(CuError::OUT_OF_MEMORY));
        bench.free(all, busy);
        assert_eq!(bench.take(MIB, idle), Ok(all));
        let frontier = bench.scheduler.frontier(idle).expect("frontier");
        assert_eq!(bench.scheduler.reached(&frontier), Ok(false));
        done.send(()).expect("the stream listens");
        bench.scheduler.wait(&frontier).expect("wait");
    }

    #[test]
    fn synchronizations_give_back_what_exceeds_the_threshold() {
        let bench = bench();
        let stream = bench.scheduler.create(false);
        let [first, second] = [4, 2].map(|size| bench.take(size * MIB, stream).expect("allocate"));
        assert_eq!(bench.memory.info().0, 58 * MIB);
        assert_eq!(bench.attribute(pool_attribute::USED_MEM_CURRENT), 6 * MIB);
        for address in [first, second] {
            bench.free(address, stream);
        }
        let frontier = bench.scheduler.frontier(stream).expect("frontier");
        bench.scheduler.wait(&frontier).expect("wait");
        let pool = bench.pools.default_pool();
        let set = |attribute, value| bench.pools.set_attribute(pool, attribute, value);
        set(pool_attribute::RELEASE_THRESHOLD, 3 * MIB).expect("set");
        bench.pools.synchronized(&bench.scheduler);
        assert_eq!(
            bench.attribute(pool_attribute::RESERVED_MEM_CURRENT),
            2 * MIB
        );
        assert_eq!(bench.attribute(pool_attribute::RESERVED_MEM_HIGH), 6 * MIB);
        assert_eq!(bench.attribute(pool_attribute::USED_MEM_CURRENT), 0);
        assert_eq!(bench.attribute(pool_attribute::USED_MEM_HIGH), 6 * MIB);
        set(pool_attribute::USED_MEM_HIGH, 0).expect("set");
        assert_eq!(bench.attribute(pool_attribute::USED_MEM_HIGH), 0);
        assert!(set(pool_attribute::USED_MEM_HIGH, 1).is_err());
        assert!(set(pool_attribute::USED_MEM_CURRENT, 0).is_err());
        bench.pools.trim(pool, 0, &bench.scheduler).expect("trim");
        assert_eq!(bench.memory.info().0, 64 * MIB);
    }

    #[test]
    fn a_destroyed_pool_goes_with_its_last_allocation() {
        let bench = bench();
        let stream = bench.scheduler.create(false);
        let properties = PoolProperties {
            most: 4 * MIB,
            ..PoolProperties::default()
        };
        let pool = bench.pools.create(&properties);
        let take = |bytes| bench.pools.allocate(pool, bytes, stream, &bench.scheduler);
        let address = take(4 * MIB).expect("allocate");
        assert_eq!(take(1), Err(CuError::OUT_OF_MEMORY));
        bench.pools.destroy(pool).expect("destroy");
        assert_eq!(take(1), Err(CuError::INVALID_VALUE));
        assert!(bench.pools.destroy(pool).is_err());
        assert_eq!(bench.memory.info().0, 60 * MIB);
        bench.pools.free_now(address).expect("free");
        assert_eq!(bench.memory.info().0, 64 * MIB);
        assert!(bench.pools.free_now(address).is_err());
    }
}
