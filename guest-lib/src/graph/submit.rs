//! Operations on streams: the one place where each becomes records of its stream, or a node of the graph that its
//! stream is captured into.

use wormhole_api::MemoryOperation;

use super::{capture, order};
use crate::error::Result;
use crate::memory::pool::{self, Alloc};
use crate::object::context::Scope;
use crate::object::event::{Record, Wait};
use crate::object::stream::Target;
use crate::work::copy::{CheckedFill, Copy};
use crate::work::copy3d::Copy3d;
use crate::work::host_function::{self, Function};
use crate::work::launch::Launch;
use crate::work::mem_ops;

/// An operation on a stream. Making one performs the checks that streams and captures share. An operation borrows its
/// parts, so that a launch allocates nothing; a capture clones them.
#[derive(Debug)]
pub enum Operation<'a> {
    Kernel(Launch<'a>),
    Copy(Copy),
    Copy3d(Copy3d),
    Fill(CheckedFill),
    Memory(&'a [MemoryOperation]),
    Host(Function),
    Record(Record),
    Wait(Wait),
    Alloc(Alloc<'a>),
    /// The start of an allocation.
    Free(u64),
}

impl Operation<'_> {
    /// Returns whether the operation is of a capture, whatever its stream is: a stream that waits for an event of a
    /// capture joins that capture.
    fn is_of_capture(&self) -> bool {
        matches!(self, Self::Wait(wait) if wait.is_of_capture())
    }
}

/// Hands an operation to a stream. The kind is constant at every call, so the inlined code of a launch handles no other
/// kind.
#[inline(always)]
pub fn submit(scope: Scope, target: Target, operation: Operation<'_>) -> Result {
    if target.is_captured() || operation.is_of_capture() {
        return capture::take(scope, target, operation);
    }
    match operation {
        Operation::Kernel(launch) => launch.send(scope, target),
        Operation::Copy(copy) => send_copy(scope, target, copy),
        Operation::Copy3d(copy) => match copy.range() {
            Some(copy) => send_copy(scope, target, copy?),
            None => copy.send(scope, target),
        },
        Operation::Fill(fill) => fill.send(scope, target),
        Operation::Memory(operations) => mem_ops::send(scope, target, operations),
        Operation::Host(function) => host_function::send(scope, target, function),
        Operation::Record(record) => record.send(scope, target),
        Operation::Wait(wait) => wait.send(scope, target),
        Operation::Alloc(alloc) => alloc.send(scope, target),
        Operation::Free(address) => match pool::free(scope, target, address) {
            Some(freed) => freed,
            None => super::free(scope, address),
        },
    }
}

fn send_copy(scope: Scope, target: Target, copy: Copy) -> Result {
    order::in_order(scope, target, copy.places(), || copy.send(scope, target))
}
