//! The driver's entry points.
//!
//! Their signatures are the table's (`driver.idl`), by `entry_points.txt`, and their types those of the guest's exports:
//! enumerations are the integers that they are, since a guest's number may be one that no header knows. The entry
//! points are resolved here, all at once.

use libloading::Library;
use wormhole_api::ctypes::*;
use wormhole_device::{CuError, Result};

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
fn check(result: CUresult) -> Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(CuError(result))
    }
}

macro_rules! entry_points {
    (
        $(fn $name:ident($($argument:ident: $kind:ty),*);)*
        $(optional fn $optional:ident($($given:ident: $taken:ty),*);)*
    ) => {
        /// The driver. Each method is the function of that name of the CUDA driver API; enumerations
        /// are passed as the integers that they are.
        ///
        /// # Safety
        /// All methods: pointers and handles are valid as the driver API demands.
        #[allow(non_snake_case, reason = "the driver's own names")]
        pub struct Driver {
            $($name: unsafe extern "C" fn($($kind),*) -> CUresult,)*
            $($optional: Option<unsafe extern "C" fn($($taken),*) -> CUresult>,)*
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
                let mut missing = Vec::new();
                $(
                    // SAFETY: the signature is that of the CUDA driver API.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($kind),*) -> CUresult>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        )
                    };
                    let $name = $name.map(|symbol| *symbol).ok();
                    if $name.is_none() {
                        missing.push(stringify!($name));
                    }
                )*
                $(
                    // SAFETY: as above.
                    let $optional = unsafe {
                        library.get::<unsafe extern "C" fn($($taken),*) -> CUresult>(
                            concat!(stringify!($optional), "\0").as_bytes(),
                        )
                    };
                    let $optional = $optional.map(|symbol| *symbol).ok();
                )*
                match ($($name,)*) {
                    ($(Some($name),)*) => Ok(Self {
                        $($name,)*
                        $($optional,)*
                        _library: library,
                    }),
                    _ => Err(DriverError::TooOld { missing }),
                }
            }

            $(
                #[inline]
                pub unsafe fn $name(&self, $($argument: $kind),*) -> Result<()> {
                    // SAFETY: passed on to the caller.
                    check(unsafe { (self.$name)($($argument),*) })
                }
            )*
            $(
                pub unsafe fn $optional(&self, $($given: $taken),*) -> Result<()> {
                    let function = self.$optional.ok_or(CuError::NOT_SUPPORTED)?;
                    // SAFETY: passed on to the caller.
                    check(unsafe { function($($given),*) })
                }
            )*
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/entry_points.rs"));

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}
