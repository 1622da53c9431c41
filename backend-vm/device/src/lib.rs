//! Interface of the devices that a worker executes on.
//!
//! [`Device`] is the worker's view of an accelerator: `CudaDevice` (the real driver) and `CpuDevice` (PTX on the CPU)
//! implement it. Calls take raw device-side handles; the worker translates and checks a guest's handles and addresses
//! before a call.
//!
//! Invariants of every implementation:
//! - Any thread may call any method, in turn with other devices of its process.
//! - A method that is documented as asynchronous never waits for the device.
//! - Work submitted to one stream runs in the order of submission; the legacy stream synchronizes with all blocking
//!   streams (CUDA programming guide, "default stream").
//! - A fault is sticky: once the context is dead every call returns the same error and
//!   [`Device::health`] reports it.

macro_rules! raw_handle {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(pub u64);
    )*};
}

mod after_fence;
mod arrays;
mod chains;
mod comparison;
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

pub use after_fence::AfterFence;
pub use comparison::Comparison;
pub use driver_calls::DriverCalls;
pub use green_contexts::{GreenContexts, Multiprocessors, RawGreenContext, Split};
pub use peers::{Peer, Peers};
pub use pools::{PoolProperties, Pools, RawPool};
pub use shared_words::{EventRecord, EventWords, PARTIES, SharedWords, WORDS_FILE};
pub use sharing::{Found, Shared, Sharing};
pub use texture_references::TextureReferences;
pub use virtual_memory::{Granularity, RawMemory, VirtualMemory};

mod mem_ops;

use std::fmt;

pub use arrays::{Arrays, Copy3dEnd, MemCopy3d, RawArray, RawMipmap, Resource, Sampling, View};
pub use chains::{Chains, RawChain};
pub use graphs::{
    Condition, Conditional, GraphDescription, GraphEdge, GraphKernel, GraphNode, Graphs, RawGraph,
};
pub use kernels::{ClusterLaunch, EncodedTensorMap, Kernels, TensorMap, TensorMapMode};
pub use managed::{Layout, ManagedPlace};
pub use mem_ops::{MemOps, MemoryOperation, MemoryOperationKind};
/// A `CUresult` other than `CUDA_SUCCESS`.
pub use wormhole_api::CuResult as CuError;
pub use wormhole_api::array::{self, ArrayShape, Format, Texels};
use wormhole_api::constants::stream_handle;
pub use wormhole_api::constants::{self, pool_attribute, wait_value as condition};
pub use wormhole_api::{Access, GraphBranch, LaunchAttribute, Parameter, TexRefTarget};

/// Most kernels of a device that run at the same time: the resident grids of compute capability 9.0 (CUDA programming guide,
/// "Technical Specifications per Compute Capability"). Up to this many kernels that wait for each other make progress.
pub const MAX_KERNELS: usize = 128;
/// Most threads that run the work of a device's streams on processors: one for each kernel, and those for other work while
/// kernels occupy all others, like the copy engines of a GPU.
pub const STREAM_THREADS: usize = MAX_KERNELS + 4;

/// Result of a device call.
pub type Result<T> = std::result::Result<T, CuError>;

raw_handle! {
    /// Handle of a stream of this device. [`RawStream::LEGACY`] is the legacy default stream.
    RawStream
    /// Handle of an event of this device.
    RawEvent
    /// Handle of a loaded module or library.
    RawModule
    /// Handle of a kernel.
    RawFunction
}

impl RawStream {
    /// Legacy default stream (`CU_STREAM_LEGACY`).
    pub const LEGACY: Self = Self(stream_handle::LEGACY);
}

/// Input of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkInput<'a> {
    /// `CUjitInputType` of the input.
    pub kind: u32,
    /// Name of the input in messages.
    pub name: &'a str,
    pub data: &'a [u8],
}

/// Options and logs of a compiler or linker.
#[derive(Clone, Debug, Default)]
pub struct Jit {
    /// `CUjit_option` and value, for options with plain numbers.
    pub options: Vec<(u32, u64)>,
    /// Greatest size of each log, including its terminating zero byte; 0 for no logs.
    pub log_bytes: usize,
    /// Info log (`CU_JIT_INFO_LOG_BUFFER`).
    pub info: Vec<u8>,
    /// Error log (`CU_JIT_ERROR_LOG_BUFFER`).
    pub errors: Vec<u8>,
}

/// Function that loads an image: `cuModuleLoadData` or `cuLibraryLoadData`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    Module,
    Library,
}

/// Text that the kernels of an image may write to the program's standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageOutput {
    None,
    /// Kernels print only if [`LoadedFunction::prints`] is true. Any kernel may fail an assertion.
    Kernels,
    /// From now on any kernel of any image may print.
    Any,
}

/// Loaded module or library.
#[derive(Clone, Debug)]
pub struct LoadedModule {
    pub module: RawModule,
    pub output: ImageOutput,
    /// Initial values of the managed variables: addresses and bytes.
    pub initial: Vec<(u64, Vec<u8>)>,
}

/// Outcome of a load.
#[derive(Clone, Debug)]
pub enum Loading {
    Done(LoadedModule),
    /// Nothing was loaded: the image has managed variables, which need a place of this size in bytes.
    NeedsPlace(u64),
}

impl Loading {
    /// Returns the module of an image without managed variables.
    pub fn done(self) -> Result<LoadedModule> {
        match self {
            Self::Done(loaded) => Ok(loaded),
            Self::NeedsPlace(_) => Err(CuError::NOT_SUPPORTED),
        }
    }
}

/// Properties of a kernel that a guest needs to launch it without further queries.
#[derive(Clone, Debug)]
pub struct LoadedFunction {
    pub function: RawFunction,
    pub parameters: Vec<Parameter>,
    /// `CUfunction_attribute` and value.
    pub attributes: Vec<(i32, i32)>,
    /// Whether it, or a function that it calls, may call `vprintf`.
    pub prints: bool,
}

/// Events that a launch records. All are created without timing and without `CU_EVENT_INTERPROCESS`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchEvents {
    /// Event that completes when all blocks have triggered it or ended (`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT`).
    pub programmatic: Option<RawEvent>,
    /// True if blocks trigger the programmatic event when they start (`triggerAtBlockStart`).
    pub at_block_start: bool,
    /// Event that completes when all blocks have started (`CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT`).
    pub begun: Option<RawEvent>,
}

impl LaunchEvents {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.programmatic.is_none() && self.begun.is_none()
    }
}

/// Kernel launch.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    pub function: RawFunction,
    pub stream: RawStream,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// Launch attributes whose value contains no handle; events are in `events`.
    pub attributes: &'a [LaunchAttribute],
    pub events: LaunchEvents,
    /// Packed parameter buffer (`CU_LAUNCH_PARAM_BUFFER_POINTER`).
    pub parameters: &'a [u8],
}

/// Two-dimensional fill. `height` is 1 for the one-dimensional functions.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    pub destination: u64,
    /// Pitch in bytes; ignored if `height` is 1.
    pub pitch: u64,
    /// Elements of a row.
    pub width: u64,
    pub height: u64,
    pub value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub element: u32,
}

/// Properties of a device, read once when a worker starts.
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

/// Text that kernels printed, by the native driver's destination.
#[derive(Clone, Debug, Default)]
pub struct DeviceOutput {
    /// Output of `printf`, for the program's standard output.
    pub stdout: Vec<u8>,
    /// Output of `assert`, for the program's standard error.
    pub stderr: Vec<u8>,
}

/// Accelerator with one context.
pub trait Device:
    Arrays
    + Chains
    + DriverCalls
    + Graphs
    + GreenContexts
    + Kernels
    + Peers
    + Pools
    + TextureReferences
    + Sharing
    + MemOps
    + VirtualMemory
    + Send
    + Sync
    + fmt::Debug
{
    /// Returns the properties that the device had at its start (`cuDeviceGetAttribute` and other queries).
    fn describe(&self) -> &Description;
    /// Returns the sticky error if the context is dead; never waits. `probe` names streams with work in flight, all of
    /// which must exist.
    fn health(&self, probe: &[RawStream]) -> Option<CuError>;
    /// Describes each queue with incomplete work in a line for people to read; never waits for the device. Empty if
    /// the device does not expose its queues.
    fn queues(&self) -> Vec<String> {
        Vec::new()
    }
    /// Takes the text that kernels printed, as far as a synchronization has made it visible.
    fn take_output(&self) -> DeviceOutput;

    /// Returns the device memory of this process in bytes if the device counts it; `None` if the session's allocations
    /// must be counted instead.
    fn own_memory(&self) -> Option<u64> {
        None
    }
    /// Allocates a slab, which the guest divides. A device without an access checker treats it as ordinary memory.
    fn slab_alloc(&self, bytes: u64) -> Result<u64> {
        self.mem_alloc(bytes)
    }
    /// Frees a slab with its parts. Waits as `cuMemFree` does.
    fn slab_free(&self, address: u64) -> Result<()> {
        self.mem_free(address)
    }
    /// Notes that the program uses a part of a slab.
    fn part_alloc(&self, _address: u64, _bytes: u64) -> Result<()> {
        Ok(())
    }
    /// Notes that the program does not use the part of a slab that starts at `address` any more, and no work does.
    fn part_free(&self, _address: u64) -> Result<()> {
        Ok(())
    }
    /// Makes a host range (an arena extent, mapped in this process) accessible to copies and kernels.
    ///
    /// # Safety
    /// `address..address + bytes` is mapped, readable and writable, until it is unregistered.
    unsafe fn register(&self, address: u64, bytes: u64) -> Result<()>;
    /// Ends a registration. Waits until the device no longer accesses the range. After the error of a dead context the
    /// device may still access the range until the context is reset.
    fn unregister(&self, address: u64) -> Result<()>;

    /// Copies `data` to the device in stream order; `data` may be reused on return.
    fn write(&self, destination: u64, data: &[u8], stream: RawStream) -> Result<()>;
    /// Fills memory. Asynchronous.
    fn fill(&self, fill: Fill, stream: RawStream) -> Result<()>;

    /// Destroys a stream (`cuStreamDestroy`). Work of the stream still runs.
    fn destroy_stream(&self, stream: RawStream) -> Result<()>;
    /// Returns `Ok(false)` while work is in flight.
    fn query_stream(&self, stream: RawStream) -> Result<bool>;
    /// Waits for the work of a stream.
    fn synchronize_stream(&self, stream: RawStream) -> Result<()>;
    /// Waits for all work of the context.
    fn synchronize(&self) -> Result<()>;
    /// Makes a stream wait for an event (`cuStreamWaitEvent`). Asynchronous.
    fn wait_event(&self, stream: RawStream, event: RawEvent, flags: u32) -> Result<()>;
    /// Writes `value` to the 8-byte word at `address`, in registered host memory, when the preceding work of the
    /// stream is complete (`cuStreamWriteValue64`). Asynchronous.
    fn write_fence(&self, stream: RawStream, address: u64, value: u64) -> Result<()>;
    /// Sets what the device calls after each fence that it has written, if threads of this process write its fences.
    /// Returns false, and never calls, if hardware writes them.
    fn call_after_fences(&self, _call: AfterFence) -> bool {
        false
    }

    /// Creates an event (`cuEventCreate`).
    fn create_event(&self, flags: u32) -> Result<RawEvent>;
    /// Destroys an event (`cuEventDestroy`).
    fn destroy_event(&self, event: RawEvent) -> Result<()>;
    /// Records an event. Asynchronous.
    fn record_event(&self, event: RawEvent, stream: RawStream, flags: u32) -> Result<()>;
    /// Returns `Ok(false)` while the recorded work is in flight (`cuEventQuery`).
    fn query_event(&self, event: RawEvent) -> Result<bool>;
    /// Waits for an event.
    fn synchronize_event(&self, event: RawEvent) -> Result<()>;
    /// Checks inputs for a link, as `cuLinkAddData` does for each. Writes the logs of `jit` in any case.
    fn try_link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<()>;
    /// Links the inputs into one loadable image (`cuLinkComplete`). Writes the logs as [`Device::try_link`].
    fn link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<Vec<u8>>;
    /// Loads an image. Writes the logs as [`Device::try_link`]. The managed variables lie in `place`, which is
    /// registered host memory.
    fn load(
        &self,
        image: &[u8],
        kind: ImageKind,
        jit: &mut Jit,
        place: Option<ManagedPlace>,
    ) -> Result<Loading>;
    /// Unloads a module or library (`cuModuleUnload`, `cuLibraryUnload`).
    fn unload(&self, module: RawModule) -> Result<()>;
    /// Returns a kernel by its name (`cuModuleGetFunction`, `cuLibraryGetKernel`).
    fn function(&self, module: RawModule, name: &str) -> Result<LoadedFunction>;
    /// Returns the address and size of a global variable.
    fn global(&self, module: RawModule, name: &str) -> Result<(u64, u64)>;
    /// Launches a kernel. Asynchronous.
    fn launch(&self, launch: &Launch<'_>) -> Result<()>;

    /// Sets a limit of the context (`cuCtxSetLimit`).
    fn set_limit(&self, limit: u32, value: u64) -> Result<()>;
    /// Destroys all objects of the context and creates it anew (`cuDevicePrimaryCtxReset`). The caller registers host
    /// ranges again afterwards, and makes no other call meanwhile.
    fn reset(&self) -> Result<()>;
}
