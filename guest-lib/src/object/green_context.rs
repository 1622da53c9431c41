//! Green contexts: contexts whose streams run on a subset of their device's multiprocessors.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use wormhole_api::constants::device_resource_type::SM;
use wormhole_api::{
    GreenCreate, GreenDescribe, GreenDestroy, GreenPart, GreenPartNumber, GreenSplit, Items,
};
use wormhole_lock::{Mutex, MutexGuard};

use crate::error::{CuError, Result};
use crate::object::context::Scope;
use crate::types::CUdevResource;

/// Multiprocessor resource that a program received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Part {
    device: usize,
    known: Known,
}

/// Resource in the worker's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Known {
    number: u32,
    count: u32,
    least: u32,
    alignment: u32,
}

impl From<GreenPart> for Known {
    fn from(part: GreenPart) -> Self {
        Self {
            number: part.number,
            count: part.count,
            least: part.least,
            alignment: part.alignment,
        }
    }
}

#[derive(Debug, Default)]
struct GreenContexts {
    parts: Vec<Part>,
    /// Indices into `parts`.
    places: HashMap<Part, usize>,
    /// Resource of a whole device or green context, by device and the worker's number of the green context.
    whole: HashMap<(usize, u32), usize>,
    /// Resource descriptors: indices into `parts`.
    descriptions: Vec<Vec<usize>>,
    /// Worker's numbers of the green contexts, by context index.
    contexts: HashMap<u32, u32>,
}

static GREEN_CONTEXTS: LazyLock<Mutex<GreenContexts>> = LazyLock::new(Mutex::default);
/// True once a green context was created; until then [`of`] takes no lock.
static ANY: AtomicBool = AtomicBool::new(false);

fn green_contexts() -> MutexGuard<'static, GreenContexts> {
    GREEN_CONTEXTS.lock()
}

impl GreenContexts {
    /// Returns the index of a part, and adds the part if it is new.
    fn enter(&mut self, part: Part) -> usize {
        let next = self.parts.len();
        let place = *self.places.entry(part).or_insert(next);
        if place == next {
            self.parts.push(part);
        }
        place
    }

    /// Describes a part as a `CUdevResource`. Stores its index in words that only the driver reads.
    fn resource(&self, index: usize) -> CUdevResource {
        let mut resource = CUdevResource {
            r#type: 0,
            padding: [0; 23],
            smCount: 0,
            minSmPartitionSize: 0,
            smCoscheduledAlignment: 0,
            rest: [0; 9],
        };
        if let Some(part) = self.parts.get(index) {
            resource.r#type = SM;
            resource.padding[0] = u32::try_from(index + 1).unwrap_or(0);
            resource.smCount = part.known.count;
            resource.minSmPartitionSize = part.known.least;
            resource.smCoscheduledAlignment = part.known.alignment;
        }
        resource
    }

    /// Finds the part of a `CUdevResource`.
    fn find(&self, named: &CUdevResource) -> Result<(usize, Part)> {
        if named.r#type != SM {
            return Err(CuError::INVALID_RESOURCE_TYPE);
        }
        let index = (named.padding[0] as usize).checked_sub(1);
        let found = index.and_then(|index| Some((index, *self.parts.get(index)?)));
        found
            .filter(|(_, part)| part.known.count == named.smCount)
            .ok_or(CuError::INVALID_RESOURCE_CONFIGURATION)
    }
}

/// Returns the worker's number of a context if it is a green context.
#[inline]
pub fn of(context: u32) -> Option<u32> {
    if ANY.load(Ordering::Acquire) {
        green_contexts().contexts.get(&context).copied()
    } else {
        None
    }
}

/// Describes all multiprocessors of the scope's device, or of its context if that is a green context.
pub fn describe(scope: Scope) -> Result<CUdevResource> {
    let device = scope.session.ordinal();
    let green = of(scope.context).unwrap_or(0);
    let known = green_contexts().whole.get(&(device, green)).copied();
    if let Some(index) = known {
        return Ok(green_contexts().resource(index));
    }
    let known = scope
        .session
        .request(&GreenDescribe { green }, |reply| Known {
            number: reply.number,
            count: reply.count,
            least: reply.least,
            alignment: reply.alignment,
        })?;
    let mut green_contexts = green_contexts();
    let index = green_contexts.enter(Part { device, known });
    green_contexts.whole.insert((device, green), index);
    Ok(green_contexts.resource(index))
}

/// Splits a resource into at most `groups` groups of at least `least` multiprocessors each. Returns the groups, the
/// number of groups possible, and the remainder.
pub fn split(
    scope: Scope,
    input: &CUdevResource,
    (flags, least): (u32, u32),
    groups: u32,
) -> Result<(Vec<CUdevResource>, u32, CUdevResource)> {
    let (_, part) = green_contexts().find(input)?;
    let message = GreenSplit {
        part: part.known.number,
        flags,
        least,
        groups,
    };
    let session = scope.session.session().on(part.device);
    let (possible, rest, parts) = session.request(&message, |reply| {
        let parts: Vec<Known> = reply.parts.iter().map(Known::from).collect();
        (reply.possible, reply.rest != 0, parts)
    })?;
    let mut green_contexts = green_contexts();
    let indices: Vec<usize> = parts
        .into_iter()
        .map(|known| green_contexts.enter(Part { known, ..part }))
        .collect();
    let (groups, left) = indices.split_at(indices.len() - usize::from(rest && !indices.is_empty()));
    let groups = groups
        .iter()
        .map(|index| green_contexts.resource(*index))
        .collect();
    // An empty remainder is a resource of type 0.
    let left = green_contexts.resource(left.first().copied().unwrap_or(usize::MAX));
    Ok((groups, possible, left))
}

/// Generates a resource descriptor (`cuDevResourceGenerateDesc`). Returns the value of the `CUdevResourceDesc`.
pub fn generate(resources: impl Iterator<Item = CUdevResource>) -> Result<usize> {
    let mut green_contexts = green_contexts();
    let parts = resources
        .map(|resource| green_contexts.find(&resource).map(|(index, _)| index))
        .collect::<Result<Vec<_>>>()?;
    let known = green_contexts
        .descriptions
        .iter()
        .position(|known| *known == parts);
    let index = known.unwrap_or(green_contexts.descriptions.len());
    if known.is_none() {
        green_contexts.descriptions.push(parts);
    }
    Ok((index + 1) * 16)
}

/// Creates the green context behind a context, with the resources of a descriptor, or with the whole device if the
/// descriptor is 0.
pub fn create(scope: Scope, description: usize) -> Result {
    let numbers: Vec<GreenPartNumber> = if description == 0 {
        Vec::new()
    } else {
        let green_contexts = green_contexts();
        let index = (description / 16).checked_sub(1);
        let parts = index.and_then(|index| green_contexts.descriptions.get(index));
        let parts = parts.ok_or(CuError::INVALID_VALUE)?;
        let number = |index: &usize| GreenPartNumber {
            number: green_contexts.parts[*index].known.number,
        };
        parts.iter().map(number).collect()
    };
    let parts = Items::new(&numbers);
    let green = scope
        .session
        .request(&GreenCreate { parts }, |reply| reply.green)?;
    green_contexts().contexts.insert(scope.context, green);
    ANY.store(true, Ordering::Release);
    Ok(())
}

/// Destroys the green context behind a context.
pub fn destroy(scope: Scope) -> Result {
    let mut green_contexts = green_contexts();
    let green = green_contexts.contexts.remove(&scope.context);
    let green = green.ok_or(CuError::INVALID_CONTEXT)?;
    // The worker may reuse the number.
    green_contexts
        .whole
        .remove(&(scope.session.ordinal(), green));
    drop(green_contexts);
    scope.session.request(&GreenDestroy { green }, |()| ())
}
