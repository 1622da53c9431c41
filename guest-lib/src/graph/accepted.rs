//! Plans that the device accepts when it instantiates them, because the guest has made all of native CUDA's checks.
//!
//! Their instantiation is a record: the caller does not wait. Memory of the device for the graph can still be missing,
//! and then the session ends with that error, as after any record that fails. Every other plan is instantiated by a
//! request, so that the call returns the device's answer. Once such an answer was that memory is missing, every plan is.

use std::sync::atomic::{AtomicBool, Ordering};

use wormhole_api::constants::launch_attribute::PRIORITY;
use wormhole_api::{Access, array::span};

use super::plan::{Plan, Step};
use super::same;
use super::work::{Kernel, Work, check_fill, copied};
use crate::error::{CuError, Result};
use crate::memory::end::End;
use crate::memory::{memory_map, residence, virtual_memory};
use crate::object::context::Scope;
use crate::object::{event, function};
use crate::types::{CUDA_MEMSET_NODE_PARAMS, CUgraphEdgeData};
use crate::work::copy3d::Place;
use crate::work::launch::check;

/// Greatest number of steps of such a plan. The backend does nothing else for the session while it instantiates them,
/// some 2 µs a step, so up to 1 ms.
const STEPS: usize = 512;

/// True once the device had no memory left for an executable graph of this process. A program that goes on after that may
/// well meet it again.
static LACKED_MEMORY: AtomicBool = AtomicBool::new(false);

/// Notes the device's answer to an instantiation.
pub fn note_answer(answer: Result) -> Result {
    if answer == Err(CuError::OUT_OF_MEMORY) {
        LACKED_MEMORY.store(true, Ordering::Relaxed);
    }
    answer
}

impl Plan {
    /// Returns true if the device accepts the plan.
    pub fn is_accepted(&self, scope: Scope) -> bool {
        !LACKED_MEMORY.load(Ordering::Relaxed)
            && self.steps.len() <= STEPS
            // The device may have no memory left because of them.
            && !residence::has_mirrors()
            && self.steps.iter().all(|step| step.is_accepted(scope))
    }
}

impl Step {
    fn is_accepted(&self, scope: Scope) -> bool {
        let is_plain = |(_, data): &(usize, CUgraphEdgeData)| same(*data, <_>::default());
        self.before.iter().all(is_plain)
            && match &self.work {
                Work::Empty | Work::Child(_) => true,
                Work::Kernel(kernel) => kernel.is_accepted(scope),
                Work::Copy(wanted) => match copied(wanted) {
                    Ok(Some(copy)) => [copy.to, copy.from]
                        .into_iter()
                        .all(|(end, place)| is_own_place(scope, end, place, copy.extent)),
                    moves_nothing => moves_nothing.is_ok(),
                },
                Work::Fill(fill) => is_accepted_fill(scope, fill),
                Work::WaitEvent(event) | Work::RecordEvent(event) => {
                    event::is_on(*event, scope.session.ordinal()) && !event::is_shared(*event)
                }
                // The guest has a part in these, or the device alone knows whether it supports them.
                Work::Host(_)
                | Work::Alloc(_)
                | Work::Free(_)
                | Work::Memory(_)
                | Work::Conditional(_) => false,
            }
    }
}

impl Kernel {
    /// Returns true for a kernel of the scope's device that has run before, in a shape within its present limits and
    /// without attributes that the device may refuse.
    fn is_accepted(&self, scope: Scope) -> bool {
        let is_harmless = |id: u32| id == PRIORITY;
        function::find(self.function).is_ok_and(|(_, facts)| {
            facts.launched.load(Ordering::Relaxed)
                && facts.device == scope.session.ordinal()
                && !facts.demands_cluster()
                && check(scope, facts, &self.shape).is_ok()
        }) && self.attributes.iter().all(|one| is_harmless(one.id))
    }
}

fn is_accepted_fill(scope: Scope, fill: &CUDA_MEMSET_NODE_PARAMS) -> bool {
    let row = fill.width.checked_mul(fill.elementSize as usize);
    let pitch = if fill.height > 1 { fill.pitch } else { 0 };
    let before = fill.height.saturating_sub(1).checked_mul(pitch);
    let bytes = before
        .zip(row)
        .and_then(|(before, row)| before.checked_add(row));
    check_fill(fill).is_ok()
        && bytes.is_some_and(|bytes| {
            let found = End::of(fill.dst, bytes as u64);
            found.is_ok_and(|(_, address)| is_own(scope, address, bytes as u64))
        })
}

/// Returns true for memory that the scope's device reaches without the guest.
fn is_own_place(scope: Scope, end: End, place: Place, extent: [u64; 3]) -> bool {
    match place {
        Place::Memory {
            start, pitch, rows, ..
        } if end != End::Pageable => {
            span(extent, pitch, rows).is_some_and(|bytes| is_own(scope, start, bytes))
        }
        _ => false,
    }
}

/// Returns true if a range lies in one allocation of the scope's device, which the device may read and write.
fn is_own(scope: Scope, address: u64, bytes: u64) -> bool {
    let device = scope.session.ordinal();
    memory_map().find(address).is_some_and(|found| {
        let allowed = || virtual_memory::access(address, device) == Ok(Access::ReadWrite);
        found.device() == Some(device)
            && bytes <= found.bytes - (address - found.base)
            && (!found.is_mapped() || allowed())
    })
}
