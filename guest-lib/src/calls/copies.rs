//! Copies and fills of linear memory.

use wormhole_api::Element;

use crate::error::Result;
use crate::graph::submit::{Operation, submit};
use crate::memory::end::CopyEnd;
use crate::memory::is_synchronous;
use crate::object::context::Scope;
use crate::object::stream::{Target, target};
use crate::parameter::{In, Out, UnifiedPtr};
use crate::types::{CUdeviceptr, CUstream, DefaultStream};
use crate::work::copy::{Copy, Fill, Mode};

/// Default stream, for copies without a stream parameter.
pub const NO_STREAM: CUstream = std::ptr::null_mut();

/// Submits a copy to a stream.
pub(super) fn copy(
    scope: Scope,
    target: Target,
    ends: (CopyEnd, CopyEnd),
    bytes: usize,
    mode: Mode,
) -> Result {
    scope.session.alive()?;
    if bytes == 0 {
        return Ok(());
    }
    let copy = Copy::new(ends, bytes, mode)?;
    submit(scope, target, Operation::Copy(copy))
}

/// Submits a copy of the driver API, to the destination that comes first.
fn run(
    default: DefaultStream,
    stream: CUstream,
    (to, from): (CopyEnd, CopyEnd),
    bytes: usize,
    mode: Mode,
) -> Result {
    let (scope, target) = target(default, stream)?;
    copy(scope, target, (to, from), bytes, mode)?;
    synchronize_if_required(scope, target, [to.address(), from.address()], mode)
}

/// Synchronizes a synchronous copy if `cuPointerSetAttribute` requires it for one of the allocations.
fn synchronize_if_required(
    scope: Scope,
    target: Target,
    addresses: [u64; 2],
    mode: Mode,
) -> Result {
    if mode == Mode::Synchronous && is_synchronous(addresses) {
        target.synchronize(scope)
    } else {
        Ok(())
    }
}

/// Defines the two functions of a copy between ends that the parameters name, the destination first: the synchronous
/// one, and that of a stream. `$run` submits the copy.
macro_rules! copies {
    ($run:ident: $($copy:ident, $copy_async:ident($($end:ident: $kind:ty),*): $ends:expr;)*) => {$(
        pub fn $copy(default: DefaultStream, $($end: $kind,)* ByteCount: usize) -> Result {
            $run(default, NO_STREAM, $ends, ByteCount, Mode::Synchronous)
        }

        pub fn $copy_async(
            default: DefaultStream,
            $($end: $kind,)*
            ByteCount: usize,
            hStream: CUstream,
        ) -> Result {
            $run(default, hStream, $ends, ByteCount, Mode::Asynchronous)
        }
    )*};
}
pub(super) use copies;

copies! { run:
    cuMemcpy, cuMemcpyAsync(dst: UnifiedPtr<'_>, src: UnifiedPtr<'_>): (dst.into(), src.into());
    cuMemcpyHtoD_v2, cuMemcpyHtoDAsync_v2(dstDevice: CUdeviceptr, srcHost: In<'_, [u8]>):
        (CopyEnd::device(dstDevice), srcHost.into());
    cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2(dstHost: Out<'_, [u8]>, srcDevice: CUdeviceptr):
        (dstHost.into(), CopyEnd::device(srcDevice));
    cuMemcpyDtoD_v2, cuMemcpyDtoDAsync_v2(dstDevice: CUdeviceptr, srcDevice: CUdeviceptr):
        (CopyEnd::device(dstDevice), CopyEnd::device(srcDevice));
}

/// Submits a fill.
fn set(default: DefaultStream, stream: CUstream, values: Fill, mode: Mode) -> Result {
    let (scope, target) = target(default, stream)?;
    scope.session.alive()?;
    if values.width == 0 || values.height == 0 {
        return synchronize_if_required(scope, target, [values.destination; 2], mode);
    }
    submit(scope, target, Operation::Fill(values.checked(mode)?))?;
    synchronize_if_required(scope, target, [values.destination; 2], mode)
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
