//! What a worker executes on.
//!
//! [`Device`] is the worker's view of an accelerator: `CudaDevice` (the real driver) and `CpuDevice`
//! (PTX on the CPU) implement it. Calls take raw device-side handles; translating what a guest sent,
//! and checking that it may name what it names, is done before a call gets here.
//!
//! Invariants every implementation keeps:
//! - Any thread may call any method, in turn with other devices of its process.
//! - A method that is documented as asynchronous never waits for the device.
//! - Work handed to one stream runs in the order in which it was handed over; work on the legacy
//!   stream orders with all blocking streams, as the CUDA programming guide says ("default stream").
//! - A fault is sticky: once the context is dead every call returns the same error and
//!   [`Device::health`] reports it.

macro_rules! raw_handle {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(pub u64);
    )*};
}

mod arrays;
#[cfg(feature = "conformance")]
pub mod conformance;
mod driver_calls;
pub mod file;
mod graphs;
mod green_contexts;
mod kernels;
mod managed;
mod peers;
mod pools;
mod shared_words;
mod sharing;
mod texture_references;
mod virtual_memory;

pub use driver_calls::DriverCalls;
pub use green_contexts::{GreenContexts, Multiprocessors, RawGreenContext, Split};
pub use peers::{Peer, Peers};
pub use pools::{PoolProperties, Pools, RawPool};
pub use shared_words::{EventRecord, EventWords, PARTIES, SharedWords, WORDS_FILE};
pub use sharing::{Found, Shared, Sharing};
pub use texture_references::References;
pub use virtual_memory::{Granularity, RawMemory, VirtualMemory};

mod mem_ops;

use std::fmt;

pub use arrays::{Arrays, Copy3dEnd, MemCopy3d, RawArray, RawMipmap, Resource, Sampling, View};
pub use graphs::{
    Condition, Conditional, GraphDescription, GraphEdge, GraphKernel, GraphNode, Graphs, RawGraph,
};
pub use kernels::{ClusterLaunch, EncodedTensorMap, Kernels, TensorMap, TensorMapMode};
pub use managed::{Layout, ManagedPlace};
pub use mem_ops::{MemoryOperation, MemoryOperationKind, StreamMemory};
/// A `CUresult` other than `CUDA_SUCCESS`.
pub use wormhole_api::CuResult as CuError;
pub use wormhole_api::array::{self, ArrayShape, Format, Texels};
pub use wormhole_api::constants::{self, pool_attribute, wait_value as condition};
pub use wormhole_api::{Access, GraphBranch, LaunchAttribute, Parameter, ReferenceTo};

/// What a device call returns.
pub type Result<T> = std::result::Result<T, CuError>;

raw_handle! {
    /// A stream of this device. [`RawStream::LEGACY`] is the legacy default stream.
    RawStream
    /// An event of this device.
    RawEvent
    /// A loaded module or library.
    RawModule
    /// A kernel.
    RawFunction
}

impl RawStream {
    /// The legacy default stream (`CU_STREAM_LEGACY`).
    pub const LEGACY: Self = Self(1);
}

/// What goes into a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkInput<'a> {
    /// Its `CUjitInputType`.
    pub kind: u32,
    /// What messages call it.
    pub name: &'a str,
    pub data: &'a [u8],
}

/// What a compiler or linker is told, and what it tells.
#[derive(Clone, Debug, Default)]
pub struct Jit {
    /// `CUjit_option` and value, of options whose values are plain numbers.
    pub options: Vec<(u32, u64)>,
    /// Most bytes of each text, with the zero byte that ends it; 0 if nobody wants them.
    pub log_bytes: usize,
    /// `CU_JIT_INFO_LOG_BUFFER`: what it has to tell.
    pub info: Vec<u8>,
    /// `CU_JIT_ERROR_LOG_BUFFER`: what is wrong.
    pub errors: Vec<u8>,
}

/// How an image is loaded: `cuModuleLoadData` or `cuLibraryLoadData`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    Module,
    Library,
}

/// What is known of a module once it is loaded.
#[derive(Clone, Debug)]
pub struct LoadedModule {
    pub module: RawModule,
    /// The image, or one that was loaded before it, imports `vprintf` or `__assertfail`: synchronizations may bring
    /// text.
    pub uses_output: bool,
    /// The first values of its managed variables: bytes, and where they go.
    pub initial: Vec<(u64, Vec<u8>)>,
}

/// What became of a load.
#[derive(Clone, Debug)]
pub enum Loading {
    Done(LoadedModule),
    /// Nothing was loaded: the image has managed variables, which need a place of so many bytes.
    NeedsPlace(u64),
}

impl Loading {
    /// The module of an image that is known to have no managed variables.
    pub fn done(self) -> Result<LoadedModule> {
        match self {
            Self::Done(loaded) => Ok(loaded),
            Self::NeedsPlace(_) => Err(CuError::NOT_SUPPORTED),
        }
    }
}

/// What a guest must know of a kernel to launch it without asking again.
#[derive(Clone, Debug)]
pub struct LoadedFunction {
    pub function: RawFunction,
    pub parameters: Vec<Parameter>,
    /// `CUfunction_attribute` and value.
    pub attributes: Vec<(i32, i32)>,
}

/// Events that a launch records, all made without timing and for one process only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchEvents {
    /// Reached when all blocks have triggered it or ended (`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT`).
    pub programmatic: Option<RawEvent>,
    /// Blocks trigger it by beginning (`triggerAtBlockStart`).
    pub at_block_start: bool,
    /// Reached when all blocks have begun (`CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT`).
    pub begun: Option<RawEvent>,
}

impl LaunchEvents {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.programmatic.is_none() && self.begun.is_none()
    }
}

/// A kernel launch.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    pub function: RawFunction,
    pub stream: RawStream,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    /// Those without handles.
    pub attributes: &'a [LaunchAttribute],
    pub events: LaunchEvents,
    /// The packed parameter buffer (`CU_LAUNCH_PARAM_BUFFER_POINTER`).
    pub parameters: &'a [u8],
}

/// A two-dimensional fill; `height` 1 for the plain forms.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    pub destination: u64,
    /// Bytes from row to row; ignored when `height` is 1.
    pub pitch: u64,
    /// Elements in a row.
    pub width: u64,
    pub height: u64,
    pub value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub element: u32,
}

/// What a device says of itself, once, when a worker starts.
#[derive(Clone, Debug)]
pub struct Description {
    pub name: String,
    pub uuid: [u8; 16],
    pub total_memory: u64,
    pub driver_version: i32,
    /// `CUdevice_attribute` and value, as the device itself reports them.
    pub attributes: Vec<(i32, i32)>,
    /// Least and greatest stream priority (`cuCtxGetStreamPriorityRange`).
    pub stream_priorities: (i32, i32),
}

/// Text that kernels printed, split by where the native driver writes it.
#[derive(Clone, Debug, Default)]
pub struct DeviceOutput {
    /// `printf`: the program's standard output.
    pub stdout: Vec<u8>,
    /// `assert`: the program's standard error.
    pub stderr: Vec<u8>,
}

/// An accelerator with one context.
pub trait Device:
    Arrays
    + DriverCalls
    + Graphs
    + GreenContexts
    + Kernels
    + Peers
    + Pools
    + References
    + Sharing
    + StreamMemory
    + VirtualMemory
    + Send
    + Sync
    + fmt::Debug
{
    fn describe(&self) -> &Description;
    /// The sticky error, if the context is dead; never waits. `probe` names streams with work in flight,
    /// all of which must exist.
    fn health(&self, probe: &[RawStream]) -> Option<CuError>;
    /// A line for each queue with work that is not complete, for people to read; never waits for the device. None where
    /// the device does not show its queues.
    fn queues(&self) -> Vec<String> {
        Vec::new()
    }
    /// Takes the text that kernels printed and that a synchronization has made visible.
    fn take_output(&self) -> DeviceOutput;

    /// Free and total memory, bytes.
    fn memory_info(&self) -> Result<(u64, u64)>;
    /// Bytes of device memory that this process holds, where the device counts them itself; otherwise what the
    /// session has allocated is counted.
    fn own_memory(&self) -> Option<u64> {
        None
    }
    fn allocate(&self, bytes: u64) -> Result<u64>;
    /// Frees an allocation; waits as `cuMemFree` does.
    fn free(&self, address: u64) -> Result<()>;
    /// Makes a host range (an arena extent, mapped in this process) usable by copies and kernels.
    ///
    /// # Safety
    /// `address..address + bytes` is mapped, readable and writable, until it is unregistered.
    unsafe fn register(&self, address: u64, bytes: u64) -> Result<()>;
    /// Ends a registration; waits until nothing reaches the range any more. After an error of a context
    /// that is dead, the range may still be reached until the context is reset.
    fn unregister(&self, address: u64) -> Result<()>;

    /// Asynchronous. Both ends are device memory or registered host memory, already checked.
    fn copy(&self, destination: u64, source: u64, bytes: u64, stream: RawStream) -> Result<()>;
    /// Copies `data` to the device in stream order; `data` may be reused when this returns.
    fn write(&self, destination: u64, data: &[u8], stream: RawStream) -> Result<()>;
    /// Asynchronous.
    fn fill(&self, fill: Fill, stream: RawStream) -> Result<()>;

    fn create_stream(&self, flags: u32, priority: i32) -> Result<RawStream>;
    fn destroy_stream(&self, stream: RawStream) -> Result<()>;
    /// `Ok(false)` while work is in flight.
    fn query_stream(&self, stream: RawStream) -> Result<bool>;
    /// Waits.
    fn synchronize_stream(&self, stream: RawStream) -> Result<()>;
    /// Waits for all work of the context.
    fn synchronize(&self) -> Result<()>;
    /// Asynchronous (`cuStreamWaitEvent`).
    fn wait_event(&self, stream: RawStream, event: RawEvent, flags: u32) -> Result<()>;
    /// Asynchronous: when the work before it is complete, the device writes `value` to the 8-byte word at
    /// `address`, in registered host memory (`cuStreamWriteValue64`).
    fn write_fence(&self, stream: RawStream, address: u64, value: u64) -> Result<()>;

    fn create_event(&self, flags: u32) -> Result<RawEvent>;
    fn destroy_event(&self, event: RawEvent) -> Result<()>;
    /// Asynchronous.
    fn record_event(&self, event: RawEvent, stream: RawStream, flags: u32) -> Result<()>;
    fn query_event(&self, event: RawEvent) -> Result<bool>;
    /// Waits.
    fn synchronize_event(&self, event: RawEvent) -> Result<()>;
    /// Milliseconds from `start` to `end`; `CUDA_ERROR_NOT_READY` until both have happened.
    fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32>;

    /// Takes inputs for a link, as `cuLinkAddData` does each. The texts of `jit` are written whether that
    /// succeeds or not.
    fn try_link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<()>;
    /// Links the inputs into one image that can be loaded (`cuLinkComplete`); the texts as for
    /// [`Device::try_link`].
    fn link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<Vec<u8>>;
    /// Loads an image; the texts as for [`Device::try_link`]. Its managed variables lie in `place`, which is
    /// registered host memory.
    fn load(
        &self,
        image: &[u8],
        kind: ImageKind,
        jit: &mut Jit,
        place: Option<ManagedPlace>,
    ) -> Result<Loading>;
    fn unload(&self, module: RawModule) -> Result<()>;
    fn function(&self, module: RawModule, name: &str) -> Result<LoadedFunction>;
    /// Address and size of a global variable.
    fn global(&self, module: RawModule, name: &str) -> Result<(u64, u64)>;
    /// Asynchronous.
    fn launch(&self, launch: &Launch<'_>) -> Result<()>;

    fn limit(&self, limit: u32) -> Result<u64>;
    fn set_limit(&self, limit: u32, value: u64) -> Result<()>;
    /// Destroys everything in the context and starts afresh (`cuDevicePrimaryCtxReset`). Host ranges are
    /// registered anew afterwards. Nobody else uses the device meanwhile.
    fn reset(&self) -> Result<()>;
}
