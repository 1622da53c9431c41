//! What can go wrong with an image, a kernel or a launch.

use crate::link::LinkError;
use crate::parse::ParseError;

/// Why an image cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// Neither PTX nor a fatbin nor an ELF file (CUDA error 200).
    #[error("the image is neither PTX text nor a fatbin: {0}")]
    InvalidImage(String),
    /// Kernels in machine code only, none as PTX (CUDA error 209).
    #[error(
        "the image holds its kernels as machine code for {arch} only, and no PTX: build it with PTX (-gencode arch=compute_XX,code=compute_XX)"
    )]
    NoKernelImage {
        /// The architectures in it, for the message.
        arch: String,
    },
    /// The PTX is malformed (CUDA error 218).
    #[error("invalid PTX: {0}")]
    InvalidPtx(ParseError),
    /// The PTX is newer than this engine (CUDA error 222).
    #[error("{0}")]
    UnsupportedVersion(ParseError),
    /// A limit of the engine (CUDA error 2).
    #[error("{what} is {found} bytes long, more than the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A variable's initialiser names what the module does not define (CUDA error 218).
    #[error(
        "line {line}: the initialiser of `{variable}` names `{symbol}`, which this module does not define"
    )]
    UnknownSymbol {
        /// The variable.
        variable: String,
        /// What it names.
        symbol: String,
        /// Where.
        line: u32,
    },
    /// Two definitions of one name (CUDA error 218).
    #[error("line {line}: `{name}` is defined twice")]
    Duplicate {
        /// The name.
        name: String,
        /// Where the second one stands.
        line: u32,
    },
    /// No object file or library with a fatbin (CUDA error 999).
    #[error("{0}")]
    InvalidObject(String),
    /// Code for a compiler that this device does not have (CUDA error 221).
    #[error("the input is NVVM code, of which this device has no compiler")]
    Intermediate,
    /// The image's parts do not fit together (CUDA error 300, or what the part that is wrong gives).
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl LoadError {
    /// The `CUresult` that the driver API gives for it.
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

/// Why a kernel of a loaded module cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The module has no kernel of that name (CUDA error 500).
    #[error("the module has no kernel `{0}`")]
    NotFound(String),
    /// It needs an instruction that this device lacks (CUDA error 801).
    #[error(
        "kernel `{kernel}`: instruction `{instruction}` is not supported by the CPU device (line {line})"
    )]
    Unsupported {
        /// The kernel.
        kernel: String,
        /// The instruction with its modifiers.
        instruction: String,
        /// Where.
        line: u32,
    },
    /// An operand does not fit its instruction (CUDA error 218).
    #[error("kernel `{kernel}`: `{instruction}`: {reason} (line {line})")]
    Malformed {
        /// The kernel.
        kernel: String,
        /// The instruction or declaration.
        instruction: String,
        /// What is wrong.
        reason: String,
        /// Where.
        line: u32,
    },
    /// It calls a function that neither the module nor the device defines (CUDA error 801).
    #[error(
        "kernel `{kernel}`: function `{function}` is not defined in the module and not provided by the CPU device (line {line})"
    )]
    UnknownFunction {
        /// The kernel.
        kernel: String,
        /// The function.
        function: String,
        /// Where.
        line: u32,
    },
    /// A limit of the engine (CUDA error 701).
    #[error("kernel `{kernel}`: {what} is {found}, more than the limit of {limit}")]
    TooLarge {
        /// The kernel.
        kernel: String,
        /// What is too large.
        what: &'static str,
        /// How large it is.
        found: u64,
        /// The limit.
        limit: u64,
    },
}

impl KernelError {
    /// The `CUresult` that the driver API gives for it.
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

/// What a thread did that ended the launch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    /// An access outside every allocation (CUDA error 700).
    #[error("illegal {} of {bytes} bytes at {address:#x}", if *.write { "write" } else { "read" })]
    IllegalAddress {
        /// The address.
        address: u64,
        /// Bytes of the access.
        bytes: u32,
        /// Whether it was a write.
        write: bool,
    },
    /// An access that is not aligned to its size (CUDA error 716).
    #[error("misaligned access of {bytes} bytes at {address:#x}")]
    Misaligned {
        /// The address.
        address: u64,
        /// Bytes of the access.
        bytes: u32,
    },
    /// An access to a space in which the instruction cannot work (CUDA error 717).
    #[error("address {address:#x} lies in a state space that the instruction cannot use")]
    AddressSpace {
        /// The address.
        address: u64,
    },
    /// A handle of no texture or surface object (CUDA error 700).
    #[error("{handle:#x} is the handle of no object, or of none that the instruction can use")]
    InvalidObject {
        /// The handle.
        handle: u64,
    },
    /// A handle of no condition of the graph that runs the kernel (CUDA error 700).
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
    /// A call of something that is no function (CUDA error 718).
    #[error("call of {address:#x}, which is no function")]
    InvalidPc {
        /// The address.
        address: u64,
    },
    /// An operand that the instruction cannot have (CUDA error 715).
    #[error("illegal instruction: {0}")]
    IllegalInstruction(&'static str),
    /// A failed assertion, whose text has gone to the output (CUDA error 710).
    #[error("assertion failed")]
    Assert,
    /// Every thread of a block waits for another one (CUDA error 702).
    #[error("every thread of the block waits at a barrier that cannot complete")]
    Deadlock,
    /// The launch needs more than the engine gives (CUDA error 701).
    #[error("the launch needs {what}, which is more than there is")]
    OutOfResources {
        /// What it needs.
        what: &'static str,
    },
    /// The launch's configuration or parameters are wrong (CUDA error 1).
    #[error("invalid launch: {0}")]
    InvalidLaunch(&'static str),
    /// Cancelled from outside (CUDA error 719).
    #[error("cancelled")]
    Cancelled,
}

/// The end of a launch by a fault, and where it happened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("kernel `{kernel}`, line {line}, block {block:?}, thread {thread:?}: {kind}")]
pub struct Fault {
    /// What happened.
    pub kind: FaultKind,
    /// The kernel.
    pub kernel: String,
    /// Line of the PTX.
    pub line: u32,
    /// The block.
    pub block: [u32; 3],
    /// The thread, the lowest of those concerned.
    pub thread: [u32; 3],
}

impl Fault {
    /// The `CUresult` that the driver API gives for it.
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
