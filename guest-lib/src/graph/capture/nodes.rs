//! Operations on captured streams: adds the node of each, or changes the state of the capture.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use wormhole_api::constants::graph_dependency_type::PROGRAMMATIC;
use wormhole_api::constants::kernel_node_port as port;
use wormhole_api::constants::launch_attribute::PRIORITY;
use wormhole_api::{LaunchAttribute, MemoryOperation};

use super::{Recorded, refuse};
use crate::error::{CuError, Result};
use crate::graph::submit::Operation;
use crate::graph::work::{HostCall, Kernel, Operations, Work};
use crate::graph::{Edge, Edges, GraphMemory, with};
use crate::handle::to_pointer;
use crate::memory::pool::Alloc;
use crate::object::context::{self, Scope};
use crate::object::event::{self, Record, Wait};
use crate::object::stream::Target;
use crate::types::{
    CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUgraphEdgeData, CUstreamBatchMemOpParams,
};
use crate::work::copy::{CheckedFill, Copy, Mode};
use crate::work::copy3d::Copy3d;
use crate::work::described::{Described, description, description_of};
use crate::work::host_function::Function;
use crate::work::launch::{Launch, Milestone};

/// Takes an operation on a captured stream, or a wait for an event of a capture.
#[cold]
pub fn take(scope: Scope, target: Target, operation: Operation<'_>) -> Result {
    let work = match operation {
        Operation::Kernel(launch) => return kernel(target, &launch),
        Operation::Record(record) => return record_event(target, record),
        Operation::Wait(wait) => return wait_event(scope, target, wait),
        Operation::Alloc(alloc) => return allocate(scope, target, alloc),
        Operation::Copy(Copy { mode, .. })
        | Operation::Copy3d(Copy3d { mode, .. })
        | Operation::Fill(CheckedFill { mode, .. })
            if mode == Mode::Synchronous =>
        {
            return Err(refuse(target, CuError::STREAM_CAPTURE_UNSUPPORTED));
        }
        Operation::Copy(copy) => Work::Copy(Box::new(range(&copy)?)),
        Operation::Copy3d(copy) => Work::Copy(Box::new(description_of(copy.given, copy.extent())?)),
        Operation::Fill(fill) => Work::Fill(rows(&fill)),
        Operation::Memory(given) => Work::Memory(Arc::new(operations(given)?)),
        Operation::Host(Function::Plain { function, data }) => {
            Work::Host(HostCall { function, data })
        }
        Operation::Host(_) => {
            return Err(refuse(target, CuError::STREAM_CAPTURE_UNSUPPORTED));
        }
        Operation::Free(address) => Work::free(address)?,
    };
    add(target, work)
}

fn add(target: Target, work: Work) -> Result {
    with(|model| model.captured(target, work).map(drop))
}

fn kernel(target: Target, launch: &Launch<'_>) -> Result {
    let mut attributes = launch.attributes.plain().to_vec();
    let priority = target.stream.priority.load(Ordering::Relaxed);
    if priority != 0 && !attributes.iter().any(|attribute| attribute.id == PRIORITY) {
        let mut value = [0; 64];
        value[..4].copy_from_slice(&priority.to_le_bytes());
        attributes.push(LaunchAttribute {
            id: PRIORITY,
            reserved: 0,
            value,
        });
    }
    let function = to_pointer(launch.handle);
    let kernel = Kernel::new(function, *launch.shape, attributes, launch.parameters)?;
    let work = Work::Kernel(Arc::new(kernel));
    with(|model| {
        let node = model.captured(target, work)?;
        for recorded in launch.attributes.events() {
            let capture = model.capture_of(target)?;
            let data = dependency(recorded.when);
            let before = Edges::One(Edge { node, data });
            let place = Recorded { capture, before };
            model.captures.events.insert(recorded.event, place);
            event::recorded_in_capture(recorded.event);
        }
        Ok(())
    })
}

/// Returns how work that waits for an event of a captured launch depends on the launch (CUDA programming guide,
/// "Programmatic Dependent Launch", "Use in CUDA Graphs").
fn dependency(when: Milestone) -> CUgraphEdgeData {
    let (from_port, kind) = match when {
        Milestone::Triggered => (port::PROGRAMMATIC, PROGRAMMATIC),
        Milestone::TriggeredByStart => (port::LAUNCH_ORDER, PROGRAMMATIC),
        Milestone::Begun => (port::LAUNCH_ORDER, 0),
    };
    CUgraphEdgeData {
        from_port,
        r#type: kind,
        ..CUgraphEdgeData::default()
    }
}

fn range(copy: &Copy) -> Result<CUDA_MEMCPY3D> {
    let (to, from) = copy.given;
    let ends = (
        Described::memory(to.kind(), to.address()),
        Described::memory(from.kind(), from.address()),
    );
    description(ends, [copy.bytes, 1, 1])
}

fn rows(CheckedFill { fill, .. }: &CheckedFill) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        dst: fill.destination,
        pitch: if fill.height > 1 { fill.pitch } else { 0 },
        value: fill.value,
        elementSize: fill.element.to_wire(),
        width: fill.width,
        height: fill.height,
    }
}

fn operations(given: &[MemoryOperation]) -> Result<Operations> {
    let given = given.iter().map(|operation| {
        let mut given = CUstreamBatchMemOpParams {
            operation: operation.kind,
            address: operation.address,
            value64: operation.value,
            ..CUstreamBatchMemOpParams::default()
        };
        // A barrier has no address, and its flags are in `barrier_flags`.
        match operation.address {
            0 => given.barrier_flags = operation.flags,
            _ => given.flags = operation.flags,
        }
        given
    });
    Operations::new(given, context::current())
}

/// Allocates the memory at once: the program is shown its address.
fn allocate(scope: Scope, target: Target, alloc: Alloc<'_>) -> Result {
    // Checked before the allocation, which needs a request.
    with(|model| model.capture_of(target).map(drop))?;
    let memory = GraphMemory::allocate(scope, alloc.bytes)?;
    let address = memory.address;
    let added = add(target, Work::Alloc(Arc::clone(&memory)));
    added.inspect_err(|_| GraphMemory::let_go(memory))?;
    *alloc.address = address;
    Ok(())
}

/// Adds a node for an external record; any other record marks a place in the capture.
fn record_event(target: Target, record: Record) -> Result {
    if record.external {
        return add(target, Work::RecordEvent(record.event));
    }
    with(|model| model.record_captured(target, record.event))?;
    event::recorded_in_capture(record.event);
    Ok(())
}

fn wait_event(scope: Scope, target: Target, wait: Wait) -> Result {
    if wait.external && target.is_captured() {
        return add(target, Work::WaitEvent(wait.event));
    }
    if wait.is_of_capture() {
        return with(|model| model.wait_captured(target, wait.event));
    }
    if !wait.is_recorded() {
        return scope.session.alive();
    }
    // The work before the event is in no capture.
    with(|model| {
        let capture = model.capture_of(target)?;
        model.captures.invalidate(capture);
        Err(CuError::STREAM_CAPTURE_ISOLATION)
    })
}
