//! Texture and surface references, by the driver's own functions. Headers have lost them; drivers have them still.

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use cudarc::driver::sys::CUmodule;
use wormhole_api::constants::texture_reference_flags::OVERRIDE_FORMAT;
use wormhole_api::ctypes::{CUDA_ARRAY_DESCRIPTOR, CUarray, CUmipmappedArray};
use wormhole_device::{
    CuError, RawArray, RawModule, ReferenceTo, References, Resource, Result, Sampling, Texels,
};

use crate::device::{CudaDevice, size};
use crate::driver::{Driver, check};
use crate::images::Loaded;

/// `CUtexref` or `CUsurfref`.
type Reference = *mut c_void;

macro_rules! functions {
    ($($name:ident($($kind:ty),*);)*) => {
        /// The functions of references, each by its name in the driver API.
        #[allow(non_snake_case, reason = "the driver's own names")]
        #[derive(Clone, Copy)]
        pub(crate) struct Functions {
            $($name: unsafe extern "C" fn($($kind),*) -> u32,)*
        }

        impl Functions {
            /// All of them, if the driver has them.
            pub(crate) fn of(driver: &Driver) -> Option<Self> {
                Some(Self {
                    $(
                        // SAFETY: the type is that of the CUDA driver API.
                        $name: unsafe {
                            driver.later(c_name(concat!(stringify!($name), "\0")))
                        }?,
                    )*
                })
            }
        }
    };
}

/// A literal that ends with a zero byte.
fn c_name(name: &'static str) -> &'static std::ffi::CStr {
    std::ffi::CStr::from_bytes_until_nul(name.as_bytes()).unwrap_or_default()
}

functions! {
    cuModuleGetTexRef(*mut Reference, CUmodule, *const c_char);
    cuModuleGetSurfRef(*mut Reference, CUmodule, *const c_char);
    cuTexRefSetArray(Reference, CUarray, u32);
    cuTexRefSetMipmappedArray(Reference, CUmipmappedArray, u32);
    cuTexRefSetAddress_v2(*mut usize, Reference, u64, usize);
    cuTexRefSetAddress2D_v3(Reference, *const CUDA_ARRAY_DESCRIPTOR, u64, usize);
    cuTexRefSetFormat(Reference, u32, i32);
    cuTexRefSetAddressMode(Reference, i32, u32);
    cuTexRefSetFilterMode(Reference, u32);
    cuTexRefSetMipmapFilterMode(Reference, u32);
    cuTexRefSetMipmapLevelBias(Reference, f32);
    cuTexRefSetMipmapLevelClamp(Reference, f32, f32);
    cuTexRefSetMaxAnisotropy(Reference, u32);
    cuTexRefSetBorderColor(Reference, *mut f32);
    cuTexRefSetFlags(Reference, u32);
    cuSurfRefSetArray(Reference, CUarray, u32);
}

fn pointer(raw: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(size(raw))
}

impl Functions {
    /// A reference of an image that lives.
    fn find(&self, image: Loaded, name: &str, kind: ReferenceTo) -> Result<Reference> {
        let Loaded::Module(module) = image else {
            return Err(CuError::NOT_FOUND);
        };
        let name = CString::new(name).map_err(|_| CuError::NOT_FOUND)?;
        let mut reference = ptr::null_mut();
        let find = match kind {
            ReferenceTo::Texture => self.cuModuleGetTexRef,
            ReferenceTo::Surface => self.cuModuleGetSurfRef,
        };
        // SAFETY: the caller passes a live module; the pointers are good.
        check(unsafe { find(&raw mut reference, module, name.as_ptr()) })?;
        Ok(reference)
    }

    /// How a reference of a live module is read.
    fn set_sampling(&self, reference: Reference, sampling: &Sampling) -> Result<()> {
        let [least, greatest] = sampling.level_clamp;
        let mut border = sampling.border.map(f32::from_bits);
        for (dimension, mode) in (0..).zip(sampling.address_modes) {
            // SAFETY: the reference lives.
            check(unsafe { (self.cuTexRefSetAddressMode)(reference, dimension, mode) })?;
        }
        // SAFETY: the reference lives, and the border's colour is four floats.
        unsafe {
            check((self.cuTexRefSetFilterMode)(reference, sampling.filter))?;
            check((self.cuTexRefSetMipmapFilterMode)(
                reference,
                sampling.level_filter,
            ))?;
            check((self.cuTexRefSetMipmapLevelBias)(
                reference,
                sampling.level_bias,
            ))?;
            check((self.cuTexRefSetMipmapLevelClamp)(
                reference, least, greatest,
            ))?;
            check((self.cuTexRefSetMaxAnisotropy)(
                reference,
                sampling.anisotropy,
            ))?;
            check((self.cuTexRefSetBorderColor)(
                reference,
                border.as_mut_ptr(),
            ))?;
            check((self.cuTexRefSetFlags)(reference, sampling.flags))
        }
    }

    fn set_format(&self, reference: Reference, texels: Texels) -> Result<()> {
        let channels = i32::try_from(texels.channels()).map_err(|_| CuError::INVALID_VALUE)?;
        // SAFETY: the reference lives.
        check(unsafe { (self.cuTexRefSetFormat)(reference, texels.format as u32, channels) })
    }

    fn set_resource(&self, reference: Reference, resource: Option<&Resource>) -> Result<()> {
        let mut offset = 0;
        match resource.copied() {
            None => {
                let offset = &raw mut offset;
                // SAFETY: the reference lives, and the pointer is good.
                check(unsafe { (self.cuTexRefSetAddress_v2)(offset, reference, 0, 0) })
            }
            Some(Resource::Array(array)) => {
                let array = pointer(array.0);
                // SAFETY: the reference lives, and the caller passes an array that does.
                check(unsafe { (self.cuTexRefSetArray)(reference, array, OVERRIDE_FORMAT) })
            }
            Some(Resource::Mipmap(mipmap)) => {
                let (set, mipmap) = (self.cuTexRefSetMipmappedArray, pointer(mipmap.0));
                // SAFETY: the reference lives, and the caller passes an array that does.
                check(unsafe { set(reference, mipmap, OVERRIDE_FORMAT) })
            }
            Some(Resource::Linear {
                address,
                texels,
                bytes,
            }) => {
                self.set_format(reference, texels)?;
                let (set, offset) = (self.cuTexRefSetAddress_v2, &raw mut offset);
                // SAFETY: the reference lives, the pointer is good, and memory is reached by kernels only.
                check(unsafe { set(offset, reference, address, size(bytes)) })
            }
            Some(Resource::Rows {
                address,
                texels,
                width,
                height,
                pitch,
            }) => {
                let rows = CUDA_ARRAY_DESCRIPTOR {
                    Width: size(width),
                    Height: size(height),
                    Format: texels.format as u32,
                    NumChannels: texels.channels(),
                };
                let set = self.cuTexRefSetAddress2D_v3;
                // SAFETY: as above; the description is good.
                check(unsafe { set(reference, &raw const rows, address, size(pitch)) })
            }
        }
    }
}

impl CudaDevice {
    fn references(&self) -> Result<Functions> {
        Functions::of(self.driver()).ok_or(CuError::NOT_SUPPORTED)
    }
}

impl References for CudaDevice {
    fn find_reference(&self, module: RawModule, name: &str, kind: ReferenceTo) -> Result<()> {
        self.references()?
            .find(self.image(module)?, name, kind)
            .map(drop)
    }

    fn bind_texture(
        &self,
        module: RawModule,
        name: &str,
        resource: Option<&Resource>,
        sampling: &Sampling,
    ) -> Result<()> {
        let functions = self.references()?;
        let reference = functions.find(self.image(module)?, name, ReferenceTo::Texture)?;
        functions.set_sampling(reference, sampling)?;
        functions.set_resource(reference, resource)
    }

    fn bind_surface(&self, module: RawModule, name: &str, array: RawArray) -> Result<()> {
        let functions = self.references()?;
        let reference = functions.find(self.image(module)?, name, ReferenceTo::Surface)?;
        // SAFETY: the reference lives, and the caller passes an array that does.
        check(unsafe { (functions.cuSurfRefSetArray)(reference, pointer(array.0), 0) })
    }
}
