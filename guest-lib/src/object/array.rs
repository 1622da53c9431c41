//! CUDA arrays and mipmapped arrays. Their shapes are recorded here; their memory is on the device.

use wormhole_api::array::ArrayShape;
use wormhole_api::handle::{Array as ArrayKind, Mipmap as MipmapKind};
use wormhole_api::{
    ArrayCreate, ArrayDestroy, Handle, MipmapCreate, MipmapDestroy, MipmapGetLevel,
};
use wormhole_lock::Mutex;

use crate::error::{CuError, Result};
use crate::handle::{self, Table};
use crate::memory::with_unused;
use crate::object::context::{self, Scope};
use crate::types::{CUarray, CUmipmappedArray};

/// Record of an array.
#[derive(Clone, Copy, Debug)]
struct Array {
    shape: ArrayShape,
    context: u32,
    /// True if the array is a level of a mipmapped array.
    level: bool,
}

/// Record of a mipmapped array.
#[derive(Clone, Debug)]
struct Mipmap {
    shape: ArrayShape,
    context: u32,
    /// Arrays by level, created at the first `cuMipmappedArrayGetLevel`.
    levels: Vec<Option<Handle<ArrayKind>>>,
}

static ARRAYS: Table<ArrayKind, Mutex<Option<Array>>> = Table::new();
static MIPMAPS: Table<MipmapKind, Mutex<Option<Mipmap>>> = Table::new();

fn known(array: CUarray) -> Result<(Handle<ArrayKind>, Array)> {
    let handle = handle::from_pointer(array).ok_or_else(|| handle::refusal(array))?;
    let facts = ARRAYS.get(handle).and_then(|facts| *facts.lock());
    Ok((handle, facts.ok_or(CuError::INVALID_HANDLE)?))
}

/// Looks up an array by its `CUarray`. Returns its handle and shape.
pub fn find(array: CUarray) -> Result<(Handle<ArrayKind>, ArrayShape)> {
    known(array).map(|(handle, facts)| (handle, facts.shape))
}

fn known_mipmap(
    mipmap: CUmipmappedArray,
) -> Result<(Handle<MipmapKind>, &'static Mutex<Option<Mipmap>>)> {
    let handle = handle::from_pointer(mipmap).ok_or(CuError::INVALID_HANDLE)?;
    Ok((handle, MIPMAPS.get(handle).ok_or(CuError::INVALID_HANDLE)?))
}

/// Looks up a mipmapped array by its `CUmipmappedArray`.
pub fn find_mipmap(mipmap: CUmipmappedArray) -> Result<Handle<MipmapKind>> {
    known_mipmap(mipmap).map(|(handle, _)| handle)
}

/// Looks up a mipmapped array by its `CUmipmappedArray`. Returns its handle and shape.
pub fn find_mipmap_shape(mipmap: CUmipmappedArray) -> Result<(Handle<MipmapKind>, ArrayShape)> {
    let (handle, facts) = known_mipmap(mipmap)?;
    let shape = facts.lock().as_ref().map(|facts| facts.shape);
    Ok((handle, shape.ok_or(CuError::INVALID_HANDLE)?))
}

/// Returns the calling thread's scope, or the scope of the array's context if the thread has no current context.
pub fn scope(array: CUarray) -> Result<Scope> {
    if array.is_null() {
        return Err(CuError::INVALID_HANDLE);
    }
    context::scope_or(|| Ok(known(array)?.1.context))
}

fn mint(array: Array) -> Result<Handle<ArrayKind>> {
    ARRAYS.mint(|facts| *facts.lock() = Some(array))
}

/// Creates an array (`cuArrayCreate`, `cuArray3DCreate`).
pub fn create(scope: Scope, shape: ArrayShape) -> Result<CUarray> {
    let new = mint(Array {
        shape,
        context: scope.context,
        level: false,
    })?;
    let message = ArrayCreate {
        new,
        extent: shape.extent(),
        format: shape.texels().format as u32,
        channels: shape.texels().channels(),
        flags: shape.flags(),
    };
    with_unused(scope, || scope.session.request(&message, |()| ()))
        .inspect_err(|_| ARRAYS.forget(new))?;
    Ok(handle::to_pointer(new))
}

/// Destroys an array (`cuArrayDestroy`).
pub fn destroy(scope: Scope, array: CUarray) -> Result {
    let (handle, facts) = known(array)?;
    if facts.level {
        // A level is destroyed with its mipmapped array. The native driver returns success too.
        return scope.session.alive();
    }
    ARRAYS.retire(handle).ok_or(CuError::INVALID_HANDLE)?;
    let done = scope
        .session
        .request(&ArrayDestroy { array: handle }, |()| ());
    ARRAYS.recycle(handle);
    done
}

/// Creates a mipmapped array (`cuMipmappedArrayCreate`).
pub fn create_mipmap(scope: Scope, shape: ArrayShape, levels: u32) -> Result<CUmipmappedArray> {
    let levels = levels.clamp(1, shape.most_levels());
    let new = MIPMAPS.mint(|facts| {
        *facts.lock() = Some(Mipmap {
            shape,
            context: scope.context,
            levels: vec![None; levels as usize],
        });
    })?;
    let message = MipmapCreate {
        new,
        extent: shape.extent(),
        format: shape.texels().format as u32,
        channels: shape.texels().channels(),
        flags: shape.flags(),
        levels,
    };
    with_unused(scope, || scope.session.request(&message, |()| ())).inspect_err(|_| {
        MIPMAPS.forget(new);
    })?;
    Ok(handle::to_pointer(new))
}

/// Returns the array of a level (`cuMipmappedArrayGetLevel`), the same one at each call.
pub fn level(scope: Scope, mipmap: CUmipmappedArray, level: u32) -> Result<CUarray> {
    let (handle, facts) = known_mipmap(mipmap)?;
    let mut facts = facts.lock();
    let facts = facts.as_mut().ok_or(CuError::INVALID_HANDLE)?;
    let place = facts
        .levels
        .get_mut(level as usize)
        .ok_or(CuError::INVALID_VALUE)?;
    if let Some(array) = *place {
        scope.session.alive()?;
        return Ok(handle::to_pointer(array));
    }
    let new = mint(Array {
        shape: facts.shape.level(level),
        context: facts.context,
        level: true,
    })?;
    let message = MipmapGetLevel {
        mipmap: handle,
        level,
        new,
    };
    scope
        .session
        .request(&message, |()| ())
        .inspect_err(|_| ARRAYS.forget(new))?;
    *place = Some(new);
    Ok(handle::to_pointer(new))
}

/// Destroys a mipmapped array and its levels (`cuMipmappedArrayDestroy`).
pub fn destroy_mipmap(scope: Scope, mipmap: CUmipmappedArray) -> Result {
    let handle = find_mipmap(mipmap)?;
    let facts = MIPMAPS.retire(handle).ok_or(CuError::INVALID_HANDLE)?;
    let done = scope
        .session
        .request(&MipmapDestroy { mipmap: handle }, |()| ());
    if let Some(facts) = facts.lock().take() {
        facts
            .levels
            .into_iter()
            .flatten()
            .for_each(|level| ARRAYS.forget(level));
    }
    MIPMAPS.recycle(handle);
    done
}

/// Destroys the arrays and mipmapped arrays of a context.
pub fn destroy_of(scope: Scope) {
    for (handle, facts) in MIPMAPS.live() {
        let context = facts.lock().as_ref().map(|facts| facts.context);
        if context == Some(scope.context) {
            // An error is ignored: the context is destroyed, and another thread may have destroyed the object first.
            let _ = destroy_mipmap(scope, handle::to_pointer(handle));
        }
    }
    for (handle, facts) in ARRAYS.live() {
        let context = facts.lock().as_ref().map(|facts| facts.context);
        if context == Some(scope.context) {
            let _ = destroy(scope, handle::to_pointer(handle));
        }
    }
}

/// Drops the records of all arrays, after the worker has destroyed the arrays.
pub fn forget_all() {
    for (handle, facts) in MIPMAPS.live() {
        if MIPMAPS.retire(handle).is_some() {
            *facts.lock() = None;
            MIPMAPS.recycle(handle);
        }
    }
    for (handle, _) in ARRAYS.live() {
        ARRAYS.forget(handle);
    }
}
