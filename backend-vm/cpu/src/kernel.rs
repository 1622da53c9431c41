//! Kernels: their attributes, and their execution by a launch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use wormhole_device::constants::function_attribute::{
    BINARY_VERSION, CONST_SIZE_BYTES, LOCAL_SIZE_BYTES, MAX, MAX_DYNAMIC_SHARED_SIZE_BYTES,
    MAX_THREADS_PER_BLOCK, NUM_REGS, PREFERRED_SHARED_MEMORY_CARVEOUT, PTX_VERSION,
    REQUIRED_CLUSTER_DEPTH, REQUIRED_CLUSTER_WIDTH, SHARED_SIZE_BYTES,
};
use wormhole_device::{CuError, Launch, Parameter, Result};
use wormhole_ptx::{DeviceHeap, GlobalMemory, LaunchConfig, Region};

use crate::arrays::Objects;
use crate::description::{SHARED_PER_BLOCK, SHARED_PER_BLOCK_OPTIN};
use crate::errors;
use crate::launch::Needs;
use crate::launch_events::Milestones;
use crate::memory::{Memory, Owner, pointer};
use crate::output::Output;

/// Reported number of registers of a thread. A processor has no register file to divide; with this number registers
/// never limit the occupancy.
const REGISTERS: u32 = 32;
/// Reported architecture of the binary code, 90 for 9.0.
const COMPUTE_CAPABILITY: i32 = 90;
/// Bytes of the workspace with which the blocks of a cooperative launch synchronise.
const WORKSPACE: u64 = 512;

/// A kernel of a loaded module.
#[derive(Debug)]
pub struct Kernel {
    code: Arc<wormhole_ptx::Kernel>,
    /// Target architecture of the PTX, 90 for 9.0.
    ptx_version: i32,
    max_dynamic_shared: AtomicI32,
    carveout: AtomicI32,
}

/// Resources of the context that a launch uses.
#[derive(Clone, Debug)]
pub struct Surroundings {
    pub memory: Arc<Memory>,
    pub output: Arc<Output>,
    /// Textures and surfaces.
    pub objects: Arc<Objects>,
    /// Becomes true when kernels must stop.
    pub cancel: Arc<AtomicBool>,
    /// Heap of device `malloc`.
    pub heap: Option<Arc<DeviceHeap>>,
    /// Values of the conditions of the graph that runs the kernel.
    pub conditions: Option<Arc<[AtomicU32]>>,
    /// Milestones that the kernel reaches.
    pub milestones: Option<Milestones>,
    /// Most bytes of printed text buffered between synchronizations.
    pub printed: u64,
    /// Whether kernels are checked.
    pub check: bool,
    /// Threads of the host that one kernel may use.
    pub threads: usize,
}

fn signed(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

impl Kernel {
    /// Creates a kernel with default attributes.
    pub fn new(code: Arc<wormhole_ptx::Kernel>, target: &str) -> Self {
        let digits = target.trim_start_matches(|c: char| !c.is_ascii_digit());
        let digits = digits.trim_end_matches(|c: char| !c.is_ascii_digit());
        let most = SHARED_PER_BLOCK.saturating_sub(code.shared_bytes());
        Self {
            code,
            ptx_version: digits.parse().unwrap_or(0),
            max_dynamic_shared: AtomicI32::new(signed(most)),
            carveout: AtomicI32::new(-1),
        }
    }

    /// Returns offset and size of the kernel's parameters.
    pub fn parameters(&self) -> Vec<Parameter> {
        let params = self.code.params().iter();
        params
            .map(|param| Parameter {
                offset: param.offset,
                size: param.size,
            })
            .collect()
    }

    /// Returns true if the kernel allocates from the heap.
    pub fn uses_heap(&self) -> bool {
        self.code.uses_heap()
    }

    /// Returns whether the kernel may print.
    pub fn prints(&self) -> bool {
        self.code.uses_printf()
    }

    /// Returns the resources that a block needs.
    pub fn needs(&self) -> Needs {
        let most = self.max_dynamic_shared.load(Ordering::Relaxed);
        Needs {
            max_threads: self.code.max_threads_per_block(),
            block: self.code.required_block(),
            shared: self.code.shared_bytes(),
            max_dynamic_shared: u32::try_from(most).unwrap_or(0),
            registers: REGISTERS,
            parameters: self.code.param_bytes(),
            cluster: self.code.required_cluster(),
            uses_cluster: self.code.uses_cluster(),
        }
    }

    /// Returns all attributes and their values.
    pub fn attributes(&self) -> Vec<(i32, i32)> {
        (0..MAX)
            .filter_map(|id| Some((id, self.attribute(id).ok()?)))
            .collect()
    }

    /// Returns an attribute's value (`cuFuncGetAttribute`).
    pub fn attribute(&self, attribute: i32) -> Result<i32> {
        Ok(match attribute {
            MAX_THREADS_PER_BLOCK => signed(self.code.max_threads_per_block()),
            SHARED_SIZE_BYTES => signed(self.code.shared_bytes()),
            CONST_SIZE_BYTES => i32::try_from(self.code.constant_bytes()).unwrap_or(i32::MAX),
            LOCAL_SIZE_BYTES => signed(self.code.local_bytes()),
            NUM_REGS => signed(REGISTERS),
            PTX_VERSION => self.ptx_version,
            BINARY_VERSION => COMPUTE_CAPABILITY,
            MAX_DYNAMIC_SHARED_SIZE_BYTES => self.max_dynamic_shared.load(Ordering::Relaxed),
            PREFERRED_SHARED_MEMORY_CARVEOUT => self.carveout.load(Ordering::Relaxed),
            REQUIRED_CLUSTER_WIDTH..=REQUIRED_CLUSTER_DEPTH => {
                let axis = usize::try_from(attribute - REQUIRED_CLUSTER_WIDTH).unwrap_or(0);
                signed(
                    self.code
                        .required_cluster()
                        .map_or(0, |cluster| cluster[axis]),
                )
            }
            id if (0..MAX).contains(&id) => 0,
            _ => return Err(CuError::INVALID_VALUE),
        })
    }

    /// Sets an attribute (`cuFuncSetAttribute`).
    pub fn set_attribute(&self, attribute: i32, value: i32) -> Result<()> {
        let (cell, allowed) = match attribute {
            MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                let most = SHARED_PER_BLOCK_OPTIN.saturating_sub(self.code.shared_bytes());
                (&self.max_dynamic_shared, 0..=signed(most))
            }
            PREFERRED_SHARED_MEMORY_CARVEOUT => (&self.carveout, -1..=100),
            _ => return Err(CuError::INVALID_VALUE),
        };
        if !allowed.contains(&value) {
            return Err(CuError::INVALID_VALUE);
        }
        cell.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the work of a validated launch.
    pub fn run(
        self: Arc<Self>,
        launch: &Launch<'_>,
        cooperative: bool,
        around: Surroundings,
    ) -> impl FnOnce() -> Result<()> + Send + use<> {
        let (grid, block, dynamic_shared) = (launch.grid, launch.block, launch.shared);
        let parameters = launch.parameters.to_vec();
        move || {
            static GRIDS: AtomicU64 = AtomicU64::new(1);
            let memory = Reach(&around.memory);
            let output = Printer {
                output: &around.output,
                capacity: around.printed,
            };
            let owner = Owner::internal();
            let grid_workspace = match cooperative {
                true => around.memory.allocate(WORKSPACE, owner)?,
                false => 0,
            };
            let config = LaunchConfig {
                grid,
                block,
                dynamic_shared,
                cooperative,
                params: &parameters,
                grid_id: GRIDS.fetch_add(1, Ordering::Relaxed),
                grid_workspace,
                heap: around.heap.as_deref(),
                conditions: around.conditions.as_deref().unwrap_or_default(),
                objects: Some(&*around.objects),
                milestones: around.milestones.as_ref().map(|one| one as _),
                cancel: Some(&around.cancel),
                check: around.check,
                threads: around.threads,
            };
            let result = wormhole_ptx::launch(&self.code, &config, &memory, &output);
            if cooperative {
                around.memory.free(grid_workspace, owner)?;
            }
            result.map_err(|fault| {
                tracing::warn!(%fault, "a kernel faulted");
                errors::of_launch(&fault)
            })
        }
    }
}

/// Device memory as kernels access it.
struct Reach<'a>(&'a Memory);

// SAFETY: an allocation stays mapped as long as the memory exists, which the launch holds; a registered
// range stays mapped until the work before the end of its unregistration is complete, as the device's
// `unregister` sees to. Device and host addresses are equal.
unsafe impl GlobalMemory for Reach<'_> {
    fn region(&self, address: u64, bytes: u64) -> Option<Region> {
        let range = self.0.region(address, bytes)?;
        Some(Region {
            start: range.start,
            bytes: range.bytes,
            host: pointer(range.start),
            writable: range.writable,
        })
    }
}

/// Output to which kernels print.
struct Printer<'a> {
    output: &'a Output,
    capacity: u64,
}

impl wormhole_ptx::Output for Printer<'_> {
    fn printf(&self, text: &[u8]) {
        self.output.print(text, self.capacity);
    }

    fn assertion(&self, text: &[u8]) {
        self.output.complain(text);
    }

    fn finding(&self, sentence: &str) {
        tracing::warn!("checker: {sentence}");
        self.output
            .complain(format!("wormhole: checker: {sentence}\n").as_bytes());
    }
}
