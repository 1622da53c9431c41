//! Copies and fills.

use std::ffi::c_void;

use wormhole_api::Element;

use super::body;
use crate::copy::{Direction, Fill, Mode, Rows, copy, copy_rows, fill};
use crate::error::{CuError, Result};
use crate::stream::target;
use crate::types::{CUDA_MEMCPY2D, CUdeviceptr, CUresult, CUstream, DefaultStream};

/// The default stream, which copies without a stream parameter use.
const NO_STREAM: CUstream = std::ptr::null_mut();

/// One copy of the driver API.
struct Copy {
    default: DefaultStream,
    stream: CUstream,
    direction: Direction,
    mode: Mode,
}

impl Copy {
    const fn synchronous(default: DefaultStream, direction: Direction) -> Self {
        Self {
            default,
            stream: NO_STREAM,
            direction,
            mode: Mode::Synchronous,
        }
    }

    const fn asynchronous(default: DefaultStream, stream: CUstream, direction: Direction) -> Self {
        Self {
            default,
            stream,
            direction,
            mode: Mode::Asynchronous,
        }
    }

    /// # Safety
    /// Host memory among the ends is valid for the copy.
    unsafe fn run(self, destination: u64, source: u64, bytes: usize) -> Result {
        let (scope, target) = target(self.default, self.stream)?;
        // SAFETY: as the caller promises.
        unsafe {
            copy(
                scope,
                target,
                self.direction,
                (destination, source),
                bytes,
                self.mode,
            )
        }
    }
}

fn address(pointer: *const c_void) -> u64 {
    pointer.expose_provenance() as u64
}

pub unsafe fn cuMemcpy(
    default: DefaultStream,
    dst: CUdeviceptr,
    src: CUdeviceptr,
    ByteCount: usize,
) -> CUresult {
    let copy = Copy::synchronous(default, Direction::Unified);
    // SAFETY: as the caller promises.
    body! { unsafe { copy.run(dst, src, ByteCount) } }
}

pub unsafe fn cuMemcpyAsync(
    default: DefaultStream,
    dst: CUdeviceptr,
    src: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> CUresult {
    let copy = Copy::asynchronous(default, hStream, Direction::Unified);
    // SAFETY: as the caller promises.
    body! { unsafe { copy.run(dst, src, ByteCount) } }
}

pub unsafe fn cuMemcpyHtoD_v2(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    srcHost: *const c_void,
    ByteCount: usize,
) -> CUresult {
    let copy = Copy::synchronous(default, Direction::HostToDevice);
    // SAFETY: as the caller promises.
    body! { unsafe { copy.run(dstDevice, address(srcHost), ByteCount) } }
}

pub unsafe fn cuMemcpyHtoDAsync_v2(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    srcHost: *const c_void,
    ByteCount: usize,
    hStream: CUstream,
) -> CUresult {
    let copy = Copy::asynchronous(default, hStream, Direction::HostToDevice);
    // SAFETY: as the caller promises.
    body! { unsafe { copy.run(dstDevice, address(srcHost), ByteCount) } }
}

pub unsafe fn cuMemcpyDtoH_v2(
    default: DefaultStream,
    dstHost: *mut c_void,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
) -> CUresult {
    let copy = Copy::synchronous(default, Direction::DeviceToHost);
    // SAFETY: as the caller promises.
    body! { unsafe { copy.run(address(dstHost), srcDevice, ByteCount) } }
}

pub unsafe fn cuMemcpyDtoHAsync_v2(
    default: DefaultStream,
    dstHost: *mut c_void,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> CUresult {
    let copy = Copy::asynchronous(default, hStream, Direction::DeviceToHost);
    // SAFETY: as the caller promises.
    body! { unsafe { copy.run(address(dstHost), srcDevice, ByteCount) } }
}

pub unsafe fn cuMemcpyDtoD_v2(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
) -> CUresult {
    let copy = Copy::synchronous(default, Direction::DeviceToDevice);
    // SAFETY: as the caller promises.
    body! { unsafe { copy.run(dstDevice, srcDevice, ByteCount) } }
}

pub unsafe fn cuMemcpyDtoDAsync_v2(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> CUresult {
    let copy = Copy::asynchronous(default, hStream, Direction::DeviceToDevice);
    // SAFETY: as the caller promises.
    body! { unsafe { copy.run(dstDevice, srcDevice, ByteCount) } }
}

/// `CU_MEMORYTYPE_HOST`, `_DEVICE`, `_UNIFIED`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const UNIFIED: u32 = 4;

/// One end of a copy of rows: kind, host and device address, byte and row it starts at, pitch.
struct RowsEnd {
    kind: u32,
    host: u64,
    device: u64,
    x: usize,
    y: usize,
    pitch: usize,
}

impl RowsEnd {
    /// Where the first row starts, and the bytes from row to row.
    fn start(&self, rows: &Rows) -> Result<(u64, usize)> {
        let base = match self.kind {
            HOST => self.host,
            DEVICE | UNIFIED => self.device,
            // Arrays.
            _ => return Err(CuError::NOT_SUPPORTED),
        };
        let pitch = if self.pitch == 0 {
            rows.width
        } else {
            self.pitch
        };
        if rows.height > 1 && pitch < rows.width {
            return Err(CuError::INVALID_VALUE);
        }
        let offset = self
            .y
            .checked_mul(pitch)
            .and_then(|offset| offset.checked_add(self.x));
        let start = offset.and_then(|offset| base.checked_add(offset as u64));
        Ok((start.ok_or(CuError::INVALID_VALUE)?, pitch))
    }
}

/// One two-dimensional copy of the driver API.
///
/// # Safety
/// `description` is null or as `cuMemcpy2D` documents it; host memory among the ends is valid.
unsafe fn rows(
    default: DefaultStream,
    stream: CUstream,
    description: *const CUDA_MEMCPY2D,
    mode: Mode,
) -> Result {
    let (scope, target) = target(default, stream)?;
    if description.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: not null, so a description.
    let wanted = unsafe { description.read() };
    let rows = Rows {
        width: wanted.WidthInBytes,
        height: wanted.Height,
    };
    let source = RowsEnd {
        kind: wanted.srcMemoryType,
        host: address(wanted.srcHost),
        device: wanted.srcDevice,
        x: wanted.srcXInBytes,
        y: wanted.srcY,
        pitch: wanted.srcPitch,
    };
    let destination = RowsEnd {
        kind: wanted.dstMemoryType,
        host: address(wanted.dstHost),
        device: wanted.dstDevice,
        x: wanted.dstXInBytes,
        y: wanted.dstY,
        pitch: wanted.dstPitch,
    };
    let ends = (destination.start(&rows)?, source.start(&rows)?);
    // SAFETY: as the caller promises.
    unsafe { copy_rows(scope, target, ends, rows, mode) }
}

pub unsafe fn cuMemcpy2D_v2(default: DefaultStream, pCopy: *const CUDA_MEMCPY2D) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { rows(default, NO_STREAM, pCopy, Mode::Synchronous) } }
}

pub unsafe fn cuMemcpy2DUnaligned_v2(
    default: DefaultStream,
    pCopy: *const CUDA_MEMCPY2D,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuMemcpy2D_v2(default, pCopy) }
}

pub unsafe fn cuMemcpy2DAsync_v2(
    default: DefaultStream,
    pCopy: *const CUDA_MEMCPY2D,
    hStream: CUstream,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { rows(default, hStream, pCopy, Mode::Asynchronous) } }
}

/// One fill of the driver API.
fn set(default: DefaultStream, stream: CUstream, values: Fill, mode: Mode) -> CUresult {
    body! {
        let (scope, target) = target(default, stream)?;
        fill(scope, target, values, mode)
    }
}

/// A fill of one row.
fn row(destination: u64, value: u32, element: Element, width: usize) -> Fill {
    Fill {
        destination,
        pitch: 0,
        value,
        element,
        width,
        height: 1,
    }
}

/// The fills with elements of one size: of a row and of rows, first synchronous, then asynchronous.
macro_rules! fills {
    ($element:ident($value:ty): $row:ident, $rows:ident, $row_async:ident, $rows_async:ident) => {
        pub unsafe fn $row(
            default: DefaultStream,
            dstDevice: CUdeviceptr,
            value: $value,
            N: usize,
        ) -> CUresult {
            let fill = row(dstDevice, value.into(), Element::$element, N);
            set(default, NO_STREAM, fill, Mode::Synchronous)
        }

        pub unsafe fn $rows(
            default: DefaultStream,
            dstDevice: CUdeviceptr,
            dstPitch: usize,
            value: $value,
            Width: usize,
            Height: usize,
        ) -> CUresult {
            let fill = Fill {
                pitch: dstPitch,
                height: Height,
                ..row(dstDevice, value.into(), Element::$element, Width)
            };
            set(default, NO_STREAM, fill, Mode::Synchronous)
        }

        pub unsafe fn $row_async(
            default: DefaultStream,
            dstDevice: CUdeviceptr,
            value: $value,
            N: usize,
            hStream: CUstream,
        ) -> CUresult {
            let fill = row(dstDevice, value.into(), Element::$element, N);
            set(default, hStream, fill, Mode::Asynchronous)
        }

        pub unsafe fn $rows_async(
            default: DefaultStream,
            dstDevice: CUdeviceptr,
            dstPitch: usize,
            value: $value,
            Width: usize,
            Height: usize,
            hStream: CUstream,
        ) -> CUresult {
            let fill = Fill {
                pitch: dstPitch,
                height: Height,
                ..row(dstDevice, value.into(), Element::$element, Width)
            };
            set(default, hStream, fill, Mode::Asynchronous)
        }
    };
}

fills!(Byte(u8): cuMemsetD8_v2, cuMemsetD2D8_v2, cuMemsetD8Async, cuMemsetD2D8Async);
fills!(Half(u16): cuMemsetD16_v2, cuMemsetD2D16_v2, cuMemsetD16Async, cuMemsetD2D16Async);
fills!(Word(u32): cuMemsetD32_v2, cuMemsetD2D32_v2, cuMemsetD32Async, cuMemsetD2D32Async);
