//! Parsed table.

use std::fmt;

/// Declarations of the table: messages in the order of their ids, the rest in the order of the files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    pub enums: Vec<Enum>,
    pub structs: Vec<Struct>,
    pub messages: Vec<Message>,
    pub functions: Vec<Function>,
    pub data: Vec<Data>,
    pub attributes: Vec<Attribute>,
    pub constants: Vec<Constants>,
    pub results: Vec<ResultCode>,
}

/// Flags, or the values of an enumeration, of the driver API. Not part of the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constants {
    pub doc: Vec<String>,
    pub name: String,
    /// Name of the Rust type.
    pub kind: String,
    /// Start of the constants' names in `cuda.h`. Empty for constants that only Wormhole has.
    pub prefix: String,
    pub values: Vec<Constant>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constant {
    pub doc: Vec<String>,
    pub value: i64,
    pub name: String,
}

/// A `CUresult`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResultCode {
    pub code: u32,
    /// Name without `CUDA_` and `ERROR_`.
    pub name: String,
    /// Text of `cuGetErrorString`.
    pub text: String,
}

/// A `CUdevice_attribute`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    pub id: i32,
    /// Name without `CU_DEVICE_ATTRIBUTE_`.
    pub name: String,
    /// Value that guests get instead of the device's, and the reason.
    pub answers: Option<(i32, String)>,
}

/// Exported function of the driver API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    pub doc: Vec<String>,
    pub id: u16,
    pub name: String,
    pub body: FunctionBody,
    pub answers: Option<Answers>,
}

/// Way in which a function is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FunctionBody {
    Forwarded(Forwarded),
    /// Alias of a function with the same parameters.
    Same(String),
    /// Variant of a function for per-thread default streams.
    PerThread(String),
    /// Returns `CUDA_ERROR_NOT_SUPPORTED`, for the given reason.
    Unsupported(String),
}

/// Function that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forwarded {
    pub class: Class,
    /// Names of the messages that the function may send.
    pub messages: Vec<String>,
    /// True if the function depends on the default stream: it has a legacy and a per-thread variant.
    pub stream: bool,
    /// True if device addresses may be memory of the program's own.
    pub unified: bool,
    /// Code that the function always returns, if it does nothing else.
    pub returns: Option<u32>,
    /// Function that serves this one. Its further parameters are null or 0.
    pub calls: Option<String>,
    pub parameters: Vec<Parameter>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Answered in the guest.
    Local,
    /// Written to the ring without an answer.
    Record,
    /// Answered by the worker.
    Request,
    /// Waits for a fence word.
    Fence,
}

/// Parameter in C.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    pub direction: Direction,
    pub kind: String,
    /// Length of an array: a number, a parameter's name, or empty if only the function knows it.
    pub length: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    In,
    Out,
    InOut,
}

/// Request of `cuGetProcAddress` that a function answers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Answers {
    pub symbol: String,
    /// True for flag 2 (`CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`).
    pub per_thread: bool,
    /// First CUDA version of this entry point.
    pub since: u32,
}

/// Exported variable: zeroed memory that debuggers read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Data {
    pub name: String,
    pub bytes: usize,
}

/// Set of the valid values of a 32-bit field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enum {
    pub doc: Vec<String>,
    pub name: String,
    pub values: Vec<(u32, String)>,
}

/// Element of an array in a tail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Struct {
    pub doc: Vec<String>,
    pub name: String,
    /// Alignment in memory, if greater than the fields need.
    pub align: Option<usize>,
    pub fields: Vec<Field>,
}

/// Message on the ring, and its reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub doc: Vec<String>,
    pub id: u16,
    pub name: String,
    pub kind: Kind,
    /// True if the message exists in the next protocol version only.
    pub next: bool,
    pub body: Body,
    pub reply: Body,
    pub driver: Option<DriverCall>,
}

/// Driver call that answers a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverCall {
    pub function: String,
    /// Fields of the message and of its reply, `device`, and numbers.
    pub arguments: Vec<String>,
    /// True if the worker checks the message before the call.
    pub checked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Written to the ring without an answer.
    Record,
    /// Answered in order.
    Request,
    /// Answered by the thread that serves the guest thread.
    Blocking,
}

/// Fields of a message or of a reply: a fixed part, then tails.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Body {
    pub fields: Vec<Field>,
    pub tails: Vec<Tail>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub doc: Vec<String>,
    pub name: String,
    pub kind: FieldType,
    /// True if no element may be zero.
    pub nonzero: bool,
    /// Rust constant that a field of a reply always holds.
    pub constant: Option<String>,
    /// Value in the example of the message: numbers, or one name. Not part of the protocol.
    pub example: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldType {
    Scalar(Scalar),
    Array(Scalar, usize),
    /// Address in the device's address space.
    Address,
    /// Handle; a stream may be the legacy one.
    Handle(Handle),
    /// Minted handle: never the legacy stream.
    Minted(Handle),
    /// Handle, or zero for none.
    OptionalHandle(Handle),
    Fence,
    /// Fence, or all ones for none.
    OptionalFence,
    Enum(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    U8,
    U32,
    I32,
    U64,
    F32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handle {
    Stream,
    Event,
    Module,
    Library,
    Function,
    Pool,
    Memory,
    Array,
    Mipmap,
    Graph,
}

/// Variable-length part after the fixed one; its element count is in the fixed part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    pub doc: Vec<String>,
    pub name: String,
    /// Struct of the elements; `None` for bytes.
    pub element: Option<String>,
    /// Greatest number of elements.
    pub max: u32,
    /// Bytes in the example of the message. Not part of the protocol.
    pub example: String,
}

impl Class {
    /// Name of the Rust variant.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "Local",
            Self::Record => "Record",
            Self::Request => "Request",
            Self::Fence => "Fence",
        }
    }
}

impl Scalar {
    /// Name of the Rust type, which is also the word of the language.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U64 => "u64",
            Self::F32 => "f32",
        }
    }

    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 => 8,
        }
    }

    pub(crate) fn parse(word: &str) -> Option<Self> {
        [Self::U8, Self::U32, Self::I32, Self::U64, Self::F32]
            .into_iter()
            .find(|scalar| scalar.name() == word)
    }
}

impl Handle {
    /// Name of the Rust marker type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stream => "Stream",
            Self::Event => "Event",
            Self::Module => "Module",
            Self::Library => "Library",
            Self::Function => "Function",
            Self::Pool => "Pool",
            Self::Memory => "Memory",
            Self::Array => "Array",
            Self::Mipmap => "Mipmap",
            Self::Graph => "Graph",
        }
    }

    pub(crate) fn parse(word: &str) -> Option<Self> {
        match word {
            "stream" => Some(Self::Stream),
            "event" => Some(Self::Event),
            "module" => Some(Self::Module),
            "library" => Some(Self::Library),
            "function" => Some(Self::Function),
            "pool" => Some(Self::Pool),
            "memory" => Some(Self::Memory),
            "array" => Some(Self::Array),
            "mipmap" => Some(Self::Mipmap),
            "graph" => Some(Self::Graph),
            _ => None,
        }
    }
}

impl FieldType {
    /// Size and alignment in bytes on the wire.
    #[must_use]
    pub fn layout(&self) -> (usize, usize) {
        match self {
            Self::Scalar(scalar) => (scalar.size(), scalar.size()),
            Self::Array(scalar, count) => (scalar.size() * count, scalar.size()),
            Self::Address | Self::Handle(_) | Self::Minted(_) | Self::OptionalHandle(_) => (8, 8),
            Self::Fence | Self::OptionalFence | Self::Enum(_) => (4, 4),
        }
    }
}

impl Handle {
    fn word(self) -> String {
        self.name().to_ascii_lowercase()
    }
}

/// Formats the type in the words of the language.
impl fmt::Display for FieldType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scalar(scalar) => f.write_str(scalar.name()),
            Self::Array(scalar, count) => write!(f, "{}[{count}]", scalar.name()),
            Self::Address => f.write_str("address"),
            Self::Handle(handle) => f.write_str(&handle.word()),
            Self::Minted(handle) => write!(f, "minted {}", handle.word()),
            Self::OptionalHandle(handle) => write!(f, "optional {}", handle.word()),
            Self::Fence => f.write_str("fence"),
            Self::OptionalFence => f.write_str("optional fence"),
            Self::Enum(name) => f.write_str(name),
        }
    }
}

impl Kind {
    /// Words of the language.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Record => "record",
            Self::Request => "request",
            Self::Blocking => "request blocking",
        }
    }
}

impl Table {
    /// Returns the messages of the current protocol, or of the next one.
    pub fn protocol(&self, next: bool) -> impl Iterator<Item = &Message> {
        self.messages
            .iter()
            .filter(move |message| next || !message.next)
    }

    /// Resolves aliases and stream variants to their function; `None` if it is unsupported.
    #[must_use]
    pub fn forwarded<'t>(
        &'t self,
        function: &'t Function,
    ) -> Option<(&'t Function, &'t Forwarded)> {
        match &function.body {
            FunctionBody::Forwarded(forwarded) => Some((function, forwarded)),
            FunctionBody::Same(name) | FunctionBody::PerThread(name) => self.declared(name),
            FunctionBody::Unsupported(_) => None,
        }
    }

    /// Returns the function of a name that has parameters of its own.
    #[must_use]
    pub fn declared(&self, name: &str) -> Option<(&Function, &Forwarded)> {
        let function = self.functions.iter().find(|other| other.name == name)?;
        match &function.body {
            FunctionBody::Forwarded(forwarded) => Some((function, forwarded)),
            _ => None,
        }
    }
}
