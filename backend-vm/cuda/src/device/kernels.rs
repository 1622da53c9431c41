//! Kernel names, cluster occupancy and tensor maps.

use std::ffi::CStr;
use std::ptr;

use wormhole_api::ctypes::{CUlaunchConfig, CUtensorMap};
use wormhole_api::limits::TENSOR_RANKS;
use wormhole_device::{
    ClusterLaunch, CuError, EncodedTensorMap, Kernels, LaunchAttribute, RawModule, Result,
    TensorMap, TensorMapMode,
};

use super::{CudaDevice, function};
use crate::images::Loaded;

impl CudaDevice {
    /// Calls `each` with the names of functions or kernels, by their handles.
    fn names<T>(
        &self,
        handles: &[*mut T],
        name: impl Fn(*mut T, *mut *const std::ffi::c_char) -> Result<()>,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        for handle in handles.iter().filter(|handle| !handle.is_null()) {
            let mut text = ptr::null();
            name(*handle, &raw mut text)?;
            if text.is_null() {
                return Err(CuError::UNKNOWN);
            }
            // SAFETY: the driver's name of a function is a string that lives as long as its image,
            // which the caller keeps loaded.
            let text = unsafe { CStr::from_ptr(text) };
            each(text.to_bytes());
        }
        Ok(())
    }
}

/// Launch configuration on the default stream. It points to the attributes.
pub(super) fn configuration(
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    attributes: &[LaunchAttribute],
) -> Result<CUlaunchConfig> {
    Ok(CUlaunchConfig {
        gridDimX: grid[0],
        gridDimY: grid[1],
        gridDimZ: grid[2],
        blockDimX: block[0],
        blockDimY: block[1],
        blockDimZ: block[2],
        sharedMemBytes: shared,
        hStream: ptr::null_mut(),
        // `LaunchAttribute` has the layout of `CUlaunchAttribute`.
        attrs: attributes.as_ptr().cast_mut().cast(),
        numAttrs: u32::try_from(attributes.len()).map_err(|_| CuError::INVALID_VALUE)?,
    })
}

/// Launch configuration for queries.
fn queried(launch: &ClusterLaunch<'_>) -> Result<CUlaunchConfig> {
    configuration(launch.grid, launch.block, launch.shared, launch.attributes)
}

impl Kernels for CudaDevice {
    fn kernel_names(&self, module: RawModule, each: &mut dyn FnMut(&[u8])) -> Result<()> {
        let mut count = 0;
        match self.image(module)? {
            Loaded::Module(module) => {
                // SAFETY: the image is loaded, the place is writable.
                unsafe {
                    self.driver()
                        .cuModuleGetFunctionCount(&raw mut count, module)?;
                }
                let mut functions = vec![ptr::null_mut(); count as usize];
                // SAFETY: the image is loaded, and there are places for as many functions.
                unsafe {
                    self.driver().cuModuleEnumerateFunctions(
                        functions.as_mut_ptr(),
                        count,
                        module,
                    )?;
                }
                // SAFETY: the driver has just given the functions; the place is writable.
                let name_of =
                    |function, name| unsafe { self.driver().cuFuncGetName(name, function) };
                self.names(&functions, name_of, each)
            }
            Loaded::Library(library) => {
                // SAFETY: the image is loaded, the place is writable.
                unsafe {
                    self.driver()
                        .cuLibraryGetKernelCount(&raw mut count, library)?;
                }
                let mut kernels = vec![ptr::null_mut(); count as usize];
                // SAFETY: the image is loaded, and there are places for as many kernels.
                unsafe {
                    self.driver().cuLibraryEnumerateKernels(
                        kernels.as_mut_ptr(),
                        count,
                        library,
                    )?;
                }
                // SAFETY: the driver has just given the kernels; the place is writable.
                let name_of = |kernel, name| unsafe { self.driver().cuKernelGetName(name, kernel) };
                self.names(&kernels, name_of, each)
            }
        }
    }

    fn greatest_cluster(&self, launch: &ClusterLaunch<'_>) -> Result<i32> {
        let configuration = queried(launch)?;
        let mut blocks = 0;
        // SAFETY: the caller passes a live function; the pointers are good.
        unsafe {
            self.driver().cuOccupancyMaxPotentialClusterSize(
                &raw mut blocks,
                function(launch.function),
                &raw const configuration,
            )
        }?;
        Ok(blocks)
    }

    fn active_clusters(&self, launch: &ClusterLaunch<'_>) -> Result<i32> {
        let configuration = queried(launch)?;
        let mut clusters = 0;
        // SAFETY: the caller passes a live function; the pointers are good.
        unsafe {
            self.driver().cuOccupancyMaxActiveClusters(
                &raw mut clusters,
                function(launch.function),
                &raw const configuration,
            )
        }?;
        Ok(clusters)
    }

    fn encode_tensor_map(&self, map: &TensorMap) -> Result<EncodedTensorMap> {
        let mut encoded = EncodedTensorMap(CUtensorMap { opaque: [0; 128] });
        let place = &raw mut encoded.0;
        let (dimensions, strides) = (map.dimensions.as_ptr(), map.strides.as_ptr());
        let steps = map.steps.as_ptr();
        if map.rank > TENSOR_RANKS {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: the place is a tensor map with the driver's alignment; the arrays have as many entries as a
        // rank may ask for; the driver encodes the address and does not follow it.
        unsafe {
            match map.mode {
                TensorMapMode::Tiled { tile } => self.driver().cuTensorMapEncodeTiled(
                    place,
                    map.data_type,
                    map.rank,
                    map.address,
                    dimensions,
                    strides,
                    tile.as_ptr(),
                    steps,
                    map.interleave,
                    map.swizzle,
                    map.promotion,
                    map.fill,
                ),
                TensorMapMode::Im2col {
                    lower,
                    upper,
                    channels,
                    pixels,
                } => self.driver().cuTensorMapEncodeIm2col(
                    place,
                    map.data_type,
                    map.rank,
                    map.address,
                    dimensions,
                    strides,
                    lower.as_ptr(),
                    upper.as_ptr(),
                    channels,
                    pixels,
                    steps,
                    map.interleave,
                    map.swizzle,
                    map.promotion,
                    map.fill,
                ),
                TensorMapMode::Im2colWide {
                    lower,
                    upper,
                    channels,
                    pixels,
                    mode,
                } => self.driver().cuTensorMapEncodeIm2colWide(
                    place,
                    map.data_type,
                    map.rank,
                    map.address,
                    dimensions,
                    strides,
                    lower,
                    upper,
                    channels,
                    pixels,
                    steps,
                    map.interleave,
                    mode,
                    map.swizzle,
                    map.promotion,
                    map.fill,
                ),
            }
        }?;
        Ok(encoded)
    }

    fn replace_tensor_address(
        &self,
        mut map: EncodedTensorMap,
        address: u64,
    ) -> Result<EncodedTensorMap> {
        let place = &raw mut map.0;
        // SAFETY: the place is a tensor map with the driver's alignment; the driver does not follow the address.
        unsafe { self.driver().cuTensorMapReplaceAddress(place, address) }?;
        Ok(map)
    }
}
