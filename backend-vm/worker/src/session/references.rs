//! Texture and surface references.

use std::sync::{Arc, PoisonError};

use wormhole_api::{
    CuResult, Outcome, ReferenceBindSurface, ReferenceBindTexture, ReferenceFind, ReferenceTo,
};
use wormhole_device::{Device, ReferenceKind};

use super::arrays::TextureMessage;
use super::images::ImageHandle;
use super::{Answer, Call, Session};
use crate::objects::{Loaded, Used};

/// Binds, and holds what is bound instead of what was: a kernel may read it whoever destroys its handle. What
/// fails changes nothing.
fn bind(
    device: &dyn Device,
    image: &Loaded,
    (kind, name): (ReferenceKind, String),
    used: Used,
    bind: impl FnOnce(&str) -> wormhole_device::Result<()>,
) -> wormhole_device::Result<()> {
    // Others that bind wait: what is held is what was bound last.
    let mut held = image.bound.lock().unwrap_or_else(PoisonError::into_inner);
    let bound = bind(&name);
    let unused = match (&bound, &used) {
        (Err(_), _) => Some(used),
        (Ok(()), Used::Memory) => held.remove(&(kind, name)),
        (Ok(()), _) => held.insert((kind, name), used),
    };
    drop(held);
    if let Some(unused) = unused {
        unused.let_go(device);
    }
    bound
}

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
        let resource = match message.bound {
            0 => Ok((None, Used::Memory)),
            _ => self
                .resource(&message.wanted())
                .map(|(resource, used)| (Some(resource), used)),
        };
        let ((image, name), (resource, used)) = match found.and_then(|found| Ok((found, resource?)))
        {
            Ok(found) => found,
            Err(error) => return Outcome::Failed(error),
        };
        let sampling = message.sampling();
        self.ask(
            call,
            move |device| {
                let key = (ReferenceKind::Texture, name);
                bind(device, &image, key, used, |name| {
                    device.bind_texture(image.raw, name, resource.as_ref(), &sampling)
                })
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
                let (key, raw) = ((ReferenceKind::Surface, name), array.raw);
                bind(device, &image, key, Used::Array(array), |name| {
                    device.bind_surface(image.raw, name, raw)
                })
            },
            |_, ()| Answer::done(),
        )
    }
}
