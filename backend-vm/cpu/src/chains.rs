//! Chains of kernels, which this device launches one after the other.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_device::{
    Chains, CuError, Device, GraphKernel, Launch, LaunchEvents, RawChain, RawStream, Result,
};
use wormhole_lock::Mutex;

use crate::device::CpuDevice;

/// Kernels of the chains of a context.
#[derive(Debug, Default)]
pub struct Chained {
    next: AtomicU64,
    table: Mutex<HashMap<u64, Vec<GraphKernel>>>,
}

impl Chains for CpuDevice {
    fn create_chain(&self, kernels: &[Launch<'_>]) -> Result<RawChain> {
        let context = self.context()?;
        let executable = context.chains.next.fetch_add(1, Ordering::Relaxed) + 1;
        let kernels = kernels.iter().map(GraphKernel::from).collect();
        context.chains.table.lock().insert(executable, kernels);
        Ok(RawChain {
            executable,
            template: 0,
            nodes: Box::default(),
        })
    }

    fn set_kernel(&self, chain: &RawChain, place: usize, launch: &Launch<'_>) -> Result<()> {
        let context = self.context()?;
        let mut table = context.chains.table.lock();
        let kernels = table.get_mut(&chain.executable);
        let place = kernels.and_then(|kernels| kernels.get_mut(place));
        *place.ok_or(CuError::INVALID_HANDLE)? = launch.into();
        Ok(())
    }

    fn launch_chain(&self, chain: &RawChain, stream: RawStream) -> Result<()> {
        let context = self.context()?;
        let kernels = context.chains.table.lock().get(&chain.executable).cloned();
        for kernel in kernels.ok_or(CuError::INVALID_HANDLE)? {
            self.launch(&Launch {
                function: kernel.function,
                stream,
                grid: kernel.grid,
                block: kernel.block,
                shared: kernel.shared,
                attributes: &[],
                events: LaunchEvents::default(),
                parameters: &kernel.parameters,
            })?;
        }
        Ok(())
    }

    fn destroy_chain(&self, chain: RawChain) -> Result<()> {
        let context = self.context()?;
        let removed = context.chains.table.lock().remove(&chain.executable);
        removed.map(drop).ok_or(CuError::INVALID_HANDLE)
    }
}
