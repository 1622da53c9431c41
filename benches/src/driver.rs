//! The driver API, for benchmarks that are ordinary CUDA programs.
//!
//! Each function is found once, so that a timed call is only the call. Handles and addresses are integers, and results
//! are references.

use libloading::Library;
use wormhole_api::Access;
use wormhole_api::constants::{memory_allocation_type, memory_location};
use wormhole_api::ctypes::{CUmemAccessDesc, CUmemAllocationProp, CUmemLocation};

/// Failure of the driver library or of a call.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error(
        "the CUDA driver library cannot be opened; run this by `wormhole run`, or natively beside a driver"
    )]
    Library(#[source] libloading::Error),
    #[error("the CUDA driver library has no {0}")]
    Function(&'static str),
    #[error("{call} failed with CUresult {result}")]
    Cuda { call: &'static str, result: u32 },
}

/// A handle: the address of an opaque object of the driver's.
pub type Handle = usize;

macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The driver's functions. Handles and addresses that a benchmark gives to them must be live.
        #[derive(Debug)]
        #[allow(non_snake_case, reason = "the driver's own names")]
        pub struct Driver {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
            /// Keeps the functions mapped.
            _library: Library,
        }

        #[allow(non_snake_case, clippy::too_many_arguments, reason = "the driver's own names and parameters")]
        impl Driver {
            /// Opens the driver library.
            ///
            /// # Errors
            /// The library cannot be opened, or lacks a function.
            pub fn open() -> Result<Self, DriverError> {
                // SAFETY: the library's initialisers are those of a CUDA driver library.
                let library = unsafe { Library::new("libcuda.so.1") }.map_err(DriverError::Library)?;
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the function's C declaration (CUDA driver API).
                        let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|_| DriverError::Function(stringify!($name)))?
                    },)*
                    _library: library,
                })
            }

            $(
                /// # Errors
                /// The driver's.
                pub fn $name(&self, $($argument: $type),*) -> Result<(), DriverError> {
                    // SAFETY: references are valid, and so are handles and addresses, by this structure's contract.
                    match unsafe { (self.$name)($($argument),*) } {
                        0 => Ok(()),
                        result => Err(DriverError::Cuda { call: stringify!($name), result }),
                    }
                }
            )*
        }
    };
}

/// First device, as the location of memory.
const FIRST_DEVICE: CUmemLocation = CUmemLocation {
    r#type: memory_location::DEVICE,
    id: 0,
};

/// Pinned memory of the first device.
pub const MEMORY: CUmemAllocationProp = CUmemAllocationProp {
    r#type: memory_allocation_type::PINNED,
    requestedHandleTypes: 0,
    location: FIRST_DEVICE,
    win32HandleMetaData: std::ptr::null_mut(),
    compressionType: 0,
    gpuDirectRDMACapable: 0,
    usage: 0,
    reserved: [0; 4],
};

/// Reads and writes by the first device.
pub const ACCESS: CUmemAccessDesc = CUmemAccessDesc {
    location: FIRST_DEVICE,
    flags: Access::ReadWrite.to_wire(),
};

functions! {
    cuInit(flags: u32);
    cuDriverGetVersion(version: &mut i32);
    cuDeviceGet(device: &mut i32, ordinal: i32);
    cuDeviceGetAttribute(value: &mut i32, attribute: i32, device: i32);
    cuDevicePrimaryCtxRetain(context: &mut Handle, device: i32);
    cuCtxSetCurrent(context: Handle);
    cuCtxGetCurrent(context: &mut Handle);
    cuCtxSynchronize();
    cuModuleLoadData(module: &mut Handle, image: usize);
    cuModuleUnload(module: Handle);
    cuModuleGetFunction(function: &mut Handle, module: Handle, name: usize);
    cuLaunchKernel(
        function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: Handle, parameters: usize, extra: usize
    );
    cuLaunchHostFunc(stream: Handle, function: extern "C" fn(usize), data: usize);
    cuStreamCreate(stream: &mut Handle, flags: u32);
    cuStreamDestroy_v2(stream: Handle);
    cuStreamQuery(stream: Handle);
    cuStreamSynchronize(stream: Handle);
    cuStreamWriteValue64_v2(stream: Handle, address: u64, value: u64, flags: u32);
    cuStreamWaitValue64_v2(stream: Handle, address: u64, value: u64, flags: u32);
    cuStreamBeginCapture_v2(stream: Handle, mode: u32);
    cuStreamEndCapture(stream: Handle, graph: &mut Handle);
    cuGraphInstantiateWithFlags(executable: &mut Handle, graph: Handle, flags: u64);
    cuGraphLaunch(executable: Handle, stream: Handle);
    cuGraphExecDestroy(executable: Handle);
    cuGraphDestroy(graph: Handle);
    cuEventCreate(event: &mut Handle, flags: u32);
    cuEventDestroy_v2(event: Handle);
    cuEventRecord(event: Handle, stream: Handle);
    cuEventQuery(event: Handle);
    cuEventSynchronize(event: Handle);
    cuMemGetInfo_v2(free: &mut usize, total: &mut usize);
    cuMemAlloc_v2(address: &mut u64, bytes: usize);
    cuMemFree_v2(address: u64);
    cuMemAllocAsync(address: &mut u64, bytes: usize, stream: Handle);
    cuMemFreeAsync(address: u64, stream: Handle);
    cuMemHostAlloc(address: &mut usize, bytes: usize, flags: u32);
    cuMemFreeHost(address: usize);
    cuMemHostRegister_v2(address: usize, bytes: usize, flags: u32);
    cuMemHostUnregister(address: usize);
    cuMemAddressReserve(address: &mut u64, bytes: usize, alignment: usize, wanted: u64, flags: u64);
    cuMemAddressFree(address: u64, bytes: usize);
    cuMemCreate(memory: &mut u64, bytes: usize, properties: &CUmemAllocationProp, flags: u64);
    cuMemRelease(memory: u64);
    cuMemMap(address: u64, bytes: usize, offset: usize, memory: u64, flags: u64);
    cuMemUnmap(address: u64, bytes: usize);
    cuMemSetAccess(address: u64, bytes: usize, access: &CUmemAccessDesc, count: usize);
    cuMemcpyHtoD_v2(to: u64, from: usize, bytes: usize);
    cuMemcpyDtoH_v2(to: usize, from: u64, bytes: usize);
    cuMemcpyHtoDAsync_v2(to: u64, from: usize, bytes: usize, stream: Handle);
    cuMemcpyDtoHAsync_v2(to: usize, from: u64, bytes: usize, stream: Handle);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle);
    cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: Handle);
    cuPointerGetAttribute(value: &mut u64, attribute: u32, address: u64);
}
