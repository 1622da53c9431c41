//! Results of the driver API for the errors of the PTX engine.

use wormhole_device::CuError;
use wormhole_ptx::link::LinkError;
use wormhole_ptx::{Fault, FaultKind, KernelError, LoadError};

/// Returns the result of loading or linking an image.
pub fn of_image(error: &LoadError) -> CuError {
    match error {
        LoadError::InvalidImage(_) => CuError::INVALID_IMAGE,
        LoadError::NoKernelImage { .. } => CuError::NO_BINARY_FOR_GPU,
        LoadError::InvalidPtx(_)
        | LoadError::UnknownSymbol { .. }
        | LoadError::Duplicate { .. } => CuError::INVALID_PTX,
        LoadError::UnsupportedVersion(_) => CuError::UNSUPPORTED_PTX_VERSION,
        LoadError::TooLarge { .. } => CuError::OUT_OF_MEMORY,
        LoadError::InvalidObject(_) => CuError::UNKNOWN,
        LoadError::Intermediate => CuError::JIT_COMPILER_NOT_FOUND,
        LoadError::Link(LinkError::Text { error, .. }) => of_image(&LoadError::from(error.clone())),
        LoadError::Link(_) => CuError::INVALID_SOURCE,
    }
}

/// Returns the result of finding a kernel.
pub fn of_kernel(error: &KernelError) -> CuError {
    match error {
        KernelError::NotFound(_) => CuError::NOT_FOUND,
        KernelError::Unsupported { .. } | KernelError::UnknownFunction { .. } => {
            CuError::NOT_SUPPORTED
        }
        KernelError::Malformed { .. } => CuError::INVALID_PTX,
        KernelError::TooLarge { .. } => CuError::LAUNCH_OUT_OF_RESOURCES,
    }
}

/// Returns the result of a launch that faulted.
pub fn of_launch(fault: &Fault) -> CuError {
    match fault.kind {
        FaultKind::IllegalAddress { .. }
        | FaultKind::InvalidObject { .. }
        | FaultKind::InvalidCondition { .. } => CuError::ILLEGAL_ADDRESS,
        FaultKind::Misaligned { .. } => CuError::MISALIGNED_ADDRESS,
        FaultKind::AddressSpace { .. } => CuError::INVALID_ADDRESS_SPACE,
        FaultKind::Trap | FaultKind::StackOverflow | FaultKind::Cancelled => CuError::LAUNCH_FAILED,
        FaultKind::InvalidPc { .. } => CuError::INVALID_PC,
        FaultKind::IllegalInstruction(_) => CuError::ILLEGAL_INSTRUCTION,
        FaultKind::Assert => CuError::ASSERT,
        FaultKind::Deadlock => CuError::LAUNCH_TIMEOUT,
        FaultKind::OutOfResources { .. } => CuError::LAUNCH_OUT_OF_RESOURCES,
        FaultKind::InvalidLaunch(_) => CuError::INVALID_VALUE,
    }
}
