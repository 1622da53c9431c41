//! Texture and surface references: variables of modules to which what they read or write is bound. Removed in
//! CUDA 12, and served by drivers still.

use crate::{RawArray, RawModule, ReferenceTo, Resource, Result, Sampling};

/// What a device does with references. Callers pass modules and arrays that live. All may wait.
pub trait References {
    /// `NOT_FOUND` unless the module has such a reference.
    fn find_reference(&self, module: RawModule, name: &str, kind: ReferenceTo) -> Result<()>;
    /// Launches from now on read this; nothing without a resource.
    fn bind_texture(
        &self,
        module: RawModule,
        name: &str,
        resource: Option<&Resource>,
        sampling: &Sampling,
    ) -> Result<()>;
    /// Launches from now on load from and store to this array.
    fn bind_surface(&self, module: RawModule, name: &str, array: RawArray) -> Result<()>;
}
