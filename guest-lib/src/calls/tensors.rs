//! Tensor maps. The host's driver encodes them, so the worker serves the calls.

use wormhole_api::limits::TENSOR_RANKS;
use wormhole_api::{TensorMapEncode, TensorMapMode, TensorMapReplace};

use crate::error::{CuError, Result};
use crate::object::context;
use crate::parameter::{In, InOut, Out, Pointer};
use crate::types::{CUdeviceptr, CUtensorMap};

/// Copies a program's array and pads it with zeroes.
fn entries<T: Copy + Default, const ROOM: usize>(array: In<'_, [T]>) -> Result<[T; ROOM]> {
    let mut copy = [T::default(); ROOM];
    for (entry, given) in copy.iter_mut().zip(array.values()?) {
        *entry = given;
    }
    Ok(copy)
}

/// Arguments that all modes have in common.
#[derive(Clone, Copy)]
struct Tensor<'a> {
    map: Out<'a, CUtensorMap>,
    data_type: u32,
    rank: u32,
    address: CUdeviceptr,
    dimensions: In<'a, [u64]>,
    strides: Pointer<'a, u64>,
    steps: In<'a, [u32]>,
}

impl Tensor<'_> {
    /// Encodes the map with the fields that `complete` sets, and writes it.
    fn encode(self, complete: impl FnOnce(&mut TensorMapEncode) -> Result) -> Result {
        let scope = context::scope()?;
        if self.map.is_null() || !(1..=TENSOR_RANKS).contains(&self.rank) {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: the array has a stride for each dimension but the first.
        let strides = unsafe { self.strides.read(self.rank as usize - 1) };
        let dimensions = entries(self.dimensions)?;
        let (strides, steps) = (entries(strides)?, entries(self.steps)?);
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
        self.map.put(CUtensorMap { opaque })
    }
}

pub fn cuTensorMapEncodeTiled(
    tensorMap: Out<'_, CUtensorMap>,
    tensorDataType: u32,
    tensorRank: u32,
    globalAddress: CUdeviceptr,
    globalDim: In<'_, [u64]>,
    globalStrides: Pointer<'_, u64>,
    boxDim: In<'_, [u32]>,
    elementStrides: In<'_, [u32]>,
    interleave: u32,
    swizzle: u32,
    l2Promotion: u32,
    oobFill: u32,
) -> Result {
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
        message.tile = entries(boxDim)?;
        (message.interleave, message.swizzle) = (interleave, swizzle);
        (message.promotion, message.fill) = (l2Promotion, oobFill);
        Ok(())
    };
    tensor.encode(complete)
}

pub fn cuTensorMapEncodeIm2col(
    tensorMap: Out<'_, CUtensorMap>,
    tensorDataType: u32,
    tensorRank: u32,
    globalAddress: CUdeviceptr,
    globalDim: In<'_, [u64]>,
    globalStrides: Pointer<'_, u64>,
    pixelBoxLowerCorner: Pointer<'_, i32>,
    pixelBoxUpperCorner: Pointer<'_, i32>,
    channelsPerPixel: u32,
    pixelsPerColumn: u32,
    elementStrides: In<'_, [u32]>,
    interleave: u32,
    swizzle: u32,
    l2Promotion: u32,
    oobFill: u32,
) -> Result {
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
        // The corners have an entry for each dimension other than channels and images.
        let corners = (message.rank as usize).saturating_sub(2);
        // SAFETY: both arrays have that many entries, as documented.
        let (lower, upper) = unsafe {
            (
                pixelBoxLowerCorner.read(corners),
                pixelBoxUpperCorner.read(corners),
            )
        };
        (message.lower, message.upper) = (entries(lower)?, entries(upper)?);
        (message.channels, message.pixels) = (channelsPerPixel, pixelsPerColumn);
        (message.interleave, message.swizzle) = (interleave, swizzle);
        (message.promotion, message.fill) = (l2Promotion, oobFill);
        Ok(())
    };
    tensor.encode(complete)
}

pub fn cuTensorMapEncodeIm2colWide(
    tensorMap: Out<'_, CUtensorMap>,
    tensorDataType: u32,
    tensorRank: u32,
    globalAddress: CUdeviceptr,
    globalDim: In<'_, [u64]>,
    globalStrides: Pointer<'_, u64>,
    pixelBoxLowerCornerWidth: i32,
    pixelBoxUpperCornerWidth: i32,
    channelsPerPixel: u32,
    pixelsPerColumn: u32,
    elementStrides: In<'_, [u32]>,
    interleave: u32,
    mode: u32,
    swizzle: u32,
    l2Promotion: u32,
    oobFill: u32,
) -> Result {
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
    tensor.encode(complete)
}

pub fn cuTensorMapReplaceAddress(
    tensorMap: InOut<'_, CUtensorMap>,
    globalAddress: CUdeviceptr,
) -> Result {
    let scope = context::scope()?;
    let CUtensorMap { opaque: map } = tensorMap.get()?;
    let message = TensorMapReplace {
        tensor: globalAddress,
        map,
    };
    let opaque = scope.session.request(&message, |reply| reply.map)?;
    tensorMap.put(CUtensorMap { opaque })
}
