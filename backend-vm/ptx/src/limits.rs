//! Bounds on what an image may ask of the engine. The bytes come from a guest
//! that means harm, so every quantity it controls has one.

/// Longest PTX text that is accepted, after decompression, in bytes.
pub const MAX_PTX_BYTES: usize = 256 << 20;
/// Largest initialised or zeroed variable, in bytes.
pub const MAX_VARIABLE_BYTES: u64 = 8 << 30;
/// Most explicit initialiser bytes of one variable.
pub const MAX_INITIALISER_BYTES: u64 = 256 << 20;
/// Deepest nesting of braces in code and in initialisers.
pub const MAX_NESTING: usize = 64;
/// Most registers and constants that one function may use.
pub const MAX_ROWS: usize = 1 << 16;
/// Most instructions of one kernel with everything it calls.
pub const MAX_INSTRUCTIONS: usize = 1 << 24;
/// Most bytes of kernel parameters (PTX ISA 8.1 and sm_70 on).
pub const MAX_PARAM_BYTES: u32 = 32_764;
/// Most bytes of shared memory of a block, static and dynamic together.
pub const MAX_SHARED_BYTES: u32 = 227 << 10;
/// Most static shared memory a kernel may declare, in bytes.
pub const MAX_STATIC_SHARED_BYTES: u32 = 227 << 10;
/// Most bytes of local memory of one thread: its stack.
pub const MAX_LOCAL_BYTES: u32 = 512 << 10;
/// Most bytes of registers that the interpreter holds for one block.
pub const MAX_BLOCK_ROW_BYTES: usize = 1 << 30;
/// Most bytes of local memory that the interpreter holds for one block.
pub const MAX_BLOCK_LOCAL_BYTES: usize = 1 << 30;
/// Most threads of a block.
pub const MAX_BLOCK_THREADS: u32 = 1024;
/// Most elements of a matrix that the lanes of a warp hold.
pub const MAX_MATRIX_ELEMENTS: u32 = 1024;
/// Deepest chain of calls of one thread.
pub const MAX_CALL_DEPTH: u32 = 4096;
