//! Objects that programs hold by handles, and the contexts that they belong to.

pub mod array;
pub mod capture_mode;
pub mod compiled_code;
pub mod context;
pub mod context_events;
pub mod core_dump;
pub mod event;
pub mod function;
pub mod green;
pub mod image;
pub mod jit;
pub mod legacy;
pub mod link;
pub mod module;
pub mod reference;
pub mod sharing;
pub mod storage;
pub mod stream;
pub mod texture;
