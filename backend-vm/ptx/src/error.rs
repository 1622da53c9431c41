//! Errors of images, kernels and launches.

use crate::link::LinkError;
use crate::parse::ParseError;

/// Error in loading an image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The image is neither PTX nor a fatbin nor an ELF file (CUDA error 200).
    #[error("the image is neither PTX text nor a fatbin: {0}")]
    InvalidImage(String),
    /// The image has kernels in machine code only, none as PTX (CUDA error 209).
    #[error(
        "the image holds its kernels as machine code for {arch} only, and no PTX: build it with PTX (-gencode arch=compute_XX,code=compute_XX)"
    )]
    NoKernelImage {
        /// Architectures in the image, for the message.
        arch: String,
    },
    /// The PTX is malformed (CUDA error 218).
    #[error("invalid PTX: {0}")]
    InvalidPtx(ParseError),
    /// The PTX is newer than this engine (CUDA error 222).
    #[error("{0}")]
    UnsupportedVersion(ParseError),
    /// A limit of the engine is exceeded (CUDA error 2).
    #[error("{what} is {found} bytes long, more than the limit of {limit}")]
    TooLarge {
        /// Name of the quantity.
        what: &'static str,
        /// Its size in bytes.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A variable's initialiser names a symbol that the module does not define (CUDA error 218).
    #[error(
        "line {line}: the initialiser of `{variable}` names `{symbol}`, which this module does not define"
    )]
    UnknownSymbol {
        /// The variable.
        variable: String,
        /// Undefined symbol.
        symbol: String,
        /// Line of the variable's declaration.
        line: u32,
    },
    /// One name has two definitions (CUDA error 218).
    #[error("line {line}: `{name}` is defined twice")]
    Duplicate {
        /// The name.
        name: String,
        /// Line of the second definition.
        line: u32,
    },
    /// The input is no object file or library with a fatbin (CUDA error 999).
    #[error("{0}")]
    InvalidObject(String),
    /// The input is code for a compiler that this device lacks (CUDA error 221).
    #[error("the input is NVVM code, of which this device has no compiler")]
    Intermediate,
    /// The image's parts cannot be linked (CUDA error 300, or the error of the part that is
    /// invalid).
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl LoadError {
    /// Returns the driver API's `CUresult` for the error.
    #[must_use]
    pub fn cuda_code(&self) -> u32 {
        match self {
            Self::InvalidImage(_) => 200,
            Self::NoKernelImage { .. } => 209,
            Self::InvalidPtx(_) | Self::UnknownSymbol { .. } | Self::Duplicate { .. } => 218,
            Self::UnsupportedVersion(_) => 222,
            Self::TooLarge { .. } => 2,
            Self::InvalidObject(_) => 999,
            Self::Intermediate => 221,
            Self::Link(LinkError::Text { error, .. }) => Self::from(error.clone()).cuda_code(),
            Self::Link(_) => 300,
        }
    }
}

impl From<ParseError> for LoadError {
    fn from(error: ParseError) -> Self {
        match error {
            ParseError::Version { .. } => Self::UnsupportedVersion(error),
            _ => Self::InvalidPtx(error),
        }
    }
}

/// Error in decoding a kernel of a loaded module.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The module has no kernel of that name (CUDA error 500).
    #[error("the module has no kernel `{0}`")]
    NotFound(String),
    /// The kernel needs an instruction that this device lacks (CUDA error 801).
    #[error(
        "kernel `{kernel}`: instruction `{instruction}` is not supported by the CPU device (line {line})"
    )]
    Unsupported {
        /// The kernel.
        kernel: String,
        /// The instruction with its modifiers.
        instruction: String,
        /// Line of the PTX.
        line: u32,
    },
    /// An operand does not fit its instruction (CUDA error 218).
    #[error("kernel `{kernel}`: `{instruction}`: {reason} (line {line})")]
    Malformed {
        /// The kernel.
        kernel: String,
        /// The instruction or declaration.
        instruction: String,
        /// Reason.
        reason: String,
        /// Line of the PTX.
        line: u32,
    },
    /// The kernel calls a function that neither the module nor the device defines (CUDA error 801).
    #[error(
        "kernel `{kernel}`: function `{function}` is not defined in the module and not provided by the CPU device (line {line})"
    )]
    UnknownFunction {
        /// The kernel.
        kernel: String,
        /// The function.
        function: String,
        /// Line of the PTX.
        line: u32,
    },
    /// A limit of the engine is exceeded (CUDA error 701).
    #[error("kernel `{kernel}`: {what} is {found}, more than the limit of {limit}")]
    TooLarge {
        /// The kernel.
        kernel: String,
        /// Name of the quantity.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The limit.
        limit: u64,
    },
}

impl KernelError {
    /// Returns the driver API's `CUresult` for the error.
    #[must_use]
    pub fn cuda_code(&self) -> u32 {
        match self {
            Self::NotFound(_) => 500,
            Self::Unsupported { .. } | Self::UnknownFunction { .. } => 801,
            Self::Malformed { .. } => 218,
            Self::TooLarge { .. } => 701,
        }
    }
}

/// Kind of fault that ended a launch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    /// An access lies outside every allocation (CUDA error 700).
    #[error("illegal {} of {bytes} bytes at {address:#x}", if *.write { "write" } else { "read" })]
    IllegalAddress {
        /// The address.
        address: u64,
        /// Bytes of the access.
        bytes: u32,
        /// Whether it was a write.
        write: bool,
    },
    /// An access is not aligned to its size (CUDA error 716).
    #[error("misaligned access of {bytes} bytes at {address:#x}")]
    Misaligned {
        /// The address.
        address: u64,
        /// Bytes of the access.
        bytes: u32,
    },
    /// An access is to a space that the instruction cannot use (CUDA error 717).
    #[error("address {address:#x} lies in a state space that the instruction cannot use")]
    AddressSpace {
        /// The address.
        address: u64,
    },
    /// A handle names no texture or surface object that the instruction can use (CUDA error 700).
    #[error("{handle:#x} is the handle of no object, or of none that the instruction can use")]
    InvalidObject {
        /// The handle.
        handle: u64,
    },
    /// A handle names no condition of the graph that runs the kernel (CUDA error 700).
    #[error("{handle:#x} is the handle of no condition of the graph")]
    InvalidCondition {
        /// The handle.
        handle: u64,
    },
    /// `trap` (CUDA error 719).
    #[error("trap")]
    Trap,
    /// The thread's stack is exhausted (CUDA error 719).
    #[error("stack overflow")]
    StackOverflow,
    /// A call's address is no function (CUDA error 718).
    #[error("call of {address:#x}, which is no function")]
    InvalidPc {
        /// The address.
        address: u64,
    },
    /// An operand is one that the instruction does not permit (CUDA error 715).
    #[error("illegal instruction: {0}")]
    IllegalInstruction(&'static str),
    /// An assertion failed; its text is in the output (CUDA error 710).
    #[error("assertion failed")]
    Assert,
    /// Every thread of a block waits for another one (CUDA error 702).
    #[error("every thread of the block waits at a barrier that cannot complete")]
    Deadlock,
    /// The launch needs more resources than the engine has (CUDA error 701).
    #[error("the launch needs {what}, which is more than there is")]
    OutOfResources {
        /// Resource that the launch needs.
        what: &'static str,
    },
    /// The launch's configuration or parameters are wrong (CUDA error 1).
    #[error("invalid launch: {0}")]
    InvalidLaunch(&'static str),
    /// The caller cancelled the launch (CUDA error 719).
    #[error("cancelled")]
    Cancelled,
}

/// Fault that ended a launch, and its location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("kernel `{kernel}`, line {line}, block {block:?}, thread {thread:?}: {kind}")]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// The kernel.
    pub kernel: String,
    /// Line of the PTX.
    pub line: u32,
    /// The block.
    pub block: [u32; 3],
    /// The thread; the lowest one if the fault concerns several.
    pub thread: [u32; 3],
}

impl Fault {
    /// Returns the driver API's `CUresult` for the fault.
    #[must_use]
    pub fn cuda_code(&self) -> u32 {
        match self.kind {
            FaultKind::IllegalAddress { .. }
            | FaultKind::InvalidObject { .. }
            | FaultKind::InvalidCondition { .. } => 700,
            FaultKind::Misaligned { .. } => 716,
            FaultKind::AddressSpace { .. } => 717,
            FaultKind::Trap | FaultKind::StackOverflow | FaultKind::Cancelled => 719,
            FaultKind::InvalidPc { .. } => 718,
            FaultKind::IllegalInstruction(_) => 715,
            FaultKind::Assert => 710,
            FaultKind::Deadlock => 702,
            FaultKind::OutOfResources { .. } => 701,
            FaultKind::InvalidLaunch(_) => 1,
        }
    }
}
