//! Errors of images, kernels and launches.

use crate::link::LinkError;
use crate::parse::ParseError;

/// Error in loading an image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The image is neither PTX nor a fatbin nor an ELF file.
    #[error("the image is neither PTX text nor a fatbin: {0}")]
    InvalidImage(String),
    /// The image has kernels in machine code only, none as PTX.
    #[error(
        "the image holds its kernels as machine code for {arch} only, and no PTX: build it with PTX (-gencode arch=compute_XX,code=compute_XX)"
    )]
    NoKernelImage {
        /// Architectures in the image, for the message.
        arch: String,
    },
    /// The PTX is malformed.
    #[error("invalid PTX: {0}")]
    InvalidPtx(ParseError),
    /// The PTX is newer than this engine.
    #[error("{0}")]
    UnsupportedVersion(ParseError),
    /// A limit of the engine is exceeded.
    #[error("{what} is {found} bytes long, more than the limit of {limit}")]
    TooLarge {
        /// Name of the quantity.
        what: &'static str,
        /// Size of the object in bytes.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A variable's initialiser names a symbol that the module does not define.
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
    /// One name has two definitions.
    #[error("line {line}: `{name}` is defined twice")]
    Duplicate {
        /// The name.
        name: String,
        /// Line of the second definition.
        line: u32,
    },
    /// The input is no object file or library with a fatbin.
    #[error("{0}")]
    InvalidObject(String),
    /// The input is code for a compiler that this device lacks.
    #[error("the input is NVVM code, and this device has no compiler for it")]
    Intermediate,
    /// The image's parts cannot be linked.
    #[error(transparent)]
    Link(#[from] LinkError),
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
    /// The module has no kernel of that name.
    #[error("the module has no kernel `{0}`")]
    NotFound(String),
    /// The kernel needs an instruction that this device lacks.
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
    /// An operand does not fit its instruction.
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
    /// The kernel calls a function that neither the module nor the device defines.
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
    /// A limit of the engine is exceeded.
    #[error("kernel `{kernel}`: {what} is {found}, more than the limit of {limit}")]
    TooLarge {
        /// The kernel.
        kernel: String,
        /// Name of the quantity.
        what: &'static str,
        /// Value of the quantity.
        found: u64,
        /// The limit.
        limit: u64,
    },
}

/// Kind of fault that ended a launch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    /// An access lies outside every allocation.
    #[error("illegal {} of {bytes} bytes at {address:#x}", if *.write { "write" } else { "read" })]
    IllegalAddress {
        /// The address.
        address: u64,
        /// Bytes of the access.
        bytes: u32,
        /// Whether it was a write.
        write: bool,
    },
    /// An access is not aligned to its size.
    #[error("misaligned access of {bytes} bytes at {address:#x}")]
    Misaligned {
        /// The address.
        address: u64,
        /// Bytes of the access.
        bytes: u32,
    },
    /// An access is to a space that the instruction cannot use.
    #[error("address {address:#x} lies in a state space that the instruction cannot use")]
    AddressSpace {
        /// The address.
        address: u64,
    },
    /// A handle names no texture or surface object that the instruction can use.
    #[error("{handle:#x} is the handle of no object, or of none that the instruction can use")]
    InvalidObject {
        /// The handle.
        handle: u64,
    },
    /// A handle names no condition of the graph that runs the kernel.
    #[error("{handle:#x} is the handle of no condition of the graph")]
    InvalidCondition {
        /// The handle.
        handle: u64,
    },
    /// `trap`.
    #[error("trap")]
    Trap,
    /// The thread's stack is exhausted.
    #[error("stack overflow")]
    StackOverflow,
    /// A call's address is no function.
    #[error("call of {address:#x}, which is no function")]
    InvalidPc {
        /// The address.
        address: u64,
    },
    /// An operand is one that the instruction does not permit.
    #[error("illegal instruction: {0}")]
    IllegalInstruction(&'static str),
    /// An assertion failed; its text is in the output.
    #[error("assertion failed")]
    Assert,
    /// Every thread of a block waits for another one.
    #[error("every thread of the block waits at a barrier that cannot complete")]
    Deadlock,
    /// The launch needs more resources than the engine has.
    #[error("the launch needs {what}, which is more than there is")]
    OutOfResources {
        /// Resource that the launch needs.
        what: &'static str,
    },
    /// The launch's configuration or parameters are wrong.
    #[error("invalid launch: {0}")]
    InvalidLaunch(&'static str),
    /// The caller cancelled the launch.
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
