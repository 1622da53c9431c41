//! The parsed table.

use std::fmt;

/// Everything the table declares: messages in the order of their ids, the rest in the files'.
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

/// Flags, or the values of an enumeration, of the driver API. They are no part of the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constants {
    pub doc: Vec<String>,
    pub name: String,
    /// The Rust type.
    pub kind: String,
    pub values: Vec<Constant>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constant {
    pub doc: Vec<String>,
    pub value: u32,
    pub name: String,
}

/// A `CUresult`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResultCode {
    pub code: u32,
    /// Without `CUDA_` and `ERROR_`.
    pub name: String,
    /// What `cuGetErrorString` says.
    pub text: String,
}

/// A `CUdevice_attribute`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    pub id: i32,
    /// Without `CU_DEVICE_ATTRIBUTE_`.
    pub name: String,
    /// What guests are told whatever the device says, and why.
    pub answers: Option<(i32, String)>,
}

/// An exported function of the driver API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    pub doc: Vec<String>,
    pub id: u16,
    pub name: String,
    pub body: FunctionBody,
    pub answers: Option<Answers>,
}

/// What a function does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FunctionBody {
    Forwarded(Forwarded),
    /// Another name of a function with the same parameters.
    Same(String),
    /// A function whose default stream is the per-thread one.
    PerThread(String),
    /// Returns `CUDA_ERROR_NOT_SUPPORTED`, for this reason.
    Unsupported(String),
}

/// A function that does something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forwarded {
    pub class: Class,
    /// The messages it may send, by name.
    pub messages: Vec<String>,
    /// It depends on the default stream, so it exists for the legacy and for the per-thread one.
    pub stream: bool,
    /// Its addresses may be memory of the program's own.
    pub unified: bool,
    /// All it does is to return this code.
    pub returns: Option<u32>,
    pub parameters: Vec<Parameter>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Answered in the guest.
    Local,
    /// Written and forgotten.
    Record,
    /// Answered by the worker.
    Request,
    /// Waits on a word.
    Fence,
}

/// A C parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    pub direction: Direction,
    pub kind: String,
    /// The length of an array: a number, a parameter's name, or nothing where the content says it.
    pub length: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    In,
    Out,
    InOut,
}

/// What a function answers to when `cuGetProcAddress` is asked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Answers {
    pub symbol: String,
    /// Asked with flag 2 (`CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`).
    pub per_thread: bool,
    /// The first CUDA version that this function answers for.
    pub since: u32,
}

/// An exported variable: zeroed memory that debuggers look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Data {
    pub name: String,
    pub bytes: usize,
}

/// A set of values that a 32-bit field may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enum {
    pub doc: Vec<String>,
    pub name: String,
    pub values: Vec<(u32, String)>,
}

/// The element of an array in a tail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Struct {
    pub doc: Vec<String>,
    pub name: String,
    /// Its alignment in memory, where that is greater than its fields need.
    pub align: Option<usize>,
    pub fields: Vec<Field>,
}

/// What crosses the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub doc: Vec<String>,
    pub id: u16,
    pub name: String,
    pub kind: Kind,
    /// Part of the next protocol version only.
    pub next: bool,
    pub body: Body,
    pub reply: Body,
    pub driver: Option<DriverCall>,
}

/// The one call of the driver that answers a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverCall {
    pub function: String,
    /// Fields of the message and of its reply, and `device`.
    pub arguments: Vec<String>,
    /// The worker looks at the message first.
    pub checked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Written and forgotten.
    Record,
    /// Answered in its turn.
    Request,
    /// Answered by the thread that serves the guest thread.
    Blocking,
}

/// The fields of a message or of a reply: a fixed part, then tails.
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
    /// No element may be zero.
    pub nonzero: bool,
    /// A Rust constant that the field of a reply always has.
    pub constant: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldType {
    Scalar(Scalar),
    Array(Scalar, usize),
    /// An address as the device sees it.
    Address,
    /// A handle; a stream may be the legacy one.
    Handle(Handle),
    /// A handle that was minted: never the legacy stream.
    Minted(Handle),
    /// A stream, or zero for none.
    OptionalHandle(Handle),
    Fence,
    /// A fence, or all ones for none.
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

/// A variable-length part behind the fixed one; its element count is in the fixed part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    pub doc: Vec<String>,
    pub name: String,
    /// `None`: bytes.
    pub element: Option<String>,
    /// Greatest number of elements.
    pub max: u32,
}

impl Class {
    /// The Rust variant.
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
    /// The Rust type, which is also the word of the language.
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
    /// The Rust marker type.
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
    /// Bytes and alignment on the wire.
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

/// The type in the words of the language.
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
    /// The words of the language.
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
    /// The messages of the current protocol, or of the next one.
    pub fn protocol(&self, next: bool) -> impl Iterator<Item = &Message> {
        self.messages
            .iter()
            .filter(move |message| next || !message.next)
    }

    /// The function behind another name or stream variant; `None` if it is unsupported.
    #[must_use]
    pub fn forwarded<'t>(
        &'t self,
        function: &'t Function,
    ) -> Option<(&'t Function, &'t Forwarded)> {
        match &function.body {
            FunctionBody::Forwarded(forwarded) => Some((function, forwarded)),
            FunctionBody::Same(name) | FunctionBody::PerThread(name) => {
                let base = self.functions.iter().find(|other| other.name == *name)?;
                match &base.body {
                    FunctionBody::Forwarded(forwarded) => Some((base, forwarded)),
                    _ => None,
                }
            }
            FunctionBody::Unsupported(_) => None,
        }
    }
}
