//! Messages with the fields that most tests use.

use wormhole_api::{
    Array, DevicePtr, Handle, Items, Library, LibraryLoad, Module, ModuleLoad, TexRefBindTexture,
    TextureSource,
};

/// Loads an image without managed variables and without logs.
pub fn module_load(new: Handle<Module>, image: DevicePtr, bytes: u64) -> ModuleLoad<'static> {
    ModuleLoad {
        new,
        image,
        bytes,
        log: DevicePtr(0),
        log_bytes: 0,
        place: DevicePtr(0),
        place_bytes: 0,
        keep: 0,
        options: Items::new(&[]),
    }
}

/// Loads a library as [`module_load`] loads a module.
pub fn library_load(new: Handle<Library>, image: DevicePtr, bytes: u64) -> LibraryLoad<'static> {
    LibraryLoad {
        new,
        image,
        bytes,
        log: DevicePtr(0),
        log_bytes: 0,
        place: DevicePtr(0),
        place_bytes: 0,
        keep: 0,
        options: Items::new(&[]),
    }
}

/// Binds a texture reference of a module to an array, or unbinds it.
pub fn bind_texture(
    module: Handle<Module>,
    array: Option<Handle<Array>>,
    name: &[u8],
) -> TexRefBindTexture<'_> {
    TexRefBindTexture {
        module,
        bound: array.is_some().into(),
        source: TextureSource::Array,
        array,
        mipmap: None,
        memory: DevicePtr(0),
        format: 0,
        channels: 0,
        size: [0; 3],
        address_modes: [1; 3],
        filters: [0; 2],
        flags: 0,
        anisotropy: 0,
        level_bias: 0.0,
        level_clamp: [0.0; 2],
        border: [0; 4],
        name,
    }
}
