//! Copies and fills of linear memory.

use wormhole_api::Element;

use crate::error::Result;
use crate::graph::submit::{Operation, submit};
use crate::memory::is_synchronous;
use crate::object::context::Scope;
use crate::object::stream::{Target, target};
use crate::parameter::{In, Out, UnifiedPtr};
use crate::types::{CUdeviceptr, CUstream, DefaultStream};
use crate::work::copy::{self, Direction, Fill, Mode};

/// Default stream, for copies without a stream parameter.
pub const NO_STREAM: CUstream = std::ptr::null_mut();

/// Submits a copy to a stream.
///
/// # Safety
/// An end that is host memory is valid for the copy.
pub(super) unsafe fn copy(
    scope: Scope,
    target: Target,
    direction: Direction,
    ends: (u64, u64),
    bytes: usize,
    mode: Mode,
) -> Result {
    scope.session.alive()?;
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: as the caller promises.
    let copy = unsafe { copy::Copy::new(direction, ends, bytes, mode) }?;
    submit(scope, target, Operation::Copy(copy))
}

/// Copy call of the driver API.
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

    /// Submits the copy. Host memory of the program comes from an [`In`], an [`Out`] or a [`UnifiedPtr`] only.
    fn run(self, destination: u64, source: u64, bytes: usize) -> Result {
        let (scope, target) = target(self.default, self.stream)?;
        // SAFETY: host memory of these types is valid for the copy. Pageable memory is refused as an end that the
        // direction places on the device.
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

/// Synchronizes a synchronous copy if `cuPointerSetAttribute` requires it for one of the allocations.
fn settle(scope: Scope, target: Target, addresses: [u64; 2], mode: Mode) -> Result {
    if mode == Mode::Synchronous && is_synchronous(addresses) {
        target.synchronize(scope)
    } else {
        Ok(())
    }
}

pub fn cuMemcpy(
    default: DefaultStream,
    dst: UnifiedPtr<'_>,
    src: UnifiedPtr<'_>,
    ByteCount: usize,
) -> Result {
    let copy = Copy::synchronous(default, Direction::Unified);
    copy.run(dst.address(), src.address(), ByteCount)
}

pub fn cuMemcpyAsync(
    default: DefaultStream,
    dst: UnifiedPtr<'_>,
    src: UnifiedPtr<'_>,
    ByteCount: usize,
    hStream: CUstream,
) -> Result {
    let copy = Copy::asynchronous(default, hStream, Direction::Unified);
    copy.run(dst.address(), src.address(), ByteCount)
}

pub fn cuMemcpyHtoD_v2(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    srcHost: In<'_, [u8]>,
    ByteCount: usize,
) -> Result {
    let copy = Copy::synchronous(default, Direction::HostToDevice);
    copy.run(dstDevice, srcHost.address(), ByteCount)
}

pub fn cuMemcpyHtoDAsync_v2(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    srcHost: In<'_, [u8]>,
    ByteCount: usize,
    hStream: CUstream,
) -> Result {
    let copy = Copy::asynchronous(default, hStream, Direction::HostToDevice);
    copy.run(dstDevice, srcHost.address(), ByteCount)
}

pub fn cuMemcpyDtoH_v2(
    default: DefaultStream,
    dstHost: Out<'_, [u8]>,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
) -> Result {
    let copy = Copy::synchronous(default, Direction::DeviceToHost);
    copy.run(dstHost.address(), srcDevice, ByteCount)
}

pub fn cuMemcpyDtoHAsync_v2(
    default: DefaultStream,
    dstHost: Out<'_, [u8]>,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> Result {
    let copy = Copy::asynchronous(default, hStream, Direction::DeviceToHost);
    copy.run(dstHost.address(), srcDevice, ByteCount)
}

pub fn cuMemcpyDtoD_v2(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
) -> Result {
    let copy = Copy::synchronous(default, Direction::DeviceToDevice);
    copy.run(dstDevice, srcDevice, ByteCount)
}

pub fn cuMemcpyDtoDAsync_v2(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> Result {
    let copy = Copy::asynchronous(default, hStream, Direction::DeviceToDevice);
    copy.run(dstDevice, srcDevice, ByteCount)
}

/// Submits a fill.
fn set(default: DefaultStream, stream: CUstream, values: Fill, mode: Mode) -> Result {
    let (scope, target) = target(default, stream)?;
    scope.session.alive()?;
    if values.width == 0 || values.height == 0 {
        return settle(scope, target, [values.destination; 2], mode);
    }
    submit(scope, target, Operation::Fill(values.checked(mode)?))?;
    settle(scope, target, [values.destination; 2], mode)
}

/// Returns a fill of one row.
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

/// Defines the fills of one element size: of a row and of rows, first synchronous, then asynchronous.
macro_rules! fills {
    ($element:ident($value:ty): $row:ident, $rows:ident, $row_async:ident, $rows_async:ident) => {
        pub fn $row(
            default: DefaultStream,
            dstDevice: CUdeviceptr,
            value: $value,
            N: usize,
        ) -> Result {
            let fill = row(dstDevice, value.into(), Element::$element, N);
            set(default, NO_STREAM, fill, Mode::Synchronous)
        }

        pub fn $rows(
            default: DefaultStream,
            dstDevice: CUdeviceptr,
            dstPitch: usize,
            value: $value,
            Width: usize,
            Height: usize,
        ) -> Result {
            let fill = Fill {
                pitch: dstPitch,
                height: Height,
                ..row(dstDevice, value.into(), Element::$element, Width)
            };
            set(default, NO_STREAM, fill, Mode::Synchronous)
        }

        pub fn $row_async(
            default: DefaultStream,
            dstDevice: CUdeviceptr,
            value: $value,
            N: usize,
            hStream: CUstream,
        ) -> Result {
            let fill = row(dstDevice, value.into(), Element::$element, N);
            set(default, hStream, fill, Mode::Asynchronous)
        }

        pub fn $rows_async(
            default: DefaultStream,
            dstDevice: CUdeviceptr,
            dstPitch: usize,
            value: $value,
            Width: usize,
            Height: usize,
            hStream: CUstream,
        ) -> Result {
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
