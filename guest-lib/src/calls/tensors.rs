//! Tensor maps: the driver encodes them, so the worker does.

use wormhole_api::{TensorMapEncode, TensorMapMode, TensorMapReplace};

use super::body;
use crate::context;
use crate::error::{CuError, Result};
use crate::types::{CUdeviceptr, CUresult, CUtensorMap};

/// Most dimensions of a tensor.
const RANKS: u32 = 5;

/// The first entries of a program's array.
///
/// # Safety
/// `array` is null or has `count` entries.
unsafe fn entries<T: Copy + Default, const ROOM: usize>(
    array: *const T,
    count: usize,
) -> Result<[T; ROOM]> {
    let mut copy = [T::default(); ROOM];
    if count > 0 && array.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    for (index, entry) in copy.iter_mut().enumerate().take(count) {
        // SAFETY: as the caller promises.
        *entry = unsafe { array.add(index).read() };
    }
    Ok(copy)
}

/// What all modes have in common.
#[derive(Clone, Copy)]
struct Tensor {
    map: *mut CUtensorMap,
    data_type: u32,
    rank: u32,
    address: CUdeviceptr,
    dimensions: *const u64,
    strides: *const u64,
    steps: *const u32,
}

impl Tensor {
    /// Has the map encoded with what `complete` adds, and writes it.
    ///
    /// # Safety
    /// The map is null or writable, the arrays are null or as long as documented.
    unsafe fn encode(self, complete: impl FnOnce(&mut TensorMapEncode) -> Result) -> Result {
        let scope = context::scope()?;
        if self.map.is_null() || !(1..=RANKS).contains(&self.rank) {
            return Err(CuError::INVALID_VALUE);
        }
        let rank = self.rank as usize;
        // SAFETY: as the caller promises.
        let (dimensions, strides, steps) = unsafe {
            (
                entries(self.dimensions, rank)?,
                entries(self.strides, rank - 1)?,
                entries(self.steps, rank)?,
            )
        };
        let mut message = TensorMapEncode {
            tensor: self.address,
            dimensions,
            strides,
            mode: TensorMapMode::Tiled,
            data_type: self.data_type,
            rank: self.rank,
            tile: [0; 5],
            steps,
            lower: [0; 3],
            upper: [0; 3],
            channels: 0,
            pixels: 0,
            interleave: 0,
            swizzle: 0,
            promotion: 0,
            fill: 0,
            wide: 0,
        };
        complete(&mut message)?;
        let opaque = scope.session.request(&message, |reply| reply.map)?;
        // SAFETY: not null, so writable; programs compiled as C++98 may align it to less than we do.
        unsafe { self.map.write_unaligned(CUtensorMap { opaque }) };
        Ok(())
    }
}

pub unsafe fn cuTensorMapEncodeTiled(
    tensorMap: *mut CUtensorMap,
    tensorDataType: u32,
    tensorRank: u32,
    globalAddress: CUdeviceptr,
    globalDim: *const u64,
    globalStrides: *const u64,
    boxDim: *const u32,
    elementStrides: *const u32,
    interleave: u32,
    swizzle: u32,
    l2Promotion: u32,
    oobFill: u32,
) -> CUresult {
    let tensor = Tensor {
        map: tensorMap,
        data_type: tensorDataType,
        rank: tensorRank,
        address: globalAddress,
        dimensions: globalDim,
        strides: globalStrides,
        steps: elementStrides,
    };
    let complete = |message: &mut TensorMapEncode| {
        // SAFETY: as the caller promises.
        message.tile = unsafe { entries(boxDim, message.rank as usize) }?;
        (message.interleave, message.swizzle) = (interleave, swizzle);
        (message.promotion, message.fill) = (l2Promotion, oobFill);
        Ok(())
    };
    // SAFETY: as the caller promises.
    body! { unsafe { tensor.encode(complete) } }
}

pub unsafe fn cuTensorMapEncodeIm2col(
    tensorMap: *mut CUtensorMap,
    tensorDataType: u32,
    tensorRank: u32,
    globalAddress: CUdeviceptr,
    globalDim: *const u64,
    globalStrides: *const u64,
    pixelBoxLowerCorner: *const i32,
    pixelBoxUpperCorner: *const i32,
    channelsPerPixel: u32,
    pixelsPerColumn: u32,
    elementStrides: *const u32,
    interleave: u32,
    swizzle: u32,
    l2Promotion: u32,
    oobFill: u32,
) -> CUresult {
    let tensor = Tensor {
        map: tensorMap,
        data_type: tensorDataType,
        rank: tensorRank,
        address: globalAddress,
        dimensions: globalDim,
        strides: globalStrides,
        steps: elementStrides,
    };
    let complete = |message: &mut TensorMapEncode| {
        message.mode = TensorMapMode::Im2col;
        // The corners have one entry for each dimension that is neither channels nor images.
        let corners = (message.rank as usize).saturating_sub(2);
        // SAFETY: as the caller promises.
        unsafe {
            message.lower = entries(pixelBoxLowerCorner, corners)?;
            message.upper = entries(pixelBoxUpperCorner, corners)?;
        }
        (message.channels, message.pixels) = (channelsPerPixel, pixelsPerColumn);
        (message.interleave, message.swizzle) = (interleave, swizzle);
        (message.promotion, message.fill) = (l2Promotion, oobFill);
        Ok(())
    };
    // SAFETY: as the caller promises.
    body! { unsafe { tensor.encode(complete) } }
}

pub unsafe fn cuTensorMapEncodeIm2colWide(
    tensorMap: *mut CUtensorMap,
    tensorDataType: u32,
    tensorRank: u32,
    globalAddress: CUdeviceptr,
    globalDim: *const u64,
    globalStrides: *const u64,
    pixelBoxLowerCornerWidth: i32,
    pixelBoxUpperCornerWidth: i32,
    channelsPerPixel: u32,
    pixelsPerColumn: u32,
    elementStrides: *const u32,
    interleave: u32,
    mode: u32,
    swizzle: u32,
    l2Promotion: u32,
    oobFill: u32,
) -> CUresult {
    let tensor = Tensor {
        map: tensorMap,
        data_type: tensorDataType,
        rank: tensorRank,
        address: globalAddress,
        dimensions: globalDim,
        strides: globalStrides,
        steps: elementStrides,
    };
    let complete = |message: &mut TensorMapEncode| {
        message.mode = TensorMapMode::Im2colWide;
        message.lower[0] = pixelBoxLowerCornerWidth;
        message.upper[0] = pixelBoxUpperCornerWidth;
        (message.channels, message.pixels) = (channelsPerPixel, pixelsPerColumn);
        (message.interleave, message.swizzle) = (interleave, swizzle);
        (message.promotion, message.fill) = (l2Promotion, oobFill);
        message.wide = mode;
        Ok(())
    };
    // SAFETY: as the caller promises.
    body! { unsafe { tensor.encode(complete) } }
}

pub unsafe fn cuTensorMapReplaceAddress(
    tensorMap: *mut CUtensorMap,
    globalAddress: CUdeviceptr,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if tensorMap.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so a tensor map.
        let CUtensorMap { opaque: map } = unsafe { tensorMap.read_unaligned() };
        let message = TensorMapReplace { tensor: globalAddress, map };
        let opaque = scope.session.request(&message, |reply| reply.map)?;
        // SAFETY: as above, and writable.
        unsafe { tensorMap.write_unaligned(CUtensorMap { opaque }) };
        Ok(())
    }
}
