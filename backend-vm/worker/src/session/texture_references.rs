//! Texture and surface references.

use std::sync::Arc;

use wormhole_api::{
    CuResult, Outcome, Serve, TexRefBindSurface, TexRefBindTexture, TexRefFind, TexRefTarget,
};

use super::arrays::TextureMessage;
use super::images::ImageHandle;
use super::{Call, Session};
use crate::objects::{Loaded, Used};

/// Binds a reference and holds the new resource in place of the former one: kernels may read it
/// after its handle is destroyed. A failure changes nothing.
fn bind(
    image: &Loaded,
    (kind, name): (TexRefTarget, String),
    used: Used,
    bind: impl FnOnce(&str) -> wormhole_device::Result<()>,
) -> wormhole_device::Result<()> {
    // The lock serializes binds, so that the resource held is the one bound last.
    let mut held = image.bound.lock();
    let bound = bind(&name);
    let unused = match (&bound, &used) {
        (Err(_), _) => Some(used),
        (Ok(()), Used::Memory) => held.remove(&(kind, name)),
        (Ok(()), _) => held.insert((kind, name), used),
    };
    drop(held);
    if let Some(unused) = unused {
        unused.let_go();
    }
    bound
}

impl Serve<TexRefFind<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &TexRefFind<'_>) -> Outcome<()> {
        let kind = message.to;
        let (image, name) = self.named(ImageHandle::Module(message.module), message.name)?;
        self.order(call, image.device.clone(), move |device| {
            device.find_reference(image.raw, &name, kind)
        })
    }
}

impl Serve<TexRefBindTexture<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &TexRefBindTexture<'_>) -> Outcome<()> {
        let (image, name) = self.named(ImageHandle::Module(message.module), message.name)?;
        let (resource, used) = match message.bound {
            0 => (None, Used::Memory),
            _ => {
                let (resource, used) = self.resource(&image.device, &message.wanted())?;
                (Some(resource), used)
            }
        };
        let sampling = message.sampling(&used)?;
        self.order(call, image.device.clone(), move |device| {
            let key = (TexRefTarget::Texture, name);
            bind(&image, key, used, |name| {
                device.bind_texture(image.raw, name, resource.as_ref(), &sampling)
            })
        })
    }
}

impl Serve<TexRefBindSurface<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &TexRefBindSurface<'_>) -> Outcome<()> {
        let (image, name) = self.named(ImageHandle::Module(message.module), message.name)?;
        let array = Arc::clone(self.objects.arrays.arrays.get(message.array)?);
        if array.shape.flags() & wormhole_api::array::SURFACE_LDST == 0 {
            return Err(CuResult::INVALID_VALUE);
        }
        let raw = self.done(image.device.own(&array.device, array.raw))?;
        self.order(call, image.device.clone(), move |device| {
            let key = (TexRefTarget::Surface, name);
            bind(&image, key, Used::Array(array), |name| {
                device.bind_surface(image.raw, name, raw)
            })
        })
    }
}
