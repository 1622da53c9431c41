//! Entry points of the driver.
//!
//! `build.rs` finds the functions that this crate's sources call and declares them with the table's signatures
//! (`driver.idl`). Types are those of the guest's exports: enumerations are plain integers, since a guest may pass a
//! value that no header knows. All entry points are resolved here at once.

use libloading::Library;
use wormhole_api::ctypes::*;
use wormhole_device::{CuError, Result};

/// Library that every NVIDIA driver installs.
const LIBRARY: &str = "libcuda.so.1";

/// Oldest supported driver, as `cuDriverGetVersion` reports it.
const OLDEST: i32 = 12_040;

/// Reason why the driver cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("no CUDA driver: {LIBRARY} cannot be loaded; is the NVIDIA driver installed?")]
    Absent(#[source] libloading::Error),
    #[error(
        "the CUDA driver is one for CUDA {}; Wormhole needs one for CUDA {} (550) or later",
        version_text(*version),
        version_text(OLDEST)
    )]
    TooOld { version: i32 },
}

/// Formats a CUDA version: 12040 is CUDA 12.4.
fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Converts a status: `Ok` for `CUDA_SUCCESS`.
fn check(result: CUresult) -> Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(CuError(result))
    }
}

macro_rules! entry_points {
    ($(fn $name:ident($($argument:ident: $kind:ty),*);)*) => {
        /// CUDA driver. Each method is the function of the CUDA driver API of the same name; enumerations are plain
        /// integers. A function that the driver lacks returns `CUDA_ERROR_NOT_SUPPORTED`: some are newer than the
        /// oldest supported driver, others have been removed from headers.
        ///
        /// # Safety
        /// All methods: pointers and handles are valid as the driver API demands.
        #[allow(non_snake_case, reason = "the driver's own names")]
        pub struct Driver {
            $($name: unsafe extern "C" fn($($kind),*) -> CUresult,)*
            /// Keeps the functions mapped.
            _library: Library,
        }

        #[allow(
            non_snake_case,
            clippy::missing_safety_doc,
            clippy::too_many_arguments,
            reason = "the driver's own signatures; safety is stated on the type"
        )]
        impl Driver {
            /// Loads the driver and resolves every entry point. Initialises nothing.
            pub fn load() -> std::result::Result<Self, DriverError> {
                // SAFETY: loading the driver's library runs its constructors, as intended.
                let library = unsafe { Library::new(LIBRARY) }.map_err(DriverError::Absent)?;
                let driver = Self {
                    $($name: {
                        unsafe extern "C" fn missing($(_: $kind),*) -> CUresult {
                            CuError::NOT_SUPPORTED.0
                        }
                        // SAFETY: the signature is that of the CUDA driver API.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($kind),*) -> CUresult>(
                                concat!(stringify!($name), "\0").as_bytes(),
                            )
                        };
                        found.map_or(missing, |symbol| *symbol)
                    },)*
                    _library: library,
                };
                driver.check_version().map(|()| driver)
            }

            $(
                #[inline]
                pub unsafe fn $name(&self, $($argument: $kind),*) -> Result<()> {
                    // SAFETY: the caller fulfils the contract.
                    check(unsafe { (self.$name)($($argument),*) })
                }
            )*
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/entry_points.rs"));

impl Driver {
    /// Checks that the driver is at least [`OLDEST`].
    fn check_version(&self) -> std::result::Result<(), DriverError> {
        let mut version = 0;
        // SAFETY: the pointer is good. A driver without this function leaves the 0.
        let _ = unsafe { self.cuDriverGetVersion(&raw mut version) };
        if version < OLDEST {
            return Err(DriverError::TooOld { version });
        }
        Ok(())
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}
