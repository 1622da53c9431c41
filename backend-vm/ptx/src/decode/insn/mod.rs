//! The decoded form: flat code whose operands are indices.
//!
//! A kernel and everything it calls is one array of instructions. Registers,
//! constants and temporaries of a function are rows of its frame; predicates
//! are masks of lanes. Executing needs no lookup by name and allocates nothing.

mod asynchronous;
mod matrix;
mod texture;

pub(crate) use asynchronous::{BulkCopy, Copy, CopyGroup, MbarrierAction, MbarrierArgs};
pub(crate) use matrix::{BitProduct, Element, Fragment, Matrix, Multiply, Tiles};
pub(crate) use texture::{
    Boundary, Detail, Geometry, Query, QueryArgs, SampleArgs, SurfaceAction, SurfaceArgs, TexelType,
};

use crate::alu::{Alu, Compare, Ops};

/// Index of a row of a frame.
pub(crate) type Reg = u32;
/// Index of a predicate of a frame.
pub(crate) type Pred = u32;
/// Index of an instruction.
pub(crate) type Pc = u32;

/// A predicate as an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PredSource {
    pub pred: Pred,
    pub negated: bool,
}

/// Predicate 0 of every frame is true in all lanes.
pub(crate) const TRUE: PredSource = PredSource {
    pred: 0,
    negated: false,
};

/// How two predicates become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

/// Where an address points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum AddressSpace {
    /// Any, told apart by the address.
    Generic,
    /// Device memory, constants included.
    Global,
    /// Memory of the block.
    Shared,
    /// Memory of the thread.
    Local,
    /// Parameters of the kernel.
    Param,
}

/// Where the address of an access comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Base {
    /// A register.
    Row(Reg),
    /// Nowhere: the offset is the address.
    Absolute,
    /// The frame's part of local memory.
    Frame,
}

/// An address operand in its space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub space: AddressSpace,
    pub base: Base,
    pub offset: i64,
}

/// Ordering of an access or fence against others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Order {
    /// Whether others are expected to change what is accessed.
    pub strong: bool,
    pub acquire: bool,
    pub release: bool,
}

/// A load or store of one or more elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Access {
    pub space: AddressSpace,
    pub base: Base,
    pub offset: i64,
    /// Bytes of one element: 1, 2, 4 or 8.
    pub size: u32,
    /// Whether a loaded element extends its sign.
    pub signed: bool,
    /// Destinations or sources, one per element.
    pub regs: Box<[Reg]>,
    pub order: Order,
}

/// What an atomic operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    And,
    Or,
    Xor,
    Exchange,
    CompareExchange,
    Add,
    AddF32,
    AddF64,
    /// On one or two 16-bit floats.
    Short(Short),
    Increment,
    Decrement,
    MinUnsigned,
    MaxUnsigned,
    MinSigned,
    MaxSigned,
}

/// An operation of atomics on 16-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShortOp {
    Add,
    Min,
    Max,
}

/// An atomic operation on 16-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Short {
    pub op: ShortOp,
    /// Bfloat16, as opposed to half precision.
    pub bfloat: bool,
    /// Two of them.
    pub pair: bool,
}

/// An atomic read-modify-write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Atomic {
    pub op: AtomicOp,
    pub place: Place,
    /// 2, 4, 8 or 16; operands of 16 bytes are two rows each.
    pub size: u32,
    /// What the address must be a multiple of.
    pub align: u32,
    /// Where the old value goes, unless nobody wants it.
    pub dest: Option<Reg>,
    pub a: Reg,
    pub b: Reg,
}

/// A read-only register that the hardware provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    NwarpId,
    SmId,
    NsmId,
    GridId,
    Clock,
    ClockHi,
    Clock64,
    GlobalTimer,
    GlobalTimerLo,
    GlobalTimerHi,
    LaneMaskEq,
    LaneMaskLe,
    LaneMaskLt,
    LaneMaskGe,
    LaneMaskGt,
    DynamicShared,
    TotalShared,
    /// `%envreg1` or, if set, `%envreg2`: the high or low half of the address of the grid's workspace.
    EnvReg(bool),
    /// A value that never changes.
    Constant(u64),
}

/// An operation of the lanes of a warp with one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Collective {
    ShuffleUp,
    ShuffleDown,
    ShuffleButterfly,
    ShuffleIndex,
    VoteAll,
    VoteAny,
    VoteUniform,
    VoteBallot,
    MatchAny { bytes: u32 },
    MatchAll { bytes: u32 },
    ReduceAdd,
    ReduceMinUnsigned,
    ReduceMaxUnsigned,
    ReduceMinSigned,
    ReduceMaxSigned,
    ReduceAnd,
    ReduceOr,
    ReduceXor,
    ElectSync,
    WarpBarrier,
}

/// The operands of a collective operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CollectiveArgs {
    pub kind: Collective,
    pub dest: Option<Reg>,
    pub dest_pred: Option<Pred>,
    pub a: Reg,
    pub b: Reg,
    pub c: Reg,
    pub source: PredSource,
    pub members: Reg,
}

/// What a thread does at a barrier of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    /// Waits.
    Sync,
    /// Counts and goes on.
    Arrive,
    /// Waits and gets the number of threads whose predicate holds.
    Count(Reg),
    /// Waits and learns whether the predicate holds in all.
    All(Pred),
    /// Waits and learns whether the predicate holds in any.
    Any(Pred),
}

/// A barrier of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Barrier {
    pub kind: BarrierKind,
    pub id: Reg,
    /// Threads that take part; all if absent.
    pub count: Option<Reg>,
    pub source: PredSource,
}

/// Functions that the device's runtime provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Builtin {
    Vprintf,
    Malloc,
    Free,
    AssertFail,
    SetConditional,
}

/// Where the caller has, or wants, a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slot {
    /// In a register.
    Row(Reg),
    /// In the frame's local memory, at an offset.
    Memory(u32),
}

/// A parameter at a call or of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Param {
    pub slot: Slot,
    pub bytes: u32,
}

/// Whom a call calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Callee {
    /// By its index in the module.
    Function(u32),
    Indirect(Reg),
    Builtin(Builtin),
}

/// A call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub callee: Callee,
    pub args: Box<[Param]>,
    pub returns: Box<[Param]>,
}

/// Which half of a carry chain an instruction is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CarryOp {
    Add,
    Sub,
    MadLow,
    MadHigh,
}

/// `add.cc`, `addc`, `sub.cc`, `subc`, `mad.cc`, `madc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Carry {
    pub op: CarryOp,
    pub bytes: u32,
    pub signed: bool,
    pub carry_in: bool,
    pub carry_out: bool,
    pub d: Reg,
    pub a: Reg,
    pub b: Reg,
    pub c: Reg,
}

/// A comparison whose result may be combined with a predicate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Test {
    pub compare: Compare,
    pub a: Reg,
    pub b: Reg,
    pub combine: Option<(Logic, PredSource)>,
}

/// What an instruction does.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    /// Computes rows from rows.
    Alu {
        f: Alu,
        ops: Ops,
    },
    /// `setp`: the predicate `d` and perhaps its complement `q`.
    SetPredicate {
        test: Box<Test>,
        d: Pred,
        q: Option<Pred>,
    },
    /// A plain `setp`.
    Compare {
        compare: Compare,
        d: Pred,
        a: Reg,
        b: Reg,
    },
    /// `set`: `value` where the test holds, 0 elsewhere.
    Set {
        test: Box<Test>,
        d: Reg,
        value: u64,
    },
    /// `selp`.
    Select {
        d: Reg,
        a: Reg,
        b: Reg,
        p: PredSource,
    },
    /// `and.pred` and its kin.
    Predicate {
        logic: Logic,
        d: Pred,
        a: PredSource,
        b: PredSource,
    },
    /// `mov.b64 {a, b}, c` and its kin: pieces of `bits` bits.
    Unpack {
        d: Box<[Option<Reg>]>,
        a: Reg,
        bits: u32,
    },
    /// `mov.b64 a, {b, c}` and its kin.
    Pack {
        d: Reg,
        a: Box<[Reg]>,
        bits: u32,
    },
    /// Reads a special register.
    Special {
        d: Reg,
        special: Special,
    },
    /// The offset in local memory of a variable of this frame.
    FrameAddress {
        d: Reg,
        offset: u32,
    },
    /// `isspacep`.
    IsSpace {
        d: Pred,
        a: Reg,
        space: AddressSpace,
        /// Whether `.const` variables are meant, or what is not one of them.
        constant: bool,
    },
    Carry(Box<Carry>),
    Load(Box<Access>),
    Store(Box<Access>),
    Atomic(Box<Atomic>),
    Fence,
    Collective(Box<CollectiveArgs>),
    /// `activemask`.
    ActiveMask {
        d: Reg,
    },
    Barrier(Box<Barrier>),
    /// `barrier.cluster.arrive`
    ClusterArrive,
    /// `barrier.cluster.wait`
    ClusterWait,
    Branch {
        target: Pc,
    },
    BranchIndexed {
        index: Reg,
        targets: Box<[Pc]>,
    },
    Call(Box<Call>),
    Return,
    Exit,
    Trap,
    /// What this device cannot execute, and why.
    Illegal(&'static str),
    Sleep {
        nanoseconds: Reg,
    },
    /// `cp.async`
    Copy(Box<Copy>),
    /// `cp.async.bulk`
    BulkCopy(Box<BulkCopy>),
    Mbarrier(Box<MbarrierArgs>),
    Matrix(Box<Matrix>),
    Sample(Box<SampleArgs>),
    Surface(Box<SurfaceArgs>),
    Query(Box<QueryArgs>),
    /// `alloca`: memory of the frame until it ends.
    Allocate {
        d: Reg,
        bytes: Reg,
        align: u32,
    },
    /// The end of a function without `ret`.
    FallOff,
    /// `prefetch`, `discard` and others without effect here.
    Nothing,
    /// As far as the block is concerned, grids that depend on this one may be launched.
    LaunchDependents,
    /// Groups of `cp.async`.
    CopyGroup(CopyGroup),
    /// Copies so far arrive at an `mbarrier` when they are done, which they are.
    CopiesArrive(Box<Place>),
}

/// A decoded instruction.
#[derive(Debug, Clone)]
pub(crate) struct Insn {
    pub op: Op,
    pub guard: PredSource,
    pub line: u32,
}

/// A decoded function, which the kernels that call it share.
#[derive(Debug, Clone, Default)]
pub(crate) struct FunctionCode {
    /// Targets of its branches count from the first.
    pub instructions: Vec<Insn>,
    /// Rows of its frame.
    pub rows: u32,
    /// Predicates of its frame.
    pub preds: u32,
    /// Rows that hold constants, with their values.
    pub constants: Vec<(Reg, u64)>,
    /// Rows that hold addresses in dynamic shared memory, with what is added to where it begins.
    pub dynamic: Vec<(Reg, u64)>,
    /// Bytes of local memory of its frame, a multiple of 16.
    pub local_bytes: u32,
    /// Where it expects its parameters.
    pub params: Vec<Param>,
    /// Where it leaves its results.
    pub returns: Vec<Param>,
}
