//! Chains: kernels on one stream that one call of the driver launches.

use crate::{Launch, RawStream, Result};

/// Executable graph of kernels that run one after the other. Its fields are handles of the device.
#[derive(Debug)]
pub struct RawChain {
    pub executable: u64,
    pub template: u64,
    pub nodes: Box<[u64]>,
}

/// Operations on chains. Kernels of chains have neither attributes nor events. Callers use a chain from one thread at a time.
pub trait Chains {
    /// Creates a chain of these kernels.
    fn create_chain(&self, kernels: &[Launch<'_>]) -> Result<RawChain>;
    /// Replaces a kernel for later launches of the chain. If this fails, the chain has the kernel that it had.
    fn set_kernel(&self, chain: &RawChain, place: usize, kernel: &Launch<'_>) -> Result<()>;
    /// Launches a chain. Asynchronous. Launches of one chain run one after the other.
    fn launch_chain(&self, chain: &RawChain, stream: RawStream) -> Result<()>;
    /// Destroys a chain. Its launches still run.
    fn destroy_chain(&self, chain: RawChain) -> Result<()>;
}
