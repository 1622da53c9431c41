//! Kernel queries.

use wormhole_api::ctypes::CUtensorMap;
use wormhole_device::{ClusterLaunch, EncodedTensorMap, Kernels, RawModule, Result, TensorMap};

use super::Recorder;

/// Names of every module's kernels.
pub const NAMES: [&str; 2] = ["first", "second"];

impl Kernels for Recorder {
    fn kernel_names(&self, module: RawModule, each: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.arrive("kernel_names");
        self.check(module.0)?;
        NAMES.iter().for_each(|name| each(name.as_bytes()));
        Ok(())
    }
    fn greatest_cluster(&self, launch: &ClusterLaunch<'_>) -> Result<i32> {
        self.arrive("greatest_cluster");
        Ok(launch.block[0].cast_signed())
    }
    fn active_clusters(&self, launch: &ClusterLaunch<'_>) -> Result<i32> {
        self.arrive("active_clusters");
        Ok(launch.grid[0].cast_signed())
    }
    fn encode_tensor_map(&self, map: &TensorMap) -> Result<EncodedTensorMap> {
        self.arrive("encode_tensor_map");
        Ok(encoded(map.address))
    }
    fn replace_tensor_address(
        &self,
        _: EncodedTensorMap,
        address: u64,
    ) -> Result<EncodedTensorMap> {
        self.arrive("replace_tensor_address");
        Ok(encoded(address))
    }
}

/// Returns a tensor map that contains the address it was encoded for.
fn encoded(address: u64) -> EncodedTensorMap {
    let mut opaque = [0; 128];
    opaque[..8].copy_from_slice(&address.to_le_bytes());
    EncodedTensorMap(CUtensorMap { opaque })
}
