//! Texture and surface references, by the driver's own functions. Headers no longer declare them; drivers still have
//! them.

use std::ffi::{CString, c_void};
use std::ptr;

use wormhole_api::constants::texture_reference_flags::OVERRIDE_FORMAT;
use wormhole_api::ctypes::CUDA_ARRAY_DESCRIPTOR;
use wormhole_device::{
    CuError, RawArray, RawModule, Resource, Result, Sampling, TexRefTarget, Texels,
    TextureReferences,
};

use crate::device::{CudaDevice, pointer, size};
use crate::driver::Driver;
use crate::images::Loaded;

/// `CUtexref` or `CUsurfref`.
type Reference = *mut c_void;

impl Driver {
    /// Finds a reference of a live image.
    fn find_reference(&self, image: Loaded, name: &str, kind: TexRefTarget) -> Result<Reference> {
        let Loaded::Module(module) = image else {
            return Err(CuError::NOT_FOUND);
        };
        let name = CString::new(name).map_err(|_| CuError::NOT_FOUND)?;
        let mut reference = ptr::null_mut();
        let (place, name) = (&raw mut reference, name.as_ptr());
        // SAFETY: the caller passes a live module; the pointers are good.
        unsafe {
            match kind {
                TexRefTarget::Texture => self.cuModuleGetTexRef(place, module, name)?,
                TexRefTarget::Surface => self.cuModuleGetSurfRef(place, module, name)?,
            }
        }
        Ok(reference)
    }

    /// Sets the sampling of a reference of a live module.
    fn set_sampling(&self, reference: Reference, sampling: &Sampling) -> Result<()> {
        let [least, greatest] = sampling.level_clamp;
        let border = sampling.border.map(f32::from_bits);
        for (dimension, mode) in (0..).zip(sampling.address_modes) {
            // SAFETY: the reference lives.
            unsafe { self.cuTexRefSetAddressMode(reference, dimension, mode) }?;
        }
        // SAFETY: the reference lives, and the border's colour is four floats.
        unsafe {
            self.cuTexRefSetFilterMode(reference, sampling.filter)?;
            self.cuTexRefSetMipmapFilterMode(reference, sampling.level_filter)?;
            self.cuTexRefSetMipmapLevelBias(reference, sampling.level_bias)?;
            self.cuTexRefSetMipmapLevelClamp(reference, least, greatest)?;
            self.cuTexRefSetMaxAnisotropy(reference, sampling.anisotropy)?;
            self.cuTexRefSetBorderColor(reference, border.as_ptr())?;
            self.cuTexRefSetFlags(reference, sampling.flags)
        }
    }

    fn set_format(&self, reference: Reference, texels: Texels) -> Result<()> {
        let channels = i32::try_from(texels.channels()).map_err(|_| CuError::INVALID_VALUE)?;
        // SAFETY: the reference lives.
        unsafe { self.cuTexRefSetFormat(reference, texels.format as u32, channels) }
    }

    fn set_resource(&self, reference: Reference, resource: Option<&Resource>) -> Result<()> {
        let mut offset = 0;
        match resource.copied() {
            None => {
                let offset = &raw mut offset;
                // SAFETY: the reference lives, and the pointer is good.
                unsafe { self.cuTexRefSetAddress_v2(offset, reference, 0, 0) }
            }
            Some(Resource::Array(array)) => {
                let array = pointer(array.0);
                // SAFETY: the reference lives, and the caller passes an array that does.
                unsafe { self.cuTexRefSetArray(reference, array, OVERRIDE_FORMAT) }
            }
            Some(Resource::Mipmap(mipmap)) => {
                let mipmap = pointer(mipmap.0);
                // SAFETY: the reference lives, and the caller passes an array that does.
                unsafe { self.cuTexRefSetMipmappedArray(reference, mipmap, OVERRIDE_FORMAT) }
            }
            Some(Resource::Linear {
                address,
                texels,
                bytes,
            }) => {
                self.set_format(reference, texels)?;
                let offset = &raw mut offset;
                // SAFETY: the reference lives, the pointer is good, and memory is reached by kernels only.
                unsafe { self.cuTexRefSetAddress_v2(offset, reference, address, size(bytes)) }
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
                let (rows, pitch) = (&raw const rows, size(pitch));
                // SAFETY: as above; the description is good.
                unsafe { self.cuTexRefSetAddress2D_v3(reference, rows, address, pitch) }
            }
        }
    }
}

impl TextureReferences for CudaDevice {
    fn find_reference(&self, module: RawModule, name: &str, kind: TexRefTarget) -> Result<()> {
        self.driver()
            .find_reference(self.image(module)?, name, kind)
            .map(drop)
    }

    fn bind_texture(
        &self,
        module: RawModule,
        name: &str,
        resource: Option<&Resource>,
        sampling: &Sampling,
    ) -> Result<()> {
        let driver = self.driver();
        let reference = driver.find_reference(self.image(module)?, name, TexRefTarget::Texture)?;
        driver.set_sampling(reference, sampling)?;
        driver.set_resource(reference, resource)
    }

    fn bind_surface(&self, module: RawModule, name: &str, array: RawArray) -> Result<()> {
        let driver = self.driver();
        let reference = driver.find_reference(self.image(module)?, name, TexRefTarget::Surface)?;
        // SAFETY: the reference lives, and the caller passes an array that does.
        unsafe { driver.cuSurfRefSetArray(reference, pointer(array.0), 0) }
    }
}
