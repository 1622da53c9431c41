//! Syntax tree of a module. All text is borrowed.

use std::ops::Range;

/// Type of a variable or of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    /// A predicate.
    Pred,
    /// Untyped bits.
    B8,
    /// Untyped bits.
    B16,
    /// Untyped bits.
    B32,
    /// Untyped bits.
    B64,
    /// Untyped bits.
    B128,
    /// An unsigned integer.
    U8,
    /// An unsigned integer.
    U16,
    /// An unsigned integer.
    U32,
    /// An unsigned integer.
    U64,
    /// A signed integer.
    S8,
    /// A signed integer.
    S16,
    /// A signed integer.
    S32,
    /// A signed integer.
    S64,
    /// Half precision.
    F16,
    /// Two halves.
    F16x2,
    /// Upper half of a single.
    Bf16,
    /// Two upper halves of singles.
    Bf16x2,
    /// Single precision.
    F32,
    /// Double precision.
    F64,
    /// Single with the significand of a half.
    Tf32,
    /// Two floats with 4 bits of exponent and 3 of significand.
    E4m3x2,
    /// Two floats with 5 bits of exponent and 2 of significand.
    E5m2x2,
}

impl Type {
    /// Returns the type of the name `name`, without its dot.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "b128" => Self::B128,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "tf32" => Self::Tf32,
            "e4m3x2" => Self::E4m3x2,
            "e5m2x2" => Self::E5m2x2,
            _ => return None,
        })
    }

    /// Returns the size in memory, in bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            Self::Pred | Self::B8 | Self::U8 | Self::S8 => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::Bf16 => 2,
            Self::E4m3x2 | Self::E5m2x2 => 2,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 | Self::F16x2 | Self::Bf16x2 => 4,
            Self::Tf32 => 4,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
            Self::B128 => 16,
        }
    }

    /// Returns whether it is a signed integer.
    #[must_use]
    pub fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }
}

/// State space of variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// Registers.
    Reg,
    /// Device memory.
    Global,
    /// Device memory that kernels only read.
    Const,
    /// Memory of a block.
    Shared,
    /// Memory of a thread.
    Local,
    /// Parameters.
    Param,
}

/// Visibility of a symbol in other modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Linkage {
    /// Visible in this module only.
    #[default]
    Local,
    /// Defined here, visible in other modules.
    Visible,
    /// Defined in another module.
    Extern,
    /// Defined here, unless another module's definition takes precedence.
    Weak,
    /// Defined here and perhaps in other modules, as one variable after linking.
    Common,
}

/// Scalar of an initialiser.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum InitValue<'a> {
    /// An integer.
    Int(u64),
    /// Single-precision bits.
    F32(u32),
    /// Double-precision bits.
    F64(u64),
    /// Address of a symbol plus an offset.
    Symbol {
        /// The symbol.
        name: &'a str,
        /// Bytes beyond the symbol.
        offset: i64,
        /// Whether the address is generic (`generic(…)`).
        generic: bool,
    },
}

/// Scalar of an initialiser, and the element it initialises.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InitItem<'a> {
    /// Index of the element, counted over all dimensions and vector lanes.
    pub index: u64,
    /// Value of the element.
    pub value: InitValue<'a>,
}

/// Kind of object to which an opaque variable refers (PTX ISA 5.3) when one is bound to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reference {
    /// `.texref`
    Texture,
    /// `.surfref`
    Surface,
    /// `.samplerref`
    Sampler,
}

/// Variable: name, type and shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Variable<'a> {
    /// Name.
    pub name: &'a str,
    /// State space.
    pub space: Space,
    /// Type of one scalar.
    pub ty: Type,
    /// Lanes of its vector type, 1 for a scalar.
    pub vector: u32,
    /// Alignment in bytes, a power of two.
    pub align: u32,
    /// Number of elements over all dimensions: 1 for a scalar, 0 if unsized (`[]`).
    pub count: u64,
    /// Initialiser.
    pub init: Vec<InitItem<'a>>,
    /// Visibility.
    pub linkage: Linkage,
    /// Whether `.attribute(.managed)` was written.
    pub managed: bool,
    /// Kind of reference, if it is one.
    pub reference: Option<Reference>,
    /// `Some(n)` for `%r<n>`: registers `%r0` to `%r(n-1)`.
    pub range: Option<u32>,
    /// Range from its name to the end of its initialiser, in bytes of the text.
    pub span: Range<usize>,
    /// Line of the declaration.
    pub line: u32,
}

impl Variable<'_> {
    /// Returns the size in bytes, 0 if unsized; `None` if it does not fit 64 bits.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.count
            .checked_mul(u64::from(self.ty.bytes()) * u64::from(self.vector))
    }
}

/// Operand of an instruction.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand<'a> {
    /// Register, variable, label, function or special register.
    Name(&'a str),
    /// Address of a symbol plus bytes.
    Offset(&'a str, i64),
    /// An integer.
    Int(u64),
    /// Single-precision bits.
    F32(u32),
    /// Double-precision bits.
    F64(u64),
    /// `!p`.
    Not(&'a str),
    /// `-r`.
    Negative(&'a str),
    /// `p|q`.
    Pair(&'a str, &'a str),
    /// `{a, b, …}`.
    Vector(Vec<Operand<'a>>),
    /// `[base + offset]`, base absent for an absolute address.
    Address(Option<&'a str>, i64),
    /// `(a, b, …)` of a call.
    List(Vec<Operand<'a>>),
}

/// Instruction.
#[derive(Debug, Clone, PartialEq)]
pub struct Instruction<'a> {
    /// Guard `@p` or `@!p`: the predicate, and whether it is negated.
    pub guard: Option<(&'a str, bool)>,
    /// Opcode with its modifiers.
    pub opcode: &'a str,
    /// Operands.
    pub operands: Vec<Operand<'a>>,
    /// Line of the text.
    pub line: u32,
}

/// Statement of a function's body.
#[derive(Debug, Clone, PartialEq)]
pub enum Statement<'a> {
    /// An instruction.
    Instruction(Instruction<'a>),
    /// `name:`
    Label(&'a str),
    /// A register, local, shared or parameter variable.
    Variable(Variable<'a>),
    /// `{`
    Open,
    /// `}`
    Close,
    /// `name: .branchtargets a, b;`
    BranchTargets(&'a str, Vec<&'a str>),
    /// `name: .calltargets a, b;`
    CallTargets(&'a str, Vec<&'a str>),
    /// `name: .callprototype (…) _ (…);`
    Prototype(&'a str, Signature<'a>),
}

/// Return parameters and parameters of a function.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Signature<'a> {
    /// Return parameters.
    pub returns: Vec<Variable<'a>>,
    /// Parameters.
    pub params: Vec<Variable<'a>>,
}

/// Performance directives of a kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tuning {
    /// `.maxntid`
    pub max_threads: Option<[u32; 3]>,
    /// `.reqntid`
    pub required_threads: Option<[u32; 3]>,
    /// `.minnctapersm`
    pub min_blocks: Option<u32>,
    /// `.maxnreg`
    pub max_registers: Option<u32>,
    /// `.reqnctapercluster`
    pub required_cluster: Option<[u32; 3]>,
    /// `.maxclusterrank`
    pub max_cluster_rank: Option<u32>,
    /// `.explicitcluster`
    pub explicit_cluster: bool,
    /// `.blocksareclusters`: the grid's extents count clusters.
    pub blocks_are_clusters: bool,
}

/// Function or kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Function<'a> {
    /// Name.
    pub name: &'a str,
    /// Whether it is a kernel.
    pub entry: bool,
    /// Visibility.
    pub linkage: Linkage,
    /// Return parameters and parameters.
    pub signature: Signature<'a>,
    /// Performance directives.
    pub tuning: Tuning,
    /// Body from its opening to its closing brace, absent in a declaration.
    pub body: Option<Body<'a>>,
    /// Offset in the module at which its declaration begins, after `.entry` or `.func`, in bytes.
    pub start: usize,
    /// Offset at which it ends.
    pub end: usize,
    /// Line on which it begins.
    pub line: u32,
}

/// Text of a function's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Body<'a> {
    /// Text from `{` to `}`.
    pub text: &'a str,
    /// Line of the `{`.
    pub line: u32,
}

/// Declaration of module scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// Kind of the declaration.
    pub kind: ItemKind,
    /// Range of the whole declaration, in bytes of the text.
    pub span: Range<usize>,
}

/// Kind of a declaration of module scope, with its index in the lists of [`Ast`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ItemKind {
    /// A function.
    Function(usize),
    /// The variables of one statement.
    Variables(Range<usize>),
    /// A second name of a function.
    Alias(usize),
}

/// Whole module.
#[derive(Debug, Clone, PartialEq)]
pub struct Ast<'a> {
    /// `.version`, major and minor.
    pub version: (u32, u32),
    /// First operand of `.target`.
    pub target: &'a str,
    /// `.address_size`.
    pub address_size: u32,
    /// Module-scope variables.
    pub variables: Vec<Variable<'a>>,
    /// Functions and kernels, declarations included.
    pub functions: Vec<Function<'a>>,
    /// Second names of functions: `.alias second, first;`
    pub aliases: Vec<(&'a str, &'a str)>,
    /// All of these declarations, in the order of the text.
    pub items: Vec<Item>,
}
