//! Implements the `Device` trait for [`CpuDevice`].

mod driver_calls;
mod kernels;

use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use rustix::system::sysinfo;
use wormhole_device::constants::event_use_flags::EXTERNAL;
use wormhole_device::{
    AfterFence, ArrayShape, CuError, Description, Device, DeviceOutput, Fill, ImageKind,
    ImageOutput, Jit, Launch, LinkInput, LoadedFunction, Loading, ManagedPlace, MemCopy3d,
    RawArray, RawEvent, RawMipmap, RawModule, RawStream, Resource, Result, Sampling, View,
};
use wormhole_lock::RwLock;

use wormhole_ptx::LoadError;

use crate::aperture::{ApertureError, to_usize};
use crate::arrays::Arrays;
use crate::chains::Chained;
use crate::description::describe;
use crate::errors;
use crate::event::{Events, Last, Reached};
use crate::graph::Executables;
use crate::green_contexts::GreenContextTable;
use crate::kernel::{Kernel, Surroundings};
use crate::launch_events::Milestones;
use crate::limits::Limits;
use crate::linker;
use crate::memory::{Memory, Owner, Use, pointer};
use crate::module::Modules;
use crate::output::Output;
use crate::peer_set::PeerSet;
use crate::pools::Pools;
use crate::scheduler::{Point, Scheduler, Work};

/// Options for opening the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Bytes of memory of each device. If not given, all devices together get half of the host's memory, but no more
    /// than `most`.
    pub memory: Option<u64>,
    pub most: Option<u64>,
    /// Whether kernels are checked for races and uninitialised shared memory. Findings go to the log and to the
    /// program's standard error.
    pub check: bool,
}

impl Options {
    fn memory_of_each(&self, count: u8) -> u64 {
        /// Unit of the memory's size, so that one allocation can cover all of it.
        const UNIT: u64 = 2 << 20;
        self.memory.unwrap_or_else(|| {
            let all = (host_memory() / 2).min(self.most.unwrap_or(u64::MAX));
            all / u64::from(count.max(1)) / UNIT * UNIT
        })
    }
}

/// Error of opening the device.
#[derive(Debug, thiserror::Error)]
#[error("the CPU device has no memory: {0}")]
pub struct OpenError(#[from] ApertureError);

/// A CUDA device that executes on the host's processors.
#[derive(Debug)]
pub struct CpuDevice {
    description: Description,
    pub(crate) memory: Arc<Memory>,
    pools: Pools,
    multiprocessors: u32,
    processors: usize,
    check: bool,
    context: Arc<RwLock<Arc<Context>>>,
    after_fence: OnceLock<AfterFence>,
    /// Other devices of the process.
    pub(crate) siblings: OnceLock<Vec<Sibling>>,
}

/// Another device of the process.
#[derive(Debug)]
pub(crate) struct Sibling {
    context: Weak<RwLock<Arc<Context>>>,
    /// Keeps the sibling's memory mapped, because work of this device may access it.
    _memory: Arc<Memory>,
}

impl Sibling {
    pub(crate) fn context(&self) -> Option<Arc<Context>> {
        let context = self.context.upgrade()?;
        let current = context.read();
        Some(Arc::clone(&current))
    }
}

/// State that a reset replaces.
#[derive(Debug)]
pub(crate) struct Context {
    pub scheduler: Scheduler,
    pub events: Events,
    pub modules: Modules,
    pub graphs: Executables,
    pub chains: Chained,
    pub green_contexts: GreenContextTable,
    limits: Limits,
    pub arrays: Arrays,
    output: Arc<Output>,
}

impl Context {
    fn new() -> Self {
        Self {
            scheduler: Scheduler::new(),
            events: Events::default(),
            modules: Modules::default(),
            graphs: Executables::default(),
            chains: Chained::default(),
            green_contexts: GreenContextTable::default(),
            limits: Limits::default(),
            arrays: Arrays::default(),
            output: Arc::default(),
        }
    }

    /// Waits for the points, and makes text printed before them visible.
    fn synchronize(&self, points: &[Point]) -> Result<()> {
        let result = self.scheduler.wait(points);
        self.output.flush();
        result
    }
}

impl CpuDevice {
    /// Opens a device without siblings. Each call opens a separate device.
    pub fn open(options: &Options) -> std::result::Result<Self, OpenError> {
        Self::with_memory(options.memory_of_each(1), 0, options.check)
    }

    /// Opens several devices, at most 64, that can access each other and share the processors.
    pub fn open_several(options: &Options, count: u8) -> std::result::Result<Vec<Self>, OpenError> {
        let bytes = options.memory_of_each(count);
        let devices = (0..count)
            .map(|number| Self::with_memory(bytes, number, options.check))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let memories: Vec<_> = devices.iter().map(|one| Arc::clone(&one.memory)).collect();
        PeerSet::join(&memories);
        for (number, device) in devices.iter().enumerate() {
            let others = devices.iter().enumerate();
            let others = others.filter(|(other, _)| *other != number);
            let siblings = others.map(|(_, other)| Sibling {
                context: Arc::downgrade(&other.context),
                _memory: Arc::clone(&other.memory),
            });
            // Cannot fail, because the device was just opened.
            let _ = device.siblings.set(siblings.collect());
        }
        Ok(devices)
    }

    fn with_memory(bytes: u64, number: u8, check: bool) -> std::result::Result<Self, OpenError> {
        let memory = Arc::new(Memory::new(bytes)?);
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let multiprocessors = u32::try_from(processors).unwrap_or(u32::MAX);
        Ok(Self {
            description: describe(bytes, multiprocessors, number),
            pools: Pools::new(Arc::clone(&memory)),
            memory,
            multiprocessors,
            processors,
            check,
            context: Arc::new(RwLock::new(Arc::new(Context::new()))),
            after_fence: OnceLock::new(),
            siblings: OnceLock::new(),
        })
    }

    pub(crate) fn multiprocessor_count(&self) -> u32 {
        self.multiprocessors
    }

    fn current(&self) -> Arc<Context> {
        Arc::clone(&self.context.read())
    }

    pub(crate) fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Returns the context. Fails with the sticky error if it is dead.
    pub(crate) fn context(&self) -> Result<Arc<Context>> {
        let context = self.current();
        context.scheduler.alive()?;
        Ok(context)
    }

    /// Returns whether work may access these ranges. An access that a mapping does not allow makes the stream fault, as
    /// in a kernel, and returns false. An access to unallocated memory fails at the call.
    pub(crate) fn reaches(
        &self,
        context: &Context,
        stream: RawStream,
        ranges: &[(u64, u64, Use)],
    ) -> Result<bool> {
        let check = |(address, bytes, intent): &(u64, u64, Use)| {
            self.memory.check(*address, *bytes, *intent)
        };
        match ranges.iter().try_for_each(check) {
            Ok(()) => Ok(true),
            Err(CuError::ILLEGAL_ADDRESS) => {
                let fault = || Err(CuError::ILLEGAL_ADDRESS);
                context.scheduler.submit(stream, Work::new(fault))?;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Waits for the points. Then pools release unused memory above their thresholds.
    fn synchronized(&self, context: &Context, points: &[Point]) -> Result<()> {
        context.synchronize(points)?;
        self.pools.synchronized(&context.scheduler);
        Ok(())
    }

    /// Validates a launch and returns whether it is cooperative.
    pub(crate) fn validate(&self, kernel: &Kernel, launch: &Launch<'_>) -> Result<bool> {
        crate::launch::validate(&kernel.needs(), launch, self.multiprocessors)
    }

    pub(crate) fn surroundings(&self, context: &Context, uses_heap: bool) -> Surroundings {
        let heap = match uses_heap {
            true => context.modules.heap(&self.memory, &context.limits),
            false => None,
        };
        Surroundings {
            memory: Arc::clone(&self.memory),
            output: Arc::clone(&context.output),
            objects: context.arrays.objects(),
            cancel: context.scheduler.cancel(),
            heap,
            conditions: None,
            milestones: None,
            printed: context.limits.printf(),
            check: self.check,
            threads: self.processors,
        }
    }

    /// Allocates memory. If there is none, pools release what they do not use, and it tries again.
    fn beside_pools(&self, allocate: impl Fn() -> Result<u64>) -> Result<u64> {
        let context = self.context()?;
        match allocate() {
            Err(CuError::OUT_OF_MEMORY) => {
                self.pools.release_all(&context.scheduler);
                allocate()
            }
            allocated => allocated,
        }
    }

    /// Waits until all work of the context is complete, for calls that free memory.
    pub(crate) fn idle(&self) -> Result<Arc<Context>> {
        let context = self.context()?;
        context
            .scheduler
            .wait(&context.scheduler.whole_frontier())?;
        Ok(context)
    }
}

/// Returns the bytes of memory of this machine. A worker has no `/proc/meminfo`.
fn host_memory() -> u64 {
    let system = sysinfo();
    system.totalram.saturating_mul(system.mem_unit.into())
}

/// Returns the number of bytes from the first to the last one of a fill.
pub(crate) fn extent(fill: &Fill) -> Result<u64> {
    let element = u64::from(fill.element);
    if !matches!(element, 1 | 2 | 4) || !fill.destination.is_multiple_of(element) {
        return Err(CuError::INVALID_VALUE);
    }
    let row = fill
        .width
        .checked_mul(element)
        .ok_or(CuError::INVALID_VALUE)?;
    if fill.height <= 1 {
        return Ok(if fill.height == 0 { 0 } else { row });
    }
    if fill.pitch < row || !fill.pitch.is_multiple_of(element) {
        return Err(CuError::INVALID_VALUE);
    }
    let before = fill
        .pitch
        .checked_mul(fill.height - 1)
        .ok_or(CuError::INVALID_VALUE)?;
    before.checked_add(row).ok_or(CuError::INVALID_VALUE)
}

/// Executes a fill. The caller has checked its whole [`extent`].
pub(crate) fn run_fill(fill: &Fill) {
    let width = to_usize(fill.width);
    let [low, second, ..] = fill.value.to_le_bytes();
    for row in 0..fill.height {
        let start = pointer(fill.destination + row * fill.pitch);
        // SAFETY: device memory and registered ranges stay mapped. The whole fill lies in one of them, and each row is
        // aligned to the element. Other threads of the program may write there at the same time; this code reads
        // nothing.
        unsafe {
            match fill.element {
                1 => start.write_bytes(low, width),
                2 => {
                    let value = u16::from_le_bytes([low, second]);
                    (0..width).for_each(|index| start.cast::<u16>().add(index).write(value));
                }
                _ => (0..width).for_each(|index| start.cast::<u32>().add(index).write(fill.value)),
            }
        }
    }
}

/// Logs a load error and writes it to the JIT error log, in the format of the native tools.
fn refused(what: &str, error: &LoadError, jit: &mut Jit) -> CuError {
    tracing::warn!(%error, "{what} is refused");
    jit.errors = format!("error   : {error}\n").into_bytes();
    errors::of_image(error)
}

impl Device for CpuDevice {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn health(&self, _probe: &[RawStream]) -> Option<CuError> {
        self.current().scheduler.fault()
    }

    fn queues(&self) -> Vec<String> {
        self.current().scheduler.describe()
    }

    fn take_output(&self) -> DeviceOutput {
        let context = self.current();
        if context.scheduler.fault().is_some() {
            context.output.flush();
        }
        context.output.take()
    }

    fn own_memory(&self) -> Option<u64> {
        let (free, total) = self.memory.info();
        Some(total - free)
    }

    fn slab_alloc(&self, bytes: u64) -> Result<u64> {
        self.beside_pools(|| self.memory.allocate_slab(bytes))
    }

    fn slab_free(&self, address: u64) -> Result<()> {
        self.context()?;
        self.memory.is_slab(address)?;
        self.idle()?;
        self.memory.free_slab(address)
    }

    fn part_alloc(&self, address: u64, bytes: u64) -> Result<()> {
        self.context()?;
        self.memory.allocate_part(address, bytes)
    }

    fn part_free(&self, address: u64) -> Result<()> {
        self.context()?;
        self.memory.free(address, Owner::Part)
    }

    unsafe fn register(&self, address: u64, bytes: u64) -> Result<()> {
        self.context()?;
        self.memory.register(address, bytes)
    }

    fn unregister(&self, address: u64) -> Result<()> {
        self.memory.registered(address)?;
        let context = self.current();
        let wait = || context.scheduler.wait(&context.scheduler.whole_frontier());
        let idle = wait();
        self.memory.unregister(address)?;
        // Kernels that started meanwhile may have looked up the range.
        let done = idle.and_then(|()| wait());
        if done.is_err() {
            // Work that ran when the context died may still access the range.
            context.scheduler.stop(CuError::CONTEXT_IS_DESTROYED);
        }
        done
    }

    fn write(&self, destination: u64, data: &[u8], stream: RawStream) -> Result<()> {
        let context = self.context()?;
        if data.is_empty() {
            return Ok(());
        }
        let end = (destination, data.len() as u64, Use::Write);
        if !self.reaches(&context, stream, &[end])? {
            return Ok(());
        }
        let memory = Arc::clone(&self.memory);
        let data = Box::<[u8]>::from(data);
        let bytes = data.len();
        let work = move || {
            let _mapped = memory;
            // SAFETY: the destination was checked to lie in memory of the device or in a registered range; the source
            // is private to this work.
            unsafe {
                libc::memcpy(
                    pointer(destination).cast(),
                    data.as_ptr().cast(),
                    data.len(),
                )
            };
            Ok(())
        };
        context
            .scheduler
            .submit_with(stream, bytes, Work::new(work))
            .map(drop)
    }

    fn fill(&self, fill: Fill, stream: RawStream) -> Result<()> {
        let context = self.context()?;
        let bytes = extent(&fill)?;
        if bytes == 0 {
            return Ok(());
        }
        let end = (fill.destination, bytes, Use::Write);
        if !self.reaches(&context, stream, &[end])? {
            return Ok(());
        }
        let memory = Arc::clone(&self.memory);
        let work = move || {
            let _mapped = memory;
            run_fill(&fill);
            Ok(())
        };
        context.scheduler.submit(stream, Work::new(work)).map(drop)
    }

    fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        self.context()?.scheduler.destroy(stream)
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        let context = self.context()?;
        context
            .scheduler
            .reached(&context.scheduler.frontier(stream)?)
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        let context = self.context()?;
        let points = context.scheduler.frontier(stream)?;
        self.synchronized(&context, &points)
    }

    fn synchronize(&self) -> Result<()> {
        let context = self.context()?;
        let points = context.scheduler.whole_frontier();
        self.synchronized(&context, &points)
    }

    fn wait_event(&self, stream: RawStream, event: RawEvent, flags: u32) -> Result<()> {
        let context = self.context()?;
        if flags & !EXTERNAL != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let last = match context.events.last(event) {
            Err(CuError::INVALID_HANDLE) => return self.wait_for_sibling(&context, stream, event),
            last => last?,
        };
        let (point, work) = match last {
            Last::Never => (None, Work::nothing()),
            Last::Point(point) => (Some(point), Work::nothing()),
            Last::Shared(event, record) => (None, Work::when(move || event.is_complete(record))),
        };
        context
            .scheduler
            .submit_after(stream, point, work)
            .map(drop)
    }

    fn write_fence(&self, stream: RawStream, address: u64, value: u64) -> Result<()> {
        let context = self.context()?;
        self.memory.check(address, 8, Use::Write)?;
        if !address.is_multiple_of(8) {
            return Err(CuError::INVALID_VALUE);
        }
        let after = self.after_fence.get().cloned();
        let work = move || {
            // SAFETY: the word was checked to lie in memory that stays mapped until the work before its unregistration
            // is complete; it is aligned, and all sides access it atomically.
            let word = unsafe { AtomicU64::from_ptr(pointer(address).cast()) };
            // SYNC POINT: fence. A thread that reads the value sees all writes of the work before it.
            word.store(value, Ordering::Release);
            if let Some(after) = &after {
                after.call();
            }
            Ok(())
        };
        context.scheduler.submit(stream, Work::new(work)).map(drop)
    }

    fn call_after_fences(&self, call: AfterFence) -> bool {
        // The first session is the only one.
        let _ = self.after_fence.set(call);
        true
    }

    fn create_event(&self, flags: u32) -> Result<RawEvent> {
        self.context()?.events.create(flags)
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.context()?.events.destroy(event)
    }

    fn record_event(&self, event: RawEvent, stream: RawStream, flags: u32) -> Result<()> {
        let context = self.context()?;
        if flags & !EXTERNAL != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        context.events.record(event, stream, &context.scheduler)
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        let context = self.context()?;
        match context.events.seen(event)? {
            Last::Never => Ok(true),
            Last::Point(point) => context.scheduler.reached(&[point]),
            Last::Shared(event, record) => Ok(event.is_complete(record)),
        }
    }

    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        let context = self.context()?;
        match context.events.seen(event)? {
            Last::Never => self.synchronized(&context, &[]),
            Last::Point(point) => self.synchronized(&context, &[point]),
            Last::Shared(event, record) => {
                event.wait(record, || context.scheduler.fault().is_some());
                context.scheduler.alive()?;
                self.synchronized(&context, &[])
            }
        }
    }

    fn try_link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<()> {
        linker::try_link(inputs).map_err(|error| refused("an input of a link", &error, jit))
    }

    fn link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<Vec<u8>> {
        linker::link(inputs).map_err(|error| refused("a link", &error, jit))
    }

    fn load(
        &self,
        image: &[u8],
        _kind: ImageKind,
        jit: &mut Jit,
        place: Option<ManagedPlace>,
    ) -> Result<Loading> {
        let loaded = wormhole_ptx::Module::load(image);
        let loaded = loaded.map_err(|error| refused("an image", &error, jit))?;
        let mut loading = self.context()?.modules.load(loaded, &self.memory, place)?;
        // The checker may print findings for any kernel.
        if let Loading::Done(module) = &mut loading
            && self.check
        {
            module.output = ImageOutput::Any;
        }
        Ok(loading)
    }

    fn unload(&self, module: RawModule) -> Result<()> {
        self.context()?.modules.check(module)?;
        self.idle()?.modules.unload(module)
    }

    fn function(&self, module: RawModule, name: &str) -> Result<LoadedFunction> {
        self.context()?.modules.function(module, name)
    }

    fn global(&self, module: RawModule, name: &str) -> Result<(u64, u64)> {
        self.context()?.modules.global(module, name)
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let context = self.context()?;
        let kernel = context.modules.kernel(launch.function)?;
        let cooperative = self.validate(&kernel, launch)?;
        let mut around = self.surroundings(&context, kernel.uses_heap());
        let queue = |around| {
            let work = Work::kernel(kernel.run(launch, cooperative, around));
            let bytes = launch.parameters.len();
            context.scheduler.submit_with(launch.stream, bytes, work)
        };
        if launch.events.is_empty() {
            return queue(around).map(drop);
        }
        context.events.launch(&launch.events, || {
            let milestones = Milestones::new(&launch.events, &context.scheduler);
            let (programmatic, begun) = milestones.points();
            around.milestones = Some(milestones.clone());
            // Work that was not queued never reaches the milestones, so they are reached here.
            let end = queue(around).inspect_err(|_| milestones.reach())?;
            Ok(Reached {
                end,
                programmatic,
                begun,
            })
        })
    }

    fn set_limit(&self, limit: u32, value: u64) -> Result<()> {
        self.context()?.limits.set(limit, value)
    }

    fn reset(&self) -> Result<()> {
        let mut current = self.context.write();
        current.scheduler.alive()?;
        current.scheduler.stop(CuError::CONTEXT_IS_DESTROYED);
        self.pools.abandon();
        self.memory.clear();
        self.memory.peer_set().forget();
        *current = Arc::new(Context::new());
        Ok(())
    }
}

impl wormhole_device::Arrays for CpuDevice {
    fn create_array(&self, shape: &ArrayShape) -> Result<RawArray> {
        self.context()?.arrays.create(shape, &self.memory)
    }

    fn create_mipmap(&self, shape: &ArrayShape, levels: u32) -> Result<RawMipmap> {
        self.context()?
            .arrays
            .create_mipmap(shape, levels, &self.memory)
    }

    fn create_texture(
        &self,
        resource: &Resource,
        sampling: &Sampling,
        view: Option<&View>,
    ) -> Result<u64> {
        let context = self.context()?;
        context
            .arrays
            .create_texture(resource, sampling, view, &self.memory)
    }

    fn create_surface(&self, array: RawArray) -> Result<u64> {
        self.context()?.arrays.create_surface(array)
    }

    fn copy_3d(&self, copy: &MemCopy3d, stream: RawStream) -> Result<()> {
        let context = self.context()?;
        let found = self.find_move(&context, copy)?;
        let work = Work::new(move || {
            found.run();
            Ok(())
        });
        context.scheduler.submit(stream, work).map(drop)
    }
}

impl Drop for CpuDevice {
    fn drop(&mut self) {
        self.current().scheduler.stop(CuError::CONTEXT_IS_DESTROYED);
    }
}
