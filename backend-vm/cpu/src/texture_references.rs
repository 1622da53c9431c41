//! Texture and surface references: variables whose value is the handle of an object.

use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_device::{
    RawArray, RawModule, Resource, Result, Sampling, TexRefTarget, TextureReferences,
};
use wormhole_ptx::Reference;

use crate::device::{Context, CpuDevice};
use crate::memory::pointer;

fn address(context: &Context, module: RawModule, name: &str, kind: TexRefTarget) -> Result<u64> {
    let kind = match kind {
        TexRefTarget::Texture => Reference::Texture,
        TexRefTarget::Surface => Reference::Surface,
    };
    context.modules.reference(module, name, kind)
}

/// Binds a reference to another object and destroys the old one. No launched kernel reads the reference any more.
fn exchange(context: &Context, address: u64, object: u64) {
    // SAFETY: a module's variable of at least eight bytes, in an aligned allocation of device memory: references are
    // never managed variables.
    let value = unsafe { AtomicU64::from_ptr(pointer(address).cast()) };
    // Fails if no object was bound, or if the program has overwritten the reference.
    let _ = context
        .arrays
        .destroy_object(value.swap(object, Ordering::AcqRel));
}

impl TextureReferences for CpuDevice {
    fn find_reference(&self, module: RawModule, name: &str, kind: TexRefTarget) -> Result<()> {
        address(self.context()?.as_ref(), module, name, kind).map(drop)
    }

    fn bind_texture(
        &self,
        module: RawModule,
        name: &str,
        resource: Option<&Resource>,
        sampling: &Sampling,
    ) -> Result<()> {
        let context = self.idle()?;
        let address = address(&context, module, name, TexRefTarget::Texture)?;
        let object = match resource {
            Some(resource) => {
                let arrays = &context.arrays;
                arrays.create_texture(resource, sampling, None, &self.memory)?
            }
            None => 0,
        };
        exchange(&context, address, object);
        Ok(())
    }

    fn bind_surface(&self, module: RawModule, name: &str, array: RawArray) -> Result<()> {
        let context = self.idle()?;
        let address = address(&context, module, name, TexRefTarget::Surface)?;
        exchange(&context, address, context.arrays.create_surface(array)?);
        Ok(())
    }
}
