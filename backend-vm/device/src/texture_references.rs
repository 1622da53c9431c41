//! Texture and surface references: module variables that are bound to a texture's or surface's memory. CUDA 12 removed
//! them from its headers; drivers still support them.

use crate::{RawArray, RawModule, Resource, Result, Sampling, TexRefTarget};

/// Operations on references. Callers pass live modules and arrays. All operations may wait.
pub trait TextureReferences {
    /// Checks that the module has such a reference; else `NOT_FOUND`.
    fn find_reference(&self, module: RawModule, name: &str, kind: TexRefTarget) -> Result<()>;
    /// Binds a texture reference for later launches. Without a resource it is unbound.
    fn bind_texture(
        &self,
        module: RawModule,
        name: &str,
        resource: Option<&Resource>,
        sampling: &Sampling,
    ) -> Result<()>;
    /// Binds a surface reference to an array for later launches.
    fn bind_surface(&self, module: RawModule, name: &str, array: RawArray) -> Result<()>;
}
