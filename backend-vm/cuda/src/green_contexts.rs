//! Green contexts of the driver. They are newer than the oldest supported driver.

use std::mem::offset_of;
use std::ptr;

use wormhole_api::constants::device_resource_type::SM;
use wormhole_api::constants::green_context_flags::DEFAULT_STREAM;
use wormhole_api::ctypes::{CUcontext, CUdevResource, CUstream};
use wormhole_device::{
    CuError, GreenContexts, Multiprocessors, RawGreenContext, RawStream, Result, Split,
};

use crate::current;
use crate::device::{CudaDevice, handle, pointer};

/// `CUdevResource` as words. Only its type and the fields of multiprocessors are not opaque.
type Resource = [u64; 18];

const _: () = assert!(size_of::<Resource>() == size_of::<CUdevResource>());

/// Word with the count and the least part; below, the word with the alignment.
const COUNT: usize = offset_of!(CUdevResource, smCount) / size_of::<u64>();
const ALIGNMENT: usize = offset_of!(CUdevResource, smCoscheduledAlignment) / size_of::<u64>();

/// Lower and upper half of a word.
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

impl GreenContexts for CudaDevice {
    fn multiprocessors(&self, green: Option<RawGreenContext>) -> Result<Multiprocessors> {
        let mut found = [0; 18];
        let place = (&raw mut found).cast::<CUdevResource>();
        let driver = self.driver();
        // SAFETY: the place is as large as the driver's type; the caller passes a green context that lives.
        unsafe {
            match green {
                None => driver.cuDeviceGetDevResource(self.ordinal(), place, SM)?,
                Some(green) => driver.cuGreenCtxGetDevResource(pointer(green.0), place, SM)?,
            }
        }
        Ok(multiprocessors(found))
    }

    fn split(&self, from: &Multiprocessors, flags: u32, least: u32, groups: u32) -> Result<Split> {
        let input = (&raw const from.described).cast::<CUdevResource>();
        let mut possible = 0;
        // SAFETY: the driver described the input; the pointers are good, and without groups the call only counts.
        unsafe {
            self.driver().cuDevSmResourceSplitByCount(
                ptr::null_mut(),
                &raw mut possible,
                input,
                ptr::null_mut(),
                flags,
                least,
            )
        }?;
        let mut made = possible.min(groups);
        if made == 0 {
            return Ok(Split {
                possible,
                groups: Vec::new(),
                rest: None,
            });
        }
        let (mut parts, mut rest) = (vec![[0; 18]; made as usize], [0; 18]);
        // SAFETY: as above; there is room for the requested number of groups.
        unsafe {
            self.driver().cuDevSmResourceSplitByCount(
                parts.as_mut_ptr().cast(),
                &raw mut made,
                input,
                (&raw mut rest).cast(),
                flags,
                least,
            )
        }?;
        parts.truncate(made as usize);
        let [kind, _] = halves(rest[0]);
        Ok(Split {
            possible,
            groups: parts.into_iter().map(multiprocessors).collect(),
            rest: (kind == SM).then(|| multiprocessors(rest)),
        })
    }

    fn create_green(&self, parts: &[Multiprocessors]) -> Result<RawGreenContext> {
        let resources: Vec<Resource> = parts.iter().map(|part| part.described).collect();
        let (mut description, mut green) = (ptr::null_mut(), ptr::null_mut());
        let count = u32::try_from(resources.len()).map_err(|_| CuError::INVALID_VALUE)?;
        let driver = self.driver();
        // SAFETY: the pointers are good, and the driver described the parts.
        unsafe {
            if count != 0 {
                let parts = resources.as_ptr().cast();
                driver.cuDevResourceGenerateDesc(&raw mut description, parts, count)?;
            }
            driver.cuGreenCtxCreate(&raw mut green, description, self.ordinal(), DEFAULT_STREAM)?;
        }
        Ok(RawGreenContext(handle(green)))
    }

    fn destroy_green(&self, green: RawGreenContext) -> Result<()> {
        // SAFETY: the caller passes a green context that lives.
        unsafe { self.driver().cuGreenCtxDestroy(pointer(green.0)) }
    }

    fn green_stream(&self, green: RawGreenContext, flags: u32, priority: i32) -> Result<RawStream> {
        let (mut context, mut stream): (CUcontext, CUstream) = (ptr::null_mut(), ptr::null_mut());
        let driver = self.driver();
        current::forget();
        // SAFETY: the caller passes a green context that lives. A stream belongs to the context that is current when
        // it is created.
        unsafe {
            driver.cuCtxFromGreenCtx(&raw mut context, pointer(green.0))?;
            driver.cuCtxSetCurrent(context)?;
            driver.cuStreamCreateWithPriority(&raw mut stream, flags, priority)?;
        }
        Ok(RawStream(handle(stream)))
    }
}
