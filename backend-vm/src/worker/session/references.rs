//! Texture and surface references.

use std::sync::Arc;

use wormhole_api::{
    CuResult, Outcome, ReferenceBindSurface, ReferenceBindTexture, ReferenceFind, ReferenceTo,
};
use wormhole_device::{ReferenceKind, Sampling};

use super::arrays::{Used, Wanted};
use super::images::ImageHandle;
use super::{Answer, Call, Session};

impl Session {
    pub(super) fn find_reference(
        &mut self,
        call: &Call,
        message: &ReferenceFind<'_>,
    ) -> Outcome<()> {
        let kind = match message.to {
            ReferenceTo::Texture => ReferenceKind::Texture,
            ReferenceTo::Surface => ReferenceKind::Surface,
        };
        let (image, name) = match self.named(ImageHandle::Module(message.module), message.name) {
            Ok(found) => found,
            Err(error) => return Outcome::Failed(error),
        };
        self.ask(
            call,
            move |device| device.find_reference(image.raw, &name, kind),
            |_, ()| Answer::done(),
        )
    }

    pub(super) fn bind_texture(
        &mut self,
        call: &Call,
        message: &ReferenceBindTexture<'_>,
    ) -> Outcome<()> {
        let found = self.named(ImageHandle::Module(message.module), message.name);
        let wanted = Wanted {
            source: message.source,
            array: message.array,
            mipmap: message.mipmap,
            memory: message.memory.0,
            format: message.format,
            channels: message.channels,
            size: message.size,
        };
        let resource = match message.bound {
            0 => Ok((None, Used::Memory)),
            _ => self
                .resource(&wanted)
                .map(|(resource, used)| (Some(resource), used)),
        };
        let ((image, name), (resource, used)) = match found.and_then(|found| Ok((found, resource?)))
        {
            Ok(found) => found,
            Err(error) => return Outcome::Failed(error),
        };
        let [filter, level_filter] = message.filters;
        let sampling = Sampling {
            address_modes: message.address_modes,
            filter,
            level_filter,
            flags: message.flags,
            anisotropy: message.anisotropy,
            level_bias: message.level_bias,
            level_clamp: message.level_clamp,
            border: message.border,
        };
        self.ask(
            call,
            move |device| {
                let bound = device.bind_texture(image.raw, &name, resource.as_ref(), &sampling);
                used.let_go(device);
                bound
            },
            |_, ()| Answer::done(),
        )
    }

    pub(super) fn bind_surface(
        &mut self,
        call: &Call,
        message: &ReferenceBindSurface<'_>,
    ) -> Outcome<()> {
        let found = self.named(ImageHandle::Module(message.module), message.name);
        let array = self.array(message.array).map(Arc::clone);
        let ((image, name), array) = match found.and_then(|found| Ok((found, array?))) {
            Ok(found) => found,
            Err(error) => return Outcome::Failed(error),
        };
        if array.shape.flags() & wormhole_api::array::SURFACE_LDST == 0 {
            return Outcome::Failed(CuResult::INVALID_VALUE);
        }
        self.ask(
            call,
            move |device| {
                let bound = device.bind_surface(image.raw, &name, array.raw);
                Used::Array(array).let_go(device);
                bound
            },
            |_, ()| Answer::done(),
        )
    }
}
