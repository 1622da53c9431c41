//! What is asked of kernels beside their attributes, and tensor maps.

use std::sync::Arc;

use wormhole_api::{
    AvailableShared, AvailableSharedReply, ClusterOccupancy, ClusterOccupancyReply,
    ClusterQuestion, LibraryKernelsReply, ModuleKernelsReply, Outcome, TensorMapEncode,
    TensorMapEncodeReply, TensorMapReplace, TensorMapReplaceReply,
};
use wormhole_device::{ClusterLaunch, CuError, Device, EncodedTensorMap, TensorMap, TensorMapMode};

use super::attributes::Scope;
use super::images::ImageHandle;
use super::{Answer, Call, Finish, Session, to_result};
use wormhole_link::memory;

/// Most dimensions of a tensor.
const RANKS: u32 = 5;

impl Session {
    /// Writes the names of an image's kernels to the arena, if there is room.
    pub(super) fn kernel_names<R>(
        &mut self,
        call: &Call,
        image: ImageHandle,
        target: u64,
        room: u64,
    ) -> Outcome<R> {
        if room != 0 && !self.extents.contains(target, room) {
            return Outcome::Failed(self.invalid_address());
        }
        let loaded = match self.image(image) {
            Ok(image) => Arc::clone(&image.loaded),
            Err(error) => return Outcome::Failed(error),
        };
        let reader = Arc::clone(&self.readers);
        self.defer(call, move |device: &dyn Device| {
            let names = device.kernel_names(loaded.raw);
            drop(loaded);
            let bytes = names.map(|names| {
                let text = names.iter().flat_map(|name| [name.as_bytes(), &[0]]);
                let text: Vec<u8> = text.flatten().copied().collect();
                if !text.is_empty() && text.len() as u64 <= room {
                    // SAFETY: the range lies in an extent, which stays mapped while `reader` lives.
                    unsafe { memory::copy_in(target, &text) };
                }
                text.len() as u64
            });
            drop(reader);
            Box::new(move |session: &mut Session| match (bytes, image) {
                (Ok(bytes), ImageHandle::Module(_)) => Answer::reply(&ModuleKernelsReply { bytes }),
                (Ok(bytes), ImageHandle::Library(_)) => {
                    Answer::reply(&LibraryKernelsReply { bytes })
                }
                (Err(error), _) => Answer::failed(session.failed(error)),
            }) as Finish
        })
    }

    pub(super) fn cluster_occupancy(
        &mut self,
        call: &Call,
        message: &ClusterOccupancy<'_>,
    ) -> Outcome<ClusterOccupancyReply> {
        let mut attributes = Vec::new();
        let admitted = self.admit_attributes(Scope::Node, &message.attributes, &mut attributes);
        if let Err(error) = admitted {
            return Outcome::Failed(error);
        }
        let (grid, block, shared) = (message.grid, message.block, message.shared);
        let question = message.question;
        self.ask_function(
            call,
            message.function,
            move |device, function| {
                let launch = ClusterLaunch {
                    function,
                    grid,
                    block,
                    shared,
                    attributes: &attributes,
                };
                match question {
                    ClusterQuestion::GreatestSize => device.greatest_cluster(&launch),
                    ClusterQuestion::ActiveClusters => device.active_clusters(&launch),
                }
            },
            |count| Answer::reply(&ClusterOccupancyReply { count }),
        )
    }

    pub(super) fn available_shared(
        &mut self,
        call: &Call,
        message: &AvailableShared,
    ) -> Outcome<AvailableSharedReply> {
        let (blocks, block) = (message.blocks, message.block);
        self.ask_function(
            call,
            message.function,
            move |device, function| device.available_shared(function, blocks, block),
            |bytes| Answer::reply(&AvailableSharedReply { bytes }),
        )
    }

    pub(super) fn encode_tensor_map(
        &mut self,
        call: &Call,
        message: &TensorMapEncode,
    ) -> Outcome<TensorMapEncodeReply> {
        // The driver reads as many entries of the arrays.
        if !(1..=RANKS).contains(&message.rank) {
            return Outcome::Failed(to_result(CuError::INVALID_VALUE));
        }
        let map = tensor_map(message);
        self.ask(
            call,
            move |device| device.encode_tensor_map(&map),
            |_, EncodedTensorMap(map)| Answer::reply(&TensorMapEncodeReply { map }),
        )
    }

    pub(super) fn replace_tensor_address(
        &mut self,
        call: &Call,
        message: &TensorMapReplace,
    ) -> Outcome<TensorMapReplaceReply> {
        let (map, address) = (EncodedTensorMap(message.map), message.tensor);
        self.ask(
            call,
            move |device| device.replace_tensor_address(map, address),
            |_, EncodedTensorMap(map)| Answer::reply(&TensorMapReplaceReply { map }),
        )
    }
}

/// The same in the device's terms. A kernel reaches any address of its context, so a map may hold any.
fn tensor_map(message: &TensorMapEncode) -> TensorMap {
    let mode = match message.mode {
        wormhole_api::TensorMapMode::Tiled => TensorMapMode::Tiled { tile: message.tile },
        wormhole_api::TensorMapMode::Im2col => TensorMapMode::Im2col {
            lower: message.lower,
            upper: message.upper,
            channels: message.channels,
            pixels: message.pixels,
        },
        wormhole_api::TensorMapMode::Im2colWide => TensorMapMode::Im2colWide {
            lower: message.lower[0],
            upper: message.upper[0],
            channels: message.channels,
            pixels: message.pixels,
            mode: message.wide,
        },
    };
    TensorMap {
        mode,
        data_type: message.data_type,
        rank: message.rank,
        address: message.tensor,
        dimensions: message.dimensions,
        strides: message.strides,
        steps: message.steps,
        interleave: message.interleave,
        swizzle: message.swizzle,
        promotion: message.promotion,
        fill: message.fill,
    }
}
