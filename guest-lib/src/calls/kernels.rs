//! What there is in an image, and how its kernels fit the device.

use std::ffi::{c_char, c_void};

use wormhole_api::handle::{Library as LibraryKind, Module as ModuleKind};
use wormhole_api::{AvailableShared, ClusterOccupancy, ClusterQuestion, Items};

use super::{body, put};
use crate::device::attribute;
use crate::error::{CuError, Result};
use crate::launch::Attributes;
use crate::module::{self, Loadable};
use crate::types::{
    CUfunction, CUkernel, CUlaunchConfig, CUlibrary, CUmodule, CUresult, DefaultStream,
};
use crate::{context, function, stream};

/// # Safety
/// `place` is null or writable.
unsafe fn count<K: Loadable>(place: *mut u32, image: *mut c_void) -> Result {
    let scope = context::scope_or_primary()?;
    if place.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let names = module::kernels::<K>(scope, image)?;
    // SAFETY: as the caller promises.
    unsafe { put(place, u32::try_from(names.len()).unwrap_or(u32::MAX)) }
}

/// # Safety
/// `places` is null or has room for `room` functions.
unsafe fn enumerate<K: Loadable>(
    places: *mut *mut c_void,
    room: u32,
    image: *mut c_void,
) -> Result {
    let scope = context::scope_or_primary()?;
    if places.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    module::find::<K>(image)?;
    if room == 0 {
        return Ok(());
    }
    let found = module::functions::<K>(scope, image, room as usize)?;
    for (index, function) in found.into_iter().enumerate() {
        // SAFETY: as the caller promises.
        unsafe { places.add(index).write(function) };
    }
    Ok(())
}

pub unsafe fn cuModuleGetFunctionCount(count: *mut u32, module: CUmodule) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { self::count::<ModuleKind>(count, module) } }
}

pub unsafe fn cuModuleEnumerateFunctions(
    functions: *mut CUfunction,
    numFunctions: u32,
    module: CUmodule,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { enumerate::<ModuleKind>(functions, numFunctions, module) } }
}

pub unsafe fn cuLibraryGetKernelCount(count: *mut u32, library: CUlibrary) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { self::count::<LibraryKind>(count, library) } }
}

pub unsafe fn cuLibraryEnumerateKernels(
    kernels: *mut CUkernel,
    numKernels: u32,
    library: CUlibrary,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { enumerate::<LibraryKind>(kernels, numKernels, library) } }
}

/// No device shares functions with the guest's processor (`CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS`), so
/// no library has any.
pub unsafe fn cuLibraryGetUnifiedFunction(
    _fptr: *mut *mut c_void,
    library: CUlibrary,
    _symbol: *const c_char,
) -> CUresult {
    body! {
        context::scope_or_primary()?;
        module::find::<LibraryKind>(library)?;
        Err(CuError::INVALID_VALUE)
    }
}

pub unsafe fn cuOccupancyAvailableDynamicSMemPerBlock(
    dynamicSmemSize: *mut usize,
    func: CUfunction,
    numBlocks: i32,
    blockSize: i32,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if dynamicSmemSize.is_null() || numBlocks <= 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let (function, _) = function::find_on(scope, func)?;
        let message = AvailableShared { function, blocks: numBlocks, block: blockSize };
        let bytes = scope.session.request(&message, |reply| reply.bytes)?;
        // SAFETY: as the caller promises.
        unsafe { put(dynamicSmemSize, usize::try_from(bytes).unwrap_or(usize::MAX)) }
    }
}

/// # Safety
/// `place` is null or writable, `config` null or a configuration.
unsafe fn clusters(
    place: *mut i32,
    function: CUfunction,
    config: *const CUlaunchConfig,
    question: ClusterQuestion,
) -> Result {
    if place.is_null() || config.is_null() || function.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let scope = context::scope()?;
    let (function, _) = function::find_on(scope, function)?;
    // SAFETY: not null, so a configuration.
    let config = unsafe { config.read() };
    stream::resolve(scope, DefaultStream::Legacy, config.hStream)?;
    let grid = [config.gridDimX, config.gridDimY, config.gridDimZ];
    let most = |axis| {
        scope
            .session
            .device()
            .value(attribute::MAX_GRID_DIM_X + axis)
    };
    if (0..)
        .zip(grid)
        .any(|(axis, size)| i64::from(size) > i64::from(most(axis)))
    {
        return Err(CuError::INVALID_VALUE);
    }
    let list = match config.numAttrs as usize {
        0 => &[],
        _ if config.attrs.is_null() => return Err(CuError::INVALID_VALUE),
        // SAFETY: the program vouches for that many attributes.
        count => unsafe { std::slice::from_raw_parts(config.attrs, count) },
    };
    let attributes = Attributes::read(list)?;
    let message = ClusterOccupancy {
        function,
        question,
        grid,
        block: [config.blockDimX, config.blockDimY, config.blockDimZ],
        shared: config.sharedMemBytes,
        attributes: Items::new(attributes.plain()),
    };
    let count = scope.session.request(&message, |reply| reply.count)?;
    // SAFETY: as the caller promises.
    unsafe { put(place, count) }
}

pub unsafe fn cuOccupancyMaxPotentialClusterSize(
    clusterSize: *mut i32,
    func: CUfunction,
    config: *const CUlaunchConfig,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { clusters(clusterSize, func, config, ClusterQuestion::GreatestSize) } }
}

pub unsafe fn cuOccupancyMaxActiveClusters(
    numClusters: *mut i32,
    func: CUfunction,
    config: *const CUlaunchConfig,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { clusters(numClusters, func, config, ClusterQuestion::ActiveClusters) } }
}
