//! Texture and surface references. Their state is recorded here. The device receives the whole state when something
//! is bound, and when the sampling of a bound reference changes.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::LazyLock;

use wormhole_api::array::Texels;
use wormhole_api::constants::address_mode::CLAMP;
use wormhole_api::constants::array_format::FLOAT;
use wormhole_api::constants::device_attribute::{
    MAXIMUM_TEXTURE1D_LINEAR_WIDTH, TEXTURE_ALIGNMENT, TEXTURE_PITCH_ALIGNMENT,
};
use wormhole_api::constants::filter_mode::POINT;
use wormhole_api::handle::{Array as ArrayKind, Mipmap as MipmapKind, Module as ModuleKind};
use wormhole_api::{
    DevicePtr, Handle, TexRefBindSurface, TexRefBindTexture, TexRefFind, TexRefTarget,
    TextureSource,
};
use wormhole_lock::{Mutex, MutexGuard};

use crate::error::{CuError, Result};
use crate::memory::end::End;
use crate::memory::memory_map;
use crate::object::context::Scope;
use crate::object::module;
use crate::types::{CUarray, CUmipmappedArray, CUmodule};

/// Variable of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Variable {
    module: Handle<ModuleKind>,
    name: CString,
}

impl Variable {
    /// Returns whether the module is still loaded.
    fn lives(&self) -> bool {
        module::find::<ModuleKind>(crate::handle::to_pointer(self.module)).is_ok()
    }
}

/// Memory that a texture reference is bound to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    Nothing,
    Array(CUarray, Handle<ArrayKind>),
    Mipmap(CUmipmappedArray, Handle<MipmapKind>),
    Linear {
        address: u64,
        bytes: u64,
    },
    Rows {
        address: u64,
        width: u64,
        height: u64,
        pitch: u64,
    },
}

/// State of a texture reference.
#[derive(Clone, Debug)]
pub struct Texture {
    /// Variable that kernels read. `None` for a reference from `cuTexRefCreate`, which no kernel reads.
    variable: Option<Variable>,
    pub bound: Bound,
    pub format: u32,
    pub channels: u32,
    pub modes: [u32; 3],
    pub filter: u32,
    pub level_filter: u32,
    pub level_bias: f32,
    pub level_clamp: [f32; 2],
    pub anisotropy: u32,
    pub border: [f32; 4],
    pub flags: u32,
}

impl Texture {
    fn new(variable: Option<Variable>) -> Self {
        Self {
            variable,
            bound: Bound::Nothing,
            format: FLOAT,
            channels: 1,
            modes: [CLAMP; 3],
            filter: POINT,
            level_filter: POINT,
            level_bias: 0.0,
            level_clamp: [0.0; 2],
            anisotropy: 0,
            border: [0.0; 4],
            flags: 0,
        }
    }

    /// Binds linear memory; address 0 unbinds. The device's address is rounded down to its texture alignment. Returns
    /// the offset in bytes.
    pub fn bind_memory(&mut self, scope: Scope, address: u64, bytes: u64) -> Result<u64> {
        if address == 0 {
            self.bound = Bound::Linear { address, bytes: 0 };
            return Ok(0);
        }
        let device = scope.session.device();
        let limit = |attribute: i32| u64::try_from(device.value(attribute)).unwrap_or(0);
        let texel = Texels::new(self.format, self.channels)?.bytes();
        if bytes / texel > limit(MAXIMUM_TEXTURE1D_LINEAR_WIDTH) {
            return Err(CuError::INVALID_VALUE);
        }
        let (address, held) = reached(address)?;
        let offset = address % limit(TEXTURE_ALIGNMENT).max(1);
        // Bytes beyond the allocation are not bound: a correct program does not read them.
        self.bound = Bound::Linear {
            address: address - offset,
            bytes: bytes.min(held) + offset,
        };
        Ok(offset)
    }

    /// Binds pitched memory.
    pub fn bind_rows(&mut self, scope: Scope, address: u64, size: [u64; 3]) -> Result {
        let [width, height, pitch] = size;
        let device = scope.session.device();
        let aligned = |value: u64, attribute: i32| {
            let alignment = u64::try_from(device.value(attribute)).unwrap_or(0);
            value.is_multiple_of(alignment.max(1))
        };
        let row = width.checked_mul(Texels::new(self.format, self.channels)?.bytes());
        let (address, _) = reached(address)?;
        let fits = aligned(address, TEXTURE_ALIGNMENT)
            && aligned(pitch, TEXTURE_PITCH_ALIGNMENT)
            && row.is_some_and(|row| row <= pitch);
        if !fits {
            return Err(CuError::INVALID_VALUE);
        }
        self.bound = Bound::Rows {
            address,
            width,
            height,
            pitch,
        };
        Ok(())
    }

    /// Returns whether the reference is bound. Linear memory at address 0 is unbound.
    fn reads(&self) -> bool {
        !matches!(
            self.bound,
            Bound::Nothing | Bound::Linear { address: 0, .. }
        )
    }

    /// Sends the state to the device.
    fn send(&self, scope: Scope) -> Result {
        let Some(variable) = &self.variable else {
            return Ok(());
        };
        let (mut array, mut mipmap) = (None, None);
        let (source, address, size) = match self.bound {
            Bound::Nothing => (TextureSource::Linear, 0, [0; 3]),
            Bound::Array(_, handle) => {
                array = Some(handle);
                (TextureSource::Array, 0, [0; 3])
            }
            Bound::Mipmap(_, handle) => {
                mipmap = Some(handle);
                (TextureSource::Mipmap, 0, [0; 3])
            }
            Bound::Linear { address, bytes } => (TextureSource::Linear, address, [bytes, 0, 0]),
            Bound::Rows {
                address,
                width,
                height,
                pitch,
            } => (TextureSource::Rows, address, [width, height, pitch]),
        };
        let message = TexRefBindTexture {
            module: variable.module,
            bound: self.reads().into(),
            source,
            array,
            mipmap,
            memory: DevicePtr(address),
            format: self.format,
            channels: self.channels,
            size,
            address_modes: self.modes,
            filters: [self.filter, self.level_filter],
            flags: self.flags,
            anisotropy: self.anisotropy,
            level_bias: self.level_bias,
            level_clamp: self.level_clamp,
            border: self.border.map(f32::to_bits),
            name: variable.name.to_bytes(),
        };
        scope.session.request(&message, |()| ())
    }
}

/// Returns the device address of a program's memory, and the bytes from there to the end of the allocation.
fn reached(address: u64) -> Result<(u64, u64)> {
    let (end, place) = End::of(address, 1)?;
    match memory_map().find(address) {
        Some(allocation) if end != End::Pageable => {
            Ok((place, allocation.base + allocation.bytes - address))
        }
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// State of a surface reference.
#[derive(Clone, Debug)]
struct Surface {
    variable: Variable,
    array: Option<CUarray>,
}

#[derive(Debug, Default)]
struct ReferenceTable {
    /// Last handle that was returned.
    last: usize,
    textures: HashMap<usize, Texture>,
    surfaces: HashMap<usize, Surface>,
}

// SAFETY: arrays are compared by address only; the pointers are never dereferenced.
unsafe impl Send for ReferenceTable {}

impl ReferenceTable {
    /// Returns a new handle. Handles are multiples of 16, because programs take them for addresses.
    fn number(&mut self) -> usize {
        self.last += 16;
        self.last
    }
}

static REFERENCES: LazyLock<Mutex<ReferenceTable>> = LazyLock::new(Mutex::default);

fn references() -> MutexGuard<'static, ReferenceTable> {
    REFERENCES.lock()
}

/// Finds a variable of a module. Fails if the module has none of that kind and name.
fn variable(scope: Scope, module: CUmodule, name: &CStr, to: TexRefTarget) -> Result<Variable> {
    let (module, _) = module::find::<ModuleKind>(module)?;
    let message = TexRefFind {
        module,
        to,
        name: name.to_bytes(),
    };
    scope.session.request(&message, |()| ())?;
    Ok(Variable {
        module,
        name: name.to_owned(),
    })
}

/// Returns a module's texture reference (`cuModuleGetTexRef`), the same one at each call.
pub fn texture(scope: Scope, module: CUmodule, name: &CStr) -> Result<usize> {
    let variable = variable(scope, module, name, TexRefTarget::Texture)?;
    let mut references = references();
    references
        .textures
        .retain(|_, texture| texture.variable.as_ref().is_none_or(Variable::lives));
    let is_it = |texture: &Texture| texture.variable.as_ref() == Some(&variable);
    let known = references.textures.iter().find(|(_, found)| is_it(found));
    if let Some((number, _)) = known {
        return Ok(*number);
    }
    let number = references.number();
    references
        .textures
        .insert(number, Texture::new(Some(variable)));
    Ok(number)
}

/// Creates a texture reference (`cuTexRefCreate`).
pub fn create() -> usize {
    let mut references = references();
    let number = references.number();
    references.textures.insert(number, Texture::new(None));
    number
}

/// Destroys a texture reference (`cuTexRefDestroy`).
pub fn destroy(number: usize) -> Result {
    let gone = references().textures.remove(&number);
    gone.map(drop).ok_or(CuError::INVALID_HANDLE)
}

/// Returns the state of a texture reference.
pub fn find(number: usize) -> Result<Texture> {
    let found = references().textures.get(&number).cloned();
    found.ok_or(CuError::INVALID_HANDLE)
}

/// Changes the state of a texture reference and sends it. After an error the state is unchanged.
pub fn change<R>(
    scope: Scope,
    number: usize,
    change: impl FnOnce(&mut Texture) -> Result<R>,
) -> Result<R> {
    let mut references = references();
    let found = references.textures.get_mut(&number);
    let found = found.ok_or(CuError::INVALID_HANDLE)?;
    let mut changed = found.clone();
    let result = change(&mut changed)?;
    if changed.reads() || found.reads() {
        changed.send(scope)?;
    }
    *found = changed;
    Ok(result)
}

/// Returns a module's surface reference (`cuModuleGetSurfRef`), the same one at each call.
pub fn surface(scope: Scope, module: CUmodule, name: &CStr) -> Result<usize> {
    let variable = variable(scope, module, name, TexRefTarget::Surface)?;
    let mut references = references();
    references
        .surfaces
        .retain(|_, surface| surface.variable.lives());
    let mut known = references.surfaces.iter();
    if let Some((number, _)) = known.find(|(_, found)| found.variable == variable) {
        return Ok(*number);
    }
    let number = references.number();
    let array = None;
    references
        .surfaces
        .insert(number, Surface { variable, array });
    Ok(number)
}

/// Binds an array to a surface reference (`cuSurfRefSetArray`).
pub fn bind_surface(
    scope: Scope,
    number: usize,
    (array, handle): (CUarray, Handle<ArrayKind>),
) -> Result {
    let mut references = references();
    let found = references.surfaces.get_mut(&number);
    let found = found.ok_or(CuError::INVALID_HANDLE)?;
    let message = TexRefBindSurface {
        module: found.variable.module,
        array: handle,
        name: found.variable.name.to_bytes(),
    };
    scope.session.request(&message, |()| ())?;
    found.array = Some(array);
    Ok(())
}

/// Returns the array of a surface reference (`cuSurfRefGetArray`).
pub fn surface_array(number: usize) -> Result<CUarray> {
    let references = references();
    let found = references.surfaces.get(&number);
    let found = found.ok_or(CuError::INVALID_HANDLE)?;
    found.array.ok_or(CuError::INVALID_VALUE)
}
