//! The driver API, for benchmarks that are ordinary CUDA programs.
//!
//! `build.rs` finds the functions that the benchmarks call and declares them with the table's signatures (`driver.idl`).
//! Each function is found once, so that a timed call is only the call. Handles and addresses are integers, and results
//! are references ([`Argument`]).

use std::ffi::CStr;

use libloading::Library;
use wormhole_api::Access;
use wormhole_api::constants::{memory_allocation_type, memory_location};
use wormhole_api::ctypes::*;

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

/// Argument as a benchmark has it, for a parameter of the C type `T`.
pub trait Argument<T> {
    fn into_c(self) -> T;
}

impl<T> Argument<T> for T {
    fn into_c(self) -> T {
        self
    }
}

/// Handle, or address of memory of the host.
impl Argument<*mut c_void> for usize {
    fn into_c(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self)
    }
}

impl Argument<*const c_void> for usize {
    fn into_c(self) -> *const c_void {
        std::ptr::with_exposed_provenance(self)
    }
}

/// Result of a call.
impl<T> Argument<*mut T> for &mut T {
    fn into_c(self) -> *mut T {
        self
    }
}

/// Handle or address of memory of the host, as a result of a call.
impl Argument<*mut *mut c_void> for &mut usize {
    fn into_c(self) -> *mut *mut c_void {
        std::ptr::from_mut(self).cast()
    }
}

/// Structure that a call reads.
impl<T> Argument<*const T> for &T {
    fn into_c(self) -> *const T {
        self
    }
}

/// Text: a name.
impl Argument<*const c_char> for &CStr {
    fn into_c(self) -> *const c_char {
        self.as_ptr()
    }
}

/// Text: PTX.
impl Argument<*const c_void> for &CStr {
    fn into_c(self) -> *const c_void {
        self.as_ptr().cast()
    }
}

/// Room for text that a call writes.
impl<const N: usize> Argument<*mut c_char> for &mut [c_char; N] {
    fn into_c(self) -> *mut c_char {
        self.as_mut_ptr()
    }
}

macro_rules! entry_points {
    ($(fn $name:ident($($argument:ident: $kind:ty),*);)*) => {
        /// The driver's functions. Handles and addresses that a benchmark gives to them must be live.
        #[derive(Debug)]
        #[allow(non_snake_case, reason = "the driver's own names")]
        pub struct Driver {
            $($name: unsafe extern "C" fn($($kind),*) -> CUresult,)*
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
                #[inline]
                pub fn $name(&self, $($argument: impl Argument<$kind>),*) -> Result<(), DriverError> {
                    // SAFETY: references are valid, and so are handles and addresses, by this structure's contract.
                    match unsafe { (self.$name)($($argument.into_c()),*) } {
                        0 => Ok(()),
                        result => Err(DriverError::Cuda { call: stringify!($name), result }),
                    }
                }
            )*
        }
    };
}

impl Driver {
    /// Returns the first device's name, with the version of CUDA.
    ///
    /// # Errors
    /// The driver's.
    pub fn device(&self) -> Result<String, DriverError> {
        let (mut name, mut version) = ([0; 256], 0);
        self.cuDeviceGetName(&mut name, 256, 0)?;
        self.cuDriverGetVersion(&mut version)?;
        let name = name.map(c_char::cast_unsigned);
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        let (major, minor) = (version / 1000, version % 1000 / 10);
        Ok(format!("{}, CUDA {major}.{minor}", name.to_string_lossy()))
    }
}

include!(concat!(env!("OUT_DIR"), "/entry_points.rs"));

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
