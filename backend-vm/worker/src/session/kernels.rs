//! Kernel attributes, names and cluster occupancy, and tensor maps.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use wormhole_api::constants::function_attribute;
use wormhole_api::ctypes::CUtensorMap;
use wormhole_api::limits::TENSOR_RANKS;
use wormhole_api::{
    ClusterOccupancy, ClusterOccupancyReply, ClusterQuestion, CuResult, FunctionGetAttribute,
    FunctionGetAttributeReply, FunctionSetAttribute, FunctionSetCacheConfig, LibraryKernels,
    LibraryKernelsReply, ModuleKernels, ModuleKernelsReply, Occupancy, OccupancyReply, Outcome,
    Serve, TensorMapEncode, TensorMapEncodeReply, TensorMapReplace, TensorMapReplaceReply,
};
use wormhole_device::{
    ClusterLaunch, Device, EncodedTensorMap, RawModule, TensorMap, TensorMapMode,
};
use wormhole_link::memory;

use super::attributes::Scope;
use super::closed;
use super::images::ImageHandle;
use super::{Answer, Call, Finish, Session};
use crate::objects::CLUSTERS;

/// Refuses numbers that are no function attributes: the driver (580) crashes on some of them.
fn check_attribute(attribute: i32) -> Result<(), CuResult> {
    match attribute {
        0..function_attribute::MAX => Ok(()),
        _ => Err(CuResult::INVALID_VALUE),
    }
}

impl Serve<FunctionGetAttribute> for Session {
    fn serve(
        &mut self,
        call: &Call,
        message: &FunctionGetAttribute,
    ) -> Outcome<FunctionGetAttributeReply> {
        let attribute = message.attribute;
        check_attribute(attribute)?;
        self.ask_function(
            call,
            message.function,
            move |device, function| device.function_get_attribute(function, attribute),
            |_, value| Answer::reply(&FunctionGetAttributeReply { value }),
        )
    }
}

impl Serve<FunctionSetAttribute> for Session {
    fn serve(&mut self, call: &Call, message: &FunctionSetAttribute) -> Outcome<()> {
        let (attribute, value) = (message.attribute, message.value);
        check_attribute(attribute)?;
        if CLUSTERS.contains(&attribute) {
            let function = self.objects.functions.get(message.function)?;
            function.clustered.store(true, Ordering::Relaxed);
        }
        self.ask_function(
            call,
            message.function,
            move |device, function| device.function_set_attribute(function, attribute, value),
            |_, ()| Answer::done(),
        )
    }
}

impl Serve<FunctionSetCacheConfig> for Session {
    fn serve(&mut self, call: &Call, message: &FunctionSetCacheConfig) -> Outcome<()> {
        let config = message.config;
        closed::CACHE_CONFIG.check(config)?;
        self.ask_function(
            call,
            message.function,
            move |device, function| device.function_set_cache_config(function, config),
            |_, ()| Answer::done(),
        )
    }
}

impl Serve<Occupancy> for Session {
    fn serve(&mut self, call: &Call, message: &Occupancy) -> Outcome<OccupancyReply> {
        let (block, flags, shared) = (message.block, message.flags, message.shared);
        closed::OCCUPANCY.check(flags)?;
        self.ask_function(
            call,
            message.function,
            move |device, function| device.occupancy(function, block, flags, shared),
            |_, blocks| Answer::reply(&OccupancyReply { blocks }),
        )
    }
}

/// Returns the bytes of the names of a module's kernels, each with a terminating zero byte.
fn bytes_of_names(device: &dyn Device, module: RawModule) -> wormhole_device::Result<u64> {
    let mut bytes = 0;
    device.kernel_names(module, &mut |name| bytes += name.len() as u64 + 1)?;
    Ok(bytes)
}

impl Session {
    /// Writes the names of an image's kernels to the arena, if there is room. The job keeps none: it counts them first.
    pub(super) fn kernel_names<R>(
        &mut self,
        call: &Call,
        image: ImageHandle,
        target: u64,
        room: u64,
    ) -> Outcome<R> {
        let reader = match room {
            0 => None,
            _ => Some(self.addresses.arena(target, room)?),
        };
        let loaded = Arc::clone(&self.objects.image(image)?.loaded);
        self.defer(call, loaded.device.clone(), move |device: &dyn Device| {
            let bytes = bytes_of_names(device, loaded.raw).and_then(|bytes| {
                if bytes > room {
                    return Ok(bytes);
                }
                let mut written = 0;
                let write = &mut |name: &[u8]| {
                    let end = written + name.len() as u64;
                    if end < room {
                        // SAFETY: the range lies in an extent, which stays mapped while `reader` lives.
                        unsafe {
                            memory::copy_in(target + written, name);
                            memory::copy_in(target + end, &[0]);
                        }
                        written = end + 1;
                    }
                };
                device.kernel_names(loaded.raw, write).map(|()| bytes)
            });
            drop((loaded, reader));
            Box::new(move |session: &mut Session| match (bytes, image) {
                (Ok(bytes), ImageHandle::Module(_)) => Answer::reply(&ModuleKernelsReply { bytes }),
                (Ok(bytes), ImageHandle::Library(_)) => {
                    Answer::reply(&LibraryKernelsReply { bytes })
                }
                (Err(error), _) => Answer::failed(session.failed(error)),
            }) as Finish
        })
    }
}

impl Serve<LibraryKernels> for Session {
    fn serve(&mut self, call: &Call, message: &LibraryKernels) -> Outcome<LibraryKernelsReply> {
        let image = ImageHandle::Library(message.library);
        self.kernel_names(call, image, message.names.0, message.room)
    }
}

impl Serve<ModuleKernels> for Session {
    fn serve(&mut self, call: &Call, message: &ModuleKernels) -> Outcome<ModuleKernelsReply> {
        let image = ImageHandle::Module(message.module);
        self.kernel_names(call, image, message.names.0, message.room)
    }
}

impl Serve<ClusterOccupancy<'_>> for Session {
    fn serve(
        &mut self,
        call: &Call,
        message: &ClusterOccupancy<'_>,
    ) -> Outcome<ClusterOccupancyReply> {
        let mut attributes = Vec::new();
        let admitted = self.admit_attributes(Scope::Node, &message.attributes, &mut attributes);
        admitted?;
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
            |_, count| Answer::reply(&ClusterOccupancyReply { count }),
        )
    }
}

impl Serve<TensorMapEncode> for Session {
    fn serve(&mut self, call: &Call, message: &TensorMapEncode) -> Outcome<TensorMapEncodeReply> {
        // The driver reads `rank` entries of the arrays.
        if !(1..=TENSOR_RANKS).contains(&message.rank) {
            return Err(CuResult::INVALID_VALUE);
        }
        closed::TENSOR_DATA_TYPE.check(message.data_type)?;
        closed::TENSOR_INTERLEAVE.check(message.interleave)?;
        closed::TENSOR_SWIZZLE.check(message.swizzle)?;
        closed::TENSOR_PROMOTION.check(message.promotion)?;
        closed::TENSOR_FILL.check(message.fill)?;
        closed::TENSOR_WIDE.check(message.wide)?;
        let map = tensor_map(message);
        self.ask(
            call,
            self.here(call),
            move |device| device.encode_tensor_map(&map),
            |_, EncodedTensorMap(map)| Answer::reply(&TensorMapEncodeReply { map: map.opaque }),
        )
    }
}

impl Serve<TensorMapReplace> for Session {
    fn serve(&mut self, call: &Call, message: &TensorMapReplace) -> Outcome<TensorMapReplaceReply> {
        let opaque = message.map;
        let (map, address) = (EncodedTensorMap(CUtensorMap { opaque }), message.tensor);
        self.ask(
            call,
            self.here(call),
            move |device| device.replace_tensor_address(map, address),
            |_, EncodedTensorMap(map)| Answer::reply(&TensorMapReplaceReply { map: map.opaque }),
        )
    }
}

/// Translates a message for the device. A kernel reaches any address of its context, so a map may
/// contain any.
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
