//! Copies and fills.

use std::ffi::c_void;

use wormhole_api::Element;

use super::body;
use crate::context::Scope;
use crate::copy::{Direction, Fill, Mode, copy, fill};
use crate::error::Result;
use crate::memory::is_synchronous;
use crate::stream::{Target, target};
use crate::types::{CUdeviceptr, CUresult, CUstream, DefaultStream};

/// The default stream, which copies without a stream parameter use.
pub const NO_STREAM: CUstream = std::ptr::null_mut();

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
        }?;
        settle(scope, target, [destination, source], self.mode)
    }
}

/// Waits where the program has said that synchronous operations on an allocation are to (`cuPointerSetAttribute`).
fn settle(scope: Scope, target: Target, addresses: [u64; 2], mode: Mode) -> Result {
    if mode == Mode::Synchronous && is_synchronous(addresses) {
        target.synchronize(scope)
    } else {
        Ok(())
    }
}

pub fn address(pointer: *const c_void) -> u64 {
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

/// One fill of the driver API.
fn set(default: DefaultStream, stream: CUstream, values: Fill, mode: Mode) -> CUresult {
    body! {
        let (scope, target) = target(default, stream)?;
        fill(scope, target, values, mode)?;
        settle(scope, target, [values.destination; 2], mode)
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
