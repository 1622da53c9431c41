//! Texture and surface objects. The program's descriptions are recorded here; the handles are the device's own
//! values, because kernels receive them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use wormhole_api::constants::resource_type::{ARRAY, LINEAR, MIPMAPPED_ARRAY, PITCH2D};
use wormhole_api::{
    DevicePtr, SurfaceCreate, SurfaceDestroy, TextureCreate, TextureDestroy, TextureSource,
};
use wormhole_lock::{Mutex, MutexGuard};

use crate::error::{CuError, Result};
use crate::object::array;
use crate::object::context::{self, Scope};
use crate::types::{
    CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC, CUDA_TEXTURE_DESC, CUsurfObject, CUtexObject,
};

/// Description of a texture object.
#[derive(Clone, Copy, Debug)]
pub struct Texture {
    context: u32,
    pub resource: CUDA_RESOURCE_DESC,
    pub sampling: CUDA_TEXTURE_DESC,
    pub view: Option<CUDA_RESOURCE_VIEW_DESC>,
}

#[derive(Clone, Copy, Debug)]
struct Surface {
    context: u32,
    resource: CUDA_RESOURCE_DESC,
}

#[derive(Debug, Default)]
struct Objects {
    /// Objects by the device's value and the device's ordinal, because two devices may use the same value.
    textures: BTreeMap<(CUtexObject, usize), Texture>,
    surfaces: BTreeMap<(CUsurfObject, usize), Surface>,
}

static OBJECTS: LazyLock<Mutex<Objects>> = LazyLock::new(Mutex::default);

fn objects() -> MutexGuard<'static, Objects> {
    OBJECTS.lock()
}

/// Finds the key of an object: on the current device, or else on any other device that has it.
fn place<T>(objects: &BTreeMap<(u64, usize), T>, object: u64) -> Option<(u64, usize)> {
    let own = context::scope_or_primary().map_or(0, |scope| scope.session.ordinal());
    let mut all = objects.range((object, 0)..=(object, usize::MAX));
    match objects.contains_key(&(object, own)) {
        true => Some((object, own)),
        false => all.next().map(|(place, _)| *place),
    }
}

/// Returns the handle of the array that a resource description names.
fn pointer(resource: &CUDA_RESOURCE_DESC) -> *mut std::ffi::c_void {
    std::ptr::without_provenance_mut(usize::try_from(resource.address).unwrap_or(0))
}

/// Creates a texture object (`cuTexObjectCreate`).
pub fn create(
    scope: Scope,
    resource: &CUDA_RESOURCE_DESC,
    sampling: &CUDA_TEXTURE_DESC,
    view: Option<&CUDA_RESOURCE_VIEW_DESC>,
) -> Result<CUtexObject> {
    if resource.flags != 0 || sampling.reserved.iter().any(|word| *word != 0) {
        return Err(CuError::INVALID_VALUE);
    }
    let (mut array, mut mipmap) = (None, None);
    let (source, size) = match resource.resType {
        ARRAY | MIPMAPPED_ARRAY if resource.address == 0 => return Err(CuError::INVALID_VALUE),
        ARRAY => {
            array = Some(array::find(pointer(resource))?.0);
            (TextureSource::Array, [0; 3])
        }
        MIPMAPPED_ARRAY => {
            mipmap = Some(array::find_mipmap(pointer(resource))?);
            (TextureSource::Mipmap, [0; 3])
        }
        LINEAR => (TextureSource::Linear, [resource.width, 0, 0]),
        PITCH2D => (
            TextureSource::Rows,
            [resource.width, resource.height, resource.pitchInBytes],
        ),
        _ => return Err(CuError::INVALID_VALUE),
    };
    let of_memory = array.is_none() && mipmap.is_none();
    // Linear and pitched memory ignore the resource view.
    let seen = view.filter(|_| !of_memory);
    let only_memory = |value: u32| if of_memory { value } else { 0 };
    let message = TextureCreate {
        source,
        array,
        mipmap,
        memory: DevicePtr(if of_memory { resource.address } else { 0 }),
        format: only_memory(resource.format),
        channels: only_memory(resource.numChannels),
        size,
        address_modes: sampling.addressMode,
        filters: [sampling.filterMode, sampling.mipmapFilterMode],
        flags: sampling.flags,
        anisotropy: sampling.maxAnisotropy,
        level_bias: sampling.mipmapLevelBias,
        level_clamp: [sampling.minMipmapLevelClamp, sampling.maxMipmapLevelClamp],
        border: sampling.borderColor.map(f32::to_bits),
        viewed: seen.is_some().into(),
        view_format: seen.map_or(0, |view| view.format),
        view_extent: seen.map_or([0; 3], |view| {
            [view.width, view.height, view.depth].map(|extent| extent as u64)
        }),
        view_parts: seen.map_or([0; 4], |view| {
            [
                view.firstMipmapLevel,
                view.lastMipmapLevel,
                view.firstLayer,
                view.lastLayer,
            ]
        }),
    };
    let texture = scope.session.request(&message, |reply| reply.texture)?;
    let facts = Texture {
        context: scope.context,
        resource: *resource,
        sampling: *sampling,
        view: view.copied(),
    };
    let place = (texture, scope.session.ordinal());
    objects().textures.insert(place, facts);
    Ok(texture)
}

/// Destroys a texture object (`cuTexObjectDestroy`). Succeeds for an unknown value, as the native driver does.
pub fn destroy(scope: Scope, texture: CUtexObject) -> Result {
    let place = place(&objects().textures, texture);
    match place {
        Some(place) => destroy_at(scope, place),
        None => scope.session.alive(),
    }
}

fn destroy_at(scope: Scope, place: (CUtexObject, usize)) -> Result {
    if objects().textures.remove(&place).is_none() {
        return scope.session.alive();
    }
    let (texture, device) = place;
    let there = scope.session.session().on(device);
    there.record(&TextureDestroy { texture })
}

/// Returns the description of a texture object.
pub fn find(texture: CUtexObject) -> Result<Texture> {
    let objects = objects();
    let found = place(&objects.textures, texture).and_then(|place| objects.textures.get(&place));
    found.copied().ok_or(CuError::INVALID_VALUE)
}

/// Creates a surface object (`cuSurfObjectCreate`).
pub fn create_surface(scope: Scope, resource: &CUDA_RESOURCE_DESC) -> Result<CUsurfObject> {
    if resource.resType != ARRAY || resource.flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (array, _) = array::find(pointer(resource))?;
    let surface = scope
        .session
        .request(&SurfaceCreate { array }, |reply| reply.surface)?;
    let facts = Surface {
        context: scope.context,
        resource: *resource,
    };
    let place = (surface, scope.session.ordinal());
    objects().surfaces.insert(place, facts);
    Ok(surface)
}

/// Destroys a surface object (`cuSurfObjectDestroy`). Succeeds for an unknown value, as for textures.
pub fn destroy_surface(scope: Scope, surface: CUsurfObject) -> Result {
    let place = place(&objects().surfaces, surface);
    match place {
        Some(place) => destroy_surface_at(scope, place),
        None => scope.session.alive(),
    }
}

fn destroy_surface_at(scope: Scope, place: (CUsurfObject, usize)) -> Result {
    if objects().surfaces.remove(&place).is_none() {
        return scope.session.alive();
    }
    let (surface, device) = place;
    let there = scope.session.session().on(device);
    there.record(&SurfaceDestroy { surface })
}

/// Returns the description of a surface object.
pub fn find_surface(surface: CUsurfObject) -> Result<CUDA_RESOURCE_DESC> {
    let objects = objects();
    let found = place(&objects.surfaces, surface).and_then(|place| objects.surfaces.get(&place));
    Ok(found.ok_or(CuError::INVALID_VALUE)?.resource)
}

/// Destroys the texture and surface objects of a context.
pub fn destroy_of(scope: Scope) {
    let (textures, surfaces) = {
        let objects = objects();
        let of = |context: u32| context == scope.context;
        let textures = objects
            .textures
            .iter()
            .filter(|(_, facts)| of(facts.context));
        let surfaces = objects
            .surfaces
            .iter()
            .filter(|(_, facts)| of(facts.context));
        (
            textures.map(|(handle, _)| *handle).collect::<Vec<_>>(),
            surfaces.map(|(handle, _)| *handle).collect::<Vec<_>>(),
        )
    };
    // Errors are ignored: the context is destroyed, and another thread may have destroyed the objects first.
    for texture in textures {
        let _ = destroy_at(scope, texture);
    }
    for surface in surfaces {
        let _ = destroy_surface_at(scope, surface);
    }
}

/// Drops the records of all texture and surface objects, after the worker has destroyed the objects.
pub fn forget_all() {
    *objects() = Objects::default();
}
