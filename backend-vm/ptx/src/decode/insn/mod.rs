//! Decoded form of a kernel: flat code whose operands are indices.
//!
//! A kernel and every function that it calls form one array of instructions. Registers, constants and
//! temporaries of a function are rows of its frame; predicates are masks of lanes. Execution needs no
//! lookup by name and allocates nothing.

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

/// Predicate operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PredSource {
    pub pred: Pred,
    pub negated: bool,
}

/// Predicate operand that is true: predicate 0 of every frame is set in all lanes.
pub(crate) const TRUE: PredSource = PredSource {
    pred: 0,
    negated: false,
};

/// Operation that combines two predicates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

/// State space of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum AddressSpace {
    /// Any space: the address tells which.
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

/// Base of an access's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Base {
    /// A register.
    Row(Reg),
    /// None: the offset is the address.
    Absolute,
    /// The frame's part of local memory.
    Frame,
}

/// Address operand in its space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub space: AddressSpace,
    pub base: Base,
    pub offset: i64,
}

/// Memory ordering of an access or fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Order {
    /// Whether the access is strong: others may change the memory at the same time.
    pub strong: bool,
    pub acquire: bool,
    pub release: bool,
}

/// Load or store of one or more elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Access {
    pub space: AddressSpace,
    pub base: Base,
    pub offset: i64,
    /// Bytes of one element: 1, 2, 4 or 8.
    pub size: u32,
    /// Whether a loaded element is sign-extended.
    pub signed: bool,
    /// Destinations or sources, one per element.
    pub regs: Box<[Reg]>,
    pub order: Order,
}

/// Operation of an atomic instruction.
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
    /// Operation on one or two 16-bit floats.
    Short(Short),
    Increment,
    Decrement,
    MinUnsigned,
    MaxUnsigned,
    MinSigned,
    MaxSigned,
}

/// Operation of an atomic instruction on 16-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShortOp {
    Add,
    Min,
    Max,
}

/// Atomic operation on 16-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Short {
    pub op: ShortOp,
    /// Whether the format is bfloat16 instead of half precision.
    pub bfloat: bool,
    /// Whether the operands are pairs.
    pub pair: bool,
}

/// Atomic read-modify-write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Atomic {
    pub op: AtomicOp,
    pub place: Place,
    /// Bytes of the operation: 2, 4, 8 or 16. Operands of 16 bytes are two rows each.
    pub size: u32,
    /// Alignment of the address in bytes.
    pub align: u32,
    /// Destination of the old value, if it is used.
    pub dest: Option<Reg>,
    pub a: Reg,
    pub b: Reg,
}

/// Special register: read-only, provided by the hardware.
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
    /// Constant value.
    Constant(u64),
}

/// Collective operation of a warp's lanes.
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

/// Operands of a collective operation.
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

/// Action of a thread at a barrier of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    /// Waits for the other threads.
    Sync,
    /// Arrives and continues.
    Arrive,
    /// Waits, and returns the number of threads whose predicate is true.
    Count(Reg),
    /// Waits, and returns whether the predicate is true in all threads.
    All(Pred),
    /// Waits, and returns whether the predicate is true in any thread.
    Any(Pred),
}

/// Operation on a barrier of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Barrier {
    pub kind: BarrierKind,
    pub id: Reg,
    /// Number of threads that take part; all if absent.
    pub count: Option<Reg>,
    pub source: PredSource,
}

/// Function that the device runtime provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Builtin {
    Vprintf,
    Malloc,
    Free,
    AssertFail,
    SetConditional,
}

/// Location of a parameter in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slot {
    /// In a register.
    Row(Reg),
    /// In the frame's local memory, at an offset.
    Memory(u32),
}

/// Parameter of a call or of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Param {
    pub slot: Slot,
    pub bytes: u32,
}

/// Callee of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Callee {
    /// Index of the function in the module.
    Function(u32),
    Indirect(Reg),
    Builtin(Builtin),
}

/// Function call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub callee: Callee,
    pub args: Box<[Param]>,
    pub returns: Box<[Param]>,
}

/// Operation of a carry-chain instruction.
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

/// Comparison whose result may be combined with a predicate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Test {
    pub compare: Compare,
    pub a: Reg,
    pub b: Reg,
    pub combine: Option<(Logic, PredSource)>,
}

/// Operation of an instruction.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    /// Computes rows from rows.
    Alu {
        f: Alu,
        ops: Ops,
    },
    /// `setp`: sets the predicate `d`, and its complement `q` if present.
    SetPredicate {
        test: Box<Test>,
        d: Pred,
        q: Option<Pred>,
    },
    /// `setp` without a combined predicate or a complement.
    Compare {
        compare: Compare,
        d: Pred,
        a: Reg,
        b: Reg,
    },
    /// `set`: stores `value` where the test holds, 0 elsewhere.
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
    /// Computes the offset in local memory of a variable of this frame.
    FrameAddress {
        d: Reg,
        offset: u32,
    },
    /// `isspacep`.
    IsSpace {
        d: Pred,
        a: Reg,
        space: AddressSpace,
        /// For the global space: whether to test for `.const` variables, or for all other addresses.
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
    /// Instruction that this device cannot execute, with the reason.
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
    /// `alloca`: allocates memory of the frame, freed when the frame ends.
    Allocate {
        d: Reg,
        bytes: Reg,
        align: u32,
    },
    /// End of a function without `ret`.
    FallOff,
    /// `prefetch`, `discard` and other instructions without effect on this device.
    Nothing,
    /// `griddepcontrol.launch_dependents`: this block permits the launch of dependent grids.
    LaunchDependents,
    /// Operation on groups of `cp.async`.
    CopyGroup(CopyGroup),
    /// `cp.async.mbarrier.arrive`: the thread's copies arrive at an `mbarrier`. All earlier ones are
    /// complete.
    CopiesArrive(Box<Place>),
}

/// Decoded instruction.
#[derive(Debug, Clone)]
pub(crate) struct Insn {
    pub op: Op,
    pub guard: PredSource,
    pub line: u32,
}

/// Decoded function, shared by the kernels that call it.
#[derive(Debug, Clone, Default)]
pub(crate) struct FunctionCode {
    /// Instructions. Branch targets are indices into this list.
    pub instructions: Vec<Insn>,
    /// Number of rows of the frame.
    pub rows: u32,
    /// Number of predicates of the frame.
    pub preds: u32,
    /// Rows of constants, with their values.
    pub constants: Vec<(Reg, u64)>,
    /// Rows of addresses in dynamic shared memory, with their offsets from its start.
    pub dynamic: Vec<(Reg, u64)>,
    /// Bytes of the frame's local memory, a multiple of 16.
    pub local_bytes: u32,
    /// Locations of the parameters in the frame.
    pub params: Vec<Param>,
    /// Locations of the results in the frame.
    pub returns: Vec<Param>,
}
