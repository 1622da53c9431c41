//! Addresses that the session may name, and the kind of memory at each.

use std::collections::HashMap;
use std::sync::Arc;

use wormhole_api::{CuResult, Handle, Pool};
use wormhole_link::counters::{Counter, Counters};
use wormhole_ring::layout::{APERTURE_HIGH, APERTURE_LOW};

use super::files::Files;
use super::slabs::Slabs;
use super::virtual_memory::VirtualMemory;
use crate::devices::SessionDevice;
use crate::ranges::{Found, Ranges};
use crate::registrar::{Registrar, Task};

/// Kind of memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Device,
    /// Memory that host and device share: arena, managed memory in it, and the guest's mapped files.
    Arena,
}

/// Origin of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The context. A reset frees the allocation.
    Context,
    /// A memory pool, the session's or one of another process.
    Pool,
}

/// An allocation that the guest may free.
#[derive(Debug)]
struct Allocation {
    source: Source,
    /// Device that holds the memory.
    device: SessionDevice,
    bytes: u64,
    /// The session's pool that the memory comes from.
    pool: Option<Handle<Pool>>,
}

/// Memory of a pool that is going to be freed.
#[derive(Debug)]
pub(super) struct OfPool {
    pub device: SessionDevice,
    pub bytes: u64,
    /// `None` for memory of another process.
    pub pool: Option<Handle<Pool>>,
}

/// All memory that the session may name, by address. Look-ups do not change it, so several threads
/// may make them.
#[derive(Debug)]
pub(super) struct Addresses {
    counters: Arc<Counters>,
    /// Device memory: allocations, parts of slabs, and global variables.
    pub(super) device: Ranges,
    /// Allocations, by start address.
    allocations: HashMap<u64, Allocation>,
    /// Allocations of other processes that this session has opened.
    opened: Ranges,
    /// Arena granted to the session.
    arena: Ranges,
    /// Managed memory whose home the device reaches.
    pub(super) managed: Ranges,
    /// Jobs that read or write the arena, or give the device addresses, hold a clone.
    users: Arc<()>,
    /// Tasks that release runs of arena and addresses, queued until those jobs are done.
    pending_release: Vec<Task>,
    pub(super) slabs: Slabs,
    pub(super) files: Files,
    pub(super) virtual_memory: VirtualMemory,
}

/// Several executing threads may look addresses up.
const _: () = {
    const fn is_shared<T: Sync>() {}
    is_shared::<Addresses>();
};

/// Returns the address of memory that the device has allocated, opened or reserved. Frees memory outside of the bands
/// that the guest keeps free for the device.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`: the memory is outside of the bands.
pub(super) fn admitted(
    address: u64,
    bytes: u64,
    free: impl FnOnce(u64) -> Result<(), CuResult>,
) -> Result<u64, CuResult> {
    if in_bands(address, bytes) {
        return Ok(address);
    }
    tracing::error!("the device gave out {address:#x}, which a guest may use itself");
    free(address)?;
    Err(CuResult::OUT_OF_MEMORY)
}

/// Returns whether a range lies in the bands that the guest keeps free for the device.
pub(super) fn in_bands(address: u64, bytes: u64) -> bool {
    [APERTURE_HIGH, APERTURE_LOW]
        .into_iter()
        .any(|(base, size)| address >= base && bytes <= size && address - base <= size - bytes)
}

impl Addresses {
    pub fn new(counters: Arc<Counters>) -> Self {
        Self {
            counters,
            device: Ranges::default(),
            allocations: HashMap::new(),
            opened: Ranges::default(),
            arena: Ranges::default(),
            managed: Ranges::default(),
            users: Arc::new(()),
            pending_release: Vec::new(),
            slabs: Slabs::default(),
            files: Files::default(),
            virtual_memory: VirtualMemory::default(),
        }
    }

    /// Returns the kind of memory that a range lies in. The range must lie in one object of the
    /// session.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: the session may not name the range.
    pub fn place(&self, address: u64, bytes: u64) -> Result<Place, CuResult> {
        if self.device.contains(address, bytes) {
            Ok(Place::Device)
        } else if self.arena.contains(address, bytes)
            || self.files.contains(address, bytes)
            || self.managed.contains(address, bytes)
        {
            Ok(Place::Arena)
        } else if self.opened.contains(address, bytes) || self.virtual_memory.maps(address, bytes) {
            Ok(Place::Device)
        } else {
            Err(self.refused())
        }
    }

    /// Returns the arena extent, file or managed memory that holds an address.
    pub fn host_range(&self, address: u64) -> Option<Found> {
        let file = || self.files.find(address);
        let managed = || self.managed.find(address);
        self.arena.find(address).or_else(file).or_else(managed)
    }

    /// Returns start and bytes of the memory that holds an address and that the session may name: an allocation, an
    /// arena extent, a file or a mapping.
    pub fn around(&self, address: u64) -> Option<(u64, u64)> {
        (self.device.find(address))
            .or_else(|| self.host_range(address))
            .or_else(|| self.opened.find(address))
            .map(|found| (found.start, found.bytes))
            .or_else(|| self.virtual_memory.around(address))
    }

    /// Returns a guard of a job that uses addresses. Memory that is given back meanwhile stays where it is until the job is
    /// done.
    pub fn user(&self) -> Arc<()> {
        Arc::clone(&self.users)
    }

    /// Returns whether a job uses addresses.
    pub fn has_users(&self) -> bool {
        Arc::strong_count(&self.users) > 1
    }

    /// Runs a task on the registrar once no job uses addresses.
    pub fn once_unused(&mut self, task: Task, registrar: &Registrar) {
        self.pending_release.push(task);
        self.release_pending(registrar);
    }

    /// Finds a range in the arena that one of the worker's own jobs is going to read or write. The
    /// range stays mapped as long as the job holds the returned guard.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: the range does not lie in one extent.
    pub fn arena(&self, address: u64, bytes: u64) -> Result<Arc<()>, CuResult> {
        if self.arena.contains(address, bytes) {
            Ok(self.user())
        } else {
            Err(self.refused())
        }
    }

    /// Counts an address that the session may not name, and returns the error to answer.
    pub fn refused(&self) -> CuResult {
        self.counters.add(Counter::InvalidAddresses, 1);
        CuResult::INVALID_VALUE
    }

    /// Returns the bytes of a device's memory that the session holds, by the device's number.
    pub fn bytes_of(&self, device: usize) -> u64 {
        self.device.bytes_of(device)
            + self.slabs.unused_of(device)
            + self.virtual_memory.bytes_of(device)
    }

    /// Adds an allocation.
    ///
    /// # Errors
    /// `CUDA_ERROR_UNKNOWN`: the range overlaps memory of the session.
    pub fn enter(
        &mut self,
        source: Source,
        device: SessionDevice,
        address: u64,
        bytes: u64,
    ) -> Result<(), CuResult> {
        if !self.device.insert_of(device.number(), address, bytes) {
            tracing::error!("the device gave out {bytes} bytes at {address:#x} twice");
            return Err(CuResult::UNKNOWN);
        }
        let allocation = Allocation {
            source,
            device,
            bytes,
            pool: None,
        };
        self.allocations.insert(address, allocation);
        Ok(())
    }

    /// Adds an allocation of one of the session's pools.
    ///
    /// # Errors
    /// Same as [`Addresses::enter`].
    pub fn enter_of_pool(
        &mut self,
        pool: Handle<Pool>,
        device: SessionDevice,
        address: u64,
        bytes: u64,
    ) -> Result<(), CuResult> {
        self.enter(Source::Pool, device, address, bytes)?;
        if let Some(allocation) = self.allocations.get_mut(&address) {
            allocation.pool = Some(pool);
        }
        Ok(())
    }

    /// Returns whether an allocation of this source starts at the address.
    pub fn holds(&self, source: Source, address: u64) -> bool {
        let allocation = self.allocations.get(&address);
        allocation.is_some_and(|allocation| allocation.source == source)
    }

    /// Returns the device of the allocation of this source that starts at the address.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: there is none.
    pub fn owner(&self, source: Source, address: u64) -> Result<&SessionDevice, CuResult> {
        match self.allocations.get(&address) {
            Some(allocation) if allocation.source == source => Ok(&allocation.device),
            _ => Err(self.refused()),
        }
    }

    /// Removes an allocation that is going to be freed, so that it may not be named any more, and
    /// returns its device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: no allocation starts at the address.
    pub fn free(&mut self, address: u64) -> Result<(SessionDevice, u64), CuResult> {
        let allocation = self.remove(address)?;
        Ok((allocation.device, allocation.bytes))
    }

    fn remove(&mut self, address: u64) -> Result<Allocation, CuResult> {
        let Some(allocation) = self.allocations.remove(&address) else {
            return Err(self.refused());
        };
        self.device.remove(address);
        Ok(allocation)
    }

    /// Removes an allocation as [`Addresses::free`] does, if it comes from a pool.
    ///
    /// # Errors
    /// Same as [`Addresses::free`].
    pub fn free_of_pool(&mut self, address: u64) -> Result<OfPool, CuResult> {
        self.owner(Source::Pool, address)?;
        let Allocation {
            device,
            bytes,
            pool,
            ..
        } = self.remove(address)?;
        Ok(OfPool {
            device,
            bytes,
            pool,
        })
    }

    /// Adds a global variable. Returns false if it was added before.
    pub fn enter_global(&mut self, device: &SessionDevice, address: u64, bytes: u64) -> bool {
        self.device.insert_of(device.number(), address, bytes)
    }

    pub fn forget_global(&mut self, address: u64) {
        self.device.remove(address);
    }

    /// Adds an allocation of another process. Returns false if it overlaps an opened one.
    pub fn open(&mut self, device: usize, address: u64, bytes: u64) -> bool {
        self.opened.insert_of(device, address, bytes)
    }

    /// Removes an opened allocation, and returns the number of the device that opened it.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: no opened allocation starts at the address.
    pub fn close(&mut self, address: u64) -> Result<usize, CuResult> {
        match self.opened.remove(address) {
            Some((_, device)) => Ok(device),
            None => Err(self.refused()),
        }
    }

    /// Adds a run of arena that is mapped and registered.
    pub fn add_extent(&mut self, address: u64, bytes: u64) {
        if !self.arena.insert(address, bytes) {
            tracing::error!("arena at {address:#x} was granted twice");
        }
    }

    /// Removes a run of arena, so that it may not be named any more. `release` runs once no job
    /// reads arena.
    pub fn remove_extent(&mut self, address: u64, release: Task, registrar: &Registrar) {
        if self.arena.remove(address).is_none() {
            tracing::error!("arena at {address:#x} is to be given back and was not granted");
            return;
        }
        self.once_unused(release, registrar);
    }

    /// Runs the tasks that wait for the jobs that use addresses, if there is none.
    pub fn release_pending(&mut self, registrar: &Registrar) {
        if !self.has_users() {
            for release in self.pending_release.drain(..) {
                registrar.run(release);
            }
        }
    }

    /// Forgets the memory of the context. Pools, memory allocated from them, virtual memory, arena
    /// and files belong to no context and stay.
    pub fn reset(&mut self) {
        self.device.clear();
        self.slabs.clear();
        self.opened.clear();
        self.allocations
            .retain(|_, allocation| allocation.source == Source::Pool);
        for (&address, allocation) in &self.allocations {
            let number = allocation.device.number();
            self.device.insert_of(number, address, allocation.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use wormhole_cpu_device::{CpuDevice, Options};
    use wormhole_device::Device;
    use wormhole_link::counters::CountersFile;
    use wormhole_link::neighbours::{Neighbours, NeighboursFile};

    use super::*;
    use crate::devices::Devices;

    const PAGE: u64 = 4096;
    const DEVICE: Result<Place, CuResult> = Ok(Place::Device);
    const ARENA: Result<Place, CuResult> = Ok(Place::Arena);
    const REFUSED: Result<Place, CuResult> = Err(CuResult::INVALID_VALUE);

    fn two_devices() -> Devices {
        let options = Options {
            memory: Some(16 << 20),
            ..Options::default()
        };
        let devices = CpuDevice::open_several(&options, 2).unwrap().into_iter();
        Devices::new(
            devices
                .map(|device| Arc::new(device) as Arc<dyn Device>)
                .collect(),
        )
    }

    fn addresses() -> (Addresses, CountersFile) {
        let file = CountersFile::create().unwrap();
        let page = OwnedFd::from(file.file().try_clone().unwrap());
        let neighbours = NeighboursFile::create().unwrap();
        let word = Neighbours::map(&neighbours.descriptor().unwrap()).unwrap();
        let counters = Counters::map(&page, word).unwrap();
        (Addresses::new(Arc::new(counters)), file)
    }

    #[test]
    fn an_address_may_be_named_while_something_of_the_session_is_there() {
        let devices = two_devices();
        let (mut addresses, counts) = addresses();
        let [context, pool, global, opened, arena] = [1, 2, 3, 4, 5].map(|at| at << 20);
        assert_eq!(addresses.place(context, 1), REFUSED);
        let mut enter = |source, number: usize, at| {
            let device = devices[number].clone();
            addresses.enter(source, device, at, PAGE)
        };
        assert_eq!(enter(Source::Context, 0, context), Ok(()));
        assert_eq!(enter(Source::Pool, 1, pool), Ok(()));
        assert_eq!(
            enter(Source::Context, 1, context + PAGE / 2),
            Err(CuResult::UNKNOWN)
        );
        assert!(addresses.enter_global(&devices[1], global, PAGE));
        assert!(!addresses.enter_global(&devices[1], global, PAGE));
        assert!(addresses.open(1, opened, PAGE));
        addresses.add_extent(arena, PAGE);
        for at in [context, pool, global, opened] {
            assert_eq!(addresses.place(at, PAGE), DEVICE);
            assert_eq!(addresses.place(at + 1, PAGE), REFUSED);
        }
        assert_eq!(addresses.place(arena, PAGE), ARENA);
        assert_eq!(
            [0, 1].map(|number| addresses.bytes_of(number)),
            [PAGE, 2 * PAGE]
        );
        assert_eq!(addresses.free_of_pool(context).err(), REFUSED.err());
        assert_eq!(addresses.owner(Source::Context, pool).err(), REFUSED.err());
        addresses.reset();
        let left = [context, pool, global, opened, arena].map(|at| addresses.place(at, PAGE));
        assert_eq!(left, [REFUSED, DEVICE, REFUSED, REFUSED, ARENA]);
        assert_eq!(addresses.bytes_of(1), PAGE);
        let owner = addresses.free(pool).map(|(device, _)| device.number());
        assert_eq!(owner, Ok(1));
        assert_eq!(addresses.place(pool, PAGE), REFUSED);
        assert_eq!(addresses.free(pool).err(), REFUSED.err());
        assert_eq!(counts.read().get(Counter::InvalidAddresses), 12);
    }
}
