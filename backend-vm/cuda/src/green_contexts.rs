//! Green contexts of the driver. They are younger than the oldest driver that is served.

use std::ffi::{CStr, c_void};
use std::ptr;

use cudarc::driver::sys::{CUcontext, CUstream};
use wormhole_api::constants::green_context_flags::DEFAULT_STREAM;
use wormhole_api::constants::resource_kind::SM;
use wormhole_device::{
    CuError, GreenContexts, Multiprocessors, RawGreen, RawStream, Result, Split,
};

use crate::device::{CudaDevice, handle, size};
use crate::driver::check;

/// `CUdevResource`, whose words the driver alone reads but for its type and what is said of multiprocessors.
type Resource = [u64; 18];

/// The words with the count and the least part, and with the alignment.
const COUNT: usize = 12;
const ALIGNMENT: usize = 13;

type DeviceResource = unsafe extern "C" fn(i32, *mut Resource, u32) -> u32;
type GreenResource = unsafe extern "C" fn(*mut c_void, *mut Resource, u32) -> u32;
type SplitByCount =
    unsafe extern "C" fn(*mut Resource, *mut u32, *const Resource, *mut Resource, u32, u32) -> u32;
type GenerateDescription = unsafe extern "C" fn(*mut *mut c_void, *mut Resource, u32) -> u32;
type Create = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, i32, u32) -> u32;
type Destroy = unsafe extern "C" fn(*mut c_void) -> u32;
type ToContext = unsafe extern "C" fn(*mut CUcontext, *mut c_void) -> u32;

fn pointer(raw: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(size(raw))
}

/// The lower and the upper half of a word.
fn halves(word: u64) -> [u32; 2] {
    [word, word >> u32::BITS].map(|half| u32::try_from(half & u64::from(u32::MAX)).unwrap_or(0))
}

fn multiprocessors(resource: Resource) -> Multiprocessors {
    let [count, least] = halves(resource[COUNT]);
    let [alignment, _] = halves(resource[ALIGNMENT]);
    Multiprocessors {
        count,
        least,
        alignment,
        described: resource,
    }
}

impl CudaDevice {
    /// A function of green contexts.
    ///
    /// # Safety
    /// The function has that type.
    unsafe fn green<F: Copy>(&self, name: &CStr) -> Result<F> {
        // SAFETY: as the caller promises.
        unsafe { self.driver().later(name) }.ok_or(CuError::NOT_SUPPORTED)
    }
}

impl GreenContexts for CudaDevice {
    fn multiprocessors(&self, green: Option<RawGreen>) -> Result<Multiprocessors> {
        let mut found = [0; 18];
        // SAFETY: the types are those of the CUDA driver API; the caller passes a green context that lives.
        check(unsafe {
            match green {
                None => {
                    let get: DeviceResource = self.green(c"cuDeviceGetDevResource")?;
                    get(self.ordinal(), &raw mut found, SM)
                }
                Some(green) => {
                    let get: GreenResource = self.green(c"cuGreenCtxGetDevResource")?;
                    get(pointer(green.0), &raw mut found, SM)
                }
            }
        })?;
        Ok(multiprocessors(found))
    }

    fn split(&self, from: &Multiprocessors, flags: u32, least: u32, groups: u32) -> Result<Split> {
        // SAFETY: the type is that of the CUDA driver API.
        let split: SplitByCount = unsafe { self.green(c"cuDevSmResourceSplitByCount") }?;
        let input = &raw const from.described;
        let mut possible = 0;
        // SAFETY: the driver described the input; the pointers are good, and without groups it only counts.
        check(unsafe {
            split(
                ptr::null_mut(),
                &raw mut possible,
                input,
                ptr::null_mut(),
                flags,
                least,
            )
        })?;
        let mut made = possible.min(groups);
        if made == 0 {
            return Ok(Split {
                possible,
                groups: Vec::new(),
                rest: None,
            });
        }
        let (mut parts, mut rest) = (vec![[0; 18]; made as usize], [0; 18]);
        // SAFETY: as above; there is room for as many groups as are asked for.
        check(unsafe {
            split(
                parts.as_mut_ptr(),
                &raw mut made,
                input,
                &raw mut rest,
                flags,
                least,
            )
        })?;
        parts.truncate(made as usize);
        let [kind, _] = halves(rest[0]);
        Ok(Split {
            possible,
            groups: parts.into_iter().map(multiprocessors).collect(),
            rest: (kind == SM).then(|| multiprocessors(rest)),
        })
    }

    fn create_green(&self, parts: &[Multiprocessors]) -> Result<RawGreen> {
        let mut resources: Vec<Resource> = parts.iter().map(|part| part.described).collect();
        let (mut description, mut green) = (ptr::null_mut(), ptr::null_mut());
        let count = u32::try_from(resources.len()).map_err(|_| CuError::INVALID_VALUE)?;
        // SAFETY: the types are those of the CUDA driver API, and the driver described the parts.
        unsafe {
            if count != 0 {
                let describe: GenerateDescription = self.green(c"cuDevResourceGenerateDesc")?;
                check(describe(
                    &raw mut description,
                    resources.as_mut_ptr(),
                    count,
                ))?;
            }
            let create: Create = self.green(c"cuGreenCtxCreate")?;
            check(create(
                &raw mut green,
                description,
                self.ordinal(),
                DEFAULT_STREAM,
            ))?;
        }
        Ok(RawGreen(handle(green)))
    }

    fn destroy_green(&self, green: RawGreen) -> Result<()> {
        // SAFETY: the type is that of the CUDA driver API; the caller passes a green context that lives.
        unsafe {
            let destroy: Destroy = self.green(c"cuGreenCtxDestroy")?;
            check(destroy(pointer(green.0)))
        }
    }

    fn green_stream(&self, green: RawGreen, flags: u32, priority: i32) -> Result<RawStream> {
        let (mut context, mut stream): (CUcontext, CUstream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the type is that of the CUDA driver API; the caller passes a green context that lives. What is
        // made while its context is current belongs to it.
        unsafe {
            let to_context: ToContext = self.green(c"cuCtxFromGreenCtx")?;
            check(to_context(&raw mut context, pointer(green.0)))?;
            self.driver().cuCtxSetCurrent(context)?;
            let made = self
                .driver()
                .cuStreamCreateWithPriority(&raw mut stream, flags, priority);
            self.driver().cuCtxSetCurrent(self.handle())?;
            made?;
        }
        Ok(RawStream(handle(stream)))
    }
}
