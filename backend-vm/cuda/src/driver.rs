//! The driver's entry points.
//!
//! The types are cudarc's, but for descriptions with enumerations in them: a guest's number may be none of
//! those that cudarc knows. The entry points are resolved here, all at once: cudarc's own wrappers
//! panic when a symbol is absent, and hold results in an enum, which cannot hold the result codes of a
//! driver that is newer than the enum.

use std::ffi::{CStr, c_char, c_void};

use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS_v2, CUDA_MEMSET_NODE_PARAMS_v1, CUcontext, CUevent, CUfunction,
    CUgraph, CUgraphEdgeData, CUgraphExec, CUgraphExecUpdateResultInfo_v1, CUgraphNode,
    CUipcMemHandle, CUkernel, CUlaunchConfig, CUlibrary, CUlinkState, CUmemAccessDesc,
    CUmemAllocationProp, CUmemPoolProps, CUmemPoolPtrExportData, CUmemoryPool, CUmodule, CUstream,
    CUuuid,
};
use libloading::Library;
use wormhole_api::ctypes::{
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_MEMCPY3D, CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC,
    CUDA_TEXTURE_DESC, CUarray, CUgraphNodeParams, CUmipmappedArray, CUsurfObject, CUtexObject,
};
use wormhole_device::{CuError, Result};

use crate::graph::MemoryNodeParameters;

/// The library that every NVIDIA driver installs.
const LIBRARY: &str = "libcuda.so.1";

/// Why the driver cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("no CUDA driver: {LIBRARY} cannot be loaded; is the NVIDIA driver installed?")]
    Absent(#[source] libloading::Error),
    #[error(
        "the CUDA driver has no {}; Wormhole needs a driver for CUDA 12.4 (550) or later",
        missing.join(", ")
    )]
    TooOld { missing: Vec<&'static str> },
}

/// `Ok` for `CUDA_SUCCESS`.
pub fn check(result: u32) -> Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(CuError(result))
    }
}

macro_rules! entry_points {
    ($(fn $name:ident($($argument:ident: $kind:ty),*);)*) => {
        /// The driver. Each method is the function of that name of the CUDA driver API; enumerations
        /// are passed as the integers that they are.
        ///
        /// # Safety
        /// All methods: pointers and handles are valid as the driver API demands.
        #[allow(non_snake_case, reason = "the driver's own names")]
        pub struct Driver {
            $($name: unsafe extern "C" fn($($kind),*) -> u32,)*
            /// Keeps the functions mapped.
            library: Library,
        }

        #[allow(
            non_snake_case,
            clippy::missing_safety_doc,
            clippy::too_many_arguments,
            reason = "the driver's own signatures; safety is stated on the type"
        )]
        impl Driver {
            /// Loads the driver and finds every entry point. Initialises nothing.
            pub fn load() -> std::result::Result<Self, DriverError> {
                // SAFETY: loading the driver's library runs its constructors, which it is made for.
                let library = unsafe { Library::new(LIBRARY) }.map_err(DriverError::Absent)?;
                let mut missing = Vec::new();
                $(
                    // SAFETY: the signature is that of the CUDA driver API.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($kind),*) -> u32>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        )
                    };
                    let $name = $name.map(|symbol| *symbol).ok();
                    if $name.is_none() {
                        missing.push(stringify!($name));
                    }
                )*
                match ($($name,)*) {
                    ($(Some($name),)*) => Ok(Self { $($name,)* library }),
                    _ => Err(DriverError::TooOld { missing }),
                }
            }

            /// A function of the type that `F` says, which only newer drivers have.
            ///
            /// # Safety
            /// The function has that type.
            pub unsafe fn later<F: Copy>(&self, name: &CStr) -> Option<F> {
                // SAFETY: passed on to the caller.
                unsafe { self.library.get::<F>(name.to_bytes_with_nul()) }
                    .map(|symbol| *symbol)
                    .ok()
            }

            $(
                #[inline]
                pub unsafe fn $name(&self, $($argument: $kind),*) -> Result<()> {
                    // SAFETY: passed on to the caller.
                    check(unsafe { (self.$name)($($argument),*) })
                }
            )*
        }
    };
}

entry_points! {
    fn cuInit(flags: u32);
    fn cuDriverGetVersion(version: *mut i32);
    fn cuDeviceGet(device: *mut i32, ordinal: i32);
    fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32);
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: i32);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32);
    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: i32);
    fn cuDevicePrimaryCtxRelease_v2(device: i32);
    fn cuDevicePrimaryCtxReset_v2(device: i32);
    fn cuCtxSetCurrent(context: CUcontext);
    fn cuCtxSynchronize();
    fn cuDeviceGetP2PAttribute(value: *mut i32, attribute: u32, source: i32, destination: i32);
    fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32);
    fn cuCtxDisablePeerAccess(peer: CUcontext);
    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32);
    fn cuCtxGetLimit(value: *mut usize, limit: u32);
    fn cuCtxSetLimit(limit: u32, value: usize);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize);
    fn cuMemFree_v2(address: u64);
    fn cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: i32);
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps);
    fn cuMemPoolDestroy(pool: CUmemoryPool);
    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize);
    fn cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: u32, value: *mut c_void);
    fn cuMemPoolSetAccess(pool: CUmemoryPool, descriptions: *const CUmemAccessDesc, count: usize);
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: u32, value: *mut c_void);
    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: CUmemoryPool, stream: CUstream);
    fn cuMemFreeAsync(address: u64, stream: CUstream);
    fn cuMemPoolExportToShareableHandle(handle: *mut c_void, pool: CUmemoryPool, kind: u32, flags: u64);
    fn cuMemPoolImportFromShareableHandle(pool: *mut CUmemoryPool, handle: *mut c_void, kind: u32, flags: u64);
    fn cuMemPoolExportPointer(data: *mut CUmemPoolPtrExportData, address: u64);
    fn cuMemPoolImportPointer(address: *mut u64, pool: CUmemoryPool, data: *mut CUmemPoolPtrExportData);
    fn cuMemExportToShareableHandle(handle: *mut c_void, memory: u64, kind: u32, flags: u64);
    fn cuMemImportFromShareableHandle(memory: *mut u64, handle: *mut c_void, kind: u32);
    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64);
    fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: u64);
    fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: CUipcMemHandle, flags: u32);
    fn cuIpcCloseMemHandle(address: u64);
    fn cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const CUmemAllocationProp, option: u32);
    fn cuMemAddressReserve(address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    fn cuMemAddressFree(address: u64, bytes: usize);
    fn cuMemCreate(memory: *mut u64, bytes: usize, properties: *const CUmemAllocationProp, flags: u64);
    fn cuMemRelease(memory: u64);
    fn cuMemMap(address: u64, bytes: usize, offset: usize, memory: u64, flags: u64);
    fn cuMemUnmap(address: u64, bytes: usize);
    fn cuMemSetAccess(address: u64, bytes: usize, descriptions: *const CUmemAccessDesc, count: usize);
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: u32);
    fn cuMemHostUnregister(address: *mut c_void);
    fn cuMemHostGetDevicePointer_v2(device: *mut u64, host: *mut c_void, flags: u32);
    fn cuMemcpyAsync(destination: u64, source: u64, bytes: usize, stream: CUstream);
    fn cuMemcpyHtoDAsync_v2(destination: u64, source: *const c_void, bytes: usize, stream: CUstream);
    fn cuMemsetD8Async(destination: u64, value: u8, count: usize, stream: CUstream);
    fn cuMemsetD16Async(destination: u64, value: u16, count: usize, stream: CUstream);
    fn cuMemsetD32Async(destination: u64, value: u32, count: usize, stream: CUstream);
    fn cuMemsetD2D8Async(destination: u64, pitch: usize, value: u8, width: usize, height: usize, stream: CUstream);
    fn cuMemsetD2D16Async(destination: u64, pitch: usize, value: u16, width: usize, height: usize, stream: CUstream);
    fn cuMemsetD2D32Async(destination: u64, pitch: usize, value: u32, width: usize, height: usize, stream: CUstream);
    fn cuMemcpy3DPeerAsync(copy: *const CUDA_MEMCPY3D, stream: CUstream);
    fn cuMemcpy3DAsync_v2(copy: *const CUDA_MEMCPY3D, stream: CUstream);
    fn cuArray3DCreate_v2(array: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR);
    fn cuArrayDestroy(array: CUarray);
    fn cuMipmappedArrayCreate(mipmap: *mut CUmipmappedArray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR, levels: u32);
    fn cuMipmappedArrayGetLevel(array: *mut CUarray, mipmap: CUmipmappedArray, level: u32);
    fn cuMipmappedArrayDestroy(mipmap: CUmipmappedArray);
    fn cuTexObjectCreate(texture: *mut CUtexObject, resource: *const CUDA_RESOURCE_DESC, sampling: *const CUDA_TEXTURE_DESC, view: *const CUDA_RESOURCE_VIEW_DESC);
    fn cuTexObjectDestroy(texture: CUtexObject);
    fn cuSurfObjectCreate(surface: *mut CUsurfObject, resource: *const CUDA_RESOURCE_DESC);
    fn cuSurfObjectDestroy(surface: CUsurfObject);
    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: u32, priority: i32);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamQuery(stream: CUstream);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    fn cuStreamWriteValue64_v2(stream: CUstream, address: u64, value: u64, flags: u32);
    fn cuStreamBatchMemOp_v2(stream: CUstream, count: u32, operations: *mut [u64; 6], flags: u32);
    fn cuStreamSetAttribute(stream: CUstream, attribute: u32, value: *const [u8; 64]);
    fn cuGraphCreate(graph: *mut CUgraph, flags: u32);
    fn cuGraphDestroy(graph: CUgraph);
    fn cuGraphAddKernelNode_v2(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, parameters: *const CUDA_KERNEL_NODE_PARAMS_v2);
    fn cuGraphKernelNodeSetAttribute(node: CUgraphNode, attribute: u32, value: *const [u8; 64]);
    fn cuGraphAddMemcpyNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, parameters: *const CUDA_MEMCPY3D, context: CUcontext);
    fn cuGraphAddMemsetNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, parameters: *const CUDA_MEMSET_NODE_PARAMS_v1, context: CUcontext);
    fn cuGraphAddBatchMemOpNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, parameters: *const MemoryNodeParameters);
    fn cuGraphAddEventRecordNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, event: CUevent);
    fn cuGraphAddEventWaitNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, event: CUevent);
    fn cuGraphAddEmptyNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize);
    fn cuGraphConditionalHandleCreate(handle: *mut u64, graph: CUgraph, context: CUcontext, default: u32, flags: u32);
    fn cuGraphAddNode_v2(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, data: *const CUgraphEdgeData, count: usize, parameters: *mut CUgraphNodeParams);
    fn cuGraphAddDependencies_v2(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, data: *const CUgraphEdgeData, count: usize);
    fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: u64);
    fn cuGraphExecUpdate_v2(executable: CUgraphExec, graph: CUgraph, info: *mut CUgraphExecUpdateResultInfo_v1);
    fn cuGraphExecDestroy(executable: CUgraphExec);
    fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream);
    fn cuGraphUpload(executable: CUgraphExec, stream: CUstream);
    fn cuGraphNodeSetEnabled(executable: CUgraphExec, node: CUgraphNode, enabled: u32);
    fn cuEventCreate(event: *mut CUevent, flags: u32);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32);
    fn cuEventQuery(event: CUevent);
    fn cuEventSynchronize(event: CUevent);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    fn cuLinkCreate_v2(count: u32, options: *mut u32, values: *mut *mut c_void, state: *mut CUlinkState);
    fn cuLinkAddData_v2(state: CUlinkState, kind: u32, data: *mut c_void, bytes: usize, name: *const c_char, count: u32, options: *mut u32, values: *mut *mut c_void);
    fn cuLinkComplete(state: CUlinkState, image: *mut *mut c_void, bytes: *mut usize);
    fn cuLinkDestroy(state: CUlinkState);
    fn cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, count: u32, options: *mut u32, values: *mut *mut c_void);
    fn cuModuleUnload(module: CUmodule);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuModuleGetGlobal_v2(address: *mut u64, bytes: *mut usize, module: CUmodule, name: *const c_char);
    fn cuLibraryLoadData(library: *mut CUlibrary, image: *const c_void, jit_options: *mut u32, jit_values: *mut *mut c_void, jit_count: u32, options: *mut u32, values: *mut *mut c_void, count: u32);
    fn cuLibraryUnload(library: CUlibrary);
    fn cuLibraryGetKernel(kernel: *mut CUkernel, library: CUlibrary, name: *const c_char);
    fn cuLibraryGetGlobal(address: *mut u64, bytes: *mut usize, library: CUlibrary, name: *const c_char);
    fn cuKernelGetFunction(function: *mut CUfunction, kernel: CUkernel);
    fn cuFuncGetParamInfo(function: CUfunction, index: usize, offset: *mut usize, size: *mut usize);
    fn cuFuncGetAttribute(value: *mut i32, attribute: i32, function: CUfunction);
    fn cuFuncSetAttribute(function: CUfunction, attribute: i32, value: i32);
    fn cuFuncSetCacheConfig(function: CUfunction, config: u32);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks: *mut i32, function: CUfunction, block: i32, shared: usize, flags: u32);
    fn cuModuleGetFunctionCount(count: *mut u32, module: CUmodule);
    fn cuModuleEnumerateFunctions(functions: *mut CUfunction, count: u32, module: CUmodule);
    fn cuFuncGetName(name: *mut *const c_char, function: CUfunction);
    fn cuLibraryGetKernelCount(count: *mut u32, library: CUlibrary);
    fn cuLibraryEnumerateKernels(kernels: *mut CUkernel, count: u32, library: CUlibrary);
    fn cuKernelGetName(name: *mut *const c_char, kernel: CUkernel);
    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: *mut usize, function: CUfunction, blocks: i32, block: i32);
    fn cuOccupancyMaxPotentialClusterSize(blocks: *mut i32, function: CUfunction, config: *const CUlaunchConfig);
    fn cuOccupancyMaxActiveClusters(clusters: *mut i32, function: CUfunction, config: *const CUlaunchConfig);
    fn cuTensorMapEncodeTiled(map: *mut c_void, data_type: u32, rank: u32, address: *mut c_void, dimensions: *const u64, strides: *const u64, tile: *const u32, steps: *const u32, interleave: u32, swizzle: u32, promotion: u32, fill: u32);
    fn cuTensorMapEncodeIm2col(map: *mut c_void, data_type: u32, rank: u32, address: *mut c_void, dimensions: *const u64, strides: *const u64, lower: *const i32, upper: *const i32, channels: u32, pixels: u32, steps: *const u32, interleave: u32, swizzle: u32, promotion: u32, fill: u32);
    fn cuTensorMapReplaceAddress(map: *mut c_void, address: *mut c_void);
    fn cuCtxResetPersistingL2Cache();
    fn cuLaunchKernelEx(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void);
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}
