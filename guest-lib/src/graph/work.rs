//! Work of graph nodes.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use wormhole_api::handle::Event;
use wormhole_api::limits::MEMORY_OPERATIONS;
use wormhole_api::{Element, Handle, LaunchAttribute, Parameter};

use super::conditional::Conditional;
use super::{GraphHandle, GraphMemory};
use crate::error::{CuError, Result};
use crate::handle;
use crate::memory::end::End;
use crate::memory::map::Origin;
use crate::memory::memory_map;
use crate::object::context::Scope;
use crate::object::function::{self, Owner};
use crate::types::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v1, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS,
    CUhostFn, CUstreamBatchMemOpParams,
};
use crate::work::copy::{Fill, Mode};
use crate::work::copy3d::Ends;
use crate::work::described::places;
use crate::work::launch::{Arguments, COOPERATIVE, Shape, check, with_parameters};
use crate::work::mem_ops;

pub use wormhole_api::constants::graph_node_type as kind;

#[derive(Clone, Debug)]
pub enum Work {
    Kernel(Arc<Kernel>),
    Copy(Box<CUDA_MEMCPY3D>),
    Fill(CUDA_MEMSET_NODE_PARAMS),
    Host(HostCall),
    Child(GraphHandle),
    Empty,
    WaitEvent(Handle<Event>),
    RecordEvent(Handle<Event>),
    Alloc(Arc<GraphMemory>),
    Free(u64),
    Memory(Arc<Operations>),
    Conditional(Arc<Conditional>),
}

// SAFETY: the pointers belong to the program, which passes them for use on any thread, or point into memory that the
// same value owns.
unsafe impl Send for Work {}
// SAFETY: the value is never changed while it is shared.
unsafe impl Sync for Work {}

impl Work {
    /// Returns the work that frees memory of a graph, named by its start.
    pub fn free(address: u64) -> Result<Self> {
        match memory_map().find(address) {
            Some(found) if found.origin == Origin::Graph && found.base == address => {
                Ok(Self::Free(address))
            }
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    /// Returns the `CUgraphNodeType`.
    pub const fn kind(&self) -> u32 {
        match self {
            Self::Kernel(_) => kind::KERNEL,
            Self::Copy(_) => kind::MEMCPY,
            Self::Fill(_) => kind::MEMSET,
            Self::Host(_) => kind::HOST,
            Self::Child(_) => kind::GRAPH,
            Self::Empty => kind::EMPTY,
            Self::WaitEvent(_) => kind::WAIT_EVENT,
            Self::RecordEvent(_) => kind::EVENT_RECORD,
            Self::Alloc(_) => kind::MEM_ALLOC,
            Self::Free(_) => kind::MEM_FREE,
            Self::Memory(_) => kind::BATCH_MEM_OP,
            Self::Conditional(_) => kind::CONDITIONAL,
        }
    }
}

/// A host function of the program.
#[derive(Clone, Copy, Debug)]
pub struct HostCall {
    pub function: CUhostFn,
    pub data: *mut c_void,
}

/// A kernel with its parameters.
#[derive(Debug)]
pub struct Kernel {
    /// Handle by which the program named the function.
    pub function: *mut c_void,
    pub shape: Shape,
    pub attributes: Vec<LaunchAttribute>,
    /// The packed parameter buffer.
    pub parameters: Box<[u8]>,
    layout: &'static [Parameter],
    /// Address of each parameter in the buffer, once the program has asked.
    values: OnceLock<Box<[*mut c_void]>>,
}

// SAFETY: the pointers are a handle, and addresses in memory that the value itself owns.
unsafe impl Send for Kernel {}
// SAFETY: the value is never changed after its creation, but for the list of addresses, which is made once.
unsafe impl Sync for Kernel {}

impl Kernel {
    pub fn new(
        function: *mut c_void,
        shape: Shape,
        attributes: Vec<LaunchAttribute>,
        parameters: &[u8],
    ) -> Result<Self> {
        let (_, facts) = function::find(function)?;
        Ok(Self {
            function,
            shape,
            attributes,
            parameters: parameters.into(),
            layout: &facts.parameters,
            values: OnceLock::new(),
        })
    }

    fn values(&self) -> &[*mut c_void] {
        self.values.get_or_init(|| {
            let layout = self.layout.iter();
            layout
                .filter_map(|parameter| self.parameters.get(parameter.offset as usize..))
                .map(|value| value.as_ptr().cast_mut().cast())
                .collect()
        })
    }

    /// Reads a program's description of a kernel node, with the attributes that the node had before.
    pub fn read(
        scope: Scope,
        wanted: &CUDA_KERNEL_NODE_PARAMS,
        arguments: Arguments<'_>,
        attributes: &[LaunchAttribute],
    ) -> Result<Self> {
        let first = &wanted.first;
        let function = match first.func {
            function if function.is_null() => wanted.kern,
            function => function,
        };
        // An invalid function is `INVALID_VALUE` here, because it is a part of the parameters.
        let found = function::find_on(scope, function);
        let (handle, facts) = found.map_err(|_| CuError::INVALID_VALUE)?;
        let function = match facts.device == scope.session.ordinal() {
            true => handle::to_pointer(handle),
            false => function,
        };
        let shape = Shape {
            grid: [first.gridDimX, first.gridDimY, first.gridDimZ],
            block: [first.blockDimX, first.blockDimY, first.blockDimZ],
            shared: first.sharedMemBytes,
        };
        check(scope, facts, &shape)?;
        let pack = |packed: &[u8]| Self::new(function, shape, attributes.to_vec(), packed);
        with_parameters(facts, arguments, pack)
    }

    /// Returns the description for a program. The pointers lead to the node's own values.
    pub fn described(&self) -> CUDA_KERNEL_NODE_PARAMS_v1 {
        let [x, y, z] = self.shape.grid;
        let [wide, high, deep] = self.shape.block;
        CUDA_KERNEL_NODE_PARAMS_v1 {
            func: self.function,
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: wide,
            blockDimY: high,
            blockDimZ: deep,
            sharedMemBytes: self.shape.shared,
            kernelParams: match self.values() {
                [] => std::ptr::null_mut(),
                values => values.as_ptr().cast_mut(),
            },
            extra: std::ptr::null_mut(),
        }
    }

    fn is_cooperative(&self) -> bool {
        let set = |attribute: &LaunchAttribute| {
            attribute.id == COOPERATIVE && attribute.value[..4] != [0; 4]
        };
        self.attributes.iter().any(set)
    }

    /// Returns the kernel's handle if it belongs to a library, and null for a function of a module. The runtime finds
    /// its kernels by it.
    pub fn of_library(&self) -> *mut c_void {
        match function::find(self.function) {
            Ok((_, facts)) if matches!(facts.owner, Owner::Library(_)) => self.function,
            _ => std::ptr::null_mut(),
        }
    }

    /// Returns the same kernel with an attribute set.
    pub fn with_attribute(&self, id: u32, value: [u8; 64]) -> Result<Self> {
        let mut attributes = self.attributes.clone();
        attributes.retain(|attribute| attribute.id != id);
        attributes.push(LaunchAttribute {
            id,
            reserved: 0,
            value,
        });
        Self::new(self.function, self.shape, attributes, &self.parameters)
    }

    /// Returns the same kernel with these attributes.
    pub fn with_attributes(&self, attributes: Vec<LaunchAttribute>) -> Result<Self> {
        Self::new(self.function, self.shape, attributes, &self.parameters)
    }
}

/// Memory operations, with the parameters as the program passed them, for queries.
#[derive(Debug)]
pub struct Operations {
    pub given: Box<[CUstreamBatchMemOpParams]>,
    pub context: *mut c_void,
}

// SAFETY: the pointer is a handle, which is never dereferenced.
unsafe impl Send for Operations {}
// SAFETY: the value is never changed after its creation.
unsafe impl Sync for Operations {}

impl Operations {
    pub fn new(
        given: impl ExactSizeIterator<Item = CUstreamBatchMemOpParams>,
        context: *mut c_void,
    ) -> Result<Self> {
        if !(1..=MEMORY_OPERATIONS).contains(&given.len()) {
            return Err(CuError::INVALID_VALUE);
        }
        let given: Box<[_]> = given.collect();
        for operation in &given {
            mem_ops::read(operation)?;
        }
        Ok(Self { given, context })
    }
}

/// Returns the ends of a described copy; nothing if it moves nothing.
pub fn copied(wanted: &CUDA_MEMCPY3D) -> Result<Option<Ends>> {
    let (places, extent) = places(wanted)?;
    match extent.contains(&0) {
        true => Ok(None),
        false => Ends::of(places, extent).map(Some),
    }
}

/// Returns true if the work of an executable node may become `new` (CUDA driver API, `cuGraphExecUpdate`): the kinds of
/// memory stay the same, a fill of several rows keeps its shape, and a copy of several rows stays unchanged.
pub fn may_become(old: &Work, new: &Work) -> bool {
    match (old, new) {
        (Work::Kernel(old), Work::Kernel(new)) => old.is_cooperative() == new.is_cooperative(),
        (Work::Copy(old), Work::Copy(new)) if !is_row(old) || !is_row(new) => matches!(
            (copied(old), copied(new)),
            (Ok(Some(old)), Ok(Some(new))) if old == new
        ),
        (Work::Copy(old), Work::Copy(new)) => {
            (old.srcMemoryType, old.dstMemoryType) == (new.srcMemoryType, new.dstMemoryType)
                && matches!((copied(old), copied(new)), (Ok(Some(old)), Ok(Some(new)))
                    if [old.to.0, old.from.0].map(is_device) == [new.to.0, new.from.0].map(is_device))
        }
        (Work::Fill(old), Work::Fill(new)) => {
            let shape = |fill: &CUDA_MEMSET_NODE_PARAMS| (fill.width, fill.pitch, fill.elementSize);
            old.height == new.height && (old.height == 1 || shape(old) == shape(new))
        }
        (Work::Alloc(_), Work::Alloc(_)) | (Work::Free(_), Work::Free(_)) => false,
        (Work::Conditional(old), Work::Conditional(new)) => old.is_like(new),
        _ => old.kind() == new.kind(),
    }
}

fn is_device(end: End) -> bool {
    end == End::Device
}

/// Returns true if a copy is one row.
fn is_row(copy: &CUDA_MEMCPY3D) -> bool {
    copy.Height <= 1 && copy.Depth <= 1
}

/// Returns the element of a fill; refuses a fill that the device cannot perform.
pub fn check_fill(fill: &CUDA_MEMSET_NODE_PARAMS) -> Result<Element> {
    let element = match fill.elementSize {
        1 => Element::Byte,
        2 => Element::Half,
        4 => Element::Word,
        _ => return Err(CuError::INVALID_VALUE),
    };
    let wanted = Fill {
        destination: fill.dst,
        pitch: fill.pitch,
        value: fill.value,
        element,
        width: fill.width,
        height: fill.height,
    };
    let wanted = wanted.checked(Mode::Asynchronous)?;
    if wanted.bytes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    wanted.end()?;
    Ok(element)
}
