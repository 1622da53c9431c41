//! Types of the C interface, laid out as the CUDA driver API documents them.
//!
//! The types are Rust and not entries of the table, since unions, arrays of arrays and nested structures need all that Rust says of a
//! layout. `tests/c_layout.rs` compares size, alignment and offsets with those of `cuda.h`.
#![expect(
    non_camel_case_types,
    non_snake_case,
    reason = "these are the names of the CUDA driver API"
)]

mod arrays;
mod graphs;

pub use core::ffi::{c_char, c_void};

pub use arrays::*;
pub use graphs::*;

pub type CUresult = u32;
pub type CUdevice = i32;
pub type CUdeviceptr = u64;

pub type CUcontext = *mut c_void;
pub type CUstream = *mut c_void;
pub type CUevent = *mut c_void;
pub type CUmodule = *mut c_void;
pub type CUlibrary = *mut c_void;
pub type CUlinkState = *mut c_void;
pub type CUfunction = *mut c_void;
pub type CUkernel = *mut c_void;
pub type CUarray = *mut c_void;
pub type CUmipmappedArray = *mut c_void;
pub type CUtexObject = u64;
pub type CUsurfObject = u64;
pub type CUgraph = *mut c_void;
pub type CUgraphNode = *mut c_void;
pub type CUgreenCtx = *mut c_void;
pub type CUmemoryPool = *mut c_void;
pub type CUmemGenericAllocationHandle = u64;

pub type CUdevice_attribute = i32;
pub type CUfunction_attribute = i32;
pub type CUpointer_attribute = u32;
pub type CUmem_advise = u32;
pub type CUmem_range_attribute = u32;
pub type CUfunc_cache = u32;
pub type CUlimit = u32;
pub type CUjit_option = u32;
pub type CUjitInputType = u32;
pub type CUlibraryOption = u32;
pub type CUmoduleLoadingMode = u32;
pub type CUfunctionLoadingState = u32;
pub type CUdriverProcAddressQueryResult = u32;
pub type CUstreamCaptureStatus = u32;
pub type CUstreamCaptureMode = u32;
pub type CUsharedconfig = u32;
pub type CUlogIterator = u32;
pub type CUlogsCallbackHandle = *mut c_void;
/// `CUlogsCallback`: the program's data, a level, a line and its length.
pub type CUlogsCallback = Option<unsafe extern "C" fn(*mut c_void, u32, *mut c_char, usize)>;
pub type CUexecAffinityType = u32;
pub type CUatomicOperation = u32;
pub type CUarray_format = u32;
pub type CUmemPool_attribute = u32;
pub type CUmemAccess_flags = u32;
pub type CUmemAllocationType = u32;
pub type CUmemAllocationHandleType = u32;
pub type CUmemAllocationGranularity_flags = u32;

pub type CUstreamAttrID = u32;
/// `CUstreamAttrValue`: a union of 64 bytes.
pub type CUstreamAttrValue = [u64; 8];

/// `CUhostFn`.
pub type CUhostFn = Option<unsafe extern "C" fn(*mut c_void)>;
/// `CUstreamCallback`.
pub type CUstreamCallback = Option<unsafe extern "C" fn(CUstream, CUresult, *mut c_void)>;

/// `CUoccupancyB2DSize`: dynamic shared memory of a block of the given size.
pub type CUoccupancyB2DSize = Option<unsafe extern "C" fn(i32) -> usize>;

/// Meaning of stream 0, fixed when the program is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultStream {
    Legacy,
    PerThread,
}

/// `CUuuid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CUuuid {
    pub bytes: [u8; 16],
}

/// `CUlaunchAttribute`: an id, and a union of 64 bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUlaunchAttribute {
    pub id: u32,
    pub pad: [u8; 4],
    pub value: [u64; 8],
}

/// `CUlaunchConfig`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUlaunchConfig {
    pub gridDimX: u32,
    pub gridDimY: u32,
    pub gridDimZ: u32,
    pub blockDimX: u32,
    pub blockDimY: u32,
    pub blockDimZ: u32,
    pub sharedMemBytes: u32,
    pub hStream: CUstream,
    pub attrs: *mut CUlaunchAttribute,
    pub numAttrs: u32,
}

/// `CUDA_MEMCPY2D` (version 2).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUDA_MEMCPY2D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcMemoryType: u32,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr,
    pub srcArray: CUarray,
    pub srcPitch: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstMemoryType: u32,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr,
    pub dstArray: CUarray,
    pub dstPitch: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
}

/// `CUmemLocation`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CUmemLocation {
    pub r#type: u32,
    pub id: i32,
}

/// `CUDA_LAUNCH_PARAMS`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUDA_LAUNCH_PARAMS {
    pub function: CUfunction,
    pub gridDimX: u32,
    pub gridDimY: u32,
    pub gridDimZ: u32,
    pub blockDimX: u32,
    pub blockDimY: u32,
    pub blockDimZ: u32,
    pub sharedMemBytes: u32,
    pub hStream: CUstream,
    pub kernelParams: *mut *mut c_void,
}

/// `CUexecAffinityParam`: a type and its value, here a number of multiprocessors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CUexecAffinityParam {
    pub r#type: CUexecAffinityType,
    pub smCount: u32,
}

/// `CUctxCreateParams`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUctxCreateParams {
    pub execAffinityParams: *mut CUexecAffinityParam,
    pub numExecAffinityParams: i32,
    pub cigParams: *mut c_void,
}

/// `CUtensorMap`. No alignment here: `cuda.h` declares 64 bytes only where the language has `alignas`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CUtensorMap {
    pub opaque: [u8; 128],
}

/// `CUstreamBatchMemOpParams`: a union of the kinds of operation. A barrier has its flags in the upper half
/// of the first word.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CUstreamBatchMemOpParams {
    pub operation: u32,
    pub barrier_flags: u32,
    pub address: CUdeviceptr,
    pub value64: u64,
    pub flags: u32,
    pub alias: CUdeviceptr,
    pub pad: u64,
}

/// `CUdevprop`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CUdevprop {
    pub maxThreadsPerBlock: i32,
    pub maxThreadsDim: [i32; 3],
    pub maxGridSize: [i32; 3],
    pub sharedMemPerBlock: i32,
    pub totalConstantMemory: i32,
    pub SIMDWidth: i32,
    pub memPitch: i32,
    pub regsPerBlock: i32,
    pub clockRate: i32,
    pub textureAlign: i32,
}

/// `CUgraphEdgeData`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CUgraphEdgeData {
    pub from_port: u8,
    pub to_port: u8,
    pub r#type: u8,
    pub reserved: [u8; 5],
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CUmemAccessDesc {
    pub location: CUmemLocation,
    pub flags: CUmemAccess_flags,
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUmemAllocationProp {
    pub r#type: CUmemAllocationType,
    pub requestedHandleTypes: u32,
    pub location: CUmemLocation,
    pub win32HandleMetaData: *mut c_void,
    pub compressionType: u8,
    pub gpuDirectRDMACapable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemcpyAttributes`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUmemcpyAttributes {
    pub srcAccessOrder: u32,
    pub srcLocHint: CUmemLocation,
    pub dstLocHint: CUmemLocation,
    pub flags: u32,
}

/// `CUmemcpy3DOperand`: the type selects the meaning of `place`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUmemcpy3DOperand {
    pub kind: u32,
    /// Address, row length, layer height and location hint; or an array and the offset in it.
    pub place: [u64; 4],
}

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUDA_MEMCPY3D_BATCH_OP {
    pub src: CUmemcpy3DOperand,
    pub dst: CUmemcpy3DOperand,
    /// Elements, rows, layers.
    pub extent: [usize; 3],
    pub srcAccessOrder: u32,
    pub flags: u32,
}

/// `CUdevResource` for multiprocessors; `padding` and `rest` are opaque.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUdevResource {
    pub r#type: u32,
    pub padding: [u32; 23],
    pub smCount: u32,
    pub minSmPartitionSize: u32,
    pub smCoscheduledAlignment: u32,
    pub rest: [u32; 9],
}

/// `CUipcMemHandle`: opaque bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CUipcMemHandle {
    pub reserved: [u8; 64],
}

/// `CUipcEventHandle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CUipcEventHandle {
    pub reserved: [u8; 64],
}

/// `CUmemPoolPtrExportData`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CUmemPoolPtrExportData {
    pub reserved: [u8; 64],
}

/// `CUmemPoolProps`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUmemPoolProps {
    pub allocType: CUmemAllocationType,
    pub handleTypes: u32,
    pub location: CUmemLocation,
    pub win32SecurityAttributes: *mut c_void,
    pub maxSize: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}
