//! Batched copies (`cuMemcpyBatchAsync`, `cuMemcpy3DBatchAsync`).
//!
//! The copies of a batch may run in any order; they are submitted one after the other.

use wormhole_api::Handle;
use wormhole_api::array::ArrayShape;
use wormhole_api::constants::copy_flags::PREFER_OVERLAP_WITH_COMPUTE;
use wormhole_api::constants::copy_source_order::{ANY, DURING_API_CALL, STREAM};
use wormhole_api::constants::{copy_operand, memory_location};
use wormhole_api::handle::Array;

use super::copies::copy;
use super::devices::device;
use crate::error::{CuError, Result};
use crate::graph::submit::{Operation, submit};
use crate::memory::end::CopyEnd;
use crate::object::array;
use crate::object::context::Scope;
use crate::object::stream::{Target, target};
use crate::parameter::{In, Out};
use crate::types::{
    CUDA_MEMCPY3D_BATCH_OP, CUarray, CUdeviceptr, CUmemLocation, CUmemcpy3DOperand,
    CUmemcpyAttributes, CUstream, DefaultStream, LOCATION_DEVICE,
};
use crate::work::copy::{Mode, check};
use crate::work::copy3d::{Copy3d, Place};

const ORDERS: std::ops::RangeInclusive<u32> = STREAM..=ANY;
/// Failure index if no single copy of the batch is the cause.
const NO_COPY: usize = usize::MAX;

/// Returns whether a location hint names an existing location.
fn is_place(hint: CUmemLocation) -> bool {
    match hint.r#type {
        LOCATION_DEVICE => device(hint.id).is_ok(),
        kind => kind <= memory_location::HOST_NUMA_CURRENT,
    }
}

/// Arrays of a batch.
struct Batch<'a> {
    destinations: In<'a, [CUdeviceptr]>,
    sources: In<'a, [CUdeviceptr]>,
    sizes: In<'a, [usize]>,
    count: usize,
    attributes: In<'a, [CUmemcpyAttributes]>,
    /// Index of the first copy that each entry of `attributes` applies to.
    firsts: In<'a, [usize]>,
    number: usize,
}

impl Batch<'_> {
    /// Checks the arrays against the driver API's rules. Returns true if the sources may be reused when the call
    /// returns.
    fn read_attributes(&self) -> Result<bool> {
        let missing = self.destinations.is_null()
            || self.sources.is_null()
            || self.sizes.is_null()
            || self.attributes.is_null()
            || self.firsts.is_null();
        if missing || self.count == 0 || self.number == 0 || self.number > self.count {
            return Err(CuError::INVALID_VALUE);
        }
        let mut during_call = false;
        let mut least = 0;
        for index in 0..self.number {
            let (attributes, first) = (self.attributes.get(index)?, self.firsts.get(index)?);
            let in_order = if index == 0 {
                first == 0
            } else {
                first >= least
            };
            let known = ORDERS.contains(&attributes.srcAccessOrder)
                && attributes.flags & !PREFER_OVERLAP_WITH_COMPUTE == 0
                && is_place(attributes.srcLocHint)
                && is_place(attributes.dstLocHint);
            if !in_order || first >= self.count || !known {
                return Err(CuError::INVALID_VALUE);
            }
            least = first + 1;
            during_call |= attributes.srcAccessOrder == DURING_API_CALL;
        }
        Ok(during_call)
    }

    /// Submits the copies in order, up to the first invalid one.
    fn run(&self, scope: Scope, target: Target, failed: &mut usize) -> Result {
        let during_call = self.read_attributes()?;
        for index in 0..self.count {
            let (to, from) = (self.destinations.get(index)?, self.sources.get(index)?);
            let bytes = self.sizes.get(index)?;
            let possible = check(to, bytes).and_then(|()| check(from, bytes));
            if bytes == 0 || to == 0 || from == 0 || possible.is_err() {
                *failed = index;
                return Err(CuError::INVALID_VALUE);
            }
            // SAFETY: memory of the program in these lists is valid for the copy (`cuMemcpyBatchAsync`).
            let ends = unsafe { (CopyEnd::unified(to), CopyEnd::unified(from)) };
            copy(scope, target, ends, bytes, Mode::Asynchronous)?;
        }
        if during_call {
            target.synchronize(scope)
        } else {
            Ok(())
        }
    }
}

/// Resolves the stream of a batch, which must not be the legacy stream.
fn ordered(default: DefaultStream, stream: CUstream) -> Result<(Scope, Target)> {
    let (scope, target) = target(default, stream)?;
    if target.handle.is_legacy() {
        Err(CuError::INVALID_VALUE)
    } else {
        Ok((scope, target))
    }
}

pub fn cuMemcpyBatchAsync(
    default: DefaultStream,
    dsts: In<'_, [CUdeviceptr]>,
    srcs: In<'_, [CUdeviceptr]>,
    sizes: In<'_, [usize]>,
    count: usize,
    attrs: In<'_, [CUmemcpyAttributes]>,
    attrsIdxs: In<'_, [usize]>,
    numAttrs: usize,
    failIdx: Out<'_, usize>,
    hStream: CUstream,
) -> Result {
    let batch = Batch {
        destinations: dsts,
        sources: srcs,
        sizes,
        count,
        attributes: attrs,
        firsts: attrsIdxs,
        number: numAttrs,
    };
    let (scope, target) = ordered(default, hStream)?;
    let mut failed = NO_COPY;
    let outcome = batch.run(scope, target, &mut failed);
    failIdx.put_if_wanted(failed);
    outcome
}

/// Looks up the array of an operand, if the operand is an array.
fn array_of(operand: &CUmemcpy3DOperand) -> Result<Option<(Handle<Array>, ArrayShape)>> {
    match operand.kind {
        copy_operand::POINTER => Ok(None),
        copy_operand::ARRAY => array::find(to_handle(operand.place[0])).map(Some),
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// Converts an operand's word to a `CUarray`.
fn to_handle(value: u64) -> CUarray {
    std::ptr::with_exposed_provenance_mut(usize::try_from(value).unwrap_or(0))
}

/// Returns one end of a copy. Operands count in elements of `element` bytes.
fn place(
    operand: &CUmemcpy3DOperand,
    array: Option<(Handle<Array>, ArrayShape)>,
    element: u64,
    extent: [u64; 3],
) -> Option<Place> {
    let [first, second, third, fourth] = operand.place;
    if let Some((array, shape)) = array {
        let origin = [second.checked_mul(element)?, third, fourth];
        return Some(Place::Array {
            array,
            shape,
            origin,
        });
    }
    let [width, height, _] = extent;
    let pitch = match second {
        0 => width,
        elements => elements.checked_mul(element)?,
    };
    let rows = match third {
        0 => height,
        rows => rows,
    };
    (pitch >= width && rows >= height && first != 0).then_some(Place::Memory {
        start: first,
        pitch,
        rows,
        device: false,
    })
}

/// Converts a description. Returns the ends, destination first, and the extent in bytes, rows and layers.
fn described(copy: &CUDA_MEMCPY3D_BATCH_OP) -> Result<((Place, Place), [u64; 3])> {
    let arrays = (array_of(&copy.dst)?, array_of(&copy.src)?);
    let bytes = |array: Option<(_, ArrayShape)>| array.map(|(_, shape)| shape.texels().bytes());
    let element = match (bytes(arrays.0), bytes(arrays.1)) {
        (Some(to), Some(from)) if to != from => return Err(CuError::INVALID_VALUE),
        (Some(element), _) | (None, Some(element)) => element,
        (None, None) => 1,
    };
    let [width, height, depth] = copy.extent.map(|extent| extent as u64);
    let width = width.checked_mul(element).ok_or(CuError::INVALID_VALUE)?;
    let extent = [width, height, depth];
    let known =
        ORDERS.contains(&copy.srcAccessOrder) && copy.flags & !PREFER_OVERLAP_WITH_COMPUTE == 0;
    if !known || extent.contains(&0) {
        return Err(CuError::INVALID_VALUE);
    }
    let end = |operand, array| place(operand, array, element, extent).ok_or(CuError::INVALID_VALUE);
    let (to, from) = (end(&copy.dst, arrays.0)?, end(&copy.src, arrays.1)?);
    to.end(extent)?;
    from.end(extent)?;
    Ok(((to, from), extent))
}

/// Submits 3-D copies, or none if one of them is invalid.
fn copies_3d(
    scope: Scope,
    target: Target,
    copies: In<'_, [CUDA_MEMCPY3D_BATCH_OP]>,
    flags: u64,
    failed: &mut usize,
) -> Result {
    let copies = copies.values()?;
    if copies.len() == 0 || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    for (index, copy) in copies.clone().enumerate() {
        if let Err(error) = described(&copy) {
            *failed = index;
            return Err(error);
        }
    }
    let mut during_call = false;
    for copy in copies {
        let (ends, extent) = described(&copy)?;
        scope.session.alive()?;
        // SAFETY: memory of the program in a description is valid for the copy (`cuMemcpy3DBatchAsync`).
        let one = unsafe { Copy3d::new(ends, extent, Mode::Asynchronous) }?;
        submit(scope, target, Operation::Copy3d(one))?;
        during_call |= copy.srcAccessOrder == DURING_API_CALL;
    }
    if during_call {
        target.synchronize(scope)
    } else {
        Ok(())
    }
}

pub fn cuMemcpy3DBatchAsync(
    default: DefaultStream,
    _numOps: usize,
    opList: In<'_, [CUDA_MEMCPY3D_BATCH_OP]>,
    failIdx: Out<'_, usize>,
    flags: u64,
    hStream: CUstream,
) -> Result {
    let (scope, target) = ordered(default, hStream)?;
    let mut failed = NO_COPY;
    let outcome = copies_3d(scope, target, opList, flags, &mut failed);
    failIdx.put_if_wanted(failed);
    outcome
}
