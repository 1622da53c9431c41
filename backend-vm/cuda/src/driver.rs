//! The driver's entry points.
//!
//! They are the functions that this crate's sources call (`build.rs`), with the table's signatures (`driver.idl`). Their
//! types are those of the guest's exports: enumerations are the integers that they are, since a guest's number may be
//! one that no header knows. The entry points are resolved here, all at once.

use libloading::Library;
use wormhole_api::ctypes::*;
use wormhole_device::{CuError, Result};

/// The library that every NVIDIA driver installs.
const LIBRARY: &str = "libcuda.so.1";

/// The oldest driver that is served, as `cuDriverGetVersion` says it.
const OLDEST: i32 = 12_040;

/// Why the driver cannot be used.
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

/// 12040 is CUDA 12.4.
fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// `Ok` for `CUDA_SUCCESS`.
fn check(result: CUresult) -> Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(CuError(result))
    }
}

macro_rules! entry_points {
    ($(fn $name:ident($($argument:ident: $kind:ty),*);)*) => {
        /// The driver. Each method is the function of that name of the CUDA driver API; enumerations
        /// are passed as the integers that they are. One that the driver lacks is `CUDA_ERROR_NOT_SUPPORTED`: some are
        /// younger than the oldest driver that is served, others have gone from headers.
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
            /// Loads the driver and finds every entry point. Initialises nothing.
            pub fn load() -> std::result::Result<Self, DriverError> {
                // SAFETY: loading the driver's library runs its constructors, which it is made for.
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
                    // SAFETY: passed on to the caller.
                    check(unsafe { (self.$name)($($argument),*) })
                }
            )*
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/entry_points.rs"));

impl Driver {
    /// Whether the driver has what every one since [`OLDEST`] has.
    fn check_version(&self) -> std::result::Result<(), DriverError> {
        let mut version = 0;
        // SAFETY: the pointer is good. A driver that does not even have this function leaves the 0.
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
