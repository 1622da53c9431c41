//! Implements the `Kernels` trait: names, shared memory and clusters of kernels.

use wormhole_device::{
    ClusterLaunch, CuError, EncodedTensorMap, Kernels, RawFunction, RawModule, Result, TensorMap,
};

use super::CpuDevice;

impl Kernels for CpuDevice {
    fn kernel_names(&self, module: RawModule) -> Result<Vec<String>> {
        self.context()?.modules.kernel_names(module)
    }

    fn available_shared(&self, function: RawFunction, blocks: i32, block: i32) -> Result<u64> {
        let kernel = self.context()?.modules.kernel(function)?;
        let (Ok(blocks @ 1..), Ok(block @ 1..)) = (u32::try_from(blocks), u32::try_from(block))
        else {
            return Err(CuError::INVALID_VALUE);
        };
        let needs = kernel.needs();
        if block > needs.max_threads {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(crate::launch::available_shared(&needs, blocks, block))
    }

    fn greatest_cluster(&self, launch: &ClusterLaunch<'_>) -> Result<i32> {
        let needs = self.context()?.modules.kernel(launch.function)?.needs();
        crate::launch::active_clusters(&needs, launch, self.multiprocessors)?;
        Ok(crate::launch::greatest_cluster(&needs).cast_signed())
    }

    fn active_clusters(&self, launch: &ClusterLaunch<'_>) -> Result<i32> {
        let needs = self.context()?.modules.kernel(launch.function)?.needs();
        let clusters = crate::launch::active_clusters(&needs, launch, self.multiprocessors)?;
        i32::try_from(clusters).map_err(|_| CuError::UNKNOWN)
    }

    /// Fails with NOT_SUPPORTED, because the CPU device has no tensor memory accelerator.
    fn encode_tensor_map(&self, _: &TensorMap) -> Result<EncodedTensorMap> {
        Err(CuError::NOT_SUPPORTED)
    }

    fn replace_tensor_address(&self, _: EncodedTensorMap, _: u64) -> Result<EncodedTensorMap> {
        Err(CuError::NOT_SUPPORTED)
    }

    /// Checks that the context lives. The CPU device has no persisting L2 lines to reset.
    fn reset_persisting_l2(&self) -> Result<()> {
        self.context().map(drop)
    }
}
