//! Implements the `Kernels` trait: names and clusters of kernels, and tensor maps.

use wormhole_device::{
    ClusterLaunch, CuError, EncodedTensorMap, Kernels, RawModule, Result, TensorMap,
};

use super::CpuDevice;

impl Kernels for CpuDevice {
    fn kernel_names(&self, module: RawModule, each: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.context()?.modules.kernel_names(module, each)
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
}
