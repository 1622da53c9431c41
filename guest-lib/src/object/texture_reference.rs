//! Texture and surface references: their state is known here, and the device is told all of it whenever something
//! is bound or what is bound is to be read in another way.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use wormhole_api::array::Texels;
use wormhole_api::handle::{Array as ArrayKind, Mipmap as MipmapKind, Module as ModuleKind};
use wormhole_api::{
    DevicePtr, Handle, ReferenceBindSurface, ReferenceBindTexture, ReferenceFind, ReferenceTo,
    TextureSource,
};

use crate::error::{CuError, Result};
use crate::memory::end::End;
use crate::memory::memory_map;
use crate::object::context::Scope;
use crate::object::module;
use crate::types::{CUarray, CUmipmappedArray, CUmodule};

/// `CU_TR_ADDRESS_MODE_CLAMP`.
const CLAMP: u32 = 1;
/// `CU_AD_FORMAT_FLOAT`.
const FLOAT: u32 = 0x20;
/// `CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT`, `_TEXTURE_PITCH_ALIGNMENT` and `_MAXIMUM_TEXTURE1D_LINEAR_WIDTH`.
const ALIGNMENT: i32 = 14;
const PITCH_ALIGNMENT: i32 = 51;
const LINEAR_WIDTH: i32 = 69;

/// Which variable of which module.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Variable {
    module: Handle<ModuleKind>,
    name: CString,
}

impl Variable {
    /// Whether the module is still there.
    fn lives(&self) -> bool {
        module::find::<ModuleKind>(crate::handle::to_pointer(self.module)).is_ok()
    }
}

/// What a texture reference reads.
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

/// The state of a texture reference.
#[derive(Clone, Debug)]
pub struct Texture {
    /// None of `cuTexRefCreate`, which no kernel reads.
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
            filter: 0,
            level_filter: 0,
            level_bias: 0.0,
            level_clamp: [0.0; 2],
            anisotropy: 0,
            border: [0.0; 4],
            flags: 0,
        }
    }

    /// Reads memory from an address on, or nothing from 0 on. The device reads from a multiple of its alignment
    /// before it; gives the bytes between.
    pub fn bind_memory(&mut self, scope: Scope, address: u64, bytes: u64) -> Result<u64> {
        if address == 0 {
            self.bound = Bound::Linear { address, bytes: 0 };
            return Ok(0);
        }
        let device = scope.session.device();
        let limit = |attribute: i32| u64::try_from(device.value(attribute)).unwrap_or(0);
        let texel = Texels::new(self.format, self.channels)?.bytes();
        if bytes / texel > limit(LINEAR_WIDTH) {
            return Err(CuError::INVALID_VALUE);
        }
        let (address, held) = reached(address)?;
        let offset = address % limit(ALIGNMENT).max(1);
        // What lies behind the allocation is not read by a program that is right.
        self.bound = Bound::Linear {
            address: address - offset,
            bytes: bytes.min(held) + offset,
        };
        Ok(offset)
    }

    /// Reads rows of memory.
    pub fn bind_rows(&mut self, scope: Scope, address: u64, size: [u64; 3]) -> Result {
        let [width, height, pitch] = size;
        let device = scope.session.device();
        let aligned = |value: u64, attribute: i32| {
            let alignment = u64::try_from(device.value(attribute)).unwrap_or(0);
            value.is_multiple_of(alignment.max(1))
        };
        let row = width.checked_mul(Texels::new(self.format, self.channels)?.bytes());
        let (address, _) = reached(address)?;
        let fits = aligned(address, ALIGNMENT)
            && aligned(pitch, PITCH_ALIGNMENT)
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

    /// Whether it reads anything: memory may be none.
    fn reads(&self) -> bool {
        !matches!(
            self.bound,
            Bound::Nothing | Bound::Linear { address: 0, .. }
        )
    }

    /// Tells the device.
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
        let message = ReferenceBindTexture {
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

/// Where the device reaches memory of a program, and the bytes that the allocation holds from there on.
fn reached(address: u64) -> Result<(u64, u64)> {
    let (end, place) = End::of(address, 1)?;
    match memory_map().find(address) {
        Some(allocation) if end != End::Pageable => {
            Ok((place, allocation.base + allocation.bytes - address))
        }
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// The state of a surface reference.
#[derive(Clone, Debug)]
struct Surface {
    variable: Variable,
    array: Option<CUarray>,
}

#[derive(Debug, Default)]
struct References {
    /// The handle that was given out last.
    last: usize,
    textures: HashMap<usize, Texture>,
    surfaces: HashMap<usize, Surface>,
}

// SAFETY: arrays are told apart by their addresses only, which nobody follows.
unsafe impl Send for References {}

impl References {
    /// Programs take handles for addresses.
    fn number(&mut self) -> usize {
        self.last += 16;
        self.last
    }
}

static REFERENCES: LazyLock<Mutex<References>> = LazyLock::new(Mutex::default);

fn references() -> MutexGuard<'static, References> {
    REFERENCES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The variable of a module, if there is one of that kind.
fn variable(scope: Scope, module: CUmodule, name: &CStr, to: ReferenceTo) -> Result<Variable> {
    let (module, _) = module::find::<ModuleKind>(module)?;
    let message = ReferenceFind {
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

/// `cuModuleGetTexRef`: asked again, the same.
pub fn texture(scope: Scope, module: CUmodule, name: &CStr) -> Result<usize> {
    let variable = variable(scope, module, name, ReferenceTo::Texture)?;
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

/// `cuTexRefCreate`.
pub fn create() -> usize {
    let mut references = references();
    let number = references.number();
    references.textures.insert(number, Texture::new(None));
    number
}

/// `cuTexRefDestroy`.
pub fn destroy(number: usize) -> Result {
    let gone = references().textures.remove(&number);
    gone.map(drop).ok_or(CuError::INVALID_HANDLE)
}

/// The state of a texture reference.
pub fn find(number: usize) -> Result<Texture> {
    let found = references().textures.get(&number).cloned();
    found.ok_or(CuError::INVALID_HANDLE)
}

/// Changes the state of a texture reference, all or nothing.
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

/// `cuModuleGetSurfRef`: asked again, the same.
pub fn surface(scope: Scope, module: CUmodule, name: &CStr) -> Result<usize> {
    let variable = variable(scope, module, name, ReferenceTo::Surface)?;
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

/// `cuSurfRefSetArray`.
pub fn bind_surface(
    scope: Scope,
    number: usize,
    (array, handle): (CUarray, Handle<ArrayKind>),
) -> Result {
    let mut references = references();
    let found = references.surfaces.get_mut(&number);
    let found = found.ok_or(CuError::INVALID_HANDLE)?;
    let message = ReferenceBindSurface {
        module: found.variable.module,
        array: handle,
        name: found.variable.name.to_bytes(),
    };
    scope.session.request(&message, |()| ())?;
    found.array = Some(array);
    Ok(())
}

/// `cuSurfRefGetArray`.
pub fn surface_array(number: usize) -> Result<CUarray> {
    let references = references();
    let found = references.surfaces.get(&number);
    let found = found.ok_or(CuError::INVALID_HANDLE)?;
    found.array.ok_or(CuError::INVALID_VALUE)
}
