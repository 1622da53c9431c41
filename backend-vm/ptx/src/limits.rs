//! Limits on the resources that an image may use. The bytes come from a hostile guest, so every
//! quantity that it controls has a limit.

/// Maximum bytes of PTX text, after decompression.
pub const MAX_PTX_BYTES: usize = 256 << 20;
/// Maximum bytes of an initialised or zeroed variable.
pub const MAX_VARIABLE_BYTES: u64 = 8 << 30;
/// Maximum bytes of explicit initialisers of one variable.
pub const MAX_INITIALISER_BYTES: u64 = 256 << 20;
/// Maximum nesting of braces in code and in initialisers.
pub const MAX_NESTING: usize = 64;
/// Maximum number of registers and constants of one function.
pub const MAX_ROWS: usize = 1 << 16;
/// Maximum number of instructions of one kernel with every function that it calls.
pub const MAX_INSTRUCTIONS: usize = 1 << 24;
/// Maximum bytes of kernel parameters (PTX ISA 8.1 and sm_70 on).
pub const MAX_PARAM_BYTES: u32 = 32_764;
/// Maximum bytes of shared memory of a block, static and dynamic together.
pub const MAX_SHARED_BYTES: u32 = 227 << 10;
/// Maximum bytes of static shared memory that a kernel may declare.
pub const MAX_STATIC_SHARED_BYTES: u32 = 227 << 10;
/// Maximum bytes of local memory of one thread: its stack.
pub const MAX_LOCAL_BYTES: u32 = 512 << 10;
/// Maximum bytes of registers that the interpreter allocates for one block.
pub const MAX_BLOCK_ROW_BYTES: usize = 1 << 30;
/// Maximum bytes of local memory that the interpreter allocates for one block.
pub const MAX_BLOCK_LOCAL_BYTES: usize = 1 << 30;
/// Maximum number of threads of a block.
pub const MAX_BLOCK_THREADS: u32 = 1024;
/// Maximum number of elements of a matrix that is distributed over the lanes of a warp.
pub const MAX_MATRIX_ELEMENTS: u32 = 1024;
/// Maximum depth of calls of one thread.
pub const MAX_CALL_DEPTH: u32 = 4096;
