//! Kernels of an image, and occupancy queries about them.

use std::ffi::c_void;

use wormhole_api::handle::{Library as LibraryKind, Module as ModuleKind};
use wormhole_api::{AvailableShared, ClusterOccupancy, ClusterQuestion, Items};

use super::launches::attributes_of;
use crate::device::attribute;
use crate::error::{CuError, Result};
use crate::object::module::{self, Loadable};
use crate::object::{context, function, stream};
use crate::parameter::{In, Out, Text};
use crate::types::{CUfunction, CUkernel, CUlaunchConfig, CUlibrary, CUmodule, DefaultStream};

fn count<K: Loadable>(place: Out<'_, u32>, image: *mut c_void) -> Result {
    let scope = context::scope_or_primary()?;
    place.not_null()?;
    let names = module::kernels::<K>(scope, image)?;
    place.put(u32::try_from(names.len()).unwrap_or(u32::MAX))
}

fn enumerate<K: Loadable>(places: Out<'_, [*mut c_void]>, image: *mut c_void) -> Result {
    let scope = context::scope_or_primary()?;
    places.not_null()?;
    module::find::<K>(image)?;
    match places.len() {
        0 => Ok(()),
        room => places.put_all(module::functions::<K>(scope, image, room)?),
    }
}

pub fn cuModuleGetFunctionCount(count: Out<'_, u32>, module: CUmodule) -> Result {
    self::count::<ModuleKind>(count, module)
}

pub fn cuModuleEnumerateFunctions(
    functions: Out<'_, [CUfunction]>,
    _numFunctions: u32,
    module: CUmodule,
) -> Result {
    enumerate::<ModuleKind>(functions, module)
}

pub fn cuLibraryGetKernelCount(count: Out<'_, u32>, library: CUlibrary) -> Result {
    self::count::<LibraryKind>(count, library)
}

pub fn cuLibraryEnumerateKernels(
    kernels: Out<'_, [CUkernel]>,
    _numKernels: u32,
    library: CUlibrary,
) -> Result {
    enumerate::<LibraryKind>(kernels, library)
}

/// Fails: no device shares functions with the guest's CPU (`CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS`), so no
/// library has unified functions.
pub fn cuLibraryGetUnifiedFunction(
    _fptr: Out<'_, *mut c_void>,
    library: CUlibrary,
    _symbol: Text<'_>,
) -> Result {
    context::scope_or_primary()?;
    module::find::<LibraryKind>(library)?;
    Err(CuError::INVALID_VALUE)
}

pub fn cuOccupancyAvailableDynamicSMemPerBlock(
    dynamicSmemSize: Out<'_, usize>,
    func: CUfunction,
    numBlocks: i32,
    blockSize: i32,
) -> Result {
    let scope = context::scope()?;
    if dynamicSmemSize.is_null() || numBlocks <= 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (function, _) = function::find_on(scope, func)?;
    let message = AvailableShared {
        function,
        blocks: numBlocks,
        block: blockSize,
    };
    let bytes = scope.session.request(&message, |reply| reply.bytes)?;
    dynamicSmemSize.put(usize::try_from(bytes).unwrap_or(usize::MAX))
}

fn clusters(
    place: Out<'_, i32>,
    function: CUfunction,
    config: In<'_, CUlaunchConfig>,
    question: ClusterQuestion,
) -> Result {
    if place.is_null() || config.is_null() || function.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let scope = context::scope()?;
    let (function, _) = function::find_on(scope, function)?;
    let config = config.get()?;
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
    let attributes = attributes_of(&config)?;
    let message = ClusterOccupancy {
        function,
        question,
        grid,
        block: [config.blockDimX, config.blockDimY, config.blockDimZ],
        shared: config.sharedMemBytes,
        attributes: Items::new(attributes.plain()),
    };
    let count = scope.session.request(&message, |reply| reply.count)?;
    place.put(count)
}

pub fn cuOccupancyMaxPotentialClusterSize(
    clusterSize: Out<'_, i32>,
    func: CUfunction,
    config: In<'_, CUlaunchConfig>,
) -> Result {
    clusters(clusterSize, func, config, ClusterQuestion::GreatestSize)
}

pub fn cuOccupancyMaxActiveClusters(
    numClusters: Out<'_, i32>,
    func: CUfunction,
    config: In<'_, CUlaunchConfig>,
) -> Result {
    clusters(numClusters, func, config, ClusterQuestion::ActiveClusters)
}
