//! Texture and surface references of the recorder: every module has every reference, and binding is logged.

use wormhole_device::{
    RawArray, RawModule, Resource, Result, Sampling, TexRefTarget, TextureReferences,
};

use super::Recorder;

impl TextureReferences for Recorder {
    fn find_reference(&self, module: RawModule, _: &str, _: TexRefTarget) -> Result<()> {
        self.arrive("find_reference");
        self.check(module.0)
    }
    fn bind_texture(
        &self,
        module: RawModule,
        _: &str,
        resource: Option<&Resource>,
        _: &Sampling,
    ) -> Result<()> {
        self.arrive("bind_texture");
        match resource {
            Some(Resource::Array(array)) => self.check(array.0)?,
            Some(Resource::Mipmap(mipmap)) => self.check(mipmap.0)?,
            Some(Resource::Linear { .. } | Resource::Rows { .. }) | None => {}
        }
        self.check(module.0)
    }
    fn bind_surface(&self, module: RawModule, _: &str, array: RawArray) -> Result<()> {
        self.arrive("bind_surface");
        self.check(array.0)?;
        self.check(module.0)
    }
}
