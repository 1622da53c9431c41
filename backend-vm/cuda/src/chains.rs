//! Chains of kernels: executable graphs whose kernels are replaced before each launch.

use wormhole_device::{
    Chains, CuError, GraphDescription, GraphEdge, GraphNode, Launch, RawChain, RawStream, Result,
};

use crate::device::{CudaDevice, handle, pointer};
use crate::graph::{Template, extra, kernel_node, parameter_list};

impl Chains for CudaDevice {
    fn create_chain(&self, kernels: &[Launch<'_>]) -> Result<RawChain> {
        let count = u32::try_from(kernels.len()).map_err(|_| CuError::INVALID_VALUE)?;
        let graph = GraphDescription {
            nodes: kernels
                .iter()
                .map(|kernel| GraphNode::Kernel(kernel.into()))
                .collect(),
            edges: (1..count).map(edge).collect(),
            ..Default::default()
        };
        let (executable, template) = self.made(&graph, 0)?;
        Ok(RawChain {
            executable: handle(executable),
            template: handle(template.graph),
            nodes: template.nodes.iter().map(|node| handle(*node)).collect(),
        })
    }

    fn set_kernel(&self, chain: &RawChain, place: usize, kernel: &Launch<'_>) -> Result<()> {
        let node = chain.nodes.get(place).ok_or(CuError::INVALID_VALUE)?;
        let mut bytes = kernel.parameters.len();
        let mut list = parameter_list(kernel.parameters, &mut bytes);
        let sizes = (kernel.grid, kernel.block, kernel.shared);
        let described = kernel_node(kernel.function, sizes, extra(kernel.parameters, &mut list));
        // SAFETY: the caller passes a chain of this device and a live function; the node is one of the chain's template. The
        // driver copies description and parameters during the call.
        unsafe {
            self.driver().cuGraphExecKernelNodeSetParams_v2(
                pointer(chain.executable),
                pointer(*node),
                &raw const described,
            )
        }
    }

    fn launch_chain(&self, chain: &RawChain, stream: RawStream) -> Result<()> {
        self.launch_made(pointer(chain.executable), stream)
    }

    fn destroy_chain(&self, chain: RawChain) -> Result<()> {
        let template = Template {
            graph: pointer(chain.template),
            nodes: Vec::new(),
            functions: Vec::new(),
            conditionals: Vec::new(),
        };
        self.destroy_made(pointer(chain.executable), &template)
    }
}

/// Returns the edge to a kernel from the one before.
fn edge(to: u32) -> GraphEdge {
    GraphEdge {
        from: to - 1,
        to,
        data: [0; 3],
    }
}
