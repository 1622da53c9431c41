//! Copies in two and three dimensions, and of arrays.

use super::copies::{NO_STREAM, copies};
use crate::error::Result;
use crate::graph::submit::{Operation, submit};
use crate::object::context;
use crate::object::stream::target;
use crate::parameter::{In, Out};
use crate::types::{
    CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUDA_MEMCPY3D_PEER, CUarray, CUdeviceptr, CUstream, DefaultStream,
};
use crate::work::copy::Mode;
use crate::work::copy3d::Copy3d;
use crate::work::described::{ARRAY, DEVICE, Described, HOST, address, described};

/// Reads a description. If it is null, an invalid stream is reported first.
fn given<T: Copy>(default: DefaultStream, stream: CUstream, description: In<'_, T>) -> Result<T> {
    if description.is_null() {
        target(default, stream)?;
    }
    description.get()
}

/// Submits a copy. Host memory of the program comes from an [`In`] or an [`Out`] only.
fn run(
    default: DefaultStream,
    stream: CUstream,
    (to, from): (Described, Described),
    extent: [usize; 3],
    mode: Mode,
) -> Result {
    let (scope, target) = target(default, stream)?;
    // An empty copy succeeds with any ends.
    if extent.contains(&0) {
        return scope.session.alive();
    }
    let extent = extent.map(|extent| extent as u64);
    let ends = (to.place(extent)?, from.place(extent)?);
    scope.session.alive()?;
    // SAFETY: memory of the program in a description is valid for the copy (`cuMemcpy3D`), as is an `In` or an `Out`.
    let copy = unsafe { Copy3d::new(ends, extent, mode) }?;
    submit(scope, target, Operation::Copy3d(copy))
}

fn plane(
    default: DefaultStream,
    stream: CUstream,
    description: In<'_, CUDA_MEMCPY2D>,
    mode: Mode,
) -> Result {
    let wanted = given(default, stream, description)?;
    let to = Described {
        kind: wanted.dstMemoryType,
        host: address(wanted.dstHost),
        device: wanted.dstDevice,
        array: wanted.dstArray,
        origin: [wanted.dstXInBytes, wanted.dstY, 0],
        pitch: wanted.dstPitch,
        rows: 0,
    };
    let from = Described {
        kind: wanted.srcMemoryType,
        host: address(wanted.srcHost),
        device: wanted.srcDevice,
        array: wanted.srcArray,
        origin: [wanted.srcXInBytes, wanted.srcY, 0],
        pitch: wanted.srcPitch,
        rows: 0,
    };
    let extent = [wanted.WidthInBytes, wanted.Height, 1];
    run(default, stream, (to, from), extent, mode)
}

fn volume(default: DefaultStream, stream: CUstream, wanted: &CUDA_MEMCPY3D, mode: Mode) -> Result {
    let (ends, extent) = described(wanted);
    run(default, stream, ends, extent, mode)
}

fn described_volume(
    default: DefaultStream,
    stream: CUstream,
    description: In<'_, CUDA_MEMCPY3D>,
    mode: Mode,
) -> Result {
    let wanted = given(default, stream, description)?;
    volume(default, stream, &wanted, mode)
}

fn peer_volume(
    default: DefaultStream,
    stream: CUstream,
    description: In<'_, CUDA_MEMCPY3D_PEER>,
    mode: Mode,
) -> Result {
    let wanted = given(default, stream, description)?;
    // These words are reserved in `CUDA_MEMCPY3D`; here they are the contexts of both ends.
    for end in [wanted.reserved0, wanted.reserved1] {
        context::find_active(end)?;
    }
    volume(default, stream, &wanted, mode)
}

pub fn cuMemcpy2D_v2(default: DefaultStream, pCopy: In<'_, CUDA_MEMCPY2D>) -> Result {
    plane(default, NO_STREAM, pCopy, Mode::Synchronous)
}

pub fn cuMemcpy2DAsync_v2(
    default: DefaultStream,
    pCopy: In<'_, CUDA_MEMCPY2D>,
    hStream: CUstream,
) -> Result {
    plane(default, hStream, pCopy, Mode::Asynchronous)
}

pub fn cuMemcpy3D_v2(default: DefaultStream, pCopy: In<'_, CUDA_MEMCPY3D>) -> Result {
    described_volume(default, NO_STREAM, pCopy, Mode::Synchronous)
}

pub fn cuMemcpy3DAsync_v2(
    default: DefaultStream,
    pCopy: In<'_, CUDA_MEMCPY3D>,
    hStream: CUstream,
) -> Result {
    described_volume(default, hStream, pCopy, Mode::Asynchronous)
}

pub fn cuMemcpy3DPeer(default: DefaultStream, pCopy: In<'_, CUDA_MEMCPY3D_PEER>) -> Result {
    peer_volume(default, NO_STREAM, pCopy, Mode::Synchronous)
}

pub fn cuMemcpy3DPeerAsync(
    default: DefaultStream,
    pCopy: In<'_, CUDA_MEMCPY3D_PEER>,
    hStream: CUstream,
) -> Result {
    peer_volume(default, hStream, pCopy, Mode::Asynchronous)
}

/// Describes the bytes of an array from `offset` on.
fn of_array(array: CUarray, offset: usize) -> Described {
    Described {
        array,
        origin: [offset, 0, 0],
        ..Described::memory(ARRAY, 0)
    }
}

/// Copies bytes to or from an array.
fn line(
    default: DefaultStream,
    stream: CUstream,
    ends: (Described, Described),
    bytes: usize,
    mode: Mode,
) -> Result {
    run(default, stream, ends, [bytes, 1, 1], mode)
}

pub fn cuMemcpyAtoA_v2(
    default: DefaultStream,
    dstArray: CUarray,
    dstOffset: usize,
    srcArray: CUarray,
    srcOffset: usize,
    ByteCount: usize,
) -> Result {
    let ends = (of_array(dstArray, dstOffset), of_array(srcArray, srcOffset));
    line(default, NO_STREAM, ends, ByteCount, Mode::Synchronous)
}

pub fn cuMemcpyAtoD_v2(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    srcArray: CUarray,
    srcOffset: usize,
    ByteCount: usize,
) -> Result {
    let ends = (
        Described::memory(DEVICE, dstDevice),
        of_array(srcArray, srcOffset),
    );
    line(default, NO_STREAM, ends, ByteCount, Mode::Synchronous)
}

pub fn cuMemcpyDtoA_v2(
    default: DefaultStream,
    dstArray: CUarray,
    dstOffset: usize,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
) -> Result {
    let ends = (
        of_array(dstArray, dstOffset),
        Described::memory(DEVICE, srcDevice),
    );
    line(default, NO_STREAM, ends, ByteCount, Mode::Synchronous)
}

copies! { line:
    cuMemcpyAtoH_v2, cuMemcpyAtoHAsync_v2(dstHost: Out<'_, [u8]>, srcArray: CUarray, srcOffset: usize):
        (Described::memory(HOST, dstHost.address()), of_array(srcArray, srcOffset));
    cuMemcpyHtoA_v2, cuMemcpyHtoAAsync_v2(dstArray: CUarray, dstOffset: usize, srcHost: In<'_, [u8]>):
        (of_array(dstArray, dstOffset), Described::memory(HOST, srcHost.address()));
}
